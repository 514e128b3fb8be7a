"""Every YAML in configs/ is run as it stands, shortened by options alone, with real vLLM."""

import os
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
import yaml
from metrics_table import undocumented
from programs import read_csv, run_python, steps_with
from tiny import save_byte_model

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"
GSM8K = Path(os.environ.get("GSM8K_FOLDER", ROOT.parent / "shared" / "data" / "gsm8k"))
needs_gsm8k = pytest.mark.skipif(
    not GSM8K.is_dir(), reason="GSM8K is not beside the checkout; GSM8K_FOLDER names another place"
)

TWO_STEPS = (
    *("--trainer.max_steps", "2", "--trainer.val_check_interval", "2", "--rollout.seed", "5"),
    *("--data.validation.heldout.limit", "8"),
)


def fit(config: str, folder: Path, *options: str) -> list[dict[str, str]]:
    """Run `rlightning fit` in ``folder``; the rows of its metrics."""
    done = run_python("-m", "rlightning", "fit", "--config", CONFIGS / config, *options, folder=folder)
    assert (done.stdout + done.stderr).count("A step is ") == 1  # the derivation, once
    run = Path(options[options.index("--trainer.default_root_dir") + 1])
    return read_csv(next((folder / run).glob("metrics/version_*/metrics.csv")))


def fit_gsm8k(config: str, folder: Path, *options: str) -> list[dict[str, str]]:
    """Run it on the real data with a tiny model, 4 samples of 4 prompts a step."""
    return fit(
        config,
        folder,
        *("--model.model", save_byte_model(folder / "model", max_position_embeddings=2048)),
        *("--model.prompts_per_step", "4", "--model.samples_per_prompt", "4"),
        *("--data.train", str(GSM8K / "train.jsonl")),
        *("--data.validation.gsm8k.path", str(GSM8K / "test.jsonl"), "--data.validation.gsm8k.limit", "8"),
        *("--rollout.max_new_tokens", "16", "--trainer.accelerator", "cpu"),
        *("--trainer.val_check_interval", "2", "--trainer.default_root_dir", "run", *options),
    )


def count_keys(tree: object) -> int:
    """Keys that are set to a value; those that only group others do not count."""
    return sum(map(count_keys, tree.values())) if isinstance(tree, dict) else 1


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_config_states_its_purpose_and_stays_short(path: Path) -> None:
    text = path.read_text()
    head = [line for line in text.splitlines() if line.startswith("#")]
    assert any(f"rlightning fit --config configs/{path.name}" in line for line in head)
    assert any("Hardware:" in line for line in head)
    assert any("Expect" in line for line in head)
    assert count_keys(yaml.safe_load(text)) <= 30


def read_completions(run: Path) -> list[tuple[str, str]]:
    """Prompts and completions of a run's first step."""
    rows = parquet.read_table(run / "completions" / "step_000001.parquet").to_pylist()
    return [(row["prompt"], row["completion"]) for row in rows]


@pytest.mark.processes
def test_the_demo_runs_from_random_weights_to_rewarded_rollouts(tmp_path: Path) -> None:
    example = ROOT / "examples" / "arithmetic"
    run_python(example / "make_task.py", "runs/arithmetic", folder=tmp_path)

    small = ("--model.prompts_per_step", "16")
    steps = (*small, "--trainer.max_steps", "30")
    sft = fit("arithmetic_sft.yaml", tmp_path, *steps, "--trainer.default_root_dir", "runs/arithmetic/sft")
    losses = [float(row["policy/loss"]) for row in sft]
    assert losses[-1] < losses[0] - 0.5
    assert steps_with(sft, "step") == list(range(1, 31))

    # a small weight for entropy: without it nothing is computed of answers that are all wrong
    options = (*TWO_STEPS, *small, "--model.entropy_coef", "1e-4", "--trainer.default_root_dir")
    grpo = fit("arithmetic_grpo.yaml", tmp_path, *options, "runs/arithmetic/grpo")
    assert steps_with(grpo, "val/heldout/pass@1") == [0, 2] and steps_with(grpo, "reward/mean") == [1, 2]
    trained = [row for row in grpo if row["reward/mean"]]
    # the engine sampled from the weights that were trained: its log-probabilities are the actor's, after an update too
    assert all(float(row["policy/rollout_gap_max"]) < 1e-4 for row in trained)
    assert undocumented({name for row in (*sft, *grpo) for name, value in row.items() if value}) == []
    assert len(read_completions(tmp_path / "runs/arithmetic/grpo")) == 16 * 8

    # and without vLLM, from the same weights
    grpo = fit("arithmetic_transformers.yaml", tmp_path, *options, "runs/arithmetic/transformers")
    assert steps_with(grpo, "val/heldout/pass@1") == [0, 2] and steps_with(grpo, "reward/mean") == [1, 2]
    assert all(float(row["policy/rollout_gap_max"]) < 1e-5 for row in grpo if row["reward/mean"])

    shown = run_python(example / "show_result.py", "runs/arithmetic/grpo", folder=tmp_path).stdout
    assert "Greedy pass@1 on held-out problems" in shown
    assert (tmp_path / "runs/arithmetic/grpo/report.html").is_file()


