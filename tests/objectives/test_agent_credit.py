"""Credit by agents: each one's own reward, compared with the same agent's in the other trajectories of the prompt."""

import random
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trajectories import make_trajectory, random_groups, split_by_agents
from torch import Tensor

from rlightning.errors import ConfigError
from rlightning.module.update import count_units
from rlightning.objectives import Returns, Turns, aggregate, find_signal, group_advantages, leave_one_out
from rlightning.types import AgentTrace, LossTotals, RolloutBatch, Trajectory

RANDOM = st.integers(0, 2**32).map(random.Random)


def play(buyer: float, seller: float, lengths: list[int], turns: tuple[list[int], list[int]]) -> Trajectory:
    """A trajectory of two agents; its reward is their mean."""
    traces = [AgentTrace("buyer", buyer, turns[0]), AgentTrace("seller", seller, turns[1])]
    return replace(make_trajectory(0, lengths), reward=(buyer + seller) / 2, traces=traces)


def make_batch() -> RolloutBatch:
    """Two plays of one against the other, in turns of two, one and three tokens, and of one token each."""
    batch = RolloutBatch.pack([[play(1.0, -1.0, [2, 1, 3], ([0, 2], [1])), play(-1.0, 1.0, [1, 1], ([1], [0]))]])
    # What a reward function gives is of both agents: 0.25 and 0.5.
    batch.rewards = torch.tensor([0.25, 0.5], dtype=torch.float64)
    return batch


def by_turn(batch: RolloutBatch, tokens: Tensor) -> list[list[float]]:
    """The values of the tokens that the policy sampled, trajectory by trajectory."""
    owners = batch.to_tokens(torch.arange(batch.num_trajectories))
    return [tokens[batch.is_sampled & (owners == number)].tolist() for number in range(batch.num_trajectories)]


def test_each_agent_is_compared_with_itself() -> None:
    batch = make_batch()
    returns = Returns.of_trajectories(batch)
    assert returns.values.dtype == torch.float64
    assert returns.values.tolist() == [1.25, -0.75, -0.5, 1.5] and returns.trajectory_ids.tolist() == [0, 0, 1, 1]
    advantages = group_advantages(returns.values, returns.group_ids, scale_by_std=False)
    buyer, seller = (1.25 - -0.5) / 2, (-0.75 - 1.5) / 2
    expected = [[buyer] * 2 + [seller] + [buyer] * 3, [-seller, -buyer]]
    assert by_turn(batch, returns.to_tokens(batch, advantages)) == expected
    left_out = leave_one_out(returns.values, returns.group_ids, returns.trajectory_ids)
    assert left_out.tolist() == [2 * buyer, 2 * seller, -2 * buyer, -2 * seller]


def test_agents_several_traces_leave_own_trajectory_out() -> None:
    first = replace(
        make_trajectory(0, [1, 1]), reward=2.0, traces=[AgentTrace("solver", 1.0, [0]), AgentTrace("solver", 3.0, [1])]
    )
    other = replace(make_trajectory(0, [1]), reward=5.0, traces=[AgentTrace("solver", 5.0, [0])])
    batch = RolloutBatch.pack([[first, other]])
    batch.rewards = torch.tensor([2.0, 5.0])
    returns = Returns.of_trajectories(batch)
    assert leave_one_out(returns.values, returns.group_ids, returns.trajectory_ids).tolist() == [1 - 5, 3 - 5, 5 - 2]
    assert group_advantages(returns.values, returns.group_ids, scale_by_std=False).tolist() == [-2, 0, 2]


def test_a_group_of_opposed_agents_has_a_signal() -> None:
    """The mean of their rewards is 0 in all trajectories."""
    batch = RolloutBatch.pack([[play(1.0, -1.0, [1, 1], ([0], [1])), play(-1.0, 1.0, [1, 1], ([0], [1]))]])
    assert find_signal(batch, torch.zeros(2)).tolist() == [True, True]
    equal = RolloutBatch.pack([[play(1.0, -1.0, [1, 1], ([0], [1]))] * 2])
    assert find_signal(equal, torch.zeros(2)).tolist() == [False, False]


def test_returns_of_turns_stay_with_their_agent() -> None:
    """The seller's turn comes between two of the buyer's, and has no part in what they were given."""
    batch = make_batch()
    turns = Turns.of_batch(batch)
    assert turns.rewards.tolist() == [0.0, 1.25, -0.75, -0.5, 1.5] and turns.numbers.tolist() == [0, 1, 0, 0, 0]
    returns = Returns.of_turns(batch, turns, 0.5, "group")
    assert returns.values.tolist() == [0.625, 1.25, -0.75, -0.5, 1.5]
    expected = [[0.625] * 2 + [-0.75] + [1.25] * 3, [1.5, -0.5]]
    assert by_turn(batch, returns.to_tokens(batch, returns.values)) == expected
    buyer = statistics.fmean([0.625, 1.25, -0.5])
    centred = group_advantages(returns.values, returns.group_ids, scale_by_std=False)
    assert centred.tolist() == pytest.approx([0.625 - buyer, 1.25 - buyer, -1.125, -0.5 - buyer, 1.125], abs=1e-6)
    with pytest.raises(ConfigError, match="the trajectories of prompt 0 have from 1 to 2 turns"):
        Returns.of_turns(batch, turns, 0.5, "turn")


