"""Trajectories under way in checkpoints: those whose environment has snapshots go on, others begin again."""

import asyncio
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import snapshot_cases
import torch
from collector_cases import CollectorRun, runs_of
from engine_run import (
    PER_STEP,
    Witness,
    check_each_once,
    consumed,
    make_data,
    make_module,
    make_rollout,
    make_trainer,
)
from lightning.pytorch.callbacks import ModelCheckpoint
from pages import find_snippets, read_section
from snapshot_cases import Diary, KeptDiary, Ledger, LostDiary, OddDiary, double
from test_chat_format import get_tokenizer
from waiting import wait_for

from rlightning.environments import Environment, StepEnvironment, Tools, WorkerEnvironment
from rlightning.environments.snapshots import copy_plain
from rlightning.hooks import RLCallback
from rlightning.rollout import Sampling
from rlightning.types import Outcome, Prompt, Sample, Trajectory

END = "<|im_end|>"
SAMPLING = Sampling(max_new_tokens=64, seed=5)
PROMPTS = [(Prompt(index, "", [5, 6], {"prompt": "Count.", "answer": "7"}), index) for index in (0, 7)]
NUM_SAMPLES = 3


class Sampler:
    """Says what follows from the seed and the history; from some turn on it answers one trajectory alone.

    Args:
        say: returns the text of a turn, given its number from 1 and its seed.
        held_from: the turn; 0: it answers all.
    """

    def __init__(self, say: Callable[[int, int], str], held_from: int = 0) -> None:
        self.say, self.held_from = say, held_from
        self.answered: Any = None
        self.tokenizer = get_tokenizer("qwen2.5")
        self.num_sampled = self.num_held = self.version = 0

    async def sample(
        self, token_ids: Sequence[int], sampling: Sampling, *, session: Any = None, **settings: Any
    ) -> list[Sample]:
        turn = self.tokenizer.decode(list(token_ids)).count("<|im_start|>assistant")
        if self.held_from and turn >= self.held_from:
            self.answered = self.answered or session
            if session != self.answered:
                await self._hold()
        self.num_sampled += 1
        text = self.say(turn, sampling.seed or 0)
        tokens = self.tokenizer(text + END).input_ids
        return [Sample(tokens, [-0.25 * turn] * len(tokens), [self.version] * len(tokens), text, "stop")]

    async def _hold(self) -> None:
        self.num_held += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.num_held -= 1


def tell(turn: int, seed: int) -> str:
    return f"word{seed % 997}"


def call(turn: int, seed: int) -> str:
    if turn == 4:
        return f"done {seed % 997}"
    name, arguments = ("double", {"number": seed % 97}) if turn % 2 else ("note", {"text": f"n{seed % 97}"})
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Run(CollectorRun):
    """A run over that sampler, up to its checkpoint."""

    def __init__(self, environment: Environment, *settings: Any) -> None:
        super().__init__(Sampler(*settings), environment)

    def take(self, num_groups: int, *requests: tuple[Prompt, int]) -> list[list[Trajectory]]:
        groups = self.collect(num_groups, *requests, num_samples=NUM_SAMPLES, sampling=SAMPLING, per_step=1)
        return [[replace(one, timings={}) for one in group] for group in groups]

    def save(self) -> dict[str, Any]:
        """Return what a checkpoint holds, written and read as Lightning does."""
        self.collector.save_progress()
        file = io.BytesIO()
        torch.save(self.collector.in_flight.state_dict(), file)
        file.seek(0)
        state: dict[str, Any] = torch.load(file, weights_only=True)
        return state


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    snapshot_cases.made.clear()
    with runs_of(Run) as make:
        yield make


def wait_for_two_of_three(run: Run) -> None:
    """Wait until one trajectory has ended, and the others are held in a turn."""
    (group,) = run.collector.in_flight.running

    def is_there() -> bool:
        run.collector.save_progress()
        ended = [one for one in group.saved or [] if one is not None and one["outcome"] is not None]
        return run.sampler.num_held == 2 and len(ended) == 1

    wait_for(is_there)


def interrupt(start: Callable[..., Run], environment: Environment, say: Any = tell) -> dict[str, Any]:
    """Return the checkpoint of a run in which one of three trajectories has ended, and two are in their third turn."""
    run = start(environment, say, 3)
    run.collector.in_flight.add(PROMPTS[1:])
    run.take(0)
    wait_for_two_of_three(run)
    state = run.save()
    run.take(0)
    assert run.collector.in_flight.running[0].saved is None, "the checkpoint has it"
    assert any(run.save()["groups"][0]["saved"])
    return state


