"""Frees as much of the trainer's memory as an engine on the same device lacks when it wakes."""

import logging

from rlightning.callbacks.offload_during_rollout import OffloadDuringRollout
from rlightning.parallel import device as platform
from rlightning.parallel.device import GIB
from rlightning.protocols import Loop

log = logging.getLogger(__name__)

MARGIN_BYTES = 1 << 30
"""Bytes that are kept free in addition to the engine's, for weights that the trainer gathers meanwhile."""
NOISE_BYTES = 64 << 20
"""Changes of other processes' memory up to this many bytes are not taken for an engine's sleep or start."""


class MakeRoomForEngine(OffloadDuringRollout):
    """Frees memory of the trainer for an engine on the same device when it wakes, if not enough is free.

    First PyTorch's allocator returns its cache to the device, then optimizer state and gradients are offloaded to
    page-locked host memory until the engine sleeps, and last the parameters, after the engine has received them. The
    engine's memory is measured when it first goes to sleep. ``VLLMRollout`` calls the hooks by itself; other loops need
    ``on_weight_sync_start`` before the engine wakes, ``on_engine_wake`` after it has the weights and before it
    allocates its KV cache, ``on_weight_sync_end`` when it is awake, and ``on_engine_sleep`` when it has freed its
    memory. Optimizers and parameters are found as by :class:`OffloadDuringRollout`. On the CPU the callback does
    nothing.

    Attributes:
        engine_bytes: number of bytes that the engine frees when it sleeps; 0 until it has slept.
    """

    moved_each_step = frozenset[str]()
    """No parts: the memory plan computes itself which parts are offloaded to make room."""

    def __init__(self) -> None:
        super().__init__(parameters=True)
        self.engine_bytes = 0
        self._others_awake = 0
        self._logged: set[str] = set()

    def begin_run(self) -> None:
        """Reset the measurements, since another run has another engine."""
        super().begin_run()
        self.engine_bytes = self._others_awake = 0
        self._logged.clear()

    def on_weight_sync_end(self, trainer: Loop, module: object, weight_version: int) -> None:
        """Measure the memory that other processes use while the engine is awake."""
        memory = platform.memory_use(platform.device_of(trainer, module))
        if memory is not None:
            self._others_awake = max(self._others_awake, _used_by_others(memory))

    def on_engine_sleep(self, trainer: Loop, module: object) -> None:
        """Measure how much memory the engine has freed, and move offloaded tensors back."""
        memory = platform.memory_use(platform.device_of(trainer, module))
        if memory is not None and self._others_awake:
            self.engine_bytes = max(self.engine_bytes, self._others_awake - _used_by_others(memory))
        super().on_engine_sleep(trainer, module)

    def is_needed(self, trainer: Loop, module: object) -> bool:
        """Return whether tensors must be offloaded for the engine; if memory is short, empty PyTorch's cache first."""
        device = platform.device_of(trainer, module)
        memory = platform.memory_use(device)
        if memory is None or not self.engine_bytes or _missing_bytes(memory, self._others_awake) <= 0:
            return False
        platform.empty_cache(device)
        kept, wanted = (memory.reserved - memory.allocated) / GIB, self.engine_bytes / GIB
        self._log_once("what PyTorch keeps for later", f"({kept:.1f} GiB now) makes room for its {wanted:.1f} GiB")
        memory = platform.memory_use(device)
        assert memory is not None
        return _missing_bytes(memory, self._others_awake) > 0

    def _offload_state(self, trainer: Loop, module: object) -> None:
        before = self.num_bytes
        super()._offload_state(trainer, module)
        self._log_offload("optimizer state and gradients wait", before)

    def _offload_parameters(self, trainer: Loop, module: object) -> None:
        before = self.num_bytes
        super()._offload_parameters(trainer, module)
        self._log_offload("parameters, which it has, wait", before)

    def _log_offload(self, what: str, before: int) -> None:
        moved = self.num_bytes - before
        if moved > 0:
            self._log_once(what, f"in the host's memory until it sleeps ({moved / GIB:.1f} GiB now)")

    def _log_once(self, what: str, how: str) -> None:
        """Log, only once, what is done from now on to free memory for the engine."""
        if what not in self._logged:
            self._logged.add(what)
            log.info("When the engine wakes, %s %s.", what, how)


def _used_by_others(memory: platform.MemoryUse) -> int:
    """Return the bytes that are used outside of this process's allocator, such as by engines and CUDA contexts."""
    return memory.total - memory.free - memory.reserved


def _missing_bytes(memory: platform.MemoryUse, others_awake: int) -> int:
    """Return how many bytes other processes lack to use as much memory as when the engine was awake."""
    still = others_awake - _used_by_others(memory)
    return still + MARGIN_BYTES - memory.free if still > NOISE_BYTES else 0
