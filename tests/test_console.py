from pathlib import Path

import pytest
from programs import run_python

pytestmark = pytest.mark.processes

PROGRAM = """
import logging, sys
{before}
from rlightning.console import show_log_lines
show_log_lines()
show_log_lines()
logging.getLogger("rlightning").info("step 1")
logging.getLogger("rlightning.rollout").info("engine is up")
logging.getLogger("rlightning").debug("details")
"""


@pytest.mark.parametrize(
    ("before", "wanted"),
    [
        ("", "step 1\nengine is up\n"),
        ("logging.basicConfig(format='mine: %(message)s')", "mine: step 1\nmine: engine is up\n"),
        ("logging.getLogger('rlightning').setLevel('WARNING')", ""),
    ],
)
def test_lines_reach_standard_error_once_and_bare(before: str, wanted: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(before=before))
    done = run_python(program)
    assert (done.stderr, done.stdout) == (wanted, "")
