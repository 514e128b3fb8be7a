"""Detects, from source, reward functions that change state between their calls.

Each worker process has its own copy of a module's variables and of objects. A change by a call in one process does not
reach the others, and is lost when the process is replaced: rewards then depend on the worker that scores a sample.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, NoneType

from rlightning.callables import layers
from rlightning.python_values import module_name
from rlightning.rewards.sources import is_own_module
from rlightning.syntax_tree import parse_source

_OF_LISTS = ("append", "clear", "extend", "insert", "pop", "remove", "sort")
_OF_OTHERS = ("add", "appendleft", "discard", "popitem", "popleft", "setdefault", "update")
CHANGING_METHODS = frozenset((*_OF_LISTS, *_OF_OTHERS))
"""Methods of lists, sets, dictionaries and queues that change them."""
CHANGING_FUNCTIONS = frozenset(("next", "setattr", "delattr"))
"""Built-in functions that change their first argument."""
GIVING_THROUGH = frozenset(("type", "vars", "getattr", "globals"))
"""Built-in functions through whose result their first argument, or the module's variables, can be changed."""
CONSTANTS = (NoneType, str, bytes, int, float, complex, tuple, frozenset, type, FunctionType)
"""Types of parameters' defaults that a call cannot change."""
MAX_FUNCTIONS = 50
"""Maximum number of called functions whose source is inspected."""

_Source = tuple[FunctionType, type | None]
"""A Python function, and the class of its first argument if it is a method."""


def find_state(reward: object) -> str | None:
    """Return state that a reward function, or a function called by it, changes, such as "self.count"; else None.

    Changes are not found if the source cannot be read, or if they are written in an unusual way.
    """
    waiting = list(_sources(reward))
    seen: set[FunctionType] = set()
    while waiting and len(seen) < MAX_FUNCTIONS:
        function, owner = waiting.pop()
        tree = None if function in seen else _parse(function)
        seen.add(function)
        if tree is None:
            continue
        changed = next(_changes(tree, function, owner), None)
        if changed is not None:
            return changed
        waiting += _called(tree, function, owner)
    return None


def _sources(function: object, owner: type | None = None) -> Iterator[_Source]:
    """Yield the Python functions that a call of a function, a method of ``owner`` or a callable object executes."""
    for layer in layers(function):
        inner = layer
        if inspect.ismethod(layer):
            inner, bound = layer.__func__, layer.__self__
            owner = bound if inspect.isclass(bound) else type(bound)
        elif not inspect.isroutine(layer) and not isinstance(layer, partial):
            owner = type(layer)
        if isinstance(inner, FunctionType):
            yield inner, owner


def _parse(function: FunctionType) -> ast.FunctionDef | None:
    """Return the syntax tree of a Python function; for a wrapper the wrapper's tree, not the wrapped function's."""
    try:
        node = parse_source(textwrap.dedent(inspect.getsource(function.__code__))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    return node if isinstance(node, ast.FunctionDef) else None


def _receiver(function: FunctionType, owner: type | None) -> tuple[str, ...]:
    """Return the name of ``self`` or ``cls``, if there is one."""
    code = function.__code__
    return code.co_varnames[: min(code.co_argcount, 1)] if owner is not None else ()


def _changes(tree: ast.FunctionDef, function: FunctionType, owner: type | None) -> Iterator[str]:
    """Yield, as text, the expressions that a function changes and that are not local to it."""
    nodes = list(ast.walk(tree))
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own = _locals(function.__code__) - (_shared_defaults(function) - stored) - {*_receiver(function, owner)}
    for node in nodes:
        changed: ast.expr | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            changed = node.value
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            changed = node
        elif isinstance(node, ast.Call):
            changed = _changed_by_call(node, function)
        if changed is not None and _root(changed) not in {*own, None}:
            yield ast.unparse(changed)


def _changed_by_call(node: ast.Call, function: FunctionType) -> ast.expr | None:
    if isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING_METHODS:
        receiver = _look_up(node.func.value, function)
        return None if inspect.ismodule(receiver) or inspect.isclass(receiver) else node.func.value
    if isinstance(node.func, ast.Name) and node.func.id in CHANGING_FUNCTIONS and node.args:
        target, *others = node.args
        name = others[0].value if node.func.id != "next" and others and isinstance(others[0], ast.Constant) else None
        return ast.Attribute(target, name) if isinstance(name, str) else target
    return None


def _locals(code: CodeType) -> set[str]:
    """Return the names of a function's variables, including those of functions and classes inside it."""
    names = {*code.co_varnames, *code.co_cellvars, *(() if code.co_flags & inspect.CO_OPTIMIZED else code.co_names)}
    return names.union(*(_locals(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


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


def _called(tree: ast.FunctionDef, function: FunctionType, owner: type | None) -> Iterator[_Source]:
    """Yield the functions and methods of the user's modules that a function calls."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = _look_up(node.func, function)
        kind: type | None = None
        if called is None and isinstance(node.func, ast.Attribute):
            is_own = ast.unparse(node.func.value) in _receiver(function, owner)
            found = owner if is_own else _look_up(node.func.value, function)
            kind = found if found is None or inspect.isclass(found) else type(found)
            called = inspect.getattr_static(kind, node.func.attr, None)
        if not inspect.isclass(called):
            yield from (source for source in _sources(called, kind) if _is_of_user(source[0], function.__module__))


def _look_up(node: ast.expr, function: FunctionType) -> object:
    """Return the global object that a name or a dotted name in a function refers to; None if there is none."""
    if isinstance(node, ast.Name):
        return function.__globals__.get(node.id)
    found = _look_up(node.value, function) if isinstance(node, ast.Attribute) else None
    return vars(found).get(node.attr) if inspect.ismodule(found) and isinstance(node, ast.Attribute) else None


def _is_of_user(function: FunctionType, module: str) -> bool:
    """Return whether a function is defined in ``module`` or in another module of the user's."""
    name = module_name(function)
    return bool(name) and (name == module or is_own_module(name))
