"""The scripts of examples/custom_trainers: the callbacks in loops of three kinds, alone and with two processes."""

import os
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import run_python

from rlightning.callbacks import DeviceSyncBeforeBarrier, EmptyCacheAfterUpdate, OffloadDuringRollout
from rlightning.parallel import device as platform
from rlightning.parallel.device import MemoryUse
from rlightning.parallel.execution_mode import ExecutionMode

FOLDER = Path(__file__).parents[1] / "examples" / "custom_trainers"
SCRIPTS = ("plain_pytorch.py", "fabric.py", "transformers_trainer.py")


pytestmark = pytest.mark.usefixtures("fresh_process")


def load(script: str) -> tuple[Callable[..., list[float]], list[Any]]:
    """A script's ``main`` and its callbacks."""
    scope = runpy.run_path(str(FOLDER / script), run_name="example")
    return scope["main"], scope["make_callbacks"]()


def pretend_device(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A device whose synchronisations and emptied caches are written down; offloading moves tensors of the CPU."""
    calls: list[str] = []
    monkeypatch.setattr(platform, "synchronize", lambda device=None: calls.append("synchronize"))
    monkeypatch.setattr(platform, "empty_cache", lambda device=None: calls.append("empty"))
    monkeypatch.setattr(platform, "memory_use", lambda device=None: MemoryUse(1, 2, 2, 3, 4))
    monkeypatch.setattr(OffloadDuringRollout, "device_type", "cpu")
    return calls


@pytest.mark.long
@pytest.mark.parametrize("script", [*SCRIPTS[:2], pytest.param(SCRIPTS[2], marks=pytest.mark.slow)])
def test_callbacks_work_without_changing_custom_loop_training(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    main, callbacks = load(script)
    assert [type(callback).__name__ for callback in callbacks] == [
        "ControllerMode",
        "DeviceSyncBeforeBarrier",
        "EmptyCacheAfterUpdate",
        "OffloadDuringRollout",
    ]
    plain = main(10, [])
    calls = pretend_device(monkeypatch)
    assert main(10, callbacks) == plain
    assert plain[-1] > plain[0]
    mode, _, cache, offload = callbacks
    assert mode.resolved is ExecutionMode.SPMD
    assert cache.last["memory/after_update/reserved_before_gib"] == 2 / 2**30
    assert offload.last["memory/offloaded_gib"] > 0
    calls.clear()
    main(3, [EmptyCacheAfterUpdate(before_wake=False)])
    assert calls == ["synchronize", "empty"] * 3
    calls.clear()
    main(3, [DeviceSyncBeforeBarrier()])
    assert len(calls) >= 3 and set(calls) == {"synchronize"}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_two_processes_learn(script: str, tmp_path: Path) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--log-dir", str(tmp_path))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = run_python(*launch, FOLDER / script, environment=environment)
    output = done.stdout + done.stderr
    learned = [float(reward) for reward in re.findall(r"reward [\d.]+ -> ([\d.]+)", output)]
    assert len(learned) == 2 and min(learned) > 0.9, output


@pytest.mark.gpu
@pytest.mark.parametrize("script", SCRIPTS)
def test_on_cuda(script: str) -> None:
    main, callbacks = load(script)
    main(5, callbacks)
    _, _, cache, offload = callbacks
    assert cache.last["memory/after_update/reserved_after_gib"] <= cache.last["memory/after_update/reserved_before_gib"]
    assert offload.last["memory/offloaded_gib"] > 0
