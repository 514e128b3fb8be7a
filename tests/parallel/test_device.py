"""The platform module on a machine without a device, in a controller, and on CUDA."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from programs import run_python

from rlightning.parallel import device as platform
from rlightning.parallel import execution_mode
from rlightning.parallel.execution_mode import ExecutionMode

CPU = torch.device("cpu")
CUDA = torch.device("cuda:0")


def use_everything(device: torch.device | None) -> Any:
    platform.synchronize(device)
    platform.synchronize_stream(device)
    platform.empty_cache(device)
    assert platform.host_bytes(3, device or CPU).shape == (3,)
    return platform.memory_use(device)


@pytest.mark.parametrize("device", [None, CPU, CUDA])
def test_unused_device_is_not_touched(device: torch.device | None) -> None:
    if platform.has_context() and device is not CPU:
        pytest.skip("another test of this process has used CUDA")
    assert use_everything(device) is None
    assert not torch.cuda.is_initialized() or device is CPU


def test_a_controller_asks_the_driver_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where CUDA has been initialised: every call of torch.cuda would raise here."""
    monkeypatch.setattr(execution_mode, "_resolved", ExecutionMode.CONTROLLER)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for name in ("synchronize", "current_stream", "empty_cache", "mem_get_info", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, None)
    assert use_everything(CUDA) is None
    assert use_everything(None) is None


def test_device_of_every_kind_of_loop() -> None:
    meta, cpu = torch.device("meta"), torch.device("cpu")
    model = torch.nn.Linear(1, 1, device="meta")
    assert platform.device_of(SimpleNamespace(strategy=SimpleNamespace(root_device=meta)), BoringModel()) == meta
    assert platform.device_of(SimpleNamespace(accelerator=SimpleNamespace(device=meta)), BoringModel()) == meta
    assert platform.device_of(SimpleNamespace(device="meta"), None) == meta
    assert platform.device_of(object(), BoringModel()) == cpu
    assert platform.device_of(object(), model) == meta
    assert platform.device_of(object(), object()) is None


SEGMENTS = """
import torch
from rlightning.parallel import device as platform

def find(tensor):
    for segment in torch.cuda.memory_snapshot():
        if 0 <= tensor.data_ptr() - segment["address"] < segment["total_size"]:
            return segment["is_expandable"]

platform.use_expandable_segments()
before = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
with platform.shareable_memory():
    shared = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
after = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
print([find(before), find(shared), find(after)])
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("setting", "segments"),
    [("", [True, False, True]), (platform.EXPANDABLE, [True, False, True]), (platform.PLAIN, [False, False, False])],
)
def test_segments_expand_but_for_what_others_open(setting: str, segments: list[bool], tmp_path: Path) -> None:
    said = run_python(
        "-c", SEGMENTS, folder=tmp_path, environment={**os.environ, platform.ALLOCATOR_VARIABLES[1]: setting}
    ).stdout
    assert said.splitlines()[-1] == str(segments)


@pytest.mark.gpu
def test_memory_on_a_device() -> None:
    torch.cuda.empty_cache()  # of other tests
    block = torch.empty(256 << 20, dtype=torch.uint8, device=CUDA)
    held = platform.memory_use(CUDA)
    assert held is not None and held.peak >= held.allocated >= 256 << 20
    assert held.reserved >= held.allocated and 0 < held.free < held.total
    del block
    platform.empty_cache(CUDA)
    torch.cuda.reset_peak_memory_stats(CUDA)
    after = platform.memory_use(CUDA)
    assert after is not None
    assert held.allocated - after.allocated >= 256 << 20 and held.reserved - after.reserved >= 256 << 20
    assert after.peak < held.peak
    assert platform.host_bytes(10, CUDA).is_pinned() and not platform.host_bytes(10, CPU).is_pinned()


@pytest.mark.gpu
def test_synchronizing_a_stream_leaves_others_alone() -> None:
    other = torch.cuda.Stream()
    event = torch.cuda.Event()
    with torch.cuda.stream(other):
        torch.cuda._sleep(int(2e9))  # cycles: a second or so
        event.record()
    platform.synchronize_stream(CUDA)
    assert not event.query()
    platform.synchronize(CUDA)
    assert event.query()


@contextmanager
def threads(count: int, asked: str | None) -> Iterator[None]:
    """As in a process with so many threads, whose user, or torchrun, has asked for a number of them or for none."""
    usual = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID"):
            patch.delenv(name, raising=False)
        if asked == "torchrun":
            patch.setenv("OMP_NUM_THREADS", "1")
            patch.setenv("TORCHELASTIC_RUN_ID", "none")
        elif asked is not None:
            patch.setenv("OMP_NUM_THREADS", asked)
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(usual)


@pytest.mark.parametrize(("asked", "before", "after"), [(None, 8, 4), (None, 2, 2), ("8", 8, 8), ("torchrun", 8, 4)])
def test_host_threads_are_limited_unless_user_sets_them(asked: str | None, before: int, after: int) -> None:
    with threads(before, asked):
        platform.limit_host_threads()
        assert torch.get_num_threads() == after


@pytest.mark.parametrize(
    ("asked", "num_processes", "after"),
    [(None, 2, 4), (None, 3, 2), (None, 16, 1), ("8", 2, 5), ("1", 2, 5), ("torchrun", 2, 4)],
)
def test_the_processes_of_a_host_share_its_cores(
    asked: str | None, num_processes: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    with threads(5, asked):
        platform.share_host_threads(num_processes)
        assert torch.get_num_threads() == after
        assert os.environ.get("OMP_NUM_THREADS") == ("1" if asked == "torchrun" else asked)
