from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
import torch
from tiny import make_completion
from torch import Tensor

from rlightning.errors import ConfigError
from rlightning.types import Prompt, RolloutBatch, axis, single_turns
from rlightning.types.axes import split_lists


@dataclass(slots=True)
class OwnBatch(RolloutBatch):
    """With a field of each axis."""

    value: Tensor | None = field(default=None, metadata=axis("T", fill=-1))
    length: Tensor | None = field(default=None, metadata=axis("N"))
    pair: Tensor | None = field(default=None, metadata=axis("M"))
    is_hard: Tensor | None = field(default=None, metadata=axis("G", fill=True))
    calls: Tensor | None = field(default=None, metadata=axis("M"))


def make_batch() -> OwnBatch:
    """Two prompts of two tokens and one, with completions of 1 and 2 tokens, and of none and 3: T = 3+4+1+4 = 12."""
    prompts = [Prompt(7, "01", [1, 2], {"answer": "3"}), Prompt(4, "2", [3], {})]
    completions = [
        [make_completion([0], [-0.1]), make_completion([5, 6], [-0.2, -0.3], version=2)],
        [make_completion([]), make_completion([7, 8, 0], [-0.4, -0.5, -0.6])],
    ]
    return OwnBatch.pack(single_turns(prompts, completions))


def test_pack_lays_branches_end_to_end() -> None:
    batch = make_batch()
    assert batch.token_ids.tolist() == [1, 2, 0, 1, 2, 5, 6, 3, 3, 7, 8, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 0, 1, 2, 3]
    assert batch.cu_seqlens.tolist() == [0, 3, 7, 8, 12] and batch.cu_seqlens.dtype == torch.int32
    assert batch.is_sampled.tolist() == [False, False, True, False, False, True, True, False, False] + [True] * 3
    expected = [0, 0, -0.1, 0, 0, -0.2, -0.3, 0, 0, -0.4, -0.5, -0.6]
    assert batch.rollout_logprobs.tolist() == pytest.approx(expected)
    assert batch.weight_versions.tolist() == [-1, -1, 0, -1, -1, 2, 2, -1, -1, 0, 0, 0]
    assert batch.group_ids.tolist() == [0, 0, 1, 1]
    assert [prompt.index for prompt in batch.prompts] == [7, 7, 4, 4]
    assert [completion.text for completion in batch.completions] == ["", "45", "", "67"]
    assert [completion.is_truncated for completion in batch.completions] == [False, True, True, False]
    assert (batch.num_tokens, batch.num_sequences) == (12, 4)
    assert batch.lengths.tolist() == [3, 4, 1, 4]
    assert batch.completion_lengths.tolist() == [1, 2, 0, 3]
    assert batch.sampled_lengths.tolist() == [1, 2, 0, 3] and batch.trajectory_ids.tolist() == [0, 1, 2, 3]
    assert batch.turn_ids.tolist() == [-1, -1, 0, -1, -1, 0, 0, -1, -1, 0, 0, 0]
    assert batch.token_ids.dtype == batch.position_ids.dtype == torch.int64


def test_pack_of_nothing_is_an_empty_batch() -> None:
    batch = RolloutBatch.pack(single_turns([], []))
    assert (batch.num_tokens, batch.num_sequences) == (0, 0)
    assert batch.lengths.tolist() == batch.completion_lengths.tolist() == []
    assert batch.to_tokens(torch.zeros(0)).shape == (0,)


def test_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"Prompt 3 has no token.* Begin it with the tokenizer's beginning-of-sequence"
    ):
        RolloutBatch.pack(single_turns([Prompt(3, "", [], {})], [[make_completion([5])]]))


def test_of_sequences_marks_all_but_first_as_sampled() -> None:
    batch = RolloutBatch.of_sequences([[5, 6, 7], [8], [3, 4]])
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 3, 4]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert batch.is_sampled.tolist() == [False, True, True, False, False, True]


def test_sequences_to_tokens_and_back() -> None:
    batch = make_batch()
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert batch.to_tokens(values).tolist() == [1, 1, 1, 2, 2, 2, 2, 3, 4, 4, 4, 4]
    assert batch.sum_tokens(batch.to_tokens(values)).tolist() == [3, 8, 3, 16]
    assert batch.sum_tokens(torch.arange(12)).tolist() == [3, 18, 7, 38]


