"""Reward functions that change something between their calls, found in their source.

Worker processes have a copy each of a module's variables and of an object. What a call changes in one of them is
unknown to the others and lost when the process is replaced, so that rewards depend on which worker scores a sample.
"""

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from rlightning.rewards.lookup import unwrap

_OF_LISTS = ("append", "clear", "extend", "insert", "pop", "remove", "sort")
_OF_OTHERS = ("add", "appendleft", "discard", "popitem", "popleft", "setdefault", "update")
CHANGING_METHODS = frozenset((*_OF_LISTS, *_OF_OTHERS))
"""Of lists, sets, dictionaries and queues."""
MAX_FUNCTIONS = 50
"""That are read, of those that a function calls."""


class _Source(NamedTuple):
    """A function, or a method with the class of its first argument (or that class itself)."""

    function: Any
    owner: type | None


def find_state(function: Any) -> str | None:
    """Return what a reward function, or what it calls in its module or class, changes, such as "self.count".

    Source that cannot be read, and changes that have no usual form, are not found.
    """
    inner = unwrap(function)
    method: Any = inner if inspect.isroutine(inner) else type(inner).__call__
    bound = getattr(inner, "__self__", None) if inspect.isroutine(inner) else inner
    owner = bound if inspect.isclass(bound) else None if bound is None else type(bound)
    waiting = [_Source(getattr(method, "__func__", method), owner)]
    seen: set[Any] = set()
    while waiting and len(seen) < MAX_FUNCTIONS:
        source = waiting.pop()
        if source.function in seen or not isinstance(source.function, types.FunctionType):
            continue
        seen.add(source.function)
        tree = _parse(source.function)
        if tree is None:
            continue
        changed = next(_changes(tree, source), None)
        if changed is not None:
            return changed
        waiting += _called(tree, source)
    return None


def _parse(function: types.FunctionType) -> ast.FunctionDef | None:
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    return node if isinstance(node, ast.FunctionDef) else None


def _changes(tree: ast.FunctionDef, source: _Source) -> Iterator[str]:
    """What the function assigns to, deletes or changes by a method, and does not own."""
    own = _own_names(tree)
    if source.owner is not None:
        own -= {arg.arg for arg in tree.args.args[:1]}  # self
    for node in ast.walk(tree):
        changed: ast.expr | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            changed = node.value
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            changed = node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING_METHODS:
            receiver = source.function.__globals__.get(ast.unparse(node.func.value))
            changed = None if inspect.ismodule(receiver) or inspect.isclass(receiver) else node.func.value
        if changed is not None and _root(changed) not in {*own, None}:
            yield ast.unparse(changed)


def _own_names(tree: ast.FunctionDef) -> set[str]:
    """The names that are bound inside of the function: arguments, variables, imports, functions."""
    own: set[str] = set()
    outer: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.alias):
            own.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler | ast.FunctionDef | ast.ClassDef | ast.MatchAs) and node.name:
            own.add(node.name)
        elif isinstance(node, ast.Global):
            outer.update(node.names)
    return own - outer


def _root(node: ast.expr) -> str | None:
    """The name that an expression of attributes and items begins with."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _called(tree: ast.FunctionDef, source: _Source) -> Iterator[_Source]:
    """The functions of the same module, and methods of the same object, that are called."""
    receiver = tree.args.args[0].arg if source.owner is not None and tree.args.args else None
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name):
            function = source.function.__globals__.get(node.func.id)
            if isinstance(function, types.FunctionType) and function.__module__ == source.function.__module__:
                yield _Source(function, None)
        elif isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == receiver:
            method: Any = getattr(source.owner, node.func.attr, None)
            yield _Source(getattr(method, "__func__", method), source.owner)