def resume(start: Callable[..., Run], environment: Environment, state: dict[str, Any], say: Any = tell) -> Any:
    """Return the trajectories of the run that goes on from a checkpoint, and how many turns it has sampled."""
    run = start(environment, say)
    run.collector.in_flight.load_state_dict(state)
    (group,) = run.take(1)
    return group, run.sampler.num_sampled


def finish(start: Callable[..., Run], environment: Environment, say: Any = tell) -> list[Trajectory]:
    """Return the trajectories of a run without an interruption."""
    (group,) = start(environment, say).take(1, PROMPTS[1])
    return group


def test_trajectories_go_on_after_their_last_turn(start: Callable[..., Run], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="rlightning")
    whole = finish(start, StepEnvironment(KeptDiary))
    assert [one.status for one in whole] == ["finished"] * NUM_SAMPLES and whole[0].reward == 10.0
    state = interrupt(start, StepEnvironment(KeptDiary))
    snapshot_cases.made.clear()
    group, num_sampled = resume(start, StepEnvironment(KeptDiary), state)
    assert group == whole
    assert num_sampled == 2 * 2, "of two trajectories the last two turns"
    assert sorted((one.num_restored, one.num_steps) for one in snapshot_cases.made) == [(1, 2), (1, 2)]
    assert "begins them again" not in caplog.text


@pytest.mark.processes
def test_trajectories_of_workers_go_on(start: Callable[..., Run]) -> None:
    whole = finish(start, StepEnvironment(KeptDiary))
    own = {"environment": "snapshot_cases.KeptDiary"}
    state = interrupt(start, WorkerEnvironment("rlightning.environments.StepEnvironment", own))
    resumed = WorkerEnvironment("rlightning.environments.StepEnvironment", own)
    assert resume(start, resumed, state) == (whole, 4)


def test_class_of_the_page_goes_on(start: Callable[..., Run]) -> None:
    found: dict[str, Any] = {}
    exec(find_snippets(read_section("environments.md", "Resumed runs"))[0], found)
    environment = StepEnvironment(found["Guess"], max_turns=5)
    whole = finish(start, environment)
    assert whole[0].status == "truncated" and len(whole[0].samples) == 5
    # The prompt itself holds no turn, so that the third that a history shows is the fourth.
    assert resume(start, environment, interrupt(start, environment)) == (whole, 4)


def test_tools_go_on_with_their_objects(start: Callable[..., Run]) -> None:
    tools = Tools([double, Ledger])
    whole = finish(start, tools, call)
    assert [turn.message["role"] for turn in whole[0].turns] == ["assistant", "tool"] * 3 + ["assistant"]
    assert resume(start, tools, interrupt(start, tools, call), call) == (whole, 4)


class Parts(Environment):
    """Has four turns that a part of the policy records, as those of one of several agents."""

    async def run(self, prompt: Prompt, policy: Any) -> Outcome:
        part = policy.split()
        for turn in range(4):
            await part.chat({"role": "user", "content": f"turn {turn}"})
        policy.join(part)
        return Outcome()


