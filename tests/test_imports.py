"""Which packages may import which: rules that keep callbacks separable, objectives pure and the start quick."""

import ast
import sys
from collections.abc import Container, Iterator, Mapping, Sequence, Set
from functools import cache
from pathlib import Path

import pytest
from programs import run_python

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rlightning"
CALLBACKS = ROOT / "callbacks"


def package_files() -> list[Path]:
    """The package without the callbacks, which are linked into it."""
    return [p for p in sorted(PACKAGE.rglob("*.py")) if PACKAGE / "callbacks" not in p.parents]


def source_files() -> list[Path]:
    """Everything that is ours but tests."""
    others = [path for name in ("examples", "benchmarks") for path in sorted((ROOT / name).rglob("*.py"))]
    return [*package_files(), *sorted(CALLBACKS.glob("*.py")), *others]


def imported(tree: ast.AST) -> Iterator[str]:
    """The dotted names that a file imports, wherever it does so, ``import_module("...")`` included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and called(node.func).endswith("import_module"):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


def called(function: ast.expr) -> str:
    """The last part of the name that a call gives, if it gives one."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


@cache
def imports_of(source: str) -> tuple[str, ...]:
    """The dotted names that a source imports."""
    return tuple(imported(ast.parse(source)))


def imports_any(source: str, *packages: str) -> list[str]:
    """Those of a source's imports that are one of ``packages`` or inside one."""
    return [n for n in imports_of(source) if any(f"{n}.".startswith(f"{p}.") for p in packages)]


MEETINGS = {"barrier", "monitored_barrier"}
WAITS = {"synchronize"}
STRATEGIES = {"strategy", "self", "fabric"}
"""Who asks the strategy: its ``barrier`` is ours, and in the example of a Fabric loop it is that loop's."""
OWN_MODULES = {"rlightning.parallel.barrier", "rlightning.parallel.device"}


