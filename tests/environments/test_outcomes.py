"""What environments return: numbers as floats, anything else refused with a reason."""

from typing import Any

import numpy as np
import pytest

from rlightning.environments.environment import Environment, Policy, PolicyGroup
from rlightning.environments.outcomes import check_outcome
from rlightning.environments.policy import GroupRequest
from rlightning.environments.runner import EnvironmentRunner, read_outcomes
from rlightning.rollout import Sampling
from rlightning.types import AgentTrace, Outcome, Prompt

MAKE: Any = Outcome
"""With arguments of any type."""


def test_numbers_become_floats() -> None:
    given = MAKE(np.float32(0.5), [1, True], metrics={"calls": 3}, traces=[AgentTrace("one", 1.0, [0])])
    outcome = check_outcome(given)
    assert outcome == Outcome(0.5, [1.0, 1.0], metrics={"calls": 3.0}, traces=given.traces)
    assert [type(one) for one in (outcome.reward, *(outcome.turn_rewards or ()))] == [float] * 3


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (0.5, TypeError, r"^run\(\) returned float, and has to return an Outcome: Outcome\(reward=1\.0\)\.$"),
        (MAKE(reward="high"), TypeError, r"^run\(\) returned the reward 'high', and has to return a number\.$"),
        (MAKE(reward=float("nan")), ValueError, r"the reward nan, and has to return a finite number\.$"),
        (MAKE(turn_rewards=["x"]), TypeError, r"the turn reward 'x'"),
        (MAKE(turn_rewards=1.0), TypeError, r"the turn_rewards 1\.0, and has to return a list\.$"),
        (MAKE(metrics=[1]), TypeError, r"the metrics \[1\], and has to return a dict\.$"),
        (MAKE(metrics={"calls": None}), TypeError, r"the metric 'calls' None"),
        (MAKE(traces=5), TypeError, r"the traces 5, and has to return a list\.$"),
        (MAKE(traces=["one"]), TypeError, r"the trace 'one', and has to return AgentTrace\("),
        (MAKE(traces=[AgentTrace("one", float("nan"), [0])]), ValueError, r"the reward of a trace nan, and has to"),
        (MAKE(status="done"), ValueError, r"the status 'done', and there are: finished, truncated, "),
    ],
)
def test_what_cannot_be_read_is_refused(returned: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_outcome(returned)


def test_a_group_has_an_outcome_for_each_trajectory() -> None:
    assert read_outcomes([Outcome()], 1) == [Outcome()]
    with pytest.raises(
        TypeError, match=r"^run_group\(\) returned 1 outcomes, and has to return an Outcome for each of"
    ):
        read_outcomes([Outcome()], 2)
    with pytest.raises(TypeError, match=r"^run_group\(\) returned NoneType, "):
        read_outcomes(None, 2)


class OddRun(Environment):
    async def run(self, prompt: Prompt, policy: Policy) -> Any:
        return 3


class OddGroup(Environment):
    async def run_group(self, prompt: Prompt, group: PolicyGroup) -> Any:
        return [Outcome(reward=1.0)]


@pytest.mark.parametrize(
    ("environment", "reason"), [(OddRun(), "run() returned int"), (OddGroup(), "run_group() returned 1 outcomes")]
)
def test_a_wrong_type_fails_its_trajectories_alone(environment: Environment, reason: str) -> None:
    class Tokenizer:
        chat_template = None

    runner = EnvironmentRunner(None, Tokenizer(), environment, max_length=8)  # type: ignore[arg-type]
    try:
        made = runner.submit(GroupRequest(Prompt(0, "?", [1], {}), Sampling(), 2)).result()
    finally:
        runner.close()
    assert [one.status for one in made] == ["failed"] * 2 and reason in str(made[0].error)
