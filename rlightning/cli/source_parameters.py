"""The parameters of a class, read from its source: importing it would take seconds, as it imports torch."""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path


def parameters_of_source(path: str, method: str = "__init__") -> list[str]:
    """Return the names that a class's method takes, those passed on to its bases through ``**kwargs`` included.

    Args:
        path: the class, such as ``rlightning.algorithms.GRPO``.
        method: which one; the bases' where the class has none.

    Raises:
        LookupError: its source is not found.
    """
    module, definition = find_source(path)
    function = next((n for n in definition.body if isinstance(n, ast.FunctionDef) and n.name == method), None)
    given = function.args if function else None
    names = [argument.arg for argument in (*given.args[1:], *given.kwonlyargs)] if given else []
    if given and not given.kwarg:
        return names
    passed = _keywords_to_super(function) if function else set()
    for base in definition.bases:
        inherited = parameters_of_source(f"{module}.{ast.unparse(base)}", method)
        names += [name for name in inherited if name not in passed and name not in names]
    return names


def find_source(path: str) -> tuple[str, ast.ClassDef]:
    """Return the module that defines a class, and its definition, also where ``path`` is that of an import of it.

    Raises:
        LookupError: it is not found.
    """
    module, _, name = path.rpartition(".")
    for node in ast.walk(_parse(module)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and any(name == (alias.asname or alias.name) for alias in node.names):
            return find_source(f"{node.module}.{name}")
    raise LookupError(f"there is no class '{name}' in the source of '{module}'")


@cache
def _parse(module: str) -> ast.Module:
    package, *rest = module.split(".")
    spec = find_spec(package) if package else None
    for folder in (spec and spec.submodule_search_locations) or []:
        path = Path(folder, *rest)
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return ast.parse(file.read_bytes())
    raise LookupError(f"there is no source of '{module}'")


def _keywords_to_super(function: ast.FunctionDef) -> set[str]:
    """Return what ``super().__init__`` is given by name, which a caller cannot give again."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    to_super = [call for call in calls if ast.unparse(call.func) == f"super().{function.name}"]
    return {keyword.arg for call in to_super for keyword in call.keywords if keyword.arg}
