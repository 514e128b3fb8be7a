"""A loop that is not Lightning's, with all that callbacks look at. Steps can be cut short, or into micro-batches."""

from pathlib import Path
from typing import Any

import torch
from observed_run import add_rewards, make_batch, make_completion, make_prompt
from torch import nn

from rlightning.hooks import call_hook
from rlightning.types import single_turns

STEP = (
    "on_rollout_start",
    "on_weight_sync_start",
    "on_engine_wake",
    "on_weight_sync_end",
    "on_engine_sleep",
    "on_rollout_end",
    "on_reward_start",
    "on_reward_end",
    "on_update_start",
    "on_update_end",
)
"""The hooks of a step in their order."""


class Policy(nn.Module):
    """One weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))
        self.saved: list[str] = []

    def save_hf(self, path: Path) -> None:
        """Note what would be saved."""
        self.saved.append(path.name)


class Loop:
    """A loop of plain PyTorch.

    Args:
        folder: of the run.
        callbacks: get all hooks.
        num_microbatches: each is a rollout of its own; the last one's update takes the optimizer's step.
    """

    def __init__(self, folder: Path, *callbacks: Any, num_microbatches: int = 1) -> None:
        self.callbacks, self.default_root_dir = list(callbacks), str(folder)
        self.num_microbatches = num_microbatches
        self.device = torch.device("cpu")
        self.policy = Policy()
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=0.1)
        self.global_step = 0

    def barrier(self) -> None:
        """There is one process."""

    def fit(self, num_steps: int, **kwargs: Any) -> None:
        """Take steps from beginning to end."""
        call_hook(self, self.policy, "setup", "fit")
        for _ in range(num_steps):
            self.step(**kwargs)
        call_hook(self, self.policy, "on_train_end")
        call_hook(self, self.policy, "teardown", "fit")

    def step(self, cut_after: str | None = None) -> None:
        """Take one step: 22 tokens and four completions of two prompts a micro-batch.

        Args:
            cut_after: the hook behind which the step is cut short, if it is.
        """
        for number in range(1, self.num_microbatches + 1):
            batch = make_batch()
            for hook in STEP:
                if hook == "on_reward_end":
                    add_rewards(batch)
                if hook == "on_update_start":
                    batch.advantages = batch.to_tokens(torch.tensor([1.0, -1.0, 0.0, 0.0]))
                if hook == "on_update_end":
                    self.train(number == self.num_microbatches)
                call_hook(self, self.policy, hook, *self.arguments(hook, batch, number))
                if hook == cut_after:
                    raise KeyboardInterrupt

    def train(self, is_last: bool) -> None:
        """Add to the gradient; step on it behind the last micro-batch."""
        self.policy.weight.sum().backward()
        if is_last:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.global_step += 1

    def arguments(self, hook: str, batch: Any, number: int) -> tuple[Any, ...]:
        """Return the arguments of a hook after the loop and the policy."""
        if hook == "on_rollout_start":
            return ([make_prompt(100 * self.global_step + number)],)
        if hook.startswith("on_weight_sync"):
            return (self.global_step,)
        return () if hook.startswith("on_engine") else (batch,)

    def predict(self, num_batches: int = 3) -> None:
        """Two prompts a batch."""
        call_hook(self, self.policy, "setup", "predict")
        call_hook(self, self.policy, "on_predict_start")
        for number in range(num_batches):
            prompts = [make_prompt(2 * number + i) for i in range(2)]
            groups = single_turns(prompts, [[make_completion("4")]] * 2)
            call_hook(self, self.policy, "on_predict_batch_end", list(zip(prompts, groups, strict=True)), None, number)
        call_hook(self, self.policy, "on_predict_end")
        call_hook(self, self.policy, "teardown", "predict")
