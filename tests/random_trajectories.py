"""Trajectories of several turns and branches, with tokens below 13: random, or of given lengths."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import cast, get_args

from rlightning.types import AgentTrace, Branch, BranchReason, Prompt, Sample, Status, Trajectory, Turn
from rlightning.types.supports import Supports

REASONS: tuple[BranchReason, ...] = ("history_edited", "reasoning_dropped", "started_over")


def random_sample(draw: random.Random) -> Sample:
    """Up to five tokens, at times none."""
    count = draw.randrange(6)
    tokens = [draw.randrange(13) for _ in range(count)]
    logprobs = [-draw.random() for _ in tokens]
    versions = sorted(draw.randrange(4) for _ in tokens)
    supports = draw.choice((None, random_supports(draw, tokens)))
    return Sample(tokens, logprobs, versions, f"text {tokens}", draw.choice(("stop", "length")), supports)


def random_supports(draw: random.Random, tokens: Sequence[int]) -> Supports:
    """Return up to three tokens for each token, itself among them, or none where the support is too large."""
    supports = []
    for token in tokens:
        others = [other for other in draw.sample(range(13), 2) if other != token]
        supports.append(draw.choice(([], [token], sorted([token, *others]))))
    return Supports([one for support in supports for one in support], [len(support) for support in supports])


def random_trajectory(draw: random.Random, index: int = 0, *, max_turns: int = 5) -> Trajectory:
    """Turns of the policy and observations; a branch begins anew before some of them, with some of what was before."""
    prompt = Prompt(
        index, f"prompt {index}", [draw.randrange(13) for _ in range(draw.randint(1, 4))], {"answer": index}
    )
    branches, turns = [Branch()], []
    branches[0].append(prompt.token_ids)
    for place in range(draw.randint(1, max_turns)):
        if draw.random() < 0.3:
            history, branch = branches[-1].token_ids, Branch(draw.choice(REASONS))
            branch.append(prompt.token_ids)
            branch.append(history[len(prompt.token_ids) + draw.randrange(4) :], draw.randrange(place + 1))
            branches.append(branch)
        if draw.random() < 0.7:
            sample = random_sample(draw)
            turns.append(Turn({"role": "assistant", "content": sample.text}, sample))
            branches[-1].append_sample(sample, place)
        else:
            turns.append(Turn({"role": "tool", "content": "observed", "tool_call_id": str(place)}))
            branches[-1].append([draw.randrange(13) for _ in range(draw.randrange(4))], place)
    return Trajectory(
        prompt,
        tuple(branches),
        tuple(turns),
        status=cast(Status, draw.choice(get_args(Status))),
        scores={"exact": draw.random(), "format": draw.choice((None, 1.0))},
        reward=draw.choice((None, draw.random())),
        turn_rewards=draw.choice((None, [draw.random() for turn in turns if turn.sample is not None])),
        metrics={"calls": float(draw.randrange(3))} if draw.random() < 0.5 else {},
        timings={"policy": draw.random()},
        error=draw.choice((None, "lost the connection")),
    )


def random_groups(draw: random.Random, num_groups: int | None = None) -> list[list[Trajectory]]:
    """Up to four groups of up to four trajectories, some of them of none."""
    number = draw.randint(0, 4) if num_groups is None else num_groups
    return [[random_trajectory(draw, index) for _ in range(draw.randrange(5))] for index in range(number)]


def split_by_agents(draw: random.Random, trajectory: Trajectory) -> Trajectory:
    """The same, of up to four traces of two agents, whose turns may take turns; some have none."""
    turns: list[list[int]] = [[] for _ in range(draw.randint(1, 4))]
    for number in range(len(trajectory.samples)):
        draw.choice(turns).append(number)
    traces = [AgentTrace(draw.choice(("buyer", "seller")), draw.gauss(0, 1), own) for own in turns]
    return replace(trajectory, traces=traces)


def make_trajectory(index: int, lengths: Sequence[int], turn_rewards: list[float] | None = None) -> Trajectory:
    """Turns of so many tokens, an observation of two tokens after each; from the third one on in another branch."""
    branches, turns = [Branch()], list[Turn]()
    branches[0].append([1, 2])
    for number, length in enumerate(lengths):
        if number == 2:
            history = branches[-1].token_ids
            branches.append(Branch("history_edited"))
            branches[-1].append(history, len(turns) - 1)
        sample = Sample([3] * length, [-1.0] * length, [0] * length, "", "stop")
        branches[-1].append_sample(sample, len(turns))
        turns.append(Turn({"role": "assistant", "content": ""}, sample))
        branches[-1].append([4, 5], len(turns))
        turns.append(Turn({"role": "tool", "content": ""}))
    return Trajectory(Prompt(index, "", [1, 2], {}), tuple(branches), tuple(turns), turn_rewards=turn_rewards)


def two_branches(prompt: Prompt, first: Sample, history: Sequence[int], second: Sample) -> Trajectory:
    """A completion, then another one after a history that was written anew."""
    branches = (Branch(), Branch("history_edited"))
    for place, (branch, tokens, sample) in enumerate(
        zip(branches, (prompt.token_ids, history), (first, second), strict=True)
    ):
        branch.append(tokens)
        branch.append_sample(sample, place)
    turns = tuple(Turn({"role": "assistant", "content": sample.text}, sample) for sample in (first, second))
    return Trajectory(prompt, branches, turns)
