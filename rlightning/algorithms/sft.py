"""Supervised fine-tuning, such as a warm start for RL."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlightning.errors import ConfigError, did_you_mean
from rlightning.hooks import call_hook
from rlightning.module import RLModule
from rlightning.module.batching import balance
from rlightning.objectives import cross_entropy
from rlightning.types import Prompt, RolloutBatch, Sample, single_turns


class SFT(RLModule):
    """Trains on completions from the data set; the loss is over their tokens only.

    No engine is started and no reward function is called. Validation reports the mean loss of a token,
    ``val/<set>/loss``.

    Args:
        model: see :class:`~rlightning.module.RLModule`, whose arguments except ``samples_per_prompt`` are accepted.
        completion_column: the prompt set's column of completions. The data module tokenises it with its prompt as one
            text, adds an end-of-sequence token, and checks every row before the first step.
        lr: AdamW's learning rate.
    """

    generates = False

    def __init__(
        self, model: str | Path, *, completion_column: str = "completion", lr: float = 1e-5, **kwargs: Any
    ) -> None:
        super().__init__(model, samples_per_prompt=1, lr=lr, **kwargs)
        self.completion_column = completion_column
        self.policy_objective = cross_entropy

    def check_columns(self, columns: Sequence[str], source: str) -> None:
        """Raise a ConfigError for a prompt set without the completion column; called by the data module."""
        super().check_columns(columns, source)
        if self.completion_column not in columns:
            raise ConfigError(
                f"{source}: completion_column='{self.completion_column}' does not exist. "
                f"{did_you_mean(self.completion_column, columns)}"
            )

    def read_columns(self, columns: Sequence[str]) -> list[str]:
        """Return the completion column in a list: besides the prompts, a resumed run must find its values unchanged."""
        return [self.completion_column]

    def rollout(self, prompts: list[Prompt]) -> RolloutBatch:
        """Return a packed batch of the prompts, each with the completion from its row; nothing is sampled."""
        call_hook(self.trainer, self, "on_rollout_start", prompts)
        batch = self._pack(prompts)
        call_hook(self.trainer, self, "on_rollout_end", batch)
        return batch

    def compute_rewards(self, batch: RolloutBatch) -> Tensor:
        """Return zeros, one for each trajectory: [M]; there are no rewards."""
        return torch.zeros(batch.num_trajectories, dtype=torch.float32)

    def compute_advantages(self, batch: RolloutBatch) -> Tensor:
        """Return ones, one for each token: [T]; all tokens have the same weight."""
        return torch.ones(batch.num_tokens, dtype=torch.float32)

    def log_evaluation(self, prompts: list[Prompt], dataloader_idx: int, prefix: str) -> None:
        """Log the mean token loss of all ranks' prompts as ``<prefix>/<set>/loss``. Every rank must call it."""
        batch, limit = self._pack(prompts), self.plan.max_tokens_per_microbatch
        batch.shares_prefixes = self.decide_sharing(batch, limit)
        batch = balance(batch, self.costs, tensor_parallel_size=self.tensor_parallel_size)
        logprobs = self.evaluate_logprobs(batch, self.loaded_actor, temperature=1.0, max_tokens=limit)
        mask = batch.is_sampled
        loss, tokens = self.all_sum(torch.stack([-logprobs.float()[mask].sum(), mask.sum().float()])).tolist()
        name = self.trainer.datamodule.validation_sets[dataloader_idx].name  # type: ignore[attr-defined]
        # With tokens as weights, the average over batches is the mean over all tokens.
        self.log(
            f"{prefix}/{name}/loss",
            loss / max(tokens, 1),
            on_epoch=True,
            batch_size=int(tokens),
            add_dataloader_idx=False,
        )

    def _pack(self, prompts: list[Prompt]) -> RolloutBatch:
        return self.batch_type.pack(single_turns(prompts, [[self._completion(prompt)] for prompt in prompts]))

    def _completion(self, prompt: Prompt) -> Sample:
        tokens = prompt.completion_ids
        if tokens is None:
            raise ConfigError(
                f"Prompt {prompt.index} has no completion_ids. Build it with PromptFormat(completion_column="
                f"'{self.completion_column}'), as PromptDataModule does."
            )
        return Sample(
            token_ids=tokens,
            logprobs=[0.0] * len(tokens),
            weight_versions=[self.weight_version] * len(tokens),
            text=str(prompt.columns[self.completion_column]),
            finish_reason="stop",
        )
