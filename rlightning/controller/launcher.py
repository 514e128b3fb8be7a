"""Runs a stage in the controller: without CUDA, and again from the last checkpoint when a worker has died."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch.trainer.trainer as trainer_module
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.utilities.seed import isolate_rng

from rlightning.atomic_save import find_saved
from rlightning.controller.cluster import check_own_node
from rlightning.controller.commands import WorkerDiedError
from rlightning.parallel.checkpoint_io import is_whole

if TYPE_CHECKING:
    from rlightning.controller.ray_controller import RayController

log = logging.getLogger(__name__)

CKPT_PATH = 4
"""The place of the checkpoint in the arguments of Lightning's fit: module, two loaders, data, checkpoint ..."""


class ControllerLauncher(_Launcher):
    """Starts no process; the strategy does.

    Args:
        strategy: of the controller.
    """

    def __init__(self, strategy: "RayController") -> None:
        self.strategy = strategy

    @property
    def is_interactive_compatible(self) -> bool:
        """Also in a notebook."""
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Run ``function``, Lightning's implementation of a stage."""
        self.strategy.saved.clear()
        with without_cuda_rng(), naming_lost_cluster():
            for restart in range(1, self.strategy.max_restarts + 1):
                try:
                    return function(*args, **kwargs)
                except WorkerDiedError as error:
                    check_own_node()
                    if trainer is None or trainer.state.fn != "fit":
                        raise
                    path = find_last(self.strategy.saved) or args[CKPT_PATH]
                    if path is None:
                        raise
                    log.warning("%s Restart %d of %d, from %s.", str(error), restart, self.strategy.max_restarts, path)
                    prepare_again(trainer)
                    args = with_checkpoint(args, path)
            return function(*args, **kwargs)

    def kill(self, signum: int) -> None:
        """There is nobody to send a signal to: workers end with this process."""


@contextmanager
def naming_lost_cluster() -> Iterator[None]:
    """Within, have whatever Ray raises because the run's own cluster is gone say that."""
    try:
        yield
    except Exception:
        check_own_node()
        raise


@contextmanager
def without_cuda_rng() -> Iterator[None]:
    """Have Lightning leave CUDA's random state alone, which it asks all devices for as a fit begins."""
    trainer_module.isolate_rng = partial(isolate_rng, include_cuda=False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        trainer_module.isolate_rng = isolate_rng  # type: ignore[attr-defined]


def find_last(saved: Sequence[Path]) -> Path | None:
    """The last checkpoint that is whole and still there.

    Args:
        saved: as they were written; what else is beside them may be another run's, or of steps that were rolled back.
    """
    return next(filter(is_whole, map(find_saved, reversed(saved))), None)


def prepare_again(trainer: Trainer) -> None:
    """Undo what a stage that was cut short has begun, for another attempt; callbacks know nothing of it."""
    trainer._teardown()
    trainer.training = True


def with_checkpoint(args: tuple[Any, ...], path: Path | str) -> tuple[Any, ...]:
    """The arguments of Lightning's fit with another checkpoint."""
    return (*args[:CKPT_PATH], str(path), *args[CKPT_PATH + 1 :])
