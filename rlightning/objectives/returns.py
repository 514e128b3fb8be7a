"""The values that advantages are computed from: the reward of a trajectory or an agent, or the return of a turn.

Further letters: ``M`` trajectories; ``A`` traces, each the part of one agent in a trajectory (the whole trajectory with
a single agent); ``K`` turns of the policy, sorted by trace; ``U`` compared values, of trajectories, traces or turns.
"""

import math
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from rlightning.errors import ConfigError
from rlightning.objectives.advantages import EPSILON, has_signal
from rlightning.types import AgentTrace, RolloutBatch, Trajectory

TurnBaseline = Literal["group", "turn"]


class Traces(NamedTuple):
    """The agents' parts ("traces") of the trajectories in a batch: the reward, group and turns of each.

    A trajectory whose environment returned no traces has a single trace, with all of its turns.

    Attributes:
        rewards: [A] float64: the trajectory's total reward, plus the trace's reward minus the environment's reward.
        group_ids: [A] int64, equal for the traces of one agent in one group.
        trajectory_ids: [A] int64, ascending, the trajectory of each trace.
        turns: for each trace the indices of its turns among all turns of the policy in the batch.
    """

    rewards: Tensor
    group_ids: Tensor
    trajectory_ids: Tensor
    turns: list[list[int]]

    @classmethod
    def of_batch(cls, batch: RolloutBatch, rewards: Tensor | None = None) -> Self:
        """Return the traces of all trajectories in a batch, with tensors on the CPU.

        Args:
            batch: a batch with rewards.
            rewards: [M], used instead of ``batch.rewards``; None to use those.

        Raises:
            ConfigError: a turn of the policy is in no trace of its trajectory, or in several.
        """
        rewards = batch.rewards if rewards is None else rewards
        assert rewards is not None
        agents: dict[tuple[int, str], int] = {}
        own: list[float] = []
        group_ids, trajectory_ids, turns = list[int](), list[int](), list[list[int]]()
        num_turns = 0
        groups = batch.group_ids.tolist()
        for number, (one, total) in enumerate(zip(batch.trajectories, rewards.tolist(), strict=True)):
            for trace in _find_traces(one):
                own.append(total + (trace.reward - (one.reward or 0.0)))
                group_ids.append(agents.setdefault((groups[number], trace.agent), len(agents)))
                trajectory_ids.append(number)
                turns.append([num_turns + turn for turn in sorted(trace.turns)])
            num_turns += len(one.samples)
        return cls(
            torch.tensor(own, dtype=torch.float64),
            torch.tensor(group_ids, dtype=torch.int64),
            torch.tensor(trajectory_ids, dtype=torch.int64),
            turns,
        )

    @property
    def order(self) -> Tensor:
        """For each of the K turns, sorted by trace, its index among all turns of the policy in the batch: [K] int64."""
        return torch.tensor([turn for turns in self.turns for turn in turns], dtype=torch.int64)

    @property
    def of_turns(self) -> Tensor:
        """For each of the K turns, sorted by trace, the index of its trace: [K] int64."""
        return torch.arange(len(self.turns)).repeat_interleave(torch.tensor(list(map(len, self.turns))).long())


