"""Several engines as one sampler: the least loaded is asked, a session stays where it is, and death moves both."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_models import Weights, bare_config

from rlightning.errors import EngineDiedError, StreamLostError
from rlightning.rollout import Sampling
from rlightning.rollout.engine_pool import MAX_SESSIONS, EngineId, EnginePool
from rlightning.rollout.rank_engines import RankEngines
from rlightning.rollout.weights import plan_chunks
from rlightning.rollout.weights.driver import WeightSender
from rlightning.types import Sample

SHORT = Sampling(max_new_tokens=4)
FIRST, SECOND = EngineId(0, 0), EngineId(0, 1)


class HeldEngine:
    """Samples nothing until it is released, or dies."""

    def __init__(self) -> None:
        self.requests: list[asyncio.Future[list[Sample]]] = []

    async def sample(self, token_ids: Any, sampling: Sampling, **settings: Any) -> Any:
        self.requests.append(asyncio.get_running_loop().create_future())
        return await self.requests[-1]

    async def score(self, token_ids: Any) -> Any:
        raise NotImplementedError

    def release(self) -> None:
        for request in self.requests:
            if not request.done():
                request.set_result([])

    def die(self) -> None:
        for request in self.requests:
            if not request.done():
                request.set_exception(EngineDiedError("The engine died."))


def run(
    test: Callable[[EnginePool, HeldEngine, HeldEngine, list[None]], Awaitable[None]],
    kind: type[HeldEngine] = HeldEngine,
) -> None:
    """Run a test on the pool of two engines; the list has an item for each death that the pool has found."""

    async def start() -> None:
        engines, deaths = (kind(), HeldEngine()), list[None]()
        members: Any = dict(zip((FIRST, SECOND), engines, strict=True))
        pool = EnginePool(members, lambda: deaths.append(None))
        pool.set_serving({FIRST, SECOND})
        await test(pool, *engines, deaths)

    asyncio.run(start())


def submit(pool: EnginePool, num_samples: int, session: str | None = None) -> "asyncio.Task[list[Sample]]":
    return asyncio.ensure_future(pool.sample([1], SHORT, num_samples=num_samples, session=session))


async def loads(pool: EnginePool) -> list[int]:
    for _ in range(5):
        await asyncio.sleep(0)
    return [member.load for member in pool.members.values()]


def test_requests_go_to_least_loaded_sessions_stay() -> None:
    async def test(pool: EnginePool, first: HeldEngine, second: HeldEngine, deaths: list[None]) -> None:
        submit(pool, 6, "first")
        assert await loads(pool) == [6, 0]
        others = [submit(pool, 2) for _ in range(4)]
        assert await loads(pool) == [8, 6]  # 0 + 2 + 2 + 2 there; at 6 and 6 the first of them
        submit(pool, 1, "first")
        assert await loads(pool) == [9, 6]
        for other in others:
            other.cancel()
        assert await loads(pool) == [7, 0]
        first.release()
        assert await loads(pool) == [0, 0]

    run(test)


def test_dead_engines_requests_move_and_death_found_once() -> None:
    async def test(pool: EnginePool, first: HeldEngine, second: HeldEngine, deaths: list[None]) -> None:
        tasks = [submit(pool, 2, "first") for _ in range(3)]
        assert await loads(pool) == [6, 0]
        first.die()
        assert await loads(pool) == [0, 6] and len(deaths) == 1 and pool.num_serving == 1
        second.release()
        assert await asyncio.gather(*tasks) == [[], [], []]
        submit(pool, 1, "first")
        assert await loads(pool) == [0, 1]
        pool.set_serving({FIRST, SECOND})
        submit(pool, 1)
        assert await loads(pool) == [1, 1]  # it is asked again once it serves

    run(test)


def test_begun_stream_of_dead_engine_is_refused() -> None:
    class Streams(HeldEngine):
        async def sample(self, token_ids: Any, sampling: Sampling, **settings: Any) -> Any:
            settings["on_tokens"](0, [1])
            return await super().sample(token_ids, sampling)

    async def test(pool: EnginePool, first: HeldEngine, second: HeldEngine, deaths: list[None]) -> None:
        got: list[Any] = []
        both = [
            asyncio.ensure_future(pool.sample([1], SHORT, on_tokens=lambda *one: got.append(one))) for _ in range(2)
        ]
        assert await loads(pool) == [1, 1] and got == [(0, [1])]
        first.die()
        with pytest.raises(StreamLostError, match=r"The engine died while its tokens were streamed\.$"):
            await both[0]
        second.release()
        assert await both[1] == []  # of one without partial output

    run(test, Streams)


def test_requests_wait_until_an_engine_serves() -> None:
    async def test(pool: EnginePool, first: HeldEngine, second: HeldEngine, deaths: list[None]) -> None:
        pool.remove({FIRST, SECOND})
        task = submit(pool, 3)
        assert await loads(pool) == [0, 0] and not task.done()
        pool.set_serving({SECOND})
        assert await loads(pool) == [0, 3]
        second.die()
        assert await loads(pool) == [0, 0] and pool.num_serving == 0 and not task.done()
        pool.set_serving({FIRST})
        assert await loads(pool) == [3, 0]
        first.release()
        assert await task == []

    run(test)


def test_engine_lost_before_waiter_runs_is_not_asked() -> None:
    async def test(pool: EnginePool, first: HeldEngine, second: HeldEngine, deaths: list[None]) -> None:
        pool.remove({FIRST, SECOND})
        task = submit(pool, 1)
        await loads(pool)
        pool.set_serving({FIRST})
        pool.remove({FIRST})
        assert await loads(pool) == [0, 0] and not task.done()
        pool.set_serving({SECOND})
        assert await loads(pool) == [0, 1]
        second.release()
        assert await task == []

    run(test)


def test_late_death_does_not_remove_restarted_engine() -> None:
    async def test(pool: EnginePool, first: HeldEngine, second: HeldEngine, deaths: list[None]) -> None:
        task = submit(pool, 1)
        await loads(pool)
        pool.remove({FIRST})
        pool.set_serving({FIRST})
        first.die()
        assert await loads(pool) == [1, 0] and pool.num_serving == 1 and deaths == []
        first.release()
        assert await task == []

    run(test)


def test_sessions_are_forgotten_beyond_a_limit() -> None:
    async def test(pool: EnginePool, first: HeldEngine, second: HeldEngine, deaths: list[None]) -> None:
        for number in range(MAX_SESSIONS + 10):
            pool._select(str(number))
        assert len(pool._engine_by_session) == MAX_SESSIONS and "0" not in pool._engine_by_session

    run(test)


def test_idle_seconds_count_serving_engines_without_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("rlightning.rollout.engine_pool.time.monotonic", lambda: now[0])

    async def test(pool: EnginePool, first: HeldEngine, second: HeldEngine, deaths: list[None]) -> None:
        now[0] = 2.0
        submit(pool, 1)
        await loads(pool)
        now[0] = 5.0
        assert pool.take_idle_seconds() == (2 + 5) / 2
        first.release()
        await loads(pool)
        pool.remove({SECOND})
        now[0] = 6.0
        assert pool.take_idle_seconds() == 1 / 2

    run(test)


def test_engine_that_comes_back_is_not_waited_for(tmp_path: Path) -> None:
    """Beside one that is up, also if all were up as the run began, so that it has waited for none."""
    engines: list[Any] = [SimpleNamespace(is_alive=True, is_up=True, weight_version=None, process=None) for _ in "01"]
    sender = WeightSender(plan_chunks([], torch.float32, 1))
    run = RankEngines([bare_config(tmp_path / "log")], engines, lambda _: sender, is_colocated=False)
    run.update_weights(Weights(), 0, lambda: None, among=engines)
    engines[0].is_up = False
    assert not run.is_starting
    engines[1].is_up = False
    assert run.is_starting
