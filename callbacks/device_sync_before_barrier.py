"""Synchronizes each rank's device before barriers, so that no rank continues before all devices have finished."""

import functools
import logging
from collections.abc import Callable, Iterator

import torch

from rlightning.errors import ConfigError
from rlightning.hooks import RLCallback
from rlightning.parallel import device as platform
from rlightning.parallel.barrier import add_barrier_hook, remove_barrier_hook
from rlightning.parallel.strategy import ConnectedRanks
from rlightning.protocols import HasAccelerator, HasStrategy, Loop, has

log = logging.getLogger(__name__)


class DeviceSyncBeforeBarrier(RLCallback):
    """Makes each rank synchronize its device before it enters a barrier.

    A barrier waits for processes, but their work on devices may still run when the barrier returns. A process that then
    reads another rank's memory, files or engine may find them half-written. With this callback all device work that any
    rank had queued before the barrier is finished when the barrier returns. On the CPU, and in a controller, the
    callback does nothing.

    The callback applies to ``rlightning.parallel.barrier``, which rlightning's strategies use, and to the loop's own
    barrier: ``strategy.barrier`` of Lightning's Trainer and of a Fabric, accelerate's ``wait_for_everyone``
    (transformers' ``Trainer``), or a ``barrier`` attribute of a user's object. In a loop that is not Lightning's, call
    ``setup(loop, module, "fit")`` and, at the end, ``teardown(loop, module, "fit")``, which restores the barriers. The
    loop must call one of these barriers, not ``torch.distributed.barrier`` directly.

    Args:
        device: the device to synchronize, such as "cuda:1"; by default the loop's or the module's.
    """

    runs_in = "workers"

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        try:
            self.device = None if device is None else torch.device(device)
        except RuntimeError as error:
            raise ConfigError(f"device='{device}' is none. Name one, such as cuda:0, or leave it out.") from error
        self._undo: list[Callable[[], None]] = []
        self._device: torch.device | None = None

    def setup(self, trainer: Loop, module: object, stage: str) -> None:
        """Make every barrier synchronize the device first, until :meth:`teardown`."""
        if self._undo:
            return
        self._device = self.device or platform.device_of(trainer, module)
        for owner, name in _own_barriers(trainer):
            self._wrap_barrier(owner, name)
        add_barrier_hook(self._wait)
        self._undo.append(functools.partial(remove_barrier_hook, self._wait))

    def teardown(self, trainer: Loop, module: object, stage: str) -> None:
        """Undo :meth:`setup`: barriers no longer synchronize the device."""
        self._leave_barriers()

    def on_exception(self, trainer: Loop, module: object, exception: BaseException) -> None:
        """Undo :meth:`setup`, because ``teardown`` is not called after an exception."""
        self._leave_barriers()

    def _leave_barriers(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _wait(self) -> None:
        platform.synchronize(self._device)

    def _wrap_barrier(self, owner: object, name: str) -> None:
        """Wrap ``owner.name`` so that it synchronizes the device first, until ``teardown``."""
        barrier = getattr(owner, name)  # the name depends on the kind of loop
        if hasattr(barrier, "waits_for_device"):
            self._leave_barriers()
            raise ConfigError(
                f"{type(owner).__name__}.{name} waits for the device already: there are two DeviceSyncBeforeBarrier. "
                "Keep one of them."
            )

        @functools.wraps(barrier)
        def synchronize_and_wait(*args: object, **kwargs: object) -> object:
            self._wait()
            return barrier(*args, **kwargs)

        synchronize_and_wait.waits_for_device = True  # type: ignore[attr-defined]
        is_own_attribute = name in vars(owner)
        setattr(owner, name, synchronize_and_wait)
        self._undo.append(
            functools.partial(setattr, owner, name, barrier)
            if is_own_attribute
            else functools.partial(delattr, owner, name)
        )


def _own_barriers(trainer: Loop) -> Iterator[tuple[object, str]]:
    """Yield the object and attribute of each barrier of the loop itself; none for rlightning's strategies."""
    strategy = trainer.strategy if has(trainer, HasStrategy) else None
    if isinstance(strategy, ConnectedRanks):
        return
    if hasattr(strategy, "barrier"):
        yield strategy, "barrier"
    elif has(trainer, HasAccelerator) and hasattr(trainer.accelerator, "wait_for_everyone"):
        from accelerate import PartialState

        yield PartialState(), "wait_for_everyone"  # every barrier of accelerate calls this shared object
    elif hasattr(trainer, "barrier"):
        yield trainer, "barrier"
