import logging
import re
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from observed_run import (
    ObservedModule,
    PlainLoop,
    PlainModule,
    add_rewards,
    loader,
    make_batch,
    make_trainer,
    messages,
)

from rlightning.callbacks import CompletionsTable, RunReport
from rlightning.parallel import execution_mode
from rlightning.parallel.execution_mode import ExecutionMode
from rlightning.report.trajectories import merge_tables, trajectory_file, trajectory_table, write_trajectories


def text_of(report: Path) -> str:
    """The page without its style sheet."""
    return re.sub(r"<style>.*?</style>", "", report.read_text(), flags=re.DOTALL)


def test_the_report_tells_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rlightning")
    (tmp_path / "config.yaml").write_text("model:\n  lr: 1e-6  # <low>\n")
    trainer = make_trainer(tmp_path, CompletionsTable(2), RunReport(), max_steps=4, val_check_interval=2)
    trainer.fit(ObservedModule(), loader(), loader(1))
    page = text_of(tmp_path / "report.html")
    for chart in ("Reward", "Validation, pass@k", "Completion length", "Loss", "KL to the reference", "Gradient norm"):
        assert f"<figcaption>{chart}</figcaption>" in page
    assert "Seconds a step, by phase" in page and re.search(
        r"step 4\ngenerate: .*\nreward: .*\nupdate: .*\nsync: ", page
    )
    assert "step 3\nmean: 0.3" in page  # hover text: reward/mean at step 3
    assert (
        "<h3>Step 1</h3>" in page and "<h3>Step 4</h3>" in page and "2+2=" in page and "cut at the token limit" in page
    )
    assert "finished" in page and "4 rollout steps" in page
    assert "lr: 1e-6  # &lt;low&gt;" in page
    assert "ObservedModule" in page and "transformers" in page
    assert messages(caplog)[-1] == f"report of the run: {tmp_path / 'report.html'}"


@pytest.mark.parametrize(("mode", "counts"), [(ExecutionMode.SPMD, False), (ExecutionMode.CONTROLLER, True)])
def test_in_a_controller_what_the_workers_measured_counts(
    mode: ExecutionMode, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution_mode, "_resolved", mode)
    report = RunReport()
    report.record(1, {"memory/rss_gib": 1234.0, "time/step": 5678.0, "reward/mean": 0.5})
    found = {name: report.history.last(name) for name in ("memory/rss_gib", "time/step", "reward/mean")}
    assert (found["memory/rss_gib"] == 1234.0) is (found["time/step"] == 5678.0) is counts
    assert found["reward/mean"] == 0.5


def test_the_report_loads_nothing(tmp_path: Path) -> None:
    make_trainer(tmp_path, RunReport()).fit(ObservedModule(), loader())
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r"<script|<link|<img|<iframe|https?:|@import|url\(|src=", page)
    assert len(page) < 200_000


def test_history_is_what_the_module_logged(tmp_path: Path) -> None:
    report = RunReport()
    make_trainer(tmp_path, report, val_check_interval=2, max_steps=2).fit(ObservedModule(), loader(), loader(1))
    assert [(s, round(v, 6)) for s, v in report.history.series["reward/mean"]] == [(1, 0.1), (2, 0.2)]
    assert report.history.series["val/sums/pass@1"] == [(2, 0.25)]
    assert {"time/step", "time/generate", "throughput/tokens_per_second", "memory/rss_gib"} <= set(
        report.history.series
    )
    assert "step" not in report.history.series


def test_completions_are_those_that_were_recorded(tmp_path: Path) -> None:
    folder, report = tmp_path / "elsewhere", RunReport(num_samples=8)
    for step, rank in ((1, 0), (2, 0), (2, 1), (3, 0)):
        batch = make_batch()
        lost = trajectory_table(batch, step)  # without rewards, as of trajectories that failed
        add_rewards(batch)
        table = merge_tables(trajectory_table(batch, step), lost)
        write_trajectories(table, trajectory_file(folder, step, rank))
    for step in (1, 2):
        report.record(step, {"reward/mean": 0.5})
    report.write(tmp_path / "mine.html", completions=folder)
    page = text_of(tmp_path / "mine.html")
    assert re.findall(r"<h3>Step (\d)</h3>", page) == ["1", "2"]
    first, last = page.split("<h3>Step 2</h3>")
    assert (first.count('class="sample"'), last.count('class="sample"')) == (4, 8)
    report.write(tmp_path / "without.html")
    assert "<h2>Completions</h2>" not in text_of(tmp_path / "without.html")


