"""The protocols of samplers, which sample from the policy: in any process, on any device.

There are two protocols, since only rank 0 sends requests, while weights and memory may belong to any rank. A
:class:`TokenSampler` answers requests, which is all that environments need: vLLM's engines do so as one
:class:`~rlightning.rollout.engine_pool.EnginePool`, and each rank starts its own engines, sends them weights and lets
them sleep (:class:`~rlightning.rollout.rank_engines.RankEngines`). A :class:`Sampler`, the protocol for your own
sampler, is in rank 0's process, and also updates its weights and sleeps itself.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlightning.errors import check_rules
from rlightning.protocols import has
from rlightning.types import Prompt, Sample, Trajectory
from rlightning.types.trajectory import TEMPERATURES

if TYPE_CHECKING:
    from torch import Tensor


MAX_SUPPORT = 128
"""Largest support in tokens. A truncated distribution with a larger one is not corrected in the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How completions are sampled; the names are vLLM's.

    Attributes:
        temperature: divides the logits, in sampler and trainer; 0 is greedy. Otherwise from 0.01 to 2.
        top_p: sample from the smallest set of tokens with this probability mass.
        top_k: number of most likely tokens to sample from; 0 for all, or for ``MAX_SUPPORT`` with ``top_p`` or
            ``min_p``.
        min_p: leave out tokens with less than this share of the most likely token's probability.
        max_new_tokens: maximum tokens of a completion.
        stop: strings that end a completion, and are part of its text.
        stop_token_ids: tokens that end a completion, besides the end of sequence, and are part of its text unless the
            tokenizer declares them as special.
        json_schema: JSON schema, as text, that constrains completions; only a :class:`StructuredSampler` follows it.
        seed: makes sampling repeatable; each sample has its own random stream, from a hash of this seed, the step and
            the prompt.
        returns_supports: whether samples contain the supports of truncated distributions (the tokens that could be
            sampled), which training needs.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    json_schema: str | None = None
    seed: int | None = None
    returns_supports: bool = True

    def __post_init__(self) -> None:
        lowest, highest = TEMPERATURES  # below 0.01 vLLM samples at 0.01, while the trainer would divide by less
        rules = {
            f"temperature={self.temperature} must be 0, which is greedy, or from {lowest} to {highest:g}": (
                self.temperature == 0 or lowest <= self.temperature <= highest
            ),
            f"top_p={self.top_p} must be above 0 and at most 1": 0 < self.top_p <= 1,
            f"top_k={self.top_k} must be at least 0, where 0 means all tokens": self.top_k >= 0,
            f"min_p={self.min_p} must be in [0, 1]": 0 <= self.min_p <= 1,
            f"max_new_tokens={self.max_new_tokens} must be at least 1": self.max_new_tokens >= 1,
            f"stop={list(self.stop)} has an empty text, which every completion begins with": all(self.stop),
            f"stop_token_ids={list(self.stop_token_ids)} must be token ids, at least 0": all(
                token >= 0 for token in self.stop_token_ids
            ),
        }
        check_rules(rules)

    @property
    def truncation(self) -> tuple[float, int, float]:
        """``top_p``, ``top_k`` and ``min_p``."""
        return self.top_p, self.top_k, self.min_p

    @property
    def is_truncated(self) -> bool:
        """Whether ``top_p``, ``top_k`` or ``min_p`` truncate the distribution."""
        return self.temperature > 0 and bool(self.top_p < 1 or self.top_k or self.min_p)

    @property
    def effective_top_k(self) -> int:
        """The ``top_k`` sent to the sampler: ``MAX_SUPPORT`` if only ``top_p`` or ``min_p`` truncate; 0 for all."""
        return self.top_k or (MAX_SUPPORT if self.is_truncated else 0)

    @property
    def max_support(self) -> int:
        """Maximum number of tokens in a support that the sampler returns; 0 if it returns no supports."""
        return min(self.effective_top_k, MAX_SUPPORT) if self.is_truncated and self.returns_supports else 0

    def of(self, prompt: Prompt) -> "Sampling":
        """Return these settings with a prompt's own temperature and limit, if it has any."""
        own = {"temperature": prompt.temperature, "max_new_tokens": prompt.max_new_tokens}
        given: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
        return replace(self, **given) if given else self


def sampling_settings(num_samples: int, sampling: Sampling) -> dict[str, object]:
    """Return the settings that affect the distribution of a group's completions, as plain values by configuration key.

    Args:
        num_samples: completions of each prompt.
        sampling: the settings. Seed, ``json_schema`` and ``returns_supports`` are left out: completions of another seed
            are equivalent, and a schema belongs to single requests.
    """
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(sampling).items()}
    del values["seed"], values["json_schema"], values["returns_supports"]
    return {"model.samples_per_prompt": num_samples, **{f"rollout.{name}": value for name, value in values.items()}}


