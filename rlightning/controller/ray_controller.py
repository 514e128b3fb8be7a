"""RayController: the strategy with Lightning's Trainer in a process without a device, and the actor in Ray workers.

::

    controller: Trainer.fit                          workers 0 .. n-1: Trainer.fit under worker_strategy
    data, loggers, ModelCheckpoint, tables           actor, optimizer, engine, callbacks with a device
      training_step   --- Train(share) ---------->     RLModule.training_step, with all hooks around it
      RL hooks        <-- HookCall(hook, handles) ---     rlightning.hooks.call_hook
      metrics         <-- StepResult -------------     module.log
      save_checkpoint --- Save(loops, callbacks) ->    worker_strategy.save_checkpoint
"""

import copy
import logging
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.strategies import Strategy

from rlightning.controller.cluster import Resources, import_ray, join_cluster
from rlightning.controller.driver import DriverContext, check_names
from rlightning.controller.hook_relay import wanted_hooks, warn_of_unrelayed
from rlightning.controller.remote_module import ControllerModule
from rlightning.controller.strategy import ControllerLauncher, ControllerStrategy
from rlightning.controller.worker_group import WorkerGroup
from rlightning.errors import check_rules
from rlightning.lightning_internals import given_checkpoint_io
from rlightning.parallel.cpu_group import DEFAULT_BARRIER_TIMEOUT
from rlightning.parallel.execution_mode import check_execution_mode, resolve_execution_mode
from rlightning.parallel.stacks import run_folder, start_recorder
from rlightning.parallel.strategy import ConnectedRanks
from rlightning.parallel.strategy_names import CLASSES, check_strategy
from rlightning.protocols import HasPromptLimit, generates, has
from rlightning.seeds import run_seed

if TYPE_CHECKING:
    from rlightning.controller.worker_trainer import WorkerConfig

log = logging.getLogger(__name__)

DEVICE_CALLBACKS = (ModelSummary,)
"""Lightning's own callbacks that need the actor, and therefore run in the workers."""


class RowlessData(Protocol):
    """A data module with ``without_rows()``, by which the controller gets a copy without prompts to send to workers."""

    def without_rows(self) -> LightningDataModule:
        """Return a copy without rows; workers receive their prompts from the controller by commands."""


class ActorEngines(Protocol):
    """Engines as Ray actors, which outlive the training workers.

    Attributes:
        callback: the rollout callback that uses them.
        run_key: key with which trainers authenticate; None until the engines are started.
        runs: Ray's references to the engines' running calls, which end only with an exception.
    """

    callback: Callback
    run_key: str | None
    runs: list[Any]

    def check_room(self, num_workers: int, each: dict[str, float]) -> None:
        """Raise a ConfigError if the cluster lacks resources for the engines in addition to the workers."""

    def start(
        self, module: LightningModule, max_prompt_tokens: int | None, folder: Path, driver: DriverContext
    ) -> Callback:
        """Start the engines if they do not run; return a copy of the rollout callback with the engines' addresses."""

    def close(self) -> None:
        """End the engines."""


class EngineCallback(Protocol):
    """A rollout callback with ``ray_engines()``, which returns its engines if they are to run in Ray actors."""

    def ray_engines(self) -> ActorEngines | None:
        """Return the engines in Ray actors; None if they run elsewhere."""


class PlacedCallback(Protocol):
    """A callback whose ``runs_in`` is "workers" or "controller"; callbacks without it run in the controller."""

    runs_in: str


