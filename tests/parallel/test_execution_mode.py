"""The decision table of the execution mode, row by row; and that it is settled once."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlightning.errors import ConfigError
from rlightning.parallel.execution_mode import (
    ExecutionMode,
    Launch,
    decide,
    execution_mode,
    is_controller,
    read_launch,
    resolve_execution_mode,
)

SPMD, CONTROLLER, WORKER = ExecutionMode
FOUR = Launch("torchrun", 4)
ONE = Launch("torchrun", 1)


pytestmark = pytest.mark.usefixtures("fresh_process")


# requested, declared by the strategy, accelerator, launch, controller -> mode
DECISIONS: list[tuple[Any, Any, str, Launch | None, str | None, ExecutionMode]] = [
    ("auto", None, "cpu", None, None, SPMD),
    ("auto", None, "cuda", None, None, SPMD),
    ("auto", None, "cuda", FOUR, None, SPMD),
    ("auto", SPMD, "cuda", FOUR, None, SPMD),
    ("auto", CONTROLLER, "cpu", None, None, CONTROLLER),
    ("auto", CONTROLLER, "cpu", ONE, None, CONTROLLER),
    ("auto", WORKER, "cuda", None, "head:6379", WORKER),
    ("auto", WORKER, "cpu", FOUR, "head:6379", WORKER),
    ("spmd", None, "cuda", FOUR, None, SPMD),
    ("spmd", SPMD, "cpu", None, None, SPMD),
    ("controller", None, "cpu", None, None, CONTROLLER),
    ("controller", CONTROLLER, "cpu", ONE, None, CONTROLLER),
    ("worker", None, "cuda", None, "head:6379", WORKER),
    ("worker", WORKER, "cuda", FOUR, "head:6379", WORKER),
]

CONTRADICTIONS: list[tuple[Any, Any, str, Launch | None, str | None, str]] = [
    ("auto", CONTROLLER, "cpu", FOUR, None, "one process, but torchrun started 4"),
    ("controller", None, "cpu", Launch("SLURM", 2), None, "one process, but SLURM started 2"),
    ("auto", CONTROLLER, "cuda", None, None, "touches no device, but the strategy's is 'cuda'"),
    ("controller", None, "mps", None, None, "touches no device, but the strategy's is 'mps'"),
    ("controller", None, "cpu", None, "head:6379", "'controller' takes no commands, but 'head:6379'"),
    ("auto", WORKER, "cuda", None, None, "'worker' needs a controller"),
    ("worker", None, "cuda", FOUR, None, "'worker' needs a controller"),
    ("auto", None, "cuda", None, "head:6379", "'spmd' takes no commands, but 'head:6379'"),
    ("spmd", CONTROLLER, "cpu", None, None, "mode='spmd' contradicts trainer.strategy, which declares 'controller'"),
    ("controller", SPMD, "cpu", None, None, "mode='controller' contradicts trainer.strategy, which declares 'spmd'"),
    ("worker", CONTROLLER, "cpu", None, "head:1", "mode='worker' contradicts trainer.strategy"),
    ("head", None, "cpu", None, None, "execution mode 'head' is unknown. Choose from: spmd, controller, worker."),
]


@pytest.mark.parametrize(("requested", "declared", "accelerator", "launch", "controller", "mode"), DECISIONS)
def test_execution_mode_is_decided_by_launch_and_accelerator(
    requested: Any, declared: Any, accelerator: str, launch: Launch | None, controller: str | None, mode: ExecutionMode
) -> None:
    got = decide(requested, declared=declared, accelerator=accelerator, launch=launch, controller=controller)
    assert got is mode


@pytest.mark.parametrize(("requested", "declared", "accelerator", "launch", "controller", "message"), CONTRADICTIONS)
def test_contradicting_execution_modes_are_refused(
    requested: Any, declared: Any, accelerator: str, launch: Launch | None, controller: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        decide(requested, declared=declared, accelerator=accelerator, launch=launch, controller=controller)


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, None),
        ({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4"}, FOUR),
        ({"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train"}, Launch("SLURM", 2)),
        ({"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "interactive"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, Launch("mpirun", 3)),
        ({"WORLD_SIZE": "8"}, Launch("the launcher (WORLD_SIZE)", 8)),
    ],
)
def test_launch_is_read_from_the_environment(environment: dict[str, str], launch: Launch | None) -> None:
    assert read_launch(environment) == launch


def test_declared_mode_must_fit_device_and_size() -> None:
    declares = {"execution_mode": "controller", "root_device": "cpu"}
    for other, message in (({"root_device": "cuda:0"}, "'cuda'"), ({"world_size": 2}, "trainer.num_nodes are for 2")):
        with pytest.raises(ConfigError, match=message):
            resolve_execution_mode(strategy=SimpleNamespace(**declares | other))
    assert execution_mode() is SPMD and not is_controller()  # a contradiction settles nothing
    assert resolve_execution_mode(strategy=SimpleNamespace(**declares, world_size=1)) is CONTROLLER
    assert is_controller()


def test_worker_mode_resolves_from_strategy_or_name() -> None:
    strategy = SimpleNamespace(execution_mode=WORKER, controller="head:6379")
    assert resolve_execution_mode(strategy=strategy) is WORKER
    assert resolve_execution_mode("worker", controller="head:6379") is WORKER


def test_controller_under_the_strategys_own_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sets WORLD_SIZE in the ranks, as launchers from outside do."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"trainer\.devices and trainer\.num_nodes are for 2\. Set both to 1"):
        resolve_execution_mode("controller", strategy=SimpleNamespace(world_size=2, root_device="cpu"))


def test_execution_mode_is_resolved_once() -> None:
    assert resolve_execution_mode("controller") is CONTROLLER
    assert resolve_execution_mode("controller") is CONTROLLER
    with pytest.raises(ConfigError, match="'spmd' contradicts 'controller', which this process has been resolved to"):
        resolve_execution_mode("spmd")
    assert execution_mode() is CONTROLLER
