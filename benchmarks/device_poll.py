"""How much of a device's memory is used by all processes together, watched from a thread."""

from threading import Event, Thread
from typing import Any, NamedTuple

import torch
from probes import CSVTrace, reset_peak

from rlightning.parallel.device import memory_use

POLL_SECONDS = 0.02


class Peak(NamedTuple):
    """The most memory of a device that was seen in use, in bytes, by all processes together."""

    used: int
    """All that is not free."""
    needed: int
    """Without the unused blocks that this process's allocator gives back when memory is short."""


class DevicePoll:
    """Keeps the most memory of the device that was ever seen in use, by whatever process.

    Args:
        device: to watch; one that is no GPU uses nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._most = Peak(0, 0)
        self._reserved = 0
        self._stop = Event()
        self._thread = Thread(target=self._watch, daemon=True)
        self._thread.start()

    def take(self) -> Peak:
        """The most since the last call."""
        self._look()
        most, self._most = self._most, Peak(0, 0)
        return most

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self._look()

    def _look(self) -> None:
        use = memory_use(self.device)
        if use is not None:
            used, unused = use.total - use.free, use.reserved - use.allocated
            is_steady = use.reserved == self._reserved  # no blocks were given back between the two readings
            self._most = Peak(max(self._most.used, used), max(self._most.needed, (used - unused) * is_steady))
            self._reserved = use.reserved


class DevicePeaks(CSVTrace):
    """Writes for each phase of a step the most memory in use, in bytes: tensors of this process, and the device's.

    What is between generating, sending weights and the update is ``rest``.
    """

    def __init__(self) -> None:
        super().__init__("peaks", ["phase", "allocated", "used", "needed"])
        self._phase = "rest"
        self._poll: DevicePoll | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin to watch, before the engine is there."""
        self._poll = DevicePoll(trainer.strategy.root_device)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stop watching."""
        if self._poll is not None:
            self._poll.close()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a step; what was before it belongs to no phase."""
        super().on_train_batch_start(trainer, module, batch, batch_idx)
        self._enter(trainer, module, "rest")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the step."""
        self._enter(trainer, module, "rest")

    def on_rollout_start(self, trainer: Any, module: Any, prompts: Any) -> None:
        """Begin to generate."""
        self._enter(trainer, module, "generate")

    def on_weight_sync_start(self, trainer: Any, module: Any, weight_version: int) -> None:
        """Begin to send weights."""
        self._enter(trainer, module, "sync")

    def on_weight_sync_end(self, trainer: Any, module: Any, weight_version: int) -> None:
        """Go on generating."""
        self._enter(trainer, module, "generate")

    def on_rollout_end(self, trainer: Any, module: Any, batch: Any) -> None:
        """The completions are there."""
        self._enter(trainer, module, "rest")

    def on_update_start(self, trainer: Any, module: Any, batch: Any) -> None:
        """Begin to update."""
        self._enter(trainer, module, "update")

    def on_update_end(self, trainer: Any, module: Any, batch: Any) -> None:
        """End of updating."""
        self._enter(trainer, module, "rest")

    def _enter(self, trainer: Any, module: Any, phase: str) -> None:
        assert self._poll is not None
        use, peak = memory_use(module.device), self._poll.take()
        if self.step:
            self.write(trainer, self._phase, use.peak if use else 0, *peak)
        reset_peak(module.device)
        self._phase = phase
