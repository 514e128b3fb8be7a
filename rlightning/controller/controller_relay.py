"""From what each rank says to what the controller hears: hooks of all ranks as one, and the other way round shares."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from rlightning.controller.commands import Fired
from rlightning.controller.hook_relay import GLOBAL_GROUPS, RANK_HOOKS, BatchPart, RemoteBatch
from rlightning.errors import ConfigError


class Relay:
    """Puts the ranks' hooks together: one is fired when all ranks have come to it, in the order of rank 0.

    Those that concern one rank alone are fired at once.
    """

    def __init__(self, num_ranks: int, fire_one: Callable[[Fired, Sequence[Any]], None]) -> None:
        self._order: deque[Fired] = deque()
        self._others: list[dict[str, deque[Fired]]] = [defaultdict(deque) for _ in range(1, num_ranks)]
        self._fire = fire_one

    def add(self, rank: int, fired: Fired) -> None:
        """Take note of a rank's hook, and fire those that are complete."""
        if fired.hook in RANK_HOOKS:
            self._fire(fired, fired.arguments)
        elif rank == 0:
            self._order.append(fired)
        else:
            self._others[rank - 1][fired.hook].append(fired)
        while self._order and all(waiting[self._order[0].hook] for waiting in self._others):
            self._fire_next()

    def flush(self) -> None:
        """Fire what is left, some of which not all ranks have: an engine may be one rank's alone."""
        while self._order:
            self._fire_next()

    def _fire_next(self) -> None:
        first = self._order.popleft()
        waiting = [hooks[first.hook] for hooks in self._others]
        same = [first, *(hooks.popleft() for hooks in waiting if hooks)]
        columns = zip(*(fired.arguments for fired in same), strict=True)
        self._fire(first, [merge(column, first.hook) for column in columns])


def merge(values: Sequence[Any], hook: str) -> Any:
    """One argument of a hook from those of the ranks."""
    if isinstance(values[0], BatchPart):
        return RemoteBatch(values, has_global_groups=hook in GLOBAL_GROUPS)
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    return values[0]


def split_in_order(batch: Sequence[Any], num_parts: int) -> list[Any]:
    """Neighbouring parts of equal size.

    Raises:
        ConfigError: if the batch does not divide.
    """
    size, rest = divmod(len(batch), num_parts)
    if rest:
        raise ConfigError(
            f"a batch of {len(batch)} cannot be split over num_workers={num_parts}. Use batches of a multiple of it."
        )
    return [batch[start : start + size] for start in range(0, len(batch), size)] if size else [batch] * num_parts
