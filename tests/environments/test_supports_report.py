"""What is said of supports in runs whose agents truncate, or do not, by parameters of their own."""

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest
from agent_cases import make_policy
from attempts import PROMPT, CannedSampler
from chat_templates import make_tokenizer

from rlightning.environments.supports_report import SupportsReport
from rlightning.rollout import Sampling
from rlightning.rollout.sampler import MAX_SUPPORT
from rlightning.types import Outcome, RolloutBatch, Sample
from rlightning.types.supports import Supports

UNKNOWN = "The sampler returns no Sample.supports"
LIMITED = "top_p and min_p leave the 128 likeliest tokens at most"


class TruncatingSampler(CannedSampler):
    """Says one token a turn.

    Args:
        has_supports: that it returns them of truncated distributions, each as large as it may be.
    """

    def __init__(self, has_supports: bool = True) -> None:
        super().__init__()
        self.has_supports = has_supports

    async def sample(self, token_ids: Any, sampling: Sampling, **settings: Any) -> list[Sample]:
        size = sampling.max_support if self.has_supports else 0
        supports = Supports(range(size), [size]) if size else None
        return [Sample([7], [-0.1], [2], "7", "stop", supports)]


def roll_out(run: dict[str, Any], *turns: dict[str, Any], has_supports: bool = True) -> RolloutBatch:
    """A trajectory whose turns have parameters of their own."""
    policy = make_policy(TruncatingSampler(has_supports), make_tokenizer("qwen3"), PROMPT, sampling=run)

    async def talk() -> None:
        for own in turns:
            await policy.sample_turns([1, 2], replace(policy.sampling, **own))

    asyncio.run(talk())
    return RolloutBatch.pack([[policy.finish(Outcome(reward=1.0), 0.1)]])


PLAIN: dict[str, Any] = {"top_p": 1.0, "min_p": 0.0, "top_k": 0}


@pytest.mark.parametrize(
    ("run", "turns", "has_supports", "said"),
    [
        ({"top_p": 0.9}, [PLAIN, PLAIN], True, None),
        ({"top_p": 0.9}, [PLAIN, PLAIN], False, None),
        ({"top_p": 0.9}, [PLAIN, {"top_p": 0.5, "top_k": 20}], True, None),
        ({"top_p": 0.9}, [PLAIN, {"top_p": 0.5}], True, LIMITED),
        ({"top_p": 0.9}, [{}, {}], True, LIMITED),
        ({"top_p": 0.9}, [PLAIN, {}], False, UNKNOWN),
        ({"top_p": 0.9, "top_k": 20}, [{}, PLAIN], True, None),
        ({}, [{}, {"top_p": 0.5, "top_k": 20}], True, None),
        ({}, [{}, {"top_p": 0.5}], True, LIMITED),
        ({}, [{}, {"top_p": 0.5}], False, UNKNOWN),
    ],
)
def test_turns_of_their_own_parameters_are_told_apart(
    run: dict[str, Any],
    turns: list[dict[str, Any]],
    has_supports: bool,
    said: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    report = SupportsReport(Sampling(**run))
    for _ in range(2):
        report.report(roll_out(run, *turns, has_supports=has_supports))
    assert [record.getMessage().startswith(said or "") for record in caplog.records] == [True] * (said is not None)


def test_later_unknown_supports_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """After an agent that wants no truncation; those of more than MAX_SUPPORT tokens are told by their number."""
    report = SupportsReport(Sampling(top_p=0.9, top_k=20))
    report.report(roll_out({"top_p": 0.9, "top_k": 20}, PLAIN))
    assert not caplog.records
    batch = roll_out({"top_p": 0.9, "top_k": 20}, {"top_k": 500}, PLAIN, {"top_k": 500})
    first, _, _ = batch.trajectories[0].samples
    first.supports = Supports([], [0])
    report.report(batch)
    assert f"1 of 2 tokens were drawn from more than {MAX_SUPPORT} tokens each" in caplog.text
