"""What the policy wrote, where people look: the console, the loggers, a Parquet file."""

import logging
import math
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from rich import get_console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from rlightning.atomic_save import written_aside
from rlightning.console import is_live_terminal, show_log_lines
from rlightning.disk import BestEffort
from rlightning.errors import ConfigError
from rlightning.hooks import RunCallback
from rlightning.parallel.collectives import rank_in
from rlightning.plain_text import markdown_cell, visible, visible_on_one_line
from rlightning.run_dir import run_dir
from rlightning.types import RolloutBatch

logger = logging.getLogger("rlightning")


class CompletionsTable(RunCallback):
    """Shows prompts, completions and rewards: some on the console, more in the loggers, all in Parquet files.

    The files are ``<run>/completions/step_000012.parquet``, a row a completion (:func:`completion_rows` has the
    columns). A process of higher rank writes its share beside it, as ``step_000012.rank1.parquet``; reading the
    folder reads them all. Micro-batches of one step are in one file. W&B gets a table, TensorBoard a text, CSV nothing.
    Where the disk takes no file, the run goes on without, and the tables of those steps are missing.

    From a loop that is not Lightning's it needs ``on_reward_end`` or ``on_update_start`` (or both) with the batch.
    The loop's object may have ``default_root_dir`` (or give ``path``), ``global_step`` (finished steps; otherwise
    batches are counted here), ``global_rank`` (otherwise that of torch.distributed) and ``loggers``. A loop with
    micro-batches has ``global_step``, and fires ``on_update_end`` after each.

    Args:
        every_n_steps: show and write each n-th rollout step, and the first.
        num_console: completions on the console; 0 for none. They are the best and the worst first, then in between.
        num_logged: completions in the loggers; 0 for none.
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
        self._written: tuple[int, list[dict[str, Any]]] = (0, [])  # the newest step's, which may get more
        self._is_updating = False
        self._effort = BestEffort("Completions")

    def state_dict(self) -> dict[str, Any]:
        """The count of steps, for loops that do not count them."""
        return {"num_steps": self._num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        super().load_state_dict(state_dict)
        self._num_steps = state_dict["num_steps"]

    def output(self, trainer: Any, stage: str) -> Path | None:
        """Return what it writes."""
        return self._folder(trainer) if stage == "fit" else None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse a folder that cannot be written to before anything is generated."""
        super().setup(trainer, pl_module, stage)
        folder = self._folder(trainer)
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"path='{folder}' is a file, completions go to a folder. Name another one.")

    def begin_run(self) -> None:
        """Count from the run's first step."""
        self._num_steps = 0

    def drop_step(self) -> None:
        """Show nothing of a step that is begun again, and write its file anew."""
        self._pending, self._written, self._is_updating = None, (0, []), False

    def on_rollout_start(self, trainer: Any, module: Any, prompts: Any) -> None:
        """Begin a step again whose update was cut short."""
        if self._is_updating:
            self.drop_step()

    def on_reward_end(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        """Keep the batch until its advantages are there; a refill of the same step takes its place."""
        if not getattr(module, "generates", True):  # supervised fine-tuning: the completions are the data's
            return
        step = self._count(trainer)
        if self._pending is not None and self._pending[0] != step:
            self._flush(trainer)
        self._pending = (step, batch)

    def on_update_start(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        """Show the batch that is trained on."""
        if not getattr(module, "generates", True):
            return
        step = self._count(trainer) if self._pending is None else self._pending[0]
        if getattr(module, "tensor_parallel_rank", 0) > 0:  # the first of its neighbours has the same batch
            self._pending = None
            return
        self._pending = (step, batch)
        self._flush(trainer)
        self._is_updating = True

    def on_update_end(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        """Called when the batch has been trained on."""
        self._is_updating = False

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Show a batch that no update followed, because all its groups were without signal."""
        self._flush(trainer)

    def _count(self, trainer: Any) -> int:
        """The step that is under way, counted from 1."""
        self._num_steps = int(getattr(trainer, "global_step", self._num_steps)) + 1
        return self._num_steps

    def _flush(self, trainer: Any) -> None:
        if self._pending is None:
            return
        (step, batch), self._pending = self._pending, None
        is_due = step == 1 or step % self.every_n_steps == 0
        if not is_due or batch.rewards is None:  # in this order: in a controller a look at a batch fetches it
            return
        rows = completion_rows(batch, step)
        all_rows = merge_rows(self._written[1], rows) if step == self._written[0] else rows
        self._written = (step, all_rows)
        rank = rank_in(trainer)
        suffix = f".rank{rank}" if rank else ""
        with self._effort.writing():
            write_parquet(all_rows, self._folder(trainer) / f"step_{step:06d}{suffix}.parquet")
        if rank == 0 and rows:
            with self._effort.attempt():
                self._log(getattr(trainer, "loggers", ()), spread_by_reward(all_rows, self.num_logged), step)
            with self._effort.attempt():  # standard output may be a file
                self._show(spread_by_reward(rows, self.num_console), step)

    def _folder(self, trainer: Any) -> Path:
        return Path(self.path).expanduser() if self.path else run_dir(trainer) / "completions"

    def _log(self, loggers: Any, rows: list[dict[str, Any]], step: int) -> None:
        columns = ["step", "prompt", "completion", "reward", "length", "finish_reason"]
        cells = [[visible(cell) if isinstance(cell := row[name], str) else cell for name in columns] for row in rows]
        for log in loggers if rows else ():
            if isinstance(log, WandbLogger):
                log.log_table("completions", columns=columns, data=cells, step=step)
            elif isinstance(log, TensorBoardLogger):
                log.experiment.add_text("completions", _markdown_table(columns, cells), step)

    def _show(self, rows: list[dict[str, Any]], step: int) -> None:
        if not rows:
            return
        if not is_live_terminal():
            show_log_lines()
            for row in rows:
                text = f"{shorten(row['prompt'], 100, keep_end=True)} -> {shorten(row['completion'], 160)}"
                logger.info("step %d completion | reward %.3f | %s", step, row["reward"], text)
            return
        table = Table(title=f"Completions of step {step}", title_justify="left", expand=True)
        table.add_column("prompt", ratio=2)
        table.add_column("completion", ratio=3)
        table.add_column("reward", justify="right")
        for row in rows:
            prompt, completion = shorten(row["prompt"], 240, keep_end=True), shorten(row["completion"], 360)
            table.add_row(Text(prompt), Text(completion), f"{row['reward']:.3f}")
        get_console().print(table)


def completion_rows(batch: RolloutBatch, step: int) -> list[dict[str, Any]]:
    """A dictionary a completion.

    Its keys: step, group, prompt_index, prompt, completion, reward, ``reward/<function>`` for each reward function,
    advantage (if it is there yet: that of the completion's first token), length in tokens, finish_reason.
    """
    num = batch.num_sequences
    groups = batch.group_ids.tolist()
    rewards = _column(batch.rewards, num)
    components = {f"reward/{name}": _column(values, num) for name, values in batch.reward_components.items()}
    advantages = None if batch.advantages is None else _first_advantages(batch)
    rows = []
    for i, (prompt, completion) in enumerate(zip(batch.prompts, batch.completions, strict=True)):
        row: dict[str, Any] = {
            "step": step,
            "group": groups[i],
            "prompt_index": prompt.index,
            "prompt": prompt.text,
            "completion": completion.text,
            "reward": rewards[i],
            **{name: values[i] for name, values in components.items()},
        }
        length = len(completion.token_ids)
        if advantages is not None:
            row["advantage"] = advantages[i] if length else 0.0
        rows.append(row | {"length": length, "finish_reason": completion.finish_reason})
    return rows


def merge_rows(earlier: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of two micro-batches, their groups numbered through."""
    first = 1 + max((row["group"] for row in earlier), default=-1)
    return earlier + [row | {"group": row["group"] + first} for row in rows]


def _first_advantages(batch: RolloutBatch) -> list[float]:
    """Of the token after each prompt, which is another sequence's where a completion is empty."""
    assert batch.advantages is not None
    prompt_lengths = torch.tensor([len(prompt.token_ids) for prompt in batch.prompts], dtype=torch.int64)
    first = batch.cu_seqlens[:-1] + prompt_lengths.to(batch.cu_seqlens.device)
    return batch.advantages[first.clamp(max=batch.num_tokens - 1)].float().tolist()


def _column(values: Tensor | None, num: int) -> list[float]:
    return [math.nan] * num if values is None else values.float().tolist()


def write_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    """Write the rows so that a reader sees all of them or no file."""
    # Half a second that only a written table should cost.
    import pyarrow
    import pyarrow.parquet

    with written_aside(path) as aside:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), aside)


def spread_by_reward(rows: list[dict[str, Any]], num: int) -> list[dict[str, Any]]:
    """``num`` rows from the highest reward to the lowest, evenly spread: two of them are the best and the worst."""
    ranked = sorted(rows, key=lambda row: -math.inf if math.isnan(row["reward"]) else row["reward"], reverse=True)
    if num >= len(ranked):
        return ranked
    last = max(num - 1, 1)
    return [ranked[i * (len(ranked) - 1) // last] for i in range(num)]


def shorten(text: str, limit: int, *, keep_end: bool = False) -> str:
    """The text on one line, cut to ``limit`` characters at its end, or in the middle to keep the end too."""
    line = visible_on_one_line(text)
    if len(line) <= limit:
        return line
    if keep_end:
        half = limit // 2
        return f"{line[: limit - half - 3]} … {line[-half:]}"
    return f"{line[: limit - 2]} …"


def _markdown_table(columns: list[str], cells: list[list[Any]]) -> str:
    def escape(cell: Any) -> str:
        return markdown_cell(f"{cell:.3f}" if isinstance(cell, float) else str(cell))

    head = [" | ".join(columns), " | ".join("---" for _ in columns)]
    return "\n".join(f"| {line} |" for line in [*head, *(" | ".join(map(escape, row)) for row in cells)])
