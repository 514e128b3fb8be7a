"""Each callback used again, twice, cut short, behind an exception, on two ranks without Lightning, in micro-batches."""

import copy
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from loops import STEP, Loop
from observed_run import ObservedModule, loader, make_trainer, messages
from sharded_net import run_ranks
from tiny import heed_ctrl_c

from rlightning import callbacks
from rlightning.callbacks import OffloadDuringRollout
from rlightning.controller.tensor_store import stores_results
from rlightning.errors import ConfigError
from rlightning.parallel import device as platform
from rlightning.parallel import execution_mode
from rlightning.parallel.device import MemoryUse
from rlightning.parallel.execution_mode import ExecutionMode

MAKE: dict[str, Callable[[], Any]] = {
    "CompletionsTable": lambda: callbacks.CompletionsTable(1),
    "ControllerMode": callbacks.ControllerMode,
    "DeviceSyncBeforeBarrier": callbacks.DeviceSyncBeforeBarrier,
    "EmptyCacheAfterUpdate": lambda: callbacks.EmptyCacheAfterUpdate(every_n_updates=2, before_wake=False),
    "JSONLPredictions": callbacks.JSONLPredictions,
    "MakeRoomForEngine": callbacks.MakeRoomForEngine,
    "OffloadDuringRollout": lambda: callbacks.OffloadDuringRollout(parameters=True),
    "RLProgressBar": callbacks.RLProgressBar,
    "RemotizeOnHeadOnly": lambda: callbacks.RemotizeOnHeadOnly(group_size=1),
    "RunReport": callbacks.RunReport,
    "SaveHF": lambda: callbacks.SaveHF(every_n_steps=2),
    "Throughput": callbacks.Throughput,
    "TransformersRollout": lambda: callbacks.TransformersRollout(max_new_tokens=4),
    "VLLMRollout": lambda: callbacks.VLLMRollout(max_new_tokens=4),
}
WITHOUT_SAMPLER = [name for name in MAKE if name not in ("TransformersRollout", "VLLMRollout")]
"""Samplers are run in test_transformers_rollout.py and test_matrix_engine.py."""
OWN_LOOP = [name for name in WITHOUT_SAMPLER if name != "RLProgressBar"]
"""RLProgressBar is Lightning's."""
SECONDS = {"time/step": 9, "time/generate": 3, "time/sync": 2, "time/reward": 1, "time/update": 1}
"""Of a step of :class:`Loop` whose hooks come one a second; the sync within the rollout is not counted twice."""


def test_every_callback_is_in_the_matrix() -> None:
    assert sorted(MAKE) == sorted(callbacks.__all__)


@pytest.mark.parametrize("name", WITHOUT_SAMPLER)
def test_copy_keeps_the_state(name: str) -> None:
    """A deep copy, such as a controller's copy for its workers, has the same state."""
    callback = MAKE[name]()
    assert copy.deepcopy(callback).state_dict() == callback.state_dict()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> "Clock":
    """A process that has not resolved its mode, with a device of which it is noted what is done to it."""
    monkeypatch.setattr(execution_mode, "_resolved", None)
    clock = Clock()
    monkeypatch.setattr("rlightning.phases.perf_counter", clock)
    monkeypatch.setattr("rlightning.callbacks.run_report.perf_counter", clock)
    monkeypatch.setattr(platform, "synchronize", lambda device=None: clock.calls.append("wait"))
    monkeypatch.setattr(platform, "empty_cache", lambda device=None: clock.calls.append("empty"))
    monkeypatch.setattr(platform, "memory_use", lambda device=None: MemoryUse(1, 2, 2, 3, 4))
    monkeypatch.setattr(OffloadDuringRollout, "device_type", "cpu")
    return clock


class Clock(Callback):
    """One second later whenever a hook comes, as a callback in front of the others."""

    def __init__(self) -> None:
        self.now, self.calls = 100.0, list[str]()

    def __call__(self) -> float:
        return self.now

    def tick(self, *args: Any) -> None:
        self.now += 1.0


for hook in STEP:
    setattr(Clock, hook, Clock.tick)


