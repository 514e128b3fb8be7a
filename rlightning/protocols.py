"""Protocols for the capabilities of training loops and modules that callbacks use, one for each capability.

Lightning's Trainer, a Fabric, transformers' Trainer (by its adapter) and a user's loop have different capabilities, and
so have RLModule and a plain network. Hooks accept any loop and any module, and :func:`has` checks for a capability::

    if has(trainer, CountsSteps):
        step = trainer.global_step

Protocols that only one file uses, and no callback, are in that file.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    import lightning.fabric
    import lightning.pytorch
    import torch
    from _typeshed import DataclassInstance
    from tokenizers import Tokenizer
    from torch import Tensor
    from torch.optim import Optimizer
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase
    from typing_extensions import TypeIs

    from rlightning.lightning_internals import FitLoop
    from rlightning.types import Prompt, RolloutBatch
    from rlightning.types.batch_plan import BatchPlan

P = TypeVar("P")

StateDict = dict[str, Any]
"""A state dict of torch or Lightning, or a whole checkpoint: tensors, numbers and other values by name."""


def has(owner: object, protocol: Callable[..., P]) -> "TypeIs[P]":
    """Return whether an object has all members of a protocol, including members that its ``__getattr__`` provides."""
    return all(hasattr(owner, name) for name in members(protocol))


@cache
def members(protocol: Callable[..., object]) -> list[str]:
    """Return the names of a protocol's members."""
    return sorted({*protocol.__annotations__, *(name for name in dir(protocol) if not name.startswith("_"))})


class CallsHooks(Protocol):
    """A loop that has callbacks, as :func:`rlightning.hooks.fire` requires."""

    @property
    def callbacks(self) -> Sequence[object]: ...


Loop: TypeAlias = "lightning.pytorch.Trainer | lightning.fabric.Fabric | CallsHooks"
"""Any training loop. Lightning's Trainer has ``callbacks`` too, but its type hints do not tell."""

# Protocols of a loop


class CountsSteps(Protocol):
    """A loop with the number of finished rollout steps."""

    @property
    def global_step(self) -> int: ...


class HasFolder(Protocol):
    """A loop with the folder of the run."""

    @property
    def default_root_dir(self) -> str | Path | None: ...


class HasLoggers(Protocol):
    """A loop with loggers, of Lightning or others."""

    @property
    def loggers(self) -> Sequence[object]: ...


class HasMetrics(CountsSteps, Protocol):
    """A loop with the latest value of each metric."""

    @property
    def callback_metrics(self) -> "Mapping[str, Tensor]": ...


class HasStrategy(Protocol):
    """A Lightning Trainer or another loop with a strategy."""

    @property
    def strategy(self) -> object: ...


class HasRootDevice(Protocol):
    """A strategy that knows the device of its rank."""

    @property
    def root_device(self) -> "torch.device": ...


class HasDevice(Protocol):
    """A loop, a module or an accelerator that knows its device."""

    @property
    def device(self) -> "torch.device | str | None": ...


class HasAccelerator(Protocol):
    """A loop on accelerate, such as transformers' Trainer."""

    @property
    def accelerator(self) -> object: ...


class HasFitLoop(Protocol):
    """Lightning's Trainer, whose fit loop has the progress of training."""

    @property
    def fit_loop(self) -> "FitLoop": ...


class HasCheckpoint(Protocol):
    """A loop that may resume from a checkpoint."""

    @property
    def ckpt_path(self) -> str | Path | None: ...


class HasData(Protocol):
    """A loop that may have a data module."""

    @property
    def datamodule(self) -> object: ...


class HasOptimizers(Protocol):
    """A loop with several optimizers, plain or wrapped by Lightning, Fabric or accelerate."""

    @property
    def optimizers(self) -> "Sequence[Optimizer]": ...


class HasOptimizer(Protocol):
    """A loop with one optimizer, wrapped or not."""

    @property
    def optimizer(self) -> "Optimizer | None": ...


# Protocols of a callback and of a data module


class HasEnvironment(Protocol):
    """A callback whose rollouts may come from an environment."""

    @property
    def environment(self) -> object: ...


class HasPromptFormat(Protocol):
    """A data module with the :class:`~rlightning.data.formatting.PromptFormat` by which it converts rows to prompts."""

    @property
    def format(self) -> object: ...


class HasPromptLimit(Protocol):
    """A data module with a limit on prompt length in tokens; None for the model's limit."""

    @property
    def max_prompt_tokens(self) -> int | None: ...


class HasValidationSets(Protocol):
    """A data module with validation sets."""

    @property
    def validation_sets(self) -> "Sequence[NamedSet]": ...


class NamedSet(Protocol):
    """A validation set with a name."""

    @property
    def name(self) -> str: ...

    @property
    def temperature(self) -> float | None: ...


class HasLongestLimit(Protocol):
    """A data module with the largest limit on completion tokens that a row has of its own; 0 if no row has one."""

    @property
    def longest_limit(self) -> int: ...


class HasPredictPrompts(Protocol):
    """A data module that has read the prompts of a prediction."""

    @property
    def predict_prompts(self) -> "Sequence[Prompt] | None": ...


