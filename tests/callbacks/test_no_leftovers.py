"""Whatever ends a run, no process, no shared memory and no scratch folder of it stays."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_run import in_session, make_data, make_rollout, make_trainer, processes
from tiny import heed_ctrl_c
from waiting import wait_for

from rlightning.algorithms import GRPO
from rlightning.hooks import RLCallback
from rlightning.parallel.stop_signal import StopSignal, stop_signal
from rlightning.rewards import RewardFunction
from rlightning.types import Prompt

pytestmark = pytest.mark.processes

HERE = Path(__file__).parent
IMPORTABLE = os.pathsep.join([str(HERE), str(HERE.parent)])
"""Where the processes that a test starts find engine_run and tiny."""
END_SECONDS = 120.0
heed_ctrl_c()
SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temp folder of the run, of a short name: sockets are in it."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


def shared_memory(sessions: set[int]) -> set[str]:
    """The files of it that processes of these sessions have open."""
    found = set()
    for session in sessions:
        for pid in processes(session):
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{pid}/maps").read_text()
                found |= set(re.findall(rf"{SHARED_MEMORY}/(\S+)$", maps, re.MULTILINE))
    return found


def engine_files(scratch: Path) -> list[str]:
    return [path.name for path in scratch.iterdir() if "engine" in path.name or "vllm" in path.name]


def sessions_below(pid: int) -> set[int]:
    """The sessions of a process and of all that it has started."""
    parents, sessions = {}, {}
    for entry in Path("/proc").iterdir():
        try:
            _, parent, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            parents[int(entry.name)], sessions[int(entry.name)] = int(parent), int(session)
        except (OSError, ValueError):
            continue
    family = {pid}
    while grown := {child for child, parent in parents.items() if parent in family} - family:
        family |= grown
    return {sessions[member] for member in family}


def leftovers(sessions: set[int], memory: set[str], scratch: Path) -> list[str]:
    """Return the processes and files that still exist after a grace period."""

    def find() -> list[str]:
        living = [line for session in sessions for line in in_session(session)]
        return [*living, *(name for name in memory if (SHARED_MEMORY / name).exists()), *engine_files(scratch)]

    with contextlib.suppress(AssertionError):
        wait_for(lambda: not find(), END_SECONDS)
    return find()


class Stumbling(GRPO):
    """Fails in its second step, when completions are there and reward processes are up."""

    def training_step(self, prompts: list[Prompt], batch_idx: int) -> None:
        super().training_step(prompts, batch_idx)
        if batch_idx == 1:
            raise ZeroDivisionError("the user's mistake")


class NoteSessions(RLCallback):
    """Which sessions there are while the run is at work."""

    def __init__(self) -> None:
        self.before = sessions_below(os.getpid())
        self.sessions: set[int] = set()
        self.memory: set[str] = set()

    def on_update_start(self, trainer: Any, module: Any, batch: Any) -> None:
        self.sessions |= sessions_below(os.getpid()) - self.before
        self.memory |= shared_memory(self.sessions)


def test_an_exception_in_the_users_module(engine_model: str, tmp_path: Path, scratch: Path) -> None:
    module = Stumbling(
        engine_model,
        rewards=[RewardFunction("rlightning.rewards.regex_format", arguments={"pattern": "1.*"}, timeout=500)],
        prompts_per_step=4,
        samples_per_prompt=2,
    )
    note, rollout = NoteSessions(), make_rollout()
    with pytest.raises(ZeroDivisionError, match="the user's mistake"):
        make_trainer(tmp_path, 5, rollout, note).fit(module, make_data(tmp_path))
    assert len(note.sessions) >= 2  # the engine's, and the reward processes'
    assert leftovers(note.sessions, note.memory, scratch) == []
    assert rollout.engine is None


CONFIG = """\
model:
  class_path: GRPO
  init_args:
    model: {model}
    rewards: [{{function: tiny.share_of_ones, timeout: 500}}]
    prompts_per_step: 4
    samples_per_prompt: 2
