"""Verifies that trajectories contain exactly what was sampled: the sampler scores each branch again, in one prefill.

A token's recorded log-probability belongs to the context in which it was sampled. If its branch has another context (a
history that was tokenized again, a missing turn, shifted tokens), the score differs. Sampling and prefill round
differently, which is not an error: the size of this gap is measured on single-turn rollouts of the same prompts.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rlightning.environments.policy import CONSTRAINED, TRUNCATED
from rlightning.errors import ConfigError, VerificationError
from rlightning.rollout import Sampling, TokenSampler
from rlightning.seeds import mix_seed
from rlightning.types.trajectory import Branch, Prompt, Sample, Trajectory

log = logging.getLogger(__name__)

LEAST_GAP = {torch.float32: 1e-4, torch.float16: 5e-4, torch.bfloat16: 2e-3}
"""Mean gap in nats of a step, by the sampler's dtype, that is always allowed: it changes importance ratios by 0.2% or
less, and single-turn rollouts may happen to have smaller rounding errors."""
MAX_RATIO = 3.0
"""Maximum ratio of a mean gap to that of single-turn rollouts, for larger rounding errors in longer contexts and other
batches. Measured with 10 layers: 1.8 in bfloat16 at 500 tokens, 1.0 in float32. Tokens in a wrong context have gaps of
tenths of a nat, 10 times as large or more."""
CHANCE = 6.0
"""With n compared tokens, the limit is larger by the factor ``1 + CHANCE / sqrt(n)``: some tokens have gaps of many
times the mean, and may be all there are."""
MAX_BRANCH_RATIO = 10.0
"""As MAX_RATIO, for a single branch without its worst token: a few wrong branches hardly change the mean of a step."""
LEAST_BRANCH_TOKENS = 16
"""Sampled tokens that a branch must have to be compared by itself: fewer have no mean to speak of."""
NUM_SINGLE_TURNS = 16
"""Least number of single-turn samples that a step is compared with, besides those of earlier steps."""
MAX_CONCURRENT = 32
"""Maximum number of sequences that are scored at once."""


class Gap(NamedTuple):
    """Absolute differences, in nats, between two log-probabilities of the same tokens: their sum and number."""

    total: float = 0.0
    num_tokens: int = 0

    @property
    def mean(self) -> float:
        """Mean difference of a token; NaN without any tokens."""
        return self.total / self.num_tokens if self.num_tokens else math.nan

    def add(self, distances: NDArray[np.float64]) -> "Gap":
        """Return a new gap that includes the differences of further tokens: [n], in nats."""
        return self.merge(Gap(float(distances.sum()), len(distances)))

    def merge(self, other: "Gap") -> "Gap":
        """Return the gap over the tokens of both gaps."""
        return Gap(self.total + other.total, self.num_tokens + other.num_tokens)


class TrajectoryVerifier:
    """Compares the recorded log-probabilities of trajectories with those that the sampler computes again.

    Args:
        max_length: maximum tokens of a sequence.
        dtype: the sampler's dtype of computation.

    Attributes:
        single_turns: the gap of single-turn rollouts over all steps so far.
    """

    def __init__(self, sampler: TokenSampler, max_length: int, dtype: torch.dtype) -> None:
        self._sampler, self._max_length, self._least_gap = sampler, max_length, LEAST_GAP[dtype]
        self._places = asyncio.Semaphore(MAX_CONCURRENT)
        self._has_warned = False
        self.single_turns = Gap()

    async def verify(self, trajectories: Sequence[Trajectory], sampling: Sampling, version: int | None = None) -> Gap:
        """Have the sampler compute the log-probabilities of trajectories again, and compare them with the recorded
        ones. Trajectories with tokens of another weight version than the sampler's are left out.

        Args:
            version: weight version of the sampler; None for that of the newest tokens.

        Returns:
            The gap of all trained tokens.

        Raises:
            VerificationError: the mean gap of the first turns, the later turns or a single branch exceeds its limit.
        """
        if version is None:
            newest = (max(sample.weight_versions, default=-1) for one in trajectories for sample in one.samples)
            version = max(newest, default=-1)
        chosen = [one for one in trajectories if one.num_sampled and _is_comparable(one, sampling, version)]
        if not chosen:
            if trajectories and not self._has_warned:
                self._has_warned = True
                log.warning(
                    "rollout.verify_trajectories: no trajectory of the step was sampled at temperature 1 and by the "
                    "current weights alone, so that none could be verified. This is logged only once."
                )
            return Gap()
        await self._roll_out_single_turns(chosen, sampling)
        begun, later, worst = Gap(), Gap(), (-1.0, "")
        branches: list[tuple[Gap, str]] = []
        pairs = [(one, branch) for one in chosen for branch in one.branches if any(branch.is_sampled)]
        for (one, branch), distances in zip(
            pairs, await asyncio.gather(*(self._compare(branch) for _, branch in pairs)), strict=True
        ):
            turns = np.asarray(branch.turns)[np.asarray(branch.is_sampled, np.bool_)][: len(distances)]
            is_first = turns == next(place for place, turn in enumerate(one.turns) if turn.sample is not None)
            begun, later = begun.add(distances[is_first]), later.add(distances[~is_first])
            if not len(distances):
                continue
            turn = int(turns[distances.argmax()])
            place = f"prompt {one.prompt.index}, message {turn} after the prompt, branch '{branch.reason}'"
            worst = max(worst, (float(distances.max()), place))
            others = np.delete(distances, distances.argmax())  # a single unlikely token may be far off
            branches.append((Gap().add(others), f"by {distances.max():.3g}: {place}"))
        furthest = f"by {worst[0]:.3g}: {worst[1]}"
        self._check(begun, MAX_RATIO, "their first turns", furthest)
        self._check(later, MAX_RATIO, "their later turns", furthest)
        for gap, place in branches:
            if gap.num_tokens + 1 >= LEAST_BRANCH_TOKENS:
                self._check(gap, MAX_BRANCH_RATIO, "one branch", place)
        return begun.merge(later)

    def _check(self, gap: Gap, ratio: float, what: str, furthest: str) -> None:
        """Raise a VerificationError that names the worst token if the gap exceeds that of single-turn rollouts."""
        limit = self._limit(gap, ratio)
        if gap.num_tokens and not gap.mean <= limit:
            raise VerificationError(
                f"Trajectories do not train on what was sampled: scored again by one prefill of each branch, "
                f"log-probabilities of {what} differ by {gap.mean:.3g} nats in the mean of {gap.num_tokens} "
                f"tokens, and those of single-turn rollouts by {self.single_turns.mean:.3g}, so that {limit:.3g} are "
                f"allowed. The token that is furthest off, {furthest}. Look at how the "
                "environment or its client passes on the history; rollout.verify_trajectories: false turns this off."
            )

    def _limit(self, gap: Gap, ratio: float) -> float:
        """Return the maximum mean gap that is allowed for the gap's number of tokens."""
        single = self.single_turns
        chance = CHANCE * math.sqrt(1 / max(gap.num_tokens, 1) + 1 / max(single.num_tokens, 1))
        return ratio * max(self._least_gap / MAX_RATIO, (1 + chance) * single.mean)

    async def _roll_out_single_turns(self, trajectories: Sequence[Trajectory], sampling: Sampling) -> None:
        """Sample completions of some prompts in one turn, and score them, to get a baseline of the gap."""
        beginnings = {one.prompt.index: (one.prompt, list(one.branches[0].beginning)) for one in reversed(trajectories)}
        chosen = list(reversed(beginnings.values()))[:NUM_SINGLE_TURNS]
        num_samples = -(-NUM_SINGLE_TURNS // len(chosen))
        samples = await asyncio.gather(*(self._complete(one, ids, sampling, num_samples) for one, ids in chosen))
        branches = []
        for (_, token_ids), completions in zip(chosen, samples, strict=True):
            for sample in completions:
                branches.append(Branch())
                branches[-1].append(token_ids)
                branches[-1].append_sample(sample, 0)
        for distances in await asyncio.gather(*map(self._compare, branches)):
            self.single_turns = self.single_turns.add(distances)

    async def _complete(
        self, prompt: Prompt, token_ids: Sequence[int], sampling: Sampling, num_samples: int
    ) -> list[Sample]:
        own = sampling.of(prompt)
        seed = None if own.seed is None else mix_seed(own.seed, "verification", prompt.index)
        own = replace(own, seed=seed, max_new_tokens=min(own.max_new_tokens, self._max_length - len(token_ids)))
        async with self._places:
            return await self._sampler.sample(token_ids, own, num_samples=num_samples)

    async def _compare(self, branch: Branch) -> NDArray[np.float64]:
        """Return the absolute difference of each sampled token of a branch, up to the sampler's maximum length."""
        room = self._max_length - 1  # an engine samples a token after the scored ones
        async with self._places:
            scores = await self._sampler.score(list(branch.token_ids[:room]))
        mask = np.asarray(branch.is_sampled[:room], np.bool_)
        recorded = np.asarray(branch.logprobs[:room], np.float64)
        distances: NDArray[np.float64] = np.abs(np.asarray(scores, np.float64) - recorded)[mask]
        return np.nan_to_num(distances, nan=np.inf, posinf=np.inf)


def check_verifiable(sampling: Sampling) -> None:
    """Raise a ConfigError if sampling settings (temperature, top_p, top_k, min_p) change the model's distribution, for
    which the sampler computes log-probabilities.
    """
    for name, value in _changed_settings(sampling).items():
        raise ConfigError(
            f"rollout.verify_trajectories needs log-probabilities of the model's own distribution, which rollout."
            f"{name}={value} changes. Verify with temperature 1 and without top_p, top_k and min_p."
        )


def _changed_settings(sampling: Sampling) -> dict[str, object]:
    own, usual = asdict(sampling), asdict(Sampling())
    return {name: own[name] for name in ("temperature", "top_p", "top_k", "min_p") if own[name] != usual[name]}


def _is_comparable(trajectory: Trajectory, sampling: Sampling, version: int) -> bool:
    """Return whether the sampler has the same weights and distribution as when the trajectory was sampled."""
    versions = {one for sample in trajectory.samples for one in sample.weight_versions}
    is_usual = not _changed_settings(sampling.of(trajectory.prompt))
    return versions == {version} and is_usual and trajectory.metrics.keys().isdisjoint((CONSTRAINED, TRUNCATED))
