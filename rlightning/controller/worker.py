"""A worker: a Ray process with a device, a Trainer and the actor, which executes a controller's commands."""

import logging
import os
import traceback
from collections.abc import Mapping, Sequence
from operator import methodcaller
from typing import Any

import torch
from lightning.pytorch import seed_everything

from rlightning.console import quieten
from rlightning.controller.command_feed import CommandFeed, WorkerData
from rlightning.controller.commands import (
    BetweenBatches,
    Call,
    Command,
    CommandQueue,
    Entry,
    Evaluate,
    Failed,
    Load,
    Save,
    StepResult,
    StopRequest,
)
from rlightning.controller.driver import DriverContext
from rlightning.controller.epoch_metrics import take_epoch_metrics
from rlightning.controller.hook_relay import HookRelay
from rlightning.controller.rtensor import store_tensors
from rlightning.controller.tensor_store import set_store
from rlightning.controller.worker_trainer import RayEnvironment, WorkerConfig, WorkerTrainer, make_trainer
from rlightning.errors import find_run_error
from rlightning.foreign_text import cut
from rlightning.lightning_internals import checkpoint_connector, epoch_results, loaded_checkpoint, logged_metrics
from rlightning.parallel.device import share_host_threads
from rlightning.parallel.execution_mode import ExecutionMode, resolve_execution_mode
from rlightning.parallel.failure_watch import active_watch
from rlightning.parallel.launcher import find_port
from rlightning.parallel.rank_failure import describe
from rlightning.parallel.stacks import record_own
from rlightning.parallel.trainer_stages import ValidatesFirst, validate_in_fit
from rlightning.protocols import has
from rlightning.rpc.run_key import RUN_KEY_VARIABLE

CONTROLLER = "Ray driver"
"""The name of a worker's controller."""
OF_WORKERS = ("state_dict", "optimizer_states", "lr_schedulers")
"""Keys of a checkpoint that the workers write and load; the controller handles the others."""


