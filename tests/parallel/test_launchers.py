"""One run under Lightning's launcher, torchrun and SLURM's variables; and what the first failure does there."""

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from cli_project import environment, make_project

from rlightning.parallel.launcher import find_port

pytestmark = pytest.mark.processes

PAIR = """\
  devices: 2
  strategy:
    class_path: rlightning.parallel.strategy.DDP
    init_args:
      failure_grace: 30
"""

FAILING = """\
import os, signal, sys, time
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
import torch
from lightning.pytorch import Callback
from torch.distributed.distributed_c10d import _set_pg_timeout
from rlightning import intervals
from rlightning.errors import ConfigError, EngineError
from rlightning.parallel.stop_signal import stop_signal

class TellsAtExit(Callback):
    def on_fit_end(self, trainer, module):
        Finalize(None, self.tell, exitpriority=0)  # the last of all

    def tell(self):
        sys.stderr.write(f"in a group at the end: {torch.distributed.is_initialized()}\\n")


class EndsEarly(Callback):
    def __init__(self):
        if os.environ.get("LOCAL_RANK") == "1":
            os._exit(7)


class Fails(Callback):
    def __init__(self, rank: int, how: str, others: str = "sleep"):
        self.rank, self.how, self.others = rank, how, others
        if others == "sleep":
            intervals.STUCK_GRACE = intervals.FAILURE_ANSWER_TIMEOUT = 60  # no rank counts as stuck, however slow

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx != 1:
            return
        if self.rank not in (trainer.global_rank, -1):
            if self.others == "collective":
                if self.how == "SIGSTOP":
                    world = torch.distributed.group.WORLD
                    usual = world._get_backend(torch.device("cpu")).options._timeout
                    sys.stderr.write(f"a collective ends after {usual.total_seconds():g} s\\n")
                    _set_pg_timeout(timedelta(seconds=2), world)  # from here on: the ranks' start takes its time
                    intervals.HEARTBEAT_INTERVAL, intervals.SILENT_AFTER, intervals.STUCK_GRACE = 0.5, 4, 1
                    while not self.is_stopped(Path(trainer.default_root_dir, "stopped")):
                        time.sleep(0.02)
            if self.how == "SIGINT":  # before a collective, amid which it would not hear of the signal
                self.hurry_stop(trainer)
            if self.others == "collective":
                torch.distributed.all_reduce(torch.ones(1))
            time.sleep(600 if self.how != "SIGTERM" else 0)
        elif self.how == "raise":
            raise ValueError("boom")
        elif self.how == "foreseen":
            raise EngineError("The engine died twice.", "the end of its log")
        elif self.how == "mistake":
            raise ConfigError("width=3 cannot be halved. Use 4.")
        else:
            if self.how == "SIGSTOP":
                mark = Path(trainer.default_root_dir, "stopping")
                mark.write_text(str(os.getpid()))
                mark.rename(mark.with_name("stopped"))
            os.kill(os.getpid(), getattr(signal, self.how))
            if self.how == "SIGINT" and self.others == "sleep":
                self.hurry_stop(trainer)

    def is_stopped(self, mark):
        if not mark.exists():
            return False
        return Path("/proc", mark.read_text(), "stat").read_text().rpartition(")")[2].split()[0] == "T"

    def hurry_stop(self, trainer):
        stop = stop_signal(trainer)
        while not stop.signum:
            time.sleep(0.1)
        stop.asked_at -= 0.51 * stop.grace_period

    def on_exception(self, trainer, module, exception):
        sys.stderr.write(f"rank {trainer.global_rank} cleans up\\n")
"""

SCRIPT = str(Path(sys.executable).with_name("rlightning"))
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    make_project(folder)
    with (folder / "run.yaml").open("a") as file:
        file.write(PAIR)
    (folder / "failing.py").write_text(FAILING)
    return folder


