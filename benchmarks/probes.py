"""Callbacks that the benchmarks put into a run: they vary the work, and write down what it takes."""

import csv
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from rlightning.callbacks import VLLMRollout
from rlightning.hooks import RLCallback
from rlightning.models.counts import build_empty, cache_by_config, num_active_experts, num_experts
from rlightning.parallel.device import synchronize
from rlightning.run_dir import run_dir


def reset_peak(device: torch.device) -> None:
    """Begin to measure the most that this process allocates of a device."""
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats(device)


@cache_by_config
def count_active(config: Any) -> int:
    """All weights that a token is computed with: tied ones once, the embedding's too, of experts the active ones."""
    policy = build_empty(config)
    share = num_active_experts(config) / num_experts(config) if num_experts(config) else 1.0
    experts = sum(p.numel() for name, p in policy.named_parameters() if "experts" in name.split("."))
    return round(sum(p.numel() for p in policy.parameters()) - experts * (1 - share))


def six_n_flops(config: Any, num_tokens: int) -> float:
    """The common estimate ``6 N T`` of an update's operations, without attention, for ``T`` tokens."""
    return 6.0 * count_active(config) * num_tokens


class CSVTrace(RLCallback):
    """Base of callbacks that write rows to a file of their own in the run's folder, one a rank.

    Each row is on disk when :meth:`write` returns: a run that dies of what is measured leaves its trace.

    Args:
        name: of the file, which gets the rank's number.
        columns: their names, after ``step``.
    """

    def __init__(self, name: str, columns: Sequence[str]) -> None:
        super().__init__()
        self.name, self.columns = name, ["step", *columns]
        self.step = 0

    def write(self, trainer: Any, *values: Any) -> None:
        """Add one row."""
        path = run_dir(trainer) / f"{self.name}-{trainer.global_rank}.csv"
        is_new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.writer(file)
            if is_new:
                writer.writerow(self.columns)
            writer.writerow([self.step, *values])

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Count rollout steps from 1."""
        self.step = trainer.global_step + 1


class LimitMemory(RLCallback):
    """Makes the trainer's GPU smaller, for PyTorch and for the plan.

    Args:
        share: of its memory that may be used.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called before a model is loaded or an engine started."""
        torch.cuda.set_per_process_memory_fraction(self.share, trainer.strategy.root_device)


class RaiseStaleness(RLCallback):
    """Changes ``rollout.max_staleness`` before steps; the run's configuration has the largest bound.

    Args:
        bounds: by the number of steps before.
    """

    def __init__(self, bounds: dict[int, int]) -> None:
        super().__init__()
        self.bounds = bounds

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Set the bound, if it changes with this step, where the rollout and the loss read it."""
        bound = self.bounds.get(trainer.global_step)
        if bound is None:
            return
        (rollout,) = (one for one in trainer.callbacks if isinstance(one, VLLMRollout))
        rollout.max_staleness = rollout.in_flight.max_staleness = bound
        rollout.options = replace(rollout.options, max_staleness=bound)
        module.choose_correction(bound)


class SyncTrace(CSVTrace):
    """Writes the seconds of each weight sync: in all, and until an engine that sleeps has the weights, yet unverified.

    Args:
        verify_every: the rollout's, to tell the syncs that were verified.
    """

    def __init__(self, verify_every: int = 0) -> None:
        super().__init__("sync", ["seconds", "seconds_until_wake", "is_verified"])
        self.verify_every = verify_every
        self._num_syncs = 0
        self._begun = 0.0
        self._until_wake: float | None = None

    def on_weight_sync_start(self, trainer: Any, module: Any, weight_version: int) -> None:
        """Start the clock, the update's queued work being done."""
        synchronize(module.device)
        self._begun, self._until_wake = perf_counter(), None

    def on_engine_wake(self, trainer: Any, module: Any) -> None:
        """The engine has the weights."""
        self._until_wake = perf_counter() - self._begun

    def on_weight_sync_end(self, trainer: Any, module: Any, weight_version: int) -> None:
        """Stop the clock."""
        synchronize(module.device)
        is_verified = self.verify_every > 0 and self._num_syncs % self.verify_every == 0
        self._num_syncs += 1
        self.write(trainer, perf_counter() - self._begun, self._until_wake, int(is_verified))
