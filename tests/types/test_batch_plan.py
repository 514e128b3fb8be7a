from typing import Any

import pytest

from rlightning.errors import ConfigError
from rlightning.types.batch_plan import BatchPlan

SIZES: dict[str, Any] = {
    "prompts_per_step": 12,
    "samples_per_prompt": 8,
    "updates_per_rollout": 3,
    "epochs_per_rollout": 2,
    "max_tokens_per_microbatch": 16384,
}


def test_the_arithmetic_is_said() -> None:
    plan = BatchPlan(**SIZES)
    assert plan.optimizer_steps == 6
    plan.check_world_size(2)
    assert plan.describe(2) == (
        "A step is 12 prompts x 8 samples = 96 completions (48 on each of 2 ranks), then 3 updates x 2 epochs = "
        "6 optimizer steps of 32 completions, in micro-batches of at most 16,384 tokens."
    )
    assert BatchPlan(**SIZES | {"epochs_per_rollout": 1}).describe(1) == (
        "A step is 12 prompts x 8 samples = 96 completions, then 3 updates = 3 optimizer steps of 32 completions, "
        "in micro-batches of at most 16,384 tokens."
    )
    assert BatchPlan(**SIZES | {"epochs_per_rollout": 1, "updates_per_rollout": 1}).describe(1) == (
        "A step is 12 prompts x 8 samples = 96 completions, then 1 optimizer step of 96 completions, "
        "in micro-batches of at most 16,384 tokens."
    )


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1])
def test_everything_is_at_least_one(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}={value} must be at least 1\.$"):
        BatchPlan(**SIZES | {name: value})


@pytest.mark.parametrize(
    ("prompts", "such_as"),
    [(10, "8 or 12"), (2, "4")],
)
def test_updates_divide_the_prompts(prompts: int, such_as: str) -> None:
    with pytest.raises(ConfigError) as error:
        BatchPlan(**SIZES | {"prompts_per_step": prompts, "updates_per_rollout": 4})
    assert str(error.value) == (
        f"prompts_per_step={prompts} cannot be split into updates_per_rollout=4 minibatches. "
        f"Use a multiple of 4, such as {such_as}."
    )


def test_ranks_divide_the_prompts_of_a_step() -> None:
    with pytest.raises(ConfigError) as error:
        BatchPlan(**SIZES).check_world_size(8)
    assert str(error.value) == ("prompts_per_step=12 cannot be split over 8 ranks. Use a multiple of 24, such as 24.")


def test_sequences_fit_the_model_and_the_microbatch() -> None:
    plan = BatchPlan(**SIZES | {"max_tokens_per_microbatch": 100})
    plan.check_sequence_length(40, 60, 100)
    with pytest.raises(ConfigError, match=r"40 \+ max_new_tokens=61 = 101 tokens, but .* end at 100\. Lower .* by 1\."):
        plan.check_sequence_length(40, 61, 100)
    with pytest.raises(ConfigError, match=r"= 101 tokens do not fit max_tokens_per_microbatch=100, .* >= 101\."):
        plan.check_sequence_length(40, 61, 1000)
