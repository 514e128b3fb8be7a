"""What is written aside; deaths in the middle are in tests/parallel/test_checkpoint_crash.py."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlightning.atomic_save import own_partial_of, partial_of, remove_leftovers, swap_in, written_aside


def write_file(path: Path, text: str) -> None:
    path.write_text(text)


def write_folder(path: Path, text: str) -> None:
    path.mkdir()
    (path / text).write_text(text)


def read(path: Path) -> str:
    return next(path.iterdir()).name if path.is_dir() else path.read_text()


def partial_of_process(path: Path, process: int) -> Path:
    """The temporary path of another process of this host."""
    own = own_partial_of(path)
    return own.with_name(own.name.replace(f"-{os.getpid()}.", f"-{process}."))


def ended_process() -> int:
    """The id of a process that has ended."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return child


@pytest.mark.parametrize("write", [write_file, write_folder])
def test_it_appears_whole_or_not_at_all(write: Callable[[Path, str], None], tmp_path: Path) -> None:
    path = tmp_path / "new" / "saved.x"
    with written_aside(path) as partial:
        write(partial, "one")
        assert not path.exists()
        assert partial.name.startswith(".")  # who reads all of a folder, as pandas does, passes it by
    with pytest.raises(KeyboardInterrupt), written_aside(path) as partial:
        write(partial, "half")
        assert read(path) == "one"
        raise KeyboardInterrupt
    assert read(path) == "one"
    write(partial_of(path), "left by processes that were killed")
    write(partial_of_process(path, ended_process()), "left too")
    with written_aside(path) as partial:
        write(partial, "two")
    assert read(path) == "two"
    assert [left.name for left in path.parent.iterdir()] == ["saved.x"]


@pytest.mark.parametrize("write", [write_file, write_folder])
def test_processes_that_write_the_same_path_do_not_meet(write: Callable[[Path, str], None], tmp_path: Path) -> None:
    path = tmp_path / "saved[1].x"
    write(partial_of_process(path, os.getppid()), "of a process that is still writing")
    with written_aside(path) as partial:
        write(partial, "one")
        assert partial_of_process(path, os.getppid()).exists()
    assert read(path) == "one"
    swap_in(partial_of_process(path, os.getppid()), path)
    assert read(path) == "of a process that is still writing"
    assert [left.name for left in tmp_path.iterdir()] == ["saved[1].x"]


def test_leftovers_are_those_of_ones_own_kind(tmp_path: Path) -> None:
    mine = [".a.ckpt.partial", ".b.ckpt.previous.partial", "c.ckpt.previous"]
    others = ["c.ckpt", "d.ckpt.previous", ".report.html.partial", "predictions.jsonl.partial"]
    for name in mine + others:
        (tmp_path / name).touch()
    remove_leftovers(tmp_path, ".ckpt")
    assert sorted(left.name for left in tmp_path.iterdir()) == sorted(others)
