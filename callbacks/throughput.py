"""Measures seconds by phase, tokens per second, MFU and memory."""

import math
import os

import torch
from lightning.pytorch import LightningModule
from transformers import PreTrainedConfig

from rlightning.lightning_internals import trainer_of
from rlightning.memory_plan.devices import peak_flops
from rlightning.models.counts import sequence_flops
from rlightning.parallel import device as platform
from rlightning.phases import PhaseTimer
from rlightning.protocols import (
    HasConfig,
    HasCosts,
    HasPlan,
    HasTensorParallelSize,
    LogsMetrics,
    Loop,
    adapter_of,
    has,
)
from rlightning.rpc.worker_limits import resident_bytes
from rlightning.types import RolloutBatch


class Throughput(PhaseTimer):
    """Measures each step: seconds by phase, tokens per second, memory, and the update's MFU.

    The names are those of docs/metrics.md: ``time/*``, ``throughput/*``, ``memory/*``. Metrics are logged with
    ``module.log_dict`` if it exists, and always kept in :attr:`last`.

    In a loop that is not Lightning's, the callback needs only the RL hooks; a step ends with ``on_update_end``. The
    module may be any object. If it has ``world_sum(tensor)``, tokens are counted over all ranks, and the callback must
    be on every rank. MFU needs the model's transformers configuration as ``module.model_config``, a CUDA device in the
    table of ``rlightning/memory_plan/devices.py``, and an update that synchronizes the device before ``on_update_end``,
    such as by reading a metric from it. MFU is this rank's. Each trajectory counts once, or with a ``module.plan`` (of
    RLModule) once in each epoch.

    Example::

        loop.callbacks.append(throughput := Throughput())
        call_hook(loop, policy, "on_rollout_start", prompts)  # rlightning.hooks.call_hook; and so on to on_update_end
        throughput.last["throughput/tokens_per_second"]

    Attributes:
        last: the metrics of the last step, by name.
    """

    runs_in = "workers"

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[str, float] = {}
        self._update_flops = 0.0

    def on_update_end(self, trainer: Loop, module: object, batch: RolloutBatch) -> None:
        """Stop the update's timer, and count its FLOPs."""
        if device_peak(platform.device_of(trainer, module)) is not None:
            self._update_flops += update_flops(module, batch)
        super().on_update_end(trainer, module, batch)

    def begin_run(self) -> None:
        """Reset the measurements of the last step."""
        super().begin_run()
        self.last = {}

    def drop_step(self) -> None:
        """Discard the measurements of an interrupted step."""
        super().drop_step()
        self._update_flops = 0.0

    def on_step_timed(self, trainer: Loop, module: object) -> None:
        """Compute and log the step's metrics; those of the step before that this step lacks, such as an update's, once
        as NaN.
        """
        absent = dict.fromkeys(self.last, math.nan)  # Lightning repeats each metric's last value until the epoch ends
        self.last = self.timings
        peak = device_peak(platform.device_of(trainer, module))
        if self._update_flops and peak is not None:
            self.last["throughput/update_mfu"] = self._update_flops / (self.phase_seconds["update"] * peak)
        self._update_flops = 0.0
        self.last |= memory_gib()
        log_metrics(module, absent | self.last)


def device_peak(device: torch.device | None) -> float | None:
    """Return the peak FLOP/s of a CUDA device; None for other or unknown devices."""
    if not platform.has_context() or (device is not None and device.type != "cuda"):
        return None
    return peak_flops(torch.cuda.get_device_name(device))


def update_flops(module: object, batch: RolloutBatch) -> float:
    """Return the FLOPs (:mod:`rlightning.models.counts`) of this rank's update on a batch; 0 for an unknown model.

    Args:
        module: a module with a ``model_config``; see :class:`Throughput`.
        batch: this rank's part. The output layer counts only for completions, and sequences that the update has skipped
            do not count.
    """
    if not has(module, HasConfig) or not isinstance(module.model_config, PreTrainedConfig):
        return 0.0
    epochs = module.plan.epochs_per_rollout if has(module, HasPlan) else 1
    num_ranks = module.tensor_parallel_size if has(module, HasTensorParallelSize) else 1
    if batch.is_skipped is not None:
        batch = batch.select((~batch.is_skipped).nonzero()[:, 0], "N")
    if has(module, HasCosts):  # the module knows which tokens sequences share
        flops = module.costs(batch)
    else:
        adapter = adapter_of(module)
        trained = 0 if adapter is None else adapter.num_parameters
        flops = sequence_flops(module.model_config, batch.lengths, batch.sampled_lengths, adapter_weights=trained)
    return float(flops.sum()) * epochs / num_ranks


def log_metrics(module: object, metrics: dict[str, float]) -> None:
    """Log metrics of a training step with the module's ``log_dict``, if it has one and can be used now.

    Without a Trainer or Fabric, a LightningModule's ``log_dict`` fails; in a validation or a prediction the metrics
    would count as results of that stage.
    """
    if isinstance(module, LightningModule):
        trainer = trainer_of(module)
        if module.fabric is not None or (trainer is not None and trainer.training):
            module.log_dict(metrics)
    elif has(module, LogsMetrics):
        module.log_dict(metrics)


def memory_gib() -> dict[str, float]:
    """Return this process's memory in GiB; the GPU's only if this process has initialised CUDA."""
    memory = {"memory/rss_gib": resident_bytes(os.getpid()) / platform.GIB}
    device_memory = platform.memory_use()
    if device_memory is not None:
        memory["memory/allocated_gib"] = device_memory.allocated / platform.GIB
        memory["memory/reserved_gib"] = device_memory.reserved / platform.GIB
        memory["memory/peak_gib"] = device_memory.peak / platform.GIB
    return memory
