"""Engines that are killed or stopped under the real Trainer: in a rollout, between steps, in validation; and twice."""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import generate, send
from engine_run import (
    Witness,
    check_on_policy,
    find_core,
    in_session,
    make_data,
    make_module,
    make_rollout,
    make_trainer,
    note_sessions,
    save_model,
)
from tiny import VOCABULARY

from rlightning.data import ValidationSet
from rlightning.errors import EngineError, EngineStartError, find_run_error
from rlightning.hooks import RLCallback
from rlightning.processes.managed_process import ManagedProcess
from rlightning.rollout import Sampling
from rlightning.rollout.engine import Engine
from rlightning.rollout.vllm.launcher import EngineProcess
from rlightning.types import Prompt, Sample

pytestmark = pytest.mark.processes

# The engine works on one prompt at a time, its two samples, so that the first is done long before the last.
ONE_BY_ONE: dict[str, Any] = {"max_new_tokens": 64, "verify_trajectories": False, "engine": {"max_num_seqs": 2}}


def kill_engine(engine: Engine) -> None:
    assert engine.process is not None
    os.kill(engine.process.pid, signal.SIGKILL)


def kill_core(engine: Engine) -> None:
    assert engine.process is not None
    os.kill(find_core(engine.process.pid), signal.SIGKILL)


def stop_core(engine: Engine) -> None:
    assert engine.process is not None
    os.kill(find_core(engine.process.pid), signal.SIGSTOP)
    # Not before: a busy machine may keep one that is well from a heartbeat for as long.
    engine.process.config = replace(engine.process.config, hang_timeout=2.0)


class Requests:
    """The requests to an engine's process under one version of the weights, and the results until the process died."""

    def __init__(self, weight_version: int) -> None:
        self.weight_version, self.num_prompts = weight_version, 0
        self.finished: list[list[Sample]] = []


