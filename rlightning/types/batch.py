"""The packed batch that an update reads.

Letters in shapes: ``T`` tokens of the whole batch, ``N`` sequences, ``P`` tokens of a prompt.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from rlightning.errors import ConfigError
from rlightning.types.trajectory import Completion, Prompt

BY_SEQUENCE = ("group_ids", "rewards")
"""Tensors of a batch that have an entry a sequence."""
NAMED = ("reward_components", "extras")
"""Mappings of a batch from names to tensors that have an entry a sequence."""


class LossTotals(NamedTuple):
    """The counts that a loss is divided by, over all micro-batches and all ranks of one optimizer step."""

    tokens: float
    sequences: float


@dataclass(slots=True)
class RolloutBatch:
    """Prompts with their completions, packed end to end; never padded.

    Position ``t`` of every [T] tensor is about ``token_ids[t]`` itself: ``old_logprobs[t]`` is the log-probability of
    that token given those before it in its sequence (0 for a sequence's first token, which nothing precedes).

    Attributes:
        token_ids: [T] int64.
        cu_seqlens: [N+1] int32, sequence ``i`` is ``cu_seqlens[i]:cu_seqlens[i+1]``.
        completion_mask: [T] bool, the tokens that the policy sampled.
        rollout_logprobs: [T] float32, from the engine; 0 on prompts.
        weight_versions: [T] int32, from the engine; -1 on prompts.
        group_ids: [N] int64, equal for completions of one prompt.
        prompts: N of them, one a sequence.
        completions: N of them.
        rewards: [N] float64.
        reward_components: [N] float32 each, by the reward function's name, unweighted; NaN where it gave none.
        extras: [N, ...] each, whatever an algorithm of your own needs of each sequence, by name, of any dtype. Set in
            ``compute_rewards``, ``keep_sequences`` or ``compute_advantages``, or by a generator
            (:attr:`Completion.extras`), it is there in ``policy_loss`` for the sequences of the micro-batch.
        advantages: [T] float32.
        old_logprobs: [T] float32, of the policy before this rollout's first update.
        ref_logprobs: [T] float32, of the reference model.
        totals: set on micro-batches.

    A batch that :meth:`to` has moved knows what its host knew, so that computing with it does not wait for its device;
    whoever changes ``completion_mask`` does so before.
    """

    token_ids: Tensor
    cu_seqlens: Tensor
    completion_mask: Tensor
    rollout_logprobs: Tensor
    weight_versions: Tensor
    group_ids: Tensor
    prompts: list[Prompt]
    completions: list[Completion]
    rewards: Tensor | None = None
    reward_components: dict[str, Tensor] = field(default_factory=dict)
    extras: dict[str, Tensor] = field(default_factory=dict)
    advantages: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    totals: LossTotals | None = None
    _max_length: int | None = field(default=None, repr=False)
    _completion_index: Tensor | None = field(default=None, repr=False)

    @classmethod
    def pack(cls, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> Self:
        """Lay every prompt with each of its completions end to end.

        Args:
            prompts: one a group.
            completions: for each prompt its completions, in any number.

        Returns:
            A batch on the CPU, without rewards. Its ``extras`` are the completions', float32, NaN where one has none.

        Raises:
            ConfigError: a prompt has no token, from which a completion's first one could be predicted.
        """
        for prompt in prompts:
            if not len(prompt.token_ids):
                raise ConfigError(
                    f"Prompt {prompt.index} has no token, and nothing could predict its completion's first one. Begin "
                    "it with the tokenizer's beginning-of-sequence token, or leave it out."
                )
        pairs = [(p, c) for p, group in zip(prompts, completions, strict=True) for c in group]
        groups = [g for g, group in enumerate(completions) for _ in group]
        prompt_ids = [np.asarray(p.token_ids, np.int64) for p in prompts]
        lengths = [len(p.token_ids) + len(c.token_ids) for p, c in pairs]
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        total = int(cu_seqlens[-1])
        token_ids = np.zeros(total, np.int64)
        rollout_logprobs = np.zeros(total, np.float32)
        weight_versions = np.full(total, -1, np.int32)
        completion_mask = np.zeros(total, np.bool_)
        bounds = cu_seqlens.tolist()
        for start, end, group, (_, completion) in zip(bounds, bounds[1:], groups, pairs, strict=False):
            middle = start + len(prompt_ids[group])
            token_ids[start:middle] = prompt_ids[group]
            token_ids[middle:end] = completion.token_ids
            rollout_logprobs[middle:end] = completion.logprobs
            weight_versions[middle:end] = completion.weight_versions
            completion_mask[middle:end] = True
        return cls(
            token_ids=torch.from_numpy(token_ids),
            cu_seqlens=torch.from_numpy(cu_seqlens),
            completion_mask=torch.from_numpy(completion_mask),
            rollout_logprobs=torch.from_numpy(rollout_logprobs),
            weight_versions=torch.from_numpy(weight_versions),
            group_ids=torch.tensor(groups, dtype=torch.int64),
            prompts=[p for p, _ in pairs],
            completions=[c for _, c in pairs],
            extras=_pack_extras([c for _, c in pairs]),
        )

    @classmethod
    def of_sequences(cls, sequences: Sequence[Sequence[int]]) -> Self:
        """A batch of sequences of which every token but the first is asked about."""
        prompts = [Prompt(number, "", list(tokens[:1]), {}) for number, tokens in enumerate(sequences)]
        rests = [np.asarray(tokens[1:], np.int64) for tokens in sequences]
        zeros = [np.zeros(len(rest), np.float32) for rest in rests]
        pairs = zip(rests, zeros, strict=True)
        return cls.pack(prompts, [[Completion("", rest, zero, zero.astype(np.int32), "stop")] for rest, zero in pairs])

    @property
    def num_tokens(self) -> int:
        """``T``."""
        return self.token_ids.numel()

    @property
    def num_sequences(self) -> int:
        """``N``."""
        return self.cu_seqlens.numel() - 1

    @property
    def lengths(self) -> Tensor:
        """[N] int64, tokens of prompt and completion."""
        return (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).long()

    @property
    def completion_lengths(self) -> Tensor:
        """[N] int64, completion tokens."""
        # Exact up to 2^24 tokens a sequence, and without the [T] indices of sum_by_sequence.
        return torch.segment_reduce(self.completion_mask.float(), "sum", lengths=self.lengths, unsafe=True).long()

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return self._max_length if self._max_length is not None else max(self.lengths.tolist(), default=0)

    @property
    def completion_index(self) -> Tensor:
        """[M] int64, the places of the completion tokens."""
        return self.completion_mask.nonzero()[:, 0] if self._completion_index is None else self._completion_index

    @property
    def position_ids(self) -> Tensor:
        """[T] int64, each token's place in its sequence, counted from 0."""
        return torch.arange(self.num_tokens, device=self.token_ids.device) - self.to_tokens(self.cu_seqlens[:-1])

    @property
    def sequence_ids(self) -> Tensor:
        """[T] int64, the sequence that each token belongs to."""
        sequences = torch.arange(self.num_sequences, device=self.token_ids.device)
        return sequences.repeat_interleave(self.lengths, output_size=self.num_tokens)

    def to_tokens(self, values: Tensor) -> Tensor:
        """Repeat [N] values, one a sequence, over the tokens of each sequence: [T]."""
        return values.repeat_interleave(self.lengths.to(values.device), output_size=self.num_tokens)

    def sum_by_sequence(self, values: Tensor) -> Tensor:
        """Sum [T] values over each sequence: [N]."""
        return values.new_zeros(self.num_sequences).index_add_(0, self.sequence_ids, values)

    def temperatures(self, default: float) -> float | Tensor:
        """Return what the sequences were sampled at.

        Args:
            default: the run's temperature.

        Returns:
            [N] float32, on the batch's device; ``default`` where no prompt has a temperature of its own.
        """
        if all(prompt.temperature is None for prompt in self.prompts):
            return default
        own = [default if prompt.temperature is None else prompt.temperature for prompt in self.prompts]
        return _move(torch.tensor(own), self.token_ids.device)

    def to(self, device: torch.device | str) -> Self:
        """The same batch with its tensors on ``device``; copies from the host to a GPU are not waited for."""
        target = torch.device(device)
        here = replace(self, _max_length=self.max_length, _completion_index=self.completion_index)
        moved: dict[str, Any] = {}
        for f in fields(here):
            value = getattr(here, f.name)
            if isinstance(value, Tensor):
                moved[f.name] = _move(value, target)
        return replace(here, **moved, **self._change_named(lambda value: _move(value, target)))

    def select(self, sequences: Sequence[int] | Tensor) -> Self:
        """The batch of the given sequences, in the given order, packed anew.

        Args:
            sequences: indices in ``range(N)``.
        """
        index = torch.as_tensor(sequences, dtype=torch.int64, device=self.token_ids.device)
        starts, ends = self.cu_seqlens[index], self.cu_seqlens[index + 1]
        # Runs of tokens are copied whole: an index a token would take more memory than what it selects.
        order, *bounds = torch.stack([index, starts, ends]).tolist()
        runs = _merge_runs(zip(*bounds, strict=True))
        chosen: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, Tensor) or f.name in ("cu_seqlens", "_completion_index"):
                continue
            if f.name in BY_SEQUENCE:
                chosen[f.name] = value[index]
            else:
                chosen[f.name] = torch.cat([value[:0], *(value[start:end] for start, end in runs)])
        return replace(
            self,
            **chosen,
            cu_seqlens=torch.cat([starts.new_zeros(1), (ends - starts).cumsum(0, dtype=torch.int32)]),
            _max_length=None,
            _completion_index=None,
            prompts=[self.prompts[i] for i in order],
            completions=[self.completions[i] for i in order],
            **self._change_named(lambda value: value[index]),
        )

    def filler(self) -> Self:
        """One token that counts for nothing: for a rank that has to compute along without a sequence of its own."""
        one = type(self).of_sequences([[0]])
        ones: dict[str, Any] = {
            f.name: torch.zeros(1, dtype=value.dtype)
            for f in fields(self)
            if f.name in ("rewards", "advantages", "old_logprobs", "ref_logprobs")
            and (value := getattr(self, f.name)) is not None
        }
        named = self._change_named(lambda value: value.new_zeros(1, *value.shape[1:]))
        return replace(one, **ones, **named, totals=self.totals).to(self.token_ids.device)

    def check_extras(self) -> None:
        """Make tensors of ``extras``, and refuse those that do not have an entry for each sequence.

        Raises:
            ConfigError: names the entry.
        """
        for name, value in self.extras.items():
            tensor = torch.as_tensor(value)
            if tensor.ndim == 0 or len(tensor) != self.num_sequences:
                raise ConfigError(
                    f"batch.extras['{name}'] has the shape {list(tensor.shape)}, and the batch has "
                    f"{self.num_sequences} completions. Its first dimension must be theirs: an entry for each."
                )
            self.extras[name] = tensor

    def _change_named(self, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """The mappings of ``NAMED``, each tensor changed."""
        return {field: {name: change(value) for name, value in getattr(self, field).items()} for field in NAMED}

    @classmethod
    def concatenate(cls, batches: Sequence[Self]) -> Self:
        """Lay several batches end to end. Optional tensors must be there in all of them or in none.

        Groups stay apart: the ids of each batch are counted on from the one before it. One batch alone is not copied.
        """
        if len(batches) == 1:
            return replace(batches[0])
        merged: dict[str, Any] = {}
        for f in fields(cls):
            values = [getattr(b, f.name) for b in batches]
            if isinstance(values[0], Tensor) and f.name not in ("cu_seqlens", "_completion_index"):
                merged[f.name] = torch.cat(values)
        offset = 0
        group_ids = []
        for batch in batches:
            group_ids.append(batch.group_ids + offset)
            offset += int(batch.group_ids.max()) + 1 if batch.num_sequences else 0
        merged["group_ids"] = torch.cat(group_ids)
        lengths = torch.cat([b.lengths for b in batches])
        return replace(
            batches[0],
            **merged,
            cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int(),
            _max_length=None,
            _completion_index=None,
            prompts=[p for b in batches for p in b.prompts],
            completions=[c for b in batches for c in b.completions],
            **_concatenate_named(batches),
        )


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on ``device``, to which a copy from the host is not waited for."""
    # only from page-locked memory a copy goes on by itself
    is_upload = device.type == "cuda" and tensor.device.type == "cpu"
    return (tensor.pin_memory() if is_upload else tensor).to(device, non_blocking=is_upload)


def _pack_extras(completions: Sequence[Completion]) -> dict[str, Tensor]:
    """By name [N] float32, NaN for a completion that has none of that name."""
    names = dict.fromkeys(name for completion in completions for name in completion.extras or ())
    return {name: torch.tensor([(c.extras or {}).get(name, np.nan) for c in completions]) for name in names}


def _concatenate_named(batches: Sequence[RolloutBatch]) -> dict[str, Any]:
    """The mappings of ``NAMED``, of all batches."""
    merged: dict[str, Any] = {}
    for field_name in NAMED:
        parts: list[dict[str, Tensor]] = [getattr(batch, field_name) for batch in batches]
        for part in parts:
            if differing := sorted(part.keys() ^ parts[0].keys()):
                raise ConfigError(
                    f"batch.{field_name}['{differing[0]}'] is set on some of the batches that make a step, and not on "
                    "others. Set it on each, in refills and on all ranks."
                )
        merged[field_name] = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return merged


def _merge_runs(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Bounds of runs of tokens, of which those that follow on each other are made one."""
    merged: list[tuple[int, int]] = []
    for start, end in runs:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
