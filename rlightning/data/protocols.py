"""The members of trainer and module that a data module uses, each as a protocol."""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from rlightning.errors import ConfigError
from rlightning.protocols import has, members
from rlightning.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

P = TypeVar("P")


def required(module: object, protocol: Callable[..., P]) -> P:
    """Return a module typed as a protocol, after checking its members.

    Raises:
        ConfigError: names missing members.
    """
    if not has(module, protocol):
        missing = [name for name in members(protocol) if not hasattr(module, name)]
        raise ConfigError(
            f"PromptDataModule needs {', '.join(missing)} of the module, which {type(module).__name__} does not have."
        )
    return module


class OverfitsBatches(Protocol):
    """A trainer that may repeat a number, or a share, of an epoch's steps in each epoch; 0 for usual epochs."""

    @property
    def overfit_batches(self) -> int | float: ...


class HasTokenizer(Protocol):
    """A module with the tokenizer of its model."""

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase": ...


class HasMaxLength(Protocol):
    """A module with the maximum number of tokens of its model's sequences."""

    @property
    def max_model_length(self) -> int: ...


class HasVocabSize(Protocol):
    """A module with the size of its model's embedding."""

    @property
    def vocab_size(self) -> int: ...


class TakesPrompts(Protocol):
    """A module with the number of prompts of each training step, over all ranks."""

    @property
    def prompts_per_step(self) -> int: ...


class HasCompletionColumn(Protocol):
    """A module that may train on the completions in a column of the data set."""

    @property
    def completion_column(self) -> str: ...


class ChecksColumns(Protocol):
    """A module that checks whether a set has the required columns."""

    def check_columns(self, columns: Sequence[str], source: str, /) -> None: ...


class ReadsColumns(Protocol):
    """A module that returns which columns of a set it reads."""

    def read_columns(self, columns: Sequence[str], /) -> Collection[str]: ...


class ChecksAnswers(Protocol):
    """A module that checks a set's answers, which its reward functions read."""

    def check_answers(self, prompts: Sequence[Prompt], where: Callable[[int], str], /) -> None: ...
