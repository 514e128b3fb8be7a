import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from observed_run import ObservedModule, PlainLoop, PlainModule, loader, logged_rows, make_batch, make_trainer, save_run
from transformers import Qwen3Config

from rlightning.callbacks import Throughput
from rlightning.callbacks.throughput import device_peak
from rlightning.hooks import call_hook
from rlightning.models.counts import sequence_flops

CONFIG = Qwen3Config(vocab_size=128, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=16)


class Clock:
    """A clock that is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.module: Any = PlainModule()
        monkeypatch.setattr("rlightning.phases.perf_counter", lambda: self.now)

    def call_hook(self, loop: Any, hook: str, *args: Any, at: float) -> None:
        self.now = 100.0 + at
        call_hook(loop, self.module, hook, *args)


def test_seconds_by_phase_and_tokens_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    throughput = Throughput()
    loop, clock, batch = PlainLoop(throughput), Clock(monkeypatch), make_batch()
    clock.call_hook(loop, "on_rollout_start", [], at=0)
    clock.call_hook(loop, "on_weight_sync_start", 1, at=0.5)
    clock.call_hook(loop, "on_weight_sync_end", 1, at=2.0)
    clock.call_hook(loop, "on_rollout_end", batch, at=5.0)
    clock.call_hook(loop, "on_reward_start", batch, at=5.0)
    clock.call_hook(loop, "on_reward_end", batch, at=5.25)
    clock.call_hook(loop, "on_update_start", batch, at=6.0)
    clock.call_hook(loop, "on_update_end", batch, at=11.0)
    timings = {name: value for name, value in throughput.last.items() if not name.startswith("memory/")}
    assert timings == {
        "time/step": 11.0,
        "time/generate": 3.5,  # 5 seconds less 1.5 of weight sync
        "time/sync": 1.5,
        "time/reward": 0.25,
        "time/update": 5.0,
        "throughput/tokens_per_second": 2.0,  # 22 tokens in 11 seconds
    }
    assert 0.05 < throughput.last["memory/rss_gib"] < 100


def test_engine_start_is_a_separate_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    throughput = Throughput()
    loop, clock, batch = PlainLoop(throughput), Clock(monkeypatch), make_batch()
    clock.call_hook(loop, "on_rollout_start", [], at=0)
    clock.call_hook(loop, "on_weight_sync_start", 1, at=0.5)
    clock.call_hook(loop, "on_engine_start", at=1.0)
    clock.call_hook(loop, "on_engine_ready", at=31.0)
    clock.call_hook(loop, "on_weight_sync_end", 1, at=32.0)
    clock.call_hook(loop, "on_rollout_end", batch, at=35.0)
    clock.call_hook(loop, "on_update_start", batch, at=35.0)
    clock.call_hook(loop, "on_update_end", batch, at=36.0)
    timings = {name: value for name, value in throughput.last.items() if name.startswith("time/")}
    assert timings == {
        "time/step": 36.0,
        "time/generate": 3.5,  # 35 seconds less 31.5 of weight sync and of waiting within it
        "time/sync": 1.5,
        "time/engine_start": 30.0,
        "time/update": 1.0,
    }


def test_a_refill_counts_with_both_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    throughput = Throughput()
    loop, clock, batch = PlainLoop(throughput), Clock(monkeypatch), make_batch()
    for start in (0.0, 4.0):
        clock.call_hook(loop, "on_rollout_start", [], at=start)
        clock.call_hook(loop, "on_rollout_end", batch, at=start + 3.0)
    clock.call_hook(loop, "on_update_start", batch, at=7.0)
    clock.call_hook(loop, "on_update_end", batch, at=8.0)
    assert throughput.last["time/generate"] == 6.0
    assert throughput.last["throughput/tokens_per_second"] == 44 / 8


def test_update_mfu_divides_required_by_peak_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlightning.callbacks.throughput.device_peak", lambda device: 1e6)

    class Policy:
        model_config = CONFIG
        plan = SimpleNamespace(epochs_per_rollout=2)
        tensor_parallel_size = 2

    throughput = Throughput()
    loop, clock, batch = PlainLoop(throughput), Clock(monkeypatch), make_batch()
    clock.module = Policy()
    clock.call_hook(loop, "on_update_start", batch, at=0)
    clock.call_hook(loop, "on_update_end", batch, at=4.0)
    # completions of 1, 2, 1, 2 tokens after prompts of 4: two epochs over two ranks that share the work
    needed = sequence_flops(CONFIG, torch.tensor([5, 6, 5, 6]), torch.tensor([1, 2, 1, 2])).sum().item()
    assert throughput.last["throughput/update_mfu"] == pytest.approx(needed / (4.0 * 1e6))
    loop.step(PlainModule())  # of a model that is not known
    assert "throughput/update_mfu" not in throughput.last


@pytest.mark.gpu
def test_mfu_of_a_gpu_is_a_share() -> None:
    torch.zeros(1, device="cuda")
    if device_peak(None) is None:
        pytest.skip(f"nothing is known of {torch.cuda.get_device_name()}")

    class Policy:
        device = torch.device("cuda")
        model_config = CONFIG

    throughput = Throughput()
    PlainLoop(throughput).step(Policy())
    assert 0 < throughput.last["throughput/update_mfu"] < 1


def test_tokens_are_summed_over_ranks() -> None:
    class TwoRanks:
        def world_sum(self, tensor: torch.Tensor) -> torch.Tensor:
            return 2 * tensor

    throughput = Throughput()
    PlainLoop(throughput).step(TwoRanks())
    assert throughput.num_tokens == 44


def test_logged_through_lightning_at_the_rollout_step(tmp_path: Path) -> None:
    rows = logged_rows(tmp_path, ObservedModule(), Throughput())
    assert [int(row["step"]) for row in rows] == [1, 2, 3]
    names = ["time/step", "time/generate", "time/reward", "time/update", "time/sync", "throughput/tokens_per_second"]
    for row in rows:
        assert all(float(row[name]) >= 0 for name in names)
        assert float(row["time/step"]) >= float(row["time/generate"]) + float(row["time/update"])


def test_supervised_steps_count_tokens_of_updates(tmp_path: Path) -> None:
    throughput = Throughput()
    make_trainer(tmp_path, throughput).fit(ObservedModule(learns=False), loader())
    assert throughput.num_tokens == 22
    assert set(throughput.phase_seconds) == {"update"}


def test_resume_starts_a_fresh_measurement(tmp_path: Path) -> None:
    saved = save_run(tmp_path, Throughput(), max_steps=2)
    steps: list[dict[str, float]] = []

    class Kept(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            steps.append(dict(throughput.last))

    throughput = Throughput()
    make_trainer(tmp_path, throughput, Kept(), max_steps=4).fit(ObservedModule(), loader(), ckpt_path=saved)
    assert len(steps) == 2
    assert all(step["time/step"] < 60 for step in steps)


def test_end_hook_without_start_records_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    throughput = Throughput()
    loop, clock = PlainLoop(throughput), Clock(monkeypatch)
    for hook in ("on_rollout_end", "on_reward_end", "on_update_end"):
        clock.call_hook(loop, hook, make_batch(), at=1.0)
    assert throughput.last == {}
    loop.step(PlainModule())
    assert throughput.last["time/generate"] == 0


def test_lightning_module_without_trainer_skips_logging() -> None:
    throughput = Throughput()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PlainLoop(throughput).step(ObservedModule())
    assert throughput.last["time/step"] > 0


def test_any_module_with_log_dict_gets_the_metrics() -> None:
    logged: dict[str, float] = {}

    class Logs:
        def log_dict(self, metrics: dict[str, float]) -> None:
            logged.update(metrics)

    throughput = Throughput()
    PlainLoop(throughput).step(Logs())
    assert logged == throughput.last
