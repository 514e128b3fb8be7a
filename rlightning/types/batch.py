"""The packed batch of the update: token sequences of many trajectories, concatenated without padding.

::

    trajectory        0                       1        2
    sequence      0        1                  2        3        a sequence is a branch of a trajectory
    token      P P s s   P P o o s s s      P s s    P s        prompt, sampled, observed

Letters in shapes: ``T`` tokens of the whole batch, ``N`` sequences, ``M`` trajectories, ``G`` groups.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlightning.errors import ConfigError
from rlightning.python_values import field_values
from rlightning.types import axes
from rlightning.types.axes import Axis, axis
from rlightning.types.packed_supports import check_supports, pack_supports
from rlightning.types.shared_prefixes import SharedPrefixes
from rlightning.types.trajectory import Branch, BranchReason, Prompt, Sample, Trajectory

UNITS: dict[Axis, str] = {"T": "tokens", "N": "sequences", "M": "trajectories", "G": "groups"}
"""Names of the entries along each axis."""
TOKEN_FIELDS = (
    ("token_ids", "token_ids", np.int64),
    ("is_sampled", "is_sampled", np.bool_),
    ("rollout_logprobs", "logprobs", np.float32),
    ("weight_versions", "weight_versions", np.int32),
    ("turn_ids", "turns", np.int32),
)
"""Per-token fields of a batch, the attribute of a branch from which each is concatenated, and its type."""

_DERIVED: dict[str, Any] = {"shared": None, "_max_length": None, "_sampled_index": None, "_supports": None}
"""Fields that are derived from others, and hence unset when those change."""


class LossTotals(NamedTuple):
    """The denominators of a loss, counted over all micro-batches and ranks of one optimizer step."""

    tokens: float
    sequences: float
    trajectories: float
    groups: float
    turns: float


@dataclass(slots=True)
class RolloutBatch:
    """Trajectories whose token sequences (branches) are concatenated without padding.

    Position ``t`` of every [T] tensor refers to ``token_ids[t]`` itself: ``old_logprobs[t]`` is the log-probability of
    that token given those before it in its sequence (0 for a sequence's first token). If every trajectory has one
    branch, sequences and trajectories are the same.

    An algorithm adds its own field in a subclass, which it sets as ``batch_type``::

        @dataclass(slots=True)
        class WeightedBatch(RolloutBatch):
            weight: Tensor | None = field(default=None, metadata=axis("M"))

    Attributes:
        token_ids: [T] int64.
        is_sampled: [T] bool, the tokens that the policy sampled; no other is trained.
        rollout_logprobs: [T] float32, from the sampler; 0 where not sampled.
        weight_versions: [T] int32, version of the weights that sampled each token; -1 where not sampled.
        turn_ids: [T] int32, the turn of its trajectory to which each token belongs; -1 for the prompt.
        cu_seqlens: [N+1] int32, sequence ``i`` is ``cu_seqlens[i]:cu_seqlens[i+1]``.
        trajectory_ids: [N] int64, the trajectory that each sequence is a branch of.
        completion_lengths: [M] int64, sampled tokens in all branches of each trajectory, even if a micro-batch has only
            some of the branches.
        group_ids: [M] int64, equal for trajectories of one prompt.
        group_lengths: [M] int64, sampled tokens of each trajectory's whole group, even if a micro-batch has only a part
            of the group; set for an update.
        reasons: [N] list, why each branch began.
        trajectories: [M] list, without branches, which are in the tensors; :meth:`unpack` combines both.
        rewards: [M] float64.
        scores: [M] float64 each, by the reward function's name, unweighted; NaN if it does not apply or failed.
        advantages: [T] float32.
        old_logprobs: [T] float32, of the policy before this rollout's first update.
        ref_logprobs: [T] float32, of the reference model.
        is_skipped: [N] bool, sequences without gradient, which the update does not compute.
        shares_prefixes: whether long common prefixes of this batch's sequences are computed once.
        totals: the loss's denominators; set on micro-batches.
        shared: tokens of a micro-batch that are computed once for several sequences; None if none are.

    A batch that :meth:`to` has moved caches values from the host, so that computing with it does not wait for its
    device; ``is_sampled`` must not be changed afterwards.
    """

    token_ids: Tensor = field(metadata=axis("T"))
    is_sampled: Tensor = field(metadata=axis("T"))
    rollout_logprobs: Tensor = field(metadata=axis("T"))
    weight_versions: Tensor = field(metadata=axis("T", fill=-1))
    turn_ids: Tensor = field(metadata=axis("T", fill=-1))
    cu_seqlens: Tensor
    trajectory_ids: Tensor = field(metadata=axis("N"))
    completion_lengths: Tensor = field(metadata=axis("M"))
    group_ids: Tensor = field(metadata=axis("M"))
    reasons: list[BranchReason] = field(metadata=axis("N"))
    trajectories: list[Trajectory] = field(metadata=axis("M"))
    rewards: Tensor | None = field(default=None, metadata=axis("M"))
    group_lengths: Tensor | None = field(default=None, metadata=axis("M"))
    scores: dict[str, Tensor] = field(default_factory=dict, metadata=axis("M"))
    advantages: Tensor | None = field(default=None, metadata=axis("T"))
    old_logprobs: Tensor | None = field(default=None, metadata=axis("T"))
    ref_logprobs: Tensor | None = field(default=None, metadata=axis("T"))
    is_skipped: Tensor | None = field(default=None, metadata=axis("N"))
    shares_prefixes: bool = False
    totals: LossTotals | None = None
    shared: SharedPrefixes | None = None
    _max_length: int | None = field(default=None, repr=False)
    _sampled_index: Tensor | None = field(default=None, repr=False)
    _supports: Tensor | None = field(default=None, repr=False)

    if not TYPE_CHECKING:  # otherwise a type checker accepts any name as a field

        def __setattr__(self, name: str, value: object) -> None:
            try:
                object.__setattr__(self, name, value)  # `super()` does not know the class that `slots` has made
            except AttributeError as error:
                raise AttributeError(
                    f"{type(self).__name__} has no field '{name}'. Declare it in a subclass of RolloutBatch, which "
                    "your module names as batch_type: docs/own_values.md."
                ) from error

    @classmethod
    def pack(cls, groups: Sequence[Sequence[Trajectory]]) -> Self:
        """Return a batch with the branches of the trajectories concatenated.

        Args:
            groups: the trajectories of each prompt, in any number.

        Returns:
            A batch on the CPU, without rewards. A subclass's field with one number for each trajectory is set from the
            entry of ``Trajectory.metrics`` with its name: float32, NaN for a trajectory without this entry.

        Raises:
            ConfigError: a branch begins with a sampled token, which has no context.
            ValueError: a sampled token of a trajectory is trained in no branch, or in several.
        """
        trajectories = [one for group in groups for one in group]
        branches = [branch for one in trajectories for branch in one.branches]
        tokens: dict[str, Any] = {}
        arrays = [branch.arrays() for branch in branches]
        for name, source, dtype in TOKEN_FIELDS:
            parts = [np.asarray(values[source]) for values in arrays]
            tokens[name] = torch.from_numpy(np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False))
        bounds = np.concatenate([[0], np.cumsum([len(branch.token_ids) for branch in branches])])
        batch = cls(
            **tokens,
            cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
            trajectory_ids=torch.tensor([m for m, one in enumerate(trajectories) for _ in one.branches]).long(),
            completion_lengths=torch.tensor([one.num_sampled for one in trajectories]).long(),
            group_ids=torch.tensor([g for g, group in enumerate(groups) for _ in group]).long(),
            reasons=[branch.reason for branch in branches],
            trajectories=trajectories,
        )
        _check_sampled(batch)
        check_supports(batch)
        batch.trajectories = [replace(one, branches=()) for one in trajectories]
        for f, own in axes.axis_fields(cls):
            if own.name == "M" and any(f.name in one.metrics for one in trajectories):
                values = [one.metrics.get(f.name, np.nan) for one in trajectories]
                setattr(batch, f.name, torch.tensor(values, dtype=torch.float32))
        return batch

    @classmethod
    def of_sequences(cls, sequences: Sequence[Sequence[int]]) -> Self:
        """Return a batch of token sequences in which all tokens but the first count as sampled."""
        groups = []
        for number, tokens in enumerate(sequences):
            count = len(tokens) - 1
            sample = Sample(list(tokens[1:]), [0.0] * count, [0] * count, "", "stop")
            groups.append([Trajectory.single_turn(Prompt(number, "", list(tokens[:1]), {}), sample)])
        return cls.pack(groups)

    def token_arrays(self) -> dict[str, NDArray[np.generic]]:
        """Return the batch's per-token values as NumPy arrays [T], by the names of :class:`Branch`'s attributes."""
        values = field_values(self)
        return {source: values[name].cpu().numpy() for name, source, _ in TOKEN_FIELDS}

    def unpack(self) -> list[Trajectory]:
        """Return the trajectories that :meth:`pack` was called with; branches that are not in the batch are missing."""
        columns = self.token_arrays().items()
        branches: list[list[Branch]] = [[] for _ in self.trajectories]
        bounds = self.cu_seqlens.tolist()
        for reason, start, end, m in zip(self.reasons, bounds, bounds[1:], self.trajectory_ids.tolist(), strict=False):
            branch = Branch(reason)
            arrays = branch.arrays()
            for source, values in columns:
                arrays[source].frombytes(values[start:end].tobytes())
            branches[m].append(branch)
        return [replace(one, branches=tuple(own)) for one, own in zip(self.trajectories, branches, strict=True)]

    @property
    def num_tokens(self) -> int:
        """The number of tokens, ``T``."""
        return self.token_ids.numel()

    @property
    def num_sequences(self) -> int:
        """The number of sequences, ``N``."""
        return self.cu_seqlens.numel() - 1

    @property
    def num_trajectories(self) -> int:
        """The number of trajectories, ``M``."""
        return len(self.trajectories)

    @property
    def prompts(self) -> list[Prompt]:
        """The prompt of each trajectory: M prompts."""
        return [one.prompt for one in self.trajectories]

    @property
    def completions(self) -> list[Sample]:
        """The completion of each trajectory: M samples; only for single-turn trajectories.

        Raises:
            ValueError: a trajectory has no sample, or several.
        """
        return [one.completion for one in self.trajectories]

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of each sequence: [N] int64."""
        return (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).long()

    @property
    def sampled_lengths(self) -> Tensor:
        """The number of sampled tokens of each sequence: [N] int64."""
        # Exact up to 2^24 tokens in a sequence, and without an index for each token.
        return torch.segment_reduce(self.is_sampled.float(), "sum", lengths=self.lengths, unsafe=True).long()

    @property
    def max_length(self) -> int:
        """The number of tokens of the longest sequence."""
        return self._max_length if self._max_length is not None else max(self.lengths.tolist(), default=0)

    @property
    def sampled_index(self) -> Tensor:
        """The indices of the sampled tokens: [S] int64."""
        return self.is_sampled.nonzero()[:, 0] if self._sampled_index is None else self._sampled_index

    @property
    def supports(self) -> Tensor | None:
        """The token ids from which each sampled token was drawn, padded with -1: [S, K] int32, in the order of
        :attr:`sampled_index`.

        A row of only -1 stands for a distribution that is not truncated. None if no distribution is, as without
        ``top_p``, ``top_k`` and ``min_p``.
        """
        return pack_supports(self) if self._supports is None else self._supports

    @property
    def position_ids(self) -> Tensor:
        """Each token's position in its sequence, counted from 0: [T] int64."""
        starts = self.to_tokens(self.cu_seqlens[:-1], axis="N")
        return torch.arange(self.num_tokens, device=self.token_ids.device) - starts

    def to_tokens(self, values: Tensor, axis: Axis = "M") -> Tensor:
        """Repeat values [M], one for each trajectory, over the trajectory's tokens: [T].

        Args:
            values: [M], or one for each entry of ``axis``; groups in the order of their ids.
            axis: axis of the values.
        """
        device = values.device
        if axis == "G":
            values, axis = values[torch.unique(self.group_ids, return_inverse=True)[1].to(device)], "M"
        if axis == "M":
            values, axis = values[self.trajectory_ids.to(device)], "N"
        if axis == "N":
            values = values.repeat_interleave(self.lengths.to(device), output_size=self.num_tokens)
        return values

    def sum_tokens(self, values: Tensor, axis: Axis = "M") -> Tensor:
        """Sum [T] values over each trajectory: [M]; or over each sequence: [N]."""
        size = self.num_trajectories if axis == "M" else self.num_sequences
        owners = self.to_tokens(torch.arange(size, device=values.device), axis)
        return values.new_zeros(size).index_add_(0, owners, values)

    def temperatures(self, default: float) -> float | Tensor:
        """Return the temperatures at which the trajectories were sampled.

        Args:
            default: the run's temperature.

        Returns:
            [M] float32, on the batch's device; ``default`` if no prompt has its own temperature.
        """
        if all(prompt.temperature is None for prompt in self.prompts):
            return default
        own = [default if prompt.temperature is None else prompt.temperature for prompt in self.prompts]
        return axes.move(torch.tensor(own), self.token_ids.device)

    def to(self, device: torch.device | str) -> Self:
        """Return the batch with its tensors on ``device``; copies from host to GPU are asynchronous."""
        known = replace(self, _max_length=self.max_length, _sampled_index=self.sampled_index, _supports=self.supports)
        return axes.to(known, torch.device(device))

    def select(self, indices: Iterable[int] | Tensor, axis: Axis = "M") -> Self:
        """Return the batch of the given trajectories, in the given order, packed again.

        Args:
            indices: without repetition; of trajectories, or of the entries of ``axis``.
            axis: "M"; or "N" to select sequences, whose trajectories are in the order of their first sequences.
        """
        given = indices if isinstance(indices, Tensor) else torch.tensor(list(indices), dtype=torch.int64)
        index = given.to(self.token_ids.device, torch.int64)
        owners = self.trajectory_ids
        if axis == "N":
            sequences = index
            chosen = owners.new_tensor(list(dict.fromkeys(owners[sequences].tolist())))
        else:
            chosen = index
        places = owners.new_full((self.num_trajectories,), -1)
        places[chosen] = torch.arange(chosen.numel(), device=owners.device)
        if axis == "M":
            order = places[owners].argsort(stable=True)
            sequences = order[order.numel() - int((places[owners] >= 0).sum()) :]
        starts, ends = self.cu_seqlens[sequences], self.cu_seqlens[sequences + 1]
        ids, kept = torch.unique(self.group_ids), torch.unique(self.group_ids[chosen])
        cut = axes.select(
            self,
            {
                "T": _merge_runs(zip(*torch.stack([starts, ends]).tolist(), strict=True)),
                "N": sequences,
                "M": chosen,
                "G": torch.searchsorted(ids, kept),
            },
        )
        return replace(
            cut,
            cu_seqlens=torch.cat([starts.new_zeros(1), (ends - starts).cumsum(0, dtype=torch.int32)]),
            trajectory_ids=places[owners[sequences]],
            **_DERIVED,
        )

    def padding(self) -> Self:
        """Return a batch of one token that adds no loss, for a rank without data in a collective computation."""
        one = axes.pad(self, replace(type(self).of_sequences([[0]]), totals=self.totals))
        return one.to(self.token_ids.device)

    def check(self) -> None:
        """Convert newly set fields to tensors, in place; raise a ConfigError for a field of a wrong length."""
        num_groups = len(set(self.group_ids.tolist()))
        sizes: dict[Axis, int] = {
            "T": self.num_tokens,
            "N": self.num_sequences,
            "M": self.num_trajectories,
            "G": num_groups,
        }
        axes.check(self, sizes, UNITS)

    @classmethod
    def concatenate(cls, batches: Sequence[Self]) -> Self:
        """Concatenate several batches. Optional tensors must be present in all of them or in none.

        Groups of different batches stay separate: their ids are offset. A single batch is not copied.
        """
        if len(batches) == 1:
            return replace(batches[0])
        group_ids, trajectory_ids, num_groups, num_trajectories = [], [], 0, 0
        for batch in batches:
            group_ids.append(batch.group_ids + num_groups)
            trajectory_ids.append(batch.trajectory_ids + num_trajectories)
            num_groups += int(batch.group_ids.max()) + 1 if batch.num_trajectories else 0
            num_trajectories += batch.num_trajectories
        lengths = torch.cat([b.lengths for b in batches])
        return replace(
            axes.concatenate(batches),
            cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int(),
            trajectory_ids=torch.cat(trajectory_ids),
            group_ids=torch.cat(group_ids),
            **_DERIVED,
        )


def _check_sampled(batch: RolloutBatch) -> None:
    """Raise an error unless each sampled token is trained in exactly one branch, and none begins a branch.

    Args:
        batch: a batch with all branches of its trajectories.
    """
    for one in batch.trajectories:
        if not len(one.prompt.token_ids):
            raise ConfigError(
                f"Prompt {one.prompt.index} has no token, and nothing could predict its completion's first one. Begin "
                "it with the tokenizer's beginning-of-sequence token, or leave it out."
            )
        if any(branch.is_sampled[0] for branch in one.branches if branch.is_sampled):
            raise ValueError(
                f"Prompt {one.prompt.index}: a branch begins with a sampled token, which nothing could predict."
            )
    trained = batch.sampled_lengths
    num_trained = trained.new_zeros(batch.num_trajectories).index_add_(0, batch.trajectory_ids, trained)
    for one, count in zip(batch.trajectories, num_trained.tolist(), strict=True):
        if count != one.num_sampled or (len(one.turns) > 1 and not _trains_samples(one)):
            raise ValueError(
                f"Prompt {one.prompt.index}: {one.num_sampled} tokens were sampled, and the branches train {count}. "
                "Each sampled token is trained in exactly one branch: a later one has it as history, with append()."
            )


def _trains_samples(trajectory: Trajectory) -> bool:
    """Return whether the trained tokens of a trajectory's branches equal its samples' tokens, turn by turn."""
    masks = [np.asarray(branch.is_sampled, np.bool_) for branch in trajectory.branches]
    pairs = list(zip(trajectory.branches, masks, strict=True))
    turns = np.concatenate([np.zeros(0, np.int32), *(np.asarray(branch.turns)[mask] for branch, mask in pairs)])
    trained = np.concatenate([np.zeros(0, np.int64), *(np.asarray(branch.token_ids)[mask] for branch, mask in pairs)])
    sampled = np.concatenate([np.zeros(0, np.int64), *(np.asarray(one.token_ids) for one in trajectory.samples)])
    return np.array_equal(trained[turns.argsort(kind="stable")], sampled)


def _merge_runs(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the bounds of token runs, with adjacent runs merged."""
    merged: list[tuple[int, int]] = []
    for start, end in runs:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