def raw_synchronizations(source: str) -> list[str]:
    """Barriers and waits for a device that go past the one primitive of ``rlightning.parallel``, by any alias.

    A strategy's ``barrier`` is none, and neither are the functions of ``OWN_MODULES``.
    """
    tree = ast.parse(source)
    own: set[str] = set(OWN_MODULES)
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if f"{node.module}.{alias.name}" in OWN_MODULES:
                    own.add(alias.asname or alias.name)
                elif alias.name in MEETINGS | WAITS and node.module not in OWN_MODULES:
                    found.append(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            own |= {alias.asname for alias in node.names if alias.name in OWN_MODULES and alias.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in MEETINGS | WAITS:
            owner = ast.unparse(node.value)
            is_strategy = node.attr == "barrier" and owner.rpartition(".")[2] in STRATEGIES
            if owner not in own and not is_strategy:
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and called(node.func) == "getattr" and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and name.value in MEETINGS | WAITS:
                found.append(ast.unparse(node))
    return found


def offenders(files: list[Path], *packages: str) -> dict[str, list[str]]:
    """Return the imports of ``packages``, by file."""
    found = {str(p.relative_to(ROOT)): imports_any(p.read_text(encoding="utf-8"), *packages) for p in files}
    return {name: names for name, names in found.items() if names}


LAYERS = (
    {"__main__"},
    {"cli"},
    {"trainer"},
    {"callbacks"},
    {"algorithms"},
    {"module"},
    {"environments"},
    {"memory_plan"},
    {"rollout"},
    {"rewards", "data", "report"},
    {"controller"},
    {"models", "optim"},
    {"parallel"},
    {"objectives"},
    {"rpc"},
    {"processes"},
)
"""Packages, the highest first; what else is in ``rlightning`` itself is a leaf, below all of them."""
NOT_OF_CALLBACKS = {"cli", "algorithms", "module"}


def layer(name: str) -> int:
    """How far up a dotted name of the package stands; 0 for a leaf."""
    part = name.split(".")[1]
    return next((len(LAYERS) - i for i, packages in enumerate(LAYERS) if part in packages), 0)


def packages_not_below(path: Path) -> set[str]:
    """The packages that a file imports and must not know."""
    package = "callbacks" if path.parent == CALLBACKS else path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    own = layer(f"rlightning.{package}")
    names = [name for name in imports_any(path.read_text(encoding="utf-8"), "rlightning") if "." in name]
    others = {name.split(".")[1] for name in names} - {package}
    refused = NOT_OF_CALLBACKS if package == "callbacks" else set()
    levels = {other: layer(f"rlightning.{other}") for other in others}
    return {other for other, level in levels.items() if other in refused or level > own or 0 < own == level}


@pytest.mark.long
def test_packages_import_only_what_is_below() -> None:
    found = set()
    for path in [*package_files(), *sorted(CALLBACKS.glob("*.py"))]:
        if path != PACKAGE / "__init__.py":
            name = str(path.relative_to(ROOT if path.parent == CALLBACKS else PACKAGE))
            found |= {(name, other) for other in packages_not_below(path)}
    assert found == set()


def dotted_name(path: Path) -> str:
    """The name that a file of the package, or a callback, is imported by."""
    inside = Path("callbacks", path.name) if path.parent == CALLBACKS else path.relative_to(PACKAGE)
    parts = ["rlightning", *inside.with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_files(path: Path, files: Container[str]) -> set[str]:
    """Those of the package's files, but its first ``__init__``, that a file imports, wherever it does so."""
    found = set()
    for name in imports_any(path.read_text(encoding="utf-8"), "rlightning"):
        while name not in files:
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {"rlightning"}


def find_circles(graph: Mapping[str, Set[str]]) -> list[set[str]]:
    """The groups of names that reach each other: an entry for each circle, or for circles that meet."""
    reached: dict[str, set[str]] = {}
    for name in graph:
        waiting, seen = [*graph[name]], set()
        while waiting:
            if (other := waiting.pop()) not in seen:
                seen.add(other)
                waiting += graph[other]
        reached[name] = seen
    circles = [{other for other in reached[name] if name in reached[other]} for name in sorted(graph)]
    return [circle for i, circle in enumerate(circles) if circle and circle not in circles[:i]]


def test_page_shows_the_layers() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = text.partition("## Layers\n")[2].partition("```\n")[2].partition("```")[0]
    shown = [{*line.partition("  ")[0].split(", ")} for line in block.splitlines()]
    assert ({"__main__"}, *shown) == LAYERS


@pytest.mark.long
def test_files_import_each_other_in_no_circle() -> None:
    # Inside of functions and for types alone, too.
    files = {dotted_name(path): path for path in [*package_files(), *sorted(CALLBACKS.glob("*.py"))]}
    assert find_circles({name: imported_files(path, set(files)) - {name} for name, path in files.items()}) == []


WORKER_FILES = (
    "errors.py",
    "environments/agent_function.py",
    "environments/environment.py",
    "environments/python_sandbox.py",
    "environments/sandbox_process.py",
    "environments/self_correction.py",
    "environments/single_turn.py",
    "environments/step_environment.py",
    "environments/tools.py",
    "environments/verifiers/launcher.py",
    "environments/worker.py",
    "processes/*.py",
    "rpc/*.py",
)
"""What environment workers import, whose interpreter has nothing else of this package's but msgpack."""


NEWER = {"asyncio.timeout", "asyncio.TaskGroup", "asyncio.Runner", "enum.StrEnum", "typing.Self", "tomllib"}
"""What is often used of Python 3.11; workers run in 3.10 too."""
OWN_OF_WORKERS = {"environments/agent_function.py": {"openai"}, "environments/verifiers/launcher.py": {"verifiers"}}


def run_at_import(tree: ast.Module) -> ast.Module:
    """A package's ``__init__`` without what type checkers alone import, and what it exports when it is asked."""
    return ast.Module([node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.If)], [])


@pytest.mark.long
def test_workers_files_need_only_msgpack() -> None:
    waiting = [path for pattern in WORKER_FILES for path in PACKAGE.glob(pattern)]
    seen: set[Path] = set()
    found: dict[str, list[str]] = {}
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))
        names = list(imported(run_at_import(tree) if path.name == "__init__.py" else tree))
        used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert "sys.version_info" in used or not NEWER & {*names, *used}, path
        for parts in (name.split(".")[1:] for name in names if name.startswith("rlightning.")):
            for length in range(1, len(parts) + 1):
                module = PACKAGE.joinpath(*parts[:length])
                waiting += filter(Path.is_file, (module.with_suffix(".py"), module / "__init__.py"))
        others = {name.split(".")[0] for name in names} - {"rlightning", "msgpack", *sys.stdlib_module_names}
        # Of the interpreters that they are for.
        others -= OWN_OF_WORKERS.get(str(path.relative_to(PACKAGE)), set())
        if others:
            found[str(path.relative_to(PACKAGE))] = sorted(others)
    assert found == {}