data: {{train: sums.jsonl, max_prompt_tokens: 16}}
rollout: {{max_new_tokens: 100, engine: {{kv_cache_memory_bytes: 268435456{workers}}}}}
trainer: {{max_steps: 100000, accelerator: cpu, devices: 1, logger: false, default_root_dir: run}}
"""


def write_config(folder: Path, model: str) -> None:
    """A run without an end; its engine has a worker process and shared memory, where there is room for that."""
    make_data(folder)
    disk = os.statvfs(SHARED_MEMORY)
    has_room = disk.f_bavail * disk.f_frsize > 1 << 30
    workers = ", distributed_executor_backend: mp" if has_room else ""
    (folder / "run.yaml").write_text(CONFIG.format(model=model, workers=workers))


class HurryStop(RLCallback):
    """Lets half of the grace period go by once the run is asked to stop; holds a rollout while a test prepares one."""

    def on_rollout_start(self, trainer: Any, module: Any, prompts: Any) -> None:
        if Path("hold").exists():
            Path("held").touch()
            wait_for(lambda: not Path("hold").exists())

    def on_train_start(self, trainer: Any, module: Any) -> None:
        threading.Thread(target=self.hurry, args=(stop_signal(trainer),), daemon=True).start()

    def hurry(self, stop: StopSignal) -> None:
        while not stop.asked_at:  # which is set after the signal's number
            time.sleep(0.05)
        stop.asked_at -= 0.51 * stop.grace_period


@dataclass
class Run:
    """A run of the command line that has done two steps, and what it has started."""

    process: "subprocess.Popen[bytes]"
    output: Path
    sessions: set[int]
    memory: set[str]


@contextlib.contextmanager
def started_run(engine_model: str, folder: Path, scratch: Path, *options: str) -> Iterator[Run]:
    """One that has not ended before is killed."""
    write_config(folder, engine_model)
    output = folder / "output"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "rlightning", "fit", "--config", "run.yaml", *options],
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": IMPORTABLE, "TMPDIR": str(scratch)},
            start_new_session=True,
        )
    try:
        # lines of steps
        wait_for(lambda: process.poll() is not None or output.read_text(errors="replace").count("reward") >= 2, 400)
        assert process.poll() is None, output.read_text()
        sessions = sessions_below(process.pid)
        assert len(sessions) >= 2 and engine_files(scratch)
        yield Run(process, output, sessions, shared_memory(sessions))
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("number", "exit_codes"),
    [pytest.param(signal.SIGINT, {1, 130}, marks=pytest.mark.slow), (signal.SIGKILL, {-9})],
    ids=["SIGINT", "SIGKILL"],
)
def test_signal_leaves_nothing_behind(
    number: signal.Signals, exit_codes: set[int], engine_model: str, tmp_path: Path, scratch: Path
) -> None:
    with started_run(engine_model, tmp_path, scratch) as run:
        os.killpg(run.process.pid, number)  # as a terminal does
        assert run.process.wait(END_SECONDS) in exit_codes, run.output.read_text()
        assert leftovers(run.sessions, run.memory, scratch) == []
        assert (tmp_path / "run/checkpoints/last.ckpt").is_file() == (number != signal.SIGKILL)


def test_sigterm_while_engine_hangs_saves_within_grace(engine_model: str, tmp_path: Path, scratch: Path) -> None:
    # Of a hung engine nothing is noticed before the test's limit: only the signal ends the rollout.
    limits = ("--model.stop_grace", "600", "--rollout.hang_timeout", "600")
    options = (*limits, "--trainer.callbacks+=test_no_leftovers.HurryStop")
    with started_run(engine_model, tmp_path, scratch, *options) as run:
        (tmp_path / "hold").touch()
        wait_for((tmp_path / "held").exists)
        for session in run.sessions - {run.process.pid}:
            for pid in processes(session):
                os.kill(pid, signal.SIGSTOP)
        (tmp_path / "hold").unlink()  # the trainer's rollout begins
        run.process.terminate()
        assert run.process.wait(END_SECONDS) == 143, run.output.read_text()
        assert "is saved. Go on with:" in run.output.read_text() and "Traceback" not in run.output.read_text()
        assert leftovers(run.sessions, run.memory, scratch) == []
        assert (tmp_path / "run/checkpoints/last.ckpt").is_file()


@pytest.mark.slow
def test_engine_exits_when_trainer_dies_despite_inherited_socket(
    engine_model: str, tmp_path: Path, scratch: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(FORKING)
    process = subprocess.Popen(
        [sys.executable, str(script), engine_model, str(tmp_path)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": IMPORTABLE},
        start_new_session=True,
        text=True,
    )
    assert process.stdout is not None
    engine, child = json.loads(process.stdout.readline())
    assert in_session(engine)
    memory = shared_memory({engine})
    process.kill()
    process.wait()
    assert leftovers({engine}, memory, scratch) == []
    os.kill(child, signal.SIGKILL)  # it has held the socket all the time


FORKING = """
import json, os, sys, time
from pathlib import Path
from engine_run import make_module, make_rollout, make_trainer
rollout = make_rollout()
module = make_module(sys.argv[1])
trainer = make_trainer(Path(sys.argv[2]), 1, rollout)
module.trainer = trainer
rollout.setup(trainer, module, "validate")
rollout.engine.ready.result()
child = os.fork()
if child == 0:
    time.sleep(600)
print(json.dumps([rollout.engine.process.pid, child]), flush=True)
time.sleep(600)
"""
