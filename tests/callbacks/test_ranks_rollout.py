"""Several ranks roll out with real engines: one a rank, or one that they share."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from engine_run import (
    InterruptionError,
    Interrupts,
    find_core,
    in_flight,
    make_data,
    make_module,
    make_rollout,
    make_trainer,
    save_model,
)
from lightning.pytorch.callbacks import ModelCheckpoint
from rank_processes import finish, start_calls

from rlightning.hooks import RLCallback
from rlightning.parallel.fsdp import FSDP

pytestmark = pytest.mark.processes
RUNS_AHEAD = {"placement": "standalone", "max_staleness": 1}


class Witness(RLCallback):
    """Notes each step's prompts, tokens and gap; kills one rank's engine as the second rollout begins."""

    def __init__(self, victim: int | None) -> None:
        self.victim = victim
        self.steps: list[dict[str, Any]] = []
        self.engines: set[int] = set()

    def on_rollout_start(self, trainer: Any, module: Any, prompts: Any) -> None:
        engine = module.sampler.engine
        if engine is not None and engine.process is not None:
            self.engines.add(engine.process.pid)
            if trainer.global_rank == self.victim and trainer.global_step == 1:
                engine.ready.result()  # standalone, another may have been up before it
                os.kill(find_core(engine.process.pid), signal.SIGKILL)

    def on_rollout_end(self, trainer: Any, module: Any, batch: Any) -> None:
        versions = set(batch.weight_versions[batch.is_sampled].tolist())
        self.steps.append({"sampled": [p.index for p in batch.prompts], "versions": sorted(versions)})

    def on_update_start(self, trainer: Any, module: Any, batch: Any) -> None:
        self.steps[-1] |= {"tokens": batch.num_tokens, "updated": [prompt.index for prompt in batch.prompts]}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        names = ("policy/rollout_gap_max", "reward/mean", "completion/length_max")
        self.steps[-1] |= {name: float(trainer.callback_metrics[name]) for name in names}
        self.steps[-1] |= {"stopped": module.sampler.last.get("rollout/stopped")}
        engine = module.sampler.engine
        if engine is not None:
            self.engines.add(engine.process.pid)


def train(
    folder: Path, ranks_per_engine: int, victim: int | None, accelerator: str, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Train three steps on this rank; in the second one, one rank's engine is killed."""
    engine = {"tensor_parallel_size": ranks_per_engine} if ranks_per_engine > 1 else {}
    rollout, witness = make_rollout(engine=engine, **arguments), Witness(victim)
    strategy = FSDP(tensor_parallel_size=ranks_per_engine)
    trainer = make_trainer(folder, 3, rollout, witness, strategy=strategy, devices=2, accelerator=accelerator)
    module = make_module(str(folder / "model"), prompts_per_step=4, samples_per_prompt=3)
    trainer.fit(module, make_data(folder))
    return {"steps": witness.steps, "num_engines": len(witness.engines), "in_flight": in_flight(rollout)}


def run(
    folder: Path, ranks_per_engine: int, victim: int, accelerator: str = "cpu", **arguments: Any
) -> list[dict[str, Any]]:
    save_model(folder / "model", num_key_value_heads=2)  # one a tensor-parallel rank
    return finish(start_calls(train, 2, folder, ranks_per_engine, victim, accelerator, arguments))


def check_steps(first: dict[str, Any], second: dict[str, Any], oversample: float) -> None:
    """The ranks sampled different prompts, from the weights of the step, and learned what the engines sampled.

    They begin more than they need, and stop the rest, which the next step goes on with.
    """
    seen: list[int] = []
    for number, (one, other) in enumerate(zip(first["steps"], second["steps"], strict=True)):
        assert len(one["sampled"]) == len(other["sampled"]) == 6
        assert not set(one["sampled"]) & set(other["sampled"])
        seen += sorted({*one["sampled"], *other["sampled"]})
        assert one["versions"] == other["versions"] == [number]
        # One learning rate moves log-probabilities by far more than this.
        assert one["policy/rollout_gap_max"] == other["policy/rollout_gap_max"] < 1e-3
        assert one["reward/mean"] == other["reward/mean"]
        assert one["stopped"] == other["stopped"] == 4 * oversample
    assert len(first["in_flight"]) == 2  # also where a step may begin one of them: each rank has taken one
    seen += first["in_flight"]
    assert len(seen) == len(set(seen)) == 14


