"""The progress bar of a run; without a terminal, a log line for each step."""

import logging
import math
from collections.abc import Iterable

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from rich.console import RenderableType
from rich.text import Text
from torch import Tensor

from rlightning.console import is_live_terminal, show_log_lines
from rlightning.errors import ConfigError
from rlightning.phases import PHASES, PhaseTimer
from rlightning.protocols import Loop

logger = logging.getLogger("rlightning")


class RLProgressBar(RichProgressBar, PhaseTimer):
    """Lightning's rich progress bar, which counts rollout steps and shows RL metrics.

    The bar shows reward (or loss if there are no rewards), completion length, tokens per second, and the seconds of
    each phase. If standard output is not a terminal, a line is logged for each step instead. A line is always logged
    for every validation set::

        step 12/200 | reward 0.412 | length 5.1 | 8,123 tokens/s | generate 0.6s reward 0.0s update 0.9s sync 0.0s
        validation at step 50 | gsm8k | reward 0.431 | pass@1 0.431 | length 5.0 | truncated 0.0%

    The callback needs a Lightning ``Trainer``; in other loops, use ``Throughput``.

    Args:
        refresh_rate: number of redraws of the bar a second; 0 disables bar and lines.
        line_every_n_steps: without a terminal, log every n-th step (and the last one).
        leave: keep the finished bar on the console.
    """

    def __init__(self, *, refresh_rate: int = 10, line_every_n_steps: int = 1, leave: bool = True) -> None:
        if line_every_n_steps < 1:
            raise ConfigError(f"line_every_n_steps={line_every_n_steps} must be at least 1. Use 1 for a line a step.")
        PhaseTimer.__init__(self)
        RichProgressBar.__init__(self, refresh_rate=refresh_rate, leave=leave)
        self._line_every_n_steps = line_every_n_steps
        self._is_live = False
        self._status = ""

    @property
    def is_enabled(self) -> bool:
        """Whether a bar is drawn; otherwise lines are logged."""
        return self._is_live and super().is_enabled

    def setup(self, trainer: Loop, pl_module: object, stage: str) -> None:
        """Decide whether the terminal can show a bar; raise a ConfigError for a loop other than Lightning's Trainer."""
        if not (isinstance(trainer, Trainer) and isinstance(pl_module, LightningModule)):
            raise ConfigError(
                f"RLProgressBar needs Lightning's Trainer, which {type(trainer).__name__} is not. Leave it out of the "
                "callbacks of your own loop."
            )
        PhaseTimer.setup(self, trainer, pl_module, stage)
        RichProgressBar.setup(self, trainer, pl_module, stage)
        self._is_live = is_live_terminal()
        if self._enabled:
            show_log_lines()

    def begin_run(self) -> None:
        """Reset the status of the last step."""
        super().begin_run()
        self._status = ""

    def on_exception(self, trainer: Loop, pl_module: object, exception: BaseException) -> None:
        """Remove the bar from the console, and discard the interrupted step."""
        PhaseTimer.on_exception(self, trainer, pl_module, exception)
        if isinstance(trainer, Trainer) and isinstance(pl_module, LightningModule):  # setup() has taken them
            RichProgressBar.on_exception(self, trainer, pl_module, exception)

    def teardown(self, trainer: Loop, pl_module: object, stage: str) -> None:
        """Remove the bar from the console."""
        PhaseTimer.teardown(self, trainer, pl_module, stage)
        if isinstance(trainer, Trainer) and isinstance(pl_module, LightningModule):
            RichProgressBar.teardown(self, trainer, pl_module, stage)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw one bar for the whole run, rather than one for each epoch."""
        if self.is_enabled and self.train_progress_bar_id is None:
            self._initialize_train_progress_bar_id()
            self._update(self.train_progress_bar_id, trainer.global_step)

    def on_train_batch_end(
        self, trainer: Loop, pl_module: object, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Show the finished step."""
        PhaseTimer.on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx)
        if self.is_enabled:
            if self.train_progress_bar_id is None:
                self._initialize_train_progress_bar_id()
            self._status = " · ".join(self._describe_step())
            self._update(self.train_progress_bar_id, self.trainer.global_step, hard=True)
            return
        step, total = self.trainer.global_step, total_steps(self.trainer)
        if self._shows_progress and (step % self._line_every_n_steps == 0 or step == total):
            progress = f"step {step}" if total is None else f"step {step}/{total}"
            logger.info(" | ".join([progress, *self._describe_step()]))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log a line for each validation set."""
        super().on_validation_end(trainer, pl_module)
        if self._shows_progress:
            for line in validation_lines(trainer.global_step, trainer.callback_metrics):
                logger.info(line)

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return no metrics, since they are shown in the line below the bar, not to its right."""
        return {}

    def _init_progress(self, trainer: Trainer) -> None:
        super()._init_progress(trainer)
        if self.progress is not None:
            draw_bars = type(self.progress).get_renderables
            progress = self.progress

            def draw() -> Iterable[RenderableType]:
                yield from draw_bars(progress)
                if self._status:
                    yield Text(self._status)

            # Lightning creates its progress object inside the method above: only the instance can be changed.
            progress.get_renderables = draw  # type: ignore[method-assign]

    @property
    def _shows_progress(self) -> bool:
        """Whether this rank shows progress: rank 0, unless the user has disabled it."""
        return super().is_enabled

    def _initialize_train_progress_bar_id(self) -> None:
        total = total_steps(self.trainer)
        self.train_progress_bar_id = self._add_task(math.inf if total is None else total, self.train_description)

    def _describe_step(self) -> list[str]:
        metrics = self.trainer.callback_metrics
        texts = []
        if "reward/mean" in metrics:
            texts.append(f"reward {float(metrics['reward/mean']):.3f}")
        elif "policy/loss" in metrics:
            texts.append(f"loss {float(metrics['policy/loss']):.3f}")
        if "completion/length" in metrics:
            texts.append(f"length {float(metrics['completion/length']):.1f}")
        if self.num_tokens:
            texts.append(f"{self.timings['throughput/tokens_per_second']:,.0f} tokens/s")
        texts.append(" ".join(self._describe_seconds()))
        return texts

    def _describe_seconds(self) -> list[str]:
        # A step without a rollout is one update: its phases would show the same number, and zeros.
        if "generate" not in self.phase_seconds:
            return [f"{self.step_seconds:.1f}s"]
        shown = [phase for phase in PHASES if phase != "engine_start" or phase in self.phase_seconds]
        return [f"{phase} {self.phase_seconds.get(phase, 0.0):.1f}s" for phase in shown]


def total_steps(trainer: Trainer) -> int | None:
    """Return the number of rollout steps of the run; None if no limit is set."""
    limits = []
    if trainer.max_steps >= 0:
        limits.append(trainer.max_steps)
    if trainer.max_epochs is not None and trainer.max_epochs > 0 and math.isfinite(trainer.num_training_batches):
        limits.append(trainer.max_epochs * int(trainer.num_training_batches))
    return min(limits, default=None)


def validation_lines(step: int, metrics: dict[str, Tensor]) -> list[str]:
    """Return one line for each validation set, with the metrics named ``val/<set>/<metric>``."""
    by_set: dict[str, list[str]] = {}
    for name, value in metrics.items():
        parts = name.split("/")
        if len(parts) == 3 and parts[0] == "val":
            by_set.setdefault(parts[1], []).append(_describe_validation(parts[2], float(value)))
    return [f"validation at step {step} | {name} | {' | '.join(texts)}" for name, texts in by_set.items()]


def _describe_validation(metric: str, value: float) -> str:
    if metric == "truncated":
        return f"truncated {value:.1%}"
    return f"{metric} {value:.1f}" if metric == "length" else f"{metric} {value:.3f}"
