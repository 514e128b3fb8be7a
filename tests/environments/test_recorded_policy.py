"""The policy in a trajectory: what it records is what was sampled, turn by turn and branch by branch."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from fork_server import START_BY_EXEC
from programs import run_python
from waiting import put_clock_forward

from rlightning.environments import Environment, LimitReachedError, Policy
from rlightning.environments.chat_format import ChatFormat
from rlightning.environments.policy import GroupRequest, RecordedPolicy
from rlightning.environments.recorded_group import RecordedGroup
from rlightning.models import load_config, load_policy, load_tokenizer, packed_logprobs
from rlightning.parallel.sharding import named_weights
from rlightning.rollout import Sampling
from rlightning.rollout.model_files import ModelFiles
from rlightning.rollout.transformers_sampler import TransformersSampler
from rlightning.types import AgentTrace, Outcome, Prompt, RolloutBatch, Sample, Trajectory

SAMPLING = Sampling(max_new_tokens=6, seed=11)
MESSAGE = {"role": "user", "content": "no"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    return tiny.save_byte_model(folder, hidden_size=64, max_position_embeddings=256, initializer_range=0.1)


@pytest.fixture(scope="module")
def actor(folder: str) -> Any:
    return load_policy(folder)


@pytest.fixture(scope="module")
def sampler(folder: str, actor: Any) -> Iterator[TransformersSampler]:
    options: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "max_length": 96}
    sampler = TransformersSampler(load_config(folder), ModelFiles.read(folder), **options)
    sampler.update_weights(named_weights(actor), 3)
    yield sampler
    sampler.close()


@pytest.fixture(scope="module")
def prompt(folder: str) -> Prompt:
    text = "user: hi\nassistant: "
    return Prompt(4, text, load_tokenizer(folder)(text).input_ids, {"answer": "x"})


def make_policy(
    sampler: TransformersSampler, prompt: Prompt, number: int = 0, sampling: Sampling = SAMPLING
) -> RecordedPolicy:
    return RecordedPolicy(sampler, ChatFormat(sampler.files.tokenizer), GroupRequest(prompt, sampling, 2), number, 96)


def test_observation_follows_turn_in_the_templates_form(sampler: TransformersSampler) -> None:
    tokenizer = sampler.files.tokenizer
    chat_format = ChatFormat(tokenizer)
    cut = chat_format.render_observations([MESSAGE], sampled=[5], ended=False)
    assert tokenizer.decode(cut) == "\nuser: no\nassistant: "
    (newline,) = tokenizer("\n").input_ids  # what ends a turn in the template
    ended = chat_format.render_observations([MESSAGE], sampled=[newline], ended=True)
    assert tokenizer.decode(ended) == "user: no\nassistant: "


def test_reward_of_several_agents_is_their_mean(sampler: TransformersSampler, prompt: Prompt) -> None:
    traces = [AgentTrace("one", 1.0, []), AgentTrace("other", 0.5, [])]
    trajectory = make_policy(sampler, prompt).finish(Outcome(traces=traces), 0.1)
    assert trajectory.reward == 0.75 and trajectory.traces == traces


def test_turns_are_one_branch_as_they_were_sampled(sampler: TransformersSampler, prompt: Prompt, actor: Any) -> None:
    policy = make_policy(sampler, prompt)

    async def talk() -> list[Sample]:
        return [await policy.chat(), await policy.chat(MESSAGE), await policy.chat(MESSAGE, MESSAGE)]

    samples = asyncio.run(talk())
    trajectory = policy.finish(Outcome(reward=0.5, metrics={"turns": 3.0}), 0.1)
    assert [turn.message["role"] for turn in trajectory.turns] == ["assistant", "user", "assistant"] + ["user"] * 2 + [
        "assistant"
    ]
    (branch,) = trajectory.branches
    assert list(branch.token_ids[: len(prompt.token_ids)]) == prompt.token_ids
    for place, sample in zip((0, 2, 5), samples, strict=True):
        own = [i for i, turn in enumerate(branch.turns) if turn == place]
        assert [branch.token_ids[i] for i in own] == list(sample.token_ids)
        assert [branch.logprobs[i] for i in own] == list(sample.logprobs)
        assert all(branch.is_sampled[i] for i in own) and {branch.weight_versions[i] for i in own} == {3}
    assert sum(branch.is_sampled) == sum(len(sample.token_ids) for sample in samples)
    batch = RolloutBatch.pack([[trajectory]])
    with torch.no_grad():
        logprobs, _ = packed_logprobs(actor, batch)
    assert float((logprobs - batch.rollout_logprobs)[batch.is_sampled].abs().max()) < 1e-5
    assert trajectory.reward == 0.5 and trajectory.metrics == {"turns": 3.0}


def test_first_turns_draw_as_one_request_does(sampler: TransformersSampler, prompt: Prompt) -> None:
    together = asyncio.run(sampler.sample(prompt.token_ids, SAMPLING, num_samples=2))
    alone = [asyncio.run(make_policy(sampler, prompt, number).chat()) for number in (0, 1)]
    assert [list(one.token_ids) for one in together] == [list(one.token_ids) for one in alone]


def test_limit_on_tokens_truncates(sampler: TransformersSampler, prompt: Prompt) -> None:
    policy = make_policy(sampler, prompt, sampling=replace(SAMPLING, max_new_tokens=64))

    async def talk() -> None:
        await policy.chat()
        for _ in range(90):
            await policy.chat(MESSAGE)

    with pytest.raises(LimitReachedError):
        asyncio.run(talk())
    trajectory = policy.finish(Outcome(), 0.1)
    assert trajectory.status == "truncated"
    assert len(trajectory.branches[0].token_ids) <= 96


class Scripted(Environment):
    """Ends as the trajectory's first token says nothing of: by number of the call."""

    def __init__(self) -> None:
        self.calls = self.num_ended = 0

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        self.calls += 1
        call = self.calls
        await policy.chat()
        if call == 2:
            while self.num_ended < 3:
                await asyncio.sleep(0.01)
            put_clock_forward(asyncio.get_running_loop(), 1000.0)
            await asyncio.sleep(600)
        self.num_ended += 1
        if call == 1:
            raise ConnectionError("the sandbox is gone")
        if call == 3:
            raise LimitReachedError("no turn is left")
        return Outcome(reward=1.0)


def test_failures_and_deadlines_are_one_trajectorys_alone(sampler: TransformersSampler, prompt: Prompt) -> None:
    request = GroupRequest(prompt, SAMPLING, 4)
    group = RecordedGroup(sampler, ChatFormat(sampler.files.tokenizer), request, 96, timeout=1000.0)
    outcomes = asyncio.run(Scripted().run_group(prompt, group))
    found: list[Trajectory] = group.finish(outcomes, 1.0)
    assert [one.status for one in found][:3] == ["failed", "timeout", "truncated"]
    assert found[0].error == "ConnectionError: the sandbox is gone"
    assert found[1].error == "It took more than 1000 s."
    assert found[3].status in ("finished", "truncated") and found[3].reward == 1.0
    assert all(one.num_sampled > 0 for one in found)


@pytest.mark.processes
def test_environments_need_the_standard_library_alone() -> None:
    root = Path(__file__).parents[2]
    code = f"import sys; sys.path.insert(0, {str(root)!r}); import rlightning.environments"
    run_python("-I", "-S", "-c", code, environment={**os.environ, START_BY_EXEC: "1"})  # without site-packages
