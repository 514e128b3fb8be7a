"""The scripts of benchmarks/ say what they take, and measure a run from end to end."""

import csv
import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from fork_server import START_BY_EXEC

pytestmark = pytest.mark.processes

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = (
    *("make_model", "colocated_memory", "weak_scaling", "weight_sync", "offload", "learning_curves"),
    *("gathering", "sharded_loading", "update", "kernels", "compare_trl", "growth", "memory_table"),
    *("optimizer_states", "asynchronous", "staleness", "controller"),
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_says_what_it_takes(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert f" benchmarks/{name}.py" in done.stdout  # the command, from its docstring
    assert list(tmp_path.iterdir()) == []


def run_benchmark(name: str, options: str, folder: Path) -> str:
    """A benchmark's standard output, run on the CPU with a tiny model."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--device", "cpu", "--model", "tiny", "--out", "out"]
    done = subprocess.run(
        [*command, *shlex.split(options)], cwd=folder, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def read_table(folder: Path) -> list[dict[str, str]]:
    """The benchmark's table."""
    with (folder / "out" / "table.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_variants_of_an_update_are_forks_that_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(START_BY_EXEC, "1")  # it forks itself, and profiles its forks
    options = "--tokens 2500 --max-new-tokens 64 --microbatch-tokens 1024 --steps 2 --warm-up 1 --variable --profile"
    run_benchmark("update", f"{options} --try lr=1e-5 rate=3 -- --model.compile false", tmp_path)
    good, bad = read_table(tmp_path)
    assert float(good["update, s"]) > 0 and good["later"] == "0" and good["end"] == "ok"
    assert bad["update, s"] == "" and "model.rate: there is no such key" in bad["end"]
    files = {path.name for path in (tmp_path / "out" / "1").iterdir()}
    assert files >= {"run.yaml", "run.log", "kernels.json.gz", "kernels.md", "host.json.gz", "host.txt"}
    assert "aten::" in (tmp_path / "out" / "1" / "host.txt").read_text()


def test_kernels_are_grouped_and_gaps_are_found(tmp_path: Path) -> None:
    kernels = [("nvjet_tst_128", 100, 50), ("flash_fwd_kernel", 150, 30), ("triton_poi_fused_mul", 240, 20)]
    events = [{"cat": "kernel", "name": name, "ts": start, "dur": micros} for name, start, micros in kernels]
    events += [
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH", "ts": 160, "dur": 5},
        {"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 180, "dur": 40},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 10, "dur": 40},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    command = [sys.executable, str(BENCHMARKS / "kernels.py"), str(path)]
    text = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True).stdout
    # from 100 to 260; nothing runs from 180 to 240
    assert text.startswith("0.2 ms from the first kernel to the end of the last; idle for 0.1 ms (37.5%)")
    assert "cudaStreamSynchronize 1 times, 0.0 ms" in text
    assert "| matrix products | 0.05 | 0.312 | 1 | 50 |" in text
    assert "| 60 | flash_fwd_kernel | triton_poi_fused_mul |" in text


@pytest.mark.slow
def test_this_project_is_compared_with_trl_where_that_is_installed(tmp_path: Path) -> None:
    options = "--work variable --prompts 4 --samples 2 --max-new-tokens 24 --steps 2 --microbatch-tokens 512"
    printed = run_benchmark("compare_trl", f"{options} --trl '{{}}' -- --model.compile false", tmp_path)
    rows = read_table(tmp_path)
    assert rows[0]["side"] == "rlightning, 512 tokens" and float(rows[0]["tokens/s"]) > 0
    assert 1 <= float(rows[0]["mean length"]) <= float(rows[0]["longest"]) <= 24
    if importlib.util.find_spec("trl") is None:
        assert "TRL is not installed here" in printed
    else:
        assert rows[1]["side"] == "TRL" and float(rows[1]["x TRL"]) == 1


@pytest.mark.slow
def test_cost_grows_by_length_and_by_sequences(tmp_path: Path) -> None:
    options = "--lengths 140 160 --sequences 4 8 --samples 2 --microbatch-tokens 512 -- --model.compile false"
    run_benchmark("growth", options, tmp_path)
    rows = read_table(tmp_path)
    assert [(row["sequences"], row["tokens each"]) for row in rows] == [("4", "140"), ("4", "160"), ("8", "140")]
    assert float(rows[0]["by attention"]) == float(rows[2]["by attention"]) == 1 < float(rows[1]["by attention"])


@pytest.mark.slow
def test_peaks_and_the_longest_context_are_beside_the_plan(tmp_path: Path) -> None:
    options = "--part longest --prompts 2 --samples 2 --positions 1024 --device-memory 8GB --steps 1"
    run_benchmark("memory_table", f"{options} -- --model.compile false", tmp_path)
    (row,) = json.loads((tmp_path / "out" / "longest" / "rows.json").read_text())
    assert (row["planned longest"], row["tried"], row["end"]) == (1024, 768, "ok")
    with (tmp_path / "out" / "tiny" / "longest" / "peaks-0.csv").open(newline="") as file:
        phases = [peak["phase"] for peak in csv.DictReader(file)]
    assert list(dict.fromkeys(phases)) == ["rest", "generate", "sync", "update"]


@pytest.mark.slow
def test_memory_is_traced_by_step_through_the_real_command(tmp_path: Path) -> None:
    options = (
        "--device cpu --model tiny --steps 2 --arms before_wake_too --prompts 2 --samples 2 --shortest 4 --longest 40"
    )
    command = [sys.executable, str(BENCHMARKS / "colocated_memory.py"), *options.split(), "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("| run | steps | ")
    out = tmp_path / "out"
    assert (out / "table.md").read_text() == done.stdout
    assert {path.name for path in out.glob("*.*")} >= {"table.csv", "steps.csv", "steps.md", "curve.svg"}
    with (out / "before_wake_too" / "after-0.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["moment"]) for row in rows] == [
        (step, moment) for step in "12" for moment in ("sync_start", "sync_end", "rollout_end", "update_end")
    ]
    lengths = [int(row["max_new_tokens"]) for row in rows]
    assert all(4 <= length <= 40 for length in lengths) and len(set(lengths)) > 1
