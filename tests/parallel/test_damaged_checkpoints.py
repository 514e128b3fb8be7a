"""A damaged checkpoint is refused by name, and ``last`` is the newest one that is what was written."""

import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_net import run_ranks
from test_checkpoint_crash import Save, make_strategy, save_file, save_folder
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rlightning.atomic_save import find_saved
from rlightning.checksums import DamagedError
from rlightning.errors import ConfigError
from rlightning.parallel.checkpoint_folder import FORMAT, META, read_meta
from rlightning.parallel.checkpoint_io import AtomicCheckpointIO, last_checkpoint, read_state


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES: list[Callable[[Path], object]] = [flip, cut, lambda path: path.write_bytes(b""), Path.unlink]


def save_shards(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for step in (1, 2):
        weight = distribute_tensor(torch.full((40,), float(step)), mesh, [Shard(0)])
        checkpoint: dict[str, Any] = {"state_dict": {"weight": weight}, "global_step": step, "optimizer_states": []}
        make_strategy(dist.get_rank()).save_checkpoint(checkpoint, folder / f"step={step}.ckpt")


def load_damaged(folder: Path) -> None:
    strategy = make_strategy(dist.get_rank())
    with pytest.raises(DamagedError, match=r"step=2\.ckpt is damaged: '__1_0\.distcp' is not what was written"):
        strategy.load_checkpoint(folder / "step=2.ckpt")


@pytest.mark.processes
def test_each_file_of_two_ranks_is_covered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_ranks(save_shards, 2, tmp_path)
    newest, older = tmp_path / "step=2.ckpt", tmp_path / "step=1.ckpt"
    names = sorted(path.name for path in newest.iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", META]
    assert sorted(read_meta(newest, weights_only=False)[FORMAT]["files"]) == [n for n in names if n != META]
    assert last_checkpoint(tmp_path) == newest
    shutil.copytree(newest, kept := tmp_path / "kept")
    for name in names:
        for damage in DAMAGES:
            damage(newest / name)
            assert last_checkpoint(tmp_path) == older
            with pytest.raises(DamagedError, match=rf"step=2\.ckpt is damaged: .*'{name}'"):
                AtomicCheckpointIO().load_checkpoint(newest)
            shutil.rmtree(newest)
            shutil.copytree(kept, newest)
    assert "step=2.ckpt, saved after step 2, is skipped: '.metadata' is missing." in caplog.text
    flip(newest / "__1_0.distcp")
    run_ranks(load_damaged, 2, tmp_path)


@pytest.mark.parametrize("save", [save_file, save_folder])
@pytest.mark.parametrize("damage", DAMAGES[:3])
def test_damaged_newest_is_skipped(
    save: Save, damage: Callable[[Path], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older, newest = tmp_path / "epoch=0-step=2.ckpt", tmp_path / "epoch=0-step=4.ckpt"
    save(older, 2)
    save(newest, 4)
    damage(newest / META if newest.is_dir() else newest)
    assert last_checkpoint(tmp_path) == older
    assert "epoch=0-step=4.ckpt" in caplog.text and "is skipped: " in caplog.text
    with pytest.raises(ConfigError, match=r"step=4\.ckpt is damaged: "):
        AtomicCheckpointIO().load_checkpoint(newest)
    damage(older / META if older.is_dir() else older)
    assert last_checkpoint(tmp_path) is None


class Trap:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.folder,)


def test_looking_for_the_last_one_makes_no_objects_of_what_files_hold(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    state = OrderedDict(weight=torch.ones(2), shared=nn.Parameter(torch.ones(2)))
    checkpoint = {"trap": Trap(sprung), "state_dict": state, "sets": {1, 2}, "kinds": {Path: [sprung]}}
    for step in (1, 2):
        AtomicCheckpointIO().save_checkpoint(
            checkpoint | {"global_step": step, "optimizer_states": []}, tmp_path / f"step={step}.ckpt"
        )
    newest = tmp_path / "step=2.ckpt"
    assert read_state(newest) == (newest, 2, True)
    flip(newest)
    assert last_checkpoint(tmp_path) == tmp_path / "step=1.ckpt"
    assert not sprung.exists()
    torch.load(tmp_path / "step=1.ckpt", weights_only=False)
    assert sprung.exists(), "the trap works"


def test_link_to_damaged_checkpoint_is_skipped(tmp_path: Path) -> None:
    save_file(older := tmp_path / "epoch=0-step=2.ckpt", 2)
    save_file(newest := tmp_path / "epoch=0-step=4.ckpt", 4)
    (tmp_path / "last.ckpt").symlink_to(newest.name)
    assert last_checkpoint(tmp_path) == tmp_path / "last.ckpt"
    flip(newest)
    assert last_checkpoint(tmp_path) == older


def test_checkpoint_is_compared_again_once_it_has_changed(tmp_path: Path) -> None:
    save_file(path := tmp_path / "last.ckpt", 2)
    AtomicCheckpointIO().load_checkpoint(path)
    flip(path)
    with pytest.raises(DamagedError):
        AtomicCheckpointIO().load_checkpoint(find_saved(path))
