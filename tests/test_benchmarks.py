"""The scripts of benchmarks/ say what they take, and measure a run from end to end."""

import argparse
import asyncio
import importlib
import importlib.util
import json
import math
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from fork_server import START_BY_EXEC
from programs import read_csv, run_python
from waiting import still_running, wait_for

from rlightning.callbacks import VLLMRollout
from rlightning.types import Prompt

pytestmark = pytest.mark.processes
RunBenchmark = Callable[[str, str], str]

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = (
    *("make_model", "weak_scaling", "weight_sync", "learning_curves", "sharded_loading"),
    *("update", "kernels", "compare_trl", "memory_table", "defaults", "optimizer_states", "asynchronous", "staleness"),
    *("controller", "controller_leaks", "canary", "adapters", "adapter_curves", "agents", "shared_prefix"),
    *("meshes", "collectives", "collector", "predict_scaling"),
)


SHOW_HELP = """
import contextlib, io, json, runpy, sys
shown = {}
for path in sys.argv[1:]:
    sys.argv = [path, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        runpy.run_path(path, run_name="__main__")
    shown[path] = text.getvalue()
print(json.dumps(shown))
"""


def test_each_benchmark_says_what_it_takes(tmp_path: Path) -> None:
    program, folder = tmp_path / "show_help.py", tmp_path / "empty"
    program.write_text(SHOW_HELP)
    folder.mkdir()
    paths = [str(BENCHMARKS / f"{name}.py") for name in SCRIPTS]
    done = run_python(program, *paths, folder=folder, environment={**os.environ, "PYTHONPATH": str(BENCHMARKS)})
    shown = json.loads(done.stdout)
    assert {name for name in SCRIPTS if f" benchmarks/{name}.py" not in shown[str(BENCHMARKS / f"{name}.py")]} == set()
    assert list(folder.iterdir()) == []  # the command is in each, from its docstring; nothing was written


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gets the tiny model, which the first benchmark makes."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def run_benchmark(tmp_path: Path, models: Path) -> RunBenchmark:
    """Runs a benchmark with options on the CPU, with a tiny model; returns its standard output."""

    def run(name: str, options: str) -> str:
        usual = ("--device", "cpu", "--model", "tiny", "--models", models, "--out", "out")
        return run_python(BENCHMARKS / f"{name}.py", *usual, *shlex.split(options), folder=tmp_path).stdout

    return run


def test_bounds_on_staleness_rise_within_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    asynchronous = importlib.import_module("asynchronous")
    splits = [asynchronous.split(text) for text in ("1+1", "2+2", "1+3")]
    arguments = argparse.Namespace(splits=splits, tensor_parallel=[4, 1, 2], staleness=[4, 0, 1], warm_up=2, steps=5)
    colocated, *_ = placements = asynchronous.placements(arguments)
    assert placements == [(2, 0, 1), (1, 1, 1), (2, 0, 2), (4, 0, 1), (2, 2, 1), (1, 3, 1), (4, 0, 2), (4, 0, 4)]
    assert asynchronous.phases(arguments, colocated) == [(0, 0, 2, 5)]
    # Of the steps at 1 and at 4 one and four more do not count.
    assert asynchronous.phases(arguments, splits[2]) == [(0, 0, 2, 5), (1, 5, 8, 11), (4, 11, 17, 20)]


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
    text = run_python(BENCHMARKS / "kernels.py", path).stdout
    # from 100 to 260; nothing runs from 180 to 240
    assert text.startswith("0.2 ms from the first kernel to the end of the last; idle for 0.1 ms (37.5%)")
    assert "cudaStreamSynchronize 1 times, 0.0 ms" in text
    assert "| matrix products | 0.05 | 0.312 | 1 | 50 |" in text
    assert "| 60 | flash_fwd_kernel | triton_poi_fused_mul |" in text


@pytest.mark.slow
def test_benchmark_compares_with_trl_if_installed(run_benchmark: RunBenchmark, tmp_path: Path) -> None:
    options = "--work variable --prompts 4 --samples 2 --max-new-tokens 24 --turns 2 --steps 2 --microbatch-tokens 512"
    printed = run_benchmark("compare_trl", f"{options} --trl '{{}}' -- --model.compile false")
    rows = read_csv(tmp_path / "out" / "table.csv")
    assert rows[0]["side"] == "rlightning, 512 tokens" and float(rows[0]["tokens/s"]) > 0
    assert 2 <= float(rows[0]["mean length"]) <= float(rows[0]["longest"]) <= 24
    if importlib.util.find_spec("trl") is None:
        assert "TRL is not installed here" in printed
    else:
        assert rows[1]["side"] == "TRL" and float(rows[1]["x TRL"]) == 1


