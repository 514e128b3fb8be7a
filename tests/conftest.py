"""What all tests share: the fork server, the order of files, and a last line that says what was left out and why."""

import contextlib
import json
import os
import signal
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import child_processes
import fork_server
import pytest
from left_out import describe_left_out, why_left_out

from rlightning.processes.scratch import ScratchFolder

if not Path("/dev/nvidiactl").exists():  # a fork could not use CUDA, which imports may have begun to use
    fork_server.install()

HERE = Path(__file__).parent
DURATIONS = HERE / "durations.json"
"""By file, the seconds of its tests that are not slow and of those that are, of the last run with
``--record-durations`` that had them: the longest start first, so that no worker idles."""
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
OF_A_RUN = ("RLIGHTNING_", "PL_", "RANK", "LOCAL_", "NODE_RANK", "WORLD_SIZE", "MASTER_")
"""Beginnings of the names of variables that a run sets."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add this suite's own option."""
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json, the order of files")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the tests as pytest has rewritten their asserts, even where no bytecode is to be written.

    Otherwise each worker rewrites all of them in each run, in 8 CPU seconds.
    """
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = before


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what starts processes by a fixture, and put the longest files first."""
    for item in items:
        if "starts_processes" in getattr(item, "fixturenames", ()):
            item.add_marker("processes")
    if config.getoption("randomly_seed", None) is None:
        kinds = 1 if "not slow" in config.getoption("-m") else 2
        seconds = {name: sum(of_kind[:kinds]) for name, of_kind in read_durations().items()}
        items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), 0.0))  # stable: within a file, as written


@pytest.hookimpl(tryfirst=True)
def pytest_warning_recorded(warning_message: warnings.WarningMessage) -> None:
    """Give a library's kind of warning as the built-in one: else the controller of pytest-xdist imports the library.

    Lightning's and torch's take it 7 CPU seconds.
    """
    kind = warning_message.category
    if kind.__module__ not in ("builtins", "pytest"):
        kind = next(base for base in kind.__mro__ if base.__module__ == "builtins")
        warning_message.category, warning_message.message = kind, kind(str(warning_message.message))


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count them, by why they are left out."""
    for item in items:
        markers = {marker.name for marker in item.iter_markers()}
        item.config.stash[COUNTS][why_left_out(markers, item.config.getoption("-m"))] += 1


COUNTS = pytest.StashKey[Any]()
SECONDS = pytest.StashKey[Any]()
EXIT_STATUS = pytest.StashKey[int]()
RAY_FOLDER = pytest.StashKey[ScratchFolder]()
"""Of what Ray writes for all clusters of this run of the tests, which it leaves behind."""


def pytest_configure(config: pytest.Config) -> None:
    """Begin to count."""
    config.stash[COUNTS], config.stash[SECONDS] = Counter(), defaultdict(lambda: [0.0, 0.0])
    if not hasattr(config, "workerinput"):
        config.stash[RAY_FOLDER] = ScratchFolder("tests")
        os.environ["RAY_TMPDIR"] = str(config.stash[RAY_FOLDER].path)


def read_durations() -> dict[str, list[float]]:
    """Return the durations in the file; empty if the file does not exist."""
    found: dict[str, list[float]] = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    return found


def record_durations(measured: dict[str, list[float]]) -> None:
    """Write what was measured over what was before; a file without a test of a kind keeps that kind's seconds."""
    kept = read_durations()
    for name, of_kind in measured.items():
        before = kept.get(name, [0.0, 0.0])
        kept[name] = [round(now, 1) or old for now, old in zip(of_kind, before, strict=True)]
    there = {name: of_kind for name, of_kind in kept.items() if sum(of_kind) >= 1 and (HERE / name).exists()}
    lines = [f"{json.dumps(name)}: {there[name]}" for name in sorted(there, key=lambda name: -sum(there[name]))]
    DURATIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def file_of(nodeid: str) -> str:
    """The test's file, from this folder."""
    return nodeid.partition("::")[0].removeprefix("tests/")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Keep how it ended; let a worker of pytest-xdist tell its controller what it left out."""
    session.config.stash[EXIT_STATUS] = exitstatus
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash[COUNTS])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take what a worker left out, which is the same for all."""
    if output := getattr(node, "workeroutput", None):
        node.config.stash[COUNTS] = output.get("left_out", {})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up a file's seconds."""
    if CONFIG is not None:
        CONFIG.stash[SECONDS][file_of(report.nodeid)]["slow" in report.keywords] += report.duration


CONFIG: pytest.Config | None = None


