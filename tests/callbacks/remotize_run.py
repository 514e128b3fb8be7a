"""Runs that store something wherever they can, under FSDP with tensor parallelism, on every rank; or without any."""

import gc
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from equivalence_run import RandomGenerator
from lightning.pytorch import Callback, LightningModule
from tiny import UseGenerator, bare_trainer, make_algorithm, make_data, make_trainer, write_sums
from torch.utils.data import DataLoader

from rlightning.algorithms import GRPO
from rlightning.callbacks import RemotizeOnHeadOnly
from rlightning.controller.rtensor import store_own_tensors, store_tensors
from rlightning.controller.tensor_store import live_entries
from rlightning.hooks import RLCallback
from rlightning.parallel.fsdp import FSDP, MeshStrategy
from rlightning.types import RolloutBatch

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
    strategy: Any = MeshStrategy(tensor_parallel_size=size) if ranks else "auto"
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
    trainer = make_trainer(
        folder,
        2,
        UseGenerator(RandomGenerator),
        *callbacks,
        devices=num_ranks,
        strategy=FSDP(tensor_parallel_size=size) if ranks else "auto",
        val_check_interval=1,
    )
    trainer.fit(module, make_data(folder, validation=write_sums(folder)))
    observer.store("after", torch.zeros(1))
    return record
