"""The trajectories of a prompt, and what a resumed run makes of those that a checkpoint has kept."""

import asyncio
from collections.abc import Sequence
from typing import Any

from agent_cases import ScriptedSampler
from attempts import CannedSampler
from chat_templates import make_tokenizer

from rlightning.environments import Environment, Message, Policy, PolicyGroup, SingleTurn
from rlightning.environments.chat_format import ChatFormat
from rlightning.environments.environment import TrajectoryLostError
from rlightning.environments.policy import GroupRequest, RecordedPolicy
from rlightning.environments.recorded_group import RecordedGroup
from rlightning.rollout import Sampling
from rlightning.types import Outcome, Prompt, Sample, Trajectory

TOKENIZER = make_tokenizer("qwen2.5")
PROMPT = Prompt(3, "hi", [1, 2], {})


def make_sampler() -> Any:
    return ScriptedSampler(TOKENIZER, *["said"] * 9, end="<|im_end|>")


async def turn(policy: Policy, *messages: Message) -> Outcome:
    await policy.chat(*messages)
    return Outcome(reward=1.0, metrics={"turns": 1.0})


def make_group(saved: Any = None, *, sampler: Any = None, max_requeues: int = 0, size: int = 2) -> RecordedGroup:
    request = GroupRequest(PROMPT, Sampling(max_new_tokens=4, seed=1), size, saved)
    return RecordedGroup(sampler or make_sampler(), ChatFormat(TOKENIZER), request, 512, None, max_requeues)


def finish(environment: Environment, group: RecordedGroup) -> list[Trajectory]:
    return group.finish(asyncio.run(environment.run_group(PROMPT, group)), 0.0)


class TwoParts(Environment):
    """Two turns of each trajectory, by two calls; keeps what a checkpoint holds after the first and in the second."""

    def __init__(self) -> None:
        self.saved: list[Any] = []

    async def run_group(self, prompt: Prompt, group: PolicyGroup) -> list[Outcome]:
        assert isinstance(group, RecordedGroup)
        await group.run_each(turn)
        self.saved.append(group.save())

        async def turn_and_save(policy: Policy) -> Outcome:
            outcome = await turn(policy, {"role": "user", "content": "more"})
            self.saved.append(group.save())
            return outcome

        outcomes = await group.run_each(turn_and_save)
        self.saved.append(group.save())
        return outcomes


def test_checkpoint_in_a_second_part_repeats_no_turn() -> None:
    environment = TwoParts()
    whole = finish(environment, make_group())
    assert [len(one.samples) for one in whole] == [2, 2]
    between, *later = environment.saved
    assert all(between) and later == [[None, None]] * 3
    sampler = make_sampler()
    assert [len(one.samples) for one in finish(TwoParts(), make_group(between, sampler=sampler))] == [2, 2]
    assert len(sampler.samplings) == 2, "the first part is known"


def test_single_turn_ignores_another_environments_checkpoint() -> None:
    environment = TwoParts()
    finish(environment, make_group())
    for one in finish(SingleTurn(), make_group(environment.saved[0])):
        assert len(one.samples) == 1 and len(one.branches) == 1 and one.final_text == "said"


class Bonus(Environment):
    """Adds to the rewards of a group once all of them are there."""

    async def run_group(self, prompt: Prompt, group: PolicyGroup) -> list[Outcome]:
        outcomes = await group.run_each(turn)
        for outcome in outcomes:
            outcome.reward = 0.5 + (outcome.reward or 0.0)
            outcome.metrics["turns"] += 1.0
        return outcomes


def test_checkpoint_keeps_outcomes_without_the_groups_changes() -> None:
    sampler = make_sampler()
    group = make_group(sampler=sampler)
    for _ in range(3):
        assert [(one.reward, one.metrics) for one in finish(Bonus(), group)] == [(1.5, {"turns": 2.0})] * 2
        group = make_group(group.save(), sampler=sampler)
    assert len(sampler.samplings) == 2


class Lossy(Environment):
    """Is lost as often as it is told; hands over a state after its turn, from which it goes on."""

    def __init__(self, num_lost: int) -> None:
        self.num_lost, self.attempts = num_lost, list[int]()

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        assert isinstance(policy, RecordedPolicy)
        state = await policy.resume()
        self.attempts.append(policy.attempt)
        if state is None:
            await policy.report(await turn(policy), "state")
        if self.num_lost:
            self.num_lost -= 1
            raise TrajectoryLostError("lost")
        policy.split()  # whose first turn would be the trajectory's
        return await turn(policy.split(), {"role": "user", "content": "part"})


def test_attempts_draw_other_numbers_after_a_resume_too() -> None:
    sampler = make_sampler()
    first, second = Lossy(1), Lossy(1)
    group = make_group(sampler=sampler, max_requeues=1, size=1)
    finish(first, group)
    (saved,) = group.save()
    assert saved is not None
    saved["outcome"], saved["state"] = None, "state"  # as if it were under way
    finish(second, make_group([saved], sampler=sampler, max_requeues=1, size=1))
    assert (first.attempts, second.attempts) == ([0, 1], [1, 2])
    assert len({sampling.seed for sampling in sampler.samplings}) == len(sampler.samplings) == 5


def test_sampler_that_never_streams_need_not_take_on_tokens() -> None:
    asked: list[set[str]] = []

    class Sampler(CannedSampler):
        async def sample(self, token_ids: Any, sampling: Any, **settings: Any) -> list[Sample]:
            asked.append(set(settings))
            return await super().sample(token_ids, sampling)

    def show(number: int, token_ids: Sequence[int]) -> None: ...

    class Streamed(Environment):
        async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
            assert isinstance(policy, RecordedPolicy)
            await policy.sample_turns([1], policy.sampling, on_tokens=show)
            await policy.sample_turns([1], policy.sampling)
            return Outcome(reward=1.0)

    finish(Streamed(), make_group(sampler=Sampler(), size=1))
    assert asked == [{"num_samples", "session", "on_tokens"}, {"num_samples", "session"}]
