"""Two ranks, in two real processes, take the steps that one takes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from tiny import copy_weights, make_data, make_trainer, save_model

from rlightning.algorithms import GRPO
from rlightning.rewards import RewardFunction
from rlightning.types import Prompt, RolloutBatch

TWO: dict[str, Any] = {"devices": 2, "strategy": "ddp_spawn"}


async def share_of_ones(completion: str) -> float:
    """A reward that a random model gets some of; async, so that it needs no process."""
    return completion.count("1") / max(len(completion), 1)


class Picky(GRPO):
    """Drops what prompt 0 gives, takes another prompt in its place, and notes what it was given."""

    max_refills = 1

    def rollout(self, prompts: list[Prompt]) -> RolloutBatch:
        self.taken = [*getattr(self, "taken", []), [prompt.index for prompt in prompts]]
        return super().rollout(prompts)

    def keep_sequences(self, batch: RolloutBatch) -> torch.Tensor:
        return torch.tensor([prompt.index != 0 for prompt in batch.prompts])


class WriteResult(Callback):
    """Writes what a rank has come to: its process ends with the fit."""

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        folder = Path(trainer.default_root_dir)
        torch.save(copy_weights(pl_module), folder / f"weights{trainer.global_rank}.pt")
        result = {"taken": getattr(pl_module, "taken", None), "position": trainer.datamodule.stream.position}
        (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(result))


def train(algorithm: type[GRPO], folder: Path, **kwargs: Any) -> None:
    module = algorithm(
        save_model(folder / "model"),
        rewards=[RewardFunction(share_of_ones)],
        prompts_per_step=4,
        samples_per_prompt=4,
        lr=1e-3,
        kl_coef=0.0,
        max_tokens_per_microbatch=23,
    )
    make_trainer(folder, 3, WriteResult(), **kwargs).fit(module, make_data(folder))


@pytest.mark.slow
@pytest.mark.timeout(120)  # ranks that wait for each other wait long
def test_two_ranks_with_unequal_numbers_of_microbatches_are_one(tmp_path: Path) -> None:
    """In the first step the ranks cut their shares into 4 and 3 micro-batches."""
    train(GRPO, tmp_path / "one")
    train(GRPO, tmp_path / "two", **TWO)
    one, first, second = (
        torch.load(tmp_path / name) for name in ("one/weights0.pt", "two/weights0.pt", "two/weights1.pt")
    )
    for name, weight in one.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], weight, atol=1e-6, rtol=0.0)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_refill_that_one_rank_needs_is_taken_by_both(tmp_path: Path) -> None:
    train(Picky, tmp_path, **TWO)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == {"taken": [[0, 1], [4], [6, 7], [10, 11]], "position": 14}
    assert second == {"taken": [[2, 3], [5], [8, 9], [12, 13]], "position": 14}