class EngineFaults:
    """Has chosen processes fail after the first prompt is done; notes all requests, by process and weight version."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, faults: dict[int, Callable[[Engine], None]]) -> None:
        self.by_process: dict[Any, Requests] = {}
        self.sessions, sample = note_sessions(monkeypatch), Engine.sample

        async def watched(engine: Engine, *arguments: Any, **options: Any) -> list[Sample]:
            process, version = engine.process, engine.weight_version or 0
            assert process is not None
            requests = self.by_process.setdefault((process, version), Requests(version))
            fault = faults.get(self.requests.index(requests))
            requests.num_prompts += 1
            samples = await sample(engine, *arguments, **options)
            if fault is not None and requests.finished:
                # Drop what the engine had sent already: on a busy machine that may be everything.
                raise await asyncio.wrap_future(process.ended)
            requests.finished.append(samples)
            if fault is not None:
                fault(engine)
                process.submit("ping")  # a request by which its death is noticed, if it has no other left
            return samples

        monkeypatch.setattr(Engine, "sample", watched)

    @property
    def requests(self) -> list[Requests]:
        return list(self.by_process.values())


class KillBetween(RLCallback):
    """Kills the engine when it is not at work: in the update of one step, and before a validation."""

    def __init__(self, at_update: int, at_validation: int) -> None:
        self.at_update, self.at_validation = at_update, at_validation

    def on_update_start(self, trainer: Any, module: Any, batch: Any) -> None:
        if module.weight_version == self.at_update:
            self.kill(kill_core, module)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if module.weight_version == self.at_validation:
            self.kill(kill_engine, module)

    def kill(self, how: Callable[[Engine], None], module: Any) -> None:
        """Return when it is known to be dead."""
        process = module.sampler.engine.process
        how(module.sampler.engine)
        process.ended.result()


@pytest.mark.slow
def test_a_run_survives_one_death_a_step(
    engine_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Calls of the engine: 0 and 1 are step 1, 2 and 3 are step 2, 4 and 5 are step 3; then 6, validation 7, 8.
    faults = EngineFaults(monkeypatch, {0: kill_engine, 2: kill_core, 4: stop_core})
    witness = Witness()
    rollout = make_rollout(**ONE_BY_ONE)
    between = KillBetween(at_update=2, at_validation=4)
    trainer = make_trainer(tmp_path, 5, rollout, between, witness, val_check_interval=4, check_val_every_n_epoch=None)
    module = make_module(engine_model, validate_first=False)
    sums = ValidationSet(str(tmp_path / "sums.jsonl"), limit=4)
    trainer.fit(module, make_data(tmp_path, validation={"sums": sums}))
    assert trainer.global_step == 5
    assert witness.events == [
        *("rollout", "sync 0", "sync 0", "update"),  # in the rollout of step 1
        *("rollout", "sync 1", "sync 1", "update"),
        *("rollout", "sync 2", "sync 2", "update"),
        *("rollout", "sync 3", "update"),
        *("validation", "sync 4"),
        *("rollout", "update"),
    ]
    assert len(faults.sessions) == 1 + 5
    # What was done stays: after a death in a rollout fewer prompts are asked for.
    for first, second in ((0, 1), (2, 3), (4, 5)):
        asked, again = faults.requests[first], faults.requests[second]
        assert (asked.num_prompts, len(asked.finished)) == (4, 1)
        assert (again.num_prompts, len(again.finished)) == (3, 3)
        batch = witness.batches[first // 2]
        kept = {completion.token_ids.tobytes() for completion in batch.completions}
        assert all(sample.token_ids.tobytes() in kept for group in asked.finished for sample in group)
    check_on_policy(witness)  # also what was sampled before a death
    assert all(batch.rollout_logprobs.isfinite().all() for batch in witness.batches)
    assert len(witness.validations) == 1
    assert caplog.text.count("Engine 0 is restarted, once in this step") == 5
    assert "gave no heartbeat for 2 s" in caplog.text and "(SIGKILL)" in caplog.text
    assert [in_session(session) for session in faults.sessions] == [[]] * 6


@pytest.mark.slow
def test_one_of_two_colocated_engines_may_die(
    engine_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two colocated engines share the prompts: when one dies, the other's samples are kept."""
    faults = EngineFaults(monkeypatch, {2: kill_core})
    witness = Witness()
    trainer = make_trainer(tmp_path, 3, make_rollout(num_engines=2, **ONE_BY_ONE), witness)
    trainer.fit(make_module(engine_model), make_data(tmp_path))
    # In step 2 the first engine dies, and the other one completes its prompts; in step 3 it is there again.
    assert [request.weight_version for request in faults.requests] == [0, 0, 1, 1, 2, 2]
    finished = [len(request.finished) for request in faults.requests]
    assert finished[2] == 1 and min(finished) >= 1
    assert [sum(finished[step : step + 2]) for step in (0, 2, 4)] == [4, 4, 4]  # mostly 2 each, by who is done first
    lost = [request.num_prompts - len(request.finished) for request in faults.requests]
    assert lost[2] >= 1 and lost[:2] + lost[3:] == [0] * 5
    assert len(faults.sessions) == 3
    check_on_policy(witness)
    assert {path.name for path in tmp_path.glob("engine*.log")} == {"engine.0.log", "engine.1.log"}
    assert [in_session(session) for session in faults.sessions] == [[]] * 3


