from pathlib import Path
from typing import Any

import pytest
import torch
from metrics_table import undocumented
from observed_run import ObservedModule, PlainLoop, PlainModule, loader, logged_rows, make_batch, make_trainer, save_run

from rlightning.callbacks import EmptyCacheAfterUpdate
from rlightning.hooks import call_hook
from rlightning.parallel import device as platform
from rlightning.parallel import execution_mode
from rlightning.parallel.device import MemoryUse
from rlightning.parallel.execution_mode import ExecutionMode

GIB = 2**30


class Device:
    """Stands for a device of 8 GiB with 2 GiB in use, of which the allocator holds 6 until its cache is emptied.

    That takes it a quarter of a second.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reserved, self.num_emptied = 6 * GIB, 0
        self.now = 100.0
        monkeypatch.setattr("rlightning.callbacks.empty_cache_after_update.perf_counter", lambda: self.now)
        monkeypatch.setattr(platform, "memory_use", self.memory_use)
        monkeypatch.setattr(platform, "empty_cache", self.empty_cache)

    def memory_use(self, device: Any = None) -> MemoryUse:
        return MemoryUse(2 * GIB, self.reserved, 4 * GIB, 8 * GIB - self.reserved, 8 * GIB)

    def empty_cache(self, device: Any = None) -> None:
        self.reserved, self.num_emptied = 2 * GIB, self.num_emptied + 1
        self.now += 0.25


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def update(callback: EmptyCacheAfterUpdate, times: int = 1, module: Any = None) -> None:
    for _ in range(times):
        call_hook(PlainLoop(callback), module or PlainModule(), "on_update_end", make_batch())


def sync(callback: EmptyCacheAfterUpdate) -> None:
    call_hook(PlainLoop(callback), PlainModule(), "on_weight_sync_start", 1)


def test_what_it_measures(device: Device) -> None:
    callback = EmptyCacheAfterUpdate()
    update(callback)
    assert callback.last == {
        "memory/after_update/empty_cache_ms": 250,
        "memory/after_update/reserved_before_gib": 6,
        "memory/after_update/reserved_after_gib": 2,
        "memory/after_update/allocated_before_gib": 2,
        "memory/after_update/allocated_after_gib": 2,
    }


def test_before_an_engine_wakes_too_unless_told_otherwise(device: Device) -> None:
    sync(EmptyCacheAfterUpdate(before_wake=False))
    assert device.num_emptied == 0
    sync(callback := EmptyCacheAfterUpdate())
    assert device.num_emptied == 1
    assert callback.last["memory/before_wake/reserved_before_gib"] == 6


def wake(callback: EmptyCacheAfterUpdate) -> None:
    call_hook(PlainLoop(callback), PlainModule(), "on_engine_wake")


def test_before_the_kv_cache_under_the_same_conditions(device: Device) -> None:
    """The device has 2 GiB free, and the allocator holds three times what is in use."""
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"before_wake": False}, False),
        ({"min_free_bytes": GIB}, False),
        ({"max_reserved_ratio": 4.0}, False),
        ({"max_reserved_ratio": 2.0}, True),
    ]
    for arguments, is_emptied in cases:
        device.reserved, device.num_emptied = 6 * GIB, 0
        wake(callback := EmptyCacheAfterUpdate(**arguments))
        assert device.num_emptied == is_emptied
        assert callback.last.get("memory/before_kv_cache/reserved_before_gib") == (6 if is_emptied else None)


def test_every_other_update(device: Device) -> None:
    callback = EmptyCacheAfterUpdate(every_n_updates=2)
    counts = []
    for _ in range(5):
        for happens in (sync, wake, update):
            happens(callback)
            counts.append(device.num_emptied)
    # before anything was updated, then nothing until the second update, and so on
    assert counts == [1, 2, 2, 2, 2, 3, 4, 5, 5, 5, 5, 6, 7, 8, 8]


@pytest.mark.parametrize(
    ("thresholds", "is_emptied"),
    [
        ({"min_free_bytes": 2 * GIB}, False),  # exactly that much is free
        ({"min_free_bytes": 2 * GIB + 1}, True),
        ({"max_reserved_ratio": 3.0}, False),  # 6 of 2 GiB
        ({"max_reserved_ratio": 2.9}, True),
        ({"min_free_bytes": GIB, "max_reserved_ratio": 2.9}, True),
        ({"min_free_bytes": GIB, "max_reserved_ratio": 3.1}, False),
    ],
)
def test_only_when_it_pays(device: Device, thresholds: dict[str, Any], is_emptied: bool) -> None:
    callback = EmptyCacheAfterUpdate(**thresholds)
    update(callback)
    sync(callback)
    # What the first emptying has freed, the second has nothing to do about.
    assert device.num_emptied == int(is_emptied)
    assert bool(callback.last) is is_emptied


def test_logged_where_a_step_logs(device: Device, tmp_path: Path) -> None:
    rows = logged_rows(tmp_path, ObservedModule(), EmptyCacheAfterUpdate())
    assert [float(row["memory/before_wake/reserved_before_gib"]) for row in rows] == [6, 2, 2]
    assert [float(row["memory/after_update/reserved_after_gib"]) for row in rows] == [2, 2, 2]
    assert undocumented(rows[0]) == []


def test_not_logged_as_a_validations_result(device: Device, tmp_path: Path) -> None:
    class SyncsToValidate(ObservedModule):
        def validation_step(self, *args: Any) -> None:
            call_hook(self.trainer, self, "on_weight_sync_start", 1)

    trainer = make_trainer(tmp_path, callback := EmptyCacheAfterUpdate())
    assert trainer.validate(SyncsToValidate(), loader(), verbose=False) == [{}]
    assert callback.last["memory/before_wake/reserved_before_gib"] == 2  # of the last of several batches


def test_nothing_on_the_cpu(tmp_path: Path) -> None:
    make_trainer(tmp_path, callback := EmptyCacheAfterUpdate()).fit(ObservedModule(), loader())
    assert callback.last == {}


def test_nothing_in_a_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution_mode, "_resolved", ExecutionMode.CONTROLLER)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", None)
    for happens in (sync, wake, update):
        happens(callback := EmptyCacheAfterUpdate())
        assert callback.last == {}


def test_resume_goes_on_counting(device: Device, tmp_path: Path) -> None:
    first, second = (EmptyCacheAfterUpdate(every_n_updates=3, before_wake=False) for _ in range(2))
    saved = save_run(tmp_path, first, max_steps=2)
    assert device.num_emptied == 0
    make_trainer(tmp_path, second, max_steps=3).fit(ObservedModule(), loader(), ckpt_path=saved)
    assert device.num_emptied == 1  # after the third


@pytest.mark.gpu
def test_blocks_of_all_sizes_are_freed() -> None:
    module = torch.nn.Linear(1, 1, device="cuda")  # takes a block of its own where there is none
    torch.cuda.empty_cache()  # what other tests have left could hold all of these in one block
    kept = [torch.empty(100 << 20, dtype=torch.uint8, device="cuda")]
    freed = [torch.empty(size << 20, dtype=torch.uint8, device="cuda") for size in (30, 70, 200, 400)]
    free_before, _ = torch.cuda.mem_get_info()
    del freed
    update(callback := EmptyCacheAfterUpdate(), module=module)
    last = {name.rpartition("/")[2]: value for name, value in callback.last.items()}
    assert last["reserved_before_gib"] - last["reserved_after_gib"] >= 700 / 1024
    assert last["allocated_before_gib"] == last["allocated_after_gib"] >= 100 / 1024
    assert torch.cuda.mem_get_info()[0] - free_before >= 700 << 20
    assert kept[0].is_cuda