@pytest.mark.parametrize(
    ("traces", "message"),
    [
        (
            [AgentTrace("one", 0.0, [0])],
            r"^Prompt 0: its environment gave the traces of one the turns \[0\], and .* 2\.",
        ),
        ([AgentTrace("one", 0.0, [0, 1]), AgentTrace("two", 0.0, [1])], r"the turns \[0, 1, 1\], and the policy has 2"),
        ([], "the traces of no agent the turns"),
        ([AgentTrace("one", float("nan"), [0, 1])], r"of 'one' the reward nan, and it has to be a finite number"),
    ],
)
def test_traces_that_cannot_be(traces: list[AgentTrace], message: str) -> None:
    batch = RolloutBatch.pack([[replace(make_trajectory(0, [1, 1]), traces=traces)]])
    batch.rewards = torch.zeros(1)
    with pytest.raises(ConfigError, match=message):
        Returns.of_trajectories(batch)


def reference(groups: list[list[Trajectory]], rewards: list[float]) -> list[dict[int, float]]:
    """By trajectory, the advantage of each of the policy's turns: its trace's reward less the same agent's others."""
    found, numbers = [], iter(range(len(rewards)))
    for group in groups:
        own = [(next(numbers), one) for one in group]
        values: list[tuple[int, AgentTrace, float]] = []
        for number, one in own:
            values += [(number, t, rewards[number] - (one.reward or 0.0) + t.reward) for t in one.traces or []]
        for number, _ in own:
            by_turn: dict[int, float] = {}
            for trace, value in ((t, v) for of, t, v in values if of == number):
                others = [v for of, t, v in values if of != number and t.agent == trace.agent]
                advantage = value - statistics.fmean(others) if others else 0.0
                by_turn |= dict.fromkeys(trace.turns, advantage)
            found.append(by_turn)
    return found


@settings(max_examples=60, deadline=None)
@given(RANDOM)
def test_loss_is_that_of_the_definition_however_cut(draw: random.Random) -> None:
    """In float64; whole trajectories go to two ranks, whose micro-batches have branches of one apart.

    A trajectory weighs the same however many agents and branches it has.
    """
    groups = [[split_by_agents(draw, one) for one in group] for group in random_groups(draw)]
    batch = RolloutBatch.pack(groups)
    batch.rewards = torch.tensor([draw.gauss(0, 1) for _ in batch.trajectories], dtype=torch.float64)
    returns = Returns.of_trajectories(batch)
    if any(groups):
        expected = reference(groups, batch.rewards.tolist())
        advantages = leave_one_out(returns.values, returns.group_ids, returns.trajectory_ids)
        batch.advantages = returns.to_tokens(batch, advantages)
    else:
        expected, batch.advantages = [], torch.zeros(0)

    loss = 0.0
    trajectories = [one for group in groups for one in group]
    for one, own in zip(trajectories, expected, strict=True):
        places = [place for place, turn in enumerate(one.turns) if turn.sample is not None]
        for branch in one.branches:
            for position, is_sampled in enumerate(branch.is_sampled):
                if is_sampled:
                    number = places.index(branch.turns[position])
                    loss -= own[number] * branch.logprobs[position] / one.num_sampled / len(trajectories)

    totals = LossTotals(*count_units(batch).tolist())

    def share(part: RolloutBatch) -> float:
        assert part.advantages is not None
        losses = -part.advantages.double() * part.rollout_logprobs.double()
        lengths = part.to_tokens(part.completion_lengths)
        bounds = part.cu_seqlens
        return float(aggregate(losses, part.is_sampled, bounds, "trajectory_mean", totals, trajectory_lengths=lengths))

    order = draw.sample(range(batch.num_trajectories), batch.num_trajectories)
    middle = draw.randint(0, len(order))
    shares = []
    for rank in (batch.select(order[:middle]), batch.select(order[middle:])):
        sequences = draw.sample(range(rank.num_sequences), rank.num_sequences)
        cut = draw.randint(0, len(sequences))
        shares += [share(rank.select(part, axis="N")) for part in (sequences[:cut], sequences[cut:])]
    assert share(batch) == pytest.approx(loss, abs=1e-5)  # advantages are float32
    assert sum(shares) == pytest.approx(share(batch), abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(RANDOM)
def test_one_agent_is_credit_by_trajectory(draw: random.Random) -> None:
    """Bit for bit, if its reward is the trajectory's."""
    plain = random_groups(draw)
    named = [
        [replace(t, traces=[AgentTrace("", t.reward or 0.0, list(range(len(t.samples))))]) for t in g] for g in plain
    ]
    batches = [RolloutBatch.pack(groups) for groups in (plain, named)]
    rewards = torch.tensor([draw.choice((0.0, 1.0, draw.random())) for _ in batches[0].trajectories]).double()
    found = []
    for batch in batches:
        batch.rewards = rewards
        returns = Returns.of_trajectories(batch)
        advantages = group_advantages(returns.values, returns.group_ids)
        found.append(returns.to_tokens(batch, advantages)[batch.is_sampled])
    assert torch.equal(*found)