def test_second_death_in_a_step_ends_run(engine_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = EngineFaults(monkeypatch, {0: kill_core, 1: kill_engine})
    trainer = make_trainer(tmp_path, 2, make_rollout(**ONE_BY_ONE))
    with pytest.raises(EngineError, match=r"^The engine died twice in one step\. The engine died") as caught:
        trainer.fit(make_module(engine_model), make_data(tmp_path))
    assert [request.num_prompts for request in faults.requests] == [4, 3]
    log_lines = (tmp_path / "engine.log").read_text().splitlines()
    assert str(caught.value).splitlines()[-5:] == log_lines[-5:]
    assert len(faults.sessions) == 2
    assert [in_session(session) for session in faults.sessions] == [[], []]


def test_engine_that_cannot_start_is_started_once(
    engine_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = EngineFaults(monkeypatch, {})
    trainer = make_trainer(tmp_path, 1, make_rollout(engine={"kv_cache_memory_bytes": 1 << 50}))
    with pytest.raises(
        EngineStartError,
        match=r"^The engine could not start: ValueError: Available memory .*\(Its log is .*/engine\.log\)$",
    ) as caught:
        trainer.fit(make_module(engine_model), make_data(tmp_path))
    assert find_run_error(caught.value) is caught.value, "the command line shows the line alone"
    assert len(faults.sessions) == 1 and in_session(faults.sessions[0]) == []


def test_arguments_that_vllm_refuses_are_a_line(
    engine_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    wait = ManagedProcess.wait

    def note(self: ManagedProcess, seconds: float) -> int | None:
        waits.append(seconds)
        return wait(self, seconds)

    monkeypatch.setattr(ManagedProcess, "wait", note)
    trainer = make_trainer(tmp_path, 1, make_rollout(engine={"kv_cache_dtype": "nonsense"}))
    with pytest.raises(
        EngineStartError, match=r"^vLLM refuses the engine's arguments, .*cache_dtype='nonsense': Input"
    ) as caught:
        trainer.fit(make_module(engine_model), make_data(tmp_path))
    assert len(str(caught.value).splitlines()) == 1
    assert waits[0] == 0.0, "its process would not end by itself"


class MoveEditAndKill(RLCallback):
    """Moves the model's folder away in the first update; brings it back with another tokenizer in the second."""

    def on_update_start(self, trainer: Any, module: Any, batch: Any) -> None:
        folder = Path(module.model_path)
        moved = folder.with_name("moved")
        if module.weight_version == 0:
            folder.rename(moved)
        else:
            assert not folder.exists()
            moved.rename(folder)
            path = folder / "tokenizer_config.json"
            path.write_text(path.read_text().replace("<eos>", "="))
        kill_core(module.sampler.engine)


@pytest.mark.slow
def test_engine_restarts_without_folder_not_with_other_tokenizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rewarded: list[str] = []

    async def reward(completion: str) -> float:
        rewarded.append(completion)
        return len(completion)

    witness = Witness()
    module = make_module(save_model(tmp_path / "model"), rewards=[reward], samples_per_prompt=8, check_rewards=False)
    trainer = make_trainer(tmp_path, 3, make_rollout(stop=("1", "=")), witness, MoveEditAndKill())
    with pytest.raises(
        EngineError, match=r"^The engine is not for this run\. It has eos_token =, not <eos>;.* must stay as they were"
    ):
        trainer.fit(module, make_data(tmp_path))
    assert trainer.global_step == 2
    assert f"The model's folder '{tmp_path / 'model'}' is gone." in caplog.text
    assert witness.steps[1]["policy/rollout_gap_max"] < 1e-4
    # Until then rewards have been given the text of all tokens that are trained, stop strings too.
    characters = {token: character for character, token in VOCABULARY.items()}
    completions = [one for batch in witness.batches for one in batch.completions]
    trained = ["".join(characters[token] for token in one.token_ids if token) for one in completions]
    assert sorted(rewarded) == sorted(trained)
    assert any(text.endswith(("1", "=")) for text in trained)


@pytest.mark.slow
def test_nobody_waits_for_an_engine_that_reads_nothing(engine_model: str, tmp_path: Path) -> None:
    rollout = make_rollout()
    module = make_module(engine_model)
    module.configure_model()
    trainer: Any = make_trainer(tmp_path, 1, rollout)
    module.trainer = trainer
    rollout.setup(trainer, module, "validate")
    engine = rollout.engine
    assert engine is not None and isinstance(engine.process, EngineProcess)
    engine.ready.result()
    send(engine, module, 0)
    session = engine.process.pid
    os.kill(session, signal.SIGSTOP)
    engine.process.config = replace(engine.process.config, hang_timeout=2.0)
    # More than a socket holds
    prompts = [Prompt(i, "", torch.zeros(250, dtype=torch.int64).tolist(), {}) for i in range(4000)]
    with pytest.raises(EngineError, match=r"The engine gave no heartbeat for 2 s"):
        generate(engine, prompts, 1, Sampling())
    assert in_session(session) == []
    rollout.close()
