"""What samples from the policy, whatever runs it and wherever it is.

There are two protocols, as requests come from rank 0 alone, while weights and memory may belong to any rank. A
:class:`TokenSampler` answers requests, which is all that environments ask: vLLM's engines do it as one
:class:`~rlightning.rollout.engine_pool.EnginePool`, and each rank starts its own engines, sends them weights and lets
them sleep (:class:`~rlightning.rollout.rank_engines.RankEngines`). A :class:`Sampler`, which is what a sampler of your
own implements, is a whole one in rank 0's process, and does that for itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlightning.errors import check_rules
from rlightning.protocols import has
from rlightning.types import Prompt, Sample, Trajectory
from rlightning.types.trajectory import TEMPERATURES

if TYPE_CHECKING:
    from rlightning.rollout.weights import WeightSource


MAX_SUPPORT = 128
"""Largest support in tokens: a distribution truncated to more of them is not corrected in the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How completions are sampled; the names are vLLM's.

    Attributes:
        temperature: logits are divided by it before sampling, and by the trainer too; 0 is greedy. vLLM takes no
            other below 0.01, and none above 2.
        top_p: sample from the smallest set of tokens with this probability mass.
        top_k: sample from this many likeliest tokens; 0 is all, and with ``top_p`` or ``min_p`` the ``MAX_SUPPORT``
            likeliest.
        min_p: leave out tokens less likely than this share of the likeliest one's probability.
        max_new_tokens: completions are cut here.
        stop: strings that end a completion, and are part of its text.
        stop_token_ids: tokens that end a completion, besides the end of sequence, and are part of its text unless the
            tokenizer calls them special.
        json_schema: of what completions are, as JSON; other tokens have no probability then. Only samplers that are
            :class:`StructuredSampler` follow it.
        seed: makes sampling repeatable; each sample of each prompt draws from a stream of its own, a hash of this seed,
            the step and the prompt.
        returns_supports: whether samples of truncated distributions have their supports, which training needs.
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
        rules = {
            **temperature_rule(self.temperature),
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
    def is_truncated(self) -> bool:
        """Whether tokens are cut off the distribution that is sampled from."""
        return self.temperature > 0 and bool(self.top_p < 1 or self.top_k or self.min_p)

    @property
    def effective_top_k(self) -> int:
        """The sampler's ``top_k``: ``MAX_SUPPORT`` where ``top_p`` or ``min_p`` truncate without one; 0 is all."""
        return self.top_k or (MAX_SUPPORT if self.is_truncated else 0)

    @property
    def max_support(self) -> int:
        """Tokens of the largest support that the sampler returns; 0: it returns none."""
        return min(self.effective_top_k, MAX_SUPPORT) if self.is_truncated and self.returns_supports else 0

    def of(self, prompt: Prompt) -> "Sampling":
        """Return how a prompt's completions are sampled: with its own temperature and limit, where it has any."""
        own = {"temperature": prompt.temperature, "max_new_tokens": prompt.max_new_tokens}
        given: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
        return replace(self, **given) if given else self


def sampling_settings(num_samples: int, sampling: Sampling) -> dict[str, object]:
    """Return what decides how a group's completions are distributed, by configuration key, in plain types.

    Args:
        num_samples: completions of each prompt.
        sampling: of them. Its seed is left out: completions of another seed are as good. So are a schema, which only
            single requests have, and whether supports are returned.
    """
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(sampling).items()}
    del values["seed"], values["json_schema"], values["returns_supports"]
    return {"model.samples_per_prompt": num_samples, **{f"rollout.{name}": value for name, value in values.items()}}


def temperature_rule(temperature: float) -> dict[str, bool]:
    """Return the rule of temperatures, and whether ``temperature`` follows it; for :func:`check_rules`.

    vLLM samples at 0.01 if it is given less, while the trainer would divide by what it was given.
    """
    lowest, highest = TEMPERATURES
    rule = f"temperature={temperature} must be 0, which is greedy, or from {lowest} to {highest:g}"
    return {rule: temperature == 0 or lowest <= temperature <= highest}


OnCompleted = Callable[[Prompt, list[Trajectory]], None]
"""Called with a prompt and all of its trajectories while others are still generated, once or, for some, not at all."""