class Worker(CommandQueue):
    """The Ray actor of one training rank: runs Lightning's Trainer, which executes the controller's commands.

    :meth:`run` blocks for a whole fit. The other methods are called in other threads meanwhile.

    Args:
        host_threads: the controller's OMP_NUM_THREADS; None for the cores divided by the number of all workers.
    """

    def __init__(self, rank: int, num_workers: int, driver: DriverContext, host_threads: str | None) -> None:
        super().__init__()
        driver.enter()
        self.driver = driver
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's, from the cores that it counts for the worker
        if host_threads is None:
            share_host_threads(num_workers)
        else:
            os.environ["OMP_NUM_THREADS"] = host_threads
            torch.set_num_threads(int(host_threads.split(",")[0]))
        self.rank, self.num_workers = rank, num_workers
        self.trainer: WorkerTrainer
        self._last_stage = -1

    def rendezvous(self) -> tuple[str, int]:
        """Return this host's IP address and a free port, for the rendezvous of the ranks' process group."""
        import ray

        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return address, find_port()

    def describe_differences(self) -> list[str]:
        """Return sentences on how this process's folder and environment variables differ from the controller's."""
        return self.driver.describe_differences()

    def process_id(self) -> int:
        """Return this worker's process id on its host."""
        return os.getpid()

    def record_stacks(self, reason: str) -> None:
        """Append the stack traces of all threads of this process to the run's ``stacks.txt``, if it has one."""
        record_own(reason)

    def run(self, number: int, config: WorkerConfig | None, rendezvous: tuple[str, int], stage: str) -> None:
        """Run a stage of the Trainer, such as "fit", until the controller ends it; report errors to the controller.

        Args:
            number: number of the stage; a stage that was run before is not repeated.
            config: None for a later stage of the same run, with the same trainer and module.
            rendezvous: rank 0's address and port.
        """
        if number <= self._last_stage:
            return
        self._last_stage = number
        try:
            if config is not None:
                self._prepare(config, rendezvous)
            is_measured = stage in ("validate", "test")
            quiet: dict[str, Any] = {"verbose": False} if is_measured else {}
            found = methodcaller(stage, self.module, datamodule=self.data, **quiet)(self.trainer)
            self.answer(as_floats(found) if is_measured else None)
        except BaseException as error:
            self.fail(self._describe(error))

    def execute(self, number: int, command: Command[object], seen: int) -> list[Entry]:
        """Queue a command, once; wait for, and return, its entries after the first ``seen``.

        Entries are the hooks that the command called, its requests, and its result.
        """
        self.submit(number, command)
        return self.collect(number, seen)

    def leave(self) -> None:
        """Report to the other ranks that this rank ends without failure; rank 0 waits for all reports."""
        watch = active_watch()
        if watch is not None:
            watch.stop()

    # The Trainer

    def _prepare(self, config: WorkerConfig, rendezvous: tuple[str, int]) -> None:
        quieten()
        logging.getLogger("rlightning").setLevel(logging.INFO if self.rank == 0 else logging.WARNING)
        for name in ("lightning.pytorch", "lightning.fabric"):  # the controller logs the same line
            logging.getLogger(name).setLevel(logging.WARNING)
        if config.seed is not None:
            seed_everything(config.seed, verbose=False)
        from rlightning.controller.object_store import RayStore

        set_store(RayStore(max_bytes=config.max_store_bytes))
        if config.run_key is not None:
            os.environ[RUN_KEY_VARIABLE] = config.run_key
        self.module = config.module
        feed = CommandFeed(
            self,
            execute=self._execute,
            evaluate=self._evaluate,
            step_result=self._step_result,
            report_stop=self._report_stop,
        )
        self.data = WorkerData(config.data, feed)
        relay = HookRelay(feed, config.wanted_hooks)
        environment = RayEnvironment(self.rank, self.num_workers, *rendezvous)
        self.trainer = make_trainer(config, environment, feed, relay)
        strategy = self.trainer.strategy
        vars(strategy).update(execution_mode=ExecutionMode.WORKER, controller=CONTROLLER)
        resolve_execution_mode(strategy=strategy)
        if has(self.module, ValidatesFirst):
            self.module.validate_first = False  # the controller decides when to validate

    def _step_result(self) -> StepResult:
        found = logged_metrics(self.trainer)
        logged = as_floats([found["callback"]])
        of_epoch = take_epoch_metrics(epoch_results(self.trainer))
        # The names under which Lightning logs metrics of epochs after a step.
        twice = {f"{metric.name}{suffix}" for metric in of_epoch for suffix in ("", "_step")}
        metrics = {name: value for name, value in logged.items() if name not in twice}
        return StepResult(
            metrics,
            frozenset(found["log"]),
            frozenset(found["pbar"]),
            epoch_metrics=of_epoch,
            global_step=self.trainer.global_step,
        )

    def _evaluate(self, command: Evaluate) -> dict[str, float]:
        if command.is_sanity_check:
            self.trainer.check_sanity()
            return {}  # Lightning discards them
        return as_floats(validate_in_fit(self.trainer))

    def _report_stop(self) -> None:
        if self.trainer.should_stop:
            self.record(StopRequest())

    # Commands between two batches

    def _execute(self, command: BetweenBatches) -> object:
        match command:
            case Load():
                return self._load(command)
            case Save():
                self._save(command)
                return None
            case Call():
                call = methodcaller(command.method, *command.arguments, **command.named)
                return store_tensors(call(self.module), label=command.method)

    def _load(self, command: Load) -> dict[str, object]:
        trainer, connector = self.trainer, checkpoint_connector(self.trainer)
        connector.resume_start(command.path, command.weights_only)
        loaded = loaded_checkpoint(connector)
        rest = {name: value for name, value in loaded.items() if name not in OF_WORKERS}
        known = {callback.state_key for callback in trainer.callbacks}  # type: ignore[attr-defined]
        loaded["callbacks"] = {key: state for key, state in loaded.get("callbacks", {}).items() if key in known}
        connector.restore_model()
        connector.restore_callbacks()
        if trainer.state.fn == "fit":
            connector.restore_optimizers_and_schedulers()
            loops = {**loaded["loops"]["fit_loop"]}
            loops["state_dict"] = {}  # the state of data loaders, which is in the controller
            trainer.fit_loop.load_state_dict(loops)
        connector.resume_end()
        return rest if self.rank == 0 else {}

    def _save(self, command: Save) -> None:
        is_whole = "optimizer_states" in command.checkpoint
        checkpoint = checkpoint_connector(self.trainer).dump_checkpoint(weights_only=not is_whole)
        callbacks = {**checkpoint.get("callbacks", {}), **command.checkpoint.get("callbacks", {})}
        checkpoint |= {name: value for name, value in command.checkpoint.items() if name not in OF_WORKERS}
        if is_whole:
            checkpoint["callbacks"] = callbacks
        self.trainer.strategy.save_checkpoint(checkpoint, command.path, command.storage_options)

    def _describe(self, error: BaseException) -> Failed:
        watch, is_first = active_watch(), True
        if watch is not None:
            is_first = watch.is_first(watch.report(error))
        foreseen = find_run_error(error)
        summary = " ".join(foreseen.line.split()) if foreseen else describe(error).removeprefix("failed: ")
        text = cut("".join(traceback.format_exception(error)))
        return Failed(self.rank, summary, text, foreseen.exit_code if foreseen else None, is_first=is_first)


def as_floats(outputs: Sequence[Mapping[str, torch.Tensor | float]] | None) -> dict[str, float]:
    """Merge several dictionaries of metrics into one, with floats as values."""
    merged = {name: value for part in outputs or () for name, value in part.items()}
    return {name: float(value) if isinstance(value, torch.Tensor) else value for name, value in merged.items()}