def check_runs_ahead(first: list[dict[str, Any]], second: list[dict[str, Any]], in_flight: list[int]) -> None:
    """Assert that each of sixteen prompts is trained once in three steps or in flight, at most one version stale."""
    seen: list[int] = []
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        assert len(one["sampled"]) == len(other["sampled"]) == 6
        seen += one["sampled"][::3] + other["sampled"][::3]
        assert all(number - 1 <= version <= number for version in one["versions"] + other["versions"])
    assert len(in_flight) == 4
    assert sorted(seen + in_flight) == list(range(16))


def test_ranks_with_own_engines_recover_killed_engine(tmp_path: Path) -> None:
    first, second = run(tmp_path, 1, victim=1, oversample=0.25)
    check_steps(first, second, 0.25)
    assert first["num_engines"] == 1
    assert second["num_engines"] == 2
    for one, other in zip(first["steps"], second["steps"], strict=True):
        assert sorted(one["updated"] + other["updated"]) == sorted(one["sampled"] + other["sampled"])
        longest = 3 * (5 + one["completion/length_max"])  # a group
        assert abs(one["tokens"] - other["tokens"]) <= longest
    assert (tmp_path / "engine.0.log").exists() and (tmp_path / "engine.1.log").exists()


@pytest.mark.slow
def test_tensor_parallel_ranks_recover_killed_shared_engine(tmp_path: Path) -> None:
    first, second = run(tmp_path, 2, victim=0, oversample=0.5)
    check_steps(first, second, 0.5)
    assert (first["num_engines"], second["num_engines"]) == (2, 0)
    for one, other in zip(first["steps"], second["steps"], strict=True):
        assert one["updated"] == other["updated"] == one["sampled"] + other["sampled"]


@pytest.mark.parametrize(
    "accelerator", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("gpu", marks=pytest.mark.multigpu(4))]
)
def test_ranks_sharing_standalone_engines_recover_killed_engine(accelerator: str, tmp_path: Path) -> None:
    first, second = run(tmp_path, 1, victim=0, accelerator=accelerator, num_engines=2, **RUNS_AHEAD)
    assert second["num_engines"] == 0  # they belong to rank 0, which saw one of them come back
    check_runs_ahead(first["steps"], second["steps"], first["in_flight"])
    for one, other in zip(first["steps"], second["steps"], strict=True):
        assert one["reward/mean"] == other["reward/mean"]


def begin(folder: Path) -> dict[str, Any]:
    """Train on this rank until an error ends the run in its third update."""
    return train_with_checkpoints(folder, Interrupts(2))


def resume(folder: Path) -> dict[str, Any]:
    """Resume on this rank from the checkpoint of the second update."""
    return train_with_checkpoints(folder, ckpt_path=folder / "checkpoints" / "last.ckpt")


def train_with_checkpoints(folder: Path, *callbacks: RLCallback, ckpt_path: Path | None = None) -> dict[str, Any]:
    rollout, witness = make_rollout(**RUNS_AHEAD), Witness(victim=None)
    saves = ModelCheckpoint(folder / "checkpoints", save_last=True, every_n_train_steps=1)
    ranks: dict[str, Any] = {"strategy": FSDP(failure_grace=500), "devices": 2, "enable_checkpointing": True}
    trainer = make_trainer(folder, 3, rollout, witness, saves, *callbacks, **ranks)
    module = make_module(str(folder / "model"), prompts_per_step=4, samples_per_prompt=3)
    with suppress(InterruptionError):
        trainer.fit(module, make_data(folder), ckpt_path=ckpt_path)
    return {"steps": witness.steps, "in_flight": in_flight(rollout), "updates": module.weight_version}


@pytest.mark.slow
def test_resumed_ranks_neither_lose_nor_repeat_prompts(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    begun = finish(start_calls(begin, 2, tmp_path))
    resumed = finish(start_calls(resume, 2, tmp_path))
    assert [rank["updates"] for rank in begun + resumed] == [2, 2, 3, 3]
    assert [len(rank["steps"]) for rank in begun + resumed] == [3, 3, 1, 1]  # the third step is done again
    first, second = (one["steps"][:2] + other["steps"] for one, other in zip(begun, resumed, strict=True))
    check_runs_ahead(first, second, resumed[0]["in_flight"])