def pytest_sessionstart(session: pytest.Session) -> None:
    """Keep the configuration for hooks that do not get it."""
    global CONFIG
    CONFIG = session.config


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove what Ray has left; write what was not run, and why, as the last line."""
    if RAY_FOLDER in config.stash:
        config.stash[RAY_FOLDER].remove()
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workeroutput") or config.option.collectonly:
        return
    if config.getoption("--record-durations"):
        record_durations(config.stash[SECONDS])
    counts = Counter(config.stash[COUNTS])
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        counts[reason.removeprefix("Skipped: ")] += 1
    reporter.write_line(describe_left_out(counts, config.stash.get(EXIT_STATUS, pytest.ExitCode.USAGE_ERROR)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs more GPUs than there are."""
    for name, least in (("gpu", 1), ("multigpu", 2)):
        if marker := item.get_closest_marker(name):
            import torch  # which takes seconds

            count = marker.args[0] if marker.args else least
            if torch.cuda.device_count() < count:
                pytest.skip("needs a CUDA device" if count == 1 else f"needs {count} CUDA devices")


@pytest.fixture(scope="session")
def starts_processes() -> None:
    """A fixture that starts processes asks for this one, which marks the tests of both by ``processes``."""


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model that no test changes."""
    from tiny import save_model  # which takes seconds to import

    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def engine_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model of runs with a real engine, that no test changes."""
    from engine_run import save_model

    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a user of the command line has it, which is this process's current one."""
    from cli_project import make_project

    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # Lightning's log handlers keep the stderr of whichever test came first, which is closed by now.
    monkeypatch.setattr("logging.raiseExceptions", False)
    return tmp_path


@pytest.fixture
def make_runner() -> Iterator[Any]:
    """Runners of rewards, of two workers that tolerate failures; closed at the end."""
    from rlightning.rewards import RewardRunner

    runners: list[RewardRunner] = []

    def make(*rewards: Any, **options: Any) -> RewardRunner:
        runners.append(RewardRunner(rewards, **{"num_workers": 2, "max_failed_share": 1.0, **options}))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


@pytest.fixture
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset this process's state: no launcher's variables, no resolved execution mode, no stored tensors."""
    from rlightning.controller import tensor_store
    from rlightning.parallel import execution_mode

    monkeypatch.setattr(execution_mode, "_resolved", None)
    monkeypatch.setattr(tensor_store, "_store", tensor_store.LocalStore())
    monkeypatch.setattr(tensor_store, "_stores_results", True)
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def process_state() -> dict[Callable[..., Any], tuple[Any, ...]]:
    """What tests of one worker share: the functions that set it, each with its arguments as they are now."""
    state: dict[Callable[..., Any], tuple[Any, ...]] = {
        partial(signal.signal, one): (handler,) for one in HANDLED if (handler := signal.getsignal(one)) is not None
    }
    with contextlib.suppress(FileNotFoundError):
        state[os.chdir] = (os.getcwd(),)
    if (torch := sys.modules.get("torch")) is not None:
        state[torch.set_default_dtype] = (torch.get_default_dtype(),)
        state[torch.set_grad_enabled] = (torch.is_grad_enabled(),)
        state[torch.set_num_threads] = (torch.get_num_threads(),)
        state[torch.set_float32_matmul_precision] = (torch.get_float32_matmul_precision(),)
        state[torch.use_deterministic_algorithms] = (torch.are_deterministic_algorithms_enabled(),)
    return state


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    """Leave the process as it was found, since pytest-xdist gives a worker other files each time, in other orders."""
    state, variables, paths = process_state(), dict(os.environ), list(sys.path)
    yield
    for restore, arguments in state.items():
        restore(*arguments)
    os.environ.update(variables)
    for name in os.environ.keys() - variables.keys():
        if name.startswith(OF_A_RUN):  # others are set by what is imported, once
            del os.environ[name]
    sys.path[:] = paths


@pytest.fixture(autouse=True)
def _no_process_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a child process, unless a fixture that lives on may have started it."""
    may_start = request.node.get_closest_marker("processes") and "starts_processes" not in request.fixturenames
    with child_processes.none_are_left() if may_start else nullcontext():
        yield


@pytest.fixture(autouse=True, scope="module")
def _no_process_is_left_by_fixtures() -> Iterator[None]:
    """The same of the fixtures that a file's tests share; fails the last of these tests."""
    with child_processes.none_are_left():
        yield


@pytest.fixture
def forget_clients() -> Iterator[None]:
    """LangChain keeps its HTTP clients by their address, beyond the event loop to which their connections belong."""
    yield
    if (clients := sys.modules.get("langchain_openai.chat_models._client_utils")) is not None:
        clients._cached_async_httpx_client.cache_clear()


def pytest_runtest_logstart() -> None:
    """Begin to count the processes that a test and its fixtures start."""
    fork_server.num_started = 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In `make test-fast`, fail a test that starts a Python process: the marker that leaves it out is missing."""
    report = yield
    if report.passed and fork_server.num_started and "not processes" in item.config.getoption("-m"):
        report.outcome, fork_server.num_started = "failed", 0
        report.longrepr = (
            f"The {report.when} of this test starts a process: mark it by @pytest.mark.processes, "
            "or let the fixture that does ask for starts_processes."
        )
    return report
