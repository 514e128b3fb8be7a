"""The maximum number of tokens of a prompt."""

from collections.abc import Iterable
from typing import Protocol

from rlightning.errors import ConfigError
from rlightning.protocols import HasSampling, has

PROMPT_TOKENS = 1024
"""Default limit of a prompt in tokens, if the model has room for it."""


class Limited(Protocol):
    """Sampling parameters with ``max_new_tokens``, for which the default limit on prompts leaves room."""

    @property
    def max_new_tokens(self) -> int:
        """Maximum number of tokens of a completion."""


def check_prompt_limit(limit: int, max_model_length: int) -> None:
    """Raise a ConfigError for a limit at which the model's maximum length leaves no token for a completion."""
    if limit < 1:
        raise ConfigError(f"max_prompt_tokens={limit} must be at least 1.")
    if limit >= max_model_length:
        raise ConfigError(
            f"max_prompt_tokens={limit} leaves a model of {max_model_length} positions no room for a completion. "
            f"Use at most {max_model_length - 1}, less what you want completions to have."
        )


def choose_prompt_limit(max_model_length: int, callbacks: Iterable[object]) -> tuple[int, str]:
    """Return the default maximum of a prompt's tokens, and the reason for it as text for a log line.

    ``callbacks`` include the one that samples completions, if any. Raises a ConfigError if completions leave no room.
    """
    samplings = (callback.sampling for callback in callbacks if has(callback, HasSampling))
    new_tokens = next((sampling.max_new_tokens for sampling in samplings if has(sampling, Limited)), None)
    limit = default_prompt_limit(max_model_length, new_tokens)
    if limit == PROMPT_TOKENS:
        return limit, "the default"
    completion = "one for a completion" if new_tokens is None else f"rollout.max_new_tokens={new_tokens}"
    return limit, f"the model's {max_model_length} positions, less {completion}"


def default_prompt_limit(max_model_length: int, max_new_tokens: int | None) -> int:
    """Return the default maximum of a prompt's tokens: 1,024, or less if the model's positions leave fewer.

    Without a limit on completions, one token is kept for them. Raises a ConfigError if no token is left for prompts.
    """
    room = max_model_length - (max_new_tokens or 1)
    if room < 1:
        raise ConfigError(
            f"rollout.max_new_tokens={max_new_tokens} leaves a model of {max_model_length} positions no room for a "
            f"prompt. Use at most {max_model_length - 1}, less what prompts take."
        )
    return min(PROMPT_TOKENS, room)
