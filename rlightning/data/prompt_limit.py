"""The limit on a prompt's tokens."""

from typing import Any

from rlightning.errors import ConfigError

PROMPT_TOKENS = 1024
"""Of the longest prompt, where no limit is set and the model has room for it."""


def check_prompt_limit(limit: int | None, max_model_length: int) -> None:
    """Raise a ConfigError for a limit that leaves completions no room.

    Args:
        limit: tokens of a prompt.
        max_model_length: tokens of the longest sequence that the model takes.
    """
    if limit is None or limit < 1:
        raise ConfigError(f"max_prompt_tokens={limit} must be at least 1.")
    if limit >= max_model_length:
        raise ConfigError(
            f"max_prompt_tokens={limit} leaves a model of {max_model_length} positions no room for a completion. "
            f"Use at most {max_model_length - 1}, less what you want completions to have."
        )


def choose_prompt_limit(trainer: Any, module: Any, stage: str) -> tuple[int, str]:
    """Return the limit on a run's prompts where none is set, and why it is that.

    Args:
        trainer: with the callback that samples completions, or a controller's strategy that has it.
        module: has ``max_model_length`` and, if it does not sample in training, a false ``generates``.
        stage: of Lightning's.

    Raises:
        ConfigError: if completions leave no room.
    """
    new_tokens = None
    if stage == "predict" or getattr(module, "generates", True):
        callbacks = [*trainer.callbacks, *getattr(trainer.strategy, "worker_callbacks", ())]
        limits = (getattr(getattr(callback, "sampling", None), "max_new_tokens", None) for callback in callbacks)
        new_tokens = next((limit for limit in limits if limit is not None), None)
    limit = default_prompt_limit(module.max_model_length, new_tokens)
    if limit == PROMPT_TOKENS:
        return limit, "the default"
    completion = "one for a completion" if new_tokens is None else f"rollout.max_new_tokens={new_tokens}"
    return limit, f"the model's {module.max_model_length} positions, less {completion}"


def default_prompt_limit(max_model_length: int, max_new_tokens: int | None) -> int:
    """Return how many tokens a prompt may have: 1,024, or what the model's positions leave beside a completion.

    Args:
        max_model_length: tokens of the longest sequence that the model takes.
        max_new_tokens: of a completion; None where no limit on it is known, which then is left one token.

    Raises:
        ConfigError: if nothing is left.
    """
    room = max_model_length - (max_new_tokens or 1)
    if room < 1:
        raise ConfigError(
            f"rollout.max_new_tokens={max_new_tokens} leaves a model of {max_model_length} positions no room for a "
            f"prompt. Use at most {max_model_length - 1}, less what prompts take."
        )
    return min(PROMPT_TOKENS, room)
