"""Which ranks store: real ranks under FSDP, every kind of mesh and loop, and what is refused."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equivalence_run import RandomSampler
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from observed_run import ObservedModule, PlainModule, loader, make_trainer, save_run
from rank_processes import finish, start_calls, start_controller
from tiny import UseSampler, bare_trainer, make_algorithm, make_data, save_model, write_sums
from tiny import make_trainer as make_actor_trainer
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

from rlightning.algorithms import GRPO
from rlightning.callbacks import RemotizeOnHeadOnly
from rlightning.controller.rtensor import store_own_tensors, store_tensors
from rlightning.controller.tensor_store import live_entries, stores_results
from rlightning.errors import ConfigError
from rlightning.hooks import RLCallback, call_hook
from rlightning.parallel.fsdp import FSDP
from rlightning.types import RolloutBatch

INITIALISED = ("failing", "setup", "load", "rollout", "rejected", "update", "validation")
OTHERWISE = ("before", "early setup", "after failure", "after", "own")
"""Where there is no training engine yet or any more, and for what a rank alone has."""


pytestmark = pytest.mark.usefixtures("fresh_process")


# Runs that store something wherever they can, under FSDP with tensor parallelism, on every rank; or without any

Record = dict[str, tuple[bool, int, int]]


class StoreEverywhere(RLCallback):
    """Stores what hooks are given."""

    def __init__(self, record: Record, prefix: str = "") -> None:
        self.record = record
        self.prefix = prefix

    def store(self, occasion: str, tree: Any) -> None:
        """Store, look, and let go."""
        stored = store_tensors(tree, label=occasion)
        alive = live_entries()
        is_stored = stored is not None
        del stored
        self.record[self.prefix + occasion] = (is_stored, alive, live_entries())

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.store("setup", {"seed": torch.ones(2)})

    def on_rollout_end(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        self.store("rollout", batch)
        stored = store_own_tensors(batch, label="own")
        self.record[self.prefix + "own"] = (stored is not None, live_entries(), 0)

    def on_update_end(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        self.store("update", batch)

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.store("validation", torch.zeros(3))


class Picky(GRPO):
    """Rejects the first four prompts and takes others in their place; stores while it loads and what it rejects."""

    max_refills = 1
    observer: StoreEverywhere

    def configure_model(self) -> None:
        super().configure_model()
        self.observer.store("load", torch.zeros(1))

    def keep_sequences(self, batch: RolloutBatch) -> torch.Tensor:
        kept = torch.tensor([prompt.index >= 4 for prompt in batch.prompts])
        if not kept.all():
            self.observer.store("rejected", batch.select((~kept).nonzero()[:, 0]))
        return kept


class Fails(LightningModule):
    """Stores something in its second step and fails while it has the handles."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def configure_model(self) -> None:
        """ModelParallelStrategy wants one."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        stored = store_tensors({"weight": self.weight})
        if batch_idx == 1:
            self.record["failing"] = (stored is not None, live_entries(), -1)
            raise RuntimeError("out of luck")
        return (self.weight - 1).square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(folder: Path, model: str, size: int, callback: str) -> Record:
    """Two runs, one that fails and one that trains, and what is stored around them.

    Args:
        folder: of the runs.
        model: the model's folder.
        size: of a tensor-parallel group.
        callback: "with" or "without" RemotizeOnHeadOnly.

    Returns:
        By occasion, whether something was stored there, the entries alive then, and when the handles were gone.
    """
    ranks = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ}
    num_ranks = int(ranks.get("WORLD_SIZE", 1))
    record: Record = {}
    observer = StoreEverywhere(record)
    own: list[Callback] = [RemotizeOnHeadOnly()] if callback == "with" else []
    folder = folder / f"rank{ranks.get('RANK')}"
    folder.mkdir()

    observer.store("before", torch.zeros(1))
    sizes: dict[str, Any] = {"data_parallel_size": num_ranks // size, "tensor_parallel_size": size}
    strategy: Any = ModelParallelStrategy(**sizes) if ranks else "auto"
    trainer = bare_trainer(folder, 3, *own, devices=num_ranks, strategy=strategy)
    with suppress(RuntimeError):
        trainer.fit(Fails(record), DataLoader(torch.zeros(4, 1)))  # type: ignore[arg-type]
    gc.collect()
    record["failing"] = (*record["failing"][:2], live_entries())
    observer.store("after failure", torch.zeros(1))

    os.environ.update(ranks)  # Lightning takes them away after each fit
    module = make_algorithm(Picky, model, kl_coef=0.0, validate_first=False)
    module.observer = observer
    callbacks: list[Callback] = [StoreEverywhere(record, "early "), *own, observer]
    strategy = FSDP(tensor_parallel_size=size) if ranks else "auto"
    on_ranks: dict[str, Any] = {"devices": num_ranks, "strategy": strategy, "val_check_interval": 1}
    trainer = make_actor_trainer(folder, 2, UseSampler(RandomSampler), *callbacks, **on_ranks)
    trainer.fit(module, make_data(folder, validation=write_sums(folder)))
    observer.store("after", torch.zeros(1))
    return record


@pytest.mark.processes
@pytest.mark.parametrize(
    ("data_parallel", "tensor_parallel", "callback"),
    [
        (2, 2, "with"),
        (1, 2, "without"),
        pytest.param(1, 1, "with", marks=pytest.mark.slow),
    ],
)
def test_heads_store_and_the_others_do_not(
    data_parallel: int, tensor_parallel: int, callback: str, tmp_path: Path
) -> None:
    model = save_model(tmp_path / "model", num_key_value_heads=2)
    records = finish(start_calls(run, data_parallel * tensor_parallel, tmp_path, model, tensor_parallel, callback))
    for rank, record in enumerate(records):
        is_head = rank % tensor_parallel == 0 or callback == "without"
        assert set(record) >= {*INITIALISED, *OTHERWISE}, rank
        found = {occasion: tuple(record[occasion]) for occasion in (*INITIALISED, *OTHERWISE)}
        # (was something stored, entries alive then, entries alive when the handles were gone)
        expected = {occasion: (is_head, int(is_head), 0) for occasion in INITIALISED}
        assert found == expected | dict.fromkeys(OTHERWISE, (True, 1, 0)), rank


@pytest.mark.processes
def test_single_process_stores_from_everywhere(tmp_path: Path) -> None:
    """No process group is initialised: in a rejected batch, a validation or before an exception as anywhere else."""
    model = save_model(tmp_path / "model")
    (record,) = finish([start_controller(run, tmp_path, model, 1, "with")])
    for occasion in (*INITIALISED, *OTHERWISE):
        assert record[occasion] == [True, 1, 0], occasion


# Every kind of mesh and loop


@contextmanager
def as_rank(rank: int, num_ranks: int = 4) -> Iterator[None]:
    """Be one rank of several, the others of which are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def heads(make_loop: Any, num_ranks: int = 4, **arguments: Any) -> list[int]:
    """The ranks that store within a loop."""
    found = []
    for rank in range(num_ranks):
        with as_rank(rank, num_ranks):
            callback = RemotizeOnHeadOnly(**arguments)
            loop = make_loop()
            loop.callbacks = [callback]
            call_hook(loop, PlainModule(), "setup", "fit")
            if stores_results():
                found.append(rank)
            assert callback.is_head in (stores_results(), None)
            call_hook(loop, PlainModule(), "teardown", "fit")
            assert stores_results()
    return found


