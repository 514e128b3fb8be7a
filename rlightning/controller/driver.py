"""The state of the controller's process that Ray actors copy: its folder, import paths and named variables.

A cluster runs its actors in the folder and with the environment in which it was started, perhaps by another user. A
configuration's relative paths must have the same meaning there as in the controller.
"""

import hashlib
import os
import re
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlightning.errors import ConfigError

SET_BY_RAY = re.compile(r"RAY_.*|CUDA_VISIBLE_DEVICES")
OF_ONE_PROCESS = re.compile(
    rf"{SET_BY_RAY.pattern}|(DBUS|PYTEST|SSH|XDG)_.*|(LESS|TERM|TMUX).*|_|COLORTERM|COLUMNS|DISPLAY|EDITOR|HOSTNAME|LINES"
    "|LOGNAME|LS_COLORS|MAIL|OLDPWD|OMP_NUM_THREADS|PAGER|PL_GLOBAL_SEED|PS1|PWD|PYTHONPATH|PYTHONUNBUFFERED|SHELL|SHLVL"
    "|STY|USER|WINDOWID"
)
"""Pattern of variables that differ between processes, or are passed to workers anyway."""
LONGEST_LIST = 12


@dataclass(frozen=True)
class DriverContext:
    """The properties of the controller's process that Ray actors must share.

    Attributes:
        folder: working directory.
        import_paths: absolute folders in which the user's classes are found.
        variables: environment variables that are set in each actor before it imports anything.
        digests: digests, by name, of variables that should have the same value; values are not sent.
    """

    folder: str
    import_paths: tuple[str, ...]
    variables: Mapping[str, str]
    digests: Mapping[str, str]

    @classmethod
    def here(cls, names: Sequence[str], *, starts_cluster: bool = False) -> "DriverContext":
        """Return the working directory, import paths and environment variables of this process, the controller.

        Args:
            names: names of the environment variables that actors need.
            starts_cluster: whether this process starts the cluster, which then inherits its environment.
        """
        passed = [*names, *(["PYTHONPATH"] if "PYTHONPATH" in os.environ else [])]
        return cls(
            folder=os.getcwd(),
            import_paths=tuple(absolute_paths(sys.path)),
            variables={} if starts_cluster else {name: passed_value(name) for name in passed},
            digests={} if starts_cluster else digest_variables(),
        )

    @property
    def actor_options(self) -> dict[str, object]:
        """Arguments of Ray's ``.options()`` that set :attr:`variables` in an actor's environment; {} without any."""
        return {"runtime_env": {"env_vars": dict(self.variables)}} if self.variables else {}

    def enter(self) -> None:
        """Append the controller's import paths to ``sys.path``, and enter its working directory if this host has it."""
        sys.path += [path for path in self.import_paths if path not in sys.path]
        if Path(self.folder).is_dir():
            os.chdir(self.folder)

    def describe_differences(self) -> list[str]:
        """Return sentences on how this process's folder and environment variables differ from the controller's."""
        sentences, host = [], socket.gethostname()
        if os.getcwd() != self.folder:
            sentences.append(
                f"{host} has no folder {self.folder}, where the controller runs: relative paths start there from "
                f"{os.getcwd()}. Use absolute ones, on a disk that all hosts see."
            )
        own = digest_variables()
        missing = [name for name in self.digests if name not in own]
        other = [name for name, digest in self.digests.items() if own.get(name, digest) != digest]
        parts = [f"without {list_names(missing)}"] if missing else []
        parts += [f"with other values of {list_names(other)}"] if other else []
        if parts:
            sentences.append(
                f"Workers on {host} run {', and '.join(parts)}: the Ray cluster was not started with this process's "
                "environment. List in trainer.strategy.env the variables that rewards, environments or models need."
            )
        return sentences


def check_names(names: Sequence[str]) -> None:
    """Raise a ConfigError for environment variables that cannot be passed to actors; messages contain no values."""
    for name in names:
        if "=" in name:
            name, _, _ = name.partition("=")
            raise ConfigError(f"trainer.strategy: env={name}=... is no name of a variable. Export it, and list {name}.")
        if SET_BY_RAY.fullmatch(name):
            raise ConfigError(f"trainer.strategy: env={name} is set by Ray, for each worker its own. Leave it out.")
        if name not in os.environ:
            raise ConfigError(f"trainer.strategy: env={name} is not set in this process. Export it, or leave it out.")


def passed_value(name: str) -> str:
    """Return the value of an environment variable for Ray actors; relative paths in PYTHONPATH become absolute."""
    value = os.environ[name]
    return os.pathsep.join(absolute_paths(value.split(os.pathsep))) if name == "PYTHONPATH" else value


def absolute_paths(paths: Iterable[str]) -> list[str]:
    """Return import paths as absolute paths; entries that are not paths, such as names of import hooks, are kept."""
    return [os.path.abspath(path) if not path or os.path.exists(path) else path for path in paths]


def digest_variables() -> dict[str, str]:
    """Return a digest, by name, of each environment variable that should be equal in all processes of a run."""
    return {
        name: hashlib.blake2b(value.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
        for name, value in sorted(os.environ.items())
        if not OF_ONE_PROCESS.fullmatch(name)
    }


def list_names(names: Sequence[str]) -> str:
    """Return names as one line of text, shortened to a maximum number of names."""
    more = f" and {len(names) - LONGEST_LIST} more" if len(names) > LONGEST_LIST else ""
    return ", ".join(names[:LONGEST_LIST]) + more
