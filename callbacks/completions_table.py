"""Shows completions on the console and in loggers, and writes trajectories to Parquet files."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from rich import get_console
from rich.table import Table
from rich.text import Text

from rlightning.console import is_live_terminal, show_log_lines
from rlightning.disk import BestEffort
from rlightning.errors import ConfigError
from rlightning.foreign_text import markdown_cell, visible, visible_on_one_line
from rlightning.hooks import RunCallback
from rlightning.parallel.collectives import rank_in
from rlightning.protocols import (
    CountsSteps,
    HasLoggers,
    HasTensorParallelRank,
    Loop,
    SelectsSampled,
    StateDict,
    generates,
    has,
)
from rlightning.report.trajectories import (
    Completion,
    completions,
    merge_tables,
    spread_by_reward,
    trajectory_file,
    trajectory_table,
    write_trajectories,
)
from rlightning.run_dir import run_dir
from rlightning.types import RolloutBatch

if TYPE_CHECKING:
    import pyarrow

logger = logging.getLogger("rlightning")


class CompletionsTable(RunCallback):
    """Shows prompts, completions and rewards: some on the console, more in the loggers, all in Parquet files.

    The files ``<run>/completions/step_000012.parquet`` have a row for each trajectory, in full
    (:mod:`rlightning.report.trajectories`). Ranks other than 0 write ``step_000012.rank1.parquet`` and so on; reading
    the folder reads all files. Micro-batches of one step are in one file. W&B gets a table, TensorBoard a text, CSV
    nothing. If a file cannot be written, the run continues without it.

    In a loop that is not Lightning's, the callback needs ``on_reward_end`` or ``on_update_start`` (or both) with the
    batch. The loop's object may have ``default_root_dir`` (else give ``path``), ``global_step`` (finished steps;
    otherwise batches are counted here), ``global_rank`` (otherwise that of torch.distributed) and ``loggers``. A loop
    with micro-batches needs ``global_step``, and calls ``on_update_end`` after each micro-batch.

    Args:
        every_n_steps: show and write the first and every n-th rollout step.
        num_console: number of completions on the console, 0 for none: the best and the worst, then some in between.
        num_logged: number of completions in the loggers; 0 for none.
        path: folder of the Parquet files; by default ``completions`` in the run's folder.
    """

    def __init__(
        self, every_n_steps: int = 10, *, num_console: int = 2, num_logged: int = 32, path: str | None = None
    ) -> None:
        if every_n_steps < 1:
            raise ConfigError(
                f"every_n_steps={every_n_steps} must be at least 1. Use 1 for every step, or leave the callback out."
            )
        for name, value in (("num_console", num_console), ("num_logged", num_logged)):
            if value < 0:
                raise ConfigError(f"{name}={value} must not be negative. Use 0 for none.")
        super().__init__()
        self.every_n_steps = every_n_steps
        self.num_console = num_console
        self.num_logged = num_logged
        self.path = path
        self._num_steps = 0
        self._pending: tuple[int, RolloutBatch] | None = None
        self._rollouts: list[RolloutBatch] = []  # of the current step, including trajectories that count as not sampled
        self._step = 0  # the newest step written, which may get more rows
        self._table: pyarrow.Table | None = None
        self._is_updating = False
        self._effort = BestEffort("Completions")

    def state_dict(self) -> StateDict:
        """Return the number of steps counted so far; it is used only in loops without a ``global_step``."""
        return {"num_steps": self._num_steps}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore the number of steps that :meth:`state_dict` has returned."""
        super().load_state_dict(state_dict)
        self._num_steps = state_dict["num_steps"]

    def output(self, trainer: Loop, stage: str) -> Path | None:
        """Return the folder to which a fit writes Parquet files; None in stages other than a fit."""
        return self.folder(trainer) if stage == "fit" else None

    def setup(self, trainer: Loop, pl_module: object, stage: str) -> None:
        """Raise a ConfigError if the folder is not writable, before anything is generated."""
        super().setup(trainer, pl_module, stage)
        folder = self.folder(trainer)
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"path='{folder}' is a file, completions go to a folder. Name another one.")

    def begin_run(self) -> None:
        """Reset the number of steps counted so far, since a new run begins."""
        self._num_steps = 0

    def drop_step(self) -> None:
        """Discard the data of a step that will be repeated; its file will be rewritten."""
        self._pending, self._step, self._table, self._is_updating = None, 0, None, False
        self._rollouts = []

    def on_rollout_start(self, trainer: Loop, module: object, prompts: object) -> None:
        """If the last update did not end, discard its step's data: this rollout repeats the step."""
        if self._is_updating:
            self.drop_step()

    def on_rollout_end(self, trainer: Loop, module: object, batch: RolloutBatch) -> None:
        """Keep the batch with its failed trajectories, which are written to the file but not passed to later hooks."""
        if generates(module) and has(module, SelectsSampled):
            self._rollouts.append(batch)

    def on_reward_end(self, trainer: Loop, module: object, batch: RolloutBatch) -> None:
        """Keep the batch with its rewards, in place of the step's earlier batch if the step was refilled."""
        if not generates(module):  # supervised fine-tuning: the completions come from the data
            return
        step = self._count(trainer)
        if self._pending is not None and self._pending[0] != step:
            self._flush(trainer, module)
        self._pending = (step, batch)

    def on_update_start(self, trainer: Loop, module: object, batch: RolloutBatch) -> None:
        """At step 1 and every ``every_n_steps``-th one, show the batch and write it to the step's file."""
        if not generates(module):
            return
        step = self._count(trainer) if self._pending is None else self._pending[0]
        if has(module, HasTensorParallelRank) and module.tensor_parallel_rank > 0:
            self._pending, self._rollouts = None, []
            return
        self._pending = (step, batch)
        self._flush(trainer, module)
        self._is_updating = True

    def on_update_end(self, trainer: Loop, module: object, batch: RolloutBatch) -> None:
        """Record that the update has ended, so that a later rollout does not count as a repetition of its step."""
        self._is_updating = False

    def on_train_batch_end(self, trainer: Loop, module: object, outputs: object, batch: object, batch_idx: int) -> None:
        """Show and write the batch of a step without an update, such as one with equal rewards in each group."""
        self._flush(trainer, module)

    def _count(self, trainer: Loop) -> int:
        """Return the number of the current step, counted from 1."""
        self._num_steps = (trainer.global_step if has(trainer, CountsSteps) else self._num_steps) + 1
        return self._num_steps

    def _flush(self, trainer: Loop, module: object) -> None:
        if self._pending is None:
            return
        (step, batch), self._pending = self._pending, None
        rollouts, self._rollouts = self._rollouts, []
        is_due = step == 1 or step % self.every_n_steps == 0
        if not is_due or batch.rewards is None:  # rewards last: on a controller, reading them fetches the batch
            return
        table = trajectory_table(batch, step)
        for lost in not_sampled(module, rollouts):
            table = merge_tables(table, trajectory_table(lost, step))
        if step == self._step and self._table is not None:
            self._table = merge_tables(self._table, table)
        else:
            self._step, self._table = step, table
        rank = rank_in(trainer)
        with self._effort.writing():
            write_trajectories(self._table, trajectory_file(self.folder(trainer), step, rank))
        rows = completions(table)
        if rank == 0 and rows:
            loggers = trainer.loggers if has(trainer, HasLoggers) else ()
            with self._effort.attempt():
                self._log(loggers, spread_by_reward(completions(self._table), self.num_logged), step)
            with self._effort.attempt():  # standard output may be a file
                self._show(spread_by_reward(rows, self.num_console), step)

    def folder(self, trainer: Loop) -> Path:
        """Return the folder of the Parquet files: ``path`` or, by default, ``completions`` in the run's folder."""
        return Path(self.path).expanduser() if self.path else run_dir(trainer) / "completions"

    def _log(self, loggers: Sequence[object], rows: Sequence[Completion], step: int) -> None:
        columns = list(Completion._fields)
        cells = [[visible(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
        for log in loggers if rows else ():
            if isinstance(log, WandbLogger):
                log.log_table("completions", columns=columns, data=cells, step=step)
            elif isinstance(log, TensorBoardLogger):
                log.experiment.add_text("completions", _markdown_table(columns, cells), step)

    def _show(self, rows: Sequence[Completion], step: int) -> None:
        if not rows:
            return
        if not is_live_terminal():
            show_log_lines()
            for row in rows:
                text = f"{shorten(row.prompt, 100, keep_end=True)} -> {shorten(row.completion, 160)}"
                logger.info("step %d completion | reward %.3f | %s", step, row.reward, text)
            return
        table = Table(title=f"Completions of step {step}", title_justify="left", expand=True)
        table.add_column("prompt", ratio=2)
        table.add_column("completion", ratio=3)
        table.add_column("reward", justify="right")
        for row in rows:
            prompt, completion = shorten(row.prompt, 240, keep_end=True), shorten(row.completion, 360)
            table.add_row(Text(prompt), Text(completion), f"{row.reward:.3f}")
        get_console().print(table)


def not_sampled(module: object, rollouts: Sequence[RolloutBatch]) -> Iterator[RolloutBatch]:
    """Yield a batch of the trajectories excluded from training, such as failed ones, for each rollout that has any."""
    if not has(module, SelectsSampled):
        return
    for batch in rollouts:
        sampled = {id(one) for one in module.select_sampled(batch).trajectories}
        lost = [m for m, one in enumerate(batch.trajectories) if id(one) not in sampled]
        if lost:
            yield batch.select(lost)


def shorten(text: str, limit: int, *, keep_end: bool = False) -> str:
    """Return a text as one line of at most ``limit`` characters, cut at its end, or with ``keep_end`` in its middle."""
    line = visible_on_one_line(text)
    if len(line) <= limit:
        return line
    if keep_end:
        half = limit // 2
        return f"{line[: limit - half - 3]} … {line[-half:]}"
    return f"{line[: limit - 2]} …"


def _markdown_table(columns: list[str], cells: Sequence[Sequence[object]]) -> str:
    def escape(cell: object) -> str:
        return markdown_cell(f"{cell:.3f}" if isinstance(cell, float) else str(cell))

    head = [" | ".join(columns), " | ".join("---" for _ in columns)]
    return "\n".join(f"| {line} |" for line in [*head, *(" | ".join(map(escape, row)) for row in cells)])