class RayController(ControllerStrategy):
    """Trains in Ray workers, one for each device; this process only controls them and uses no device.

    ``trainer.strategy: rlightning.controller.RayController``, in short ``ray``. Everything else in the YAML stays:
    ``trainer.accelerator`` and ``trainer.devices`` apply to the workers. Callbacks run in this process or in the
    workers, according to ``runs_in``. The same data gives the same weights as ``worker_strategy`` without a controller.
    See docs/controller.md.

    Args:
        num_workers: number of ranks, each a process with its own device. None for ``trainer.devices`` x
            ``trainer.num_nodes``, or without these for the number of the cluster's GPUs.
        worker_strategy: strategy of the workers, by name or with its arguments.
        accelerator: accelerator of the workers; None for ``trainer.accelerator``, by default "auto".
        address: address of a Ray cluster; "auto" for the one of which this machine is a node. None for RAY_ADDRESS, as
            in a submitted job, or without it for a new cluster on this machine.
        cpus_per_worker: cores that Ray reserves for each worker.
        gpus_per_worker: GPUs that Ray reserves for each worker; None for one, if there are any.
        placement: Ray's strategy to place workers on nodes: PACK, SPREAD, STRICT_PACK, or STRICT_SPREAD.
        max_restarts: maximum number of restarts of the workers, from the last checkpoint, after one has died.
        max_store_bytes: maximum bytes of a worker's stored tensors (:mod:`~rlightning.controller.rtensor`) at a time;
            None for only Ray's own limit.
        env: names of environment variables that are passed to workers and engines. A cluster that is started for the
            run inherits all variables.
        ray_options: additional arguments of ``ray.init``.
    """

    def __init__(
        self,
        *,
        num_workers: int | None = None,
        worker_strategy: Strategy | str = "fsdp2",
        accelerator: str | None = None,
        address: str | None = None,
        cpus_per_worker: float = 1.0,
        gpus_per_worker: float | None = None,
        placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK",
        max_restarts: int = 0,
        max_store_bytes: int | None = None,
        env: Sequence[str] = (),
        ray_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.num_workers = num_workers
        self.worker_strategy = (
            CLASSES.get(worker_strategy, worker_strategy) if isinstance(worker_strategy, str) else worker_strategy
        )
        self.worker_accelerator = accelerator
        self.address, self.ray_options = address, ray_options or {}
        self.resources = Resources(cpus=cpus_per_worker, gpus=gpus_per_worker, placement=placement)
        self.max_restarts, self.max_store_bytes = max_restarts, max_store_bytes
        self.env = [env] if isinstance(env, str) else list(env)
        self._driver: DriverContext | None = None
        self._settled: tuple[int, dict[str, float]] | None = None
        self._standing: ControllerModule | None = None
        self._data: LightningDataModule | None = None
        self._engines: ActorEngines | None = None

    # Before anything starts

    def take_devices(self, accelerator: object, devices: object, num_nodes: int) -> None:
        """Store the Trainer's device arguments, for the workers; called before the Trainer is constructed."""
        if self.worker_accelerator is None and isinstance(accelerator, str):
            self.worker_accelerator = accelerator
        per_node = len(devices) if isinstance(devices, list) else devices
        if self.num_workers is None and str(per_node).isdecimal():  # "auto": the cluster decides
            self.num_workers = int(str(per_node)) * num_nodes

    def _configure_launcher(self) -> None:
        """Check the settings and create the launcher; called before any process is started or device is used."""
        if self.accelerator is not None and not isinstance(self.accelerator, CPUAccelerator):
            self.accelerator = CPUAccelerator()
        self.check()
        self._launcher = ControllerLauncher(self)

    def check(self) -> None:
        """Raise a ConfigError if arguments are invalid or contradict the process's mode, or Ray is missing."""
        nested, own_name = self.worker_strategy, f"{RayController.__module__}.{RayController.__qualname__}"
        check_rules(
            {
                f"num_workers={self.num_workers} must be at least 1. Leave it out for one a device": self.num_workers
                is None
                or self.num_workers >= 1,
                f"max_restarts={self.max_restarts} must be at least 0. Use 0 for none": self.max_restarts >= 0,
                f"max_store_bytes={self.max_store_bytes} must be positive. Leave it out for no limit": (
                    self.max_store_bytes is None or self.max_store_bytes > 0
                ),
                "worker_strategy is a RayController itself, but workers take commands from one controller. Use "
                "rlightning.parallel.FSDP or rlightning.parallel.DDP": nested != own_name
                and not isinstance(nested, RayController),
            }
        )
        if isinstance(nested, str) and "." not in nested:
            check_strategy(nested)
        self.resources.check()
        check_names(self.env)
        check_execution_mode(strategy=self)
        import_ray()

    def setup_environment(self) -> None:
        """Set this process's execution mode, before any device is used."""
        resolve_execution_mode(strategy=self)
        super().setup_environment()

    def count_workers(self) -> int:
        """Return the number of workers; connects to the cluster, which determines the default."""
        is_new = join_cluster(self.address, self.ray_options)
        if self._driver is None:
            self._driver = DriverContext.here(self.env, starts_cluster=is_new)
        if self._settled is None:
            self._settled = self.resources.settle(self.num_workers, self.worker_accelerator or "auto")
        return self._settled[0]

    def connect(self, model: LightningModule) -> None:
        """Give the Trainer a ControllerModule in place of the user's module, which is kept for the workers.

        Also connects to the Ray cluster, and takes the callbacks that run in workers from the Trainer. Raises a
        ConfigError if the cluster lacks resources.
        """
        # Lightning has already replaced the old module by the new one.
        standing, trainer = self._standing, model.trainer
        listed: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        here = [callback for callback in listed if not belongs_to_workers(callback)]
        is_same = standing is not None and (model is standing or model is standing.configured)
        if standing is not None and is_same and self.group is not None:
            super().connect(standing)  # another stage of the trainer with the same weights
            return
        if standing is not None and is_same:
            model = standing.configured  # workers have died; engines in separate actors have not
        else:
            self.close()
            warn_of_unrelayed(here)
        module = ControllerModule(model, self)
        module.trainer = trainer
        self._standing = module
        self.trainer = trainer
        self.worker_callbacks += [callback for callback in listed if belongs_to_workers(callback)]
        trainer.callbacks = here  # type: ignore[attr-defined]
        self._engines = self._engines or find_engines(self.worker_callbacks)
        self.count_workers()
        if self._engines is not None and self._settled is not None:
            self._engines.check_room(*self._settled)
        self._data = copy.copy(trainer.datamodule)  # type: ignore[attr-defined]
        if self._data is not None:
            self._data.trainer = None  # the trainer cannot be pickled, and prompts are not read yet
        super().connect(module)

    # The workers

    def setup(self, trainer: Trainer) -> None:
        """Start the workers, and the Trainer's stage in them; workers of an earlier stage are used again.

        Called by Lightning after the data module has checked the data.
        """
        assert self.accelerator is not None and self._settled is not None and self._driver is not None
        self.accelerator.setup(trainer)
        recorder = start_recorder(run_folder(trainer.default_root_dir), "controller")
        recorder.forward = self._record_workers
        config = None
        if self.group is None:
            close_others(self)
            nested = self.worker_strategy
            hang_timeout = nested.barrier_timeout if isinstance(nested, ConnectedRanks) else DEFAULT_BARRIER_TIMEOUT
            self.group = WorkerGroup(*self._settled, self.resources.placement, self._driver, hang_timeout=hang_timeout)
            config = self._worker_config(trainer)
        assert trainer.state.fn is not None
        self.group.start(config, str(trainer.state.fn.value), () if self._engines is None else self._engines.runs)
        self._is_started = True

    def _record_workers(self, reason: str) -> None:
        """Have the workers record their stacks."""
        if self.group is not None:
            self.group.record_stacks(reason)

    def _worker_config(self, trainer: Trainer) -> "WorkerConfig":
        from rlightning.controller.worker_trainer import WorkerConfig, trainer_settings

        assert self._standing is not None
        callbacks = [self._start_engines(callback, trainer) for callback in self.worker_callbacks]
        return WorkerConfig(
            module=self._standing.configured,
            data=self._data_for_workers(trainer),
            strategy=self.worker_strategy,
            callbacks=callbacks,
            wanted_hooks=wanted_hooks(trainer.callbacks),  # type: ignore[attr-defined]
            accelerator=self.worker_accelerator or "auto",
            precision=trainer.precision,
            settings=trainer_settings(trainer),
            root_dir=str(Path(trainer.default_root_dir).absolute()),
            checkpoint_io=given_checkpoint_io(self),
            seed=run_seed(),
            fast_dev_run=trainer.fast_dev_run,  # type: ignore[attr-defined]
            max_store_bytes=self.max_store_bytes,
            run_key=None if self._engines is None else self._engines.run_key,
        )

    def _data_for_workers(self, trainer: Trainer) -> LightningDataModule | None:
        """Return the data module that is sent to the workers: a copy without rows, if the module provides one."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        return data.without_rows() if has(data, RowlessData) else self._data

    def _start_engines(self, callback: Callback, trainer: Trainer) -> Callback:
        """Start a callback's engines if they are Ray actors; return the callback, or a copy with their addresses."""
        assert self._standing is not None
        configured = self._standing.configured
        is_needed = generates(configured) or trainer.state.fn == "predict"
        if self._engines is None or callback is not self._engines.callback or not is_needed:
            return callback
        assert self._driver is not None
        data = self._data_for_workers(trainer)
        longest = data.max_prompt_tokens if has(data, HasPromptLimit) else None
        return self._engines.start(configured, longest, Path(trainer.default_root_dir), self._driver)

    def close(self) -> None:
        """End the engines and the workers, which hold the weights."""
        group, self.group = self.group, None
        if group is not None:
            group.close()
        engines, self._engines = self._engines, None
        if engines is not None:
            engines.close()

    def on_exception(self, exception: BaseException) -> None:
        """Kill the workers and end the engines; called after the callbacks have handled the exception."""
        if self.group is not None:
            self.group.kill()
        self.close()

    def teardown(self) -> None:
        """End workers whose run was interrupted; keep others, with their weights, for another stage."""
        if self._is_started and self.group is not None:
            self.group.kill()
            self.group = None
        self._is_started = False
        self.precision_plugin.teardown()


def belongs_to_workers(callback: Callback) -> bool:
    """Return whether a callback runs in the workers."""
    is_placed = has(callback, PlacedCallback) and callback.runs_in == "workers"
    return is_placed or isinstance(callback, DEVICE_CALLBACKS)


def find_engines(callbacks: Sequence[Callback]) -> ActorEngines | None:
    """Return the Ray actor engines of the first callback that has some; None if no callback has."""
    found = (callback.ray_engines() for callback in callbacks if has(callback, EngineCallback))
    return next((engines for engines in found if engines is not None), None)


_running: weakref.WeakSet[RayController] = weakref.WeakSet()


def close_others(strategy: RayController) -> None:
    """End the engines and workers that other RayControllers of this process have kept for another stage."""
    for other in list(_running):
        if other is not strategy:
            other.close()
    _running.add(strategy)
