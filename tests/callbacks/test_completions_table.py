import gc
import logging
import math
import re
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from observed_run import (
    ObservedModule,
    PlainLoop,
    PlainModule,
    add_rewards,
    loader,
    make_batch,
    make_completion,
    make_prompt,
    make_trainer,
    messages,
    save_run,
    shown_on_terminal,
)
from programs import read_csv
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import make_grpo

from rlightning.callbacks import CompletionsTable
from rlightning.callbacks.completions_table import shorten
from rlightning.errors import ConfigError
from rlightning.hooks import call_hook
from rlightning.report.trajectories import (
    Completion,
    read_trajectories,
    spread_by_reward,
    trajectory_table,
    write_trajectories,
)
from rlightning.rewards import RewardFunction
from rlightning.types import Prompt, RolloutBatch, Sample, single_turns


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "completions").iterdir())


def read(path: Path) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = pyarrow.parquet.read_table(path).to_pydict()
    return columns


def test_a_completion_without_tokens_has_no_advantage() -> None:
    prompts = [Prompt(0, "?", [1, 2], {}), Prompt(1, "!", [3], {})]
    nothing = Sample([], [], [], "", "length")
    batch = RolloutBatch.pack(single_turns(prompts, [[nothing], [nothing]]))
    batch.advantages = torch.tensor([5.0, 5.0, 7.0])
    assert trajectory_table(batch, 1)["advantage"].to_pylist() == [0.0, 0.0]


def test_parquet_has_every_completion_in_full(tmp_path: Path) -> None:
    make_trainer(tmp_path, CompletionsTable(2), max_steps=5).fit(ObservedModule(), loader(5))
    assert files(tmp_path) == ["step_000001.parquet", "step_000002.parquet", "step_000004.parquet"]
    table = read(tmp_path / "completions" / "step_000002.parquet")
    names = "step group prompt_index prompt completion status reward reward/exact reward/format advantage length"
    assert list(table)[:12] == [*names.split(), "finish_reason"]
    assert table["step"] == [2, 2, 2, 2]
    assert table["group"] == [0, 0, 1, 1]
    assert table["prompt_index"] == [0, 0, 7, 7]
    assert table["completion"] == ["4", "55", "9", "99"]
    assert table["reward"] == [1.0, 0.0, 0.5, 0.5]
    assert table["reward/exact"] == [1.0, 0.0, 1.0, 0.0]
    assert math.isnan(table["reward/format"][3])
    assert table["advantage"] == [1.0, -1.0, 0.0, 0.0]
    assert table["length"] == [1, 2, 1, 2]
    assert table["finish_reason"] == ["stop", "length", "stop", "stop"]


async def is_nine(completion: str) -> float:
    return float(completion == "9")


async def num_digits(completion: str) -> float | None:
    return None if completion == "4" else len(completion) / 2


@pytest.mark.processes
@pytest.mark.parametrize("begins_early", [False, True])
def test_parquet_has_scores_of_each_trajectory(begins_early: bool, model_folder: str, tmp_path: Path) -> None:
    module = make_grpo(model_folder, rewards=[RewardFunction(is_nine), RewardFunction(num_digits, weight=0.0)])
    batch = make_batch()
    if begins_early:
        module.begin_rewards(batch.prompts[2], batch.trajectories[2:])
    batch.rewards = module.compute_rewards(batch)
    module.close()
    write_trajectories(trajectory_table(batch, 1), tmp_path / "step.parquet")
    records = read_trajectories(tmp_path / "step.parquet")
    assert [record.reward for record in records] == [0.0, 0.0, 1.0, 0.0]
    assert [record.trajectory.scores for record in records] == [
        {"is_nine": 0.0, "num_digits": None},
        {"is_nine": 0.0, "num_digits": 1.0},
        {"is_nine": 1.0, "num_digits": 0.5},
        {"is_nine": 0.0, "num_digits": 1.0},
    ]


