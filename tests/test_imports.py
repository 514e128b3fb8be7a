"""Who may import whom: the rules that keep callbacks separable, objectives pure and starting up quick."""

import ast
from collections.abc import Iterator
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
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


def imports_any(source: str, *packages: str) -> list[str]:
    """Those of a source's imports that are one of ``packages`` or inside one."""
    return [n for n in imported(ast.parse(source)) if any(f"{n}.".startswith(f"{p}.") for p in packages)]


MEETINGS = {"barrier", "monitored_barrier"}
WAITS = {"synchronize"}
STRATEGIES = {"strategy", "self", "fabric"}
"""Who asks the strategy: its ``barrier`` is ours, and in the example of a Fabric loop it is that loop's."""
OWN_MODULES = {"rlightning.parallel.barrier", "rlightning.parallel.device"}


def raw_synchronizations(source: str) -> list[str]:
    """Barriers and waits for a device that go past the one primitive of ``rlightning.distributed``, by any alias.

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
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and name.value in MEETINGS | WAITS:
                found.append(ast.unparse(node))
    return found


def offenders(files: list[Path], *packages: str) -> dict[str, list[str]]:
    """By file, the imports that are one of ``packages``."""
    found = {str(p.relative_to(ROOT)): imports_any(p.read_text(encoding="utf-8"), *packages) for p in files}
    return {name: names for name, names in found.items() if names}


@pytest.mark.long
def test_the_package_imports_no_callback() -> None:
    # The Trainer and the command line put a run together: they find callbacks by name, when they run.
    finders = [PACKAGE / "cli.py", PACKAGE / "trainer.py"]
    files = [path for path in package_files() if path not in finders]
    assert offenders(files, "rlightning.callbacks", "callbacks") == {}
    for path in finders:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        statements = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not [name for node in statements for name in imported(node) if name.startswith("rlightning.callbacks")]


def test_callbacks_import_neither_cli_nor_algorithms() -> None:
    files = sorted(CALLBACKS.glob("*.py"))
    assert offenders(files, "rlightning.cli.lightning_cli", "rlightning.algorithms", "rlightning.module") == {}


def test_objectives_know_of_nothing_but_tensors() -> None:
    allowed = ("rlightning.objectives", "rlightning.types", "rlightning.errors")
    for path in sorted((PACKAGE / "objectives").glob("*.py")):
        names = imports_any(path.read_text(encoding="utf-8"), "rlightning", "lightning", "transformers")
        assert [n for n in names if not n.startswith(allowed)] == [], path


@pytest.mark.long
def test_only_the_rollout_package_imports_vllm() -> None:
    names = ("decode_attention.py", "engine_output.py", "engines_a_gpu.py", "scheduling.py")
    measure_vllm = [ROOT / "benchmarks" / name for name in names]
    files = [path for path in source_files() if PACKAGE / "rollout" not in path.parents and path not in measure_vllm]
    assert offenders(files, "vllm") == {}


@pytest.mark.long
def test_only_the_ray_files_import_ray() -> None:
    places = (PACKAGE / "distributed", ROOT / "benchmarks")
    files = [p for p in source_files() if not (p.parent in places and p.name.startswith("ray"))]
    assert offenders(files, "ray") == {}


@pytest.mark.long
def test_barriers_and_synchronizations_go_through_one_place() -> None:
    files = [path for path in source_files() if path != PACKAGE / "distributed" / "platform.py"]
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
