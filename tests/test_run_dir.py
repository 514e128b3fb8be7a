from pathlib import Path
from types import SimpleNamespace

import pytest

from rlightning.errors import ConfigError
from rlightning.run_dir import run_dir, written_aside


def test_the_run_folder_is_the_trainers() -> None:
    assert run_dir(SimpleNamespace(default_root_dir="runs/one")) == Path("runs/one")


def test_a_remote_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"default_root_dir='s3://bucket/run' is not a local folder"):
        run_dir(SimpleNamespace(default_root_dir="s3://bucket/run"))


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.txt"
    with written_aside(path) as aside:
        aside.write_text("one")
        assert not path.exists()
    with pytest.raises(KeyboardInterrupt), written_aside(path) as aside:
        aside.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "one"
    assert [p.name for p in path.parent.iterdir()] == ["file.txt"]
