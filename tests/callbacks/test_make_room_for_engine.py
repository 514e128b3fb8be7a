import logging
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from observed_run import PlainLoop
from torch import Tensor, nn
from torch.optim import AdamW

from rlightning.callbacks import MakeRoomForEngine, OffloadDuringRollout
from rlightning.hooks import call_hook
from rlightning.parallel import device as platform
from rlightning.parallel.device import MemoryUse

GIB = 2**30
NUMBERS = 1024
STATE, CACHED = 3 * GIB, 4 * GIB
"""Of gradients and moments; of what the allocator keeps after an update."""


class Colocated:
    """Stands for a GPU that cannot be had here: a trainer of 1 GiB of weights and 3 of gradients and moments, which
    are small tensors on the CPU, beside an engine with 2 GiB of weights, a KV cache of 6 and a context of 1."""

    def __init__(self, total: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total, self.cached = int(total * GIB), 0
        self.engine = 9 * GIB  # it has come up before the first update
        self.module = nn.Linear(NUMBERS, 1, bias=False)
        optimizer = AdamW(self.module.parameters())
        self.module.weight.grad = torch.ones(1, NUMBERS)
        optimizer.step()
        self.room = MakeRoomForEngine()
        self.loop = PlainLoop(self.room)
        self.loop.optimizer = optimizer  # type: ignore[attr-defined]
        self.moments = [optimizer.state[self.module.weight][name] for name in ("exp_avg", "exp_avg_sq")]
        monkeypatch.setattr(OffloadDuringRollout, "device_type", "cpu")
        monkeypatch.setattr(platform, "memory_use", self.memory_use)
        monkeypatch.setattr(platform, "empty_cache", self.empty_cache)
        self.sync(1)
        self.sleep()

    def memory_use(self, device: Any = None) -> MemoryUse:
        weight = self.module.weight
        tensors: chain[Tensor] = chain([weight, weight.grad], self.moments)  # type: ignore[list-item]
        allocated = sum(tensor.untyped_storage().nbytes() // 4 * GIB // NUMBERS for tensor in tensors)
        reserved = allocated + self.cached
        return MemoryUse(allocated, reserved, reserved, self.total - reserved - self.engine, self.total)

    def empty_cache(self, device: Any = None) -> None:
        self.cached = 0

    def sync(self, version: int) -> None:
        call_hook(self.loop, self.module, "on_weight_sync_start", version)
        assert self.module.weight.untyped_storage().nbytes(), "weights are about to be read"
        self.engine = max(self.engine, 3 * GIB)
        call_hook(self.loop, self.module, "on_engine_wake")
        self.engine = 9 * GIB
        call_hook(self.loop, self.module, "on_weight_sync_end", version)

    def sleep(self) -> None:
        self.engine = GIB
        call_hook(self.loop, self.module, "on_engine_sleep")

    def away(self) -> tuple[bool, bool]:
        """Whether optimizer state, and whether parameters wait in the host's memory."""
        return self.moments[0].untyped_storage().nbytes() == 0, self.module.weight.untyped_storage().nbytes() == 0


@pytest.mark.parametrize(
    ("total", "is_emptied", "state_away", "parameters_away"),
    [
        (18.5, False, False, False),  # 9 awake + 4 + 4 cached + 1 left
        (14.5, True, False, False),  # 9 awake + 4 + 1 left
        (11.5, True, True, False),  # 9 awake + 1 + 1 left
        (10.5, True, True, True),
    ],
)
def test_no_more_makes_room_than_the_engine_lacks(
    total: float, is_emptied: bool, state_away: bool, parameters_away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Colocated(total, monkeypatch)
    before = [tensor.clone() for tensor in (device.module.weight.detach(), *device.moments)]
    assert device.room.engine_bytes == 8 * GIB
    for version in (2, 3):
        device.cached = CACHED
        device.sync(version)
        assert (device.cached == 0) == is_emptied
        assert device.away() == (state_away, parameters_away)
        device.sleep()
        assert device.away() == (False, False)
    after = [device.module.weight.detach(), *device.moments]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_sync_with_awake_engine_restores_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Colocated(10.5, monkeypatch)
    device.sync(2)
    assert device.away() == (True, True)
    device.sync(3)  # as after weights that a callback has swapped in
    assert device.away() == (True, False)


def test_what_makes_room_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    device = Colocated(10.5, monkeypatch)
    with caplog.at_level(logging.INFO):
        for version in (2, 3):
            device.cached = CACHED
            device.sync(version)
            device.sleep()
    assert caplog.messages == [
        "When the engine wakes, what PyTorch keeps for later (4.0 GiB now) makes room for its 8.0 GiB.",
        "When the engine wakes, optimizer state and gradients wait in the host's memory until it sleeps (0.0 GiB now).",
        "When the engine wakes, parameters, which it has, wait in the host's memory until it sleeps (0.0 GiB now).",
    ]


def test_an_exception_brings_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Colocated(10.5, monkeypatch)
    device.sync(2)
    call_hook(device.loop, device.module, "on_exception", KeyboardInterrupt())
    assert device.away() == (False, False)


def test_a_run_begins_without_what_another_engine_took(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Colocated(10.5, monkeypatch)
    device.room.setup(SimpleNamespace(callbacks=[], global_step=0), device.module, "fit")
    assert device.room.engine_bytes == 0
