"""Which trajectories are rewarded and trained, by their status."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny import ActorSampler, UseSampler, make_algorithm, make_data, make_grpo, make_trainer

from rlightning.algorithms import GRPO
from rlightning.errors import EnvironmentFailedError
from rlightning.hooks import RLCallback
from rlightning.rewards import RewardFunction
from rlightning.rollout import OnCompleted, Sampling
from rlightning.types import Prompt, RolloutBatch, Trajectory

NOT_SAMPLED = ["timeout", "aborted", "failed"]
"""Of the second trajectory of the first three prompts; all others have finished, but for the first, which is cut."""


class Statuses(ActorSampler):
    """Gives trajectories their statuses, whatever became of them."""

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling, on_completed: OnCompleted | None = None
    ) -> list[list[Trajectory]]:
        groups = super().generate(prompts, num_samples, sampling, on_completed)
        for group in groups:
            for trajectory in group:
                trajectory.status = "finished"
        groups[0][0].status = "truncated"
        for group, status in zip(groups, NOT_SAMPLED, strict=False):
            group[1].status = status  # type: ignore[assignment]
        return groups


class Seen(RLCallback):
    """Keeps the batch of the rollout and that of the update."""

    def on_rollout_end(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        self.rollout = [one.status for one in batch.trajectories]

    def on_update_start(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        self.update = [one.status for one in batch.trajectories]
        self.is_sampled = batch.is_sampled.tolist()
        self.tokens = [one.num_sampled for one in batch.trajectories]


def train(model_folder: str, folder: Path, **arguments: Any) -> tuple[Seen, dict[str, float]]:
    seen = Seen()
    trainer = make_trainer(folder, 1, UseSampler(Statuses), seen)
    module = make_grpo(model_folder, samples_per_prompt=3, validate_first=False, **arguments)
    trainer.fit(module, make_data(folder))
    return seen, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.long
@pytest.mark.parametrize(("count_timeouts", "left_out"), [(False, NOT_SAMPLED), (True, ["aborted", "failed"])])
def test_what_was_not_sampled_reaches_no_update(
    count_timeouts: bool, left_out: list[str], model_folder: str, tmp_path: Path
) -> None:
    seen, metrics = train(model_folder, tmp_path, count_timeouts=count_timeouts)
    others = [["finished", status, "finished"] for status in NOT_SAMPLED[1:]]
    assert seen.rollout == ["truncated", "timeout", "finished", *others[0], *others[1], *["finished"] * 3]
    assert seen.update == [status for status in seen.rollout if status not in left_out]
    assert metrics["trajectory/not_sampled"] == len(left_out)


@pytest.mark.long
def test_mask_truncated_trains_no_token_of_cut_trajectory(model_folder: str, tmp_path: Path) -> None:
    seen, _ = train(model_folder, tmp_path, mask_truncated=True)
    assert seen.update[0] == "truncated" and seen.tokens[0] > 0
    assert sum(seen.is_sampled) == sum(seen.tokens[1:])


@pytest.mark.long
def test_masked_timeouts_are_those_that_do_not_count(model_folder: str, tmp_path: Path) -> None:
    """Keys of different statuses do not meet: what ran out of time and counts is trained, whatever is masked."""
    seen, _ = train(model_folder, tmp_path, mask_truncated=True, count_timeouts=True)
    assert seen.update[:2] == ["truncated", "timeout"]
    assert sum(seen.is_sampled) == sum(seen.tokens[1:])


def count_assistant_turns(turns: list[dict[str, Any]], completion: str) -> float:
    """A reward function that reads the messages."""
    assert turns == [{"role": "assistant", "content": completion}]
    return float(len(turns))


@pytest.mark.long
def test_reward_function_gets_the_turns(model_folder: str, tmp_path: Path) -> None:
    rewards = [RewardFunction(lambda turns, completion: count_assistant_turns(turns, completion), name="turns")]
    _, metrics = train(model_folder, tmp_path, rewards=rewards)
    assert metrics["reward/mean"] == 1.0 and metrics["reward/failed"] == 0.0


class Late(ActorSampler):
    """Lets all trajectories of the first calls time out."""

    num_late, num_calls = 1, 0

    def generate(self, *arguments: Any) -> list[list[Trajectory]]:
        groups = super().generate(*arguments)
        self.num_calls += 1
        for trajectory in [one for group in groups for one in group]:
            trajectory.status = "timeout" if self.num_calls <= self.num_late else "finished"
        return groups

    def check_timeouts(self) -> None:
        raise EnvironmentFailedError(f"All timed out in {self.num_calls} calls.")


class AlwaysLate(Late):
    num_late = 3


class Refilled(GRPO):
    """Samples other prompts for groups without trajectories."""

    max_refills = 2


@pytest.mark.parametrize("kind", [Late, AlwaysLate])
def test_timeouts_end_the_run_only_after_the_last_refill(kind: type[Late], model_folder: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, 1, UseSampler(kind))
    module = make_algorithm(Refilled, model_folder, validate_first=False)
    if kind is AlwaysLate:
        with pytest.raises(EnvironmentFailedError, match=r"^All timed out in 3 calls\."):
            trainer.fit(module, make_data(tmp_path))
    else:
        trainer.fit(module, make_data(tmp_path))
        assert module.weight_version == 1 and trainer.callback_metrics["trajectory/not_sampled"] > 0