def mesh(**sizes: int) -> DeviceMesh:
    """A mesh with these dimensions."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@pytest.mark.parametrize(
    ("sizes", "arguments", "expected"),
    [
        ({"data_parallel": 2, "tensor_parallel": 2}, {}, [0, 2]),  # Lightning's ModelParallelStrategy
        ({"dp_shard": 2, "tp": 2}, {}, [0, 2]),  # torchtitan, accelerate
        ({"tp": 2, "dp": 2}, {}, [0, 1]),
        ({"tp": 4}, {}, [0]),
        ({"dp": 4}, {}, [0, 1, 2, 3]),
        ({"dp": 2, "cp": 2}, {}, [0, 1, 2, 3]),  # parts of a sequence are not the same
        ({"replicas": 2, "columns": 2}, {"mesh_dims": ["columns"]}, [0, 2]),
        ({"x": 2, "y": 2}, {"mesh_dims": ["x", "y"]}, [0]),
    ],
)
def test_the_layout_of_a_mesh(sizes: dict[str, int], arguments: dict[str, Any], expected: list[int]) -> None:
    assert heads(lambda: SimpleNamespace(device_mesh=mesh(**sizes)), **arguments) == expected


class BeforeItsMesh:
    """A strategy of Lightning's while its processes have not met."""

    @property
    def device_mesh(self) -> DeviceMesh:
        raise RuntimeError("Accessing the device mesh before processes have initialized is not allowed.")


