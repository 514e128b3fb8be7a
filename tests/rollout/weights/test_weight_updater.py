"""The driver of a weight sync, with engines that are threads of this process and load weights into a dictionary."""

import importlib
import pickle
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import Weights, make_sender
from torch import Tensor

from rlightning.errors import EngineDiedError, EngineError
from rlightning.rollout.weights import plan_chunks
from rlightning.rollout.weights.driver import UpdatableEngine, WeightReceiver, WeightSender, WeightUpdater
from rlightning.rollout.weights.source import weight_shapes

CPU = torch.device("cpu")
WEIGHTS = Weights(a=torch.zeros(64), b=torch.zeros(64), c=torch.zeros(64))
PLAN = plan_chunks(weight_shapes(WEIGHTS), torch.float32, 256)
"""A chunk a weight."""


def weights_of(version: int) -> Weights:
    return Weights((name, weight + version) for name, weight in WEIGHTS.items())


def update(updater: WeightUpdater, version: int, engines: Sequence[UpdatableEngine]) -> Sequence[UpdatableEngine]:
    """Send a version's weights, and have the engines sample from them."""
    return updater.update_weights(weights_of(version), version, engines)


class LocalEngine:
    """An engine of two workers, a thread each.

    Attributes:
        dies_at: the chunk before which it dies.
        loaded: weights, by worker.
    """

    def __init__(self) -> None:
        self.ended: Future[EngineError] = Future()
        self.worker_devices: Sequence[str] = ("", "")
        self.dies_at: int | None = None
        self.faults: list[str] = []
        self.version: int | None = None
        self.loaded: list[dict[str, float]] = [{}, {}]
        self.num_openings = 0
        self._receivers: list[WeightReceiver] = []
        self._workers = ThreadPoolExecutor(2)
        self._calls = ThreadPoolExecutor(1)

    def submit(self, method: str, *arguments: object) -> "Future[Any]":
        return self._calls.submit(getattr(self, method), *arguments)

    def open_weight_receivers(self, receivers: list[bytes]) -> None:
        self.num_openings += 1
        self._receivers = [pickle.loads(receiver) for receiver in receivers]
        list(self._workers.map(lambda receiver: receiver.open(CPU), self._receivers))

    def receive_weights(self, chunk: int) -> list[str]:
        def receive(worker: int) -> None:
            received: Iterable[tuple[str, Tensor]] = self._receivers[worker].receive(chunk)
            self.loaded[worker].update((name, float(tensor[-1])) for name, tensor in received)

        if chunk == self.dies_at:
            self.die()
        list(self._workers.map(receive, range(2)))
        return self.faults if chunk == len(PLAN.chunks) - 1 else []

    def finish_weight_update(self, version: int, keeps_cache: bool) -> None:
        self.version = version

    def die(self) -> None:
        self.ended.set_result(EngineError("It is gone."))
        raise EngineDiedError("It is gone.")

    def close(self) -> None:
        self._workers.shutdown()
        self._calls.shutdown()


@pytest.fixture
def engines() -> Iterator[list[LocalEngine]]:
    with ExitStack() as stack:
        made = [LocalEngine() for _ in range(3)]
        for engine in made:
            stack.callback(engine.close)
        yield made


def assert_updated(engines: Sequence[LocalEngine], version: int) -> None:
    for engine in engines:
        assert engine.version == version
        assert engine.loaded == [dict.fromkeys(WEIGHTS, float(version))] * 2


@pytest.mark.long
@pytest.mark.parametrize("transport", ["shared memory", "broadcast"])
def test_engines_connect_anew_only_when_they_change(transport: str, engines: list[LocalEngine]) -> None:
    updater = WeightUpdater(make_sender(transport, PLAN))
    for version in (1, 2):
        assert update(updater, version, engines[:2]) == engines[:2]
        assert_updated(engines[:2], version)
    assert [engine.num_openings for engine in engines] == [1, 1, 0]
    assert update(updater, 3, engines) == engines
    assert_updated(engines, 3)
    assert [engine.num_openings for engine in engines] == [2, 2, 1]
    assert updater.seconds > 0
    updater.close()


@pytest.mark.parametrize(
    ("transport", "chunk"),
    [
        *(("shared memory", chunk) for chunk in range(3)),
        pytest.param("broadcast", 1, marks=pytest.mark.long),
    ],
)
def test_death_leaves_other_engines_to_next_update(transport: str, chunk: int, engines: list[LocalEngine]) -> None:
    updater = WeightUpdater(make_sender(transport, PLAN))
    update(updater, 1, engines)
    engines[1].dies_at = chunk
    assert update(updater, 2, engines) == []
    assert [str(death) for death in updater.deaths] == ["It is gone."]
    assert [engine.version for engine in engines] == [1, 1, 1]
    left = [engines[0], engines[2]]
    assert update(updater, 2, left) == left
    assert updater.deaths == []
    assert_updated(left, 2)
    updater.close()


def test_what_an_engine_finds_wrong_is_raised_once(engines: list[LocalEngine]) -> None:
    updater = WeightUpdater(make_sender("shared memory", PLAN))
    for engine in engines[:2]:
        engine.faults = ["2 weights were not taken."]
    with pytest.raises(EngineError, match=r"^2 weights were not taken\.$"):
        update(updater, 1, engines)
    assert [engine.version for engine in engines] == [None, None, None]
    updater.close()


def test_rank_without_engines_gives_all_chunks() -> None:
    updater = WeightUpdater(WeightSender(PLAN, destination=0))
    assert update(updater, 1, []) == []
    with pytest.raises(EngineError, match="expected nothing more, got d"):
        updater.update_weights(Weights(weights_of(1) | {"d": torch.zeros(1)}), 1, [])
    updater.close()


def test_documented_transport_updates_engines(
    engines: list[LocalEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[3] / "docs" / "weight_transports.md"
    (snippet,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (tmp_path / "mapped_file.py").write_text(snippet)
    monkeypatch.syspath_prepend(tmp_path)  # its receiver is pickled by its module's name
    (tmp_path / "weights").write_bytes(bytes(PLAN.num_bytes))
    sender = importlib.import_module("mapped_file").MappedFileSender(PLAN, str(tmp_path / "weights"))
    updater = WeightUpdater(sender)
    for version in (1, 2):
        assert update(updater, version, engines[:2]) == engines[:2]
        assert_updated(engines[:2], version)
    updater.close()