@pytest.mark.processes
def test_csv_tensorboard_and_wandb_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "300")  # for its process to start
    wandb_logger = WandbLogger(name="observed", save_dir=tmp_path, project="tests", offline=True)
    loggers: list[Logger] = [
        CSVLogger(tmp_path, name="", version="csv"),
        TensorBoardLogger(tmp_path, name="", version="tensorboard"),
        wandb_logger,
    ]
    logged: list[tuple[str, Any, int]] = []
    wandb_log = wandb_logger.log_table

    def log_table(key: str, **kwargs: Any) -> None:
        logged.append((key, kwargs["data"], kwargs["step"]))
        wandb_log(key, **kwargs)

    monkeypatch.setattr(wandb_logger, "log_table", log_table)
    make_trainer(tmp_path, CompletionsTable(2, num_logged=2), logger=loggers).fit(ObservedModule(), loader())
    wandb_logger.experiment.finish()

    rows = read_csv(tmp_path / "csv" / "metrics.csv")
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert not any("completion" in name and name != "completion/length" for name in rows[0])

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2, 3]
    texts = events.Tensors("completions/text_summary")
    assert [event.step for event in texts] == [1, 2]
    assert "| 1 | 2+2= | 4 | 1.000 | 1 | stop |" in texts[0].tensor_proto.string_val[0].decode()

    best, worst = [1, "2+2=", "4", 1.0, 1, "stop"], [1, "2+2=", "55", 0.0, 2, "length"]
    assert logged[0] == ("completions", [best, worst], 1)
    assert [step for _, _, step in logged] == [1, 2]
    assert list(tmp_path.glob("wandb/offline-run-*/files/media/table/completions_*.table.json"))


def test_wandb_gets_cells_without_control_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    wandb_logger = WandbLogger(save_dir=tmp_path, offline=True)
    monkeypatch.setattr(wandb_logger, "log_table", lambda key, **kwargs: logged.extend(kwargs["data"]))
    written = "right\rwrong\x1b[2J \u202ex"
    completions = [[make_completion(written), make_completion("55")], [make_completion("9"), make_completion("99")]]
    batch = RolloutBatch.pack(single_turns([make_prompt(0, "2+2="), make_prompt(7, "3*3=")], completions))
    add_rewards(batch)
    table = CompletionsTable(1, num_logged=10, path=str(tmp_path / "completions"))
    loop = SimpleNamespace(callbacks=[table], loggers=[wandb_logger])
    call_hook(loop, PlainModule(), "on_reward_end", batch)
    call_hook(loop, PlainModule(), "on_update_start", batch)
    assert "right\\rwrong\\x1b[2J \\u202ex" in [row[2] for row in logged]
    assert not [row for row in logged for cell in row if isinstance(cell, str) and not cell.isprintable()]


def test_line_for_each_completion_without_terminal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rlightning")
    make_trainer(tmp_path, CompletionsTable(2)).fit(ObservedModule(), loader())
    assert messages(caplog) == [
        "step 1 completion | reward 1.000 | 2+2= -> 4",
        "step 1 completion | reward 0.000 | 2+2= -> 55",
        "step 2 completion | reward 1.000 | 2+2= -> 4",
        "step 2 completion | reward 0.000 | 2+2= -> 55",
    ]


def test_a_table_on_a_terminal(tmp_path: Path) -> None:
    def run() -> None:
        trainer = make_trainer(tmp_path, CompletionsTable(), max_steps=1, enable_progress_bar=False)
        trainer.fit(ObservedModule(), loader())

    shown = shown_on_terminal(run)
    assert "Completions of step 1" in shown
    assert re.search(r"2\+2=\s+│ 55\s+│\s+0\.000", shown)


@pytest.mark.parametrize(("num", "rewards"), [(0, []), (1, [5]), (2, [5, 1]), (3, [5, 3, 1]), (9, [5, 4, 3, 2, 1])])
def test_rows_are_spread_from_best_to_worst(num: int, rewards: list[int]) -> None:
    rows = [Completion(1, "?", "!", float(reward), 1, "stop") for reward in (3, 1, 5, 2, 4)]
    assert [row.reward for row in spread_by_reward(rows, num)] == rewards


