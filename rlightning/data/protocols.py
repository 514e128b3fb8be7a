"""What a data module reads from the trainer and its module, and what it calls of these, each a protocol."""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from rlightning.errors import ConfigError
from rlightning.protocols import has, members
from rlightning.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

P = TypeVar("P")


def required(module: object, protocol: Callable[..., P]) -> P:
    """Return a module as one that has a protocol's members.

    Raises:
        ConfigError: names those that it lacks.
    """
    if not has(module, protocol):
        missing = [name for name in members(protocol) if not hasattr(module, name)]
        raise ConfigError(
            f"PromptDataModule needs {', '.join(missing)} of the module, which {type(module).__name__} does not have."
        )
    return module


class OverfitsBatches(Protocol):
    """A trainer with the number, or the share, of steps that each epoch repeats; 0 for an epoch as usual."""

    @property
    def overfit_batches(self) -> int | float: ...


class HasTokenizer(Protocol):
    """A module with the tokenizer of its model."""

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase": ...


class HasMaxLength(Protocol):
    """A module that knows how many tokens its model's sequences may have."""

    @property
    def max_model_length(self) -> int: ...


class HasVocabSize(Protocol):
    """A module that knows the size of its model's embedding."""

    @property
    def vocab_size(self) -> int: ...


class TakesPrompts(Protocol):
    """A module that trains on so many prompts in each step, on all ranks together."""

    @property
    def prompts_per_step(self) -> int: ...


class HasCompletionColumn(Protocol):
    """A module that learns the completions in a column of the data set."""

    @property
    def completion_column(self) -> str: ...


class ChecksColumns(Protocol):
    """A module that checks whether a set has the columns that it reads."""

    def check_columns(self, columns: Sequence[str], source: str, /) -> None: ...


class ReadsColumns(Protocol):
    """A module that says which columns of a set it reads."""

    def read_columns(self, columns: Sequence[str], /) -> Collection[str]: ...


class ChecksAnswers(Protocol):
    """A module that checks the answers of a set, which its reward functions will read."""

    def check_answers(self, prompts: Sequence[Prompt], where: Callable[[int], str], /) -> None: ...
