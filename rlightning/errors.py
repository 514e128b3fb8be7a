"""The package's exceptions that are shown to the user."""

import difflib
import errno
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from types import FunctionType

from rlightning.foreign_text import cut, cut_line, cut_value

MAX_CHOICES = 8
"""Maximum number of choices that an error message lists."""


class RunError(Exception):
    """Base of foreseen errors that end a run: one line says what happened and what to do.

    The command line shows only this line (:mod:`rlightning.error_report`).

    Args:
        message: the line.
        details: further information, such as the end of a process's log; follows the line in ``str(error)``.

    Attributes:
        exit_code: exit code of the command line.
    """

    exit_code = 1

    def __init__(self, message: str = "", details: str = "") -> None:
        super().__init__(message)
        self.details = details

    def __str__(self) -> str:
        return f"{self.line}\n{self.details}" if self.details else self.line

    @property
    def line(self) -> str:
        """The error's message, without its ``details`` such as the end of a log."""
        return super().__str__()


class ConfigError(RunError, ValueError):
    """A mistake in the user's configuration: the message has the value, the rule and a remedy."""

    exit_code = 2


def cause_chain(error: BaseException, *, with_context: bool = False) -> Iterator[BaseException]:
    """Yield an exception, then the one that it was raised from, and so on.

    Args:
        error: the exception.
        with_context: whether to include exceptions that were being handled, as tracebacks do.
    """
    found: BaseException | None = error
    seen = set[int]()
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        hides = found.__suppress_context__ or not with_context
        found = found.__cause__ or (None if hides else found.__context__)


class EngineError(RunError, RuntimeError):
    """The rollout engine failed; if its process ended, the details are its last log lines."""


class EngineStartError(EngineError, ConfigError):
    """The rollout engine cannot start with this configuration; the message has the engine's reason."""


class AdapterRefusedError(EngineStartError):
    """The rollout engine cannot start with room for the run's adapter.

    Args:
        message: the line.
        reason: the engine's reason alone, as part of a line.
    """

    def __init__(self, message: str, reason: str = "") -> None:  # an unpickled error gets its attributes afterwards
        super().__init__(message)
        self.reason = reason


class EngineDiedError(EngineError):
    """The engine has ended or does not answer; samples that were already finished are kept."""


class RequestRefusedError(EngineError):
    """The engine could not process a request; the details are the engine's reason.

    Args:
        reason: the engine's traceback.
    """

    def __init__(self, reason: str) -> None:
        reason = cut(reason)
        last = reason.strip().splitlines()[-1] if reason.strip() else ""
        super().__init__(f"The engine refused a request: {cut_line(last)}", reason)


class StreamLostError(RequestRefusedError):
    """An engine died while its tokens were streamed. The request is not repeated: another engine could sample other
    tokens.
    """


class RewardError(RunError, RuntimeError):
    """Too many rewards failed; the details are the first failure's traceback."""


class EnvironmentFailedError(RunError, RuntimeError):
    """Environments or their worker processes failed too often; the message has one of the failures."""


class VerificationError(RunError, RuntimeError):
    """Trajectories would be trained on with tokens or contexts other than those sampled."""


class DeviceMemoryError(RunError, RuntimeError):
    """A device has run out of memory."""


class HostError(RunError, OSError):
    """The host lacks a resource that the run needs, such as disk space."""


class SaveError(HostError):
    """A file that the run needs, such as a checkpoint, cannot be written; the message has the reason."""


HOST_LIMITS = {
    errno.EMFILE: "Raise the limit on open files: ulimit -n 65536.",
    errno.ENFILE: "Too many files are open on the whole host: end what holds them, or raise fs.file-max.",
    errno.ENOSPC: "Make room there.",
    errno.EDQUOT: "Make room there, or ask for a larger quota.",
}
"""Advice for errors of the operating system that any call may raise, by error number."""


class WeightError(RunError, RuntimeError):
    """A weight of the model is NaN or infinite; the message names it."""


def check_rules(rules: Mapping[str, bool]) -> None:
    """Raise a ConfigError with the text of the first rule that does not hold. ``rules`` maps each rule's text, which
    includes the value, to whether the rule holds.
    """
    for rule, holds in rules.items():
        if not holds:
            raise ConfigError(f"{rule}.")


def check_list(name: str, given: object) -> None:
    """Raise a ConfigError if the argument ``name``, which has to be a list, is a single item, such as a text."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        item = given.__qualname__ if isinstance(given, type | FunctionType) else cut_value(given)
        way_out = "Leave it out, or write one" if given is None else f"Write [{item}]"
        raise ConfigError(f"{name}={item} must be a list. {way_out}.")


def find_run_error(error: BaseException) -> RunError | None:
    """Return the RunError that ``error`` is, was raised from, or corresponds to; None for an unforeseen error.

    The chain of causes is searched, because jsonargparse wraps exceptions of a class's ``__init__``. Some frequent
    errors of other libraries correspond to an error of this package.
    """
    for cause in cause_chain(error):
        if isinstance(cause, RunError):
            return cause
    # An instance of a class exists only if its module is loaded; a failing process should import nothing.
    lightning = sys.modules.get("lightning.fabric.utilities.exceptions")
    if lightning is not None and isinstance(error, lightning.MisconfigurationException):
        return ConfigError(str(error))
    if isinstance(error, OSError) and error.errno in HOST_LIMITS:
        return HostError(f"{cut_line(error)}. {HOST_LIMITS[error.errno]}")
    wandb = sys.modules.get("wandb.errors")
    if wandb is not None and isinstance(error, wandb.Error):
        return ConfigError(
            f"Weights & Biases: {cut_line(error).rstrip('.')}. Without its server, set WANDB_MODE=offline."
        )
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "OutOfMemoryError") and isinstance(error, torch.OutOfMemoryError):
        return DeviceMemoryError(
            f"{cut_line(error)} Lower model.max_tokens_per_microbatch, or set model.gradient_checkpointing: true; "
            "`rlightning plan` shows what a run takes."
        )
    return None


def did_you_mean(name: str, choices: Iterable[str], *, otherwise: str | None = None) -> str:
    """Return a sentence for an error about an unknown name: the nearest choice, or ``otherwise`` if no choice is near.

    Without ``otherwise``, the sentence lists the choices.
    """
    known = sorted(choices) if isinstance(choices, Set) else list(choices)
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if nearest:
        return f"Did you mean '{nearest[0]}'?"
    if otherwise is not None:
        return otherwise
    if len(known) <= MAX_CHOICES:
        return f"Choose from: {', '.join(known)}."
    near = difflib.get_close_matches(name, known, n=MAX_CHOICES, cutoff=0.0)
    shown = [choice for choice in known if choice in near]
    return f"Choose from: {', '.join(shown)}, and {len(known) - len(shown)} more."
