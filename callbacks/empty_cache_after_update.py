"""Returns memory that PyTorch's allocator caches to the device while other processes need it."""

from time import perf_counter

from rlightning.callbacks.throughput import log_metrics
from rlightning.errors import check_rules
from rlightning.hooks import RunCallback
from rlightning.parallel import device as platform
from rlightning.protocols import Loop, StateDict


class EmptyCacheAfterUpdate(RunCallback):
    """Returns the caching allocator's unused blocks to the device after an update, and before an engine there wakes.

    Memory that an update has freed stays reserved by the process, so that an engine on the same device may lack memory
    when it wakes. With lengths that vary from step to step, blocks also fragment and grow. On the CPU, and in a
    controller, the callback does nothing.

    In a loop that is not Lightning's, the callback needs ``on_update_end`` after the update's tensors are freed, and
    ``on_weight_sync_start`` before an engine on the same device wakes. The device is found from the loop's ``device``,
    or the module's. ``module.log_dict`` gets the metrics, if it exists.

    Args:
        every_n_updates: empty the cache only after every n-th update, and at the following weight sync and wake.
        min_free_bytes: empty the cache only if fewer bytes are free on the device.
        max_reserved_ratio: empty the cache only if reserved memory exceeds allocated memory by this factor, such as
            1.1. With both conditions, one suffices; with neither, the cache is always emptied.
        before_wake: also empty the cache before weights are sent to an engine, and before the engine allocates its KV
            cache.

    Attributes:
        last: metrics of the last emptying after an update, before a sync, and before a wake, by name (docs/metrics.md).
    """

    runs_in = "workers"

    def __init__(
        self,
        *,
        every_n_updates: int = 1,
        min_free_bytes: int | None = None,
        max_reserved_ratio: float | None = None,
        before_wake: bool = True,
    ) -> None:
        super().__init__()
        check_rules(
            {
                f"every_n_updates={every_n_updates} must be at least 1. Use 1 to empty it after every update": (
                    every_n_updates >= 1
                ),
                f"min_free_bytes={min_free_bytes} must be at least 0. Leave it out to do without": (
                    min_free_bytes is None or min_free_bytes >= 0
                ),
                f"max_reserved_ratio={max_reserved_ratio} must be at least 1, where all is in use. Try 1.1": (
                    max_reserved_ratio is None or max_reserved_ratio >= 1
                ),
            }
        )
        self.every_n_updates = every_n_updates
        self.min_free_bytes = min_free_bytes
        self.max_reserved_ratio = max_reserved_ratio
        self.before_wake = before_wake
        self.last: dict[str, float] = {}
        self._num_updates = 0

    def state_dict(self) -> StateDict:
        """Return the number of updates, so that a resumed run empties the cache at the same ones."""
        return {"num_updates": self._num_updates}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore the number of updates."""
        super().load_state_dict(state_dict)
        self._num_updates = state_dict["num_updates"]

    def begin_run(self) -> None:
        """Reset the number of updates."""
        self.last, self._num_updates = {}, 0

    def on_update_end(self, trainer: Loop, module: object, batch: object) -> None:
        """Empty the cache after every n-th update."""
        self._num_updates += 1
        self._empty(trainer, module, "after_update")

    def on_weight_sync_start(self, trainer: Loop, module: object, weight_version: int) -> None:
        """Empty the cache before the engine wakes."""
        if self.before_wake:
            self._empty(trainer, module, "before_wake")

    def on_engine_wake(self, trainer: Loop, module: object) -> None:
        """Empty the cache after the weight transfer, before the engine allocates its KV cache."""
        if self.before_wake:
            self._empty(trainer, module, "before_kv_cache")

    def _empty(self, trainer: Loop, module: object, moment: str) -> None:
        if self._num_updates % self.every_n_updates:
            return
        device = platform.device_of(trainer, module)
        before = platform.memory_use(device)
        if before is None or not self.pays(before):
            return
        platform.synchronize(device)  # freeing waits for the device, which is not part of its cost
        begun = perf_counter()
        platform.empty_cache(device)
        cost_ms = 1000 * (perf_counter() - begun)
        after = platform.memory_use(device)
        assert after is not None
        metrics = {
            f"memory/{moment}/reserved_before_gib": before.reserved / platform.GIB,
            f"memory/{moment}/reserved_after_gib": after.reserved / platform.GIB,
            f"memory/{moment}/allocated_before_gib": before.allocated / platform.GIB,
            f"memory/{moment}/allocated_after_gib": after.allocated / platform.GIB,
            f"memory/{moment}/empty_cache_ms": cost_ms,
        }
        self.last |= metrics
        log_metrics(module, metrics)

    def pays(self, memory: platform.MemoryUse) -> bool:
        """Return whether to empty the cache: True if free or reserved memory passes a threshold, or none is set."""
        reasons = []
        if self.min_free_bytes is not None:
            reasons.append(memory.free < self.min_free_bytes)
        if self.max_reserved_ratio is not None:
            reasons.append(memory.reserved > self.max_reserved_ratio * memory.allocated)
        return any(reasons) if reasons else True