def test_a_file_that_is_no_table_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "completions").mkdir()
    (tmp_path / "completions" / "step_0.parquet").write_bytes(b"cut off")
    RunReport().write(tmp_path / "report.html")
    assert "step_0.parquet' out" in caplog.text
    assert (tmp_path / "report.html").exists()


def test_report_finds_the_folder_of_the_table(tmp_path: Path) -> None:
    table = CompletionsTable(path=str(tmp_path / "elsewhere"))
    make_trainer(tmp_path / "run", RunReport(), table, max_steps=2).fit(ObservedModule(), loader())
    assert re.findall(r"<h3>Step (\d)</h3>", text_of(tmp_path / "run" / "report.html")) == ["1"]


def test_supervised_runs_have_a_report_too(tmp_path: Path) -> None:
    make_trainer(tmp_path, RunReport()).fit(ObservedModule(learns=False), loader())
    page = text_of(tmp_path / "report.html")
    assert "<figcaption>Loss</figcaption>" in page and "<figcaption>Reward</figcaption>" not in page
    assert "<h2>Completions</h2>" not in page


@pytest.mark.parametrize(
    ("error", "raised", "status"),
    [
        (ValueError("the <user's> mistake"), ValueError, "stopped by ValueError: the &lt;user&#x27;s&gt; mistake"),
        (ValueError("x" * 30_000_000), ValueError, f"stopped by ValueError: {'x' * 297}..."),
        (KeyboardInterrupt(), SystemExit, "interrupted"),
    ],
)
def test_interrupted_run_leaves_a_report(
    tmp_path: Path, error: BaseException, raised: type[BaseException], status: str
) -> None:
    with pytest.raises((raised, KeyboardInterrupt)):
        make_trainer(tmp_path, RunReport(), max_steps=4).fit(ObservedModule(fails_at=3, error=error), loader())
    page = text_of(tmp_path / "report.html")
    assert f'<span class="failed">{status}</span> · 2 rollout steps' in page


def test_no_step_no_report(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="out of luck"):
        make_trainer(tmp_path, RunReport()).fit(ObservedModule(fails_at=1), loader())
    assert not (tmp_path / "report.html").exists()


def test_a_report_on_the_way(tmp_path: Path) -> None:
    class Reads(RunReport):
        pages: list[str]

        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            self.pages = [*getattr(self, "pages", []), text_of(tmp_path / "report.html")]

    report = Reads(every_n_steps=1)
    make_trainer(tmp_path, report, max_steps=2).fit(ObservedModule(), loader())
    assert 'class="well">running</span> · 1 rollout steps' in report.pages[0]


def test_resume_tells_the_whole_story(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, filename="at")
    table = CompletionsTable(1)
    first = make_trainer(tmp_path, table, RunReport(), checkpoint, max_steps=3, enable_checkpointing=True)
    first.fit(ObservedModule(), loader())
    report = RunReport()
    second = make_trainer(tmp_path, CompletionsTable(1), report, max_steps=4)
    second.fit(ObservedModule(), loader(), ckpt_path=tmp_path / "at.ckpt")
    assert [step for step, _ in report.history.series["reward/mean"]] == [1, 2, 3, 4]
    assert [step for step, _ in report.history.series["time/step"]] == [1, 2, 3, 4]
    page = text_of(tmp_path / "report.html")
    assert "<h3>Step 1</h3>" in page and "<h3>Step 4</h3>" in page and "4 rollout steps" in page


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    report = RunReport()
    loop = PlainLoop(report)
    for step in (1, 2):
        loop.step(PlainModule())
        report.record(step, {"reward/mean": 0.25 * step})
    report.write(tmp_path / "mine.html")
    page = text_of(tmp_path / "mine.html")
    assert "step 2\nmean: 0.5" in page and "step 2\ngenerate: " in page and "2 rollout steps" in page
