"""``max_failed_share`` is a share of a step's samples, refills and all ranks included, and of a validation set's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from rank_processes import finish, start_calls
from tiny import in_this_process, make_data, make_trainer, save_model

from rlightning.algorithms import DAPO, GRPO
from rlightning.data import ValidationSet
from rlightning.errors import RewardError
from rlightning.hooks import RLCallback
from rlightning.parallel import DDP
from rlightning.rewards import FailureCount, RewardFunction


async def fail_last(prompt: str, completion: str) -> float:
    """Fails on the last of the sixteen sums."""
    if prompt == "3+3=":
        raise ValueError("no answer")
    return float(len(completion) % 2)


@in_this_process
async def fail_last_here(prompt: str, completion: str) -> float:
    return await fail_last(prompt, completion)


def make_dapo(model: str, **arguments: Any) -> DAPO:
    """All of the first 8 samples have one reward; of the refill's 8 samples two fail and the others differ in pairs."""
    calls = iter(range(1000))

    async def reward(completion: str) -> float:
        number = next(calls)
        if number in (8, 9):
            raise ValueError("no answer")
        return float(number > 8 and number % 2)

    settings = {"prompts_per_step": 4, "samples_per_prompt": 2, "max_refills": 1, "check_rewards": False}
    return DAPO(model, rewards=[reward], **settings, **arguments)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
@pytest.mark.long
def test_refills_failures_are_share_of_the_step(model: str, tmp_path: Path) -> None:
    # 2 of 16: a quarter of the refill, an eighth of the step
    make_trainer(tmp_path, 1).fit(make_dapo(model, max_failed_share=0.13), make_data(tmp_path))
    with pytest.raises(
        RewardError,
        match=r"^at least 2 of 16 samples of the step have no reward, more than max_failed_share=0\.12 allows",
    ):
        make_trainer(tmp_path, 1).fit(make_dapo(model, max_failed_share=0.12), make_data(tmp_path))


def validate(
    model: str, folder: Path, share: float, reward: Callable[..., Any] = fail_last_here, **arguments: Any
) -> None:
    """Sixteen prompts in batches of 5, 5, 5 and 1; the one of the last batch fails."""
    module = GRPO(model, rewards=[RewardFunction(reward, timeout=500)], max_failed_share=share)
    data = make_data(folder, validation={"sums": ValidationSet(str(folder / "sums.jsonl"))}, validation_batch_size=5)
    make_trainer(folder, 1, **arguments).validate(module, data, verbose=False)


@pytest.mark.slow
@pytest.mark.long
def test_last_batchs_failure_is_share_of_set(model: str, tmp_path: Path) -> None:
    validate(model, tmp_path, 0.0625)  # 1 of 16
    with pytest.raises(
        RewardError, match=r"^at least 1 of 16 samples of the validation set 'sums' have no reward.*0\.06 allows"
    ):
        validate(model, tmp_path, 0.06)


@pytest.mark.long
def test_limited_validations_share_is_of_validated_rows(model: str, tmp_path: Path) -> None:
    async def fail_first(prompt: str) -> float:
        if prompt == "0+0=":
            raise ValueError("no answer")
        return 1.0

    data = make_data(
        tmp_path, validation={"sums": ValidationSet(str(tmp_path / "sums.jsonl"))}, validation_batch_size=5
    )
    module = GRPO(model, rewards=[fail_first], max_failed_share=0.1)
    with pytest.raises(RewardError, match=r"^1 of 5 samples of the validation set 'sums' have no reward"):
        make_trainer(tmp_path, 1, limit_val_batches=1).validate(module, data, verbose=False)


@pytest.mark.long
def test_each_step_counts_anew(model: str, tmp_path: Path) -> None:
    class Counts(RLCallback):
        def __init__(self) -> None:
            self.failed: list[float] = []

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            self.failed.append(trainer.callback_metrics["reward/failed"].item())

    counts = Counts()
    module = GRPO(model, rewards=[fail_last_here], prompts_per_step=4, samples_per_prompt=2, max_failed_share=0.25)
    make_trainer(tmp_path, 8, counts).fit(module, make_data(tmp_path))  # the last prompt comes in each fourth step
    assert counts.failed == [0, 0, 0, 0.25] * 2


def validate_rank(folder: Path, model: str) -> None:
    validate(model, folder, 0.0625, fail_last, devices=2, strategy=DDP())


@pytest.mark.processes
def test_one_ranks_failures_are_share_of_all(model: str, tmp_path: Path) -> None:
    # Rank 0 has 3, 3, 3 and 1 of the sixteen prompts, the last one among them.
    finish(start_calls(validate_rank, 2, tmp_path, model))


def test_failure_beyond_all_that_may_fail_ends_at_once() -> None:
    count = FailureCount(10, 0.2, " of the step")
    count.num_scored = 5
    count.add("judge", 0, "Traceback (most recent call last):\n  ...\nValueError: first")
    count.add("judge", 1, "ValueError: second")
    with pytest.raises(RewardError) as caught:
        count.add("judge", 2, "ValueError: third")
    assert caught.value.line == (
        "at least 3 of 10 samples of the step have no reward, more than max_failed_share=0.2 allows. The first "
        "failure, of 'judge' on sample 0: ValueError: first"
    )
    assert caught.value.details == "Traceback (most recent call last):\n  ...\nValueError: first"
    other = FailureCount(10, 0.2, " of the step")
    with pytest.raises(RewardError, match=r"^3 of 10 samples.* allows\. Other ranks have logged the failures\.$"):
        other.check(3, 10)  # once all have been scored
