"""Credit by turns: rewards of turns become returns, and advantages of the tokens that each turn sampled."""

import random
import statistics
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trajectories import make_trajectory, random_groups

from rlightning.errors import ConfigError
from rlightning.objectives import Returns, TurnBaseline, Turns, group_advantages, leave_one_out
from rlightning.types import RolloutBatch, Trajectory

RANDOM = st.integers(0, 2**32).map(random.Random)


def make_batch() -> RolloutBatch:
    """One group: rewards of turns 1, 0, 2, and 4 at the end; and a reward of 1 at the end of two turns."""
    batch = RolloutBatch.pack([[make_trajectory(0, [2, 1, 3], [1.0, 0.0, 2.0]), make_trajectory(0, [1, 2])]])
    batch.rewards = torch.tensor([7.0, 1.0], dtype=torch.float64)
    return batch


def test_turn_rewards_sum_to_the_trajectorys_reward() -> None:
    turns = Turns.of_batch(make_batch())
    assert turns.rewards.tolist() == [1.0, 0.0, 2.0 + 4.0, 0.0, 1.0]
    assert turns.trajectory_ids.tolist() == [0, 0, 0, 1, 1] and turns.numbers.tolist() == [0, 1, 2, 0, 1]


def test_returns_are_discounted_by_turn_not_by_token() -> None:
    turns = Turns.of_batch(make_batch())
    assert turns.discount_rewards(0.5).tolist() == [1 + 0 + 6 / 4, 6 / 2, 6, 1 / 2, 1]
    assert turns.discount_rewards(1.0).tolist() == [7, 6, 6, 1, 1]
    assert turns.discount_rewards(0.0).tolist() == [1, 0, 6, 0, 1]


def test_returns_reach_only_tokens_of_their_turn() -> None:
    """Observations, prompts and the history of a later branch have none."""
    batch = make_batch()
    turns = Turns.of_batch(batch)
    tokens = turns.to_tokens(turns.discount_rewards(0.5))
    first = [0, 0, 2.5, 2.5, 0, 0, 3, 0, 0]
    assert tokens.tolist() == [*first, *[0.0] * 9, 6, 6, 6, 0, 0, 0, 0, 0.5, 0, 0, 1, 1, 0, 0]
    assert turns.sum_tokens(torch.ones(batch.num_tokens)).tolist() == [2, 1, 3, 1, 2]


def test_group_baseline_is_of_all_turns() -> None:
    batch = make_batch()
    returns = Returns.of_turns(batch, Turns.of_batch(batch), 0.5, "group")
    values = [2.5, 3.0, 6.0, 0.5, 1.0]
    mean, std = statistics.mean(values), statistics.stdev(values)
    expected = [(value - mean) / (std + 1e-6) for value in values]
    assert group_advantages(returns.values, returns.group_ids).tolist() == pytest.approx(expected, abs=1e-6)
    # Without its own trajectory: the others' turns alone.
    others = [value - (0.5 + 1) / 2 for value in values[:3]] + [value - (2.5 + 3 + 6) / 3 for value in values[3:]]
    left_out = leave_one_out(returns.values, returns.group_ids, returns.trajectory_ids)
    assert left_out.tolist() == pytest.approx(others, abs=1e-6)


def test_turn_baseline_is_of_the_same_turn() -> None:
    trajectories = [make_trajectory(0, [1, 2], [0.0, 1.0]), make_trajectory(0, [2, 2], [3.0, 1.0])]
    batch = RolloutBatch.pack([trajectories])
    batch.rewards = torch.tensor([1.0, 4.0])
    returns = Returns.of_turns(batch, Turns.of_batch(batch), 1.0, "turn")
    advantages = group_advantages(returns.values, returns.group_ids, scale_by_std=False)
    assert advantages.tolist() == [1 - 2.5, 0.0, 4 - 2.5, 0.0]  # the second turns are alike


def test_turns_without_counterpart_are_refused() -> None:
    batch = make_batch()
    rule = r"^model\.turn_baseline='turn': the trajectories of prompt 0 have from 2 to 3 turns, .* Use turn_baseline "
    with pytest.raises(ConfigError, match=rule):
        Returns.of_turns(batch, Turns.of_batch(batch), 1.0, "turn")


