"""A step over trajectories of several turns, branches and statuses is that of a reference in float64, on 1 and 2 ranks.

The reference follows the definitions trajectory by trajectory, in plain Python and one forward pass a branch.
"""

import os
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from random_trajectories import random_trajectory, split_by_agents
from rank_processes import each_run, finish, start_calls
from small_steps import as_tensors, weight_lists
from tiny import UseSampler, make_algorithm, make_data, make_trainer, save_model
from torch import Tensor

from rlightning.algorithms import GRPO, RLOO, REINFORCEPlusPlusBaseline
from rlightning.models import load_policy
from rlightning.parallel import DDP
from rlightning.rollout import Sampling, TrajectorySampler
from rlightning.types import Prompt, Trajectory

pytestmark = pytest.mark.processes

LR, NUM_PROMPTS, GROUP_SIZE = 0.5, 4, 4
DISCOUNT = 0.7


def make_groups(*, has_agents: bool = False) -> list[list[Trajectory]]:
    """Four prompts' trajectories, perhaps of two agents; of the last one a single one is left that is sampled."""
    groups = []
    for index in range(NUM_PROMPTS):
        draw = random.Random(index)
        group = [random_trajectory(draw, index) for _ in range(GROUP_SIZE)]
        for sample in (sample for one in group for sample in one.samples):
            sample.supports = None  # the reference is of whole distributions
        for number, one in enumerate(group):
            one.status = ("finished", "truncated", "finished", "failed")[number]
            if index == NUM_PROMPTS - 1 and number:
                one.status = "timeout"
        groups.append([split_by_agents(draw, one) for one in group] if has_agents else group)
    return groups


class Given(TrajectorySampler):
    """Gives each prompt's trajectories."""

    def __init__(self, module: Any) -> None:
        self.groups = make_groups(has_agents=isinstance(module, OfAgents))

    def generate(self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling, *_: Any) -> Any:
        return [self.groups[prompt.index] for prompt in prompts]


def sgd(module: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.loaded_actor.parameters(), lr=LR)


class PlainGRPO(GRPO):
    configure_optimizers = sgd


class PlainRLOO(RLOO):
    configure_optimizers = sgd


class OfAgents(PlainRLOO):
    """Trained on trajectories of several agents."""


class PlainBaseline(REINFORCEPlusPlusBaseline):
    configure_optimizers = sgd


def final_reward(one: Trajectory) -> float:
    return one.final_text.count("1") / max(len(one.final_text), 1)


def train(folder: Path, model: str, case: tuple[str, dict[str, Any]], num_ranks: int = 1) -> dict[str, list[Any]]:
    """The weights after one step."""
    algorithm, arguments = case
    usual = {"samples_per_prompt": GROUP_SIZE, "max_tokens_per_microbatch": 30, "kl_coef": 0.0, "max_grad_norm": 1e9}
    module = make_algorithm(globals()[algorithm], model, validate_first=False, **usual | arguments)
    ranks: dict[str, Any] = {"devices": num_ranks, "strategy": DDP()} if num_ranks > 1 else {}
    make_trainer(folder, 1, UseSampler(Given), precision="64-true", **ranks).fit(module, make_data(folder))
    return weight_lists(module)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("PlainGRPO", {}),
    ("PlainGRPO", {"turn_discount": DISCOUNT, "loss_aggregation": "turn_mean", "mask_truncated": True}),
    ("PlainRLOO", {"turn_discount": DISCOUNT, "loss_aggregation": "token_mean"}),
    ("PlainBaseline", {"turn_discount": DISCOUNT, "loss_aggregation": "trajectory_mean"}),
    ("OfAgents", {"loss_aggregation": "trajectory_mean"}),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_step_is_that_of_the_reference(number: int, model: str, steps: list[list[Any]]) -> None:
    expected = take_step(model, *CASES[number])
    one, first, second = map(as_tensors, steps[number])
    start = {name: weight.detach() for name, weight in load_policy(model).named_parameters()}
    assert max(float((expected[name] - start[name]).abs().max()) for name in expected) > 1e-3, "nothing is trained"
    for name, weight in expected.items():
        torch.testing.assert_close(one[name], weight, atol=1e-7, rtol=0.0)  # advantages are float32
        torch.testing.assert_close(first[name], one[name], atol=1e-10, rtol=0.0)
        assert torch.equal(first[name], second[name])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), initializer_range=0.1)


