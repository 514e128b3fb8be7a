"""Trajectories are scored again: what was sampled passes, and what is trained in another context does not."""

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from engine_run import Witness, make_module, save_model

from rlightning.callbacks import TransformersRollout
from rlightning.environments import SelfCorrection
from rlightning.environments.chat_format import ChatFormat
from rlightning.environments.policy import GroupRequest
from rlightning.environments.recorded_group import RecordedGroup
from rlightning.environments.verification import LEAST_GAP, MAX_BRANCH_RATIO, MAX_RATIO, Gap, TrajectoryVerifier
from rlightning.errors import ConfigError, VerificationError
from rlightning.models import load_config, load_policy
from rlightning.parallel.sharding import named_weights
from rlightning.rollout import Sampling
from rlightning.rollout.model_files import ModelFiles
from rlightning.rollout.transformers_sampler import TransformersSampler
from rlightning.types import Branch, Prompt, Trajectory

SAMPLING = Sampling(max_new_tokens=8, seed=3)
MAX_LENGTH = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes: dict[str, Any] = {"hidden_size": 64, "max_position_embeddings": 256, "initializer_range": 0.15}
    return tiny.save_byte_model(tmp_path_factory.mktemp("model"), **sizes)


@pytest.fixture(
    scope="module",
    params=[torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)],
    ids=["float32", "bfloat16"],
)
def sampler(folder: str, request: pytest.FixtureRequest) -> Iterator[TransformersSampler]:
    options: dict[str, Any] = {"device": torch.device("cpu"), "dtype": request.param, "max_length": MAX_LENGTH}
    sampler = TransformersSampler(load_config(folder), ModelFiles.read(folder), **options)
    actor = load_policy(folder)
    sampler.update_weights(named_weights(actor), 3)
    yield sampler
    sampler.close()


def attempt(sampler: TransformersSampler, num_prompts: int = 6, sampling: Sampling = SAMPLING) -> list[Trajectory]:
    """Two turns each, with an observation between them."""

    async def run() -> list[Trajectory]:
        found = []
        for index in range(num_prompts):
            text = f"user: what is {index}+1?\nassistant: "
            prompt = Prompt(index, text, sampler.files.tokenizer(text).input_ids, {"answer": "x"})
            request = GroupRequest(prompt, replace(sampling, seed=index), 3)
            group = RecordedGroup(sampler, ChatFormat(sampler.files.tokenizer), request, MAX_LENGTH, timeout=120.0)
            outcomes = await SelfCorrection(verdict="That is wrong. Answer again.").run_group(prompt, group)
            found += group.finish(outcomes, 0.0)
        return found

    return asyncio.run(run())


def verify(sampler: TransformersSampler, trajectories: Sequence[Trajectory], **options: Any) -> Any:
    verifier = TrajectoryVerifier(sampler, MAX_LENGTH, sampler.dtype)
    return asyncio.run(verifier.verify(trajectories, SAMPLING, **options)), verifier


@pytest.mark.long
def test_sampled_trajectories_pass(sampler: TransformersSampler) -> None:
    trajectories = attempt(sampler)
    gap, verifier = verify(sampler, trajectories)
    assert gap.num_tokens == sum(one.num_sampled for one in trajectories)
    assert verifier.single_turns.num_tokens > 6
    assert gap.mean < LEAST_GAP[sampler.dtype] * (0.1 if sampler.dtype == torch.float32 else 2)


def tokenize_history_anew(branch: Branch) -> None:
    """As a client that hands on the text of a turn, which gets other tokens: here a single one."""
    first = branch.is_sampled.index(1)
    branch.token_ids[first + 2] = (branch.token_ids[first + 2] + 1) % 200


def leave_out_observation(branch: Branch) -> None:
    """As a template that drops a message."""
    left_out = [place for place, turn in enumerate(branch.turns) if turn == 1]
    for values in branch.arrays().values():
        for place in reversed(left_out):
            del values[place]


def shift_logprobs(branch: Branch) -> None:
    """As an engine that leaves out the first token's."""
    branch.logprobs[:] = branch.logprobs[1:] + branch.logprobs[:1]


def lose_a_number(branch: Branch) -> None:
    branch.logprobs[branch.is_sampled.index(1)] = float("nan")


@pytest.mark.long
@pytest.mark.parametrize(
    ("edit", "turns"),
    [
        (tokenize_history_anew, "first turns"),  # the token itself, and those after it
        (leave_out_observation, "later turns"),
        (shift_logprobs, "first turns"),
        (lose_a_number, "first turns"),
    ],
)
def test_other_contexts_are_refused(sampler: TransformersSampler, edit: Callable[[Branch], None], turns: str) -> None:
    trajectories = attempt(sampler)
    for branch in (branch for one in trajectories for branch in one.branches):
        edit(branch)
    rule = rf"^Trajectories do not train on what was sampled: .* of their {turns} differ by .* prompt \d, message \d"
    with pytest.raises(VerificationError, match=rule):
        verify(sampler, trajectories)


