"""The last line of a run of tests: what was not run, and why."""

from collections.abc import Collection, Mapping

import pytest

LEFT_OUT = {
    "slow": "slow variants of kinds that are shown (make test-all runs them)",
    "processes": "tests that start processes (make test runs them)",
    "long": "tests of over 0.3 seconds (make test runs them)",
}
OTHERS = "tests that -k, -m or another option leaves out"
UNFINISHED = (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR)


def why_left_out(markers: Collection[str], chosen: str) -> str:
    """Return why a test with these markers is deselected, where ``chosen`` is the argument of ``-m``."""
    return next((LEFT_OUT[name] for name in LEFT_OUT if name in markers and f"not {name}" in chosen), OTHERS)


def describe_left_out(counts: Mapping[str, int], exit_status: int) -> str:
    """The line, from the number of tests by why they were not run, and how the run ended."""
    said = [f"{count} {reason}" for reason, count in sorted(counts.items(), key=lambda entry: -entry[1]) if count]
    if exit_status in UNFINISHED:
        said.insert(0, "all that follows where the run broke off")
    elif exit_status == pytest.ExitCode.NO_TESTS_COLLECTED:
        said.insert(0, "everything: no test was run")
    return f"left out: {'; '.join(said) or 'nothing'}"
