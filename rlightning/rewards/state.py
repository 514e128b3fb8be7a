"""Detects, from source, reward functions that change state between their calls.

Worker processes have a copy each of a module's variables and of an object. What a call changes in one of them is
unknown to the others and lost when the process is replaced, so that rewards depend on which worker scores a sample.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import BuiltinMethodType, FunctionType, MethodType, MethodWrapperType, NoneType
from typing import Any, NamedTuple

from rlightning.python_values import module_name
from rlightning.rewards.lookup import unwrap
from rlightning.rewards.sources import is_own_module

_OF_LISTS = ("append", "clear", "extend", "insert", "pop", "remove", "sort")
_OF_OTHERS = ("add", "appendleft", "discard", "popitem", "popleft", "setdefault", "update")
CHANGING_METHODS = frozenset((*_OF_LISTS, *_OF_OTHERS))
"""Of lists, sets, dictionaries and queues."""
CHANGING_FUNCTIONS = frozenset(("next", "setattr", "delattr"))
"""Built-in functions that change their first argument."""
GIVING_THROUGH = frozenset(("type", "vars", "getattr", "globals"))
"""Built-in functions whose result, when it is changed, changes their first argument, or the module's variables."""
CONSTANTS = (NoneType, str, bytes, int, float, complex, tuple, frozenset, type, FunctionType)
"""Types of defaults that no call changes."""
MAX_FUNCTIONS = 50
"""That are read, of those that a function calls."""


class _Source(NamedTuple):
    """A function, or a method with the class that it is called on."""

    function: Any
    owner: type | None


def find_state(function: object) -> str | None:
    """Return a state that a reward function, or a function called by it, changes, such as "self.count".

    Source that cannot be read, and changes that have no usual form, are not found.
    """
    waiting = [_source_of(unwrap(function))]
    seen: set[int] = set()
    while waiting and len(seen) < MAX_FUNCTIONS:
        source = waiting.pop()
        if id(source.function) in seen:
            continue
        seen.add(id(source.function))
        inner = getattr(source.function, "__wrapped__", None) or unwrap(source.function)  # of functools.wraps, partial
        if inner is not source.function:
            waiting.append(_Source(inner, source.owner) if inspect.isroutine(inner) else _source_of(inner))
        tree = _parse(source.function)
        if tree is not None:
            changed = next(_changes(tree, source), None)
            if changed is not None:
                return changed
            waiting += _called(tree, source)
    return None


def _source_of(function: object) -> _Source:
    """Return the plain function behind a function, method or callable object."""
    method = function if inspect.isroutine(function) else getattr(type(function), "__call__", None)  # noqa: B004
    if isinstance(function, BuiltinMethodType | MethodType | MethodWrapperType):
        bound: object = function.__self__
    else:
        bound = None if inspect.isroutine(function) else function
    owner = bound if inspect.isclass(bound) else None if bound is None else type(bound)
    return _Source(_unbound(method), owner)


def _unbound(method: object) -> object:
    """Return the function of a bound method; anything else unchanged."""
    return method.__func__ if inspect.ismethod(method) else method


def _parse(function: object) -> ast.FunctionDef | None:
    """Return the syntax tree of a Python function; of a wrapper its own, not the wrapped function's."""
    if not isinstance(function, FunctionType):
        return None
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(function.__code__))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    return node if isinstance(node, ast.FunctionDef) else None


def _changes(tree: ast.FunctionDef, source: _Source) -> Iterator[str]:
    """Yield the expressions that a function changes and that are not local to it."""
    own = _own_names(tree, source.function)
    if source.owner is not None:
        own -= {arg.arg for arg in tree.args.args[:1]}  # self
    for node in ast.walk(tree):
        changed: ast.expr | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            changed = node.value
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            changed = node
        elif isinstance(node, ast.Call):
            changed = _changed_by_call(node, source)
        if changed is not None and _root(changed) not in {*own, None}:
            yield ast.unparse(changed)


def _changed_by_call(node: ast.Call, source: _Source) -> ast.expr | None:
    if isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING_METHODS:
        receiver = _look_up(node.func.value, source)
        return None if inspect.ismodule(receiver) or inspect.isclass(receiver) else node.func.value
    if isinstance(node.func, ast.Name) and node.func.id in CHANGING_FUNCTIONS and node.args:
        target, *others = node.args
        name = others[0].value if node.func.id != "next" and others and isinstance(others[0], ast.Constant) else None
        return ast.Attribute(target, name) if isinstance(name, str) else target
    return None


def _own_names(tree: ast.FunctionDef, function: FunctionType) -> set[str]:
    """Return the names that are local to the function: arguments, variables, imports, inner functions."""
    stored: set[str] = set()
    arguments: set[str] = set()
    outer: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            stored.add(node.id)
        elif isinstance(node, ast.arg):
            arguments.add(node.arg)
        elif isinstance(node, ast.alias):
            stored.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler | ast.FunctionDef | ast.ClassDef | ast.MatchAs) and node.name:
            stored.add(node.name)
        elif isinstance(node, ast.Global):
            outer.update(node.names)
        elif isinstance(node, ast.Nonlocal):  # of a function inside, it may be a variable of this one
            outer.update(name for name in node.names if name in function.__code__.co_freevars)
    return stored - outer | (arguments - _shared_defaults(function))


def _shared_defaults(function: FunctionType) -> set[str]:
    """Return the parameters with a mutable default, which all calls share."""
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    return {p.name for p in parameters if not (p.default is p.empty or isinstance(p.default, CONSTANTS))}


def _root(node: ast.expr) -> str | None:
    """Return the variable at the start of an expression of attributes, items and :data:`GIVING_THROUGH`; else None."""
    while True:
        if isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in GIVING_THROUGH:
            node = node.args[0] if node.args else node.func
        else:
            return node.id if isinstance(node, ast.Name) else None


def _called(tree: ast.FunctionDef, source: _Source) -> Iterator[_Source]:
    """Yield those functions and methods that a function calls and that belong to the user's modules."""
    receiver = tree.args.args[0].arg if source.owner is not None and tree.args.args else None
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = _look_up(node.func, source)
        if callable(called) and not inspect.isclass(called):
            called = _source_of(called)
        elif isinstance(node.func, ast.Attribute):
            is_own = ast.unparse(node.func.value) == receiver
            found = source.owner if is_own else _look_up(node.func.value, source)
            owner = found if found is None or inspect.isclass(found) else type(found)
            method = getattr(owner, node.func.attr, None)
            called = _Source(_unbound(method), owner)
        if isinstance(called, _Source) and _is_of_user(called.function, source):
            yield called


def _look_up(node: ast.expr, source: _Source) -> object:
    """Return the global object that a name or dotted name in a function stands for; None if there is none."""
    if isinstance(node, ast.Name):
        return source.function.__globals__.get(node.id)
    found = _look_up(node.value, source) if isinstance(node, ast.Attribute) else None
    return vars(found).get(node.attr) if inspect.ismodule(found) and isinstance(node, ast.Attribute) else None


def _is_of_user(function: object, source: _Source) -> bool:
    """Return whether a function is defined in the module of ``source``, or in another one of the user's."""
    name = module_name(function)
    return bool(name) and (name == source.function.__module__ or is_own_module(name))
