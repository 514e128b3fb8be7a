"""That each kind of loop and module has what callbacks ask of it: at run time, and (by mypy) in its types."""

from pathlib import Path
from types import SimpleNamespace
from typing import Protocol

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from loops import Loop as PlainLoop
from torch import nn

from rlightning.algorithms import GRPO
from rlightning.protocols import (
    CallsHooks,
    CountsSteps,
    Generates,
    HasCheckpoint,
    HasConfig,
    HasData,
    HasFolder,
    HasGroupSize,
    HasLoggers,
    HasMetrics,
    HasModel,
    HasOptimizer,
    HasOptimizers,
    HasPlan,
    HasRoles,
    HasSampling,
    HasStrategy,
    HasTensorParallelRank,
    HasTensorParallelSize,
    LogsMetrics,
    Loop,
    SavesHF,
    SumsOverRanks,
    callbacks_of,
    generates,
    has,
    members,
)
from rlightning.transformers_adapter import TransformersAdapter


def of_lightning(
    trainer: LightningTrainer,
) -> tuple[Loop, HasMetrics, HasFolder, HasStrategy, HasOptimizers, HasCheckpoint]:
    """What the types of Lightning's Trainer say."""
    return trainer, trainer, trainer, trainer, trainer, trainer


def of_fabric(fabric: Fabric) -> tuple[Loop, HasLoggers, HasStrategy]:
    """What the types of a Fabric say."""
    return fabric, fabric, fabric


def of_plain_loop(loop: PlainLoop) -> tuple[Loop, CallsHooks, CountsSteps, HasFolder, HasOptimizer]:
    """What the types of a loop in plain PyTorch say."""
    return loop, loop, loop, loop, loop


def of_transformers(adapter: TransformersAdapter) -> tuple[Loop, CallsHooks, CountsSteps, HasFolder, HasLoggers]:
    """What the types of the adapter of transformers' Trainer say."""
    return adapter, adapter, adapter, adapter, adapter


def of_algorithm(module: GRPO) -> tuple[Generates, HasModel, HasSampling, HasGroupSize, HasPlan, HasRoles, HasConfig]:
    """What the types of an algorithm say of its settings."""
    return module, module, module, module, module, module, module


def of_ranks(module: GRPO) -> tuple[HasTensorParallelRank, HasTensorParallelSize, SumsOverRanks, SavesHF, LogsMetrics]:
    """What the types of an algorithm say of its ranks, and what it can do."""
    return module, module, module, module, module


def test_has_lightning_trainer(tmp_path: Path) -> None:
    trainer = LightningTrainer(default_root_dir=tmp_path, accelerator="cpu", logger=False, barebones=True)
    for protocol in (CallsHooks, CountsSteps, HasFolder, HasLoggers, HasMetrics, HasStrategy, HasOptimizers, HasData):
        assert has(trainer, protocol)
    assert not has(trainer, HasOptimizer)
    assert callbacks_of(trainer) == trainer.callbacks  # type: ignore[attr-defined]


def test_has_fabric() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    assert has(fabric, HasStrategy) and has(fabric, HasLoggers)
    assert not has(fabric, CountsSteps)
    assert callbacks_of(fabric) == ()


def test_has_plain_loop(tmp_path: Path) -> None:
    loop = PlainLoop(tmp_path)
    assert has(loop, CallsHooks) and has(loop, CountsSteps) and has(loop, HasOptimizer) and not has(loop, HasMetrics)


def test_has_transformers_adapter() -> None:
    trainer = SimpleNamespace(state=SimpleNamespace(global_step=3), args=SimpleNamespace(output_dir="o"), accelerator=1)
    adapter = TransformersAdapter(trainer, [])  # type: ignore[arg-type]
    assert has(adapter, CountsSteps) and adapter.global_step == 3
    assert hasattr(adapter, "accelerator") and not has(adapter, HasOptimizer)


@pytest.mark.parametrize(("module", "expected"), [(nn.Linear(1, 1), True), (SimpleNamespace(generates=False), False)])
def test_generates_module_without_word(module: object, expected: bool) -> None:
    assert generates(module) is expected


def test_has_members_by_getattr() -> None:
    class Delegates(LightningModule):
        def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
            return torch.zeros(1) if name == "plan" else super().__getattr__(name)

    assert has(Delegates(), HasPlan) and not has(Delegates(), SumsOverRanks)


def test_has_annotations_of_extended_protocol() -> None:
    class Named(Protocol):
        name: str

    class Sized(Named, Protocol):
        size: int

    assert members(Sized) == ["name", "size"]
    assert not has(SimpleNamespace(size=1), Sized) and has(SimpleNamespace(size=1, name="a"), Sized)
