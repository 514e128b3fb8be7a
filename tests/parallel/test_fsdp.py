"""What the strategy refuses before any process starts, its name, how long its groups wait, and what it gathers."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities import rank_zero_only
from rank_processes import run_script
from sharded_net import run_ranks
from tiny import bare_trainer
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rlightning.errors import ConfigError
from rlightning.parallel.fsdp import FSDP


@pytest.mark.parametrize(
    ("arguments", "num_devices", "message"),
    [
        (
            {"tensor_parallel_size": 2},
            3,
            "tensor_parallel_size=2 does not divide 3 ranks (trainer.num_nodes=1 x 3 devices). Use a divisor of 3.",
        ),
        (
            {"tensor_parallel_size": 2, "shard_size": 2},
            6,
            "shard_size=2 does not divide 3 data-parallel ranks (6 ranks / tensor_parallel_size=2). "
            "Use a divisor of 3, or leave it out.",
        ),
        ({"tensor_parallel_size": 0}, 1, "tensor_parallel_size=0 must be at least 1."),
        ({"shard_size": -1}, 1, "shard_size=-1 must be at least 1."),
        ({"cpu_offload": "optimiser"}, 1, "cpu_offload='optimiser' is unknown. Did you mean 'optimizer'?"),
    ],
)
def test_sizes_are_checked_before_a_process_starts(
    arguments: dict[str, Any], num_devices: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        bare_trainer(tmp_path, 1, strategy=FSDP(**arguments), devices=num_devices)


def test_it_has_a_short_name(tmp_path: Path) -> None:
    assert "fsdp2" in StrategyRegistry
    strategy = bare_trainer(tmp_path, 1, strategy="fsdp2", devices=2).strategy
    assert isinstance(strategy, FSDP)
    assert (strategy.tensor_parallel_size, strategy.data_parallel_size) == (1, 2)


def test_neighbours_form_a_tensor_parallel_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # which asking as another rank changes
    strategy = bare_trainer(tmp_path, 1, strategy=FSDP(tensor_parallel_size=2), devices=4).strategy
    assert isinstance(strategy, FSDP)
    shares = []
    for rank in range(4):
        strategy.cluster_environment.set_global_rank(rank)  # type: ignore[union-attr]
        shares.append(strategy.distributed_sampler_kwargs)
    assert shares == [{"num_replicas": 2, "rank": rank} for rank in (0, 0, 1, 1)]


TIMEOUTS = """\
import json, os
os.environ["TORCHELASTIC_RUN_ID"] = "here"
import torch, torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from rlightning.parallel.fsdp import FSDP

trainer = Trainer(
    accelerator="cpu", devices=2, strategy=FSDP(tensor_parallel_size=2, barrier_timeout=123.0), logger=False,
    enable_checkpointing=False,
)
strategy, module = trainer.strategy, LightningModule()
module.trainer = trainer
strategy._lightning_module = module
strategy.setup_environment()
groups = [dist.group.WORLD, *strategy.device_mesh.get_all_groups()]
backends = [group._get_backend(torch.device("cpu")) for group in groups]
print(json.dumps({"seconds": [backend.options._timeout.total_seconds() for backend in backends]}))
"""


@pytest.mark.processes
def test_all_groups_have_the_barrier_timeout(tmp_path: Path) -> None:
    script = tmp_path / "timeouts.py"
    script.write_text(TIMEOUTS)
    assert run_script(script, 2) == [{"seconds": [123.0] * 4}] * 2


class Owner(nn.Module):
    """What a LightningModule is to the strategy: the owner of a sharded model."""

    def __init__(self, *, reshards: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.actor = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2))
        for layer in (self.actor[1], self.actor[2]):
            fully_shard(layer, reshard_after_forward=reshards)
        fully_shard(self.actor, reshard_after_forward=False)


def accumulate(owner: Owner, strategy: FSDP, *, kept: bool) -> tuple[int, list[Tensor]]:
    """Gatherings of three micro-batches, and the gradients."""
    batches = torch.arange(18, dtype=torch.float32).reshape(3, 2, 3) + dist.get_rank()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as counted:
        for number, batch in enumerate(batches):
            with strategy.block_backward_sync() if kept and number < 2 else nullcontext():
                owner.actor(batch).square().sum().backward()
    gradients = [p.grad.full_tensor() for p in owner.parameters() if isinstance(p.grad, DTensor)]
    assert all(isinstance(p, DTensor) for p in owner.parameters())  # nothing is left gathered
    owner.zero_grad()
    return sum(event.name == "c10d::_allgather_base_" for event in counted.events()), gradients


def count_gatherings(folder: Path) -> None:
    # Of each micro-batch: the root once, two layers for the forward, and again for the backward if they are let go of.
    for reshards, alone, together in ((True, 3 * (1 + 2 + 2), 1 + 3 * (2 + 2)), (False, 3 * (1 + 2), 1 + 2)):
        owner, strategy = Owner(reshards=reshards), FSDP(reshard_after_forward=reshards)
        strategy.model = owner
        expected, first = accumulate(owner, strategy, kept=False)
        counted, second = accumulate(owner, strategy, kept=True)
        assert (expected, counted) == (alone, together)
        assert len(first) == len(second) == 6
        for before, after in zip(first, second, strict=True):
            assert torch.equal(before, after)


@pytest.mark.processes
def test_weights_gathered_for_backward_stay_for_forward(tmp_path: Path) -> None:
    run_ranks(count_gatherings, 2, tmp_path)
