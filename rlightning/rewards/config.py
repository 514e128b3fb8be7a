"""The configuration of a reward function, and its imported form: checked, and pickled for worker processes."""

import inspect
import io
import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlightning.callables import is_async, unwrap
from rlightning.config.argument_checks import checked
from rlightning.config.secret_arguments import hide_secrets, mask_secrets, resolve_secrets
from rlightning.dotted_path import import_longest
from rlightning.errors import ConfigError, did_you_mean
from rlightning.python_values import module_name
from rlightning.rewards.calls import RewardCallable
from rlightning.rewards.lookup import check_kind, import_function
from rlightning.rewards.references import AnswerCheck, find_answer_check
from rlightning.rewards.state import find_state

GIVEN = ("prompt", "completion", "full_text", "num_tokens", "is_truncated")
"""Parameters to which the runner passes arguments of its own; prompt columns of these names are not passed."""
TURNS = "turns"
"""Parameter for the messages after the prompt, as in chat APIs."""

DEFAULT_TIMEOUT = 10.0
"""Maximum seconds of a call if neither the configuration nor the function sets a timeout."""

_TAKEN_NAMES = ("mean", "std", "no_signal", "failed")


@checked
@dataclass(frozen=True)
class RewardFunction:
    """A reward function, with its weight and its settings.

    Attributes:
        function: a dotted path such as ``my_rewards.is_polite``, or the function itself.
        weight: factor of the reward in the total.
        name: name in the metric ``reward/<name>``; None for the function's name.
        arguments: keyword arguments of every call.
        columns: maps the function's parameters to columns; None for columns of the parameters' names.
        timeout: maximum seconds of a call; None for the function's ``call_timeout``, or else 10.
    """

    function: str | Callable[..., Any]
    weight: float = 1.0
    name: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict, repr=False)  # no repr: may hold secrets
    columns: dict[str, str] = field(default_factory=dict)
    timeout: float | None = None


Reward = RewardFunction | str | Callable[..., Any]
"""A reward function: with settings, by its dotted path, or as an object."""


@dataclass(frozen=True, slots=True)
class BoundReward:
    """An imported and checked :class:`RewardFunction`.

    Attributes:
        is_async: whether the function is, or calls, an ``async def``.
        pickled: the pickled function; None if it cannot be pickled.
        modules: names of the modules of the function, and of the classes of its object and arguments.
        columns: column by parameter, for all parameters that neither the runner nor ``arguments`` provide.
        required: the parameters in ``columns`` without a default.
        takes_all: whether the function has ``**columns``.
        given: those of the function's parameters that the runner provides: names in ``GIVEN``, and :data:`TURNS`.
        answer_check: how an answer checker is called with its reference; None for other functions.
        state: description of state that calls change, and of which each worker process has its own copy; None without
            any.
    """

    name: str
    function: RewardCallable
    weight: float
    timeout: float
    is_async: bool
    pickled: bytes | None
    modules: frozenset[str]
    arguments: dict[str, object]
    columns: dict[str, str]
    required: tuple[str, ...]
    takes_all: bool
    given: tuple[str, ...]
    answer_check: AnswerCheck | None
    state: str | None

    def check(self, columns: Sequence[str], source: str) -> None:
        """Raise a ConfigError if a prompt set lacks a column that the function requires."""
        for parameter in self.required:
            column = self.columns[parameter]
            if column not in columns:
                raise ConfigError(
                    f"Reward '{self.name}' needs the column '{column}', which '{source}' does not have. "
                    f"{did_you_mean(column, columns)}"
                )

    def select(self, given: Mapping[str, object], row: Mapping[str, object]) -> dict[str, object]:
        """Return the keyword arguments with which to call the function for one sample.

        They are prompt columns, values from the runner such as the completion, and the user's ``arguments``.

        Args:
            given: values by the names in ``GIVEN``.
            row: the prompt's columns.
        """
        chosen = {name: value for name, value in row.items() if name not in GIVEN} if self.takes_all else {}
        chosen |= {parameter: row[column] for parameter, column in self.columns.items() if column in row}
        return chosen | {name: given[name] for name in self.given} | self.arguments


def bind_rewards(rewards: Sequence[Reward] | Reward) -> list[BoundReward]:
    """Import and check one or several reward functions, and return a BoundReward for each.

    Raises:
        ConfigError: a function is invalid, or its name is not unique or is reserved.
    """
    listed = [rewards] if isinstance(rewards, str | RewardFunction) or callable(rewards) else rewards
    bound = [_bind(r if isinstance(r, RewardFunction) else RewardFunction(r)) for r in listed]
    names = [reward.name for reward in bound]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"Two reward functions have the name '{name}'. Give each its own: RewardFunction(f, name='...'), or in "
                "YAML {function: ..., name: ...}."
            )
        if name in _TAKEN_NAMES:
            raise ConfigError(f"A reward function cannot have the name '{name}': reward/{name} is another metric.")
    return bound


