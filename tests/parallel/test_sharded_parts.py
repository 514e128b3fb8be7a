"""Which modules beside a sharded model are sharded, and that they compute what whole ones do; rounded vectors."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from sharded_net import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from rlightning.parallel.fsdp import FSDP
from rlightning.parallel.replicated import average_gradients
from rlightning.parallel.sharding import rounded_vectors


class Scaled(nn.Module):
    """A number beside a module: torch shards no number without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.linear = nn.Linear(3, 3)

    def forward(self, values: Tensor) -> Tensor:
        scaled: Tensor = self.scale * self.linear(values)
        return scaled


class Owner(nn.Module):
    """A model, and all kinds of parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.actor = nn.Linear(3, 3)
        self.critic = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        self.heads = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})
        self.memory = nn.LSTM(3, 3)
        self.scaled = Scaled()
        self.first = nn.Linear(3, 3, bias=False)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.first.weight
        self.mixed = nn.ModuleList([nn.Linear(3, 3).double(), nn.LayerNorm(3)])
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.bare = nn.Parameter(torch.ones(3))
        self.unused = nn.Linear(3, 3)

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.actor(values) * self.bare
        hidden = hidden + self.scaled(hidden) + self.first(hidden) + self.tied(hidden) + self.frozen(hidden)
        hidden = hidden + self.memory(hidden[None])[0][0]
        hidden = self.mixed[1](hidden) + self.mixed[0](hidden.double()).float()
        heads: Tensor = self.critic(hidden) + self.heads["a"](hidden) - self.heads["b"](hidden.detach())
        return heads.square().mean()


WHOLE = {"bare", "scaled.scale", "first.weight", "tied.weight", "tied.bias"}


def train(owner: Owner, num_steps: int = 3) -> list[Tensor]:
    """Steps of two micro-batches over all rows, or over those of this rank; the full values."""
    trained = [p for p in owner.parameters() if p.requires_grad]
    # one mesh each, and whole ones
    groups = [[p for p in trained if isinstance(p, DTensor)], [p for p in trained if not isinstance(p, DTensor)]]
    optimizer = torch.optim.SGD([{"params": group} for group in groups if group], lr=0.5)
    rows = torch.linspace(-1, 1, 24).reshape(2, 4, 3)
    if dist.is_initialized():
        rows = rows[:, 2 * dist.get_rank() :][:, :2]
    for _ in range(num_steps):
        for micro_batch in rows:
            with torch.no_grad():
                owner(micro_batch)
            owner(micro_batch).backward()
        if dist.is_initialized():
            average_gradients(owner)
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for p in trained]


def train_sharded(folder: Path, expected: list[Tensor]) -> None:
    owner, strategy = Owner(), FSDP()
    strategy.parallel_devices = [torch.device("cpu")] * 2
    strategy._device_mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("replicate", "shard", "tensor_parallel"))
    strategy.sharding.shard(owner.actor)
    strategy.model = owner
    for part in (p for p in owner.parameters() if not isinstance(p, DTensor)):
        part.data += dist.get_rank()  # other values than rank 0's, as with another seed
    for _ in range(2):  # another fit of the same module
        strategy.model_to_device()
    assert {name for name, p in owner.named_parameters() if not isinstance(p, DTensor)} == WHOLE - {"tied.weight"}
    for found, weight in zip(train(owner), expected, strict=True):
        torch.testing.assert_close(found, weight, atol=1e-6, rtol=1e-5)
    assert all(p.grad is None for p in owner.unused.parameters())


@pytest.mark.processes
def test_parts_are_sharded_and_compute_as_whole_ones(tmp_path: Path) -> None:
    run_ranks(train_sharded, 2, tmp_path, train(Owner()))


def test_rounded_vectors_are_masters_again_whatever_happens() -> None:
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.bias.copy_(torch.tensor([1 + 2**-9, 1 + 2**-7]))  # bfloat16 has 1 and 1 + 2^-7, and nothing in between
        layer.weight.fill_(1 + 2**-9)
    with pytest.raises(KeyError), rounded_vectors(layer, torch.bfloat16):
        assert layer.bias.tolist() == [1, 1 + 2**-7]
        assert (layer.weight == 1 + 2**-9).all()  # a matrix is rounded where it is multiplied
        raise KeyError
    assert layer.bias.tolist() == [1 + 2**-9, 1 + 2**-7]
