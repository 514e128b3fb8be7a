"""The trainer's end of an engine, without the engine."""

import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from rlightning import intervals
from rlightning.errors import EngineDiedError
from rlightning.rollout.engine_config import EngineConfig
from rlightning.rollout.engine_connection import EngineConnection


class Link(EngineConnection):
    """To whatever is at the other end of a connection."""

    def __init__(self, connection: Connection, **config: Any) -> None:
        place: dict[str, Any] = {"device": torch.device("cpu"), "log_file": Path("engine.log")}
        super().__init__(EngineConfig(engine_args={}, dtype=torch.float32, **place, **config))
        limit_waiting(connection, self.config.hang_timeout)
        self._ours = connection
        self._begin()

    @property
    def pid(self) -> int:
        return 0

    def _open(self) -> Connection:
        return self._ours

    def _end(self, how: str) -> EngineDiedError:
        return EngineDiedError(f"The engine {how}.")


def test_trainer_stall_does_not_count_as_engine_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Pipe()
    poll, clock = ours.poll, time.monotonic

    def stand_still(seconds: float) -> bool:
        """A day passes, for whoever is asked too."""
        monkeypatch.setattr(ours, "poll", poll)
        monkeypatch.setattr(time, "monotonic", lambda: clock() + 86400)
        return False

    monkeypatch.setattr(ours, "poll", stand_still)
    link = Link(ours)
    theirs.send((None, "ready", {}))
    assert link.ready.result() == {}
    link.close()


def test_an_engine_that_is_asked_and_silent_hangs() -> None:
    ours, theirs = Pipe()
    link = Link(ours, hang_timeout=0.1)
    theirs.send((None, "ready", {}))
    link.ready.result()
    with pytest.raises(EngineDiedError, match=r"gave no heartbeat for 0 s"):
        link.submit("ping").result()


@pytest.mark.long
def test_engine_that_only_samples_hangs_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "ENGINE_PROGRESS_TIMEOUT", 0.1)
    monkeypatch.setattr(intervals, "POLL_INTERVAL", 0.02)
    ours, theirs = Pipe()
    link = Link(ours, hang_timeout=0.5)
    theirs.send((None, "ready", {}))
    link.ready.result()
    # It may have to compile something, and loading weights keeps its workers from answering: silent, it is alive.
    for number, method in enumerate(("generate", "receive_weights", "generate", "receive_weights"), start=1):
        answer = link.submit(method)
        if number != 3:
            time.sleep(0.3)
        theirs.send((number, "ok", method))
        assert answer.result() == method
    began = time.monotonic()
    with pytest.raises(EngineDiedError, match=r"gave no heartbeat for 0 s"):
        link.submit("generate").result()
    assert time.monotonic() - began < 0.45  # of the 0.5 s that other calls have


@pytest.mark.long
def test_an_engine_that_reads_nothing_hangs() -> None:
    ours, theirs = Pipe()
    link = Link(ours, hang_timeout=1.0)  # before it is up, nobody minds its silence
    with pytest.raises(EngineDiedError, match=r"gave no heartbeat for 1 s"):
        link.submit("ping", bytes(1 << 22)).result()
    theirs.close()


def test_an_engine_that_is_gone_has_died() -> None:
    ours, theirs = Pipe()
    link = Link(ours)
    theirs.close()
    with pytest.raises(EngineDiedError, match=r"The engine died\."):
        link.submit("ping").result()
