from pathlib import Path
from types import SimpleNamespace

import pytest

from rlightning.errors import ConfigError
from rlightning.run_dir import run_dir


def test_the_run_folder_is_the_trainers() -> None:
    assert run_dir(SimpleNamespace(default_root_dir="runs/one")) == Path("runs/one")


def test_a_remote_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"default_root_dir='s3://bucket/run' is not a local folder"):
        run_dir(SimpleNamespace(default_root_dir="s3://bucket/run"))