def fill(batch: OwnBatch) -> OwnBatch:
    """Every optional tensor, each different."""
    batch.rewards = torch.tensor([1.0, 2.0, 3.0, 4.0])
    batch.scores = {"a": torch.tensor([5.0, 6.0, 7.0, 8.0])}
    batch.value, batch.length = torch.arange(12) + 20, torch.arange(4) + 30
    batch.pair, batch.is_hard = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]]), torch.tensor([True, False])
    batch.advantages = torch.arange(12.0)
    batch.old_logprobs = -torch.arange(12.0)
    batch.ref_logprobs = 100 - torch.arange(12.0)
    return batch


def assert_equal(got: RolloutBatch, expected: RolloutBatch) -> None:
    for f in fields(expected):
        if f.name.startswith("_"):
            continue
        value, other = getattr(got, f.name), getattr(expected, f.name)
        if isinstance(other, Tensor):
            assert value.dtype == other.dtype and torch.equal(value, other), f.name
        elif f.name == "scores":
            assert value.keys() == other.keys() and all(torch.equal(value[n], other[n]) for n in other)
        else:
            assert value == other, f.name


def test_select_takes_sequences_in_given_order() -> None:
    batch = fill(make_batch()).select([3, 0])
    assert batch.token_ids.tolist() == [3, 7, 8, 0, 1, 2, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 4, 7] and batch.cu_seqlens.dtype == torch.int32
    assert batch.is_sampled.tolist() == [False, True, True, True, False, False, True]
    assert batch.group_ids.tolist() == [1, 0]
    assert [prompt.index for prompt in batch.prompts] == [4, 7]
    assert [completion.text for completion in batch.completions] == ["67", ""]
    assert batch.rewards is not None and batch.rewards.tolist() == [4, 1]
    assert batch.scores["a"].tolist() == [8, 5]
    assert batch.value is not None and batch.value.tolist() == [28, 29, 30, 31, 20, 21, 22]
    assert batch.length is not None and batch.length.tolist() == [33, 30]
    assert batch.pair is not None and batch.pair.tolist() == [[7, 8], [1, 2]]
    assert batch.is_hard is not None and batch.is_hard.tolist() == [True, False]  # in the order of the groups' ids
    only = batch.select([0])
    assert only.group_ids.tolist() == [1] and only.is_hard is not None and only.is_hard.tolist() == [False]
    assert batch.advantages is not None and batch.advantages.tolist() == [8, 9, 10, 11, 0, 1, 2]
    assert batch.old_logprobs is not None and batch.old_logprobs.tolist() == [-8, -9, -10, -11, 0, -1, -2]
    assert batch.ref_logprobs is not None and batch.ref_logprobs.tolist() == [92, 91, 90, 89, 100, 99, 98]


def test_select_all_nothing_and_again() -> None:
    batch = fill(make_batch())
    assert_equal(batch.select(range(4)), batch)
    assert_equal(batch.select([2, 3, 0, 1]).select([2, 3, 0, 1]), batch)
    nothing = batch.select(torch.zeros(0, dtype=torch.int64))
    assert (nothing.num_tokens, nothing.num_sequences, nothing.prompts) == (0, 0, [])


def test_concatenate_keeps_groups_apart() -> None:
    batch = fill(make_batch())
    parts = [batch.select([0, 1]), batch.select([]), batch.select([2, 3])]
    joined = OwnBatch.concatenate(parts)
    # The second part's one group had the id 1 and comes after the ids 0 and 0: it is counted on to 2.
    assert joined.group_ids.tolist() == [0, 0, 2, 2]
    joined.group_ids = batch.group_ids
    assert_equal(joined, batch)
    assert OwnBatch.concatenate([batch, batch, batch]).group_ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_one_batch_alone_is_not_copied() -> None:
    batch = fill(make_batch())
    joined = OwnBatch.concatenate([batch])
    assert_equal(joined, batch)
    assert joined.token_ids is batch.token_ids
    joined.group_ids = torch.zeros(4, dtype=torch.int64)
    assert batch.group_ids.tolist() == [0, 0, 1, 1]


def test_concatenate_leaves_out_what_is_not_there() -> None:
    joined = OwnBatch.concatenate([make_batch(), make_batch()])
    assert joined.rewards is None and joined.advantages is None and joined.scores == {}
    assert joined.num_sequences == 8 and joined.lengths.tolist() == [3, 4, 1, 4] * 2


def test_to_moves_every_tensor() -> None:
    moved = fill(make_batch()).to("meta")
    tensors = [getattr(moved, field.name) for field in fields(moved)]
    assert all(tensor.is_meta for tensor in tensors if isinstance(tensor, Tensor))
    assert moved.scores["a"].is_meta and moved.pair is not None and moved.pair.is_meta
    batch = fill(make_batch())
    assert_equal(batch.to("cpu"), batch)


