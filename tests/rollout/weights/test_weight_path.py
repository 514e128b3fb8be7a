"""The docstring of the weight driver shows the functions of a weight update, each of which exists, in their order."""

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

from rlightning.rollout.weights import driver

ROLLOUT = Path(driver.__file__).parents[1]
MAX_FUNCTIONS = 12
NAME = re.compile(r"[A-Z]\w+\.\w+|\b\w*_\w+")
OWNERS = {
    "_send": "WeightSync",
    "_connect": "WeightUpdater",
    "open_weight_receivers": "VLLMServer",
    "receive_weights": "VLLMServer",
    "finish_weight_update": "VLLMServer",
    "rl_open_receiver": "WorkerExtension",
    "rl_receive_weights": "WorkerExtension",
}
"""The classes of the functions that the docstring names without one."""
GIVEN = {"on_loaded", "load_weights"}
"""An argument, and a method of vLLM's models."""


def shown_lines() -> list[str]:
    """Return the lines of the docstring's picture, below its headings."""
    return [line for line in (driver.__doc__ or "").split("::\n", 1)[1].split("``-->``")[0].splitlines() if line][1:]


def full_name(name: str) -> str:
    """Return ``Class.function`` for a function of the docstring; the name itself for :data:`GIVEN`."""
    return f"{OWNERS[name]}.{name}" if name in OWNERS else name


def names_in(lines: list[str]) -> list[str]:
    """Return the functions that lines of the docstring name, each once, in their order."""
    return list(dict.fromkeys(full_name(name) for line in lines for name in NAME.findall(line)))


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """Return the source of each method of the package's rollout, without its docstring, by ``Class.function``."""
    found: dict[str, str] = {}
    for path in ROLLOUT.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for kind in [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]:
            for function in kind.body:
                if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                    statements = function.body[ast.get_docstring(function) is not None :]
                    body = "\n".join(ast.unparse(statement) for statement in statements)
                    found[f"{kind.name}.{function.name}"] = body
    return found


def test_named_functions_exist(sources: dict[str, str]) -> None:
    names = names_in(shown_lines())
    assert len(names) >= 15, names
    assert [name for name in names if name not in GIVEN and name not in sources] == []


def indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def called_by(caller: str) -> list[str]:
    """Return the first function of each line that the docstring shows below a caller's, at any depth."""
    lines = shown_lines()
    start = next(place for place, line in enumerate(lines) if NAME.findall(line)[:1] == [caller])
    below = []
    for line in lines[start + 1 :]:
        if indentation(line) <= indentation(lines[start]):
            break
        below.append(line)
    inner = [line for line in below if indentation(line) < 40]  # what the trainer calls
    return [NAME.findall(line)[0].split(".")[-1] for line in inner if NAME.findall(line)]


@pytest.mark.parametrize("caller", ["WeightUpdater.update_weights", "_connect"])
def test_functions_are_called_in_the_order_shown(caller: str, sources: dict[str, str]) -> None:
    called, inner = called_by(caller), [] if caller == "_connect" else called_by("_connect")
    called = [name for name in called if name not in inner]
    found = [re.search(rf"\b{name}\b", sources[full_name(caller)]) for name in called]
    places = [-1 if one is None else one.start() for one in found]
    assert len(called) >= 3 and -1 not in places and places == sorted(places), dict(zip(called, places, strict=True))


def test_functions_call_the_next_ones(sources: dict[str, str]) -> None:
    path = ["WeightSync.sync_weights", "WeightSync._send", "RankEngines.update_weights", "WeightUpdater.update_weights"]
    path += ["VLLMServer.receive_weights", "WorkerExtension.rl_receive_weights", "WeightReceiver.receive"]
    shown = names_in(shown_lines())
    assert [name for name in shown if name in path] == path
    for caller, called in pairwise(path):
        assert re.search(rf"\b{called.split('.')[1]}\b", sources[caller]), f"{caller} does not call {called}"


def test_at_most_twelve_functions_lead_to_load_weights() -> None:
    lines = shown_lines()
    opening = next(place for place, line in enumerate(lines) if "_connect" in line)
    lines = [
        line
        for place, line in enumerate(lines)
        if place <= opening or indentation(line) > 40 or not called_once(lines, opening, place)
    ]
    end = next(place for place, line in enumerate(lines) if "load_weights" in line)
    names = [*names_in(lines[: end + 1]), "EngineConnection.submit"]
    assert len(names) <= MAX_FUNCTIONS, names


def called_once(lines: list[str], opening: int, place: int) -> bool:
    """Whether a line is of :meth:`WeightUpdater._connect`, which does nothing in later updates of the same engines."""
    return all(indentation(line) > indentation(lines[opening]) for line in lines[opening + 1 : place + 1])