class FailsInUpdate(ObservedModule):
    """Raises in the update of the second step."""

    def update(self) -> None:
        if self.trainer.global_step == 1:
            raise self.error
        super().update()


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def tables(folder: Path) -> dict[str, list[int]]:
    """The groups in each file of completions."""
    files = sorted((folder / "completions").iterdir())
    return {path.name: pyarrow.parquet.read_table(path)["group"].to_pylist() for path in files}


def check(name: str, callback: Any, loop: Loop, folder: Path, clock: Clock, *, num_microbatches: int = 1) -> None:
    """Assert what a callback has recorded after three complete steps of :class:`Loop`, and six predictions."""
    groups = [0, 0, 1, 1] if num_microbatches == 1 else [0, 0, 1, 1, 2, 2, 3, 3]
    match name:
        case "CompletionsTable":
            assert tables(folder) == {f"step_00000{step}.parquet": groups for step in (1, 2, 3)}
        case "ControllerMode":
            assert callback.resolved is ExecutionMode.SPMD
        case "DeviceSyncBeforeBarrier":
            assert "barrier" not in vars(loop)
        case "EmptyCacheAfterUpdate":
            assert callback.state_dict() == {"num_updates": 3 * num_microbatches}
            assert clock.calls.count("empty") == 3 * num_microbatches // 2  # after each second one
        case "JSONLPredictions":
            assert [path.name for path in folder.iterdir()] == ["predictions.jsonl"]
            assert lines_of(folder / "predictions.jsonl") == 6
        case "MakeRoomForEngine":
            assert callback.engine_bytes == 0  # its engine takes no memory
        case "OffloadDuringRollout":
            assert callback.last["memory/offloaded_gib"] > 0
            assert loop.policy.weight.untyped_storage().nbytes() == 32
            # three steps of AdamW on a gradient of one sign take 0.1 off each time, but for weight decay
            assert loop.policy.weight.tolist() == pytest.approx([-0.3] * 8, rel=1e-2)
        case "RemotizeOnHeadOnly":
            assert callback.is_head is None and stores_results()
        case "RunReport":
            assert [step for step, _ in callback.history.series["time/step"]] == [1, 2, 3]
            assert [seconds for _, seconds in callback.history.series["time/step"]] == [9.0] * 3
        case "SaveHF":
            assert loop.policy.saved == ["hf_step_000002", "hf"]
        case "Throughput":
            assert {n: v for n, v in callback.last.items() if n.startswith("time/")} == SECONDS
            assert callback.num_tokens == 22


class Recorded(Loop):
    """A loop that tells RunReport its steps, as its documentation says."""

    def step(self, cut_after: str | None = None) -> None:
        super().step(cut_after)
        for callback in self.callbacks:
            if isinstance(callback, callbacks.RunReport):
                callback.record(self.global_step, {"policy/loss": 1.0})


def run(name: str, callback: Any, folder: Path, clock: Clock, **kwargs: Any) -> Recorded:
    """Three steps, or six predictions."""
    loop = Recorded(folder, clock, callback, **kwargs)
    if name == "JSONLPredictions":
        loop.predict()
    else:
        loop.fit(3)
    return loop


@pytest.mark.parametrize("name", OWN_LOOP)
def test_second_run_starts_afresh(name: str, tmp_path: Path, clock: Clock) -> None:
    callback = MAKE[name]()
    run(name, callback, tmp_path / "first", clock)
    clock.now += 1000.0
    clock.calls.clear()
    check(name, callback, run(name, callback, tmp_path / "second", clock), tmp_path / "second", clock)
    if name == "RunReport":  # three steps of ten hooks, and none of the time before
        assert callback.state_dict()["seconds"] == 30.0


