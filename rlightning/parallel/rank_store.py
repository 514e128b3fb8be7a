"""A key-value store of all ranks, with which they agree on decisions without a collective.

Barriers store which barrier each rank has reached, the stop signal its votes, the failure watch its address and
failures.
"""

import copy
import functools
import queue
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Self, TypeVar

from rlightning import intervals
from rlightning.errors import RunError
from rlightning.processes.liveness import Deadline
from rlightning.torch_internals import Store

T = TypeVar("T")


class StoreError(RunError, RuntimeError):
    """The store does not answer: its host process has ended or cannot be reached."""


class StoreSilentError(StoreError):
    """The store does not answer, but its connection is open: its host process may be suspended, and resume later."""


class RankStore:
    """A key-value store of texts that all ranks share; a request without an answer in time raises a StoreError.

    The process group's own store can wait forever if its host is suspended or unreachable, without a way to interrupt
    it. Hence requests run in a thread of this process.

    Args:
        store: the process group's store, to which this object opens its own connection.
    """

    def __init__(self, store: Store, prefix: str, rank: int, world_size: int) -> None:
        self.rank, self.ranks = rank, range(world_size)
        self._prefix = prefix
        self._deadline: Deadline | None = None
        self._requests: queue.SimpleQueue[Callable[[Callable[[], Store]], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(store,), name="rank-store", daemon=True)
        self._thread.start()

    def set(self, key: str, text: str) -> None:
        """Write ``text`` under a key."""
        self._ask(lambda store: store.set(self._prefix + key, text))

    def get(self, key: str) -> str | None:
        """Return the text of a key; None if it has no value."""

        def read(store: Store) -> str | None:
            # get() would wait for a missing key.
            return store.get(self._prefix + key).decode() if store.check([self._prefix + key]) else None

        return self._ask(read)

    def set_first(self, key: str, text: str) -> str:
        """Write ``text`` unless a rank has already set the key; return the key's value, the same on all ranks."""
        return self._ask(lambda store: store.compare_set(self._prefix + key, "", text)).decode()

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0; return its new value."""
        return self._ask(lambda store: store.add(self._prefix + key, amount))

    def by_rank(self, key: str, ranks: Iterable[int] | None = None) -> dict[int, str]:
        """Return the texts under ``key/rank`` by rank, for ``ranks`` or all ranks, without ranks that have no text."""
        texts = {rank: self.get(f"{key}/{rank}") for rank in (self.ranks if ranks is None else ranks)}
        return {rank: text for rank, text in texts.items() if text is not None}

    def exchange(
        self, key: str, text: str, seconds: float, *, is_over: Callable[[list[int]], bool] = lambda missing: False
    ) -> dict[int, str]:
        """Write this rank's text, wait up to ``seconds`` for the other ranks' texts, and return those found, by rank.

        ``is_over`` is called repeatedly with the missing ranks; the wait ends when it returns True.
        """
        self.set(f"{key}/{self.rank}", text)
        found: dict[int, str] = {}

        def is_complete() -> bool:
            found.update(self.by_rank(key, [rank for rank in self.ranks if rank not in found]))
            missing = [rank for rank in self.ranks if rank not in found]
            return not missing or is_over(missing)

        Deadline(seconds).wait_until(is_complete)
        return dict(sorted(found.items()))

    def until(self, deadline: Deadline) -> Self:
        """Return a copy with the same connection, whose requests do not wait beyond ``deadline``.

        A request may nevertheless wait for ``intervals.MIN_STORE_TIMEOUT`` seconds.
        """
        store = copy.copy(self)
        store._deadline = deadline
        return store

    def close(self) -> None:
        """Close this rank's connection, which on rank 0 would keep the store's server and its port alive."""
        self._requests.put(None)
        self._thread.join(1.0)

    def _ask(self, request: Callable[[Store], T]) -> T:
        answers: queue.SimpleQueue[T | RuntimeError] = queue.SimpleQueue()

        def answer(connect: Callable[[], Store]) -> None:
            try:
                answers.put(request(connect()))
            except RuntimeError as error:
                answers.put(error)

        self._requests.put(answer)
        seconds = intervals.STORE_TIMEOUT
        if self._deadline is not None:
            seconds = min(seconds, max(intervals.MIN_STORE_TIMEOUT, self._deadline.remaining))
        try:
            found = answers.get(timeout=seconds)
        except queue.Empty:
            raise StoreSilentError(f"The ranks' store gave no answer in {seconds:.0f} s.") from None
        if isinstance(found, RuntimeError):
            raise StoreError("The ranks' store does not answer.") from found
        return found

    def _serve(self, store: Store) -> None:
        @functools.cache
        def connect() -> Store:
            own: Store = store.clone()  # type: ignore[attr-defined]
            own.set_timeout(timedelta(seconds=intervals.STORE_TIMEOUT))
            return own

        while (answer := self._requests.get()) is not None:
            answer(connect)
