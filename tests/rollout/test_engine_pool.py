"""Several engines as one: the least loaded is asked, a conversation stays where it is, and death moves both."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from engine_models import Actor, engine_config, make_prompt, save_model, send

from rlightning.errors import EngineDiedError, EngineError
from rlightning.rollout import Sampling
from rlightning.rollout.engine_pool import Answer, EnginePool, Member

LONG = Sampling(max_new_tokens=200, stop_token_ids=())
SHORT = Sampling(max_new_tokens=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pool")


@pytest.fixture(scope="module")
def actor(folder: Path) -> Actor:
    return Actor(save_model(folder / "model"))


@pytest.fixture(scope="module")
def pool(actor: Actor, folder: Path, starts_processes: None) -> Iterator[EnginePool]:
    """Two engines that hold the actor's weights."""
    configs = [engine_config(str(folder / "model"), folder / f"engine.{number}.log") for number in range(2)]
    pool = EnginePool(configs, lambda: None)
    pool.start()
    try:
        load(pool, actor)
        yield pool
    finally:
        pool.close()


def load(pool: EnginePool, actor: Actor) -> None:
    """Send the weights to all engines, once they are up."""
    for member in pool.members:
        member.engine.wait_until_ready()
        if member.engine.weight_version is None:
            send(member.engine, actor, 0)
    pool.resume()


def hold(*members: Member) -> None:
    """Have engines sample nothing until :func:`go_on`, so that what they have to do can be counted."""
    for member in members:
        member.engine.submit("begin_weight_update").result()


def go_on(*members: Member) -> None:
    for member in members:
        member.engine.submit("finish_weight_update", 0, True).result()


def loads(pool: EnginePool) -> list[int]:
    return [member.load for member in pool.members]


def test_requests_go_to_the_least_loaded_and_conversations_stay(pool: EnginePool, actor: Actor) -> None:
    hold(*pool.members)
    first = pool.submit(make_prompt("1+1="), 0, 6, LONG, conversation="first")
    assert loads(pool) == [6, 0]
    others = [pool.submit(make_prompt("2+1="), stream, 2, LONG) for stream in range(4)]
    assert loads(pool) == [8, 6]  # 0 + 2 + 2 + 2 there; at 6 and 6 the first of them
    turn = pool.submit(make_prompt("1+1=2 "), 0, 1, SHORT, conversation="first")
    assert loads(pool) == [9, 6]
    pool.cancel(others)
    assert loads(pool) == [7, 0]
    go_on(*pool.members)
    assert [len(answer.result(60)) for answer in (first, turn)] == [6, 1]

    # The engine of the conversation dies: the other one takes over what was asked, and the conversation.
    hold(pool.members[0])
    asked = [pool.submit(make_prompt("3+4="), 0, 2, LONG, conversation="first") for _ in range(3)]
    assert loads(pool) == [6, 0]
    victim = pool.members[0].engine
    assert victim.process is not None
    os.kill(victim.process.pid, signal.SIGKILL)
    assert [len(answer.result(60)) for answer in asked] == [2, 2, 2]
    assert victim.weight_version is None
    pool.submit(make_prompt("3+4="), 0, 1, SHORT, conversation="first").result(60)

    # It comes back, and is asked again once it has weights.
    load(pool, actor)
    hold(*pool.members)
    both = [pool.submit(make_prompt("5"), stream, 1, LONG) for stream in range(2)]
    assert loads(pool) == [1, 1]
    go_on(*pool.members)
    assert all(answer.result(60) for answer in both)


def test_requests_without_engines_wait_then_fail(pool: EnginePool) -> None:
    """The last that needs the pool: no engine of it is left."""
    for member in pool.members:
        member.has_died = True  # once already
    hold(*pool.members)
    changed = threading.Event()
    asked: list[Answer] = [pool.submit(make_prompt("1+1="), stream, 2, LONG) for stream in range(4)]
    asked[-1].add_done_callback(lambda _: changed.set())
    for member in pool.members:
        assert member.engine.process is not None
        os.kill(member.engine.process.pid, signal.SIGKILL)
    assert changed.wait(120)
    for answer in asked:
        with pytest.raises(EngineError, match=r"^No engine is left of 2\. The last one: The engine died"):
            answer.result(120)
    with pytest.raises(EngineError, match="No engine is left"):
        pool.check()
    with pytest.raises(EngineError, match="No engine is left"):
        pool.submit(make_prompt("1"), 0, 1, SHORT).result(1)


class Link:
    """In place of an engine's process: notes what it is asked; dead, it answers as one does."""

    def __init__(self) -> None:
        self.death: EngineDiedError | None = None
        self.asked: list[str] = []

    def submit(self, method: str, *_: Any) -> "Future[Any]":
        self.asked.append(method)
        answer: Future[Any] = Future()
        if self.death is not None:
            answer.set_exception(self.death)
        return answer


class OnRelease:
    """A lock after whose first release something happens."""

    def __init__(self, happens: Callable[[], None]) -> None:
        self._lock, self._happens = threading.RLock(), [happens]

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: Any) -> None:
        self._lock.release()
        if self._happens:
            self._happens.pop()()


def test_restarted_engine_gets_requests_only_after_weights(tmp_path: Path) -> None:
    pool = EnginePool([engine_config(save_model(tmp_path / "model"), tmp_path / "log")], lambda: None)
    engine = pool.members[0].engine
    first, second = Link(), Link()

    def replace() -> None:
        first.death = EngineDiedError("The engine died.")
        engine.process, engine.weight_version = second, None  # type: ignore[assignment]

    engine.process, engine.weight_version = first, 0  # type: ignore[assignment]
    pool._lock = OnRelease(replace)  # type: ignore[assignment]
    pool.submit(make_prompt("1+1="), 0, 1, SHORT)
    assert second.asked == []
    assert pool.members[0].load == 0
    engine.weight_version = 1
    pool.resume()
    assert second.asked == ["generate"]
    assert pool.members[0].load == 1
