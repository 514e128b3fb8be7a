"""Classes with ``reset`` and ``step`` as environments: what the policy reads, how it is rewarded, and how games end."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import step_cases
import tiny
import torch
from attempts import LATE, PROMPT, CannedPolicy, CannedSampler, attempt, make_group, play, run_group, run_late
from chat_templates import make_tokenizer
from engine_run import Witness, make_module, make_trainer, save_model
from pages import find_snippets, read_environment, read_section
from step_cases import AsyncGame, Game, GymnasiumGame
from tiny import make_data
from waiting import PATIENCE_SECONDS, put_clock_forward, wait_for

from rlightning.callbacks import TransformersRollout
from rlightning.environments import Environment, Message, StepEnvironment, WorkerEnvironment
from rlightning.environments.chat_format import ChatFormat
from rlightning.models import load_config, load_policy
from rlightning.parallel.sharding import named_weights
from rlightning.rollout import Sampling
from rlightning.rollout.model_files import ModelFiles
from rlightning.rollout.transformers_sampler import TransformersSampler
from rlightning.types import Outcome, Prompt, Trajectory


@pytest.fixture(autouse=True)
def _no_games() -> None:
    step_cases.made.clear()


class StallsLater:
    def reset(self, prompt: Prompt) -> None:
        self.num_turns = 0

    async def step(self, message: Message) -> Any:
        self.num_turns += 1
        if self.num_turns == 3:
            put_clock_forward(asyncio.get_running_loop(), LATE)
            await asyncio.sleep(600)
        return "on", 0.5, False, {"seen": self.num_turns}


# Real runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.long
@pytest.mark.parametrize("game", [Game, AsyncGame, GymnasiumGame])
def test_turns_are_trained_as_sampled(folder: str, tmp_path: Path, game: type[Game]) -> None:
    witness = Witness()
    environment = StepEnvironment(game, {"observation": "+"}, max_turns=3)
    rollout = TransformersRollout(environment=environment, max_new_tokens=4, seed=0)
    module = make_module(folder, rewards=[], samples_per_prompt=2)
    make_trainer(tmp_path, 2, rollout, witness).fit(module, make_data(tmp_path))
    trajectories = [one for batch in witness.batches for one in batch.trajectories]
    assert len(trajectories) == len(step_cases.made) > 0
    for batch, metrics in zip(witness.batches, witness.steps, strict=True):
        assert metrics["policy/rollout_gap_max"] < 1e-5
        assert batch.rewards is not None and batch.rewards.tolist() == [2.0] * batch.num_trajectories
        assert int(batch.is_sampled.sum()) == sum(one.num_sampled for one in batch.trajectories)
    for one in trajectories:
        assert (one.reward, one.turn_rewards) == (2.0, [1.0, 0.0, 1.0])
        assert [turn.message["content"] for turn in one.turns if turn.sample is None] == ["+", "+"]
        assert {k: v for k, v in one.metrics.items() if k != "start"} == {"turns": 3.0, "score": 3.0, "is_fair": 1.0}
        assert ("start" in one.metrics) == (game is GymnasiumGame)
        if game is GymnasiumGame or one.samples[-1].is_truncated:
            assert one.status == "truncated"
        else:
            assert one.status == "finished"
    assert all(game.num_closed == 1 and game.num_turns_at_close == 3 for game in step_cases.made)


# What the policy reads


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransformersSampler]:
    folder = tiny.save_byte_model(tmp_path_factory.mktemp("bytes"), hidden_size=64, initializer_range=0.1)
    actor = load_policy(folder)
    options: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "max_length": 192}
    sampler = TransformersSampler(load_config(folder), ModelFiles.read(folder), max_sequences=1, **options)
    sampler.update_weights(named_weights(actor), 3)
    yield sampler
    sampler.close()


def sample(sampler: TransformersSampler, environment: Environment) -> list[Trajectory]:
    tokenizer = sampler.files.tokenizer
    prompt = PROMPT._replace(token_ids=tokenizer(PROMPT.text).input_ids)
    settings: dict[str, Any] = {"sampling": Sampling(max_new_tokens=6, seed=11), "max_length": 192, "timeout": 120.0}
    found = attempt(environment, sampler, prompt, 2, chat_format=ChatFormat(tokenizer), **settings)
    return [replace(one, timings={}) for one in found]


SYSTEM = {"role": "system", "content": "play"}


@pytest.mark.parametrize("game", [Game, GymnasiumGame])
@pytest.mark.parametrize(
    ("first", "text"),
    [
        (None, PROMPT.text),
        ("your move", "user: your move\nassistant: "),
        ({"role": "tool", "content": "board"}, "tool: board\nassistant: "),
        ([SYSTEM, {"role": "user", "content": "go"}], "system: play\nuser: go\nassistant: "),
    ],
)
def test_first_turn_answers_prompt_or_what_reset_returned(
    sampler: TransformersSampler, game: type[Game], first: Any, text: str
) -> None:
    observations = [{"role": "tool", "content": "a"}, {"role": "user", "content": "b"}]
    one = sample(sampler, StepEnvironment(game, {"first": first, "observation": observations}))[0]
    assert one.error is None
    (branch,) = one.branches
    tokenizer = sampler.files.tokenizer
    start = tokenizer(text).input_ids
    assert list(branch.token_ids[: len(start)]) == start and set(branch.turns[: len(start)]) == {-1}
    assert branch.is_sampled[len(start)] == 1 and sum(branch.is_sampled) == one.num_sampled
    roles = [turn.message["role"] for turn in one.turns]
    num_first = 0 if first is None else len(first) if isinstance(first, list) else 1
    assert roles[num_first:] == ["assistant", "tool", "user", "assistant", "tool", "user", "assistant"]
    assert str(tokenizer.decode(list(branch.token_ids))).count("tool: a\nuser: b\nassistant: ") == 2


def test_reset_without_template_is_read_as_it_is(sampler: TransformersSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = sampler.files.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", None)
    one = sample(sampler, StepEnvironment(Game, {"first": "1+1="}))[0]
    assert str(tokenizer.decode(list(one.branches[0].token_ids))).startswith("1+1=")


@pytest.mark.processes
@pytest.mark.parametrize("game", ["Game", "AsyncGame", "GymnasiumGame"])
def test_trajectories_in_workers_are_the_same(sampler: TransformersSampler, game: str) -> None:
    own = {"environment": f"step_cases.{game}", "arguments": {"first": [SYSTEM]}, "max_turns": 2}
    here = sample(sampler, StepEnvironment(**own))  # type: ignore[arg-type]
    there = sample(sampler, WorkerEnvironment("rlightning.environments.StepEnvironment", own, num_workers=2))
    assert here == there
    assert {one.status for one in here} == {"truncated"} and len(here[0].samples) == 2


def test_reset_and_step_get_what_their_form_has() -> None:
    play(StepEnvironment(Game))
    play(StepEnvironment(GymnasiumGame))
    own, gymnasium = step_cases.made
    assert len(own.threads) == 1
    assert own.prompt == PROMPT and own.messages == [{"role": "assistant", "content": "7"}] * 3
    assert gymnasium.prompt == (3, PROMPT.columns) and gymnasium.messages == ["7"] * 3


def test_real_gymnasium_environment_runs() -> None:
    gymnasium = pytest.importorskip("gymnasium")

    def reset(self: Any, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        gymnasium.Env.reset(self, seed=seed)
        return str(self.np_random.integers(1000)), {"seed": seed}

    def step(self: Any, action: str) -> Any:
        return action, self.np_random.integers(9), False, False, {"size": self.np_random.random()}

    texts = gymnasium.spaces.Text(8)
    methods: dict[str, Any] = {"reset": reset, "step": step, "observation_space": texts, "action_space": texts}
    gymnasium.register("Echo-v0", type("Echo", (gymnasium.Env,), methods))
    arguments = {"id": "Echo-v0", "max_episode_steps": 3}
    policies = [CannedPolicy(), CannedPolicy()]
    outcomes = [play(StepEnvironment("gymnasium.make", arguments), policy) for policy in policies]
    assert policies[0].heard == policies[1].heard and policies[0].heard[1:] == [({"role": "user", "content": "7"},)] * 2
    assert [one.status for one in outcomes] == ["truncated"] * 2 and outcomes[0].metrics["seed"] == 3.0
    assert outcomes[0].metrics == outcomes[1].metrics and len(outcomes[0].turn_rewards or []) == 3


# How it ends


@pytest.mark.parametrize(("game", "path"), [(Game, "make_game"), (AsyncGame, "make_async_game")])
def test_turns_are_limited_and_rewarded(game: type[Game], path: str) -> None:
    full = {"turns": 3.0, "score": 3.0, "is_fair": 1.0}
    for given in (game, f"step_cases.{path}"):
        assert play(StepEnvironment(given, max_turns=3)) == Outcome(2.0, [1.0, 0.0, 1.0], "finished", full)
        assert play(StepEnvironment(given, max_turns=2)) == Outcome(
            1.0, [1.0, 0.0], "truncated", {"turns": 2.0, "score": 2.0, "is_fair": 1.0}
        )
        outcome = play(StepEnvironment(given), CannedPolicy(num_turns=1))
        assert (outcome.reward, outcome.turn_rewards, outcome.status) == (1.0, [1.0], "truncated")
    assert [one.num_closed for one in step_cases.made] == [1] * 6
    with pytest.raises(ValueError, match=r"^the policy cannot begin: 9 tokens leave no room in 9\.$"):
        play(StepEnvironment(game), CannedPolicy(num_turns=0))


@pytest.mark.parametrize(
    ("rewards", "reward", "turn_rewards"),
    [
        ([None, None], None, None),
        ([None, True], 1.0, [0.0, 1.0]),
        ([np.bool_(True), np.array(0.5)], 1.5, [1.0, 0.5]),
    ],
)
def test_turns_may_have_no_reward(rewards: list[Any], reward: float | None, turn_rewards: list[float] | None) -> None:
    given = iter(rewards)

    class Sparse(Game):
        def step(self, message: Any) -> Any:
            return "+", next(given), False, None

    outcome = play(StepEnvironment(Sparse, max_turns=2))
    assert (outcome.reward, outcome.turn_rewards) == (reward, turn_rewards)


def test_blocking_games_run_at_once() -> None:
    all_are_there = threading.Barrier(64)

    class Meeting(Game):
        def step(self, message: Any) -> Any:
            all_are_there.wait(PATIENCE_SECONDS)
            return super().step(message)

    found = attempt(StepEnvironment(Meeting, max_turns=1), CannedSampler(), PROMPT, 64)
    assert [one.reward for one in found] == [1.0] * 64


@pytest.mark.parametrize(
    ("deed", "error"),
    [
        ("raise", "ConnectionError: the game is gone"),
        ("stop", "RuntimeError: the environment raised StopIteration"),
        ("exit", "RuntimeError: the environment raised SystemExit: 3"),
    ],
)
def test_failed_game_is_closed(deed: str, error: str) -> None:
    (one,) = attempt(StepEnvironment(Game, {"deed": deed}), CannedSampler(), PROMPT)
    assert (one.status, one.error) == ("failed", error)
    assert [game.num_closed for game in step_cases.made] == [1]


@pytest.mark.long
def test_rewards_until_a_timeout_are_kept() -> None:
    chat_format = ChatFormat(make_tokenizer("qwen2.5"))
    (late,) = attempt(StepEnvironment(StallsLater), CannedSampler(), PROMPT, timeout=LATE, chat_format=chat_format)
    assert (late.status, late.reward, late.turn_rewards) == ("timeout", 1.0, [0.5, 0.5, 0.0])
    assert late.metrics == {"turns": 3.0, "seen": 2.0}


def attempt_late(environment: StepEnvironment, is_due: Callable[[], bool], end: Callable[[], object]) -> Trajectory:
    """Make a trajectory whose time is over once that holds; ``end`` is called after that."""
    group = make_group(CannedSampler(), PROMPT, timeout=LATE)
    (trajectory,) = asyncio.run(run_late(run_group(environment, group, PROMPT), is_due, end))
    return trajectory


@pytest.mark.parametrize(("game", "num_turns"), [(Game, 1), (AsyncGame, 0)])
def test_late_game_is_closed_after_its_step(
    game: type[Game], num_turns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlightning.intervals.CANCEL_GRACE", PATIENCE_SECONDS)
    environment = StepEnvironment(game, {"deed": "hang", "folder": str(tmp_path)})
    one = attempt_late(environment, (tmp_path / "hangs").exists, (tmp_path / "may end").touch)
    assert one.status == "timeout"
    assert [(game.num_closed, game.num_turns_at_close) for game in step_cases.made] == [(1, num_turns)]


@pytest.mark.long
def test_hanging_step_costs_the_grace_period_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlightning.intervals.CANCEL_GRACE", 0.1)
    hangs, may_return = threading.Event(), threading.Event()

    class Stuck(Game):
        def step(self, message: Any) -> Any:
            hangs.set()
            may_return.wait(PATIENCE_SECONDS)
            return super().step(message)

    one = attempt_late(StepEnvironment(Stuck), hangs.is_set, lambda: None)
    assert one.status == "timeout" and not step_cases.made[0].messages
    may_return.set()
    wait_for(lambda: step_cases.made[0].num_closed > 0)  # although the event loop is gone
    assert step_cases.made[0].num_turns_at_close == 1


async def cancel_amid(running: "asyncio.Future[Outcome]", folder: Path) -> None:
    """Cancel a trajectory once its game hangs, and let that end."""
    while not (folder / "hangs").exists():
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.sleep(0)
    (folder / "may end").touch()
    await asyncio.wait([running])


@pytest.mark.parametrize("is_made_slowly", [False, True])
def test_cancelled_game_is_closed(tmp_path: Path, is_made_slowly: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlightning.intervals.CANCEL_GRACE", PATIENCE_SECONDS)

    def make() -> Game:
        if is_made_slowly:
            step_cases.hang_in(str(tmp_path))
        return Game(deed="hang", folder=str(tmp_path))

    async def work() -> None:
        running = asyncio.ensure_future(StepEnvironment(make).run(PROMPT, CannedPolicy()))
        await cancel_amid(running, tmp_path)
        assert running.cancelled()

    asyncio.run(work())
    assert (tmp_path / f"closed after {0 if is_made_slowly else 1}").exists()


@pytest.mark.processes
@pytest.mark.parametrize(("game", "num_turns"), [("Game", 1), ("AsyncGame", 0)])
def test_cancelled_game_is_closed_in_its_worker(tmp_path: Path, game: str, num_turns: int) -> None:
    deeds = {"deed": "hang", "folder": str(tmp_path)}
    own = {"environment": f"step_cases.{game}", "arguments": deeds}

    async def work() -> None:
        environment = WorkerEnvironment("rlightning.environments.StepEnvironment", own)
        await environment.check()
        running = asyncio.ensure_future(environment.run(PROMPT, CannedPolicy()))
        await cancel_amid(running, tmp_path)
        await environment.close()

    asyncio.run(work())
    assert (tmp_path / f"closed after {num_turns}").exists()


def test_close_that_fails_is_logged_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Leaking(Game):
        def close(self) -> None:
            raise OSError("the port is still open")

    with caplog.at_level(logging.WARNING, "rlightning"):
        assert play(StepEnvironment(Leaking)).reward == 2.0
    line = "Leaking could not be closed after a trajectory: OSError: the port is still open"
    assert [record.getMessage() for record in caplog.records] == [line]


@pytest.mark.processes
def test_section_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = read_section("environments.md", "A class with reset and step")
    (tmp_path / "my_games.py").write_text(find_snippets(section)[0])
    monkeypatch.syspath_prepend(tmp_path)
    prompt = Prompt(0, "", [1], {"answer": "9"})

    async def work() -> None:
        for number, kind in enumerate((StepEnvironment, WorkerEnvironment)):
            found = read_environment(section, number)
            assert found["class_path"].endswith(kind.__name__)
            environment = kind(**found["init_args"])
            await environment.check()
            policy = CannedPolicy()
            outcome = await environment.run(prompt, policy)
            assert outcome == Outcome(0.0, [0.0] * 8, "truncated", {"turns": 8.0, "distance": 2.0})
            assert policy.heard[1:] == [({"role": "user", "content": "Higher."},)] * 7
            assert (await environment.run(prompt._replace(columns={"answer": "7"}), CannedPolicy())).reward == 1.0
            await environment.close()

    asyncio.run(work())