class Turns(NamedTuple):
    """The policy's turns in a batch, for estimators that assign credit to each turn or token.

    Attributes:
        rewards: [K] float64. Their sum over a trajectory is its reward in ``batch.rewards``; with several agents, their
            sum over a trace is the trace's reward. The difference from the sum of turn rewards (reward functions,
            penalties) is added to the last turn.
        trajectory_ids: [K] int64, the trajectory of each turn.
        numbers: [K] int64, index of the turn in its trace, from 0.
        of_tokens: [T] int64, the turn that sampled each token; -1 for other tokens.
        traces: the traces to which the turns belong.
    """

    rewards: Tensor
    trajectory_ids: Tensor
    numbers: Tensor
    of_tokens: Tensor
    traces: Traces

    @classmethod
    def of_batch(cls, batch: RolloutBatch) -> Self:
        """Return the policy's turns in a batch whose rewards are computed, with tensors on the CPU.

        Raises:
            ConfigError: an environment gave another number of turn rewards than the policy has turns.
        """
        traces = Traces.of_batch(batch)
        given = [reward for one in batch.trajectories for reward in _read_turn_rewards(one)]
        rewards: list[float] = []
        for turns, total in zip(traces.turns, traces.rewards.tolist(), strict=True):
            own = [given[turn] for turn in turns]
            if own:
                own[-1] += total - math.fsum(own)
            rewards += own
        order, of_turns = traces.order, traces.of_turns
        return cls(
            torch.tensor(rewards, dtype=torch.float64),
            traces.trajectory_ids[of_turns],
            torch.tensor([number for turns in traces.turns for number in range(len(turns))], dtype=torch.int64),
            _spread_turns(batch, torch.arange(len(order)), order),
            traces,
        )

    def discount_rewards(self, discount: float) -> Tensor:
        """Return each turn's discounted return within its trace, ``G_k = r_k + discount * G_{k+1}``: [K] float64."""
        returns = self.rewards.clone()
        for number in range(max(self.numbers.tolist(), default=0), 0, -1):
            later = (self.numbers == number).nonzero()[:, 0]
            returns[later - 1] += discount * returns[later]
        return returns

    def sum_tokens(self, values: Tensor) -> Tensor:
        """Return, for each turn, the sum of token ``values`` [T] over the tokens that the turn sampled: [K] float64."""
        is_sampled = self.of_tokens >= 0
        return torch.zeros_like(self.rewards).index_add(0, self.of_tokens[is_sampled], values[is_sampled].double())

    def to_tokens(self, values: Tensor) -> Tensor:
        """Repeat the value of each turn [K] over the tokens that the turn sampled: [T], 0 for other tokens."""
        return torch.cat([values, values.new_zeros(1)])[self.of_tokens]


class Returns(NamedTuple):
    """Rewards or returns from which group advantages are computed, with the group in which each is compared.

    There is one value for each trajectory, for each agent's trace, or for each turn.

    Attributes:
        values: [U], rewards or returns.
        group_ids: [U] int64, equal for values that are compared with each other.
        trajectory_ids: [U] int64, the trajectory to which each belongs.
        of_tokens: [T] int64, index of the value of each sampled token; -1 for other tokens. None if each token has the
            value of its trajectory.
    """

    values: Tensor
    group_ids: Tensor
    trajectory_ids: Tensor
    of_tokens: Tensor | None = None

    @classmethod
    def of_trajectories(cls, batch: RolloutBatch, rewards: Tensor | None = None) -> Self:
        """Return one reward for each trajectory, to be compared within its group; all of its tokens get one advantage.

        For trajectories with traces, return each trace's reward, compared with those of the same agent in the group;
        the advantage of a trace applies to the tokens of its agent.

        Args:
            batch: a batch with rewards.
            rewards: [M], used instead of ``batch.rewards``; None to use those.
        """
        if all(one.traces is None for one in batch.trajectories):
            rewards = batch.rewards if rewards is None else rewards
            assert rewards is not None
            return cls(rewards, batch.group_ids, torch.arange(batch.num_trajectories))
        traces = Traces.of_batch(batch, rewards)
        of_tokens = _spread_turns(batch, traces.of_turns, traces.order)
        return cls(traces.rewards, traces.group_ids, traces.trajectory_ids, of_tokens)

    @classmethod
    def of_turns(cls, batch: RolloutBatch, turns: Turns, discount: float, baseline: TurnBaseline) -> Self:
        """Return the discounted return of each turn, with the group of turns in which it is compared.

        The baseline determines this group:

        - group: to be compared with the returns of all turns of the group (of the same agent).
        - turn: to be compared with those of the same turn in the group's other trajectories, which must have as many
          turns.

        Args:
            batch: the batch of the turns.
            turns: the turns, with their rewards.
            discount: factor by which the next turn's return is multiplied.
            baseline: one of the above.

        Raises:
            ConfigError: the baseline is "turn", and trajectories of a group have different numbers of turns.
        """
        groups = turns.traces.group_ids[turns.traces.of_turns]
        if baseline == "turn":
            _check_comparable(batch, turns.traces)
            groups = groups * (max(turns.numbers.tolist(), default=0) + 1) + turns.numbers
        return cls(turns.discount_rewards(discount), groups, turns.trajectory_ids, turns.of_tokens)

    def to_tokens(self, batch: RolloutBatch, values: Tensor) -> Tensor:
        """Repeat ``values`` [U], one for each reward or return, over the tokens to which each applies: [T]."""
        if self.of_tokens is None:
            return batch.to_tokens(values)
        return torch.cat([values, values.new_zeros(1)])[self.of_tokens]


