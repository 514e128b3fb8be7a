"""The members of a module that a data module uses, as protocols."""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from rlightning.errors import ConfigError
from rlightning.protocols import has, members
from rlightning.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

P = TypeVar("P")


def required(module: object, protocol: Callable[..., P]) -> P:
    """Return ``module`` itself, typed as ``protocol``; raise a ConfigError if it lacks members of the protocol.

    Raises:
        ConfigError: names missing members.
    """
    if not has(module, protocol):
        missing = [name for name in members(protocol) if not hasattr(module, name)]
        raise ConfigError(
            f"PromptDataModule needs {', '.join(missing)} of the module, which {type(module).__name__} does not have."
        )
    return module


class ReadsPrompts(Protocol):
    """A module with the tokenizer of its model, and the maximum number of tokens of the model's sequences."""

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase": ...

    @property
    def max_model_length(self) -> int: ...


class HasVocabSize(Protocol):
    """A module with ``vocab_size``, the number of rows of its model's embedding."""

    @property
    def vocab_size(self) -> int: ...


class TakesPrompts(Protocol):
    """A module with ``prompts_per_step``, the number of prompts of a training step over all ranks."""

    @property
    def prompts_per_step(self) -> int: ...


class HasCompletionColumn(Protocol):
    """A module with ``completion_column``, the column of the data set whose completions it trains on, as in SFT."""

    @property
    def completion_column(self) -> str: ...


class ChecksColumns(Protocol):
    """A module whose ``check_columns(columns, source)`` raises a ConfigError if a prompt set lacks required columns."""

    def check_columns(self, columns: Sequence[str], source: str, /) -> None: ...


class ReadsColumns(Protocol):
    """A module whose ``read_columns(columns)`` returns those of a prompt set's columns that it reads in training."""

    def read_columns(self, columns: Sequence[str], /) -> Collection[str]: ...


class ChecksAnswers(Protocol):
    """A module whose ``check_answers(prompts, where)`` raises a ConfigError if reference answers get no reward."""

    def check_answers(self, prompts: Sequence[Prompt], where: Callable[[int], str], /) -> None: ...
