"""What advantages are taken of: the reward of each trajectory, or the return of each turn of the policy.

Letters beside those of the package: ``M`` trajectories; ``K`` the policy's turns, trajectory by trajectory and in their
order; ``U`` what is compared: one or the other.
"""

import math
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from rlightning.errors import ConfigError
from rlightning.types import RolloutBatch, Trajectory

TurnBaseline = Literal["group", "turn"]


class Turns(NamedTuple):
    """The policy's turns of a batch, for estimators that give each turn or token a credit of its own.

    Attributes:
        rewards: [K] float64, which sum to the trajectory's in ``batch.rewards``: what that has beyond the rewards of
            turns (reward functions, penalties) belongs to the last turn.
        trajectory_ids: [K] int64, the trajectory that each turn is of.
        numbers: [K] int64, its place among the policy's turns of the trajectory, from 0.
        of_tokens: [T] int64, the turn that sampled each token; -1 elsewhere.
    """

    rewards: Tensor
    trajectory_ids: Tensor
    numbers: Tensor
    of_tokens: Tensor

    @classmethod
    def of_batch(cls, batch: RolloutBatch) -> Self:
        """Return those of a batch with rewards, on the CPU.

        Raises:
            ConfigError: an environment gave another number of turn rewards than the policy has turns.
        """
        assert batch.rewards is not None
        rewards: list[float] = []
        numbers: list[int] = []
        first_message: list[int] = []
        turn_of_message: list[int] = []  # -1 for what the policy has not sampled
        for one, total in zip(batch.trajectories, batch.rewards.tolist(), strict=True):
            first_message.append(len(turn_of_message))
            number = 0
            for turn in one.turns:
                turn_of_message.append(-1 if turn.sample is None else len(rewards) + number)
                number += turn.sample is not None
            rewards += _split_reward(one, total, number)
            numbers += range(number)
        counts = torch.tensor([len(one.samples) for one in batch.trajectories], dtype=torch.int64)
        messages = batch.to_tokens(torch.tensor(first_message, dtype=torch.int64)) + batch.turn_ids
        lookup = torch.tensor([*turn_of_message, -1], dtype=torch.int64)
        return cls(
            torch.tensor(rewards, dtype=torch.float64),
            torch.arange(len(counts)).repeat_interleave(counts),
            torch.tensor(numbers, dtype=torch.int64),
            lookup[torch.where(batch.is_sampled, messages, -1)],
        )

    def discount_rewards(self, discount: float) -> Tensor:
        """Return what each turn and those after it were given: ``G_k = r_k + discount * G_{k+1}``: [K] float64."""
        returns = self.rewards.clone()
        for number in range(max(self.numbers.tolist(), default=0), 0, -1):
            later = (self.numbers == number).nonzero()[:, 0]
            returns[later - 1] += discount * returns[later]
        return returns

    def sum_tokens(self, values: Tensor) -> Tensor:
        """Sum [T] values over the tokens that each turn sampled: [K] float64."""
        is_sampled = self.of_tokens >= 0
        return torch.zeros_like(self.rewards).index_add(0, self.of_tokens[is_sampled], values[is_sampled].double())

    def to_tokens(self, values: Tensor) -> Tensor:
        """Repeat [K] values over the tokens that each turn sampled: [T], 0 elsewhere."""
        return torch.cat([values, values.new_zeros(1)])[self.of_tokens]


class Returns(NamedTuple):
    """What group baselines compare: trajectories by their rewards, or turns by their returns.

    Attributes:
        values: [U], a reward or a return each.
        group_ids: [U] int64, equal for those that are compared with each other.
        trajectory_ids: [U] int64, the trajectory that each belongs to.
        turns: None where trajectories are compared.
    """

    values: Tensor
    group_ids: Tensor
    trajectory_ids: Tensor
    turns: Turns | None = None

    @classmethod
    def of_trajectories(cls, batch: RolloutBatch) -> Self:
        """Return each trajectory's reward, to be compared within its group; its tokens all have the same credit."""
        assert batch.rewards is not None
        return cls(batch.rewards, batch.group_ids, torch.arange(batch.num_trajectories))

    @classmethod
    def of_turns(cls, batch: RolloutBatch, turns: Turns, discount: float, baseline: TurnBaseline) -> Self:
        """Return each turn's discounted return.

        - group: compared with those of all turns of the group, which every environment allows.
        - turn: compared with those of the same turn of the group's other trajectories, which turns without a
          counterpart do not allow.

        Args:
            batch: the turns'.
            turns: with their rewards.
            discount: of the next turn's return.
            baseline: of the above.

        Raises:
            ConfigError: turns are compared with their counterparts, and trajectories of a group differ in number.
        """
        groups = batch.group_ids[turns.trajectory_ids]
        if baseline == "turn":
            _check_comparable(batch)
            groups = groups * (max(turns.numbers.tolist(), default=0) + 1) + turns.numbers
        return cls(turns.discount_rewards(discount), groups, turns.trajectory_ids, turns)

    def to_tokens(self, batch: RolloutBatch, values: Tensor) -> Tensor:
        """Repeat [U] values over the tokens of each: [T]."""
        return batch.to_tokens(values) if self.turns is None else self.turns.to_tokens(values)


def _split_reward(trajectory: Trajectory, total: float, num_turns: int) -> list[float]:
    """Return the rewards of a trajectory's turns, which sum to ``total``."""
    given = trajectory.turn_rewards
    rewards = [0.0] * num_turns if given is None else list(given)
    if len(rewards) != num_turns:
        raise ConfigError(
            f"Prompt {trajectory.prompt.index}: its environment gave {len(rewards)} turn_rewards, and the policy has "
            f"{num_turns} turns. With model.turn_discount each turn of the policy needs one, 0 where nothing is to be "
            "said."
        )
    if rewards:
        rewards[-1] += total - math.fsum(rewards)
    return rewards


def _check_comparable(batch: RolloutBatch) -> None:
    """Refuse groups of which a trajectory has turns that another one has not."""
    num_turns = torch.tensor([len(one.samples) for one in batch.trajectories])
    for group in batch.group_ids.unique():
        own = num_turns[batch.group_ids == group]
        if own.min() != own.max():
            index = batch.prompts[int((batch.group_ids == group).nonzero()[0])].index
            raise ConfigError(
                f"model.turn_baseline='turn': the trajectories of prompt {index} have from {int(own.min())} to "
                f"{int(own.max())} turns, and a turn that some of them never come to has nothing to be compared with. "
                "Use turn_baseline 'group', or an environment of as many turns for each trajectory."
            )
