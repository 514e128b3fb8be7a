"""Seconds by phase, tokens per second, memory."""

import resource
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule

from rlightning.phases import PhaseTimer

_GIB = 2**30


class Throughput(PhaseTimer):
    """Measures each step: seconds by phase, tokens per second, memory.

    The names are those of docs/metrics.md: ``time/*``, ``throughput/tokens_per_second``, ``memory/*``. They are
    logged with ``module.log_dict`` where the module has it, and kept in :attr:`last` in any case.

    From a loop that is not Lightning's it needs the RL hooks, nothing else: the step ends with ``on_update_end``.
    The module may be any object; with an ``all_sum(tensor)`` tokens are counted over all ranks, and then the
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
        if _can_log(module):
            module.log_dict(self.last)


def _can_log(module: Any) -> bool:
    """A LightningModule has ``log_dict`` also where nobody listens: outside a Trainer and outside Fabric."""
    if isinstance(module, LightningModule):
        return module._trainer is not None or module.fabric is not None
    return hasattr(module, "log_dict")


def memory_gib() -> dict[str, float]:
    """Memory of this process in GiB; of the GPU only if it uses one already: asking would create a context."""
    memory = {"memory/rss_gib": _resident_bytes() / _GIB}
    if torch.cuda.is_initialized():
        memory["memory/allocated_gib"] = torch.cuda.memory_allocated() / _GIB
        memory["memory/reserved_gib"] = torch.cuda.memory_reserved() / _GIB
        memory["memory/peak_gib"] = torch.cuda.max_memory_allocated() / _GIB
    return memory


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    # Without /proc only the highest value so far is to be had: bytes on macOS, KiB elsewhere.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