@pytest.mark.parametrize("environment", [StepEnvironment(Diary), Parts()])
def test_an_environment_without_snapshots_begins_again(
    start: Callable[..., Run], environment: Environment, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="rlightning")
    whole = finish(start, environment)
    state = interrupt(start, environment)
    (line,) = [line for line in caplog.messages if "begins them again" in line]
    assert line.startswith("Checkpoints do not keep the turns of some trajectories")
    assert resume(start, environment, state) == (whole, 2 * 4), "the one that has ended is kept"


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (StepEnvironment(LostDiary), "LostDiary.restore() raised KeyError: 'said'"),
        (Tools([double, Ledger]), "its snapshot is another environment's"),
    ],
)
def test_a_snapshot_that_is_refused_begins_again(
    start: Callable[..., Run], other: Environment, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = interrupt(start, StepEnvironment(KeptDiary))
    group, _ = resume(start, other, state)
    lines = [line for line in caplog.messages if "is requeued" in line]
    assert len(lines) == 2 and all(reason in line for line in lines)
    assert [one.status for one in group] == ["finished"] * NUM_SAMPLES


def test_a_snapshot_of_odd_data_fails_the_trajectory(start: Callable[..., Run]) -> None:
    for one in finish(start, StepEnvironment(OddDiary)):
        assert one.status == "failed" and one.error is not None
        assert one.error.startswith("TypeError: the state['object']['said'] is {'word")


def test_stale_progress_is_dropped(start: Callable[..., Run]) -> None:
    state, whole = interrupt(start, StepEnvironment(KeptDiary)), finish(start, StepEnvironment(KeptDiary))
    run = start(StepEnvironment(KeptDiary), tell)
    run.collector.in_flight.load_state_dict(state)
    run.sampler.version = 2  # of which no token may be older than 1
    (group,) = run.take(1)
    assert run.sampler.num_sampled == 12 and {min(s.weight_versions) for one in group for s in one.samples} == {2}
    assert [one.final_text for one in group] != [one.final_text for one in whole], "with other random numbers"


def test_a_signal_keeps_what_is_under_way(start: Callable[..., Run]) -> None:
    whole = finish(start, StepEnvironment(KeptDiary))
    run = start(StepEnvironment(KeptDiary), tell, 3)
    run.collector.in_flight.add(PROMPTS[1:])
    run.take(0)
    wait_for_two_of_three(run)
    run.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run.take(1)
    assert run.sampler.num_held == 0
    run.error, run.sampler.held_from = None, 0
    (group,) = run.take(1)
    assert group == whole and run.sampler.num_sampled == 12


def test_plain_data_is_copied() -> None:
    data = {"a": [1, (2.5, b"x", None), {"b": True}], "c": bytearray(b"y")}
    copied = copy_plain(data, "it")
    assert copied == {"a": [1, [2.5, b"x", None], {"b": True}], "c": b"y"}
    data["a"][0] = 5  # type: ignore[index]
    assert copied["a"][0] == 1
    with pytest.raises(TypeError, match=r"^the state has the name 1, and names have to be texts"):
        copy_plain({1: 2}, "the state")


class PausedDiary(KeptDiary):
    """While it is paused, answers no third turn of prompts after the first step's."""

    is_paused, num_held = True, 0

    def reset(self, prompt: Prompt) -> str:
        self.index = prompt.index
        return super().reset(prompt)

    async def step(self, message: Any) -> Any:
        if PausedDiary.is_paused and self.num_steps == 2 and self.index >= PER_STEP:
            PausedDiary.num_held += 1
            await asyncio.Event().wait()
        return super().step(message)


class WaitsForPaused(RLCallback):
    """Has the checkpoint of a step come when all trajectories of the next one are in their third turn."""

    def on_update_start(self, trainer: Any, module: Any, batch: Any) -> None:
        wait_for(lambda: PausedDiary.num_held == 2 * PER_STEP)


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_resumes_in_the_middle_of_trajectories(engine_model: str, tmp_path: Path) -> None:
    snapshot_cases.made.clear()
    PausedDiary.is_paused, PausedDiary.num_held = True, 0
    arguments: dict[str, Any] = {"environment": StepEnvironment(PausedDiary), "placement": "standalone"}
    batches, diaries, metrics = [], [], []
    for end in (1, 2):
        witness, rollout = Witness(), make_rollout(max_staleness=1, seed=0, **arguments)
        callbacks = [rollout, witness, ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1)]
        if end == 1:
            callbacks.append(WaitsForPaused())
        trainer = make_trainer(tmp_path, end, *callbacks, enable_checkpointing=True)
        module = make_module(engine_model, lr=1e-12)  # the weights stay: any token's log-probability can be compared
        last = tmp_path / "last.ckpt"
        trainer.fit(module, make_data(tmp_path, shuffle=False), ckpt_path=last if end == 2 else None)
        batches += witness.batches
        metrics += witness.steps
        diaries.append([one for one in snapshot_cases.made if PER_STEP <= one.index < 2 * PER_STEP])
        snapshot_cases.made.clear()
        PausedDiary.is_paused = False
    check_each_once(trainer, consumed(batches), rollout, num_in_flight=PER_STEP)
    before, after = diaries
    assert [(one.num_restored, one.num_steps) for one in before] == [(0, 2)] * 2 * PER_STEP
    assert [(one.num_restored, one.num_steps) for one in after] == [(1, 2)] * 2 * PER_STEP
    assert sorted((one.index, one.said[:2]) for one in after) == sorted((one.index, one.said) for one in before)
    assert [one.prompt.index for one in batches[1].trajectories] == [index for index in range(4, 8) for _ in range(2)]
    for one in batches[1].trajectories:
        assert one.status in ("finished", "truncated") and one.reward == 10.0  # a last turn that is cut truncates
        assert [set(sample.weight_versions) for sample in one.samples] == [{0}, {0}, {1}, {1}]
    assert [int(batch.is_sampled.sum()) for batch in batches] == [
        sum(one.num_sampled for one in batch.trajectories) for batch in batches
    ]
    assert all(step["policy/rollout_gap_max"] < 1e-4 for step in metrics)
