"""The policy judges its own trajectories, by its own engine; what it says of them is no part of them."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from agent_cases import ScriptedSampler
from cli_project import resolve_config
from test_chat_format import get_tokenizer

from rlightning.environments import (
    Environment,
    LimitReachedError,
    Policy,
    PolicyGroup,
    SelfCorrection,
    SingleTurn,
    WorkerEnvironment,
)
from rlightning.environments.chat_format import ChatFormat
from rlightning.environments.policy import GroupRequest
from rlightning.environments.recorded_group import RecordedGroup
from rlightning.environments.self_judged import SelfJudged
from rlightning.errors import ConfigError
from rlightning.rollout import Sampling
from rlightning.types import AgentTrace, Outcome, Prompt, Sample, Trajectory

RUBRIC = "Right: {answer}. Said: {completion}. End with Score: N."
TOKENIZER = get_tokenizer("qwen2.5")
PROMPT = Prompt(3, "2+2=", TOKENIZER("2+2=").input_ids, {"prompt": "2+2=", "answer": "4"})


class Sampler(ScriptedSampler):
    """Says 5, and its verdict where it is asked for one; counts the verdicts."""

    def __init__(self, verdict: str, finish_reason: Any = "stop") -> None:
        super().__init__(TOKENIZER)
        self.verdict, self.finish_reason = verdict, finish_reason
        self.judged: list[tuple[str, Sampling]] = []

    async def sample(self, token_ids: Sequence[int], sampling: Sampling, **settings: Any) -> list[Sample]:
        asked = TOKENIZER.decode(list(token_ids))
        if "Said:" not in asked:
            return [self.make_sample("5")]
        self.judged.append((asked, sampling))
        sample = self.make_sample(self.verdict)
        sample.finish_reason = self.finish_reason
        return [sample]


def attempt(environment: Environment, sampler: Any, max_length: int = 500) -> list[Trajectory]:
    request = GroupRequest(PROMPT, Sampling(max_new_tokens=64, seed=1), 2)
    group = RecordedGroup(sampler, ChatFormat(TOKENIZER), request, max_length, 60.0)

    async def run() -> list[Outcome]:
        try:
            return await environment.run_group(PROMPT, group)
        finally:
            await environment.close()

    return group.finish(asyncio.run(run()), 0.0)


def test_a_single_turn_is_judged_and_trained_alone() -> None:
    sampler = Sampler("Not right. Score: 2")
    for one in attempt(SelfJudged(RUBRIC, weight=0.5), sampler):
        assert (one.status, one.reward, one.metrics) == ("finished", 0.1, {"judge_score": 0.2})
        assert one.final_text == "5" and len(one.samples) == 1
        (branch,) = one.branches
        assert list(branch.token_ids) == [*PROMPT.token_ids, *TOKENIZER("5").input_ids]
    assert len(sampler.judged) == 2
    asked, sampling = sampler.judged[0]
    assert "Right: 4. Said: 5." in asked and (sampling.temperature, sampling.max_new_tokens) == (0.0, 64)


def test_the_score_is_added_to_the_environments_reward() -> None:
    class Rewards(Environment):
        async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
            await policy.chat()
            return Outcome(turn_rewards=[0.25])

    rubric = "{turns} of {prompt}: {full_text}. Said: yes or no?"
    judged = SelfJudged(rubric, environment=Rewards(), pattern="yes|no", scores={"yes": 1, "no": 0}, highest=1)
    assert [one.reward for one in attempt(judged, Sampler("yes"))] == [1.25, 1.25]


def test_the_score_is_added_to_each_agents_reward() -> None:
    class Pair(Environment):
        async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
            await policy.chat()
            return Outcome(traces=[AgentTrace("a", 1.0, [0]), AgentTrace("b", 0.0, [])])

    for one in attempt(SelfJudged(RUBRIC, environment=Pair(), weight=0.5), Sampler("Score: 2")):
        assert one.reward == 0.6 and [trace.reward for trace in one.traces or ()] == [1.1, 0.1]


@pytest.mark.parametrize(
    ("sampler", "error"),
    [
        (Sampler("no idea"), "It could not be judged: the judge's answer has no score from 0 to 10: 'no idea'"),
        (
            Sampler("Score: 2", "length"),
            "It could not be judged: the judge's answer was cut at the limit on its tokens",
        ),
    ],
)
def test_what_cannot_be_judged_has_no_reward(sampler: Sampler, error: str) -> None:
    for one in attempt(SelfJudged(RUBRIC), sampler):
        assert (one.status, one.reward) == ("failed", None) and (one.error or "").startswith(error)


def test_a_conversation_without_room_is_not_judged() -> None:
    (one, _) = attempt(SelfJudged(RUBRIC), Sampler("Score: 2"), max_length=8)
    assert one.status == "failed" and "leave no room in 8" in (one.error or "")


def test_a_trajectory_that_a_limit_ends_is_judged() -> None:
    class Ends(Environment):
        async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
            await policy.chat()
            raise LimitReachedError("no room")

    (one, _) = attempt(SelfJudged(RUBRIC, environment=Ends()), Sampler("Score: 2"))
    assert (one.status, one.reward, one.error) == ("truncated", 0.2, "no room")
    (one, _) = attempt(SelfJudged(RUBRIC, environment=Ends()), Sampler("no idea"))
    assert (one.status, one.reward) == ("failed", None)


def test_question_without_room_does_not_limit_the_trajectory() -> None:
    class Asks(Environment):
        async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
            await policy.chat()
            await policy.ask({"role": "user", "content": "long " * 500})
            return Outcome()

    (one, _) = attempt(Asks(), Sampler(""))
    assert one.status == "failed" and (one.error or "").startswith("AskLimitError: ")


@pytest.mark.processes
def test_environments_in_workers_are_judged() -> None:
    workers = WorkerEnvironment("rlightning.environments.SelfCorrection", {"verdict": "No."})
    sampler = Sampler("Score: 10")
    here = attempt(SelfJudged(RUBRIC, environment=SelfCorrection(verdict="No.")), sampler)
    there = attempt(SelfJudged(RUBRIC, environment=workers), sampler)
    assert [one.reward for one in here] == [one.reward for one in there] == [1.0, 1.0]
    assert [len(one.samples) for one in there] == [2, 2]


@pytest.mark.parametrize(
    ("rubric", "message"),
    [("Said: {completion} {colour}", r"\{colour\} is no column of prompt 3"), ("Said: what?", "nothing of the sample")],
)
def test_rubric_that_cannot_be_written_is_refused(rubric: str, message: str) -> None:
    judged = SelfJudged(rubric)
    with pytest.raises(ConfigError, match=message):
        asyncio.run(judged.check())
        attempt(judged, Sampler("Score: 1"))


def test_environment_with_its_own_groups_is_refused() -> None:
    class Grouped(SingleTurn):
        async def run_group(self, prompt: Prompt, group: PolicyGroup) -> list[Outcome]:
            return await group.sample_all()

    with pytest.raises(ConfigError, match=r"environment=Grouped defines run_group\(prompt, group\)"):
        asyncio.run(SelfJudged(RUBRIC, environment=Grouped()).check())
    asyncio.run(SelfJudged(RUBRIC, environment=SingleTurn()).check())


def test_judged_trajectories_have_the_environments_places() -> None:
    workers = WorkerEnvironment("rlightning.environments.SingleTurn")
    assert SelfJudged(RUBRIC, environment=workers).places is workers.places is not None


@pytest.mark.long
def test_configuration_names_the_environment_that_is_judged(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
    section = page.partition("\n## Judged by the policy itself\n")[2].partition("\n## ")[0]
    (snippet,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    (project / "judged.yaml").write_text(snippet)
    own = resolve_config(capsys, "--config", "judged.yaml", "--rollout.turn_timeout=30")
    assert own["rollout"]["init_args"]["turn_timeout"] == 30.0
    found = own["environment"]["init_args"]
    assert found["environment"]["class_path"].endswith("Tools") and found["weight"] == 0.5