TakePrompts = Callable[[int], list[Prompt]]
"""A function that returns a number of further prompts of the training set."""


class Generator(Protocol):
    """Completes prompts; what an RLModule asks of the callback that owns the engine. Subclass it."""

    max_staleness: int = 0
    """Maximum staleness, in updates, of the tokens that :meth:`collect_trajectories` returns."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        on_completed: OnCompleted | None = None,
    ) -> list[list[Trajectory]]:
        """Make ``num_samples`` trajectories of each prompt, in the prompts' order."""
        raise NotImplementedError

    def collect_trajectories(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        on_completed: OnCompleted | None = None,
        take_prompts: TakePrompts | None = None,
    ) -> list[list[Trajectory]]:
        """Hand in prompts to train on and get the trajectories of as many: these, or earlier ones that were in flight.

        Args:
            prompts: of this rank.
            num_samples: trajectories of each.
            sampling: how.
            on_completed: called as of :meth:`generate`.
            take_prompts: gives further ones to be in flight.
        """
        return self.generate(prompts, num_samples, sampling, on_completed)

    def describe(self) -> str:
        """Return what samples, in a line; "" to say nothing of it."""
        return ""


class HasGenerator(Protocol):
    """A module that has its prompts completed in its own steps, such as an RLModule.

    Attributes:
        generator: completes them; the rollout callback sets it.
        sampling: how; the rollout callback sets it.
    """

    generator: Generator | None
    sampling: Sampling


OnTokens = Callable[[int, Sequence[int]], None]
"""A function that is called with the number of a sample and its next tokens."""


class TokenSampler(Protocol):
    """Answers requests to the policy; the methods may be called for many prompts at once."""

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
            token_ids: [P], what they follow.
            sampling: how. Its seed is the request's own: sample ``i`` draws from the stream of ``seed + i``, whatever
                else is sampled at the time.
            num_samples: how many.
            session: names what is likely to be followed by longer sequences that begin alike, so that they go to where
                the keys and values of this one are.
            on_tokens: called meanwhile, on the caller's event loop, by a sampler with partial output; not necessarily
                for the last tokens of a sample.

        Returns:
            ``num_samples`` of them, each token with its log-probability under the distribution that it was drawn from,
            that distribution's support where ``sampling.max_support`` is above 0, and the version of the weights.

        Raises:
            EngineError: the sampler has no weights, has failed, or does not take a sequence of this length.
        """

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return log-probabilities (temperature 1) of ``token_ids`` [P] under its weights: [P], 0 for the first."""


class StructuredSampler(Protocol):
    """A :class:`TokenSampler` that may follow ``Sampling.json_schema``."""

    @property
    def follows_schemas(self) -> bool:
        """Whether it does."""


def follows_schemas(sampler: TokenSampler) -> bool:
    """Return whether a sampler follows schemas; one that does not say so does not."""
    return sampler.follows_schemas if has(sampler, StructuredSampler) else False


class Sampler(TokenSampler, Protocol):
    """A :class:`TokenSampler` in rank 0's process that holds its own copy of the policy.

    Attributes:
        weight_version: of the weights that it holds; None before the first ones came, and while it sleeps.
    """

    weight_version: int | None

    def update_weights(self, source: "WeightSource", version: int) -> None:
        """Take the actor's weights, awake; called on rank 0, which has the sampler, on the trainer's thread.

        The other ranks meanwhile call :func:`~rlightning.rollout.in_process.send_shards`, which is one
        :func:`~rlightning.parallel.gathering.gather_into` to rank 0 of all weights. Where the weights are sharded, this
        method must issue the same collectives: one ``gather_into`` of all of ``source.named_weights()``, in their
        order, with ``destination=0`` and outputs of the dtype that the sampler was made for. A call for each weight
        issues others, and hangs.

        Args:
            source: of the weights.
            version: of these weights.
        """

    def sleep(self) -> None:
        """Give the device's memory back to an actor on the same device; a no-op elsewhere. Weights are lost."""

    def wake(self) -> None:
        """Take the memory again, if it was given back; called before each :meth:`update_weights`."""

    def close(self) -> None:
        """End it and everything that it started; what is under way fails. May be called twice."""
