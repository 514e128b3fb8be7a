"""Two ranks, in two real processes, take the steps that one takes."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from random_trajectories import two_branches
from rank_processes import each_run, finish, start_calls
from small_steps import as_tensors, assert_close, two_optimizers, weight_lists
from tiny import ActorSampler, UseSampler, make_algorithm, make_data, make_trainer

from rlightning.algorithms import GRPO
from rlightning.parallel import DDP
from rlightning.rollout import Sampling
from rlightning.types import Prompt, RolloutBatch, Trajectory

pytestmark = pytest.mark.processes


class Picky(GRPO):
    """Drops what prompt 0 gives, takes another prompt in its place, and notes what it was given."""

    max_refills = 1

    def rollout(self, prompts: list[Prompt]) -> RolloutBatch:
        self.taken = [*getattr(self, "taken", []), [prompt.index for prompt in prompts]]
        return super().rollout(prompts)

    def keep_sequences(self, batch: RolloutBatch) -> torch.Tensor:
        return torch.tensor([prompt.index != 0 for prompt in batch.prompts])


class OneGroup(GRPO):
    """Fails all rewards but those of one prompt: fewer groups than ranks are left, and than minibatches."""

    def compute_rewards(self, batch: RolloutBatch) -> torch.Tensor:
        rewards = super().compute_rewards(batch)
        return torch.where(torch.tensor([prompt.index % 4 == 1 for prompt in batch.prompts]), rewards, torch.nan)


class TwoOptimizers(GRPO):
    configure_optimizers = two_optimizers


class Branching(ActorSampler):
    """Makes trajectories of two branches, but for the first of each group; the second one's history is shorter."""

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling, *_: Any
    ) -> list[list[Trajectory]]:
        starts = [(prompt, number, sampling) for prompt in prompts for number in range(num_samples)]
        shorter = [
            (p._replace(index=p.index + 100, token_ids=p.token_ids[max(n - 1, 0) :]), n, s) for p, n, s in starts
        ]
        made = [
            two_branches(prompt, first, again.token_ids, second) if number else Trajectory.single_turn(prompt, first)
            for (prompt, number, _), first, (again, *_), second in zip(
                starts, self.complete(starts), shorter, self.complete(shorter), strict=True
            )
        ]
        return [made[n : n + num_samples] for n in range(0, len(made), num_samples)]


def train(folder: Path, model: str, case: tuple[str, dict[str, Any]], num_ranks: int = 1) -> dict[str, Any]:
    """Three steps of one of the classes above, or GRPO; of trajectories of two branches in the run with a KL term."""
    algorithm, arguments = case
    # What sequences share would depend on the ranks, and norms round to float32.
    usual = {"samples_per_prompt": 4, "max_tokens_per_microbatch": 23, "kl_coef": 0.0, "share_prefixes": False}
    module = make_algorithm(globals()[algorithm], model, **usual | arguments)
    ranks: dict[str, Any] = {"devices": num_ranks, "strategy": DDP()} if num_ranks > 1 else {}
    # In float32 Adam takes a whole step where a gradient is nothing but rounding.
    sampler = UseSampler(Branching if "kl_coef" in arguments else ActorSampler)
    data: Any = make_data(folder)
    make_trainer(folder, 3, sampler, precision="64-true", **ranks).fit(module, data)
    taken = module.taken if isinstance(module, Picky) else None
    return {"weights": weight_lists(module), "taken": taken, "position": data.stream.position}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("GRPO", {}),  # in the first step the ranks would cut their own completions into 4 and 3 micro-batches
    "branches": ("GRPO", {"updates_per_rollout": 3, "prompts_per_step": 6, "epochs_per_rollout": 2, "kl_coef": 0.1}),
    "one group": ("OneGroup", {"updates_per_rollout": 2}),
    "two optimizers": ("TwoOptimizers", {"updates_per_rollout": 2}),
    "refills": ("Picky", {}),
}


def train_cases(folder: Path, model: str) -> dict[str, dict[str, Any]]:
    folder = folder / os.environ["RANK"]
    folder.mkdir()
    return {name: train(folder, model, CASES[name], 2) for name, _ in each_run({name: {} for name in CASES})}


@pytest.fixture(scope="module")
def two(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All cases, on two ranks."""
    return finish(start_calls(train_cases, 2, tmp_path_factory.mktemp("two"), model_folder))


@pytest.mark.parametrize("name", [name for name in CASES if name != "refills"])
def test_two_ranks_are_one(name: str, model_folder: str, two: Any, tmp_path: Path) -> None:
    one = train(tmp_path, model_folder, CASES[name])["weights"]
    first, second = (rank[name]["weights"] for rank in two)
    assert first == second
    assert_close(as_tensors(first), as_tensors(one), 1e-10)


def test_refill_needed_by_one_rank_includes_both(two: Any) -> None:
    assert [rank["refills"]["position"] for rank in two] == [14, 14]
    assert two[0]["refills"]["taken"] == [[0, 1], [4], [6, 7], [10, 11]]
    assert two[1]["refills"]["taken"] == [[2, 3], [5], [8, 9], [12, 13]]
