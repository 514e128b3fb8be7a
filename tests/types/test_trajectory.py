"""Trajectories of several turns and branches: packed losslessly, every sampled token trained exactly once."""

import pickle
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning_utilities.core.apply_func import apply_to_collection
from random_trajectories import random_groups, random_trajectory, split_by_agents

from rlightning.types import Branch, Prompt, RolloutBatch, Sample, Trajectory, Turn
from rlightning.types.trajectory import from_plain, to_plain

RANDOM = st.integers(0, 2**32).map(random.Random)


def two_branches() -> Trajectory:
    """A prompt 1 2, an answer 3 4, an observation 5, then a new history 1 2 6 with the answer 4, and 7 8."""
    first, second = Sample([3, 4], [-0.5, -0.25], [0, 0], "a", "stop"), Sample([7, 8], [-1, -2], [1, 1], "b", "length")
    one, other = Branch(), Branch("history_edited")
    one.append([1, 2])
    one.append_sample(first, 0)
    one.append([5], 1)
    other.append([1, 2, 6])
    other.append([4], 0)
    other.append_sample(second, 2)
    turns = (
        Turn({"role": "assistant", "content": "a"}, first),
        Turn({"role": "tool", "content": "5"}),
        Turn({"role": "assistant", "content": "b"}, second),
    )
    return Trajectory(Prompt(0, "12", [1, 2], {}), (one, other), turns, status="truncated", reward=0.5)


def test_two_branches_are_packed_by_hand() -> None:
    single = Trajectory.single_turn(Prompt(1, "9", [9], {}), Sample([0], [-3.0], [2], "", "stop"))
    batch = RolloutBatch.pack([[two_branches()], [single]])
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 1, 2, 6, 4, 7, 8, 9, 0]
    assert batch.is_sampled.long().tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 1]
    assert batch.turn_ids.tolist() == [-1, -1, 0, 0, 1, -1, -1, -1, 0, 2, 2, -1, 0]
    assert batch.weight_versions.tolist() == [-1, -1, 0, 0, -1, -1, -1, -1, -1, 1, 1, -1, 2]
    assert batch.cu_seqlens.tolist() == [0, 5, 11, 13] and batch.trajectory_ids.tolist() == [0, 0, 1]
    assert (batch.num_sequences, batch.num_trajectories) == (3, 2)
    assert batch.completion_lengths.tolist() == [4, 1] and batch.sampled_lengths.tolist() == [2, 2, 1]
    assert batch.group_ids.tolist() == [0, 1] and batch.reasons == ["start", "history_edited", "start"]
    values = torch.tensor([1.0, 2.0])
    assert batch.to_tokens(values).tolist() == [1.0] * 11 + [2.0] * 2
    assert batch.to_tokens(torch.tensor([1.0, 2.0, 3.0]), axis="N").tolist() == [1.0] * 5 + [2.0] * 6 + [3.0] * 2
    assert batch.sum_tokens(batch.is_sampled.long()).tolist() == [4, 1]
    with pytest.raises(ValueError, match="Prompt 0: 2 samples, and a completion is one"):
        batch.completions  # noqa: B018
    assert [one.final_text for one in batch.trajectories] == ["b", ""]


def test_selected_sequence_keeps_what_is_its_trajectorys() -> None:
    single = Trajectory.single_turn(Prompt(1, "9", [9], {}), Sample([0], [-3.0], [2], "", "stop"))
    batch = RolloutBatch.pack([[two_branches()], [single]])
    batch.rewards = torch.tensor([5.0, 7.0])
    part = batch.select([2, 1], axis="N")
    assert part.token_ids.tolist() == [9, 0, 1, 2, 6, 4, 7, 8]
    assert part.trajectory_ids.tolist() == [0, 1] and part.group_ids.tolist() == [1, 0]
    assert part.rewards is not None and part.rewards.tolist() == [7.0, 5.0]
    assert part.completion_lengths.tolist() == [1, 4] and part.sampled_lengths.tolist() == [1, 2]
    whole = batch.select([1, 0])
    assert whole.trajectory_ids.tolist() == [0, 1, 1] and whole.reasons == ["start", "start", "history_edited"]