def test_turn_rewards_of_another_number_are_refused() -> None:
    batch = RolloutBatch.pack([[make_trajectory(5, [1, 2], [1.0])]])
    batch.rewards = torch.zeros(1)
    with pytest.raises(
        ConfigError, match=r"^Prompt 5: its environment gave 1 turn_rewards, and the policy has 2 turns"
    ):
        Turns.of_batch(batch)


def reference(groups: Sequence[Sequence[Trajectory]], rewards: Sequence[float], discount: float) -> list[list[float]]:
    """By trajectory, the returns of its turns, by the definition."""
    found, left = [], iter(rewards)
    for one in (one for group in groups for one in group):
        number, total = len(one.samples), next(left)
        own = list(one.turn_rewards) if one.turn_rewards is not None else [0.0] * number
        if own:
            own[-1] += total - sum(own)
        found.append([sum(discount ** (j - k) * own[j] for j in range(k, number)) for k in range(number)])
    return found


@settings(max_examples=80, deadline=None)
@given(RANDOM, st.sampled_from([0.0, 0.5, 0.9, 1.0]))
@pytest.mark.long
def test_advantages_are_those_of_the_definition_however_cut(draw: random.Random, discount: float) -> None:
    """In float64, of any trajectories; each token of a micro-batch has that of its turn."""
    groups = random_groups(draw)
    batch = RolloutBatch.pack(groups)
    batch.rewards = torch.tensor([draw.gauss(0, 1) for _ in batch.trajectories], dtype=torch.float64)
    expected = reference(groups, batch.rewards.tolist(), discount)
    turns = Turns.of_batch(batch)
    returns = Returns.of_turns(batch, turns, discount, "group")
    flat = [value for one in expected for value in one]
    assert returns.values.dtype == torch.float64
    torch.testing.assert_close(returns.values, torch.tensor(flat, dtype=torch.float64), rtol=1e-12, atol=1e-12)

    advantages = leave_one_out(returns.values, returns.group_ids, returns.trajectory_ids).tolist()
    place, number = 0, 0
    for group in groups:
        pool = expected[number : number + len(group)]
        for member, values in enumerate(pool):
            others = [value for other, them in enumerate(pool) if other != member for value in them]
            for value in values:
                by_hand = value - sum(others) / len(others) if others else 0.0
                assert advantages[place] == pytest.approx(by_hand, abs=1e-6)
                place += 1
        number += len(group)

    batch.advantages = returns.to_tokens(batch, returns.values)
    order = draw.sample(range(batch.num_sequences), batch.num_sequences)
    for sequence in order:
        part = batch.select([sequence], axis="N")
        assert part.advantages is not None
        places = [0]
        for turn in part.trajectories[0].turns:
            places.append(places[-1] + (turn.sample is not None))
        own = expected[int(batch.trajectory_ids[sequence])]
        for advantage, sampled, turn_id in zip(
            part.advantages.tolist(), part.is_sampled.tolist(), part.turn_ids.tolist(), strict=True
        ):
            assert advantage == pytest.approx(own[places[turn_id]] if sampled else 0.0, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(RANDOM, st.sampled_from(["group", "turn"]))
def test_one_turn_each_is_credit_by_trajectory(draw: random.Random, baseline: TurnBaseline) -> None:
    """Bit for bit, whatever the discount."""
    groups = [
        [make_trajectory(index, [draw.randint(1, 4)]) for _ in range(draw.randint(1, 4))]
        for index in range(draw.randint(1, 4))
    ]
    batch = RolloutBatch.pack(groups)
    batch.rewards = torch.tensor([draw.choice((0.0, 1.0, draw.random())) for _ in batch.trajectories]).double()
    usual = Returns.of_trajectories(batch)
    by_turn = Returns.of_turns(batch, Turns.of_batch(batch), 0.3, baseline)
    for returns in (usual, by_turn):
        assert returns.trajectory_ids.tolist() == list(range(batch.num_trajectories))
    mask = batch.is_sampled
    for estimate in (group_advantages, leave_one_out):
        advantages = [r.to_tokens(batch, estimate(r.values, r.group_ids))[mask] for r in (usual, by_turn)]
        assert torch.equal(*advantages)
    left_out = leave_one_out(by_turn.values, by_turn.group_ids, by_turn.trajectory_ids)
    torch.testing.assert_close(left_out, leave_one_out(usual.values, usual.group_ids), rtol=1e-6, atol=1e-7)