def imported_first(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """What is imported when a module is: not what its functions import, nor what type checkers alone do."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported(node)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imported_first(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imported_first(list(ast.iter_child_nodes(node)))


def test_the_engines_process_knows_no_actor() -> None:
    waiting = [PACKAGE / "rollout" / "vllm" / f"{name}.py" for name in ("process", "weight_receiver", "scheduler")]
    seen: dict[Path, list[str]] = {}
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen[path] = list(imported_first(ast.parse(path.read_text(encoding="utf-8")).body))
        for parts in (name.split(".")[1:] for name in seen[path] if name.startswith("rlightning.")):
            for length in range(1, len(parts) + 1):
                module = PACKAGE.joinpath(*parts[:length])
                waiting += filter(Path.is_file, (module.with_suffix(".py"), module / "__init__.py"))
    assert PACKAGE / "rpc" / "peer.py" in seen
    models = PACKAGE / "models"
    of_configurations = {models / "__init__.py", models / "remote_code.py"}
    actors = {models, PACKAGE / "module", PACKAGE / "optim", PACKAGE / "algorithms"}
    assert not [path for path in seen.keys() - of_configurations if not actors.isdisjoint(path.parents)]
    assert not [name for names in seen.values() for name in names if name.split(".")[0] in ("lightning", "peft")]


def test_cli_and_trainer_import_no_concrete_callback() -> None:
    # They put a run together, and find callbacks by name when they run.
    for path in [PACKAGE / "trainer.py", *(PACKAGE / "cli").glob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        statements = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not [name for node in statements for name in imported(node) if name.startswith("rlightning.callbacks")]


def test_objectives_know_of_nothing_but_tensors() -> None:
    allowed = ("rlightning.objectives", "rlightning.types", "rlightning.errors")
    for path in sorted((PACKAGE / "objectives").glob("*.py")):
        names = imports_any(path.read_text(encoding="utf-8"), "rlightning", "lightning", "transformers")
        assert [n for n in names if not n.startswith(allowed)] == [], path


@pytest.mark.long
def test_only_the_rollout_package_imports_vllm() -> None:
    files = [path for path in source_files() if PACKAGE / "rollout" not in path.parents]
    assert offenders(files, "vllm") == {}


@pytest.mark.long
def test_only_the_ray_files_import_ray() -> None:
    names = [f"controller/{name}.py" for name in ("cluster", "object_store", "ray_internals", "worker", "worker_group")]
    ray_files = [PACKAGE / name for name in (*names, "rollout/ray_engines.py")] + [
        ROOT / "benchmarks" / "ray_traffic.py"
    ]
    assert offenders([path for path in source_files() if path not in ray_files], "ray") == {}


@pytest.mark.long
def test_barriers_and_synchronizations_go_through_one_place() -> None:
    files = [path for path in source_files() if path != PACKAGE / "parallel" / "device.py"]
    found = {str(p.relative_to(ROOT)): raw_synchronizations(p.read_text(encoding="utf-8")) for p in files}
    assert {name: calls for name, calls in found.items() if calls} == {}


@pytest.mark.processes
def test_cli_and_callbacks_load_neither_vllm_nor_ray() -> None:
    probe = (
        "import sys, rlightning.cli.lightning_cli, rlightning.callbacks as c\n"
        "for name in c.__all__: getattr(c, name)\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'vllm', 'ray', 'wandb', 'datasets'}))"
    )
    done = run_python("-c", probe, folder=ROOT)
    loaded = set(ast.literal_eval(done.stdout.splitlines()[-1]))
    assert not loaded & {"vllm", "ray"}


@pytest.mark.processes
def test_the_package_itself_imports_nothing_heavy() -> None:
    probe = "import sys, rlightning, rlightning.__main__; print('torch' in sys.modules or 'lightning' in sys.modules)"
    done = run_python("-c", probe, folder=ROOT)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("graph", "circles"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, [{"b", "c"}]),
        ({"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"c"}}, [{"a", "b"}, {"c", "d"}]),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}}, [{"a", "b", "c"}]),
    ],
)
def test_circles_of_imports_are_found(graph: dict[str, set[str]], circles: list[set[str]]) -> None:
    assert find_circles(graph) == circles


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import vllm.config", ["vllm.config"]),
        ("def f():\n    from vllm import LLM", ["vllm.LLM"]),
        ("from importlib import import_module\nimport_module('vllm')", ["vllm"]),
        ("import vllmish", []),
        ("'''import vllm'''", []),
    ],
)
def test_an_import_is_found_wherever_it_stands(source: str, found: list[str]) -> None:
    assert imports_any(source, "vllm") == found


@pytest.mark.parametrize(
    "source",
    [
        "torch.distributed.barrier()",
        "dist.barrier(group)",
        "import torch.distributed as c10d\nc10d.barrier()",
        "from torch import distributed as d\nd.monitored_barrier()",
        "from torch.distributed import barrier as meet",
        "torch.cuda.synchronize()",
        "torch.accelerator.synchronize()",
        "torch.cuda.current_stream().synchronize()",
        "event.synchronize()",
        "from torch.cuda import synchronize",
        "wait = dist.barrier",
        "getattr(dist, 'barrier')()",
    ],
)
def test_a_raw_synchronization_is_found(source: str) -> None:
    assert raw_synchronizations(source)


@pytest.mark.parametrize(
    "source",
    [
        "trainer.strategy.barrier('name')",
        "fabric.barrier('name')",
        "from rlightning.parallel.barrier import barrier\nbarrier('name')",
        "from rlightning.parallel import device as platform\nplatform.synchronize(device)",
        "import rlightning.parallel.device as p\np.synchronize(device)",
        "'After the barrier(), synchronize()'",
    ],
)
def test_the_one_primitive_is_none(source: str) -> None:
    assert not raw_synchronizations(source)