@pytest.mark.parametrize(
    "make_loop",
    [
        lambda: SimpleNamespace(strategy=SimpleNamespace(device_mesh=mesh(dp=2, tp=2))),
        lambda: SimpleNamespace(accelerator=SimpleNamespace(torch_device_mesh=mesh(dp=2, tp=2))),
        lambda: SimpleNamespace(strategy=BeforeItsMesh(), device_mesh=mesh(dp=2, tp=2)),
    ],
    ids=["strategy", "accelerator", "loop"],
)
def test_where_a_mesh_is_found(make_loop: Any) -> None:
    assert heads(make_loop) == [0, 2]


def test_modules_mesh_decides_the_head() -> None:
    with as_rank(1):
        callback = RemotizeOnHeadOnly()
        callback.setup(SimpleNamespace(), SimpleNamespace(device_mesh=mesh(dp=2, tp=2)), "fit")
        assert callback.is_head is False and not stores_results()


def test_neighbours_without_a_mesh() -> None:
    assert heads(SimpleNamespace, group_size=2) == [0, 2]
    assert heads(SimpleNamespace, group_size=4) == [0]
    assert heads(SimpleNamespace) == [0, 1, 2, 3]


def test_ranks_outside_mesh_store_their_tensors() -> None:
    assert heads(lambda: SimpleNamespace(device_mesh=DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",)))) == [0, 2, 3]


@pytest.mark.parametrize("loop", [SimpleNamespace(), SimpleNamespace(strategy=BeforeItsMesh())])
@pytest.mark.parametrize("arguments", [{}, {"group_size": 2}])
def test_without_ranks_everything_is_stored(loop: Any, arguments: dict[str, Any]) -> None:
    callback = RemotizeOnHeadOnly(**arguments)
    callback.setup(loop, PlainModule(), "fit")
    assert callback.is_head is None and store_tensors(torch.ones(1)) is not None


def test_other_ranks_store_their_own_tensors_alone() -> None:
    with as_rank(3):
        RemotizeOnHeadOnly(group_size=2).setup(SimpleNamespace(), PlainModule(), "fit")
        assert store_tensors({"loss": 1.0}) is None and store_tensors([torch.ones(1)]) is None and live_entries() == 0
        own = store_own_tensors({"x": torch.ones(1)})
        assert own["x"].owner.rank == 3 and live_entries() == 1


# In Lightning's Trainer


class Stores(RLCallback):
    """Notes at each update whether its results are stored."""

    def __init__(self) -> None:
        self.stored: list[bool] = []

    def on_update_end(self, trainer: Any, module: Any, batch: Any) -> None:
        self.stored.append(store_tensors(batch) is not None)


def test_an_exception_ends_it(tmp_path: Path) -> None:
    watch = Stores()
    trainer = make_trainer(tmp_path, RemotizeOnHeadOnly(group_size=2), watch)
    with as_rank(1, 2), pytest.raises(RuntimeError, match="out of luck"):
        trainer.fit(ObservedModule(fails_at=3), loader())
    assert watch.stored == [False, False] and stores_results()


def test_resume_keeps_nothing(tmp_path: Path) -> None:
    """After a resume, whether a process stores tensors depends on its current rank, not on the rank that saved."""
    callback, watch = RemotizeOnHeadOnly(group_size=2), Stores()
    with as_rank(1, 2):
        saved = save_run(tmp_path, callback, watch, max_steps=1)
    assert callback.state_dict() == {} and callback.is_head is None
    with as_rank(0, 2):
        again = make_trainer(tmp_path, RemotizeOnHeadOnly(group_size=2), watch, max_steps=2)
        again.fit(ObservedModule(), loader(), ckpt_path=saved)
    assert watch.stored == [False, True]


# Misuse


def test_group_size_must_divide_the_ranks() -> None:
    with as_rank(0), pytest.raises(ConfigError, match="group_size=3 does not divide 4 ranks"):
        RemotizeOnHeadOnly(group_size=3).setup(SimpleNamespace(), PlainModule(), "fit")


def test_dimensions_are_checked() -> None:
    callback = RemotizeOnHeadOnly(mesh_dims=["tq"])
    with pytest.raises(ConfigError, match="'tq' is no dimension, there is no device mesh"):
        callback.setup(SimpleNamespace(), PlainModule(), "fit")
    with as_rank(0), pytest.raises(ConfigError, match=r"'tq' is no dimension, there is a mesh with \['dp', 'tp'\]"):
        callback.setup(SimpleNamespace(device_mesh=mesh(dp=2, tp=2)), PlainModule(), "fit")
