"""An environment in which the policy itself, through the same engine, scores each trajectory by a rubric."""

from collections.abc import Mapping
from dataclasses import replace

from rlightning.environments.environment import AskLimitError, Environment, LimitReachedError, Policy
from rlightning.environments.outcomes import check_outcome, total_reward
from rlightning.environments.policy import as_recorded
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
        self.places = self.environment.places

    async def check(self) -> None:
        """Raise a ConfigError if the rubric or the environment cannot be used."""
        self.judge.check_arguments()
        kind = type(self.environment)
        if kind.run_group not in (Environment.run_group, SingleTurn.run_group):
            raise ConfigError(
                f"SelfJudged: environment={kind.__name__} defines run_group(prompt, group), but trajectories are "
                "scored one by one. Define run(prompt, policy) instead."
            )
        await self.environment.check()

    async def close(self) -> None:
        """Close the environment that makes the trajectories."""
        await self.environment.close()

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Make one trajectory, have the policy judge it, and return its outcome with the score in its reward."""
        try:
            outcome = await self.environment.run(prompt, policy)
        except LimitReachedError as error:
            outcome = Outcome(status="truncated", error=cut(str(error)))
        return await self._score(prompt, policy, outcome)

    async def _score(self, prompt: Prompt, policy: Policy, outcome: Outcome) -> Outcome:
        """Have the policy judge an outcome, and return the outcome with the weighted score added to its reward."""
        outcome = check_outcome(outcome)
        if outcome.status not in ("finished", "truncated"):
            return outcome
        recorder = as_recorded(policy).recorder
        said = "".join(sample.text for sample in recorder.samples[-1:])
        given = {"prompt": prompt.text, "completion": said, "full_text": prompt.text + said}
        turns = [turn.message for turn in recorder.turns]
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
