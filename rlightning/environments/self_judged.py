"""An environment in which the policy itself, through the same engine, scores each trajectory by a rubric."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial

from rlightning.environments.environment import AskLimitError, Environment, LimitReachedError, Policy, PolicyGroup
from rlightning.environments.outcomes import check_outcome, total_reward
from rlightning.environments.policy import RecordedPolicy
from rlightning.environments.single_turn import SingleTurn
from rlightning.errors import ConfigError
from rlightning.foreign_text import cut
from rlightning.rewards.judge import SCORE, Judge, JudgeError, read_answer_text
from rlightning.types.trajectory import Outcome, Prompt, read_traces


class SelfJudged(Environment):
    """Runs another environment, and has the policy itself score each trajectory by a rubric, in a separate conversation
    that is not trained on.

    The reward is the environment's, if it gives one, plus the weighted score; with several agents, the reward of each.
    A trajectory counts as not sampled if it cannot be judged: the judge's answer does not fit, is cut off, or has no
    score.

    Args:
        rubric: as in :class:`~rlightning.rewards.judge.Judge`, which describes this and the next five arguments. Names
            in braces are ``{prompt}``, ``{completion}`` (the policy's last turn), ``{full_text}``, ``{turns}``, and
            columns.
        system: the judge's system message.
        pattern: finds the score in the judge's answer.
        scores: numbers for the judge's words.
        lowest: lowest valid score.
        highest: highest valid score.
        environment: makes the trajectories; None for SingleTurn.
        weight: weight of the score in the reward, from 0 to 1.
        max_new_tokens: maximum tokens of the judge's answer; None for the run's maximum.
    """

    runs_in_workers = False

    def __init__(
        self,
        rubric: str,
        *,
        environment: Environment | None = None,
        system: str | None = None,
        pattern: str = SCORE,
        scores: Mapping[str, float] | None = None,
        lowest: float = 0.0,
        highest: float = 10.0,
        weight: float = 1.0,
        max_new_tokens: int | None = None,
    ) -> None:
        self.judge = Judge(
            rubric, model="policy", system=system, pattern=pattern, scores=scores, lowest=lowest, highest=highest
        )
        self.environment = environment or SingleTurn()
        self.weight, self.max_new_tokens = weight, max_new_tokens
        self.has_tools, self.truncates = self.environment.has_tools, self.environment.truncates

    async def check(self) -> None:
        """Raise a ConfigError if the rubric or the environment cannot be used."""
        self.judge.check_arguments()
        await self.environment.check()

    async def close(self) -> None:
        """Close the environment that makes the trajectories."""
        await self.environment.close()

    async def run_group(self, prompt: Prompt, group: PolicyGroup) -> list[Outcome]:
        """Make the trajectories of one prompt, have the policy judge each, and return the outcomes with the scores in
        their rewards.
        """
        return await self.environment.run_group(prompt, _JudgedGroup(group, partial(self._score, prompt)))

    async def _score(self, prompt: Prompt, policy: Policy, outcome: Outcome) -> Outcome:
        """Have the policy judge an outcome, and return the outcome with the weighted score added to its reward."""
        outcome = check_outcome(outcome)
        if outcome.status not in ("finished", "truncated"):
            return outcome
        assert isinstance(policy, RecordedPolicy), "groups have these"
        said = "".join(sample.text for sample in policy.recorder.samples[-1:])
        given = {"prompt": prompt.text, "completion": said, "full_text": prompt.text + said}
        turns = [turn.message for turn in policy.recorder.turns]
        try:
            messages = self.judge.write({**prompt.columns, **given, "turns": turns})
        except KeyError as error:
            raise ConfigError(
                f"SelfJudged: the rubric's {{{error.args[0]}}} is no column of prompt {prompt.index}. Name another."
            ) from error
        try:
            reply = await policy.ask(*messages, max_new_tokens=self.max_new_tokens)
            score = self.judge.read(read_answer_text(reply.message.content, reply.finish_reason))
        except (JudgeError, AskLimitError) as error:
            return replace(outcome, status="failed", reward=None, error=f"It could not be judged: {error}")
        added = self.weight * score
        traces = read_traces(outcome.traces)
        return replace(
            outcome,
            reward=(total_reward(outcome) or 0.0) + added,
            traces=traces and [trace._replace(reward=trace.reward + added) for trace in traces],
            metrics={**outcome.metrics, "judge_score": score},
        )


class _JudgedGroup:
    """A :class:`~rlightning.environments.environment.PolicyGroup` that judges each trajectory after its end."""

    def __init__(self, group: PolicyGroup, judge: Callable[[Policy, Outcome], Awaitable[Outcome]]) -> None:
        self._group, self._judge = group, judge

    async def sample_all(self) -> list[Outcome]:
        """Sample one turn for each trajectory, in separate requests, and have the policy score each; return the
        outcomes with the scores in their rewards.
        """

        async def complete(policy: Policy) -> Outcome:
            await policy.chat()
            return Outcome()

        return await self.run_each(complete)

    async def run_each(
        self,
        run: Callable[[Policy], Awaitable[Outcome]],
        places: AbstractAsyncContextManager[object] | None = None,
    ) -> list[Outcome]:
        """Make the trajectories with ``run``, concurrently (:meth:`PolicyGroup.run_each`), and have the policy score
        each; return the outcomes with the scores in their rewards.
        """

        async def run_and_judge(policy: Policy) -> Outcome:
            try:
                outcome = await run(policy)
            except LimitReachedError as error:
                outcome = Outcome(status="truncated", error=cut(str(error)))
            return await self._judge(policy, outcome)

        return await self._group.run_each(run_and_judge, places)
