"""A model small enough to train in a test, and a Trainer for it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tiny import save_model

from rlightning.data import PromptDataModule
from rlightning.module import RLModule
from rlightning.rollout import Generator, OnCompleted, Sampling
from rlightning.types import Completion, Prompt


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3 of some thousand parameters that reads characters; token 0 ends a sequence."""
    return save_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


class ActorGenerator(Generator):
    """Samples from the module's own actor: an engine without an engine's process."""

    def __init__(self, module: RLModule) -> None:
        self.module = module

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling, on_completed: OnCompleted | None = None
    ) -> list[list[Completion]]:
        """Sample ``num_samples`` completions of each prompt, all of them a token at a time."""
        sequences = [list(prompt.token_ids) for prompt in prompts for _ in range(num_samples)]
        logprobs: list[list[float]] = [[] for _ in sequences]
        for _ in range(sampling.max_new_tokens):
            probabilities = self._predict(sequences)
            for sequence, chances, sampled in zip(sequences, probabilities, logprobs, strict=True):
                if not sampled or sequence[-1] != 0:
                    token = int(chances.multinomial(1))
                    sequence.append(token)
                    sampled.append(chances[token].log().item())
        completions = [
            self._complete(sequence[-len(sampled) :], sampled)
            for sequence, sampled in zip(sequences, logprobs, strict=True)
        ]
        return [completions[i : i + num_samples] for i in range(0, len(completions), num_samples)]

    def _predict(self, sequences: list[list[int]]) -> torch.Tensor:
        """Probabilities of the token that follows each sequence: [N, V]."""
        bounds = torch.tensor([0, *np.cumsum([len(s) for s in sequences])], dtype=torch.int32)
        longest = max(len(s) for s in sequences)
        logits = self.module.loaded_actor(
            torch.tensor([[token for s in sequences for token in s]]),
            position_ids=torch.tensor([[i for s in sequences for i in range(len(s))]]),
            use_cache=False,
            cu_seq_lens_q=bounds,
            cu_seq_lens_k=bounds,
            max_length_q=longest,
            max_length_k=longest,
        ).logits
        probabilities: torch.Tensor = logits[0, bounds[1:].long() - 1].float().softmax(-1)
        return probabilities

    def _complete(self, token_ids: list[int], logprobs: list[float]) -> Completion:
        return Completion(
            text=str(self.module.tokenizer.decode(token_ids, skip_special_tokens=True)),
            token_ids=np.array(token_ids, np.int64),
            logprobs=np.array(logprobs, np.float32),
            weight_versions=np.full(len(token_ids), self.module.weight_version, np.int32),
            finish_reason="stop" if token_ids[-1] == 0 else "length",
        )


class UseActorGenerator(Callback):
    """Gives the module something to generate with, as VLLMRollout does."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called before the actor is loaded."""
        assert isinstance(pl_module, RLModule)
        pl_module.generator = ActorGenerator(pl_module)
        pl_module.sampling = Sampling(max_new_tokens=6)


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Trainer]:
    """``fit(module, max_steps)``: the real Trainer on sixteen sums, without a console."""
    rows = [json.dumps({"prompt": f"{a}+{b}=", "completion": str(a + b)}) for a in range(4) for b in range(4)]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))

    def run(module: RLModule, max_steps: int) -> Trainer:
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=max_steps,
            max_epochs=-1,
            callbacks=[UseActorGenerator()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(module, PromptDataModule(str(tmp_path / "sums.jsonl"), max_prompt_tokens=16))
        return trainer

    return run