def test_long_texts_are_cut() -> None:
    assert shorten("a" * 30, 10) == "aaaaaaaa …"
    assert shorten("system prompt, then the question", 17, keep_end=True) == "system … question"


def test_a_step_without_an_update_is_shown_too(tmp_path: Path) -> None:
    table = CompletionsTable(1, path=str(tmp_path / "completions"))
    loop, batch = PlainLoop(table), make_batch()
    add_rewards(batch)
    call_hook(loop, PlainModule(), "on_reward_end", batch)
    call_hook(loop, PlainModule(), "on_train_batch_end", None, None, 0)
    assert read(tmp_path / "completions" / "step_000001.parquet")["advantage"] == [None] * 4


def test_a_refill_replaces_what_was_kept(tmp_path: Path) -> None:
    loop: Any = PlainLoop(CompletionsTable(1))
    loop.global_step, loop.default_root_dir = 0, str(tmp_path)
    batch = make_batch()
    add_rewards(batch)
    call_hook(loop, PlainModule(), "on_reward_end", batch)
    call_hook(loop, PlainModule(), "on_reward_end", batch.select([0]))
    call_hook(loop, PlainModule(), "on_update_start", batch.select([0, 3]))
    assert files(tmp_path) == ["step_000001.parquet"]
    assert read(tmp_path / "completions")["completion"] == ["4", "99"]


def test_every_rank_writes_its_share(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rlightning")
    for rank in (0, 1):
        loop: Any = PlainLoop(CompletionsTable())
        loop.global_rank, loop.default_root_dir = rank, str(tmp_path)
        loop.step(PlainModule())
    assert files(tmp_path) == ["step_000001.parquet", "step_000001.rank1.parquet"]
    assert len(read(tmp_path / "completions")["step"]) == 8
    assert len(messages(caplog)) == 2


def test_tensor_parallel_neighbour_keeps_no_batch(tmp_path: Path) -> None:
    class Neighbour(PlainModule):
        tensor_parallel_rank = 1

        def select_sampled(self, batch: RolloutBatch) -> RolloutBatch:
            return batch

    loop, batch = PlainLoop(CompletionsTable(1, path=str(tmp_path / "completions"))), make_batch()
    add_rewards(batch)
    for hook in ("on_rollout_end", "on_reward_end", "on_update_start", "on_update_end"):
        call_hook(loop, Neighbour(), hook, batch)
    is_kept = weakref.ref(batch.token_ids)
    del batch
    gc.collect()
    assert is_kept() is None and not (tmp_path / "completions").exists()


def test_supervised_runs_have_no_completions(tmp_path: Path) -> None:
    make_trainer(tmp_path, CompletionsTable()).fit(ObservedModule(learns=False), loader())
    assert not (tmp_path / "completions").exists()


def test_resume_goes_on_counting(tmp_path: Path) -> None:
    saved = save_run(tmp_path, CompletionsTable(2), max_steps=3)
    make_trainer(tmp_path, CompletionsTable(2), max_steps=6).fit(ObservedModule(), loader(6), ckpt_path=saved)
    assert files(tmp_path) == [f"step_00000{step}.parquet" for step in (1, 2, 4, 6)]


def test_custom_loop_without_step_count_resumes_from_state(tmp_path: Path) -> None:
    first, second = (CompletionsTable(2, path=str(tmp_path / "completions")) for _ in range(2))
    for _ in range(3):
        PlainLoop(first).step(PlainModule())
    second.load_state_dict(first.state_dict())
    PlainLoop(second).step(PlainModule())
    assert files(tmp_path) == ["step_000001.parquet", "step_000002.parquet", "step_000004.parquet"]


def test_custom_loop_without_root_dir_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="PlainLoop has no default_root_dir"):
        PlainLoop(CompletionsTable()).step(PlainModule())
