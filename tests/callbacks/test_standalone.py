"""Engines on devices of their own, under the real Trainer: on-policy, running ahead, killed, stopped, resumed."""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_run import (
    PER_STEP,
    InterruptionError,
    Interrupts,
    Origins,
    Witness,
    check_each_once,
    check_on_policy,
    check_staleness,
    consumed,
    drawn,
    in_flight,
    in_session,
    make_data,
    make_module,
    make_rollout,
    make_trainer,
    save_model,
    versions,
)
from lightning.pytorch.callbacks import ModelCheckpoint
from metrics_table import undocumented

from rlightning.data import ValidationSet
from rlightning.errors import EngineError
from rlightning.hooks import RLCallback
from rlightning.rollout.weights.shared_memory import SharedMemorySender
from rlightning.types import RolloutBatch

RUNS_AHEAD = {"placement": "standalone", "max_staleness": 1}
OVERSAMPLES = {"oversample": 1.0}
"""Colocated: as many prompts in flight."""


class EngineFaults(RLCallback):
    """Kills or stops an engine in the updates of chosen steps; waits in others until all engines are up again.

    One that is stopped may hang for 2 s; those that are at work have all the time that a busy machine takes from them.
    """

    def __init__(self, faults: dict[int, tuple[int, signal.Signals]], waits: tuple[int, ...] = ()) -> None:
        self.faults, self.waits = faults, waits
        self.sessions: list[int] = []

    def on_update_start(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        engines = module.sampler._engines.samplers
        self.sessions += [engine.process.pid for engine in engines]
        if module.weight_version in self.faults:
            number, how = self.faults[module.weight_version]
            process = engines[number].process
            os.kill(process.pid, how)
            if how is signal.SIGSTOP:
                process.config = replace(process.config, hang_timeout=2.0)
                process.submit("ping")  # which sets it
            process.ended.result()  # the next weight sync starts it again
        if module.weight_version in self.waits:
            for engine in engines:
                engine.ready.result()


@pytest.mark.slow
@pytest.mark.processes
def test_zero_max_staleness_samples_only_current_weights(engine_model: str, tmp_path: Path) -> None:
    witness = Witness()
    rollout = make_rollout(placement="standalone", num_engines=2)
    sums = ValidationSet(str(tmp_path / "sums.jsonl"), limit=4)
    trainer = make_trainer(tmp_path, 4, rollout, witness, val_check_interval=2, check_val_every_n_epoch=None)
    trainer.fit(make_module(engine_model), make_data(tmp_path, validation={"sums": sums}))
    assert consumed(witness.batches) == drawn(trainer, 4 * PER_STEP)
    check_on_policy(witness)
    assert [step for step, _ in witness.validations] == [0, 2, 4]
    assert {"engine_sleep", "engine_wake"}.isdisjoint(witness.events)


@pytest.mark.processes
@pytest.mark.slow
def test_tensor_parallel_engine_samples_from_each_updates_weights(tmp_path: Path) -> None:
    witness, origins = Witness(), Origins()
    rollout = make_rollout(
        placement="standalone",
        max_staleness=2,
        max_new_tokens=48,
        cache_after_sync="recompute",
        engine={"tensor_parallel_size": 2},
    )
    engine_model = save_model(tmp_path / "model", num_key_value_heads=2)  # one a worker
    make_trainer(tmp_path, 4, rollout, origins, witness).fit(make_module(engine_model), make_data(tmp_path))
    assert origins.num_workers == [2] * 4
    check_staleness(witness.batches, 2)
    # One learning rate moves log-probabilities by far more than this.
    assert max(origins.gaps) < 1e-4


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("placement", ["colocated", "standalone"])
def test_oversampled_unfinished_groups_carry_to_next_step(placement: Any, engine_model: str, tmp_path: Path) -> None:
    witness = Witness()
    # One prompt at a time: the last of five is not complete, nor begun, when four are.
    rollout = make_rollout(placement=placement, oversample=0.25, max_new_tokens=64, engine={"max_num_seqs": 2})
    trainer = make_trainer(tmp_path, 3, rollout, witness)
    trainer.fit(make_module(engine_model), make_data(tmp_path))
    assert len(witness.steps) == 3
    check_on_policy(witness)
    for step, following in itertools.pairwise(witness.steps):  # one that was complete by then is not stopped
        assert step["rollout/stopped"] + following.get("async/requeued", 0) == 1
    assert undocumented(list(witness.steps[-1])) == []
    check_each_once(trainer, consumed(witness.batches), rollout, num_in_flight=1)


class Refill(RLCallback):
    """Has a step take half as many prompts again, as one that refills its batch does."""

    def __init__(self) -> None:
        self.steps: list[tuple[dict[str, float], dict[str, float], Any]] = []

    def on_update_start(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        first = module.sampler.last
        batches = [batch, module.rollout(module.take_prompts(PER_STEP // 2))]
        versions = [batch.weight_versions[batch.is_sampled] for batch in batches]
        self.steps.append((first, module.sampler.last, module.weight_version - torch.cat(versions)))


@pytest.mark.slow
@pytest.mark.processes
def test_metrics_are_of_all_that_a_step_consumes(engine_model: str, tmp_path: Path) -> None:
    refill = Refill()
    rollout = make_rollout(placement="standalone", max_staleness=1)
    make_trainer(tmp_path, 4, rollout, refill).fit(make_module(engine_model), make_data(tmp_path))
    for version, (first, whole, ages) in enumerate(refill.steps):
        assert whole["async/staleness_mean"] == pytest.approx(ages.float().mean().item())
        assert whole["async/staleness_1"] == pytest.approx((ages == 1).float().mean().item())
        assert whole["async/version_sampled_mean"] == pytest.approx((version - ages.float()).mean().item())
        assert whole["async/version_sampled_min"] == version - ages.max()
        assert whole["async/version_trained"] == first["async/version_trained"] == version
        assert "rollout/stopped" not in whole  # all go on
        assert whole["async/trainer_waited"] >= first["async/trainer_waited"] > 0
        assert whole["async/engines_idle"] >= first["async/engines_idle"]
    assert len(refill.steps) == 4


@pytest.mark.slow
@pytest.mark.processes
def test_colocated_refill_takes_next_finished_groups(engine_model: str, tmp_path: Path) -> None:
    refill = Refill()
    rollout = make_rollout(oversample=0.5, engine={"max_num_seqs": 2})
    make_trainer(tmp_path, 3, rollout, refill).fit(make_module(engine_model), make_data(tmp_path))
    assert len(refill.steps) == 3
    assert all(ages.max() == 0 for _, _, ages in refill.steps)
    # Two of six, then two of the four that are there for a refill of two.
    assert [(first["rollout/stopped"], whole["rollout/stopped"]) for first, whole, _ in refill.steps] == [(2, 4)] * 3
    assert len(in_flight(rollout)) == PER_STEP // 2


class Sleeper(RLCallback):
    """Puts the engines to sleep where they sleep if they are colocated."""

    def on_update_start(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        rollout = module.sampler
        for engine in rollout._engines.samplers:
            held = engine.weight_version
            rollout._engines.sleep()
            engine.sleep()
            assert engine.weight_version == held


class SavesFirst(RLCallback):
    """Saves at the end of each step, before the callbacks after it have heard of the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


@pytest.mark.processes
def test_staleness_is_bounded_and_checkpoints_are_complete(engine_model: str, tmp_path: Path) -> None:
    num_steps, ahead, witness = 6, 2, Witness()
    rollout = make_rollout(placement="standalone", max_staleness=ahead, max_new_tokens=48, cache_after_sync="keep")
    sums = ValidationSet(str(tmp_path / "sums.jsonl"), limit=4)
    callbacks = (SavesFirst(tmp_path), rollout, Sleeper(), witness)
    trainer = make_trainer(tmp_path, num_steps, *callbacks, val_check_interval=3, check_val_every_n_epoch=None)
    module = make_module(engine_model, lr=1e-3)
    trainer.fit(module, make_data(tmp_path, validation={"sums": sums}))
    assert [batch.num_sequences for batch in witness.batches] == [2 * PER_STEP] * num_steps
    check_staleness(witness.batches, ahead)
    ages = [step["async/staleness_max"] for step in witness.steps]
    assert ages[0] == 0 and 1 <= max(ages) <= ahead
    # Sent with each update, also to what was under way; and the loss is weighed by how old tokens are.
    syncs = [event for event in witness.events if event.startswith("sync")]
    assert syncs == [f"sync {version}" for version in range(num_steps + 1)]
    assert all("policy/correction_weight" in step for step in witness.steps)
    assert [step for step, _ in witness.validations] == [0, 3, 6]
    assert undocumented(list(witness.steps[-1])) == []

    # What was handed in has been consumed or is in flight, each once.
    for step in range(1, num_steps + 1):
        saved = torch.load(tmp_path / f"{step}.ckpt", weights_only=False)
        groups = saved["callbacks"][rollout.state_key]["in_flight"]["groups"]
        under_way = [group["prompt"]["index"] for group in groups]
        assert len(under_way) == ahead * PER_STEP
        position = saved["PromptDataModule"]["position"]
        assert position == (step + ahead) * PER_STEP
        assert sorted(consumed(witness.batches[:step]) + under_way) == sorted(drawn(trainer, position))


@pytest.mark.processes
def test_killed_or_hung_engines_restart_during_run(
    engine_model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    witness = Witness()
    faults = EngineFaults({1: (0, signal.SIGKILL), 3: (1, signal.SIGSTOP)}, waits=(2, 4))
    rollout = make_rollout(placement="standalone", num_engines=2, max_staleness=1)
    trainer = make_trainer(tmp_path, 5, rollout, faults, witness)
    trainer.fit(make_module(engine_model), make_data(tmp_path))
    assert trainer.global_step == 5
    assert caplog.text.count("Engine 0 is restarted, once in this step: The engine died") == 1
    assert caplog.text.count("Engine 1 is restarted, once in this step: The engine gave no heartbeat for 2 s") == 1
    assert [batch.num_sequences for batch in witness.batches] == [2 * PER_STEP] * 5
    check_staleness(witness.batches, 1)
    check_each_once(trainer, consumed(witness.batches), rollout, num_in_flight=PER_STEP)
    # Each came back, was verified, and was sent what the other one had.
    assert len(set(faults.sessions)) == 4
    assert not any(in_session(session) for session in set(faults.sessions))


@pytest.mark.slow
@pytest.mark.processes
def test_without_any_engine_left_the_run_ends(engine_model: str, tmp_path: Path) -> None:
    rollout = make_rollout(placement="standalone", num_engines=2, engine={"kv_cache_memory_bytes": 1 << 50})
    trainer = make_trainer(tmp_path, 1, rollout)
    with pytest.raises(
        EngineError,
        match=r"^No engine is left of 2\. The last one: The engine could not start: ValueError: Available memory .*"
        r"\(Its log is .*engine\.\d\.log\)$",
    ):
        trainer.fit(make_module(engine_model), make_data(tmp_path))


@pytest.mark.processes
@pytest.mark.slow
def test_resumed_runs_lose_no_prompt_and_repeat_none(engine_model: str, tmp_path: Path) -> None:
    """Two steps of one that runs ahead, one and two of such as oversample; each but the last is cut in an update."""
    stages: list[tuple[dict[str, Any], int]] = [(RUNS_AHEAD, 2), (OVERSAMPLES, 3), (OVERSAMPLES, 5)]
    batches: list[RolloutBatch] = []
    last: Path | None = None
    for number, (arguments, end) in enumerate(stages):
        witness, rollout, folder = Witness(), make_rollout(**arguments), tmp_path / str(number)
        checkpoint = ModelCheckpoint(folder, save_last=True, every_n_train_steps=1)
        callbacks = (rollout, witness, checkpoint, Interrupts(end))
        trainer = make_trainer(tmp_path, 5, *callbacks, enable_checkpointing=True)
        is_cut = end < 5
        with pytest.raises(InterruptionError) if is_cut else contextlib.nullcontext():
            trainer.fit(make_module(engine_model), make_data(tmp_path), ckpt_path=last)
        assert len(batches) + len(witness.batches) == end + is_cut
        for version, batch in enumerate(witness.batches, len(batches)):
            assert min(versions(batch)) >= version - arguments.get("max_staleness", 0)
        batches = (batches + witness.batches)[:end]  # the one that was cut is not done
        last = folder / "last.ckpt"
    check_each_once(trainer, consumed(batches), rollout, num_in_flight=PER_STEP)


class WaitsForAnswers(RLCallback):
    """Updates when all that engines were asked for is complete."""

    def on_update_start(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        while not all(answer.done() for answer in list(module.sampler._collector._running)):
            time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.processes
def test_resume_with_other_sampling_requeues_completions(
    engine_model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs_ahead: dict[str, Any] = {"placement": "standalone", "max_staleness": 2}
    last = tmp_path / "last.ckpt"
    checkpoint = ModelCheckpoint(tmp_path, save_last=True)
    rollout, first = make_rollout(**runs_ahead), Witness()
    trainer = make_trainer(tmp_path, 2, rollout, WaitsForAnswers(), first, checkpoint, enable_checkpointing=True)
    trainer.fit(make_module(engine_model), make_data(tmp_path))
    saved = torch.load(last, weights_only=False)["callbacks"][rollout.state_key]["in_flight"]["groups"]
    # Of the eight that the first step left complete the second has taken four; of its own the engine may be through.
    complete = [len(group["trajectories"] or []) == 2 for group in saved]
    assert len(saved) == 2 * PER_STEP and all(complete[:PER_STEP])

    caplog.set_level("INFO", logger="rlightning")
    witness = Witness()
    rollout = make_rollout(**runs_ahead, temperature=0.5, max_new_tokens=5)
    trainer = make_trainer(tmp_path, 3, rollout, witness)
    trainer.fit(make_module(engine_model, samples_per_prompt=3), make_data(tmp_path), ckpt_path=last)
    (batch,), (step,) = witness.batches, witness.steps
    assert batch.group_ids.bincount().tolist() == [3] * PER_STEP
    assert batch.completion_lengths.max() <= 5
    assert versions(batch) == [2] and step["policy/rollout_gap_max"] < 1e-4
    trained = consumed(first.batches) + consumed([batch], group_size=3)
    check_each_once(trainer, trained, rollout, num_in_flight=2 * PER_STEP)
    assert [line for line in caplog.messages if "are requeued" in line] == [
        f"{sum(complete)} prompts in flight are requeued: they were sampled with other settings "
        "(model.samples_per_prompt: 2, now 3; rollout.temperature: 1.0, now 0.5; rollout.max_new_tokens: 8, now 5)."
    ]


class ArmAndWait(EngineFaults):
    """Sets a moment for the sync that ends the update of a step, and waits in others."""

    def __init__(self, moments: dict[int, str], waits: tuple[int, ...]) -> None:
        super().__init__({}, waits)
        self.moments, self.moment = moments, ""

    def on_update_start(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        super().on_update_start(trainer, module, batch)
        self.moment = self.moments.get(module.weight_version, "")


@pytest.mark.processes
@pytest.mark.slow
def test_engine_deaths_during_weight_syncs_are_recovered(
    engine_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = make_rollout(placement="standalone", num_engines=2, max_staleness=1, bucket_bytes=1 << 14)
    arm = ArmAndWait({1: "between two chunks", 3: "after the last"}, waits=(2, 4))
    fill = SharedMemorySender.fill
    killed: list[str] = []

    def kill_at(moment: str) -> None:
        if arm.moment != moment:
            return
        arm.moment = ""
        killed.append(moment)
        engine = rollout._engines.samplers[0]  # type: ignore[union-attr]
        process = engine.process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        process.ended.result()

    def fatal(sender: SharedMemorySender, source: Any) -> Iterator[int]:
        for index in fill(sender, source):
            if index == 1:
                kill_at("between two chunks")
            yield index
        kill_at("after the last")

    monkeypatch.setattr(SharedMemorySender, "fill", fatal)
    witness = Witness()
    trainer = make_trainer(tmp_path, 5, rollout, arm, witness)
    trainer.fit(make_module(engine_model), make_data(tmp_path))
    assert trainer.global_step == 5 and killed == ["between two chunks", "after the last"]
    assert len(set(arm.sessions)) == 4
    check_staleness(witness.batches, 1)
