"""Clusters that cannot be joined, what workers take over of the controller, and how a run with its own cluster ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
from cli_project import environment, make_project
from waiting import PATIENCE_SECONDS, still_running, wait_for

from rlightning.controller import RayController
from rlightning.controller.cluster import join_cluster
from rlightning.controller.driver import LONGEST_LIST, DriverContext, list_names
from rlightning.errors import ConfigError
from rlightning.parallel.launcher import find_port
from rlightning.processes.process_table import find_children, identify_process

FIT = ("fit", "--config", "run.yaml", "--trainer.strategy", "ray")


@pytest.mark.slow
@pytest.mark.processes
def test_cluster_refusing_the_token_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        [sys.executable, "-m", "rlightning", *FIT, "--trainer.default_root_dir", "run",
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
@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.multigpu(4))])
def test_killed_controller_of_four_workers_leaves_no_process(accelerator: str, tmp_path: Path) -> None:
    four = ("--trainer.devices", "4", "--trainer.strategy.ray_options", '{"num_cpus": 4}')
    process, _ = fit_until_step_2(tmp_path, "--trainer.accelerator", accelerator, *four)
    [raylet] = [pid for pid, name in find_children(process.pid).items() if name == "raylet"]
    started = [process.pid, *find_children(process.pid), *find_children(raylet)]
    process.kill()
    process.communicate(timeout=300)
    assert len(started) >= 8
    assert still_running(started, PATIENCE_SECONDS) == []


@pytest.mark.slow
@pytest.mark.processes
def test_killed_raylet_ends_run_in_one_line(tmp_path: Path) -> None:
    """Whether there may be a restart or not, which is asked for later."""
    process, output = fit_until_step_2(tmp_path, "--trainer.strategy.max_restarts", "1")
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


RAY_RUN = """
import itertools, os, signal, sys
from rlightning.controller import cluster
import ray
if "killed" in sys.argv and (server := sys.modules.get("fork_server")):
    server.uninstall()  # Ray's processes would need this one
assert cluster.join_cluster(None, {"num_cpus": 1, "object_store_memory": 100 << 20})
[node] = cluster._own_nodes.values()
print(ray._private.worker.global_worker.node.get_session_dir_path(), node.reaper.pid, node.raylet, flush=True)
if "killed" in sys.argv:
    os.kill(node.reaper.pid, signal.SIGSTOP)
    os.kill(node.raylet, signal.SIGKILL)
    for number in itertools.count():  # until Ray ends this process, in which nothing looks at the raylet
        ray.put(number)
"""


def run_ray(folder: Path, *arguments: str, exit_code: int) -> tuple[Path, int, int]:
    """The folder of a process's own cluster, and its reaper and raylet; ``errors.txt`` gets what all of them say."""
    script = folder / "run.py"
    script.write_text(RAY_RUN)
    environ = {**environment(), "TMPDIR": "/tmp"}
    with (folder / "errors.txt").open("w") as errors:
        command = [sys.executable, str(script), *arguments]
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
    assert done.returncode == exit_code
    session, reaper, raylet = done.stdout.splitlines()[0].split()  # Ray may add lines of its own
    return Path(session).parent, int(reaper), int(raylet)


@pytest.mark.slow
@pytest.mark.processes
def test_what_a_killed_raylet_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that Ray's own threads have ended: the reaper says why, and the next run removes Ray's folder."""
    monkeypatch.delenv("RAY_TMPDIR")
    left, reaper, raylet = run_ray(tmp_path, "killed", exit_code=1)
    os.kill(reaper, signal.SIGCONT)  # finds both ended
    assert still_running([reaper]) == []
    line = f"error: The run's Ray cluster has ended: its raylet (process {raylet} on this machine) was killed"
    assert (tmp_path / "errors.txt").read_text().count(line) == 1
    assert left.name.startswith("rlightning.ray.") and left.is_dir()
    own, _, _ = run_ray(tmp_path, exit_code=0)
    assert not own.exists() and not left.exists()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("log", "exit_report", "dies_first", "says_so"),
    [
        ("", b"", True, True),
        ("", b"", False, False),  # the raylet has ended with the controller
        ("Raylet IPC connection failed", b"", False, True),  # the other way round
        ("Raylet IPC connection failed", b".", True, False),  # the controller has said why
    ],
)
def test_reaper_kills_agents_and_reports_dead_raylet(
    log: str, exit_report: bytes, dies_first: bool, says_so: bool, tmp_path: Path
) -> None:
    (tmp_path / "python-core-driver-01_17.log").write_text(log)
    raylet, agent = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    command = [sys.executable, "-m", "rlightning.controller.reaper", str(tmp_path), "17", str(raylet.pid)]
    stdin, controller = os.pipe()

    def start() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [*command, identify_process(agent.pid)], stdin=stdin, stderr=subprocess.PIPE, env=environment()
        )

    def end_controller() -> None:
        os.write(controller, exit_report)
        os.close(controller)

    if dies_first:
        reaper = start()
        raylet.kill()
        assert agent.wait(300) == -signal.SIGKILL
        end_controller()
    else:
        raylet.kill()
        end_controller()
        reaper = start()
    os.close(stdin)
    _, said = reaper.communicate(timeout=300)
    assert (b"its raylet (process %d on this machine) was killed" % raylet.pid in said) == says_so
    assert reaper.returncode == 0 and agent.wait(300) == -signal.SIGKILL
    raylet.wait()


@pytest.mark.processes
def test_reaper_with_many_descriptors_kills_agents(tmp_path: Path) -> None:
    """select() takes no file descriptor from 1,024 on."""
    script = (
        "import os, resource\n"
        "from rlightning.controller.reaper import main\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))\n"
        "while os.dup(2) < 1100: pass\n"
        "main()\n"
    )
    raylet, agent = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    arguments = [str(tmp_path), "17", str(raylet.pid), identify_process(agent.pid)]
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as reaper:
        raylet.kill()
        _, said = reaper.communicate(timeout=300)  # closes the reaper's input, as the end of the controller does
    assert reaper.returncode == 0, said
    assert agent.wait(300) == -signal.SIGKILL
    raylet.wait()
