"""Moments in fewer bytes, sharded: what copies agree on, what a checkpoint keeps, who can read it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from sft_run import pose_as_launched, train, write_rows
from sharded_net import run_ranks
from tiny import full_weights, save_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rlightning import intervals
from rlightning.errors import ConfigError
from rlightning.optim import OptimizerStates, StoredMomentsAdamW
from rlightning.optim.adamw import seeded
from rlightning.parallel.checkpoint_folder import read_whole
from rlightning.parallel.fsdp import FSDP
from rlightning.parallel.sharding import local_tensor

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SMALLER: list[OptimizerStates] = ["bfloat16", "8bit"]
SIZES = {"num_key_value_heads": 2, "hidden_size": 31, "head_dim": 128, "intermediate_size": 256}
"""An odd number of rows; two blocks of columns where tensor parallelism cuts them."""


class WholeState(Callback):
    """The optimizer's state when training starts, by parameter, from the shards of all ranks."""

    def __init__(self) -> None:
        self.state: list[dict[str, Tensor]] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        optimizer = trainer.optimizers[0]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.state = [
            {name: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for name, v in state.items()}
            for state in (optimizer.state[parameter] for parameter in parameters)
        ]


def assert_state_of(path: Path, seen: WholeState) -> None:
    """Assert that the state that was read equals the checkpoint's, bit by bit."""
    whole = read_whole(path) if path.is_dir() else torch.load(path)
    states = whole["optimizer_states"][0]["state"]
    assert len(states) == len(seen.state) > 0
    for number, state in states.items():
        assert state.keys() == seen.state[number].keys()
        for name, value in state.items():
            assert torch.equal(value, seen.state[number][name]), (number, name)


def take_steps(parameter: nn.Parameter, states: OptimizerStates) -> Tensor:
    """Three steps on gradients between 1/2 and 1 in size; the whole parameter then."""
    optimizer = StoredMomentsAdamW([{"params": [parameter]}], states=states, lr=1.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        gradient = (1 + torch.rand(parameter.shape, generator=generator)) / 2
        gradient *= torch.randn(parameter.shape, generator=generator).sign()
        parameter.grad = shard_over_ranks(gradient) if isinstance(parameter, DTensor) else gradient
        optimizer.step()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def shard_over_ranks(tensor: Tensor) -> DTensor:
    return distribute_tensor(tensor, init_device_mesh("cpu", (2,)), [Shard(0)])


def compare_with_one_process(states: OptimizerStates) -> None:
    """Each is off by rounding alone, bounded in test_stored_moments.py: 0.05 lr in bfloat16 and 0.16 lr in 8 bits."""
    start = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    sharded = take_steps(nn.Parameter(shard_over_ranks(start)), states)
    bound = 2 * {"bfloat16": 0.05, "8bit": 0.16}[states]
    torch.testing.assert_close(sharded, take_steps(nn.Parameter(start.clone()), states), rtol=0, atol=bound)


def compare_random_numbers() -> None:
    """Shards are rounded with numbers of their own, copies with the same."""
    mesh = init_device_mesh("cpu", (2,))
    for placement, num_seeds in ((Shard(0), 2), (Replicate(), 1)):
        parameter = distribute_tensor(torch.ones(4, 4), mesh, [placement])
        seeds: list[Any] = [None, None]
        dist.all_gather_object(seeds, seeded("1 0 0", parameter, torch.device("cpu")).initial_seed())
        assert len(set(seeds)) == num_seeds


def two_ranks(folder: Path) -> None:
    compare_random_numbers()
    pose_as_launched(dist.get_rank(), 2, 0)
    for states in SMALLER:
        compare_with_one_process(states)
        resume_on_two_ranks(folder / states, states)
    intervals.FAILURE_DECISION_DELAY = 600  # each rank raises by itself, the later one too
    with pytest.raises(ConfigError, match=r"blocks of 62 numbers, and tensor parallelism cuts rows of 62 into .* 31"):
        strategy, path = FSDP(tensor_parallel_size=2), folder / "odd" / "single.ckpt"
        train(folder / "odd", 3, devices=2, optimizer_states="8bit", strategy=strategy, ckpt_path=path)
    dist.barrier()  # the end of one ends the other


def resume_on_two_ranks(folder: Path, states: OptimizerStates) -> None:
    sharded: dict[str, Any] = {"devices": 2, "optimizer_states": states}
    in_one_go, _ = train(folder, 4, strategy=FSDP(), **sharded)
    expected = full_weights(in_one_go)

    _, trainer = train(folder, 2, strategy=FSDP(cpu_offload="optimizer"), **sharded)
    trainer.save_checkpoint(folder / "sharded.ckpt")
    seen = WholeState()
    module, _ = train(folder, 4, seen, strategy=FSDP(), ckpt_path=folder / "sharded.ckpt", **sharded)
    assert_state_of(folder / "sharded.ckpt", seen)
    for name, weight in full_weights(module).items():
        assert torch.equal(weight, expected[name]), name

    module, trainer = train(folder, 3, strategy=FSDP(shard_size=1), ckpt_path=folder / "sharded.ckpt", **sharded)
    for copies in (module.parameters(), (v for s in trainer.optimizers[0].state.values() for v in s.values())):
        for tensor in copies:
            other = [torch.empty_like(local_tensor(tensor)) for _ in range(2)]
            dist.all_gather(other, local_tensor(tensor).detach())
            assert torch.equal(*other)

    for path in (folder / "sharded.ckpt", folder / "single.ckpt"):
        seen = WholeState()
        train(folder, 3, seen, strategy=FSDP(tensor_parallel_size=2), ckpt_path=path, **sharded)
        assert_state_of(path, seen)


def train_alone(folder: Path, states: OptimizerStates, **sizes: int) -> None:
    """Write a checkpoint of two steps in one process."""
    folder.mkdir()
    save_model(folder / "model", **SIZES | sizes)
    write_rows(folder)
    _, trainer = train(folder, 2, optimizer_states=states)
    trainer.save_checkpoint(folder / "single.ckpt")


def test_copies_agree_and_checkpoints_are_exact(tmp_path: Path) -> None:
    for states in SMALLER:
        train_alone(tmp_path / states, states)
    train_alone(tmp_path / "odd", "8bit", intermediate_size=62)
    run_ranks(two_ranks, 2, tmp_path)
    for states in SMALLER:
        seen, path = WholeState(), tmp_path / states / "sharded.ckpt"
        train(tmp_path / states, 3, seen, ckpt_path=path, optimizer_states=states)
        assert_state_of(path, seen)