@pytest.mark.long
def test_one_wrong_branch_of_many_is_refused(sampler: TransformersSampler) -> None:
    trajectories = attempt(sampler, num_prompts=24, sampling=replace(SAMPLING, max_new_tokens=24))
    verify(sampler, trajectories)
    branch = max((branch for one in trajectories for branch in one.branches), key=lambda one: sum(one.is_sampled))
    leave_out_observation(branch)
    what = r"(one branch|their \w+ turns)"  # in float32 rounding is so small that it shows in the mean of all
    with pytest.raises(VerificationError, match=rf" of {what} differ by .* nats in the mean of \d+ tokens"):
        verify(sampler, trajectories)


def test_limits_of_a_step_and_of_a_branch() -> None:
    verifier = TrajectoryVerifier(None, MAX_LENGTH, torch.bfloat16)  # type: ignore[arg-type]
    verifier.single_turns = Gap(4.0, 900)
    allowed = 1 + 6 * math.sqrt(1 / 100 + 1 / 900)  # of 100 tokens
    for ratio, least in ((MAX_RATIO, 2e-3), (MAX_BRANCH_RATIO, 2e-3 * 10 / 3)):
        limit = max(least, ratio * allowed * 4 / 900)
        verifier._check(Gap(99.9 * limit, 100), ratio, "it", "somewhere")
        with pytest.raises(VerificationError, match=r" of it differ by .* in the mean of 100 tokens, .* off, somew"):
            verifier._check(Gap(100.1 * limit, 100), ratio, "it", "somewhere")
    verifier.single_turns = Gap(1e-9, 900)
    verifier._check(Gap(0.66, 100), MAX_BRANCH_RATIO, "it", "somewhere")
    with pytest.raises(VerificationError):
        verifier._check(Gap(0.67, 100), MAX_BRANCH_RATIO, "it", "somewhere")


def test_other_weights_or_temperatures_are_left_out(
    sampler: TransformersSampler, caplog: pytest.LogCaptureFixture
) -> None:
    trajectories = attempt(sampler, 2)
    with caplog.at_level(logging.WARNING, "rlightning"):
        gap, _ = verify(sampler, trajectories, version=4)
    assert gap.num_tokens == 0 and "none could be verified" in caplog.text
    own = trajectories[0].prompt._replace(temperature=0.5)
    others = [one for one in trajectories if one.prompt.index != own.index]
    mixed = [replace(one, prompt=own) for one in trajectories if one not in others] + others
    assert verify(sampler, mixed)[0].num_tokens == sum(one.num_sampled for one in others)


def test_longest_sequences_are_scored_within_the_limit(sampler: TransformersSampler) -> None:
    trajectories = attempt(sampler, 1)
    longest = max(len(one.branches[0].token_ids) for one in trajectories)
    verifier = TrajectoryVerifier(sampler, longest, sampler.dtype)
    gap = asyncio.run(verifier.verify(trajectories, SAMPLING))
    num_cut = sum(len(one.branches[0].token_ids) == longest for one in trajectories)
    assert gap.num_tokens == sum(one.num_sampled for one in trajectories) - num_cut


class Rewriting(SelfCorrection):
    """Hands the policy's first turn on with a token of it changed."""

    async def run(self, prompt: Prompt, policy: Any) -> Any:
        outcome = await super().run(prompt, policy)
        for branch in policy.recorder.branches:
            branch.token_ids[branch.is_sampled.index(1)] ^= 1
        for turn in policy.recorder.turns[:1]:
            turn.sample.token_ids[0] ^= 1
        return outcome


@pytest.mark.long
def test_run_is_verified_in_training_alone(tmp_path: Path) -> None:
    folder, witness = save_model(tmp_path / "model"), Witness()
    options: dict[str, Any] = {"max_new_tokens": 8, "seed": 0, "verify_trajectories": True}
    rollout = TransformersRollout(environment=SelfCorrection(verdict="+"), **options)
    tiny.bare_trainer(tmp_path, 2, rollout, witness).fit(make_module(folder), tiny.make_data(tmp_path))
    assert [step["environment/verify_gap"] < LEAST_GAP[torch.float32] for step in witness.steps] == [True, True]
    assert [step["environment/requeues"] for step in witness.steps] == [0.0, 0.0]
    broken = TransformersRollout(environment=Rewriting(verdict="+"), **options)
    with pytest.raises(VerificationError, match=r"^Trajectories do not train on what was sampled: "):
        tiny.bare_trainer(tmp_path / "2", 1, broken).fit(make_module(folder), tiny.make_data(tmp_path))


@pytest.mark.parametrize("changed", [{"temperature": 0.7}, {"top_p": 0.9}])
def test_changed_distributions_cannot_be_verified(changed: dict[str, Any], model_folder: str, tmp_path: Path) -> None:
    rollout = TransformersRollout(max_new_tokens=8, verify_trajectories=True, **changed)
    rule = rf"^rollout\.verify_trajectories needs .* rollout\.{next(iter(changed))}=0\.\d changes\."
    with pytest.raises(ConfigError, match=rule):
        tiny.bare_trainer(tmp_path, 1, rollout).fit(make_module(model_folder), tiny.make_data(tmp_path))