@pytest.fixture(scope="module")
def steps(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """By case, the weights after one step: of one rank, and of each of two."""
    folder = tmp_path_factory.mktemp("steps")
    ranks = finish(start_calls(train_cases, 2, folder, model))
    return [[train(folder, model, case), *(rank[number] for rank in ranks)] for number, case in enumerate(CASES)]


def train_cases(folder: Path, model: str) -> list[dict[str, list[Any]]]:
    folder = folder / os.environ["RANK"]
    folder.mkdir()
    runs = {str(number): {"case": case} for number, case in enumerate(CASES)}
    return [train(folder, model, run["case"], 2) for _, run in each_run(runs)]


# The reference


def take_step(model: str, algorithm: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Weights after a step of plain gradient descent, float64."""
    policy = load_policy(model).double()
    has_agents = algorithm == "OfAgents"
    made = make_groups(has_agents=has_agents)
    groups = [[one for one in group if one.status in ("finished", "truncated")] for group in made]
    groups = [group for group in groups if len(group) > 1]
    if has_agents:
        advantages = [own for group in groups for own in estimate_by_agent(group)]
    else:
        advantages = list(estimate(groups, algorithm, arguments.get("turn_discount")))
    trajectories = [one for group in groups for one in group]
    is_masked = [arguments.get("mask_truncated", False) and one.status == "truncated" for one in trajectories]
    counts = {
        "token_mean": sum(one.num_sampled for one, masked in zip(trajectories, is_masked, strict=True) if not masked),
        "turn_mean": sum(len(one.samples) for one in trajectories),
        "trajectory_mean": len(trajectories),
    }
    kind = arguments.get("loss_aggregation", "trajectory_mean")
    loss = torch.zeros((), dtype=torch.float64)
    for one, own, masked in zip(trajectories, advantages, is_masked, strict=True):
        places = [place for place, turn in enumerate(one.turns) if turn.sample is not None]
        lengths = {"token_mean": [1] * len(places), "turn_mean": [len(s.token_ids) for s in one.samples]}
        lengths["trajectory_mean"] = [one.num_sampled] * len(places)
        for branch in () if masked else one.branches:
            tokens = torch.tensor([list(branch.token_ids)])
            bounds = torch.tensor([0, tokens.numel()], dtype=torch.int32)
            output = policy(tokens, use_cache=False, cu_seq_lens_q=bounds, max_length_q=tokens.numel())
            logprobs = output.logits[0].double().log_softmax(-1)
            for position in (p for p, sampled in enumerate(branch.is_sampled) if sampled):
                turn = places.index(branch.turns[position])
                logprob = logprobs[position - 1, branch.token_ids[position]]
                loss = loss - own[turn] * logprob / lengths[kind][turn] / counts[kind]
    loss.backward()
    with torch.no_grad():
        return {name: p - LR * p.grad for name, p in policy.named_parameters() if p.grad is not None}


def estimate(groups: list[list[Trajectory]], algorithm: str, discount: float | None) -> Iterator[list[float]]:
    """By trajectory, the advantage of each of its turns."""
    by_group = [[turn_returns(one, discount) for one in group] for group in groups]
    centred: list[list[list[float]]] = []
    for group in by_group:
        # One value a trajectory, or all of its turns'.
        pool = [one[:1] if discount is None else one for one in group]
        values = [value for one in pool for value in one]
        scale = statistics.stdev(values) + 1e-6 if algorithm == "PlainGRPO" else 1.0
        found = []
        for own, returns in enumerate(group):
            if algorithm == "PlainRLOO":
                values = [value for other, one in enumerate(pool) if other != own for value in one]
            found.append([(value - statistics.fmean(values)) / scale for value in returns])
        centred.append(found)
    if algorithm == "PlainBaseline":
        tokens = [
            value
            for group, own in zip(groups, centred, strict=True)
            for one, values in zip(group, own, strict=True)
            for sample, value in zip(one.samples, values, strict=True)
            for _ in sample.token_ids
        ]
        mean, std = statistics.fmean(tokens), statistics.pstdev(tokens)
        centred = [[[(value - mean) / std for value in one] for one in group] for group in centred]
    yield from (one for group in centred for one in group)


def estimate_by_agent(group: list[Trajectory]) -> Iterator[list[float]]:
    """By trajectory, for each turn the reward of its agent's trace less the mean of the agent's in the others."""
    for number, one in enumerate(group):
        found: dict[int, float] = {}
        for trace in one.traces or ():
            others = [
                final_reward(other) + theirs.reward
                for place, other in enumerate(group)
                for theirs in other.traces or ()
                if place != number and theirs.agent == trace.agent
            ]
            advantage = final_reward(one) + trace.reward - statistics.fmean(others) if others else 0.0
            found |= dict.fromkeys(trace.turns, advantage)
        yield [found[turn] for turn in range(len(one.samples))]


def turn_returns(one: Trajectory, discount: float | None) -> list[float]:
    """Of each turn; without a discount the trajectory's reward, for each."""
    number, total = len(one.samples), final_reward(one) + (one.reward or 0.0)
    if discount is None:
        return [total] * max(number, 1)
    own = [0.0] * number if one.turn_rewards is None else list(one.turn_rewards)
    if own:
        own[-1] += total - sum(own)
    return [sum(discount ** (j - k) * own[j] for j in range(k, number)) for k in range(number)]