def find_signal(batch: RolloutBatch, rewards: Tensor, *, tolerance: float = EPSILON) -> Tensor:
    """Return for each trajectory whether the rewards in its group differ, so that there is a learning signal: [M] bool.

    With several agents, it suffices that the rewards of one agent differ.

    Args:
        batch: without NaN rewards.
        rewards: [M], the rewards to compare.
        tolerance: see :func:`has_signal`.
    """
    compared = Returns.of_trajectories(batch, rewards)
    differ = has_signal(compared.values, compared.group_ids, tolerance=tolerance)
    return torch.isin(batch.group_ids, batch.group_ids[compared.trajectory_ids[differ]])


def _find_traces(trajectory: Trajectory) -> list[AgentTrace]:
    """Return a trajectory's agent traces; a single trace of all turns if its environment returned none.

    Raises:
        ConfigError: a turn of the policy is in no trace, or in several, or a reward is not finite.
    """
    num_turns, traces = len(trajectory.samples), trajectory.traces
    if traces is None:
        return [AgentTrace("", trajectory.reward or 0.0, list(range(num_turns)))]
    place = f"Prompt {trajectory.prompt.index}: its environment gave the traces of"
    for trace in traces:
        if not math.isfinite(trace.reward):
            raise ConfigError(f"{place} '{trace.agent}' the reward {trace.reward}, and it has to be a finite number.")
    found = [turn for trace in traces for turn in trace.turns]
    if sorted(found) != list(range(num_turns)):
        names = ", ".join(dict.fromkeys(trace.agent for trace in traces))
        raise ConfigError(
            f"{place} {names or 'no agent'} the turns {found}, and the policy has {num_turns}. Each turn, counted from "
            "0, is of one trace."
        )
    return traces


def _read_turn_rewards(trajectory: Trajectory) -> list[float]:
    """Return the rewards of a trajectory's turns; 0 for turns without a reward from the environment."""
    given, num_turns = trajectory.turn_rewards, len(trajectory.samples)
    rewards = [0.0] * num_turns if given is None else given
    if len(rewards) != num_turns:
        raise ConfigError(
            f"Prompt {trajectory.prompt.index}: its environment gave {len(rewards)} turn_rewards, and the policy has "
            f"{num_turns} turns. With model.turn_discount each turn of the policy needs one, 0 where nothing is to be "
            "said."
        )
    return rewards


def _spread_turns(batch: RolloutBatch, values: Tensor, order: Tensor) -> Tensor:
    """Spread a value of each turn over the tokens that the turn sampled: [T]; -1 for other tokens.

    Args:
        batch: the batch of the turns.
        values: [K] int64.
        order: [K], the index of each turn in the trajectories' order.
    """
    messages = [turn for one in batch.trajectories for turn in one.turns]
    is_sampled = torch.tensor([turn.sample is not None for turn in messages], dtype=torch.bool)
    of_messages = torch.full((len(messages) + 1,), -1)
    of_messages[is_sampled.nonzero()[:, 0][order]] = values
    counts = torch.tensor([len(one.turns) for one in batch.trajectories], dtype=torch.int64)
    places = batch.to_tokens(counts.cumsum(0) - counts) + batch.turn_ids
    return of_messages[torch.where(batch.is_sampled, places, -1)]


def _check_comparable(batch: RolloutBatch, traces: Traces) -> None:
    """Raise a ConfigError for groups whose trajectories differ in their numbers of turns."""
    num_turns = torch.tensor(list(map(len, traces.turns)))
    for group in traces.group_ids.unique():
        own = num_turns[traces.group_ids == group]
        if own.min() != own.max():
            trajectory = traces.trajectory_ids[traces.group_ids == group][0]
            raise ConfigError(
                f"model.turn_baseline='turn': the trajectories of prompt {batch.prompts[trajectory].index} have from "
                f"{int(own.min())} to {int(own.max())} turns, and a turn that some of them never come to has nothing "
                "to be compared with. Use turn_baseline 'group', or an environment of as many turns for each "
                "trajectory."
            )
