"""Finds the class that a configuration names by a dotted path or a bare name; an error suggests the nearest name."""

import inspect
from collections.abc import Iterable, Iterator
from importlib import import_module
from pkgutil import iter_modules, resolve_name
from typing import Any

from rlightning.dotted_path import describe_import_error
from rlightning.errors import ConfigError, did_you_mean
from rlightning.foreign_text import cut_line


def subclasses(base: type) -> Iterator[type]:
    """Yield ``base`` and all of its imported subclasses."""
    yield base
    children: list[type] = base.__subclasses__()
    for child in children:
        yield from subclasses(child)


def find_class(path: str, bases: list[type], key: str) -> Any:
    """Return the class of a dotted path or, by its bare name, a subclass of ``bases``; raise a ConfigError if none.

    A dotted path may also name a function, which is returned.

    Args:
        path: such as ``rlightning.algorithms.GRPO`` or ``EarlyStopping``.
        bases: base classes that the key allows.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name:
        for package in {base.__module__.rpartition(".")[0] for base in bases} - {""}:
            exports = import_module(package)
            if name in vars(exports).get("__all__", ()):
                resolve_name(f"{package}:{name}")  # imports names that the package imports lazily
        named = {c.__name__: c for base in bases for c in subclasses(base) if not c.__name__.startswith("_")}
        if name not in named:
            raise no_class(key, name, named)
        return named[name]
    if not all(path.split(".")):
        raise ConfigError(f"{key}: '{path}' is no dotted path. Write module.Class, such as {path.strip('.')}.")
    try:
        module = import_module(module_name)
    except Exception as error:
        if not isinstance(error, ModuleNotFoundError):
            raise ConfigError(
                f"{key}: importing '{module_name}' failed: {describe_import_error(error)}. Correct it, or name "
                "another one."
            ) from error
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{key}: importing '{module_name}' failed: {cut_line(error)}. Install it, or remove the key."
            ) from error
        parent = error.name.rpartition(".")[0]
        folders = vars(import_module(parent)).get("__path__", []) if parent else []
        raise no_module(key, error.name, folders) from error
    found = getattr(module, name, None)
    if found is None:
        fitting = [n for n, c in vars(module).items() if inspect.isclass(c) and issubclass(c, tuple(bases) or object)]
        fitting += vars(module).get("__all__", ())  # names that the module imports lazily
        raise no_name(key, path, fitting)
    if inspect.isclass(found) and bases and not issubclass(found, tuple(bases)):
        raise not_a_subclass(key, path, bases)
    return found


def not_a_subclass(key: str, path: str, bases: Iterable[type]) -> ConfigError:
    """Return the error for a dotted path to a function, or to a class that is of none of the ``bases``."""
    wanted = " or ".join(base.__name__ for base in bases)
    return ConfigError(f"{key}: '{path}' is not a subclass of {wanted}. Name one that is.")


def no_class(key: str, name: str, choices: Iterable[str]) -> ConfigError:
    """Return the error for a class name, without a module, that matches none of the ``choices``."""
    return ConfigError(f"{key}: there is no class '{name}'. {suggest(name, choices)}")


def no_module(key: str, name: str, folders: Iterable[str]) -> ConfigError:
    """Return the error for a dotted path with a module that does not exist.

    Args:
        folders: where the module was looked for.
    """
    choices = [module.name for module in iter_modules(folders, f"{name.rpartition('.')[0]}.")]
    choices += ["rlightning", "rlightning.algorithms", "rlightning.callbacks", "rlightning.rewards"]
    return ConfigError(f"{key}: there is no module '{name}'. {suggest(name, choices)}")


def no_name(key: str, path: str, choices: Iterable[str]) -> ConfigError:
    """Return the error for a dotted path to a name that its module does not define; suggests similar names."""
    module, _, name = path.rpartition(".")
    near = suggest(path, [f"{module}.{choice}" for choice in choices if not choice.startswith("_")])
    return ConfigError(f"{key}: there is no '{name}' in '{module}'. {near}")


def suggest(name: str, choices: Iterable[str]) -> str:
    """Return a sentence that suggests the choice nearest to a misspelled name."""
    return did_you_mean(name, choices, otherwise="Give the dotted path of a class that can be imported from here.")


def name_of(kind: object) -> str:
    """Return the name of a class, or of one that is given by its dotted path."""
    return kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
