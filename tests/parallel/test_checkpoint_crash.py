"""A process that dies in the middle of a save leaves a checkpoint that is whole and found; a damaged one is refused."""

import os
import shutil
import traceback
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from sharded_net import run_ranks
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rlightning import atomic_save, intervals
from rlightning.atomic_save import find_saved
from rlightning.checksums import DamagedError
from rlightning.errors import ConfigError
from rlightning.parallel import barrier, checkpoint_folder
from rlightning.parallel.checkpoint_folder import FORMAT, META, read_meta, read_whole, write_meta, write_tensors
from rlightning.parallel.checkpoint_io import AtomicCheckpointIO, last_checkpoint, newest_checkpoint, read_state, relink
from rlightning.parallel.fsdp import FSDP

KILLED = 9
Save = Callable[[Path, int], None]


def save_folder(path: Path, value: int) -> None:
    """As a sharding strategy of one rank does."""
    partial = atomic_save.prepare_partial(path)
    atomic_save.remove_leftovers(path.parent, path.suffix)
    partial.mkdir()
    checkpoint = {"state_dict": {"weight": torch.full((3,), float(value))}, "global_step": value}
    write_tensors(partial, checkpoint)
    write_meta(partial, checkpoint, {})
    atomic_save.swap_in(partial, path)


def save_file(path: Path, value: int) -> None:
    AtomicCheckpointIO().save_checkpoint(
        {"state_dict": {"weight": torch.full((3,), float(value))}, "global_step": value}, path
    )


def saved_value(path: Path) -> int:
    """What :meth:`load_checkpoint` finds; parts that do not belong together are refused."""
    checkpoint = AtomicCheckpointIO().load_checkpoint(path)
    assert checkpoint["state_dict"]["weight"].eq(checkpoint["global_step"]).all()
    return int(checkpoint["global_step"])


def die_at(moment: int, *others: tuple[Any, str]) -> None:
    """Have this process killed before its ``moment``-th change to the disk, or call of ``others``."""
    count = iter(range(1_000_000))

    def deadly(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            if next(count) == moment:
                os.kill(os.getpid(), KILLED)
            return change(*args, **kwargs)

        return changed

    for owner, name in (
        (os, "mkdir"), (os, "replace"), (os, "rename"), (os, "unlink"), (os, "rmdir"), (os, "fsync"),
        (torch, "save"), (state_dict_saver, "save"), *others,
    ):  # fmt: skip
        setattr(owner, name, deadly(getattr(owner, name)))


def die_in(save: Save, path: Path, value: int, moment: int) -> bool:
    """Save in a process of its own that is killed before its ``moment``-th change to the disk; whether it was."""
    child = os.fork()
    if child == 0:
        die_at(moment)
        save(path, value)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, KILLED)
    return status == KILLED


def make_strategy(rank: int) -> FSDP:
    """One of two ranks', which saves and loads only."""
    strategy = FSDP()
    strategy.cluster_environment = LightningEnvironment()
    strategy.cluster_environment.set_global_rank(rank)
    strategy._lightning_module = torch.nn.Module()  # type: ignore[assignment]
    return strategy


def save_twice(path: Path, rank: int, doomed: int, moment: int) -> None:
    """On one of two ranks, of which one is killed at a moment of the second save."""
    intervals.BARRIER_REPORT_GRACE = 0.1
    store = path.parent.with_name(f"store-{doomed}-{moment}")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    strategy = make_strategy(rank)
    for value in (1, 2):
        if value == 2 and rank == doomed:
            die_at(moment, (strategy, "barrier"))
        weight = distribute_tensor(torch.full((3,), float(value)), mesh, [Shard(0)])
        strategy.save_checkpoint({"state_dict": {"weight": weight}, "global_step": value}, path)


def die_on_two_ranks(path: Path, doomed: int, moment: int) -> bool:
    """Whether the doomed rank came to that moment; the other one has ended, too."""
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            code = 2
            try:
                save_twice(path, rank, doomed, moment)
                code = 0
            except (barrier.BarrierError, RuntimeError):
                traceback.print_exc()
                code = 1
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    died = statuses[doomed] == KILLED
    assert statuses[1 - doomed] == (1 << 8 if died else 0)
    return died


@pytest.mark.long
@pytest.mark.parametrize("save", [save_folder, save_file])
@pytest.mark.parametrize("is_linked", [False, True])
def test_a_death_at_any_moment_of_a_save(save: Save, is_linked: bool, tmp_path: Path) -> None:
    """``last.ckpt`` itself is saved anew, or the checkpoint that it leads to."""
    path = tmp_path / ("epoch=0-step=2.ckpt" if is_linked else "last.ckpt")
    older = tmp_path / "epoch=0-step=1.ckpt"
    save(older, 0)
    os.utime(older, (0, 0))
    moment, seen = 0, set()
    while True:
        save(path, 1)
        if is_linked:
            relink(tmp_path / "last.ckpt", path)
        died = die_in(save, path, 2, moment)
        last = last_checkpoint(tmp_path)
        assert last is not None
        seen.add(saved_value(last))
        assert saved_value(path) == saved_value(last)
        assert find_saved(path).exists()
        if not died:
            break
        moment += 1
    assert moment >= 4 and seen == {1, 2}
    save(path, 3)
    assert saved_value(path) == 3
    assert sorted(left.name for left in tmp_path.iterdir()) == sorted({older.name, path.name, "last.ckpt"})


