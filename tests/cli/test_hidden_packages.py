"""Files in the working directory that hide what a run imports."""

import os
from pathlib import Path

import pytest
from programs import run_python

import rlightning
from rlightning.cli.hidden_packages import NEVER_IMPORTED, check_folder
from rlightning.errors import ConfigError

IMPORT = """
import sys
from rlightning import callbacks, cli
for name in callbacks.__all__:
    getattr(callbacks, name)
import ray, vllm.v1.engine.async_llm, torch.utils.tensorboard, torch.distributed.checkpoint
print(*{name.partition(".")[0] for name in sys.modules}, file=sys.stderr)
"""


def test_files_named_after_unimported_modules_are_allowed(tmp_path: Path) -> None:
    for name in ("trace", "chunk", "sched", "wave"):
        (tmp_path / f"{name}.py").touch()
    check_folder(tmp_path)
    (tmp_path / "statistics.py").touch()
    with pytest.raises(
        ConfigError, match=r"^\./statistics\.py hides the module 'statistics' \(.*/statistics\.py\), which"
    ):
        check_folder(tmp_path)


def test_the_package_that_runs_hides_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a checkout while another one is installed."""
    other = tmp_path / "rlightning"
    other.mkdir()
    (other / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    check_folder(Path(rlightning.__file__).parents[1])


@pytest.mark.processes
@pytest.mark.slow
def test_run_imports_no_allowed_file_name(tmp_path: Path) -> None:
    done = run_python("-c", IMPORT, folder=tmp_path, environment=dict(os.environ))
    imported = set(done.stderr.splitlines()[-1].split())
    assert {"statistics", "code", "cmd", "vllm", "ray"} <= imported
    assert not imported & NEVER_IMPORTED
