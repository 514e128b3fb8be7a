"""What all tests share: the fork server, the order of files, and a last line that says what was left out and why."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fork_server
import pytest

if not Path("/dev/nvidiactl").exists():  # a fork could not use CUDA, which imports may have begun to use
    fork_server.install()

DURATIONS = Path(__file__).with_name("durations.json")
"""Seconds by file, of the last run with ``--record-durations``: the longest start first, so that no worker idles."""
LEFT_OUT = {
    "slow": "slow variants of kinds that are shown (make test-all runs them)",
    "processes": "tests that start processes (make test runs them)",
    "long": "tests of over half a second (make test runs them)",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add this suite's own option."""
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json, the order of files")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the files that take longest first, and count what the markers leave out."""
    seconds: dict[str, float] = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    if config.getoption("randomly_seed", None) is None:
        items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), 0.0))  # stable: within a file, as written
    chosen = config.getoption("-m")
    left_out = [name for name in LEFT_OUT if f"not {name}" in chosen]
    for item in items:
        for name in left_out:
            if item.get_closest_marker(name):
                counts = config.stash[COUNTS]
                counts[LEFT_OUT[name]] = counts.get(LEFT_OUT[name], 0) + 1
                break


COUNTS = pytest.StashKey[Any]()
SECONDS = pytest.StashKey[Any]()


def pytest_configure(config: pytest.Config) -> None:
    """Begin to count."""
    config.stash[COUNTS], config.stash[SECONDS] = Counter(), defaultdict(float)


def file_of(nodeid: str) -> str:
    """The test's file, from this folder."""
    return nodeid.partition("::")[0].removeprefix("tests/")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let a worker of pytest-xdist tell its controller what it left out."""
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
        CONFIG.stash[SECONDS][file_of(report.nodeid)] += report.duration


CONFIG: pytest.Config | None = None


def pytest_sessionstart(session: pytest.Session) -> None:
    """Keep the configuration for hooks that do not get it."""
    global CONFIG
    CONFIG = session.config


def pytest_unconfigure(config: pytest.Config) -> None:
    """Write what was not run, and why, as the last line."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workeroutput") or config.option.collectonly:
        return
    if config.getoption("--record-durations"):
        seconds = sorted(config.stash[SECONDS].items(), key=lambda item: -item[1])
        rounded = {name: round(value, 1) for name, value in seconds if value >= 1}
        DURATIONS.write_text(json.dumps(rounded, indent=0) + "\n")
    counts = Counter(config.stash[COUNTS])
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        counts[reason.removeprefix("Skipped: ")] += 1
    parts = [f"{count} {reason}" for reason, count in counts.most_common()]
    reporter.write_line(f"left out: {'; '.join(parts) or 'nothing'}")


@pytest.fixture(autouse=True)
def _processes_are_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """In `make test-fast`, fail a test that starts a Python process: the marker that leaves it out is missing."""
    before = fork_server.num_started
    yield
    if "not processes" in request.config.getoption("-m") and fork_server.num_started > before:
        pytest.fail("This test starts a process: mark it by @pytest.mark.processes.", pytrace=False)
