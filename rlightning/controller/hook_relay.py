"""Relays RL hooks from the workers to callbacks in the controller; batches stay in the workers until they are read.

Each worker's :class:`HookRelay` records hooks; the controller's :class:`Relay` combines those of all ranks.
"""

import logging
import pickle
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.model_helpers import is_overridden

from rlightning.controller.command_feed import CommandFeed
from rlightning.controller.commands import HookCall
from rlightning.controller.rtensor import RTensor, fetch_tensors, store_own_tensors, store_tensors
from rlightning.errors import ConfigError
from rlightning.hooks import RLCallback
from rlightning.protocols import HasTensorParallelRank, HasWeightVersion, has
from rlightning.python_values import field_values
from rlightning.types import RolloutBatch
from rlightning.types.axes import split_lists

log = logging.getLogger(__name__)

T = TypeVar("T")

RL_HOOKS = tuple(name for name in vars(RLCallback) if name.startswith("on_"))
GLOBAL_GROUPS = ("on_update_start", "on_update_end")
"""Hooks after ``balance``: groups are numbered over all ranks, and the ranks of a tensor-parallel group have the same
ones. In other hooks each rank has the batch that it sampled."""

RANK_HOOKS = ("on_predict_prompt_end",)
"""Hooks that each rank calls for itself, any number of times."""

ACTOR_HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
"""Lightning's hooks within a training step, which are not relayed."""


