"""That each kind of loop and module has what callbacks ask of it: at run time, and (by mypy) in its types."""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol

import pytest
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.strategies import Strategy
from loops import Loop as PlainLoop
from plain_loop import Policy as ExamplePolicy
from torch import nn
from transformers import PreTrainedTokenizerFast
from transformers import Trainer as TransformersTrainer
from typing_extensions import is_protocol

from rlightning import protocols
from rlightning.algorithms import GRPO
from rlightning.callbacks import TransformersRollout, VLLMRollout
from rlightning.data import PromptDataModule, ValidationSet
from rlightning.models.adapter import LoRA
from rlightning.parallel import FSDP
from rlightning.protocols import (
    AdapterSettings,
    CallsHooks,
    Closes,
    CountsSteps,
    CountsTimeouts,
    Generates,
    HasAccelerator,
    HasAdapter,
    HasBackend,
    HasCheckpoint,
    HasConfig,
    HasCosts,
    HasData,
    HasDevice,
    HasEnvironment,
    HasFitLoop,
    HasFolder,
    HasGroupSize,
    HasLoggers,
    HasLongestLimit,
    HasMetrics,
    HasModel,
    HasOptimizer,
    HasOptimizers,
    HasPlan,
    HasPredictPrompts,
    HasPromptFormat,
    HasPromptLimit,
    HasRoles,
    HasRootDevice,
    HasSampling,
    HasStrategy,
    HasTensorParallelRank,
    HasTensorParallelSize,
    HasUsualOptimizers,
    HasValidationSets,
    HasWeightVersion,
    LeavesOutPrompts,
    LogsMetrics,
    Loop,
    NamedSet,
    SampledPolicy,
    SavesAdapter,
    SavesHF,
    ScoresGroups,
    SelectsSampled,
    SumsOverRanks,
    callbacks_of,
    generates,
    has,
    members,
)
from rlightning.transformers_adapter import TransformersAdapter

# Functions that mypy checks: their first lines say which protocols the type of their argument satisfies.


def of_lightning(
    trainer: LightningTrainer,
) -> tuple[Loop, HasMetrics, HasFolder, HasStrategy, HasOptimizers, HasCheckpoint, HasFitLoop]:
    """Return Lightning's Trainer as each protocol of a loop that its types satisfy."""
    return trainer, trainer, trainer, trainer, trainer, trainer, trainer


def of_fabric(fabric: Fabric) -> tuple[Loop, HasLoggers, HasStrategy, HasDevice]:
    """Return a Fabric as each protocol of a loop that its types satisfy."""
    return fabric, fabric, fabric, fabric


def of_plain_loop(loop: PlainLoop) -> tuple[Loop, CallsHooks, CountsSteps, HasFolder, HasOptimizer, HasDevice]:
    """Return a loop in plain PyTorch as each protocol of a loop that its types satisfy."""
    return loop, loop, loop, loop, loop, loop


def of_transformers(adapter: TransformersAdapter) -> tuple[Loop, CallsHooks, CountsSteps, HasFolder, HasLoggers]:
    """Return the adapter of transformers' Trainer as each protocol of a loop that its types satisfy."""
    return adapter, adapter, adapter, adapter, adapter


def of_accelerate(trainer: TransformersTrainer, accelerator: Accelerator) -> tuple[HasAccelerator, HasDevice]:
    """Return transformers' Trainer and its accelerator as the protocols that their types satisfy."""
    return trainer, accelerator


def of_strategy(strategy: Strategy, sharded: FSDP) -> tuple[HasRootDevice, HasRootDevice, HasTensorParallelSize]:
    """Return strategies as each protocol that their types satisfy."""
    return strategy, sharded, sharded


def of_rollout(vllm: VLLMRollout, in_process: TransformersRollout) -> tuple[HasEnvironment, HasEnvironment]:
    """Return the rollout callbacks as the protocol that their types satisfy."""
    return vllm, in_process


def of_data(
    data: PromptDataModule, validation: ValidationSet
) -> tuple[
    HasPromptFormat,
    HasPromptLimit,
    HasValidationSets,
    NamedSet,
    HasLongestLimit,
    HasPredictPrompts,
    LeavesOutPrompts,
]:
    """Return the data module, and one of its validation sets, as each protocol that their types satisfy."""
    return data, data, data, validation, data, data, data


def of_tokenizer(tokenizer: PreTrainedTokenizerFast) -> HasBackend:
    """Return a fast tokenizer as the protocol that its types satisfy."""
    return tokenizer


def of_algorithm(module: GRPO) -> tuple[Generates, HasModel, HasSampling, HasGroupSize, HasPlan, HasRoles, HasConfig]:
    """Return an algorithm as each protocol of a module's settings that its types satisfy."""
    return module, module, module, module, module, module, module


def of_policy(module: GRPO) -> tuple[SampledPolicy, HasWeightVersion, HasDevice, HasAdapter, SavesAdapter, SavesHF]:
    """Return an algorithm as each protocol of a module's weights that its types satisfy."""
    return module, module, module, module, module, module


def of_step(
    module: GRPO,
) -> tuple[SelectsSampled, HasCosts, LogsMetrics, HasUsualOptimizers, Closes, CountsTimeouts, ScoresGroups]:
    """Return an algorithm as each protocol of a module's methods that its types satisfy."""
    return module, module, module, module, module, module, module


def of_ranks(module: GRPO) -> tuple[HasTensorParallelRank, HasTensorParallelSize, SumsOverRanks]:
    """Return an algorithm as each protocol of a module's ranks that its types satisfy."""
    return module, module, module


def of_adapter(adapter: LoRA) -> AdapterSettings:
    """Return the settings of an adapter as the protocol that their types satisfy."""
    return adapter


def of_example(policy: ExamplePolicy) -> tuple[SampledPolicy, HasWeightVersion, HasModel, HasDevice]:
    """Return the module of ``examples/plain_loop.py`` as each protocol of a module that its types satisfy."""
    return policy, policy, policy, policy


def test_each_protocol_is_named_in_this_file() -> None:
    kinds = [name for name, kind in vars(protocols).items() if is_protocol(kind) and kind is not Protocol]
    named = {node.id for node in ast.walk(ast.parse(Path(__file__).read_text("utf-8"))) if isinstance(node, ast.Name)}
    assert len(kinds) > 40 and sorted(set(kinds) - named) == []


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
