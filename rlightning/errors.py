"""The errors that reach a user."""

import difflib
import errno
import sys
from collections.abc import Iterable, Iterator, Mapping, Set

from rlightning.foreign_text import cut, cut_line

MAX_CHOICES = 8
"""That an error lists."""


class RunError(Exception):
    """Ends a run, and was foreseen: what happened and what to do about it is said in one line.

    The command line shows that line alone (:mod:`rlightning.error_report`).

    Args:
        message: the line.
        details: what else is known, such as the end of a process's log; they follow the line in ``str(error)``.

    Attributes:
        exit_code: of the command line.
    """

    exit_code = 1

    def __init__(self, message: str = "", details: str = "") -> None:
        super().__init__(message)
        self.details = details

    def __str__(self) -> str:
        return f"{self.line}\n{self.details}" if self.details else self.line

    @property
    def line(self) -> str:
        """The message without the details."""
        return super().__str__()


class ConfigError(RunError, ValueError):
    """A mistake of the user's: the message holds the value, the rule and the way out."""

    exit_code = 2


def cause_chain(error: BaseException, *, with_context: bool = False) -> Iterator[BaseException]:
    """Yield an exception, what it was raised from, and so on.

    Args:
        error: the exception.
        with_context: whether exceptions that were being handled count too, as they do in tracebacks.
    """
    found: BaseException | None = error
    seen = set[int]()
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        hides = found.__suppress_context__ or not with_context
        found = found.__cause__ or (None if hides else found.__context__)


class EngineError(RunError, RuntimeError):
    """The rollout engine failed; where it ended by itself, the details are the engine's own last log lines."""


class EngineStartError(EngineError, ConfigError):
    """The rollout engine cannot start as it is configured; the message is a line with the engine's reason."""


class EngineDiedError(EngineError):
    """The engine is gone or answers no more; whatever it had finished before has been kept."""


class RequestRefusedError(EngineError):
    """The engine could not do what it was asked for; the details are the reason.

    Args:
        reason: the engine's traceback.
    """

    def __init__(self, reason: str) -> None:
        reason = cut(reason)
        last = reason.strip().splitlines()[-1] if reason.strip() else ""
        super().__init__(f"The engine refused a request: {cut_line(last)}", reason)


class StreamLostError(RequestRefusedError):
    """An engine has died whose tokens were being streamed: another one need not sample the same."""


class RewardError(RunError, RuntimeError):
    """Too large a share of rewards failed; the details are the first failure's traceback."""


class EnvironmentFailedError(RunError, RuntimeError):
    """Environments fail too often, or their worker processes end again and again; the details are how one did."""


class VerificationError(RunError, RuntimeError):
    """Trajectories would train on other tokens, or in other contexts, than were sampled."""


class DeviceMemoryError(RunError, RuntimeError):
    """A device has no memory left."""


class HostError(RunError, OSError):
    """The host lacks something that a run needs, such as room on a disk."""


class SaveError(HostError):
    """What a run is for, such as a checkpoint, cannot be written; the message is a line with the reason."""


HOST_LIMITS = {
    errno.EMFILE: "Raise the limit on open files: ulimit -n 65536.",
    errno.ENFILE: "Too many files are open on the whole host: end what holds them, or raise fs.file-max.",
    errno.ENOSPC: "Make room there.",
    errno.EDQUOT: "Make room there, or ask for a larger quota.",
}
"""What to do about errors of the system's that any call may meet."""


class WeightError(RunError, RuntimeError):
    """A weight of the model is NaN or infinite; the message names it."""


def check_rules(rules: Mapping[str, bool]) -> None:
    """Raise a ConfigError with the first rule, which names the value too, that does not hold."""
    for rule, holds in rules.items():
        if not holds:
            raise ConfigError(f"{rule}.")


def find_run_error(error: BaseException) -> RunError | None:
    """Return the foreseen error behind ``error``: itself or what it was raised from; None if it was not foreseen.

    jsonargparse wraps what a class's ``__init__`` raises, so the chain is searched too. Errors of other libraries that
    users meet often become errors of this package.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RunError):
            return cause
        cause = cause.__cause__
    # Whatever is an instance of a class has loaded it, and a failing process has no time to.
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
    if torch is not None and isinstance(error, getattr(torch, "OutOfMemoryError", ())):
        return DeviceMemoryError(
            f"{cut_line(error)} Lower model.max_tokens_per_microbatch, or set model.gradient_checkpointing: true; "
            "`rlightning plan` shows what a run takes."
        )
    return None


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """A sentence to end an error about an unknown name: the nearest choice, or all; of many the nearest."""
    known = sorted(choices) if isinstance(choices, Set) else list(choices)
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if nearest:
        return f"Did you mean '{nearest[0]}'?"
    if len(known) <= MAX_CHOICES:
        return f"Choose from: {', '.join(known)}."
    near = difflib.get_close_matches(name, known, n=MAX_CHOICES, cutoff=0.0)
    shown = [choice for choice in known if choice in near]
    return f"Choose from: {', '.join(shown)}, and {len(known) - len(shown)} more."
