"""Seconds by phase, tokens per second, memory."""

import resource
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule

from rlightning.distributed import platform
from rlightning.phases import PhaseTimer

_GIB = 2**30


class Throughput(PhaseTimer):
    """Measures each step: seconds by phase, tokens per second, memory.

    The names are those of docs/metrics.md: ``time/*``, ``throughput/tokens_per_second``, ``memory/*``. They are
    logged with ``module.log_dict`` where the module has it, and kept in :attr:`last` in any case.

    From a loop that is not Lightning's it needs the RL hooks, nothing else: the step ends with ``on_update_end``.
    The module may be any object; with an ``world_sum(tensor)`` tokens are counted over all ranks, and then the
    callback must be on every rank.

    Example::

        loop.callbacks.append(throughput := Throughput())
        fire(loop, policy, "on_rollout_start", prompts)  # rlightning.hooks.fire; and so on to on_update_end
        throughput.last["throughput/tokens_per_second"]

    Attributes:
        last: the metrics of the last step, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[str, float] = {}

    def on_step_timed(self, trainer: Any, module: Any) -> None:
        """Put the step's numbers together and log them."""
        self.last = {"time/step": self.step_seconds}
        self.last |= {f"time/{phase}": seconds for phase, seconds in self.phase_seconds.items()}
        if self.num_tokens:
            self.last["throughput/tokens_per_second"] = self.num_tokens / max(self.step_seconds, 1e-9)
        self.last |= memory_gib()
        log_metrics(module, self.last)


def log_metrics(module: Any, metrics: dict[str, float]) -> None:
    """Log a callback's metrics of a training step with the module's ``log_dict``, where it has one and that listens.

    A LightningModule has it also outside a Trainer and outside Fabric; and within a validation or a prediction, the
    names would be taken for results of that.
    """
    if isinstance(module, LightningModule):
        is_listening = module.fabric is not None or (module._trainer is not None and module.trainer.training)
    else:
        is_listening = hasattr(module, "log_dict")
    if is_listening:
        module.log_dict(metrics)


def memory_gib() -> dict[str, float]:
    """Memory of this process in GiB; of the GPU only if it uses one already."""
    memory = {"memory/rss_gib": _resident_bytes() / _GIB}
    device_memory = platform.memory_use()
    if device_memory is not None:
        memory["memory/allocated_gib"] = device_memory.allocated / _GIB
        memory["memory/reserved_gib"] = device_memory.reserved / _GIB
        memory["memory/peak_gib"] = device_memory.peak / _GIB
    return memory


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    # Without /proc only the highest value so far is to be had: bytes on macOS, KiB elsewhere.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
