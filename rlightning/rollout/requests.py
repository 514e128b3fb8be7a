"""Requests to the engines: prompts, their sampling settings, and the numbers of their random streams."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from rlightning.errors import ConfigError
from rlightning.parallel.collectives import gather_objects, global_rank
from rlightning.rollout.sampler import Sampling
from rlightning.seeds import mix_seed
from rlightning.types import Prompt

if TYPE_CHECKING:
    from rlightning.data import ValidationSet

Purpose = Literal["training", "evaluation"]
SeededPrompt = tuple[Prompt, int]
"""A prompt with the number of its random stream."""


class RandomStreams:
    """Draws for each prompt the number of a random stream, which seeds its sampling. Each rank has an instance.

    A number is unique to a prompt, a weight version and a purpose (training or validation), and to each repetition of
    the prompt, on any rank or in a refill. A resumed run draws the same numbers, on any number of ranks.
    """

    def __init__(self) -> None:
        self.purpose: Purpose = "training"
        self._num_drawn: Counter[int] = Counter()  # samples drawn of each prompt since begin()

    def begin(self, purpose: Purpose) -> None:
        """Set whether the next streams are for training or validation, and count each prompt's repetitions anew."""
        self.purpose = purpose
        self._num_drawn.clear()

    def draw(self, prompts: Sequence[Prompt], weight_version: int) -> list[int]:
        """Return the number of a random stream for each of this rank's prompts; a collective."""
        drawn_by_rank = gather_objects([prompt.index for prompt in prompts], name="prompts to complete")
        seen = self._num_drawn + Counter(index for drawn in drawn_by_rank[: global_rank()] for index in drawn)
        self._num_drawn.update(index for drawn in drawn_by_rank for index in drawn)
        numbers = []
        for prompt in prompts:
            numbers.append(mix_seed(self.purpose, weight_version, prompt.index, seen[prompt.index]))
            seen[prompt.index] += 1
        return numbers

    def assign(self, prompts: Sequence[Prompt], sampling: Sampling, weight_version: int) -> list[SeededPrompt]:
        """Return each prompt with the number of its random stream, or 0 without a seed. Every rank must call it."""
        numbers = [0] * len(prompts) if sampling.seed is None else self.draw(prompts, weight_version)
        return list(zip(prompts, numbers, strict=True))


def group_sampling(sampling: Sampling, prompt: Prompt, stream: int) -> Sampling:
    """Return the sampling settings of one prompt, with a seed from the run's seed and the prompt's stream."""
    seed = None if sampling.seed is None else mix_seed(sampling.seed, "completions", stream)
    return replace(sampling.of(prompt), seed=seed)


def check_requests(prompts: Sequence[Prompt], num_samples: int, sampling: Sampling, max_model_len: int) -> None:
    """Raise a ConfigError if a step's prompts and completions may not fit the engine's maximum length.

    Raises:
        ConfigError: a length is too large, or several samples are requested at temperature 0.
    """
    if num_samples > 1 and any(sampling.of(prompt).temperature == 0 for prompt in prompts):
        raise ConfigError(
            f"temperature=0 makes all {num_samples} samples of a prompt alike. Ask for one, or use a temperature."
        )
    check_own_limit(max((prompt.max_new_tokens or 0 for prompt in prompts), default=0), sampling)
    longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
    total = longest + sampling.max_new_tokens
    if total > max_model_len:
        raise ConfigError(
            f"A prompt of {longest} tokens + max_new_tokens={sampling.max_new_tokens} = {total}, but the engine takes "
            f"{max_model_len} tokens, and would cut completions. Lower max_new_tokens by {total - max_model_len}, or "
            "use shorter prompts."
        )


def check_own_limit(longest: int, sampling: Sampling) -> None:
    """Raise a ConfigError if a prompt's own ``max_new_tokens`` exceeds the run's, for which engines are configured.

    Args:
        longest: the largest limit of any prompt; 0 if no prompt has one.
        sampling: settings of the run.
    """
    if longest > sampling.max_new_tokens:
        raise ConfigError(
            f"A prompt's own max_new_tokens={longest} is above rollout.max_new_tokens={sampling.max_new_tokens}, which "
            f"bounds all. Set rollout.max_new_tokens={longest}, or lower the prompt's."
        )


def check_stop_tokens(sampling: Sampling, vocab_size: int) -> None:
    """Raise a ConfigError for stop tokens outside of the model's vocabulary."""
    if any(token >= vocab_size for token in sampling.stop_token_ids):
        raise ConfigError(
            f"rollout.stop_token_ids={list(sampling.stop_token_ids)} must be below {vocab_size}, the size of the "
            "model's vocabulary."
        )


def validation_sampling(sampling: Sampling, chosen: "ValidationSet") -> Sampling:
    """Return the sampling settings of a validation set: those of training with the set's temperature."""
    assert chosen.temperature is not None
    return replace(sampling, temperature=chosen.temperature)