@pytest.mark.parametrize("name", MAKE)
def test_listed_twice_is_refused_in_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused in one line that names it, before anything is generated, by Lightning or here."""
    errors: Any = (ConfigError, MisconfigurationException, RuntimeError)
    first, second = MAKE[name](), MAKE[name]()
    stage = "predict" if name == "JSONLPredictions" else "fit"
    for pair in ((first, second), *(((first, first),) if name != "DeviceSyncBeforeBarrier" else ())):
        module = ObservedModule()
        with pytest.raises(errors, match=name if name != "RLProgressBar" else "progress bar"):
            trainer = make_trainer(tmp_path, *pair)
            getattr(trainer, stage)(module, loader())
        assert not list(tmp_path.iterdir()) and module.weight.item() == 0.0
        if name != "RLProgressBar":
            with pytest.raises(ConfigError, match=name):
                Loop(tmp_path, *pair).fit(1) if stage == "fit" else Loop(tmp_path, *pair).predict()
            first.teardown(None, None, stage)


def test_those_with_other_files_may_be_listed_twice(tmp_path: Path) -> None:
    loop = Loop(tmp_path, callbacks.SaveHF(), callbacks.SaveHF(str(tmp_path / "copy")))
    loop.fit(1)
    assert loop.policy.saved == ["hf", "copy"]
    predictions = callbacks.JSONLPredictions, tmp_path / "copy.jsonl"
    Loop(tmp_path, predictions[0](), predictions[0](str(predictions[1]))).predict()
    assert lines_of(tmp_path / "predictions.jsonl") == lines_of(predictions[1]) == 6


class OwnReport(callbacks.RunReport):
    """A report of the user's, with another state than its base's."""


@pytest.mark.parametrize(
    ("name", "path", "make"),
    [
        ("JSONLPredictions", "predictions.jsonl", callbacks.JSONLPredictions),
        ("SaveHF", "hf", callbacks.SaveHF),
        ("RunReport", "report.html", lambda path=None: OwnReport(path) if path else callbacks.RunReport()),
    ],
)
@pytest.mark.parametrize("spelling", ["{folder}/{path}", "{folder}/../{folder.name}/{path}"])
def test_one_file_spelled_in_two_ways_is_refused(
    name: str, path: str, make: Callable[..., Any], spelling: str, tmp_path: Path
) -> None:
    pair = make(), make(spelling.format(folder=tmp_path, path=path))
    stage = "predict" if name == "JSONLPredictions" else "fit"
    module = ObservedModule()
    with pytest.raises(ConfigError, match=rf"{name} and \w+ of trainer\.callbacks both write '.*{path}'\. Keep one"):
        getattr(make_trainer(tmp_path, *pair), stage)(module, loader())
    assert not list(tmp_path.iterdir()) and module.weight.item() == 0.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("RLProgressBar", "RLProgressBar needs Lightning's Trainer, which Loop is not"),
        ("TransformersRollout", "TransformersRollout needs .*score, .*of the module, which Policy does not have"),
        ("VLLMRollout", "VLLMRollout needs .*model_path, .*score, .*of the module, which Policy does not have"),
    ],
)
def test_loop_without_what_a_callback_needs_is_refused(name: str, message: str, tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with pytest.raises(ConfigError, match=message):
        MAKE[name]().setup(loop, loop.policy, "fit")


CUTS = [hook for hook in STEP if hook != "on_update_end"]


@pytest.mark.parametrize("name", [name for name in OWN_LOOP if name != "JSONLPredictions"])
@pytest.mark.long
def test_steps_that_are_cut_short_and_begun_again(name: str, tmp_path: Path, clock: Clock) -> None:
    """At each hook, with and without on_exception and setup being called before the step is repeated."""
    for cut_after in CUTS:
        for is_announced in (False, True):
            folder = tmp_path / f"{cut_after}-{is_announced}"
            callback = MAKE[name]()
            loop = Recorded(folder, clock, callback)
            clock.calls.clear()
            callback.setup(loop, loop.policy, "fit")
            for step in range(3):
                if step != 1:
                    with pytest.raises(KeyboardInterrupt):
                        loop.step(cut_after)
                    clock.now += 1000.0
                    if is_announced:
                        callback.on_exception(loop, loop.policy, KeyboardInterrupt())
                        callback.setup(loop, loop.policy, "fit")
                loop.step()
            callback.on_train_end(loop, loop.policy)
            callback.teardown(loop, loop.policy, "fit")
            check(name, callback, loop, folder, clock)


@pytest.mark.parametrize("name", [name for name in WITHOUT_SAMPLER if name != "JSONLPredictions"])
@pytest.mark.parametrize(
    "error", [RuntimeError("out of luck"), KeyboardInterrupt()], ids=lambda error: type(error).__name__
)
def test_fits_after_an_exception(
    name: str, error: BaseException, tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """The second step fails in its update; the same object then sees the rest of that run, and another one."""
    callback = MAKE[name]()
    caplog.set_level(logging.INFO, "rlightning")
    first = make_trainer(tmp_path / "first", clock, callback)
    with pytest.raises((RuntimeError, SystemExit)):
        first.fit(FailsInUpdate(error=error), loader())
    heed_ctrl_c()
    assert not list(tmp_path.rglob("*.partial"))
    for folder, trainer in (("first", first), ("second", make_trainer(tmp_path / "second", clock, callback))):
        caplog.clear()
        clock.now += 1000.0
        trainer.fit(module := ObservedModule(), loader())
        assert trainer.global_step == 3
        match name:
            case "CompletionsTable" | "ControllerMode" | "RemotizeOnHeadOnly":
                check(name, callback, Loop(tmp_path), tmp_path / folder, clock)
            case "RunReport":
                assert [step for step, _ in callback.history.series["reward/mean"]] == [1, 2, 3]
                assert callback.history.last("time/step") < 20
            case "SaveHF":
                assert [path.name for path in module.saved] == ["hf_step_000002", "hf"]
            case "Throughput":
                assert callback.last["time/step"] < 20 and callback.num_tokens == 22
            case "RLProgressBar":
                (line,) = [line for line in messages(caplog) if line.startswith("step 3/3")]
                assert re.search(r"reward 0\.300 \| length 1\.5 \| [\d,]+ tokens/s", line)
            case "EmptyCacheAfterUpdate":
                assert callback.state_dict() == {"num_updates": 3}
            case "OffloadDuringRollout":
                assert module.weight.untyped_storage().nbytes() == 4
            case "DeviceSyncBeforeBarrier":
                assert "barrier" not in vars(trainer.strategy)


@pytest.mark.parametrize("name", OWN_LOOP)
def test_micro_batches_are_all_in_steps_files(name: str, tmp_path: Path, clock: Clock) -> None:
    """Two to a step, each with a rollout of its own: all of it is in the step's files."""
    callback = MAKE[name]()
    loop = run(name, callback, tmp_path, clock, num_microbatches=2)
    if name == "OffloadDuringRollout":
        assert loop.policy.weight.tolist() == pytest.approx([-0.3] * 8, rel=1e-2)  # gradients came back too
    check(name, callback, loop, tmp_path, clock, num_microbatches=2)


def two_ranks(folder: Path) -> None:
    """Work of one rank: each callback in a loop of its own, which does not tell its rank."""
    for name in OWN_LOOP:
        callback = MAKE[name]()
        loop = run(name, callback, folder / name, Clock())
        if name == "RunReport":
            callback.write(folder / name / "report.html", module=loop.policy)
    dist.barrier()


@pytest.fixture(scope="module")
def ranks_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(two_ranks, 2, folder)
    yield folder


@pytest.mark.processes
@pytest.mark.parametrize("name", OWN_LOOP)
def test_two_ranks_without_lightning(name: str, ranks_folder: Path) -> None:
    """The files of two ranks do not overwrite each other."""
    folder = ranks_folder / name
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    match name:
        case "CompletionsTable":
            suffixes = ("", ".rank1")
            assert tables(folder) == {f"step_00000{s}{x}.parquet": [0, 0, 1, 1] for s in (1, 2, 3) for x in suffixes}
        case "JSONLPredictions":
            assert found == ["predictions.rank0.jsonl", "predictions.rank1.jsonl"]
            assert [lines_of(folder / file) for file in found] == [6, 6]
        case "RunReport":
            assert found == ["report.html"]
        case _:
            assert found == []
