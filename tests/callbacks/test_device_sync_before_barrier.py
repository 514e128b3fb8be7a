import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from lightning.fabric import Fabric
from observed_run import ObservedModule, PlainModule, loader, make_trainer, save_run
from sharded_net import run_ranks

from rlightning.callbacks import DeviceSyncBeforeBarrier
from rlightning.errors import ConfigError
from rlightning.hooks import RLCallback
from rlightning.parallel import device as platform
from rlightning.parallel.barrier import barrier
from rlightning.parallel.cpu_group import cpu_group
from rlightning.parallel.strategy import DDP


class Recorder:
    """Writes down device synchronisations and meetings, in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        monkeypatch.setattr(platform, "synchronize", lambda device=None: self.calls.append("device"))

    def meet(self, *args: Any, **kwargs: Any) -> str:
        self.calls.append("meet")
        return "met"

    def take(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def test_device_sync_precedes_strategy_barrier_only_during_run(tmp_path: Path, recorder: Recorder) -> None:
    class MeetsAtEachStep(RLCallback):
        def on_update_end(self, trainer: Any, module: Any, batch: Any) -> None:
            trainer.strategy.barrier("update")

    trainer = make_trainer(tmp_path, DeviceSyncBeforeBarrier(), MeetsAtEachStep(), max_steps=2)
    trainer.strategy.barrier = recorder.meet  # type: ignore[assignment, method-assign]
    trainer.fit(ObservedModule(), loader())
    calls = recorder.take()[1:]  # Lightning's first barrier comes before the callbacks are set up
    assert len(calls) >= 4 and calls == ["device", "meet"] * (len(calls) // 2)
    trainer.strategy.barrier()
    assert recorder.take() == ["meet"]


def test_strategy_barrier_is_restored_after_failure(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, DeviceSyncBeforeBarrier(), max_steps=2)
    for _ in range(2):  # it can be set up again
        with pytest.raises(RuntimeError, match="out of luck"):
            trainer.fit(ObservedModule(fails_at=2), loader())
        assert "barrier" not in vars(trainer.strategy)


def test_before_every_kind_of_barrier(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    monkeypatch.setattr(type(fabric.strategy), "barrier", recorder.meet)
    monkeypatch.setattr(PartialState, "wait_for_everyone", recorder.meet)
    accelerator = SimpleNamespace(wait_for_everyone=lambda: PartialState().wait_for_everyone())
    own = SimpleNamespace(barrier=recorder.meet)
    for loop, meet in (
        (fabric, fabric.barrier),
        (SimpleNamespace(accelerator=accelerator), accelerator.wait_for_everyone),
        (own, lambda: own.barrier()),
    ):
        callback = DeviceSyncBeforeBarrier()
        callback.setup(loop, PlainModule(), "fit")
        meet()
        assert recorder.take() == ["device", "meet"]
        barrier("ours")
        assert recorder.take() == ["device"]
        callback.teardown(loop, PlainModule(), "fit")
        meet()
        barrier("ours")
        assert recorder.take() == ["meet"]


def test_our_strategies_need_no_other_way(tmp_path: Path, recorder: Recorder) -> None:
    trainer = make_trainer(tmp_path, strategy=DDP())
    callback = DeviceSyncBeforeBarrier()
    callback.setup(trainer, ObservedModule(), "fit")
    trainer.strategy.barrier("once")
    assert recorder.take() == ["device"]
    assert "barrier" not in vars(trainer.strategy)  # errors name the caller of a barrier without a name
    callback.teardown(trainer, ObservedModule(), "fit")


def test_arguments_and_result_are_the_barriers_own(recorder: Recorder) -> None:
    loop = SimpleNamespace(barrier=lambda name, *, timeout: (name, timeout))
    callback = DeviceSyncBeforeBarrier("cuda:1")
    callback.setup(loop, PlainModule(), "fit")
    assert loop.barrier("here", timeout=3) == ("here", 3)
    callback.teardown(loop, PlainModule(), "fit")


def meet_while_rank_0_works(folder: Path) -> dict[str, dict[str, float]]:
    """Rank 0's device is done after rank 1's: by barrier, when that was, and when the rank was past the barrier."""
    rank = dist.get_rank()
    times: dict[str, dict[str, float]] = {"ours": {}, "own": {}}

    def synchronize(device: Any = None) -> None:
        done = folder / f"{name} is done"
        while rank == 0 and not done.exists():
            time.sleep(0.01)
        time.sleep(0.2 if rank == 0 else 0)  # a rank 1 that did not wait would be past by then
        times[name]["done"] = time.monotonic()
        done.touch()

    platform.synchronize = synchronize
    for name, loop in (("ours", SimpleNamespace()), ("own", SimpleNamespace(barrier=dist.barrier))):
        callback = DeviceSyncBeforeBarrier()
        callback.setup(loop, PlainModule(), "fit")
        if name == "ours":
            barrier("meeting")
        else:
            loop.barrier()
        times[name]["past"] = time.monotonic()
        callback.teardown(loop, PlainModule(), "fit")
    return times


@pytest.mark.processes
def test_no_rank_passes_barrier_before_all_devices_finish(tmp_path: Path) -> None:
    ranks = run_ranks(meet_while_rank_0_works, 2, tmp_path)
    for name in ("ours", "own"):
        first, second = (rank[name] for rank in ranks)
        assert second["done"] < first["done"]
        assert min(first["past"], second["past"]) >= first["done"]


def test_resume(tmp_path: Path, recorder: Recorder) -> None:
    saved = save_run(tmp_path, DeviceSyncBeforeBarrier(), max_steps=1)
    recorder.take()
    trainer = make_trainer(tmp_path, DeviceSyncBeforeBarrier(), max_steps=2)
    trainer.fit(ObservedModule(), loader(), ckpt_path=saved)
    assert "device" in recorder.take()
    assert "barrier" not in vars(trainer.strategy)


def test_two_of_them_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, DeviceSyncBeforeBarrier(), DeviceSyncBeforeBarrier())
    with pytest.raises(ConfigError, match="there are two DeviceSyncBeforeBarrier"):
        trainer.fit(ObservedModule(), loader())
    assert "barrier" not in vars(trainer.strategy)


@pytest.mark.gpu
def test_barrier_waits_for_kernel_on_other_stream() -> None:
    loop, module = SimpleNamespace(barrier=lambda: None), torch.nn.Linear(1, 1, device="cuda")
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    done = []
    for callback in (None, DeviceSyncBeforeBarrier()):
        if callback is not None:
            callback.setup(loop, module, "fit")
        for meet in (loop.barrier, lambda: barrier("ours")):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(int(2e9))  # cycles: a second or so
                event.record()
            meet()
            done.append(event.query())
            platform.synchronize()
    assert callback is not None
    callback.teardown(loop, module, "fit")
    assert done == [False, False, True, True]


def meet_while_rank_0s_kernel_runs(folder: Path) -> list[bool]:
    """Return whether the kernel on rank 0's device had ended when this rank left each barrier."""
    rank, module = dist.get_rank(), torch.nn.Linear(1, 1, device="cuda")
    stream, event = torch.cuda.Stream(), torch.cuda.Event(interprocess=True)
    event.record()
    handle = [event.ipc_handle()]
    dist.broadcast_object_list(handle, 0, group=cpu_group())
    if rank == 1:
        event = torch.cuda.Event.from_ipc_handle(torch.device("cuda:0"), handle[0])
    loop = SimpleNamespace(barrier=dist.barrier)
    loop.barrier()  # NCCL takes its time to connect
    done = []
    for callback in (None, DeviceSyncBeforeBarrier()):
        if callback is not None:
            callback.setup(loop, module, "fit")
        for meet in (loop.barrier, lambda: barrier("ours")):
            if rank == 0:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(int(2e9))  # cycles: a second or so
                    event.record()
            meet()
            done.append(event.query())
            barrier("both have asked")
            platform.synchronize()
    assert callback is not None
    callback.teardown(loop, module, "fit")
    return done


@pytest.mark.multigpu
def test_barrier_on_both_ranks_awaits_one_ranks_kernel(tmp_path: Path) -> None:
    ranks = run_ranks(meet_while_rank_0s_kernel_runs, 2, tmp_path, device_type="cuda")
    assert ranks == [[False, False, True, True]] * 2