class LeavesOutPrompts(Protocol):
    """A data module that can skip prompts, such as those already completed."""

    def leave_out(self, is_done: "Callable[[Prompt], bool] | None", /) -> None: ...


# Protocols of a tokenizer


class HasBackend(Protocol):
    """A tokenizer of transformers that is based on the tokenizers library."""

    @property
    def backend_tokenizer(self) -> "Tokenizer": ...


# Protocols of a module


class SampledPolicy(Protocol):
    """A module whose policy rollout callbacks can sample from. ``examples/plain_loop.py`` has a small one.

    Attributes:
        weight_version: version of the actor's weights; the training loop increases it when it changes the weights.
    """

    weight_version: int

    @property
    def model_path(self) -> str: ...

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase": ...

    @property
    def max_model_length(self) -> int: ...

    @property
    def device(self) -> "torch.device": ...

    def named_weights(self) -> "Iterator[tuple[str, Tensor]]": ...

    def score(self, batch: "RolloutBatch", dtype: "torch.dtype", /) -> "Tensor": ...


class HasWeightVersion(Protocol):
    """A module that counts the versions of its weights."""

    @property
    def weight_version(self) -> int: ...


class AdapterSettings(Protocol):
    """The settings of an adapter (LoRA) that other modules of this package use."""

    @property
    def rank(self) -> int: ...

    @property
    def modules(self) -> "Mapping[str, tuple[int, int]]": ...

    @property
    def num_parameters(self) -> int: ...

    def peft_settings(self) -> dict[str, object]: ...


class HasAdapter(Protocol):
    """A module that may train an adapter of a frozen base model.

    Attributes:
        sends_adapter: whether the adapter is sent to samplers separately, rather than merged into the base; set by the
            rollout callback.
    """

    sends_adapter: bool

    @property
    def adapter(self) -> AdapterSettings | None: ...

    def adapter_weights(self) -> "Iterator[tuple[str, Tensor]]": ...

    def base_weights(self) -> "Iterator[tuple[str, Tensor]]": ...

    def adapter_off(self) -> "AbstractContextManager[None]": ...

    def perturbed_adapter(self) -> "AbstractContextManager[None]": ...


def adapter_of(module: object) -> AdapterSettings | None:
    """Return the adapter that a module trains; None if it trains all weights."""
    return module.adapter if has(module, HasAdapter) else None


class Generates(Protocol):
    """A module that may train on the data set's completions instead of sampled ones."""

    @property
    def generates(self) -> bool: ...


class SelectsSampled(Protocol):
    """A module that selects which trajectories count as sampled."""

    def select_sampled(self, batch: "RolloutBatch") -> "RolloutBatch": ...


class HasTensorParallelRank(Protocol):
    """A module whose tensor-parallel ranks share one batch."""

    @property
    def tensor_parallel_rank(self) -> int: ...


class HasTensorParallelSize(Protocol):
    """A module that several tensor-parallel ranks compute together."""

    @property
    def tensor_parallel_size(self) -> int: ...


class HasModel(Protocol):
    """A module with the path or hub name of its model."""

    @property
    def model_path(self) -> str: ...


class HasSampling(Protocol):
    """A module with the sampling parameters of its completions."""

    @property
    def sampling(self) -> "DataclassInstance": ...


class HasGroupSize(Protocol):
    """A module with the number of trajectories in a group."""

    @property
    def samples_per_prompt(self) -> int: ...


class HasConfig(Protocol):
    """A module with the configuration of its network."""

    @property
    def model_config(self) -> "PreTrainedConfig": ...


class HasPlan(Protocol):
    """A module with the sizes of a training step: prompts, samples, minibatches, epochs."""

    @property
    def plan(self) -> "BatchPlan": ...


class HasCosts(Protocol):
    """A module that estimates the floating point operations of an update."""

    def costs(self, batch: "RolloutBatch") -> "Tensor": ...


class HasRoles(Protocol):
    """A module with several models, by role."""

    @property
    def roles(self) -> Mapping[str, object]: ...


class SumsOverRanks(Protocol):
    """A module that can sum a tensor over ranks."""

    def world_sum(self, values: "Tensor") -> "Tensor": ...


class LogsMetrics(Protocol):
    """A module that logs metrics."""

    def log_dict(self, metrics: Mapping[str, float], /) -> None: ...


class Closes(Protocol):
    """An object with processes or other resources that :meth:`close` frees."""

    def close(self) -> None: ...


class HasUsualOptimizers(Protocol):
    """A module that declares whether its optimizers are the package's own, which need no check."""

    @property
    def has_usual_optimizers(self) -> bool: ...


class SavesHF(Protocol):
    """A module that can be exported."""

    def save_hf(self, path: Path) -> None: ...


class SavesAdapter(HasAdapter, Protocol):
    """A module whose adapter can be exported separately."""

    def save_adapter(self, path: Path) -> None: ...


def generates(module: object) -> bool:
    """Return whether training samples completions, and so needs an engine; True if the module does not declare it."""
    return module.generates if has(module, Generates) else True


def callbacks_of(loop: object) -> Sequence[object]:
    """Return a loop's callbacks; empty for a loop without callbacks."""
    return loop.callbacks if has(loop, CallsHooks) else ()
