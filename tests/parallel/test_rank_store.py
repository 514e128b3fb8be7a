"""The ranks' store: texts by rank, the first of which counts, and an end to each wait."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from rlightning import intervals
from rlightning.parallel.rank_store import RankStore, StoreError, StoreSilentError
from rlightning.processes.liveness import Deadline


@pytest.fixture
def stores() -> Iterator[list[RankStore]]:
    shared = HashStore()
    stores = [RankStore(shared, "run/", rank, 3) for rank in range(3)]
    yield stores
    for store in stores:
        store.close()


def test_first_text_counts_on_all_ranks(stores: list[RankStore]) -> None:
    assert stores[0].get("error") is None
    assert [store.set_first("error", f"of rank {store.rank}") for store in stores] == ["of rank 0"] * 3
    assert stores[2].get("error") == "of rank 0"
    assert [store.add("count", 1) for store in stores] == [1, 2, 3]


def test_exchange_returns_texts_of_all_ranks(stores: list[RankStore]) -> None:
    found: dict[int, dict[int, str]] = {}

    def exchange(store: RankStore) -> None:
        found[store.rank] = store.exchange("vote", f"yes {store.rank}", 60)

    threads = [threading.Thread(target=exchange, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {rank: {0: "yes 0", 1: "yes 1", 2: "yes 2"} for rank in range(3)}


def test_exchange_ends_at_deadline_or_when_over(stores: list[RankStore]) -> None:
    assert stores[0].exchange("vote", "yes", 0.05) == {0: "yes"}
    missing: list[list[int]] = []

    def is_over(ranks: list[int]) -> bool:
        missing.append(ranks)
        return True

    assert stores[2].exchange("vote", "no", 600, is_over=is_over) == {0: "yes", 2: "no"}
    assert missing == [[1]]


class Silent:
    """A store that answers nothing, or breaks."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def clone(self) -> "Silent":
        return self

    def set_timeout(self, timeout: Any) -> None: ...

    def set(self, key: str, text: str) -> None:
        time.sleep(self.seconds)
        raise RuntimeError("Connection reset by peer")


def test_wait_for_store_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "MIN_STORE_TIMEOUT", 0.05)
    broken: Any = Silent(0)
    with pytest.raises(StoreError, match="does not answer"):
        RankStore(broken, "", 0, 2).set("key", "text")
    silent: Any = Silent(60)
    with pytest.raises(StoreSilentError, match="gave no answer in 0 s"):
        RankStore(silent, "", 0, 2).until(Deadline(0.05)).set("key", "text")
