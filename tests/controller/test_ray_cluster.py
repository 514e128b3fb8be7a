"""Runs under a controller in a cluster that others have started, and how a run from the command line ends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from cli_project import environment, make_project, rlightning
from fork_server import START_BY_EXEC
from ray_nodes import start_nodes
from waiting import still_running, wait_for

from rlightning.controller import RayController
from rlightning.controller.cluster import join_cluster
from rlightning.controller.driver import LONGEST_LIST, DriverContext, list_names
from rlightning.errors import ConfigError
from rlightning.parallel.launcher import find_port
from rlightning.processes.process_table import find_children

FIT = ("fit", "--config", "run.yaml", "--trainer.strategy", "ray")

JUDGED = """\
import json, os
from pathlib import Path

from rlightning.algorithms import SFT


class Judged(SFT):
    def training_step(self, prompts, batch_idx):
        super().training_step(prompts, batch_idx)
        seen = {"key": os.environ["JUDGE_KEY"], "folder": os.getcwd(), "of_cluster": os.environ.get("OF_CLUSTER")}
        Path("seen.json").write_text(json.dumps(seen))  # into the folder that the run was started from
"""


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[str]:
    """A cluster that was started from another folder, with other variables; its address."""
    ray.shutdown()
    other = tmp_path / "other"
    other.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(other)
        patch.setenv("OF_CLUSTER", "1")
        nodes = start_nodes({"num_cpus": 2, "object_store_memory": 100 << 20})
    try:
        yield nodes.address
    finally:
        nodes.shutdown()  # type: ignore[no-untyped-call]


@pytest.mark.slow
@pytest.mark.processes
def test_workers_of_a_cluster_from_elsewhere_get_folder_and_named_variables(
    elsewhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    make_project(project)
    (project / "judged.py").write_text(JUDGED)
    monkeypatch.setenv("JUDGE_KEY", "secret-value")
    monkeypatch.setenv("OTHER_KEY", "secret-too")
    fit = [*FIT, "--model.class_path", "judged.Judged", "--trainer.strategy.address", elsewhere]
    options = ["--trainer.max_steps", "1", "--trainer.default_root_dir"]

    done = rlightning(project, *fit, "--trainer.strategy.env", "[JUDGE_KEY]", *options, "runs/named")
    assert done.returncode == 0, done.stderr
    seen = json.loads((project / "seen.json").read_text())
    assert seen == {"key": "secret-value", "folder": str(project), "of_cluster": "1"}
    [warning] = [line for line in done.stderr.splitlines() if "was not started with this process's environment" in line]
    assert "OTHER_KEY" in warning and "JUDGE_KEY" not in warning and "trainer.strategy.env" in warning
    assert (project / "runs/named/checkpoints/last.ckpt").exists()

    failed = rlightning(project, *fit, *options, "runs/unnamed")
    assert failed.returncode == 1 and "KeyError: 'JUDGE_KEY'" in failed.stderr
    [warning] = [
        line for line in failed.stderr.splitlines() if "was not started with this process's environment" in line
    ]
    assert "JUDGE_KEY" in warning
    config = (project / "runs/named/config.yaml").read_text()
    assert "JUDGE_KEY" in config and "secret" not in done.stderr + failed.stderr + config


@pytest.mark.slow
@pytest.mark.processes
def test_a_cluster_that_refuses_the_token_is_named_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = find_port()
    head = subprocess.Popen(
        [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}", "--num-cpus=1",
         "--include-dashboard=false", "--object-store-memory=100000000", "--disable-usage-stats"],
        env={**environment(), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "of-the-cluster-" * 2},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    address = f"127.0.0.1:{port}"
    try:
        for variables in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "another-one-" * 3}):
            message = await_message(tmp_path / "join.py", address, variables)
            assert message.startswith(
                f"trainer.strategy: the Ray cluster at address={address} asks for its authentication"
            )
            assert "RAY_AUTH_TOKEN" in message and "of-the-cluster" not in message and "another-one" not in message
    finally:
        head.terminate()
        head.wait(60)


def await_message(script: Path, address: str, variables: dict[str, str]) -> str:
    """The mistake that a process of its own has at an address, once something listens there."""
    script.write_text(
        "from rlightning.controller.cluster import join_cluster\n"
        "from rlightning.errors import ConfigError\n"
        f"try:\n    join_cluster({address!r}, {{}})\nexcept ConfigError as error:\n    print(error)\n"
    )
    command, environ = [sys.executable, str(script)], {**environment(), **variables}
    end = time.monotonic() + 300
    while True:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=True)
        if "no Ray cluster answers" not in done.stdout or time.monotonic() > end:
            return done.stdout
        time.sleep(0.5)


def test_auto_without_a_cluster_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def refuse(**arguments: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.\nPlease specify the one to connect to")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(
        ConfigError, match=r"could be joined at address=auto\. Ray says: Could not find any running Ray i"
    ):
        join_cluster("auto", {})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NO_SUCH_KEY", "env=NO_SUCH_KEY is not set in this process. Export it, or leave it out"),
        ("KEY=hidden", r"env=KEY=\.\.\. is no name of a variable\. Export it, and list KEY"),
        ("CUDA_VISIBLE_DEVICES", "env=CUDA_VISIBLE_DEVICES is set by Ray"),
        ("RAY_ADDRESS", "env=RAY_ADDRESS is set by Ray"),
    ],
)
def test_variables_that_cannot_be_passed_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        RayController(env=[name]).check()
    assert "hidden" not in str(refused.value)


def test_differences_name_variables_and_no_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, other = tmp_path / "project", tmp_path / "other"
    project.mkdir()
    other.mkdir()
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend("")
    monkeypatch.setenv("JUDGE_KEY", "first")
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.setenv("PYTHONPATH", f"libraries{os.pathsep}/absolute")
    (project / "libraries").mkdir()
    driver = DriverContext.here(["JUDGE_KEY"])
    assert driver.variables == {"JUDGE_KEY": "first", "PYTHONPATH": f"{project}/libraries{os.pathsep}/absolute"}
    assert driver.actor_options == {"runtime_env": {"env_vars": driver.variables}}
    assert "" not in driver.import_paths and str(project) in driver.import_paths
    assert DriverContext.here(["JUDGE_KEY"], starts_cluster=True).actor_options == {}

    monkeypatch.chdir(other)
    driver.enter()
    assert Path.cwd() == project and driver.describe_differences() == []
    for name in ("JUDGE_KEY", "PWD", "SHLVL", "SSH_CONNECTION", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", "/elsewhere")
    [sentence] = driver.describe_differences()
    assert "run without JUDGE_KEY, and with other values of HF_HOME: the Ray cluster" in sentence
    assert "first" not in sentence and "/models" not in sentence

    monkeypatch.chdir(other)
    (project / "libraries").rmdir()
    project.rmdir()
    driver.enter()
    assert Path.cwd() == other
    assert (
        f"has no folder {project}, where the controller runs: relative paths start there from {other}"
        in (driver.describe_differences()[0])
    )


def test_a_long_list_of_names_is_cut() -> None:
    names = [f"NAME_{number}" for number in range(LONGEST_LIST + 3)]
    assert list_names(names).endswith(f"NAME_{LONGEST_LIST - 1} and 3 more")


def fit_until_step_2(folder: Path, *options: str) -> "tuple[subprocess.Popen[str], str]":
    """A run under a controller that has done two steps, and what it has said so far."""
    make_project(folder)
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("rlightning")), *FIT, "--trainer.default_root_dir", "run",
         "--trainer.max_steps", "100000", "--trainer.max_epochs=-1", *options],
        cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "step 2/" in line:
            return process, "".join(lines)
    raise AssertionError("".join(lines))


@pytest.mark.processes
def test_sigterm_saves_and_ends_a_controller_with_143(tmp_path: Path) -> None:
    process, output = fit_until_step_2(tmp_path)
    try:
        # Its stacks and its worker's come first.
        process.send_signal(signal.SIGUSR1)
        stacks = tmp_path / "run" / "stacks.txt"
        wait_for(lambda: stacks.exists() and "=== rank 0" in stacks.read_text())
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    output += rest
    assert process.returncode == 143, output
    assert "ended by SIGTERM" in output and "Traceback" not in output
    last = tmp_path / "run/checkpoints/last.ckpt"
    assert last.exists(), output
    assert stacks.read_text().count(": SIGUSR1 to controller\n") == 2
    assert stacks.read_text().startswith("=== controller, ")


@pytest.mark.processes
def test_killed_controller_leaves_no_process_of_ray(tmp_path: Path) -> None:
    process, _ = fit_until_step_2(tmp_path)
    [raylet] = [pid for pid, name in find_children(process.pid).items() if name == "raylet"]
    started = [process.pid, *find_children(process.pid), *find_children(raylet)]
    process.kill()
    process.communicate(timeout=300)
    assert len(started) >= 5
    assert still_running(started) == []


@pytest.mark.processes
@pytest.mark.parametrize("restarts", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_killed_raylet_ends_run_in_one_line(tmp_path: Path, restarts: str) -> None:
    strategy = ("--trainer.strategy.max_restarts", restarts)
    process, output = fit_until_step_2(tmp_path, *strategy)
    try:
        [raylet] = [pid for pid, name in find_children(process.pid).items() if name == "raylet"]
        os.kill(raylet, signal.SIGKILL)
        rest, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    output += rest
    assert process.returncode not in (0, 2), output
    assert f"The run's Ray cluster has ended: its raylet (process {raylet} on this machine) was killed" in output
    assert "Placement group" not in output and "Raylet is terminated" not in output, output
    assert output.count("error: ") == 1 and "Traceback" not in output, output


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_fast_dev_run_has_a_schedule_that_goes_on(schedule: str, tmp_path: Path) -> None:
    make_project(tmp_path)
    options = ["--trainer.fast_dev_run", "true", "--model.warmup_steps", "3", "--model.lr_schedule", schedule]
    done = rlightning(tmp_path, *FIT, *options, "--trainer.default_root_dir", "run")
    assert done.returncode == 0, done.stderr


RAY_RUN = """
import os, signal, sys
from rlightning.controller.cluster import join_cluster
import ray
assert join_cluster(None, {"num_cpus": 1, "object_store_memory": 100 << 20})
print(ray._private.worker.global_worker.node.get_session_dir_path(), flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
def test_next_run_removes_what_ray_left_of_a_killed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TMPDIR")
    environment = os.environ | {"TMPDIR": "/tmp"}
    script = tmp_path / "run.py"
    script.write_text(RAY_RUN)

    def run(how: str) -> Path:
        done = subprocess.run(
            [sys.executable, script, how], env=environment, stdout=subprocess.PIPE, text=True, check=False
        )
        return Path(done.stdout.strip()).parent

    killed = run("killed")
    assert killed.name.startswith("rlightning.ray.") and killed.is_dir()
    assert not run("to its end").exists() and not killed.exists()


LOST_RUN = """
import itertools, os, signal, sys
from pathlib import Path
from rlightning.controller import cluster
import ray
assert cluster.join_cluster(None, {"num_cpus": 1, "object_store_memory": 100 << 20})
[node] = cluster._own_nodes.values()
Path("ids.txt").write_text(f"{node.reaper.pid} {node.raylet}")
if "slow" in sys.argv:
    os.kill(node.reaper.pid, signal.SIGSTOP)
if "raylet" in sys.argv:
    os.kill(node.raylet, signal.SIGKILL)
    for number in itertools.count():  # until Ray ends this process, in which nothing looks at the raylet
        ray.put(number)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "how", ["raylet slow", *(pytest.param(how, marks=pytest.mark.slow) for how in ("raylet", "slow"))]
)
def test_line_of_a_killed_raylet_outlives_the_controller(how: str, tmp_path: Path) -> None:
    script, errors = tmp_path / "run.py", tmp_path / "errors.txt"
    script.write_text(LOST_RUN)
    with errors.open("w") as file:
        command = [sys.executable, str(script), *how.split()]
        environ = {
            **environment(),
            START_BY_EXEC: "1",
        }  # no fork server, which needs the controller
        done = subprocess.run(command, cwd=tmp_path, env=environ, stdout=file, stderr=file, check=False)
    reaper, raylet = map(int, (tmp_path / "ids.txt").read_text().split())
    if "slow" in how:  # finds both ended
        os.kill(reaper, signal.SIGCONT)
    assert still_running([reaper]) == []
    line = f"error: The run's Ray cluster has ended: its raylet (process {raylet} on this machine) was killed"
    assert errors.read_text().count(line) == ("raylet" in how)
    assert done.returncode == (1 if "raylet" in how else -signal.SIGKILL)
