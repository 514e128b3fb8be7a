"""Reads names and parameters of classes from source: importing the classes would import torch, which takes seconds."""

import ast
import builtins
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType
from typing import Any, Literal, Optional, Union

from rlightning.config.type_hints import Parameters
from rlightning.syntax_tree import parse_source

PLAIN_TYPES = {
    "builtins": {"bool", "dict", "float", "int", "list", "str", "tuple"},
    "collections.abc": {"Iterable", "Mapping", "Sequence"},
    "pathlib": {"Path"},
    "typing": {"Dict", "Iterable", "List", "Literal", "Mapping", "Optional", "Sequence", "Tuple", "Union"},
}
"""Types in a hint that can be evaluated without importing the class's module, by the module that defines them."""


def parameters_of_source(path: str, method: str = "__init__") -> Parameters:
    """Return the parameters of a class's method, including those that ``**kwargs`` passes to its bases.

    Args:
        path: the class, such as ``rlightning.algorithms.GRPO``.
        method: name of the method, which may be inherited.

    Returns:
        Type hints by name; None for a hint that needs imports, such as a class.

    Raises:
        LookupError: the source is not found.
    """
    module, definition = find_source(path)
    function = next((n for n in definition.body if isinstance(n, ast.FunctionDef) and n.name == method), None)
    hints = _hints_of(function.args, module) if function else {}
    if function and not function.args.kwarg:
        return hints
    passed = _keywords_to_super(function) if function else set()
    for base in definition.bases:
        inherited = parameters_of_source(f"{module}.{ast.unparse(base)}", method)
        hints |= {name: hint for name, hint in inherited.items() if name not in passed and name not in hints}
    return hints


