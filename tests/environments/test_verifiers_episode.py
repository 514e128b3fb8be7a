"""What a trajectory has of an episode of verifiers', without a server."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from agent_cases import finish, make_policy
from attempts import say

from rlightning.environments.verifiers import Verifiers
from rlightning.environments.verifiers.episode import Agent, Call, Episode, Node, Reward, Trace
from rlightning.types import Sample

PLAIN: dict[str, Any] = {}


def to_trace(name: str, sample: Sample, *, trainable: bool = True) -> Trace:
    """An agent's trace of one turn."""
    number = len(sample.token_ids)
    node = Node(
        message={"role": "assistant", "content": sample.text},
        sampled=True,
        token_ids=list(sample.token_ids),
        mask=[True] * number,
        logprobs=list(sample.logprobs),
    )
    call = Call(node=0, finish_reason="stop")
    agent = Agent(name=name, trainable=trainable)
    return Trace(id=name, agent=agent, nodes=[node], calls=[call], rewards={"said": Reward(score=1.0)}, ok=True)


@pytest.mark.parametrize(
    ("own", "user", "metrics"),
    [
        ({"top_p": 0.5}, PLAIN, {"truncated_turns": 1.0}),
        ({"json_schema": "{}"}, PLAIN, {"constrained_turns": 1.0}),
        (PLAIN, PLAIN, {}),
        (PLAIN, {"top_p": 0.5, "json_schema": "{}"}, {}),  # of an agent that is not trained
    ],
)
def test_trajectory_has_the_metrics_of_its_agents_turns(
    own: dict[str, Any], user: dict[str, Any], metrics: dict[str, float]
) -> None:
    """By which verification leaves it out."""
    sampler = say("One.", "Two.", "Three.")
    policy = make_policy(sampler, sampler.tokenizer)
    parts = {name: policy.split() for name in ("first", "second", "user")}

    async def talk() -> Episode:
        traces = []
        for name, given in (("first", own), ("second", PLAIN), ("user", user)):
            (turn,) = await parts[name].sample_turns([1, 2], replace(policy.sampling, **given))
            traces.append(to_trace(name, turn.sample, trainable=name != "user"))
        return Episode(ok=True, traces=traces)

    environment = Verifiers("number_tasks", python="python")
    outcome = environment._read(asyncio.run(talk()), policy, parts)
    trajectory = policy.finish(outcome, 0.1)
    unusual = {name: value for name, value in trajectory.metrics.items() if name.endswith("ed_turns")}
    assert (trajectory.status, len(trajectory.samples), unusual) == ("finished", 2, metrics)
    finish(policy)  # each token is trained once


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({}, 16384),
        ({"num_workers": 8, "max_trajectories": 1024}, 64 * 8192),
        ({"num_workers": 8, "max_trajectories": 1024, "endpoint": {"max_connections": 5}}, 5),
    ],
)
def test_endpoint_has_room_for_the_requests_of_all_episodes(given: dict[str, Any], most: int) -> None:
    assert Verifiers("number_tasks", python="python", **given).endpoint.max_connections == most