@pytest.mark.slow
@pytest.mark.parametrize("doomed", [0, 1])
def test_rank_death_during_sharded_save_keeps_loadable_checkpoint(doomed: int, tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "last.ckpt"
    moment, seen = 0, []
    while die_on_two_ranks(path, doomed, moment):
        last = last_checkpoint(path.parent)
        assert last is not None
        seen.append(saved_value(last))
        moment += 1
    assert seen == sorted(seen) and set(seen) == {1, 2}  # from one moment on it is the new one
    assert saved_value(path) == 2
    assert [left.name for left in path.parent.iterdir()] == [path.name]


@pytest.mark.long
@pytest.mark.parametrize("save", [save_folder, save_file])
def test_a_death_at_any_moment_of_a_removal(save: Save, tmp_path: Path) -> None:
    """Lightning removes the old checkpoint before it moves the link."""
    old, new, last = tmp_path / "epoch=0-step=2.ckpt", tmp_path / "epoch=0-step=4.ckpt", tmp_path / "last.ckpt"
    moment = 0
    while True:
        save(old, 2)
        save(new, 4)
        os.utime(old, (0, 0))
        relink(last, old)
        died = die_in(lambda path, _: AtomicCheckpointIO().remove_checkpoint(path), old, 0, moment)
        found = last_checkpoint(tmp_path)
        assert found is not None and saved_value(found) in (2, 4)
        assert all(saved_value(path) for path in tmp_path.glob("*.ckpt"))  # nothing half that looks whole
        if not died:
            break
        moment += 1
    assert moment >= 2
    assert last.resolve() == new and not old.exists()


def test_other_files_in_the_folder_stay(tmp_path: Path) -> None:
    others = ["download.zip.partial", "notes", "notes.previous", "model.ckpt.txt"]
    for name in others:
        (tmp_path / name).write_text("mine")
    (tmp_path / "older.ckpt.partial").write_text("of a crash")
    AtomicCheckpointIO().save_checkpoint({"a": 1}, tmp_path / "model.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "model.ckpt"])


def test_what_last_stands_for(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    save_file(tmp_path / "epoch=0-step=2.ckpt", 2)
    save_folder(tmp_path / "epoch=0-step=4.ckpt", 4)
    os.utime(tmp_path / "epoch=0-step=2.ckpt", (0, 0))
    assert newest_checkpoint(tmp_path) == tmp_path / "epoch=0-step=4.ckpt"
    assert last_checkpoint(tmp_path) == tmp_path / "epoch=0-step=4.ckpt"  # Lightning had removed its link
    relink(tmp_path / "last.ckpt", tmp_path / "gone.ckpt")
    assert last_checkpoint(tmp_path) == tmp_path / "epoch=0-step=4.ckpt"
    relink(tmp_path / "last.ckpt", tmp_path / "epoch=0-step=2.ckpt")
    assert last_checkpoint(tmp_path) == tmp_path / "epoch=0-step=4.ckpt"
    relink(tmp_path / "last.ckpt", tmp_path / "epoch=0-step=4.ckpt")
    assert last_checkpoint(tmp_path) == tmp_path / "last.ckpt"


def test_the_whole_of_a_folder(tmp_path: Path) -> None:
    save_folder(tmp_path / "last.ckpt", 5)
    checkpoint = read_whole(tmp_path / "last.ckpt")
    assert FORMAT not in checkpoint and checkpoint["global_step"] == 5


def test_later_checkpoint_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder, "VERSION", 3)
        save_folder(tmp_path / "last.ckpt", 5)
    with pytest.raises(ConfigError, match=r"last.ckpt is a checkpoint of version 3, and .* reads versions up to 2\."):
        read_whole(tmp_path / "last.ckpt")


def test_version_1_checkpoint_with_tied_parameters_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "last.ckpt"
    save_folder(folder, 5)
    meta = torch.load(folder / META, weights_only=False)
    first, *_ = read_whole(folder)["state_dict"]
    meta[FORMAT] = {"version": 1, "twins": {"tied": first}, "files": {}}
    torch.save(meta, folder / META)
    weights = read_whole(folder)["state_dict"]
    assert weights["tied"] is weights[first]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    before = path.stat()
    path.write_bytes(content)
    if path.stat().st_mtime_ns == before.st_mtime_ns:  # the clock of files ticks every few milliseconds
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


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


def test_finding_last_checkpoint_unpickles_no_objects(tmp_path: Path) -> None:
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
