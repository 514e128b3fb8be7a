"""The order of the prompts, its position, and the shares of the ranks."""

from typing import Any

import pytest

from rlightning.data.stream import PromptStream
from rlightning.errors import ConfigError
from rlightning.types import Prompt


def make_prompts(count: int, prefix: str = "p") -> list[Prompt]:
    return [Prompt(i, f"{prefix}{i}", [i], {}) for i in range(count)]


def indices(prompts: list[Prompt]) -> list[int]:
    return [prompt.index for prompt in prompts]


def test_each_epoch_holds_every_prompt_once_reshuffled() -> None:
    stream = PromptStream(make_prompts(50), seed=3)
    first, second = indices(stream.take(50)), indices(stream.take(50))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first == indices(PromptStream(make_prompts(50), seed=3).take(50))
    assert first != indices(PromptStream(make_prompts(50), seed=4).take(50))


def test_unshuffled_stream_keeps_file_order_across_epochs() -> None:
    stream = PromptStream(make_prompts(5), shuffle=False)
    assert indices(stream.take(3)) == [0, 1, 2]
    assert indices(stream.take(4)) == [3, 4, 0, 1]


def test_ranks_share_what_one_rank_would_take() -> None:
    alone = indices(PromptStream(make_prompts(10), seed=1).take(8))
    shares = [indices(PromptStream(make_prompts(10), seed=1, rank=r, num_ranks=2).take(4)) for r in range(2)]
    assert shares[0] + shares[1] == alone


def test_stream_resume_is_exact_across_rank_counts() -> None:
    stream = PromptStream(make_prompts(10), seed=1, rank=0, num_ranks=2)
    stream.take(3)  # six over both ranks
    resumed = PromptStream(make_prompts(10), seed=1)
    resumed.load_state_dict(stream.state_dict())
    whole = PromptStream(make_prompts(10), seed=1)
    assert indices(whole.take(6)) + indices(resumed.take(9)) == indices(PromptStream(make_prompts(10), seed=1).take(15))


def test_state_at_step_start_excludes_prompts_taken_since() -> None:
    stream = PromptStream(make_prompts(10), shuffle=False)
    stream.take(2)
    stream.begin_step()
    stream.take(3)
    assert stream.state_dict()["position"] == 5
    assert stream.state_dict(at_step_start=True)["position"] == 2


@pytest.mark.parametrize(
    ("resumed", "message"),
    [
        (PromptStream(make_prompts(9)), "10 prompts, this run has 9"),
        (PromptStream(make_prompts(10), seed=7), "0 as seed, this run has 7"),
        (PromptStream(make_prompts(10), shuffle=False), "True as shuffle, this run has False"),
        (
            PromptStream(make_prompts(10, "q")),
            "not those that the checkpoint was written with, or in another order. Resume with",
        ),
    ],
)
def test_resume_with_other_data_is_refused(resumed: PromptStream, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resumed.load_state_dict(PromptStream(make_prompts(10)).state_dict())
    assert "\n" not in str(caught.value)


def with_columns(*levels: Any) -> list[Prompt]:
    return [Prompt(i, f"p{i}", [i], {"level": level, "note": i}) for i, level in enumerate(levels)]


def test_resume_with_other_columns_than_rewards_read_is_refused() -> None:
    saved = PromptStream(with_columns(1, 2, 3), columns=["level"]).state_dict()
    with pytest.raises(ConfigError, match=r"The column 'level' of the training prompts, which the rewards read") as no:
        PromptStream(with_columns(1, 2, 4), columns=["level"]).load_state_dict(saved)
    assert "\n" not in str(no.value)
    # Columns that only one of the two runs reads, and checkpoints that name none, are no reason.
    for columns in (["level"], [], ["note"]):
        PromptStream(with_columns(1, 2, 3), columns=columns).load_state_dict(saved)
    del saved["columns"]
    PromptStream(with_columns(1, 2, 4), columns=["level"]).load_state_dict(saved)