def _bind(reward: RewardFunction) -> BoundReward:
    path = reward.function if isinstance(reward.function, str) else None
    given = reward.function if path is None else import_function(path)
    function = check_kind(given, path or _name_of(given))
    name = reward.name or _name_of(function)
    if hasattr(function, "check_arguments"):  # checks its own arguments, and may set its signature
        function.check_arguments()
    parameters = _parameters(function, name)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    by_keyword = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    _check_settings(reward, name, by_keyword, takes_all)
    free = [p for p in by_keyword.values() if p.name not in (*GIVEN, TURNS, *reward.arguments)]
    answer_check = find_answer_check(function)
    if answer_check is not None and answer_check.parameter not in by_keyword and not takes_all:
        raise ConfigError(
            f"Reward '{name}' is marked as an answer_checker of '{answer_check.parameter}', which it has no parameter "
            f"for. {did_you_mean(answer_check.parameter, by_keyword)}"
        )
    columns = {p.name: p.name for p in free} | reward.columns
    arguments = resolve_secrets(reward.arguments, f"Reward '{name}'")
    hide_secrets(mask_secrets(arguments)[1])
    data, modules = _pickle(function)
    modules |= _pickle(arguments)[1]
    if path is not None:
        module = import_longest(path, name)[0].__name__
        modules.add(module)
        if data is None and module != "__main__":
            data = pickle.dumps(_Named(path))
    return BoundReward(
        name=name,
        function=function,
        weight=reward.weight,
        timeout=_choose_timeout(reward, function, name),
        is_async=is_async(function),
        pickled=data,
        modules=frozenset(modules),
        arguments=arguments,
        columns=columns,
        required=tuple(p.name for p in free if p.default is p.empty),
        takes_all=takes_all,
        given=tuple(g for g in (*GIVEN, TURNS) if g in by_keyword or (takes_all and g != TURNS)),
        answer_check=answer_check if answer_check is not None and answer_check.parameter in columns else None,
        state=None if is_async(function) or data is None else find_state(function),
    )


def _check_settings(reward: RewardFunction, name: str, parameters: Iterable[str], takes_all: bool) -> None:
    """Raise a ConfigError for a weight or arguments that do not fit the function."""
    if not math.isfinite(reward.weight):
        raise ConfigError(f"Reward '{name}': weight={reward.weight} must be a finite number.")
    for argument in (*reward.arguments, *reward.columns):
        if argument in GIVEN:
            raise ConfigError(
                f"Reward '{name}': '{argument}' is given to it for each sample. Remove it from the arguments."
            )
        if argument not in parameters and not takes_all:
            raise ConfigError(f"Reward '{name}' has no argument '{argument}'. {did_you_mean(argument, parameters)}")


def _choose_timeout(reward: RewardFunction, function: RewardCallable, name: str) -> float:
    if reward.timeout is None:
        default: float = function.call_timeout if hasattr(function, "call_timeout") else DEFAULT_TIMEOUT
        return default
    if not (math.isfinite(reward.timeout) and reward.timeout > 0):
        raise ConfigError(f"Reward '{name}': timeout={reward.timeout} must be a number of seconds above 0.")
    return reward.timeout


def _name_of(function: object) -> str:
    inner = unwrap(function)
    name = inner.__name__ if hasattr(inner, "__name__") else type(inner).__name__
    return "reward" if name == "<lambda>" else name


def _parameters(function: RewardCallable, name: str) -> list[inspect.Parameter]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Reward '{name}' has no readable signature: {error}. Wrap it in a function.") from error
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise ConfigError(
                f"Reward '{name}' takes '{parameter.name}' by position, and gets all arguments by name. Remove the '/'."
            )
    return parameters


class _Named:
    """An object that is pickled as its dotted path, even if it has a lock or a client."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return import_function, (self.path,)


def _pickle(value: object) -> tuple[bytes | None, set[str]]:
    """Pickle a function or its arguments.

    Returns:
        The pickle, or None if that fails; and the names of the modules of its functions, classes and objects, as far as
        they were found.
    """
    file = io.BytesIO()
    pickler = _ModulePickler(file)
    try:
        pickler.dump(value)
    except Exception:  # an object's own __reduce__ may raise anything
        return None, pickler.modules
    # A worker has another __main__; running the user's script again to import from it could have any side effect.
    return None if "__main__" in pickler.modules else file.getvalue(), pickler.modules


class _ModulePickler(pickle.Pickler):
    """Records the module of each function, class and object that it pickles."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.modules: set[str] = set()

    def persistent_id(self, value: object) -> None:
        """Called by pickle for each object; returns None, so that the object is pickled as usual."""
        if module := module_name(value):
            self.modules.add(module)
