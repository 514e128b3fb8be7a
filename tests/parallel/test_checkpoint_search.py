"""Which checkpoint ``--ckpt_path last`` is, and which folders take no second run."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cli_project import fit_here
from lightning.pytorch.callbacks import ModelCheckpoint

from rlightning.errors import ConfigError
from rlightning.parallel.checkpoint_io import last_checkpoint
from rlightning.parallel.checkpoint_search import check_checkpoints, find_last, find_places


class OwnCheckpoint(ModelCheckpoint):
    """A user's."""


def save(path: Path, step: int, **kept: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"global_step": step, "optimizer_states": []} | kept, path)
    return path


def run_of(folder: Path, *, ckpt_path: str | None = None, command: str = "fit", callbacks: Any = None) -> None:
    """Return the checks of the command line before it creates any object."""
    check_checkpoints(command, folder, find_places(folder, callbacks), ckpt_path)


def test_last_is_the_highest_step_whatever_the_times(tmp_path: Path) -> None:
    last = save(tmp_path / "run/checkpoints/last.ckpt", 6)
    early = save(tmp_path / "run/checkpoints/epoch=0-step=2.ckpt", 2)
    os.utime(last, (0, 0))
    assert find_last("fit", find_places(tmp_path / "run", None)).path == last
    # A copy has other times, and files in place of links.
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    os.utime(tmp_path / "copy/checkpoints" / early.name)
    found = find_last("fit", find_places(tmp_path / "copy", None))
    assert (found.path, found.step) == (tmp_path / "copy/checkpoints/last.ckpt", 6)