@pytest.mark.slow
@pytest.mark.processes
def test_the_agents_demo_runs_from_random_weights_to_calls(tmp_path: Path) -> None:
    example = ROOT / "examples" / "calculator"
    run_python(example / "make_calculations.py", "runs/calculator", folder=tmp_path)
    # a quarter of the batch at three times the rate: a quarter of what it then samples calls, as in its examples
    options = ("--trainer.max_steps", "40", "--model.prompts_per_step", "32", "--model.lr", "3e-3")
    fit("calculator_sft.yaml", tmp_path, *options, "--trainer.default_root_dir", "runs/calculator/sft")
    (tmp_path / "calculator.py").symlink_to(example / "calculator.py")
    # a small weight for entropy: without it nothing is computed of groups that are all wrong
    small = (*TWO_STEPS, "--model.prompts_per_step", "16", "--model.entropy_coef", "1e-4")
    grpo = fit("calculator_grpo.yaml", tmp_path, *small, "--trainer.default_root_dir", "runs/calculator/grpo")
    assert steps_with(grpo, "val/heldout/pass@1") == [0, 2] and steps_with(grpo, "reward/mean") == [1, 2]
    assert all(float(row["policy/rollout_gap_max"]) < 1e-4 for row in grpo if row["reward/mean"])
    folder = tmp_path / "runs/calculator/grpo/completions"
    counts = [dict(row["metrics"]) for row in parquet.read_table(folder / "step_000001.parquet").to_pylist()]
    assert len(counts) == 16 * 8 and max(count["tool_calls"] for count in counts) >= 1
    assert max(count["turns"] for count in counts) >= 2


@pytest.mark.slow
@pytest.mark.processes
@needs_gsm8k
def test_gsm8k_runs_on_the_real_data(tmp_path: Path) -> None:
    rows = fit_gsm8k("grpo_gsm8k.yaml", tmp_path, "--trainer.max_steps", "2")
    assert steps_with(rows, "val/gsm8k/pass@1") == [0, 2] and steps_with(rows, "reward/mean") == [1, 2]
    assert all(float(row["reward/failed"]) == 0 for row in rows if row["reward/mean"])
    # prompts above 512 bytes are dropped; thousands are left
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").is_file()


@pytest.mark.processes
@pytest.mark.slow
@needs_gsm8k
@pytest.mark.parametrize("config", ["grpo_gsm8k_fsdp.yaml", "grpo_gsm8k_ray.yaml"])
def test_gsm8k_runs_sharded_over_two_ranks(config: str, tmp_path: Path) -> None:
    # a small weight for entropy: a random model has no answer right, and nothing would be computed
    options = ("--trainer.devices", "2", "--trainer.max_steps", "2", "--model.entropy_coef", "1e-4")
    rows = fit_gsm8k(config, tmp_path, "--data.train_limit", "32", *options)
    assert steps_with(rows, "val/gsm8k/pass@1") == [0, 2] and steps_with(rows, "reward/mean") == [1, 2]
    assert undocumented({name for row in rows for name, value in row.items() if value}) == []
    # each engine samples from the weights that were gathered for it; the trainer computes in bfloat16
    assert all(float(row["policy/rollout_gap_max"]) < 0.1 for row in rows if row["reward/mean"])
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt" / "meta.pt").is_file()


@pytest.mark.processes
@pytest.mark.slow
@needs_gsm8k
def test_gsm8k_runs_asynchronously(tmp_path: Path) -> None:
    rows = fit_gsm8k("grpo_gsm8k_async.yaml", tmp_path, "--data.train_limit", "64", "--trainer.max_steps", "4")
    assert steps_with(rows, "val/gsm8k/pass@1") == [0, 2, 4] and steps_with(rows, "reward/mean") == [1, 2, 3, 4]
    trained = [row for row in rows if row["reward/mean"]]
    assert all(float(row["async/staleness_max"]) <= 2 for row in trained)
    assert float(trained[-1]["async/running"]) + float(trained[-1]["async/finished"]) == 8  # two steps' worth
    assert undocumented({name for row in rows for name, value in row.items() if value}) == []