OnCompleted = Callable[[Prompt, list[Trajectory]], None]
"""Called with a prompt and all of its trajectories while others are still generated, at most once a prompt."""


TakePrompts = Callable[[int], list[Prompt]]
"""A function that returns the next ``n`` prompts of the training set."""


class TrajectorySampler(Protocol):
    """Protocol of the rollout callback, through which an RLModule gets completions of prompts. Subclass it."""

    max_staleness: int = 0
    """Maximum staleness, in updates, of the tokens that :meth:`collect_trajectories` returns."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        on_completed: OnCompleted | None = None,
    ) -> list[list[Trajectory]]:
        """Sample and return ``num_samples`` trajectories of each prompt: one list a prompt, in the prompts' order."""
        raise NotImplementedError

    def collect_trajectories(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        on_completed: OnCompleted | None = None,
        take_prompts: TakePrompts | None = None,
    ) -> list[list[Trajectory]]:
        """Add prompts to those in flight; return trajectories of equally many finished ones, perhaps of earlier calls.

        Args:
            prompts: this rank's prompts.
            num_samples: trajectories of each prompt.
            sampling: settings of all requests.
            on_completed: see :data:`OnCompleted`.
            take_prompts: returns additional prompts to keep in flight.
        """
        return self.generate(prompts, num_samples, sampling, on_completed)

    def check_timeouts(self) -> None:
        """Raise an error if time limits have left the step no trajectory; called on every rank, after the last refill,
        if the step has none. By default it does nothing.
        """
        return None

    def describe(self) -> str:
        """Return a line about the sampler for the start of a run; "" for none."""
        return ""


class HasTrajectorySampler(Protocol):
    """A module that requests completions in its steps, such as an RLModule.

    Attributes:
        sampler: samples trajectories of prompts; set by the rollout callback.
        sampling: settings of training completions; set by the rollout callback.
    """

    sampler: TrajectorySampler | None
    sampling: Sampling


OnTokens = Callable[[int, Sequence[int]], None]
"""A function that is called with the number of a sample and its next tokens."""


class TokenSampler(Protocol):
    """Samples from the policy, and scores tokens with it. Its methods may be called concurrently for many prompts."""

    async def sample(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        num_samples: int = 1,
        session: str | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[Sample]:
        """Sample continuations of one token sequence.

        Args:
            token_ids: [P], the sequence to continue.
            sampling: settings, with the request's own seed: sample ``i`` uses the random stream of ``seed + i``,
                independent of other requests.
            num_samples: number of continuations.
            session: name for requests whose sequences extend each other, so that they go to the engine that has cached
                their keys and values.
            on_tokens: called with new tokens, on the caller's event loop, by a sampler that supports partial output;
                not necessarily for the last tokens of a sample.

        Returns:
            ``num_samples`` samples. Each token has its log-probability under the distribution from which it was drawn,
            that distribution's support if ``sampling.max_support`` is above 0, and the version of the weights.

        Raises:
            EngineError: the sampler has no weights, has failed, or the sequence is too long.
        """

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the log-probabilities of ``token_ids`` at temperature 1: [P], 0 for the first token."""


class StructuredSampler(Protocol):
    """A :class:`TokenSampler` that tells whether it supports ``Sampling.json_schema``."""

    @property
    def follows_schemas(self) -> bool:
        """Whether completions follow ``Sampling.json_schema``."""


def follows_schemas(sampler: TokenSampler) -> bool:
    """Return whether a sampler follows JSON schemas; False if it is not a :class:`StructuredSampler`."""
    return sampler.follows_schemas if has(sampler, StructuredSampler) else False


class Sampler(TokenSampler, Protocol):
    """A :class:`TokenSampler` in rank 0's process with its own copy of the policy.

    Attributes:
        weight_version: version of the sampler's weights; None before the first update and while it sleeps.
    """

    weight_version: int | None

    def update_weights(self, weights: Iterable[tuple[str, "Tensor"]], version: int) -> None:
        """Copy the actor's weights; called on rank 0, on the trainer's thread, while the sampler is awake.

        Args:
            weights: whole weights by Hugging Face names, on the actor's device, in the dtype that the sampler was made
                with (a buffer in its own); a tensor is valid until the next one is requested.
            version: version of the weights.
        """

    def sleep(self) -> None:
        """Free the memory, including weights, of a sampler that shares its device with an actor; else do nothing."""

    def wake(self) -> None:
        """Allocate the memory that :meth:`sleep` freed; called before each :meth:`update_weights`."""

    def close(self) -> None:
        """End the sampler and everything that it has started; running requests fail. May be called twice."""