@pytest.mark.slow
def test_variants_of_an_update_are_forks_that_may_fail(
    run_benchmark: RunBenchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(START_BY_EXEC, "1")  # it forks itself, and profiles its forks
    options = "--tokens 2500 --max-new-tokens 64 --microbatch-tokens 1024 --steps 2 --warm-up 1 --variable --profile"
    run_benchmark("update", f"{options} --try lr=1e-5 rate=3 -- --model.compile false")
    good, bad = read_csv(tmp_path / "out" / "table.csv")
    assert float(good["update, s"]) > 0 and good["later"] == "0" and good["end"] == "ok"
    assert bad["update, s"] == "" and "model.rate: there is no such key" in bad["end"]
    files = {path.name for path in (tmp_path / "out" / "1").iterdir()}
    assert files >= {"run.yaml", "run.log", "kernels.json.gz", "kernels.md", "host.json.gz", "host.txt"}
    assert "aten::" in (tmp_path / "out" / "1" / "host.txt").read_text()


@pytest.mark.slow
def test_peaks_and_the_longest_context_are_beside_the_plan(run_benchmark: RunBenchmark, tmp_path: Path) -> None:
    options = "--part longest --prompts 2 --samples 2 --positions 1024 --device-memory 8GB --steps 1"
    run_benchmark("memory_table", f"{options} -- --model.compile false")
    (row,) = json.loads((tmp_path / "out" / "longest" / "rows.json").read_text())
    assert (row["planned longest"], row["tried"], row["end"]) == (1024, 768, "ok")
    phases = [peak["phase"] for peak in read_csv(tmp_path / "out" / "tiny" / "longest" / "peaks-0.csv")]
    assert list(dict.fromkeys(phases)) == ["rest", "generate", "sync", "update"]


@pytest.mark.slow
def test_the_readmes_file_runs_with_another_model(run_benchmark: RunBenchmark, tmp_path: Path) -> None:
    run_benchmark("defaults", "--prompts 2 --max-new-tokens 96 --steps 2 -- --model.compile false")
    (row,) = read_csv(tmp_path / "out" / "table.csv")
    assert (row["model"], row["devices"], row["steps"], row["end"]) == ("tiny", "1", "2", "ok")
    seconds = [float(row[name]) for name in ("step, s", "generate, s", "update, s", "of it engine's start, s")]
    assert all(value > 0 for value in seconds[:3]) and seconds[3] >= 0  # an engine may be up before it is waited for
    config = yaml.safe_load((tmp_path / "out" / "tiny-1" / "run.yaml").read_text())
    assert config["model"]["init_args"]["samples_per_prompt"] == 8  # the README's
    (completions,) = (tmp_path / "out").rglob("completions/*1.parquet")
    assert len(set(pq.read_table(completions)["length"].to_pylist())) > 4


@pytest.mark.slow
def test_adapters_are_measured_beside_full_training(run_benchmark: RunBenchmark, tmp_path: Path) -> None:
    options = "--awake --full --prompts 2 --max-new-tokens 48 --steps 2 --adapter '{\"rank\": 4}'"
    said = run_benchmark("adapters", f"{options} -- --model.compile false")
    (row,) = json.loads((tmp_path / "out" / "rows.json").read_text())
    assert (row["model"], row["trained"], row["engine"], row["end"]) == ("tiny", "rank 4", "sleeps", "ok")
    assert all(row[name] > 0 for name in ("step, s", "update, s", "sync, ms", "planned"))
    assert "| tiny | - | rank 4 | sleeps | update |" in said
    full = row | {"trained": "all", "step, s": 2 * row["step, s"]}
    (tmp_path / "out" / "rows.json").write_text(json.dumps([row, full]))
    run_benchmark("adapters", "--model --awake --full")  # of what is there already
    assert [line["x full"] for line in read_csv(tmp_path / "out" / "table.csv")] == ["0.5", "1.0"]


@pytest.mark.slow
def test_the_canary_is_asked_about_right_and_wrong_weights(run_benchmark: RunBenchmark, tmp_path: Path) -> None:
    said = run_benchmark("canary", "--syncs 44")
    (row,) = read_csv(tmp_path / "out" / "table.csv")
    assert (row["model"], row["syncs"], row["false alarms"], row["end"]) == ("tiny", "44", "0", "ok")
    assert float(row["largest distance / noise"]) < 1.2 and float(row["largest errors"]) < 6
    assert all(float(row[part]) > 0 for part in ("evaluate, ms", "score, ms", "sync, ms"))
    strikes = json.loads((tmp_path / "out" / "strikes" / "rows.json").read_text())
    told = {strike["strike"]: strike["told"] for strike in strikes}
    assert told["all stale by one update"] == told["one shard of two stale"] == "former weights"
    assert told["q_proj transposed (square)"] == told["neighbouring layers exchanged"] == "other weights"
    assert told["down_proj stale"] == "no"  # lost in rounding
    assert all(strike["off by, %"] > 0 and strike["strike"] in said for strike in strikes)
    assert list((tmp_path / "out").rglob("metrics.csv")) == []  # no step of training


def test_strikes_of_an_adapter_change_what_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    strikes = importlib.import_module("strikes")
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    shapes = {"lora_A": (4, 16), "lora_B": (8, 4)}
    weights = {
        f"model.layers.{layer}.{kind}.{factor}.weight": torch.randn(shape)
        for layer in range(4)
        for kind in kinds
        for factor, shape in shapes.items()
    }
    listed = strikes.list_adapter_strikes(strikes.Actor(weights), num_layers=4)
    sent = {strike: {name: make() for name, make in wrong.items()} for strike, wrong in listed.items()}
    assert all(not torch.equal(one, weights[name]) for wrong in sent.values() for name, one in wrong.items())
    factors = {name: weight for name, weight in weights.items() if "lora_B" in name}
    for strike, factor in {"adapter left out": 0.0, "applied twice": 2.0, "rsLoRA's scale": 2.0}.items():
        assert sent[strike].keys() == factors.keys()
        assert all(torch.equal(one, factor * weights[name]) for name, one in sent[strike].items())
    assert list(sent["k_proj left out in the middle layer"]) == ["model.layers.2.k_proj.lora_B.weight"]
    assert len(sent["k_proj left out in all layers"]) == 4 and len(sent["middle layer left out"]) == 7
    assert strikes.classify("67% of the way back to the model without its adapter") == "adapter"
    assert strikes.classify("67% of the way back to the weights of version 3") == "former weights"


FULL_DEVICE = (
    "CUDA out of memory. Tried to allocate 1.19 GiB. GPU 2 has a total capacity of 79.18 GiB of which 1.03 GiB is "
    "free. Process 4242 has 50.93 GiB memory in use. Including non-PyTorch memory, this process has 27.20 GiB memory "
    "in use."
)


@pytest.mark.parametrize(
    ("log", "end"),
    [
        (f"torch.OutOfMemoryError: ...\nerror: {FULL_DEVICE} Lower ...\nbye\n", f"out of memory: error: {FULL_DEVICE}"),
        ("NCCL error\nCuda failure 2 'out of memory'\n", "out of memory: Cuda failure 2 'out of memory'"),
        ("error: no tokens\nbye\n", "exit code 1: error: no tokens"),
    ],
)
def test_failed_run_says_what_was_short(log: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    launch = importlib.import_module("launch")
    (tmp_path / "run.log").write_text(log)
    assert launch.Run(launch.Job("0.6b/hsdp", {}, 4), tmp_path, 1, 60.0).end.startswith(end)


def test_run_over_time_limit_ends_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    launch, log = importlib.import_module("launch"), tmp_path / "run.log"
    wait = launch.psutil.Popen.wait

    def wait_once_begun(process: Any, timeout: float | None = None) -> Any:
        """The limit begins when all processes are there, which may take a busy host longer."""
        wait_for(lambda: log.read_text().endswith("\n"))
        return wait(process, timeout)

    monkeypatch.setattr(launch.psutil.Popen, "wait", wait_once_begun)
    assert launch.run_logged(["sh", "-c", "sleep 601 & echo $!; wait"], log, dict(os.environ), 1.0) == 124
    assert still_running([int(log.read_text())]) == []


@pytest.mark.parametrize("mesh", ["one", "fsdp"])
def test_profiled_steps_are_short_on_each_rank(mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    meshes = importlib.import_module("meshes")
    arguments = argparse.Namespace(
        model="tiny", device="cpu", out=tmp_path, gpus=4, fsdp={}, steps=2, profile=True, same_batch=False,
        samples=8, max_new_tokens=1024, microbatch_tokens=16384, tokens=131072,
    )  # fmt: skip
    rollout = meshes.make_job(arguments, "tiny", mesh).config["trainer"]["callbacks"][0]["init_args"]
    assert (rollout["short_steps"], rollout["short_tokens"]) == ((0 if mesh == "one" else 2), 3 * 16384)


@pytest.mark.slow
def test_meshes_are_compared_with_one_device(run_benchmark: RunBenchmark, tmp_path: Path) -> None:
    sizes = "--gpus 2 --tokens 1600 --max-new-tokens 64 --microbatch-tokens 1024 --steps 2 --warm-up 1 --same-batch"
    run_benchmark("meshes", f"--mesh one fsdp {sizes} -- --model.compile false")
    one, fsdp = read_csv(tmp_path / "out" / "table.csv")
    assert [(row["mesh"], row["GPUs"], row["end"]) for row in (one, fsdp)] == [("one", "1", "ok"), ("fsdp", "2", "ok")]
    assert all(float(row[name]) > 0 for row in (one, fsdp) for name in ("update, s", "tokens/s a GPU", "planned"))
    assert (one["x one GPU"], one["beside"], fsdp["beside"]) == ("1.0", "", "one")
    # float32, and the same batch
    assert all(float(fsdp[f"{name} off by"]) < 1e-3 for name in ("log-probs", "entropy", "grad norm"))
    steps = read_csv(tmp_path / "out" / "steps.csv")
    assert [(row["mesh"], row["step"]) for row in steps] == [("one", "1"), ("one", "2"), ("fsdp", "1"), ("fsdp", "2")]


@pytest.mark.long
def test_collectives_are_timed_between_two_processes(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--gpus", "2", "--limit", "300", "--out", "out")
    run_python(BENCHMARKS / "collectives.py", *options, folder=tmp_path)
    rows = {(row["operation"], row["dtype"], row["bytes"]): row for row in read_csv(tmp_path / "out" / "table.csv")}
    assert len(rows) == (4 * 2 + 2) * 2
    row = rows["all-gather", "float32", "65536"]
    assert float(row["GB/s"]) == pytest.approx(65536 / float(row["us"]) / 1e3)
    assert float(row["bus"]) == pytest.approx(float(row["GB/s"]) / 2)  # one rank has half of it already


def test_steps_on_more_devices_are_predicted(tmp_path: Path) -> None:
    # Latencies of 10 us on 2 and 30 on 4, then 100 GB/s to the last rank: 1 GB takes 5 and 7.5 ms.
    lines = ["GPUs,operation,dtype,bytes,us"]
    for operation in ("all-gather", "reduce-scatter", "all-reduce", "gather of objects (host)", "scatter (host)"):
        lines += [f"2,{operation},float32,0,10", f"4,{operation},float32,0,30", f"4,{operation},float32,1e9,7530"]
    (tmp_path / "links.csv").write_text("\n".join(lines).replace("1e9", "1000000000"))
    (tmp_path / "host.csv").write_text('"collect, us","pack, us",KB\n100000,100,2\n')
    header = '"step, s","generate, s","update, s","sync, s",generate\'s deviation'
    (tmp_path / "steps.csv").write_text(f"GPUs,{header}\n1,10,6,3,0.5,1\n2,12,8,3,0.5,1\n")
    options = ["--steps", "steps.csv", "--collectives", "links.csv", "--collector", "host.csv", "--model", "tiny"]
    options += [
        "--trajectories",
        "20",
        "--tokens",
        "1000",
        "--microbatch-tokens",
        "500",
        "--gpus",
        "4",
        "16",
        "--out",
        "out",
    ]
    run_python(BENCHMARKS / "predict_scaling.py", *options, folder=tmp_path)
    rows = {(row["GPUs"], row["mesh"]): row for row in read_csv(tmp_path / "out" / "table.csv")}
    assert list(rows) == [("1", "fsdp"), ("2", "fsdp"), ("4", "fsdp"), ("16", "fsdp"), ("16", "hsdp")]
    assert (rows["1", "fsdp"]["step, s"], rows["1", "fsdp"]["measured"]) == ("10.0", "10.0")
    assert float(rows["2", "fsdp"]["measured efficiency"]) == pytest.approx(10 / 12)
    two = {name: float(rows["2", "fsdp"][f"{name}, s"]) for name in ("generate", "update", "sync", "rest")}
    # the greatest of two normal values is expected at 1 / sqrt(pi); 40 trajectories of 2 KB, 20 of them not rank 0's
    assert two["generate"] == pytest.approx(6 + math.pi**-0.5 + 10e-6 + 80000 / 2 / 100e9 + 20 * 100e-6, abs=1e-6)
    # the collector computes 80 x 0.1 s, more than engines sample
    assert float(rows["4", "fsdp"]["generate, s"]) == pytest.approx(8 + 60 * 100e-6, abs=1e-4)
    # Not hidden: the embedding's gather, and in both micro-batches a layer's and the reduction of the embedding.
    embedding, layer = 1024 * 64, 64 * 32 * 8 + 3 * 64 * 128
    moved = 2 * embedding + 2 * (2 * layer + 4 * embedding)
    assert two["update"] == pytest.approx(3 + 5 * 10e-6 + moved / 2 / 100e9, abs=1e-9)
    weights = 2 * (embedding + 2 * layer)
    assert two["sync"] == pytest.approx(0.5 + 10e-6 + weights / 2 / 100e9, abs=1e-9)
    assert two["rest"] == pytest.approx(0.5 + 30 * (10e-6 + 1024 / 2 / 100e9), abs=1e-9)
    # 8 ranks: 70 us; on to a second node 10 us and 7 hops of 10, at 50 GB/s; with a copy on each, nothing
    sync = [float(rows["16", mesh]["sync, s"]) - 0.5 for mesh in ("fsdp", "hsdp")]
    assert sync == pytest.approx([150e-6 + weights * 15 / 16 / 50e9, 70e-6 + weights * 7 / 8 / 100e9], abs=1e-9)
    assert "<svg" in (tmp_path / "out" / "scaling.svg").read_text()


def test_waits_of_agents_repeat_from_run_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    async def play(waits: Any, index: int) -> float:
        await waits.reset(Prompt(index, "", [1], {}))
        for _ in range(2):
            *_, info = await waits.step("")
        return float(info["waited"])

    async def play_all() -> list[float]:
        work = importlib.reload(importlib.import_module("agent_work"))  # as a new process
        played = (play(work.Waits(num_turns=2, shortest=0.0, longest=0.01), index) for index in (0, 0, 1, 0))
        return list(await asyncio.gather(*played))

    first, second = (asyncio.run(play_all()) for _ in range(2))
    assert first == second and len(set(first)) == 4


def make_row(waited: float, engine: float, environment: float) -> dict[str, Any]:
    timings = [("trajectory", engine + environment), ("engine", engine), ("environment", environment)]
    return {"step": 2, "metrics": [("waited", waited)], "timings": timings}


def test_step_that_waits_is_compared_with_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setitem(sys.modules, "agents", sys)  # undone afterwards: OpenAI's SDK has the same name
    del sys.modules["agents"]
    agents = importlib.import_module("agents")
    seconds = {"waits": 6.0, "does not wait": 2.0, "alone": 1.0}
    jobs: dict[str, Any] = {}

    def fit(job: Any, *_: Any) -> Any:
        jobs[job.name] = job.config["environment"]["init_args"]["arguments"]
        run = SimpleNamespace(
            folder=job.name, metrics=lambda: [{"time/generate": 99.0}, {"time/generate": seconds[job.name]}]
        )
        return SimpleNamespace(require_success=lambda: run)

    rows = [{**make_row(9.0, 1.0, 9.0), "step": 1}, make_row(4.0, 1.0, 4.5), make_row(3.0, 0.5, 3.0)]
    monkeypatch.setattr(agents, "fit", fit)
    monkeypatch.setattr(agents, "trajectories", lambda folder: rows)
    monkeypatch.setattr(agents, "grpo_config", lambda _, **settings: settings | {"trainer": {}})
    (row,) = agents.measure_waiting(argparse.Namespace(prompts=1, samples=2, turns=2, new_tokens=4, steps=2))
    assert (row["of bound"], row["of wait"], row["longest wait, s"]) == (6 / (4 + 1), 6 / 4, 4.0)
    assert [row[name] for name in ("the last: environment, s", "engine, s", "else, s")] == [4.0, 1.0, 0.5]
    assert {name: one["longest"] for name, one in jobs.items()} == {"waits": 2.0, "does not wait": 0.0, "alone": 0.0}


@pytest.mark.slow
def test_idle_sessions_of_agents_are_measured(run_benchmark: RunBenchmark) -> None:
    # Long enough that a host which stops for some seconds meanwhile leaves two measurements.
    printed = run_benchmark("agents", "--part idle --sessions 4 --idle 20 --new-tokens 4 -- --model.compile false")
    *_, header, _, row = printed.strip().splitlines()
    measured = dict(zip(header.strip("| ").split(" | "), row.strip("| ").split(" | "), strict=True))
    assert measured["sessions"] == "4" and float(measured["a session, KiB"].replace(",", "")) > 0
    assert 0 <= float(measured["CPU, s a second"]) < 4


@pytest.mark.long
def test_collectors_work_is_measured_without_engines(tmp_path: Path) -> None:
    options = ("--prompts", "2", "--samples", "2", "--max-new-tokens", "64", "--out", "out")
    run_python(BENCHMARKS / "collector.py", *options, folder=tmp_path)
    (row,) = read_csv(tmp_path / "out" / "table.csv")
    assert (row["trajectories"], row["tokens"]) == ("4", "64")
    assert float(row["KB"]) > 64 * 16 / 1e3  # an id, a log-probability and a weight version a token
    assert all(float(row[name]) > 0 for name in ("pack, us", "unpack, us", "trajectories/s"))
    assert 0 < float(row["least"]) <= float(row["collect, us"]) <= float(row["most"])
    assert float(row["sampler alone, us"]) > 0


def test_raised_bound_reaches_rollout_and_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    rollout = VLLMRollout(placement="standalone", max_staleness=4)
    chosen: list[int] = []
    module = argparse.Namespace(choose_correction=chosen.append)
    probe = importlib.import_module("probes").RaiseStaleness({0: 0, 5: 1})
    found = []
    for step in (0, 1, 5, 6):
        trainer = argparse.Namespace(global_step=step, callbacks=[probe, rollout])
        probe.on_train_batch_start(trainer, module, None, 0)
        found.append((rollout.max_staleness, rollout.in_flight.max_staleness, rollout.options.prompts_ahead(8)))
    assert found == [(0, 0, 0), (0, 0, 0), (1, 1, 8), (1, 1, 8)]
    assert chosen == [0, 1]


def test_a_split_is_one_run_that_raises_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    asynchronous = importlib.import_module("asynchronous")
    monkeypatch.setattr(asynchronous, "rare_tokens", lambda *_: [7])
    monkeypatch.setattr(asynchronous, "grpo_config", lambda _, **settings: settings | {"trainer": {}})
    arguments = argparse.Namespace(
        **{"staleness": [2, 0], "warm_up": 1, "steps": 3, "model": "tiny", "max_new_tokens": 30, "engines": 1},
        **{"cache": "keep", "samples": 2, "microbatch_tokens": 64},
    )
    job = asynchronous.make_job(arguments, asynchronous.split("1+1"), 8)
    [probe] = job.config["callbacks"]
    assert probe["init_args"]["bounds"] == {0: 0, 3: 2} and probe["class_path"] == "probes.RaiseStaleness"
    assert job.config["rollout"]["max_staleness"] == 2 and job.config["trainer"] == {"max_steps": 8}


def test_arithmetic_hides_collectives_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    predict = importlib.import_module("predict_scaling")
    links = argparse.Namespace(seconds=lambda _, size, __: size, all_reduce=lambda *_: 1000)
    work = {"num_microbatches": 2, "num_layers": 2, "layer": 10, "others": 100, "fsdp_share": 0.5}
    each = predict.Update(seconds=2, is_reduced_once=False, is_kept=False, **work)
    assert [*predict.collective_seconds(each, links, 2, 2)] == [(760, 620), (560, 420)]
    once = predict.Update(seconds=2, is_reduced_once=True, is_kept=True, **work)
    assert [*predict.collective_seconds(once, links, 4, 2)] == [(240, 220), (3480, 1400)]
    assert predict.update_seconds(each, links, 2, 2) == 3 + (760 - 1.5) + (560 - 1.5)
    assert predict.update_seconds(predict.replace(each, seconds=400), links, 2, 2) == 600 + 620 + 420
    updates = {"one": {"tokens": 6.0, "seconds": 2.0}, "one-fsdp": {"tokens": 4.0, "seconds": 2.0}}
    options = {"reduce_every_microbatch": False, "reshard_after_forward": False}
    made = predict.make_update(options, "tiny", 1.0, 2, updates)
    assert (made.is_reduced_once, made.is_kept, made.fsdp_share) == (True, True, 0.5)
