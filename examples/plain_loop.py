"""A training loop of one's own, in plain PyTorch, with vLLM's completions of the current weights.

Teaches a model to answer with digits, by REINFORCE: ``python examples/plain_loop.py MODEL_FOLDER``.
"""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlightning.callbacks import VLLMRollout
from rlightning.hooks import call_hook
from rlightning.models import load_config, load_policy, load_tokenizer, max_model_length, packed_logprobs
from rlightning.types import Prompt, RolloutBatch

log = logging.getLogger("plain_loop")


class Policy:
    """What VLLMRollout asks of a module, and nothing else."""

    def __init__(self, model_path: str) -> None:
        self.model_path = model_path
        self.tokenizer = load_tokenizer(model_path)
        self.max_model_length = max_model_length(load_config(model_path))
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.weight_version = 0
        self.model: Any = load_policy(model_path, torch.float32).to(self.device)  # type: ignore[arg-type]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights by their Hugging Face names."""
        yield from self.model.named_parameters()

    @torch.no_grad()
    def score(self, batch: RolloutBatch, dtype: torch.dtype) -> Tensor:
        """[T] at temperature 1. ``dtype`` is the engine's, by default that of :meth:`logprobs`, too."""
        return self.logprobs(batch.to(self.device))

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """[T], 0 where not sampled."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return packed_logprobs(self.model, batch)[0]


def main(model_path: str, num_steps: int = 10, run_dir: str = "runs/plain_loop") -> list[float]:
    """Train for ``num_steps``; the mean reward of each."""
    policy = Policy(model_path)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-3)
    rollout = VLLMRollout(max_new_tokens=16)
    loop = SimpleNamespace(callbacks=[rollout], default_root_dir=Path(run_dir))
    texts = [f"{a}+{b}=" for a in range(4) for b in range(4)]
    prompts = [Prompt(i, text, policy.tokenizer(text).input_ids, {}) for i, text in enumerate(texts)]
    rewards: list[float] = []
    rollout.setup(loop, policy, "fit")
    try:
        while len(rewards) < num_steps:
            batch = RolloutBatch.pack(rollout.generate(prompts, 8, rollout.sampling)).to(policy.device)
            call_hook(loop, policy, "on_rollout_end", batch)
            shares = [sum(c.isdigit() for c in one.text) / max(len(one.text), 1) for one in batch.completions]
            reward = torch.tensor(shares, device=policy.device).view(len(prompts), 8)
            advantages = batch.to_tokens((reward - reward.mean(1, keepdim=True)).flatten())
            (-(advantages * policy.logprobs(batch)).sum() / batch.is_sampled.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            policy.weight_version += 1  # the engine is sent the weights when it is next asked
            call_hook(loop, policy, "on_update_end", batch)
            rewards.append(reward.mean().item())
            log.info("step %d: %.3f of a completion is digits", len(rewards), rewards[-1])
    finally:
        rollout.close()
    return rewards


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main(sys.argv[1])