def test_last_is_found_where_checkpoint_callbacks_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    root = tmp_path / "run"
    save(root / "checkpoints/epoch=0-step=2.ckpt", 2)
    slashes = save(root / "checkpoints/epoch=0-val/rows/reward=0.5.ckpt", 3)
    assert find_last("fit", find_places(root, None)).path == slashes
    own = save(tmp_path / "home/kept/best.ckpt", 4)
    listed = [{"class_path": "ModelCheckpoint", "init_args": {"dirpath": "~/kept"}}]
    assert find_last("fit", find_places(root, listed)).path == own
    # An earlier command of this run listed another one, whose names have slashes.
    nested = save(tmp_path / "elsewhere/step=5-val/reward=1.ckpt", 5)
    named = {"dirpath": str(tmp_path / "elsewhere"), "filename": "{step}-{val/reward}"}
    earlier = [{"class_path": f"{__name__}.OwnCheckpoint", "init_args": named}, "gone.Callback"]
    (root / "config.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": earlier}}))
    assert find_last("fit", find_places(root, listed)).path == nested


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"just text",
        b"- a\n- b\n",
        b"trainer:\n",
        b"trainer: [1]\n",
        b"trainer: {max_steps: 3}\n",
        b"trainer: {callbacks: 5}\n",
        b"trainer: {callbacks: [5, null, [1], {a: b}, {class_path: 5}, {class_path: ..x}, .Relative]}\n",
        b"trainer: {callbacks: [{class_path: ModelCheckpoint, init_args: [1]}]}\n",
        b"trainer: {callbacks: {class_path: ModelCheckpoint, init_args: text}}\n",
        b"trainer: {callbacks: [{class_path: ModelCheckpoint, init_args: {dirpath: 5, filename: [1]}}]}\n",
        b"trainer: {callbacks: [{class_path: fails_now.Checkpoint}]}\n",
        b"trainer: [\n",
        b"a: \xff\n",
        b"a: \x01\n",
        b"a: !!int x\n",
    ],
)
def test_other_files_named_like_configurations_are_skipped(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails_now.py").write_text("raise RuntimeError('no such device')")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "config.yaml").write_bytes(content)
    (tmp_path / "config-2.yaml").mkdir()
    saved = save(tmp_path / "checkpoints/epoch=0-step=2.ckpt", 2)
    assert find_last("fit", find_places(tmp_path, None)).path == saved


def write_config(root: Path, dirpath: object, former_root: object) -> None:
    arguments = {"dirpath": str(dirpath), "filename": "{step}"}
    callbacks = [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": arguments}]
    content = {"trainer": {"default_root_dir": str(former_root), "callbacks": callbacks}}
    (root / "config.yaml").write_text(yaml.safe_dump(content))


@pytest.mark.parametrize("is_absolute", [False, True])
def test_last_of_a_copied_run_is_its_own(is_absolute: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    former = tmp_path / "a" if is_absolute else Path("a")
    save(former / "ck/step=6.ckpt", 6)
    write_config(former, former / "ck", former)
    shutil.copytree("a", "b")
    save(former / "ck/last.ckpt", 9)  # the other run has gone on
    for given in (None, [{"class_path": "ModelCheckpoint", "init_args": {"dirpath": str(former / "ck")}}]):
        assert find_last("fit", find_places(Path("b"), given)).path == Path("b/ck/step=6.ckpt")
        assert find_last("fit", find_places(Path("a"), given)).path.resolve() == tmp_path / "a/ck/last.ckpt"


def test_copied_configuration_is_refused_the_other_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(Path("a/ck/step=6.ckpt"), 6)
    Path("b").mkdir()
    write_config(Path("b"), "a/ck", "a")
    given = [{"class_path": "ModelCheckpoint", "init_args": {"dirpath": "a/ck"}}]
    with pytest.raises(ConfigError, match=r"dirpath of ModelCheckpoint=a/ck holds a run's checkpoints already"):
        run_of(Path("b"), callbacks=given)


@pytest.mark.parametrize("dirpath", ["runs/first/ck", "kept/first"])
def test_last_in_relative_dirpath_is_found_from_elsewhere(
    dirpath: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "runs/first"
    last = save(tmp_path / dirpath / "step=6.ckpt", 6)
    root.mkdir(parents=True, exist_ok=True)
    write_config(root, dirpath, "runs/first")
    (tmp_path / "elsewhere").mkdir()
    for folder, seen in (("elsewhere", root), ("runs", Path("first")), (".", Path("runs/first"))):
        monkeypatch.chdir(tmp_path / folder)
        assert find_last("fit", find_places(seen, None)).path.resolve() == last


def test_last_prefers_link_to_its_target(tmp_path: Path) -> None:
    save(tmp_path / "epoch=0-step=2.ckpt", 2)
    (tmp_path / "last.ckpt").symlink_to("epoch=0-step=2.ckpt")
    assert last_checkpoint(tmp_path) == tmp_path / "last.ckpt"


def test_last_to_continue_needs_more_than_weights(tmp_path: Path) -> None:
    places = {tmp_path: 0}
    torch.save({"global_step": 9, "state_dict": {}}, tmp_path / "weights.ckpt")
    with pytest.raises(ConfigError, match=r"can be continued: .* hold weights alone"):
        find_last("fit", places)
    whole = save(tmp_path / "whole.ckpt", 4)
    assert find_last("fit", places).path == whole
    assert find_last("validate", places).path == tmp_path / "weights.ckpt"


def test_last_leaves_damaged_checkpoints_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = save(tmp_path / "epoch=0-step=2.ckpt", 2)
    cut = save(tmp_path / "epoch=0-step=4.ckpt", 4)
    cut.write_bytes(cut.read_bytes()[:100])
    assert find_last("fit", {tmp_path: 0}).path == whole
    assert f"{cut} is no checkpoint that can be read" in caplog.text


def test_last_is_what_a_crash_left(tmp_path: Path) -> None:
    last, places = tmp_path / "checkpoints/last.ckpt", find_places(tmp_path, None)
    save(last, 2).rename(previous := last.with_name("last.ckpt.previous"))  # in the middle of being replaced
    run_of(tmp_path, ckpt_path=str(last))
    with pytest.raises(ConfigError, match="holds a run's checkpoints already"):
        run_of(tmp_path)
    assert find_last("fit", places).path == previous
    previous.unlink()
    last.symlink_to("epoch=0-step=2.ckpt")  # which has been removed
    newest = save(last.with_name("epoch=0-step=4.ckpt"), 4)
    assert find_last("fit", places).path == newest


def test_folder_with_checkpoints_takes_no_new_run(tmp_path: Path) -> None:
    run_of(tmp_path)
    saved = save(tmp_path / "checkpoints/epoch=0-val/reward=0.5.ckpt", 2)
    with pytest.raises(ConfigError, match=r"trainer\.default_root_dir=.* holds a run's checkpoints already"):
        run_of(tmp_path)
    run_of(tmp_path, ckpt_path="last")
    run_of(tmp_path, command="validate")
    run_of(tmp_path, ckpt_path=str(saved))


def test_dirpath_with_checkpoints_takes_no_new_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save(tmp_path / "kept/a/b=1.ckpt", 2)
    arguments = {"dirpath": "~/kept", "filename": "{a/b}"}
    listed = [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": arguments}]
    with pytest.raises(ConfigError, match=r"dirpath of ModelCheckpoint=.*/kept/a holds a run's checkpoints already"):
        run_of(tmp_path / "run", callbacks=listed)


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_checkpoint_that_is_not_there_is_refused(command: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ckpt_path=last, but there is no checkpoint in .* Set trainer"):
        find_last(command, find_places(tmp_path, None))
    with pytest.raises(ConfigError, match=r"gone\.ckpt: there is no such file"):
        run_of(tmp_path, ckpt_path=str(tmp_path / "gone.ckpt"), command=command)
    save(tmp_path / "checkpoints" / "epoch=0-step=2.ckpt", 2)
    with pytest.raises(ConfigError, match=r"ckpt_path=best.*only the run itself knew.* such as .*step=2\.ckpt"):
        run_of(tmp_path, ckpt_path="best", command=command)


@pytest.mark.long
def test_users_config_in_runs_folder_is_no_run(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "config.yaml").write_text((project / "run.yaml").read_text())
    options = ("--trainer.default_root_dir", ".", "--ckpt_path", "last")
    code, errors = fit_here(capsys, "--config", "config.yaml", *options)
    assert code == 2
    assert errors.splitlines()[-1].startswith("error: ckpt_path=last, but there is no checkpoint in checkpoints")