@dataclass(frozen=True)
class BatchPart:
    """One rank's :class:`~rlightning.types.RolloutBatch` as sent to the controller: sizes, and handles to its tensors.

    Attributes:
        tensors: the batch without its lists, with handles in place of tensors; None on a rank that stores nothing.
        lists: handle to the pickled lists by field: [bytes] uint8.
        is_head: whether this is the first rank of its tensor-parallel group.
    """

    num_tokens: int
    num_sequences: int
    num_trajectories: int
    tensors: RolloutBatch | None
    lists: RTensor | None
    is_head: bool

    @classmethod
    def of(cls, batch: RolloutBatch, hook: str, *, is_head: bool) -> Self:
        """Store a rank's batch; return its sizes and handles, or no handles if another rank stores an equal batch."""
        tensors, lists = split_lists(batch)
        pickled = torch.frombuffer(bytearray(pickle.dumps(lists, pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)
        store = store_tensors if hook in GLOBAL_GROUPS else store_own_tensors
        stored = store((tensors, pickled), label=hook)
        stored_tensors, handle = (None, None) if stored is None else stored
        sizes = (batch.num_tokens, batch.num_sequences, batch.num_trajectories)
        return cls(*sizes, stored_tensors, handle, is_head)


class RemoteBatch:
    """The ranks' batches as one, whose tensors stay on the workers until an attribute other than its sizes is accessed.

    Its attributes are those of a :class:`~rlightning.types.RolloutBatch` of all ranks that have sent the hook, in the
    order of ranks.

    Args:
        parts: the ranks' parts; with ``has_global_groups`` at least one of a head rank.
        has_global_groups: whether groups are numbered over all ranks.
    """

    def __init__(self, parts: Sequence[BatchPart], *, has_global_groups: bool) -> None:
        if has_global_groups:
            parts = [part for part in parts if part.is_head]
        self.parts = parts
        self.has_global_groups = has_global_groups
        self._batch: RolloutBatch | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens ``T``, over the ranks of the batch."""
        return sum(part.num_tokens for part in self.parts)

    @property
    def num_sequences(self) -> int:
        """The number of sequences ``N``, over the ranks of the batch."""
        return sum(part.num_sequences for part in self.parts)

    @property
    def num_trajectories(self) -> int:
        """The number of trajectories ``M``, over the ranks of the batch."""
        return sum(part.num_trajectories for part in self.parts)

    def fetch(self) -> RolloutBatch:
        """Return the whole batch, copied to this host."""
        if self._batch is None:
            stored = [(part.tensors, part.lists) for part in self.parts if part.tensors is not None]
            batches = []
            for batch, pickled in fetch_tensors(stored):
                batches.append(replace(batch, **pickle.loads(pickled.numpy().data)))
            self._batch = type(batches[0]).concatenate(batches)
            if self.has_global_groups:
                self._batch.group_ids = torch.cat([batch.group_ids for batch in batches])
        return self._batch

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or name in ("parts", "has_global_groups", "_batch"):
            raise AttributeError(name)
        return getattr(self.fetch(), name)

    def __setattr__(self, name: str, value: object) -> None:
        if name not in ("parts", "has_global_groups", "_batch"):
            raise AttributeError(
                f"batch.{name} cannot be changed in the controller, which has a copy of the workers' batches. Give the "
                'callback runs_in = "workers".'
            )
        super().__setattr__(name, value)


class HookRelay(Checkpoint):
    """A worker's callback that sends RL hooks, and the metrics at the end of an epoch, to the controller.

    It derives from Checkpoint because Lightning calls such callbacks last, at the end of an epoch even after the
    module.
    """

    def __init__(self, feed: CommandFeed, wanted: Collection[str]) -> None:
        self.feed = feed
        self.wanted = wanted
        self._sent: tuple[RolloutBatch, tuple[int, ...], BatchPart] | None = None

    def __getattr__(self, name: str) -> Callable[..., None]:
        # rlightning.hooks.call_hook looks up a hook by its name.
        if name in RL_HOOKS:
            return partial(self._relay, name)
        raise AttributeError(name)

    def on_train_batch_end(self, *_: object, **__: object) -> None:
        """Release the stored batches of the step."""
        self._sent = None

    def on_train_epoch_end(self, *_: object) -> None:
        """Send the epoch's metrics to the controller, then execute its commands until an epoch starts or the fit ends.

        Called after the module's hook, before Lightning resets the metrics.
        """
        self.feed.end_epoch()

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, *_: object, **__: object
    ) -> None:
        """Store the tensors of the step's predictions; the controller gets handles to them as the command's result."""
        self.feed.outputs = store_own_tensors(outputs, label="predict_step")

    def _relay(self, hook: str, trainer: Trainer, module: LightningModule, *arguments: object) -> None:
        if hook not in self.wanted:
            return
        sent = tuple(self._part(a, hook, module) if isinstance(a, RolloutBatch) else a for a in arguments)
        version = module.weight_version if has(module, HasWeightVersion) else 0
        self.feed.queue.record(HookCall(hook, sent, trainer.global_step, version))

    def _part(self, batch: RolloutBatch, hook: str, module: LightningModule) -> BatchPart:
        """Return this rank's part of a batch, which is stored again only if its fields have changed."""
        contents = tuple(map(id, field_values(batch).values()))
        if self._sent is None or self._sent[0] is not batch or self._sent[1] != contents:
            is_head = not has(module, HasTensorParallelRank) or module.tensor_parallel_rank == 0
            self._sent = batch, contents, BatchPart.of(batch, hook, is_head=is_head)
        return self._sent[2]


def wanted_hooks(callbacks: Sequence[Callback]) -> frozenset[str]:
    """Return the names of the RL hooks that at least one of the callbacks overrides."""
    return frozenset(hook for hook in RL_HOOKS for one in callbacks if is_overridden(hook, one, RLCallback))


def warn_of_unrelayed(callbacks: Iterable[Callback]) -> None:
    """Log a warning for each hook that a controller's callback overrides although only workers call it."""
    for callback in callbacks:
        for hook in ACTOR_HOOKS:
            if is_overridden(hook, callback, Callback):
                log.warning(
                    "%s.%s is never called: the callback runs in the controller, and the actor is in the workers. "
                    'Give the class runs_in = "workers".',
                    type(callback).__name__,
                    hook,
                )


class Relay:
    """Calls an RL hook on the controller's callbacks once all ranks have sent it, with the ranks' arguments combined.

    The hooks are called in the order of rank 0; with a single rank immediately. Those in ``RANK_HOOKS`` are called for
    each rank that sends them. :meth:`flush` calls hooks that only some ranks have sent.
    """

    def __init__(self, num_ranks: int, run_call: Callable[[HookCall, Sequence[object]], None]) -> None:
        self._order: deque[HookCall] = deque()
        self._others: list[list[HookCall]] = [[] for _ in range(1, num_ranks)]
        self._run_call = run_call
        self._last: HookCall | None = None

    def add(self, rank: int, call: HookCall) -> None:
        """Store a hook that a rank has sent; then call the stored hooks that all ranks have sent, in rank 0's order."""
        if call.hook in RANK_HOOKS:
            self._run_call(call, call.arguments)
        elif rank == 0:
            self._order.append(call)
        else:
            self._others[rank - 1].append(call)
        while self._order and all(_find(self._order[0].hook, hooks) for hooks in self._others):
            self._run_hook(self._order.popleft(), self._others)

    def flush(self) -> None:
        """Call the hooks that some ranks have sent and others have not, such as those of the wait for one rank's
        engine: rank 0's, then the other ranks', with steps and weight version at least those of the last hook before.

        A hook of ``GLOBAL_GROUPS`` is not called for a batch that no head rank has sent: other ranks may not store it.
        """
        while self._order:
            self._run_hook(self._order.popleft(), self._others)
        for number, hooks in enumerate(self._others):
            while hooks:
                first, last = hooks.pop(0), self._last
                if last is not None:  # later hooks of this rank have been called already, with rank 0's
                    step = max(first.global_step, last.global_step)
                    version = max(first.weight_version, last.weight_version)
                    first = replace(first, global_step=step, weight_version=version)
                self._run_hook(first, self._others[number + 1 :])

    def _run_hook(self, first: HookCall, others: Sequence[list[HookCall]]) -> None:
        """Call a hook of a rank, combined with the first of the same name of each of the ``others`` that has one."""
        same = [first]
        for hooks in others:
            if (found := _find(first.hook, hooks)) is not None:
                hooks.remove(found)
                same.append(found)
        if first.hook in GLOBAL_GROUPS and not _has_head(same):
            return
        self._last = first
        columns = zip(*(call.arguments for call in same), strict=True)
        self._run_call(first, [merge(column, first.hook) for column in columns])


def _has_head(same: Sequence[HookCall]) -> bool:
    """Return whether a head rank has sent one of the hooks, or none of them has a batch."""
    parts = [part for call in same for part in call.arguments if isinstance(part, BatchPart)]
    return not parts or any(part.is_head for part in parts)


def _find(hook: str, sent: Sequence[HookCall]) -> HookCall | None:
    return next((call for call in sent if call.hook == hook), None)


def merge(values: Sequence[object], hook: str) -> object:
    """Return one argument of a hook from those of the ranks that have sent it, in the order of ranks.

    It is a :class:`RemoteBatch`, the concatenated lists, or the value of the first of these ranks.
    """
    if parts := [value for value in values if isinstance(value, BatchPart)]:
        return RemoteBatch(parts, has_global_groups=hook in GLOBAL_GROUPS)
    if lists := [value for value in values if isinstance(value, list)]:
        return [item for one in lists for item in one]
    return values[0]


def split_in_order(batch: Sequence[T], num_parts: int) -> list[Sequence[T]]:
    """Split a batch into consecutive parts of equal size; raises a ConfigError if it cannot be divided."""
    size, rest = divmod(len(batch), num_parts)
    if rest:
        raise ConfigError(
            f"a batch of {len(batch)} cannot be split over num_workers={num_parts}. Use batches of a multiple of it."
        )
    return [batch[start : start + size] for start in range(0, len(batch), size)] if size else [batch] * num_parts
