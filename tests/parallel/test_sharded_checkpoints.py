"""A run that is handed on: from one process to two that shard, to two that split each layer, and so on."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from disks import Disk, made_disk
from rank_processes import each_run, finish, start_calls
from sft_run import SIZES, CountSteps, pose_as_launched, train, write_rows
from sharded_net import run_ranks
from tiny import full_weights, save_model

from rlightning import intervals
from rlightning.errors import ConfigError, SaveError
from rlightning.parallel.checkpoint_folder import is_checkpoint_folder, read_whole, stored_tensors
from rlightning.parallel.fsdp import FSDP

pytestmark = pytest.mark.processes

STEPS = 8
FLOAT32_TOLERANCE = 1e-4
"""Of a weight after four steps: a hundredth of the learning rate, as in test_equivalence.py."""


def two_ranks(folder: Path, port: int) -> None:
    rank = dist.get_rank()
    pose_as_launched(rank, 2, port)
    counter = CountSteps()
    _, trainer = train(folder, 4, counter, devices=2, strategy=FSDP(), ckpt_path=folder / "single.ckpt")
    assert (trainer.global_step, counter.num_steps) == (4, 4)
    trainer.save_checkpoint(folder / "data_parallel.ckpt")
    trainer.save_checkpoint(folder / "data_parallel.ckpt")  # over itself
    assert is_checkpoint_folder(folder / "data_parallel.ckpt")

    counter = CountSteps()
    module, trainer = train(
        folder, 6, counter, devices=2, strategy=FSDP(tensor_parallel_size=2), ckpt_path=folder / "data_parallel.ckpt"
    )
    assert (trainer.global_step, counter.num_steps, module.weight_version) == (6, 6, 6)
    trainer.save_checkpoint(folder / "tensor_parallel.ckpt")

    # two copies of the weights, the optimizer's state on the host
    strategy = FSDP(shard_size=1, cpu_offload="optimizer")
    module, trainer = train(folder, 7, devices=2, strategy=strategy, ckpt_path=folder / "tensor_parallel.ckpt")
    trainer.save_checkpoint(folder / "copies.ckpt")
    stored = stored_tensors(folder / "copies.ckpt")
    assert all(len(entry.chunks) == 1 for entry in stored.values())  # of two copies one is written
    intervals.FAILURE_DECISION_DELAY = 600  # each rank raises by itself, the later one too
    with pytest.raises(ConfigError, match=r"is of another model: it should hold .* Name the checkpoint's own model"):
        train(folder / "other", 6, devices=2, strategy=FSDP(), ckpt_path=folder / "data_parallel.ckpt")
    dist.barrier()  # the end of one ends the other


def test_a_run_goes_on_whatever_the_ranks(tmp_path: Path) -> None:
    """Eight steps in one go are eight steps in five runs; float32 sums in another order make the difference."""
    for folder, sizes in ((tmp_path, SIZES), (tmp_path / "other", {**SIZES, "num_hidden_layers": 3})):
        folder.mkdir(exist_ok=True)
        save_model(folder / "model", **sizes)
        write_rows(folder)
    in_one_go, reference = train(tmp_path, STEPS)
    _, trainer = train(tmp_path, 2, CountSteps())
    trainer.save_checkpoint(tmp_path / "single.ckpt")

    run_ranks(two_ranks, 2, tmp_path, 0)

    assert sorted(path.name for path in tmp_path.glob("*.ckpt*")) == [
        "copies.ckpt",
        "data_parallel.ckpt",
        "single.ckpt",
        "tensor_parallel.ckpt",
    ]
    module, trainer = train(tmp_path, STEPS, ckpt_path=tmp_path / "copies.ckpt")
    assert (trainer.global_step, module.weight_version) == (STEPS, STEPS)
    expected = full_weights(in_one_go)
    for name, weight in full_weights(module).items():
        torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=0)
    ours, theirs = trainer.optimizers[0].state_dict(), reference.optimizers[0].state_dict()
    assert [group["lr"] for group in ours["param_groups"]] == [group["lr"] for group in theirs["param_groups"]]
    for number, state in theirs["state"].items():
        assert state["step"] == ours["state"][number]["step"] == STEPS
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(ours["state"][number][key], state[key], atol=1e-5, rtol=1e-3)
    assert trainer.datamodule.stream.state_dict() == reference.datamodule.stream.state_dict()


def save_each(folder: Path, runs: dict[str, dict[str, Any]]) -> None:
    """Train each run on all ranks, with the arguments of :func:`train`, ``strategy`` being those of FSDP."""
    for name, arguments in each_run(runs):
        strategy = FSDP(**arguments.pop("strategy", {}))
        _, trainer = train(folder, devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, **arguments)
        trainer.save_checkpoint(folder / f"{name}.ckpt")


@pytest.mark.parametrize(
    "accelerator",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("gpu", marks=pytest.mark.multigpu(4))],
)
def test_four_rank_checkpoint_resumes_on_fewer_ranks(accelerator: str, tmp_path: Path) -> None:
    """On two ranks weights and moments are those of the four bit by bit; steps from there sum in another order."""
    save_model(tmp_path / "model", **SIZES)
    write_rows(tmp_path)
    in_one_go, _ = train(tmp_path, 4, accelerator=accelerator)
    four = {"four": {"max_steps": 2, "accelerator": accelerator, "strategy": {"tensor_parallel_size": 2}}}
    finish(start_calls(save_each, 4, tmp_path, four))
    resumed: dict[str, Any] = {"accelerator": accelerator, "ckpt_path": tmp_path / "four.ckpt"}
    two = {"two": {"max_steps": 2, **resumed}, "two_on": {"max_steps": 4, **resumed}}
    finish(start_calls(save_each, 2, tmp_path, two))
    on_one, _ = train(tmp_path, 4, **resumed)

    saved, loaded, on_two = (read_whole(tmp_path / f"{name}.ckpt") for name in ("four", "two", "two_on"))
    (saved_state,), (loaded_state,) = saved["optimizer_states"], loaded["optimizer_states"]
    assert (saved["global_step"], loaded["global_step"], on_two["global_step"]) == (2, 2, 4)
    torch.testing.assert_close(loaded["state_dict"], saved["state_dict"], atol=0, rtol=0)
    torch.testing.assert_close(loaded_state["state"], saved_state["state"], atol=0, rtol=0)
    expected = in_one_go.state_dict()
    for weights in (on_one.state_dict(), on_two["state_dict"]):
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight.cpu(), expected[name].cpu(), atol=FLOAT32_TOLERANCE, rtol=0)


def full_disk_on_two_ranks(folder: Path, disk: Disk) -> None:
    pose_as_launched(dist.get_rank(), 2, 0)
    _, trainer = train(folder, 1, devices=2, strategy=FSDP())
    path = disk.folder / "last.ckpt"
    trainer.save_checkpoint(path)
    if dist.get_rank() == 0:
        disk.break_down()
    dist.barrier()
    with pytest.raises(
        SaveError, match=rf"The checkpoint '{path}' cannot be written: .* The last good one is '{path}'"
    ):
        trainer.save_checkpoint(path)
    dist.barrier()
    assert is_checkpoint_folder(path) and sorted(entry.name for entry in disk.folder.iterdir()) == ["full", "last.ckpt"]


def test_full_disk_keeps_the_last_good_folder(tmp_path: Path) -> None:
    save_model(tmp_path / "model", **SIZES)
    write_rows(tmp_path)
    with made_disk(tmp_path, "full") as disk:
        run_ranks(full_disk_on_two_ranks, 2, tmp_path, disk)


HEAD = r"holds 'value\.weight', which this module has no place for"
THIRD_LAYER = r"holds 'actor\.\S+\.layers\.2\.\S+', which this module has no place for"
NO_THIRD_LAYER = r"it should hold 'actor\.\S+\.layers\.2\.\S+' of .*, and holds nothing of that name"
TIED, UNTIED = "are one weight there, and two in this module", "are two weights there, and one in this module"
REFUSED = {
    "untied": {"three": THIRD_LAYER, "tied": TIED},
    "tied": {"untied": UNTIED},
    "three": {"untied": NO_THIRD_LAYER},
}
"""What is said of checkpoints, by the model that is to take them."""


def save_headed(folder: Path, name: str, **trainer: Any) -> Any:
    """Save a checkpoint of a step, and one of a module that has a weight more; the trainer."""
    module, made = train(folder, 1, **trainer)
    made.save_checkpoint(folder / f"{name}.ckpt")
    module.value = torch.nn.Linear(4, 1, bias=False)
    made.save_checkpoint(folder / f"headed_{name}.ckpt")
    del module.value
    return made


def others_on_two_ranks(folder: Path) -> None:
    pose_as_launched(dist.get_rank(), 2, 0)
    trainers = {name: save_headed(folder / name, "sharded", devices=2, strategy=FSDP()) for name in REFUSED}
    for name, trainer in trainers.items():
        for kind in ("single", "sharded"):
            trainer.strategy.load_checkpoint(folder / name / f"{kind}.ckpt")
            others = {folder / saved / f"{kind}.ckpt": message for saved, message in REFUSED[name].items()}
            for path, message in {folder / name / f"headed_{kind}.ckpt": HEAD, **others}.items():
                with pytest.raises(ConfigError, match=f"^ckpt_path={path} .*{message}"):
                    trainer.strategy.load_checkpoint(path)
    with pytest.raises(ConfigError, match=r"optimizer has groups of .* parameters, and .*: its model tied"):
        trainers["untied"].strategy.load_checkpoint(folder / "tied" / "apart.ckpt")


@pytest.mark.slow
def test_checkpoints_of_others_are_refused_by_all_ranks(tmp_path: Path) -> None:
    sizes: dict[str, dict[str, Any]] = {
        "untied": SIZES,
        "tied": {**SIZES, "tie_word_embeddings": True},
        "three": {**SIZES, "num_hidden_layers": 3},
    }
    for name, size in sizes.items():
        (tmp_path / name).mkdir()
        save_model(tmp_path / name / "model", **size)
        write_rows(tmp_path / name)
        save_headed(tmp_path / name, "single")
    checkpoint = torch.load(tmp_path / "tied" / "single.ckpt", weights_only=False)
    checkpoint["state_dict"] = {name: weight.clone() for name, weight in checkpoint["state_dict"].items()}
    torch.save(checkpoint, tmp_path / "tied" / "apart.ckpt")
    run_ranks(others_on_two_ranks, 2, tmp_path)