@settings(max_examples=60, deadline=None)
@given(RANDOM)
@pytest.mark.long
def test_unpacking_gives_what_was_packed(draw: random.Random) -> None:
    groups = [[draw.choice((one, split_by_agents(draw, one))) for one in group] for group in random_groups(draw)]
    trajectories = [one for group in groups for one in group]
    batch = RolloutBatch.pack(groups)
    assert batch.unpack() == trajectories
    order = draw.sample(range(len(trajectories)), draw.randint(0, len(trajectories)))
    assert batch.select(order).unpack() == [trajectories[i] for i in order]
    cut = draw.randint(0, len(trajectories))
    parts = [batch.select(range(cut)), batch.select(range(cut, len(trajectories)))]
    assert RolloutBatch.concatenate(parts).unpack() == trajectories
    assert pickle.loads(pickle.dumps(batch)).to("cpu").unpack() == trajectories
    assert [from_plain(to_plain(one), one.prompt) for one in trajectories] == trajectories


@settings(max_examples=60, deadline=None)
@given(RANDOM)
def test_every_sampled_token_is_trained_exactly_once(draw: random.Random) -> None:
    trajectories = [random_trajectory(draw, index) for index in range(4)]
    batch = RolloutBatch.pack([trajectories])
    owners = batch.to_tokens(torch.arange(4))
    columns = (owners, batch.turn_ids, batch.token_ids, batch.rollout_logprobs, batch.weight_versions)
    trained = Counter(zip(*(column[batch.is_sampled].tolist() for column in columns), strict=True))
    sampled = Counter(
        (m, place, *values)
        for m, one in enumerate(trajectories)
        for place, turn in enumerate(one.turns)
        if turn.sample is not None
        for values in zip(turn.sample.token_ids, turn.sample.logprobs, turn.sample.weight_versions, strict=True)
    )
    assert trained == sampled


def test_token_trained_twice_or_never_is_refused() -> None:
    twice, never, other, first = (two_branches() for _ in range(4))
    sample = twice.samples[0]
    twice.branches[1].append_sample(sample, 0)
    with pytest.raises(ValueError, match="Prompt 0: 4 tokens were sampled, and the branches train 6"):
        RolloutBatch.pack([[twice]])
    never.branches = never.branches[:1]
    with pytest.raises(ValueError, match="4 tokens were sampled, and the branches train 2"):
        RolloutBatch.pack([[never]])
    other.branches[0].token_ids[2] = 9
    with pytest.raises(ValueError, match="4 tokens were sampled, and the branches train 4"):
        RolloutBatch.pack([[other]])
    first.branches[0].is_sampled[0] = 1
    with pytest.raises(ValueError, match="a branch begins with a sampled token"):
        RolloutBatch.pack([[first]])


def test_lightning_walks_through_trajectories() -> None:
    walked: Any = apply_to_collection([(Prompt(0, "", [1], {}), [two_branches()])], torch.Tensor, torch.clone)
    assert walked[0][1] == [two_branches()]


def test_snippets_of_the_page_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "trajectories.md").read_text(encoding="utf-8")
    scope: dict[str, Any] = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(block, scope)
    assert scope["batch"].is_sampled.long().tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 1, 1]
    batch = scope["ValuedGRPO"].batch_type.pack([scope["batch"].unpack()])
    batch.values = torch.arange(10)
    assert batch.select([0]).values.tolist() == list(range(10))


@pytest.mark.processes
def test_workers_import_trajectories_without_torch_and_numpy() -> None:
    probe = (
        "import sys\nfrom rlightning.types import Branch, Outcome, Prompt, Sample, Trajectory, Turn\n"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'numpy', 'lightning', 'transformers'}))"
    )
    folder = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", probe], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