@pytest.fixture(scope="module", autouse=True)
def temporary_folder() -> Iterator[None]:
    """The runs' temporary folder, of a short name since sockets are in it; torchrun leaves nothing there."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAUNCHERS_TMPDIR", folder)
        yield
        assert not [path.name for path in Path(folder).iterdir() if path.name.startswith("torchelastic")]


def start(
    project: Path, run: str, *options: str, by: str = "lightning", variables: Mapping[str, str] | None = None
) -> "subprocess.Popen[str]":
    """Begin to fit, with ``run`` as the run's folder."""
    torchrun = [TORCHRUN, "--nproc-per-node", "2", "--master-port", str(find_port()), "--log-dir", str(project / "log")]
    before = torchrun if by == "torchrun" else []
    return subprocess.Popen(
        [*before, SCRIPT, "fit", "--config", "run.yaml", "--trainer.default_root_dir", run, *options],
        cwd=project,
        env={**environment(), "TMPDIR": os.environ["LAUNCHERS_TMPDIR"], **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def slurm(procid: int, port: int) -> dict[str, str]:
    """Return the variables that srun sets for one of two tasks on one node."""
    return {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_PROCID": str(procid),
        "SLURM_LOCALID": str(procid),
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NODELIST": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def losses(project: Path, run: str) -> list[str]:
    """Return the losses that the run logged."""
    (path,) = (project / run).rglob("metrics.csv")
    with path.open() as file:
        return [row["policy/loss"] for row in csv.DictReader(file)]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_the_same_run_under_three_launchers(project: Path, strategy: str) -> None:
    port = find_port()
    options = ("--trainer.callbacks+=failing.TellsAtExit", f"--trainer.strategy={strategy}")
    lightning, torchrun, srun = (f"{launcher}-{strategy}" for launcher in ("lightning", "torchrun", "slurm"))
    runs = [
        start(project, lightning, *options),
        start(project, torchrun, *options, by="torchrun"),
        *(start(project, srun, *options, variables=slurm(rank, port)) for rank in range(2)),
    ]
    outputs = [run.communicate(timeout=500)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0, 0], "\n".join(outputs)
    # A gloo thread that outlives Python can abort a process that has done all its work.
    assert [output.count("in a group at the end: False") for output in outputs] == [2, 2, 1, 1]
    one, two, three = (losses(project, run) for run in (lightning, torchrun, srun))
    assert len(one) == 3
    assert one == two == three


def failing(
    project: Path, run: str, rank: int, how: str, by: str, *options: str, others: str = "sleep"
) -> tuple[int, str]:
    """Exit code and output of a run in which ``rank`` fails in the second batch; -1 is all ranks."""
    arguments = {"rank": rank, "how": how, "others": others}
    entry = json.dumps({"class_path": "failing.Fails", "init_args": arguments})
    process = start(project, run, f"--trainer.callbacks+={entry}", *options, by=by)
    output, _ = process.communicate(timeout=500)
    return process.returncode, output


@pytest.mark.parametrize(("rank", "by"), [(0, "lightning"), pytest.param(1, "torchrun", marks=pytest.mark.slow)])
def test_an_exception_ends_the_run_with_one_traceback(project: Path, rank: int, by: str) -> None:
    code, output = failing(project, f"raise-{rank}-{by}", rank, "raise", by)
    assert code == 1, output
    # Not torchrun's own, which tells of the exit code.
    assert output.count("ValueError: boom\n") == 2
    assert output.count('raise ValueError("boom")') == 1
    assert f"rank {1 - rank} ends because rank {rank} failed: ValueError: boom" in output
    assert all(f"rank {i} cleans up" in output for i in range(2))


def test_foreseen_error_is_one_line_of_one_rank(project: Path) -> None:
    code, output = failing(project, "foreseen", 1, "foreseen", "torchrun")
    assert code == 1, output
    assert output.count("The engine died twice.") == output.count("error: The engine died twice.\n") == 1
    assert output.count("The trace of this error is in foreseen/error.txt.\n") == 1
    assert "on_train_batch_start" not in output and "ends because" not in output
    assert all(f"rank {i} cleans up" in output for i in range(2))
    kept = (project / "foreseen" / "error.txt").read_text()
    assert "in on_train_batch_start" in kept and "the end of its log" in kept


@pytest.mark.parametrize("by", ["lightning", pytest.param("slurm", marks=pytest.mark.slow)])
def test_taken_rendezvous_port_is_one_line(project: Path, by: str) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        variables = {"MASTER_PORT": str(port)} if by == "lightning" else slurm(0, port)
        process = start(project, f"taken-{by}", variables=variables)
        output, _ = process.communicate(timeout=500)
    assert process.returncode == 2, output
    assert "Traceback" not in output
    rule = {"lightning": "cannot be listened on (Address already in use)", "slurm": "is taken by another program"}[by]
    assert output.splitlines()[-1].startswith(f"error: MASTER_PORT={port} {rule}. Set it to a free port")


@pytest.mark.parametrize(("rank", "by"), [pytest.param(1, "lightning", marks=pytest.mark.slow), (0, "torchrun")])
def test_a_killed_rank_ends_the_run(project: Path, rank: int, by: str) -> None:
    code, output = failing(project, f"kill-{rank}-{by}", rank, "SIGKILL", by)
    assert code == 1, output
    # Who started it can ask the system what became of it.
    end = "was killed by SIGKILL (out of host memory?)" if by == "lightning" else "is gone"
    assert f"rank {1 - rank} ends because rank {rank} {end}" in output
    assert f"rank {1 - rank} cleans up" in output


def test_rank_exit_before_rendezvous_ends_run(project: Path) -> None:
    process = start(project, "early", "--trainer.callbacks+=failing.EndsEarly")
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 7
    assert output.count("rank 0 ends because rank 1 ended with exit code 7 before the ranks had met") == 1


def test_a_mistake_of_all_ranks_is_told_once(project: Path) -> None:
    code, output = failing(project, "mistake", -1, "mistake", "lightning")
    assert code == 2
    assert output.count("width=3") == 1
    assert "error: width=3 cannot be halved. Use 4.\n" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks_in_one_line(project: Path) -> None:
    code, output = failing(project, "interrupt", 0, "SIGINT", "lightning", "--model.stop_grace", "400")
    assert code == 130, output
    assert output.count("interrupted\n") == 1
    assert all(f"rank {i} cleans up" in output for i in range(2))


@pytest.mark.slow
def test_sigterm_stops_all_ranks_at_same_batch(project: Path) -> None:
    code, output = failing(project, "terminate", 1, "SIGTERM", "lightning")
    assert code == 143
    assert all(f"rank {i} cleans up" in output for i in range(2))
    assert "ends because" not in output


@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_stuck_rank(project: Path) -> None:
    options = ("--trainer.strategy.failure_grace", "600", "--model.stop_grace", "40")
    code, output = failing(project, "stuck", 0, "SIGINT", "lightning", *options, others="collective")
    assert code == 130, output
    assert "ended, since the step under way was not over 40 s after the signal" in output
    assert "rank 0 cleans up" in output


@pytest.mark.slow
def test_collective_with_stopped_rank_times_out(project: Path) -> None:
    options = ("--trainer.strategy.barrier_timeout", "1200", "--trainer.strategy.failure_grace", "600")
    code, output = failing(project, "stopped", 1, "SIGSTOP", "lightning", *options, others="collective")
    assert code == 1, output
    assert "a collective ends after 1200 s" in output
    assert "Timed out waiting 2000ms" in output
    assert "rank 1 was last seen at barrier 'next batch', " in output
    assert "rank 0 cleans up" in output


@pytest.mark.slow
def test_stopped_rank_0_is_named_and_run_ends(project: Path) -> None:
    """The store, the hub of failures and the launcher are in its process."""
    code, output = failing(project, "stopped-0", 0, "SIGSTOP", "lightning", others="collective")
    assert code == -signal.SIGKILL
    assert "rank 1 ends because rank 0 hangs: it does not run, and was last seen " in output
    assert "rank 1 cleans up" in output
    stacks = (project / "stopped-0" / "stacks.txt").read_text()
    assert stacks.startswith("=== rank 1, process ")
    assert "=== rank 0, seen from rank 1 on " in stacks