def test_cached_lengths_are_recomputed_after_select_and_concatenate() -> None:
    moved = fill(make_batch()).to("cpu")
    assert (moved.max_length, moved.sampled_index.tolist()) == (4, [2, 5, 6, 9, 10, 11])
    part = moved.select([0, 2])
    assert (part.max_length, part.sampled_index.tolist()) == (3, [2])
    joined = OwnBatch.concatenate([moved, part.to("cpu")])
    assert joined.sampled_index.tolist() == [2, 5, 6, 9, 10, 11, 14]
    nothing = moved.select([]).to("cpu")
    assert (nothing.max_length, nothing.sampled_index.tolist()) == (0, [])


@pytest.mark.gpu
def test_moving_and_cutting_wait_for_no_device() -> None:
    batch = fill(make_batch())
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = batch.to("cuda")
        lengths = (moved.max_length, moved.sampled_index.numel(), moved.position_ids.numel())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert lengths == (4, 6, 12)
    assert_equal(moved.to("cpu"), batch)


def test_padding_counts_for_nothing() -> None:
    batch = make_batch()
    batch.rewards, batch.advantages = torch.ones(4), torch.ones(12)
    filler = batch.select([]).padding()
    assert (filler.num_tokens, filler.num_sequences, filler.num_trajectories) == (1, 1, 1)
    assert not filler.is_sampled.any()
    assert filler.advantages is not None and filler.advantages.tolist() == [0.0]
    assert filler.rewards is not None and filler.old_logprobs is None
    own = fill(make_batch()).padding()
    assert own.pair is not None and own.pair.tolist() == [[0, 0]]
    assert own.value is not None and own.value.tolist() == [-1]
    assert own.is_hard is not None and own.is_hard.tolist() == [True]


def test_pack_fills_field_from_metric_of_its_name() -> None:
    (first, second) = single_turns([Prompt(0, "0", [1], {})], [[make_completion([5]), make_completion([6])]])[0]
    first.metrics["calls"] = 2.0
    batch = OwnBatch.pack([[first, second]])
    torch.testing.assert_close(batch.calls, torch.tensor([2.0, torch.nan]), equal_nan=True)


def test_field_of_another_length_is_refused() -> None:
    batch = make_batch()
    batch.calls = [1, 2, 3, 4]  # type: ignore[assignment]
    batch.check()
    assert batch.calls is not None and batch.calls.tolist() == [1, 2, 3, 4]
    for value, shape in ((torch.ones(12), r"\[12\]"), (torch.tensor(1.0), r"\[\]")):
        batch.calls = value
        rule = rf"batch\.calls has the shape {shape}, and the batch has 4 trajectories"
        with pytest.raises(ConfigError, match=rule):
            batch.check()
    batch.calls, batch.scores = None, {"a": torch.ones(3)}
    with pytest.raises(ConfigError, match=r"batch\.scores\['a'\] has the shape \[3\]"):
        batch.check()


def test_field_of_some_batches_only_is_refused() -> None:
    batches = [fill(make_batch()), fill(make_batch())]
    batches[1].is_hard = None
    with pytest.raises(ConfigError, match=r"batch\.is_hard is set on some of the batches"):
        OwnBatch.concatenate(batches)
    batches[1].is_hard, batches[1].scores = batches[0].is_hard, {}
    with pytest.raises(ConfigError, match=r"batch\.scores\['a'\] is set on some of the batches"):
        OwnBatch.concatenate(batches)


def test_lists_are_split_from_tensors_and_put_back() -> None:
    batch = fill(make_batch())
    tensors, lists = split_lists(batch)
    assert (tensors.trajectories, tensors.reasons) == ([], []) and lists.keys() == {"trajectories", "reasons"}
    back: dict[str, Any] = dict(lists)
    assert_equal(replace(tensors, **back), batch)


def test_temperatures_are_the_prompts_own() -> None:
    batch = make_batch()
    assert batch.temperatures(0.7) == 0.7
    for one in batch.trajectories[2:]:
        one.prompt = one.prompt._replace(temperature=0.5)
    own = batch.temperatures(0.75)
    assert isinstance(own, Tensor) and own.tolist() == [0.75, 0.75, 0.5, 0.5]


def test_batch_unknown_field_names_batch_type() -> None:
    batch = make_batch()
    batch.value = torch.zeros(12)
    with pytest.raises(AttributeError, match=r"^OwnBatch has no field 'mine'\..* batch_type: docs/own_values\.md\.$"):
        batch.mine = torch.zeros(12)  # type: ignore[attr-defined]
