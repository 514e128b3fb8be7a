"""Gathered shards are what ``full_tensor()`` gives, on all ranks or on one, whatever made them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_net import make_net, run_ranks, shard_net
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from rlightning.parallel import gathering
from rlightning.parallel.gathering import gather_into, local_box, split_by_bytes
from rlightning.rollout.weights import plan_chunks
from rlightning.rollout.weights.driver import WeightSender

MESHES = [
    # (replicate, shard, tensor parallel), 0 where the mesh has no such dimension, over four ranks
    (0, 4, 0),  # 3 rows over four ranks: the last one holds nothing
    (2, 2, 0),
    (0, 2, 2),
    (2, 1, 2),
    (1, 2, 2),
    (0, 1, 4),
]


class Collectives:
    """Counts them, and the bytes that they bring."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_bytes: list[int] = []
        for owner, name in ((gathering, "all_gather_single"), (dist, "gather")):
            patch.setattr(owner, name, self.wrap(getattr(owner, name)))

    def wrap(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def count(output: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.num_bytes.append(output.numel())
            return collective(output, *args, **kwargs)

        return count


def empty_like(parameters: list[nn.Parameter], dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    return [torch.full(parameter.shape, torch.nan, dtype=dtype, device=device) for parameter in parameters]


def compare_with_full_tensor(folder: Path) -> None:
    rank = dist.get_rank()
    for replicate, shard, tensor_parallel in MESHES:
        net = shard_net(make_net(), replicate, shard, tensor_parallel)
        parameters = list(net.parameters())
        layouts = {parameter.placements for parameter in parameters if isinstance(parameter, DTensor)}
        assert len(layouts) >= (2 if tensor_parallel else 1)
        for dtype in (torch.float32, torch.bfloat16):
            expected = [weight.detach().to(dtype) for weight in make_net().parameters()]
            for parameter, weight in zip(parameters, expected, strict=True):
                assert isinstance(parameter, DTensor)
                assert torch.equal(parameter.full_tensor().to(dtype), weight)
                assert torch.equal(weight[local_box(parameter).slices], parameter.to_local().detach().to(dtype))
            outputs = empty_like(parameters, dtype)
            with pytest.MonkeyPatch.context() as patch:
                collectives = Collectives(patch)
                gather_into(outputs, parameters)
            # one for what tensor parallelism splits, one for the rest if that is split at all
            assert len(collectives.num_bytes) == (2 if shard > 1 and tensor_parallel else 1)
            assert all(torch.equal(output, weight) for output, weight in zip(outputs, expected, strict=True))
            # one rank only, in several collectives
            outputs = empty_like(parameters, dtype, "cpu" if rank == 1 else "meta")
            gather_into(outputs, parameters, destination=1, gather_bytes=200)
            if rank == 1:
                assert all(torch.equal(output, weight) for output, weight in zip(outputs, expected, strict=True))


def gather_on_gpus(folder: Path) -> None:
    """Shards on the GPU, and shards that are kept on the host while the group is NCCL's."""
    rank = dist.get_rank()
    for offload, tensor_parallel in ((False, 0), (False, 2), (True, 0)):
        net = make_net() if offload else make_net().to("cuda")
        shard_net(net, 0, 1 if tensor_parallel else 2, tensor_parallel, device_type="cuda", offload=offload)
        parameters = list(net.parameters())
        assert all(parameter.is_cuda is not offload for parameter in parameters)
        expected = [weight.detach().bfloat16() for weight in make_net().parameters()]
        gather_into(outputs := empty_like(parameters, torch.bfloat16, "cuda"), parameters)
        assert all(torch.equal(output.cpu(), weight) for output, weight in zip(outputs, expected, strict=True))
        outputs = empty_like(parameters, torch.bfloat16, "cpu" if rank == 0 else "meta")
        gather_into(outputs, parameters, destination=0)
        if rank == 0:
            assert all(torch.equal(output, weight) for output, weight in zip(outputs, expected, strict=True))


def check_special_cases(folder: Path) -> None:
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))["inner"]
    full = torch.arange(35.0).view(7, 5)
    sharded: list[Tensor] = [
        distribute_tensor(full, pair, [Shard(0)]),
        full + 1,  # not sharded
        distribute_tensor(full.t().contiguous(), pair, [Shard(1)]),
        distribute_tensor(torch.arange(9), pair, [Shard(0)]),
    ]
    # outputs of several dtypes; the last but one is a view that is not contiguous, as in a fused matrix
    fused = torch.zeros(5, 20)
    outputs = [torch.empty(7, 5, dtype=torch.float64), torch.empty(7, 5), fused[:, 3:10], torch.empty(9).long()]
    gather_into(outputs, sharded)
    expected = [full.double(), full + 1, full.t(), torch.arange(9)]
    assert all(torch.equal(output, value) for output, value in zip(outputs, expected, strict=True))
    assert fused[:, :3].eq(0).all() and fused[:, 10:].eq(0).all()

    # the order of the splits is the mesh's where no split is strided
    square = init_device_mesh("cpu", (2, 2))
    twice = distribute_tensor(full, square, [Shard(0), Shard(0)])
    gather_into([output := torch.empty(7, 5)], [twice])
    assert torch.equal(output, full)

    with pytest.raises(NotImplementedError, match="cannot be gathered"):
        gather_into([output], [DTensor.from_local(full, pair, [Partial()])])


def check_memory(folder: Path) -> None:
    """At most one window of values and a rank's share of it are held at a time."""
    mesh = init_device_mesh("cpu", (4,))
    tensors = [distribute_tensor(torch.full((64, 100), float(i)), mesh, [Shard(0)]) for i in range(8)]
    outputs = [torch.empty(64, 100) for _ in tensors]
    with pytest.MonkeyPatch.context() as patch:
        collectives = Collectives(patch)
        allocated: list[int] = []
        empty: Any = torch.empty

        def note(*shape: int, **kwargs: Any) -> Tensor:
            made: Tensor = empty(*shape, **kwargs)
            allocated.append(made.nbytes)
            return made

        patch.setattr(torch, "empty", note)
        gather_into(outputs, tensors, gather_bytes=51200)  # two tensors of 25,600 bytes each
    assert collectives.num_bytes == [51200] * 4
    assert allocated == [51200 // 4, 51200] * 4
    assert all(output.eq(i).all() for i, output in enumerate(outputs))


class Stream:
    """A source that notes which of its weights have been taken."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.taken = net, list[str]()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.net.named_parameters():
            self.taken.append(name)
            yield name, parameter


def check_bucket(folder: Path) -> None:
    """Each rank's bucket gets all weights; the source is asked for no more than the chunk in the bucket needs."""
    source = Stream(shard_net(make_net(), 0, 2, 2))
    shapes = [(name, tuple(parameter.shape)) for name, parameter in source.net.named_parameters()]
    plan = plan_chunks(shapes, torch.bfloat16, 400)
    bucket = torch.empty(plan.num_bytes, dtype=torch.uint8)
    weights = dict(make_net().named_parameters())
    seen = []
    for index in WeightSender(plan, bucket).fill(source):
        seen += [slot.name for slot in plan.chunks[index]]
        assert source.taken == seen
        for name, tensor in plan.tensors(bucket, index):
            assert torch.equal(tensor, weights[name].bfloat16())
    assert len(plan.chunks) > 3 and seen == list(weights)


def check_everything(folder: Path) -> None:
    check_bucket(folder)
    compare_with_full_tensor(folder)
    check_special_cases(folder)
    check_memory(folder)


@pytest.mark.processes
def test_shards_of_four_ranks_are_gathered(tmp_path: Path) -> None:
    run_ranks(check_everything, 4, tmp_path)


@pytest.mark.multigpu
def test_shards_of_two_gpus_are_gathered(tmp_path: Path) -> None:
    run_ranks(gather_on_gpus, 2, tmp_path, device_type="cuda")


def test_plain_tensors_are_copied_without_any_process_group() -> None:
    source = torch.randn(3, 5)
    gather_into([output := torch.empty(3, 5, dtype=torch.bfloat16)], [source])
    assert torch.equal(output, source.bfloat16())


def test_items_are_split_by_bytes_in_their_order() -> None:
    parts = split_by_bytes([3, 3, 5, 1, 7, 2], lambda size: size, 6)
    assert list(parts) == [[3, 3], [5, 1], [7], [2]]
    assert list(split_by_bytes([], int, 6)) == []
