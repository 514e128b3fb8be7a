"""Keeps the source of reward functions from the start of the run, so that all worker processes execute the same code.

A worker that starts later, or an import inside a function, would read files that may have been edited meanwhile. Hence
the source of a function's module, and of the user's modules that it imports, is read once and sent to each worker.
Installed packages are imported as usual. Worker processes import this module, which needs only the standard library.
"""

import ast
import hashlib
import importlib.util
import linecache
import logging
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from rlightning.syntax_tree import parse_source

logger = logging.getLogger(__name__)

INSTALLED = frozenset(("dist-packages", "site-packages"))
"""Folders of installed packages."""
IMPORT_FUNCTIONS = ("import_module", "__import__")
"""Functions that import the module which their first argument names."""


class ModuleSource(NamedTuple):
    """A module: its name, file, whether that is a package's ``__init__.py``, and its source at the run's start."""

    name: str
    path: str
    is_package: bool
    source: bytes


class KeptSources:
    """The source, read at the run's start, of the reward functions' modules and the user's modules that they import.

    Args:
        names: names of the functions' modules, which this process has imported; ``__main__`` is left out, since it is
            not imported again.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.modules: dict[str, ModuleSource] = {}
        self._reported: set[str] = set()
        specs: dict[str, ModuleSpec | None] = {"": None, "__main__": None}
        waiting = sorted(set(names))
        while waiting:
            name = waiting.pop()
            if name in specs:
                continue
            parent = name.rpartition(".")[0]
            if parent and parent not in specs:
                waiting += [name, parent]
                continue
            specs[name] = spec = _find(name, specs.get(parent))
            if spec is not None and _is_own(spec):
                self.modules[name] = module = _read(spec)
                waiting += _imports(module)

    @property
    def digest(self) -> str:
        """SHA-256 of all kept sources, in hexadecimal; "" if there are none."""
        found = hashlib.sha256()
        for name, module in sorted(self.modules.items()):
            found.update(f"{name}\0{len(module.source)}\0".encode() + module.source)
        return found.hexdigest() if self.modules else ""

    def report_changes(self) -> None:
        """Log each file whose content has changed since the start of the run, once."""
        for module in self.modules.values():
            path = Path(module.path)
            if module.path not in self._reported and path.is_file() and path.read_bytes() != module.source:
                self._reported.add(module.path)
                logger.warning(
                    "%s has changed since the run began. This run goes on with the rewards that it began with; start "
                    "another for the new ones.",
                    path,
                )


class KeptFinder:
    """Import hook that finds the kept modules before Python searches files."""

    def __init__(self, modules: Mapping[str, ModuleSource]) -> None:
        self.modules = modules

    def remove(self) -> None:
        """Remove the hook, after which modules are imported from their files again."""
        sys.meta_path.remove(self)
        for module in self.modules.values():
            linecache.cache.pop(module.path, None)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a kept module (importlib.abc.MetaPathFinder); None for other modules."""
        module = self.modules.get(name)
        if module is None:
            return None
        folders = [str(Path(module.path).parent)] if module.is_package else None
        return importlib.util.spec_from_file_location(
            name, module.path, loader=_KeptLoader(module), submodule_search_locations=folders
        )


class _KeptLoader(SourceFileLoader):
    """Loads a module from its kept source, without reading its file or bytecode."""

    def __init__(self, module: ModuleSource) -> None:
        super().__init__(module.name, module.path)
        self.module = module

    def get_data(self, path: str) -> bytes:
        """Return the kept source as bytes."""
        return self.module.source if path == self.module.path else super().get_data(path)

    def path_stats(self, path: str) -> Mapping[str, float]:
        """Raise an OSError, so that importlib reads and writes no bytecode."""
        raise OSError(f"{path} may have changed")


def install(modules: Mapping[str, ModuleSource]) -> KeptFinder:
    """Make this process import these modules from their kept source."""
    finder = KeptFinder(modules)
    sys.meta_path.insert(0, finder)
    for module in modules.values():  # tracebacks show these lines
        lines = importlib.util.decode_source(module.source).splitlines(keepends=True)
        linecache.cache[module.path] = (len(module.source), None, lines, module.path)
    return finder


def is_own_module(name: str) -> bool:
    """Return whether this process has imported a module of this name that belongs to the user."""
    spec = _imported_spec(name)
    return spec is not None and _is_own(spec)


def _imported_spec(name: str) -> ModuleSpec | None:
    """Return the spec of a module that this process has imported; None if it is not imported or has no spec."""
    module = sys.modules.get(name)
    return module.__spec__ if module is not None and hasattr(module, "__spec__") else None


def _find(name: str, parent: ModuleSpec | None) -> ModuleSpec | None:
    """Return a module's spec without importing the module."""
    if name in sys.modules:
        return _imported_spec(name)
    if "." not in name:
        return PathFinder.find_spec(name)
    folders = None if parent is None else parent.submodule_search_locations
    if folders is None:
        return None
    try:
        return PathFinder.find_spec(name, folders)
    except KeyError:  # a folder without __init__.py in another folder that was not imported
        last = name.rpartition(".")[2]
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [path for folder in folders if os.path.isdir(path := f"{folder}/{last}")]
        return spec


def _is_own(spec: ModuleSpec) -> bool:
    """Return whether a spec's source file is outside of Python, installed packages and rlightning."""
    if not isinstance(spec.loader, SourceFileLoader) or spec.origin is None or not Path(spec.origin).is_file():
        return False
    path = Path(spec.origin)
    is_installed = path.is_relative_to(sysconfig.get_path("stdlib")) or not INSTALLED.isdisjoint(path.parts)
    return spec.name.partition(".")[0] != "rlightning" and not is_installed


def _read(spec: ModuleSpec) -> ModuleSource:
    assert spec.origin is not None
    is_package = spec.submodule_search_locations is not None
    return ModuleSource(spec.name, spec.origin, is_package, Path(spec.origin).read_bytes())


def _imports(module: ModuleSource) -> Iterator[str]:
    """Yield the names that a module imports, also inside functions; some may not be modules."""
    package = module.name if module.is_package else module.name.rpartition(".")[0]
    try:
        nodes = list(ast.walk(parse_source(module.source)))
    except (SyntaxError, ValueError):  # a module that only some calls import, and that fails to import
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _resolve("." * node.level + (node.module or ""), package)
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in IMPORT_FUNCTIONS:
            literals = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            yield from (_resolve(name, package) for name in literals if isinstance(name, str))


def _resolve(name: str, package: str) -> str:
    """Convert a relative module name to an absolute one; "" if it is above the top package."""
    try:
        return importlib.util.resolve_name(name, package)
    except (ImportError, ValueError):
        return ""
