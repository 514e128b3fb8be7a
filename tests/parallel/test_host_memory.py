"""Bytes leave and come back; the tensors never notice. On the CPU, where it is the same but for the speed."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import AdamW

from rlightning.parallel import host_memory
from rlightning.parallel.host_memory import HostMemory


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that one storage spans several of, and several storages share."""
    monkeypatch.setattr(host_memory, "BLOCK_BYTES", 1024)


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_round_trip_is_exact_and_keeps_every_object() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(700, generator=generator),  # 2,800 bytes: three blocks
        torch.randint(0, 255, (3,), dtype=torch.uint8, generator=generator),
        torch.randn(5, 7, generator=generator).bfloat16().t(),
        torch.tensor(float("nan")),
        torch.zeros(0),
    ]
    copies, objects = [t.clone() for t in tensors], [id(t.untyped_storage()) for t in tensors]
    memory = HostMemory()
    taken = memory.take(tensors, "cpu")
    sizes = [t.untyped_storage().nbytes() for t in tensors]
    counted, returned = memory.num_bytes, memory.give_back()
    assert taken == counted == returned == 2800 + 3 + 70 + 4
    assert sizes == [0] * 5 and memory.num_bytes == 0
    for tensor, copy, storage in zip(tensors, copies, objects, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)
        assert id(tensor.untyped_storage()) == storage


def test_shared_storages_move_once_and_stay_shared() -> None:
    base = torch.arange(100.0)
    views = [base, base[10:20], base.view(10, 10).t(), nn.Parameter(base)]
    memory = HostMemory()
    num_bytes = memory.take(views, "cpu")
    memory.give_back()
    assert num_bytes == 400
    base[15] = -1
    assert views[1][5] == views[2][5, 1] == views[3][15] == -1


def test_offload_skips_offloaded_foreign_and_other_device_tensors() -> None:
    memory, tensor = HostMemory(), torch.ones(10)
    foreign = torch.from_numpy(np.ones(10))
    nothing = memory.take([tensor, foreign])  # neither is on CUDA
    once = memory.take([tensor, foreign], "cpu")
    again = memory.take([tensor, foreign], "cpu")
    assert (nothing, once, again) == (0, 40, 0)  # no tensors in here: to print one that is away is to read it
    assert foreign.sum() == 10
    memory.close()
    assert tensor.sum() == 10


def test_repeated_partial_offloads_reuse_host_buffers() -> None:
    first, second, memory = torch.ones(400), torch.full((400,), 2.0), HostMemory()
    for _ in range(3):
        memory.take([first], "cpu")
        memory.take([second], "cpu")
        memory.give_back()
    assert first.sum() == 400 and second.sum() == 800
    # 1,600 bytes, then 1,600 from the next multiple of 512 on: 3,648 bytes
    assert len(memory._blocks) == 4
    memory.close()
    assert memory._blocks == []


def test_what_found_no_room_stays_for_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, memory = [torch.full((10,), float(i)) for i in range(3)], HostMemory()
    memory.take(tensors, "cpu")
    spans, calls = memory._spans, []

    def full_at_the_second(*args: object) -> object:
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("full")
        return spans(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(memory, "_spans", full_at_the_second)
    with pytest.raises(torch.OutOfMemoryError):
        memory.give_back()
    assert memory.num_bytes == 80
    assert memory.give_back() == 80
    assert [t.sum().item() for t in tensors] == [0.0, 10.0, 20.0]


@pytest.mark.parametrize("fused", [False, True])
def test_optimizer_steps_are_the_same_with_offload(fused: bool) -> None:
    results = []
    for offloads in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 1))
        optimizer, memory = AdamW(model.parameters(), lr=0.1, fused=fused), HostMemory()
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            if offloads:
                state = [v for s in optimizer.state.values() for v in s.values()]
                memory.take([*state, *(p.grad for p in model.parameters() if p.grad is not None)], "cpu")
                memory.take(model.parameters(), "cpu")
                memory.give_back()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
    for plain, offloaded in zip(*results, strict=True):
        assert torch.equal(plain, offloaded)


def test_parameters_of_a_graph_that_awaits_its_backward() -> None:
    """Autograd compares versions of what it has saved: the bytes come back without a new one."""
    model, memory = nn.Linear(3, 3), HostMemory()
    loss = model(torch.ones(1, 3, requires_grad=True)).sum()
    memory.take(model.parameters(), "cpu")
    memory.give_back()
    loss.backward()
    assert model.weight.grad is not None and model.weight.grad.eq(1).all()


def test_fsdp_shards_in_host_memory_step_alike(process_group: None) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    expected = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    expected.load_state_dict(model.state_dict())
    fully_shard(model, mesh=mesh)
    ours, theirs = AdamW(model.parameters(), lr=0.1), AdamW(expected.parameters(), lr=0.1)
    memory = HostMemory()
    for _ in range(3):
        for net, optimizer in ((model, ours), (expected, theirs)):
            net(torch.ones(2, 4)).square().sum().backward()
            if net is model:
                state = [v for s in optimizer.state.values() for v in s.values()]
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                memory.take([*state, *gradients, *model.parameters()], "cpu")
                assert memory.give_back() > 0
            optimizer.step()
            optimizer.zero_grad()
    for name, weight in model.named_parameters():
        assert isinstance(weight, DTensor)
        assert torch.equal(weight.full_tensor(), expected.get_parameter(name))


def test_a_dtensor_is_moved_by_its_shard(process_group: None) -> None:
    tensor = distribute_tensor(torch.arange(6.0), init_device_mesh("cpu", (1,)), [Replicate()])
    memory = HostMemory()
    memory.take([tensor], "cpu")
    assert memory.give_back() == 24
    assert tensor.to_local().tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.gpu
def test_the_device_gets_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "BLOCK_BYTES", 64 << 20)
    torch.cuda.empty_cache()  # of other tests
    tensors = [torch.full((50 << 20,), i, dtype=torch.uint8, device="cuda") for i in range(8)]
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    memory = HostMemory()
    taken = memory.take(tensors)
    freed = torch.cuda.mem_get_info()[0] - free
    memory.give_back()
    assert taken == 400 << 20 and freed >= 390 << 20
    assert all(block.is_pinned() for block in memory._blocks) and len(memory._blocks) == 7
    assert [t.float().mean().item() for t in tensors] == [0, 1, 2, 3, 4, 5, 6, 7]