def find_source(path: str) -> tuple[str, ast.ClassDef]:
    """Return the module that defines a class, and the class's syntax tree; ``path`` may be an import of the class.

    Raises:
        LookupError: the class is not found.
    """
    module, _, name = path.rpartition(".")
    for node in ast.walk(_parse(module)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and any(name == (alias.asname or alias.name) for alias in node.names):
            return find_source(f"{node.module}.{name}")
    raise LookupError(f"there is no class '{name}' in the source of '{module}'")


def find_missing_module(module: str) -> str | None:
    """Return the shortest prefix of a dotted module path for which no module exists; None if all exist."""
    names = module.split(".")
    paths = [".".join(names[: i + 1]) for i in range(len(names))]
    return next((path for path in paths if not any(map(Path.exists, _possible_files(path)))), None)


def has_name(module: str, name: str) -> bool:
    """Return whether a module's source may define ``name``: by assignment, import or lazy import, or as a submodule.

    Raises:
        LookupError: the source is not found.
    """
    bound = _bindings(module)
    if not bound.keys().isdisjoint((name, "*")) or find_missing_module(f"{module}.{name}") is None:
        return True
    words = (node.value for node in ast.walk(_parse(module)) if isinstance(node, ast.Constant))
    return "__getattr__" in bound and name in words


def class_names(module: str) -> set[str]:
    """Return the names in a module that may be classes: defined classes, imported names, and ``__all__``."""
    found = {name for name, nodes in _bindings(module).items() if isinstance(nodes[0], ast.ClassDef | ast.ImportFrom)}
    match _bindings(module).get("__all__"):
        case [ast.Assign(value=exported)]:
            found |= set(ast.literal_eval(exported))
    return found


@cache
def subclass_names(base: str) -> frozenset[str]:
    """Return the class name ``base`` and the names of its subclasses in this package's and Lightning's source."""
    derived: dict[str, set[str]] = {}
    for package in ("rlightning", "rlightning.callbacks", "lightning.pytorch"):  # the second is a link
        for file in (file for folder in find_folders(package) for file in folder.rglob("*.py")):
            for name, bases in re.findall(r"^ *class (\w+)\(([^)]*)\)", file.read_text(encoding="utf-8"), re.MULTILINE):
                derived.setdefault(name, set()).update(re.findall(r"\w+", bases))
    names, found = {base}, {base}
    while found:
        found = {name for name, bases in derived.items() if bases & found} - names
        names |= found
    return frozenset(names)


def find_folders(package: str) -> list[Path]:
    """Return the folders where a package's modules would be, existing or not; empty if its first part is no package."""
    first, *rest = package.split(".")
    spec = find_spec(first) if first else None
    return [Path(folder, *rest) for folder in (spec and spec.submodule_search_locations) or []]


def _possible_files(module: str) -> list[Path]:
    """Return the paths at which a module's file or a namespace package's folder may be."""
    folders = find_folders(module)
    files = [file for folder in folders for file in (folder / "__init__.py", folder.with_suffix(".py"))]
    return [*files, *folders]


@cache
def _parse(module: str) -> ast.Module:
    for file in _possible_files(module):
        if file.is_file():
            return parse_source(file.read_bytes())
    raise LookupError(f"there is no source of '{module}'")


def _hints_of(given: ast.arguments, module: str) -> Parameters:
    """Return the type hints of a method's parameters; one whose default is None also accepts None."""
    positional = given.args[1:]
    missing = [None] * (len(positional) - len(given.defaults))
    defaults = [*missing, *given.defaults[-len(positional) :], *given.kw_defaults]
    hints: Parameters = {}
    for argument, default in zip((*positional, *given.kwonlyargs), defaults, strict=True):
        hint = _read_hint(argument.annotation, module)
        is_null = isinstance(default, ast.Constant) and default.value is None
        hints[argument.arg] = Optional[hint] if is_null and hint is not None else hint  # noqa: UP045
    return hints


def _read_hint(annotation: ast.expr | None, module: str) -> object:
    """Return the type hint of an annotation; None if it cannot be evaluated."""
    try:
        return _evaluate(annotation, module)
    except (LookupError, TypeError):  # subscripts of a type that has none
        return None


def _evaluate(node: ast.AST | None, module: str) -> object:
    """Evaluate an annotation that consists of :data:`PLAIN_TYPES` only.

    Raises:
        LookupError: it has other types.
    """
    match node:
        case ast.Constant(value=None):
            return NoneType
        case ast.Constant(value=value) if value is Ellipsis:
            return value
        case ast.Name(id=name):
            return _find_type(name, module)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return Union[_evaluate(left, module), _evaluate(right, module)]  # noqa: UP007
        case ast.Subscript(value=kind, slice=items):
            generic: Any = _evaluate(kind, module)  # types that can be subscripted have no common base type
            if generic is Literal:
                return Literal[ast.literal_eval(items)]
            if isinstance(items, ast.Tuple):
                return generic[tuple(_evaluate(part, module) for part in items.elts)]
            return generic[_evaluate(items, module)]
    raise LookupError("an annotation of another kind")


def _find_type(name: str, module: str) -> object:
    """Return the plain type that a name refers to in a module, following assignments and imports.

    Raises:
        LookupError: the name does not refer to a plain type.
    """
    bound = _bindings(module).get(name, [])
    if not bound and name in PLAIN_TYPES["builtins"]:
        return vars(builtins)[name]
    match bound:
        case [ast.ImportFrom(module=str(source), level=0, names=names)]:
            original = next(alias.name for alias in names if (alias.asname or alias.name) == name)
            if original in PLAIN_TYPES.get(source, ()):
                return resolve_name(f"{source}:{original}")
            return _find_type(original, source)
        case [ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value)]:
            return _evaluate(value, module)
    raise LookupError(f"'{name}' is no plain type in '{module}'")


@cache
def _bindings(module: str) -> dict[str, list[ast.AST]]:
    """Return the statements that bind each global name of a module."""
    bound: dict[str, list[ast.AST]] = {}
    nodes: list[ast.AST] = [*_parse(module).body]
    while nodes:
        node = nodes.pop()
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names = [name]
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names = [alias.asname or alias.name for alias in aliases]
            case ast.Assign(targets=targets):
                names = [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                names = [name]
            case _:
                names = []
                nodes += ast.iter_child_nodes(node)
        for name in names:
            bound.setdefault(name, []).append(node)
    return bound


def _keywords_to_super(function: ast.FunctionDef) -> set[str]:
    """Return the keywords that a method itself passes to ``super()``, so that callers cannot pass them."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    to_super = [call for call in calls if ast.unparse(call.func) == f"super().{function.name}"]
    return {keyword.arg for call in to_super for keyword in call.keywords if keyword.arg}
