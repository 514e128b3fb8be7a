"""Protocols for the capabilities of training loops and modules that callbacks use, one for each capability.

Lightning's Trainer, a Fabric, transformers' Trainer (by its adapter) and a user's loop have different capabilities, and
so have RLModule and a plain network. Hooks accept any loop and any module, and :func:`has` checks for a capability::

    if has(trainer, CountsSteps):
        step = trainer.global_step

Protocols that only one file uses, and no callback, are in that file.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from inspect import get_annotations
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
    from rlightning.types import Prompt, RolloutBatch, Trajectory
    from rlightning.types.batch_plan import BatchPlan

P = TypeVar("P")

StateDict = dict[str, Any]
"""A state dict of torch or Lightning, or a whole checkpoint: tensors, numbers and other values by name."""


def has(owner: object, protocol: Callable[..., P]) -> "TypeIs[P]":
    """Return whether an object has all members of a protocol, including members that its ``__getattr__`` provides."""
    return all(hasattr(owner, name) for name in members(protocol))


@cache
def members(protocol: Callable[..., object]) -> list[str]:
    """Return the names of a protocol's members, including those of the protocols that it extends."""
    assert isinstance(protocol, type)
    annotated = [name for kind in protocol.__mro__ for name in get_annotations(kind)]
    return sorted({*annotated, *(name for name in dir(protocol) if not name.startswith("_"))})


class CallsHooks(Protocol):
    """A training loop with a list of callbacks, on which :func:`rlightning.hooks.call_hook` calls hooks."""

    @property
    def callbacks(self) -> Sequence[object]: ...


Loop: TypeAlias = "lightning.pytorch.Trainer | lightning.fabric.Fabric | CallsHooks"
"""Any training loop. Lightning's Trainer has ``callbacks`` too, but its type hints do not tell."""

# Protocols of a loop


class CountsSteps(Protocol):
    """A training loop with its number of finished rollout steps as ``global_step``."""

    @property
    def global_step(self) -> int: ...


class HasFolder(Protocol):
    """A training loop with the run's folder as ``default_root_dir``; None if it has none."""

    @property
    def default_root_dir(self) -> str | Path | None: ...


class HasLoggers(Protocol):
    """A training loop with a list of ``loggers``, Lightning's or others."""

    @property
    def loggers(self) -> Sequence[object]: ...


class HasMetrics(CountsSteps, Protocol):
    """A training loop with the latest value of each metric, by name, as ``callback_metrics``."""

    @property
    def callback_metrics(self) -> "Mapping[str, Tensor]": ...


class HasStrategy(Protocol):
    """A training loop with a ``strategy``, such as Lightning's Trainer."""

    @property
    def strategy(self) -> object: ...


class HasRootDevice(Protocol):
    """A strategy with this rank's device as ``root_device``."""

    @property
    def root_device(self) -> "torch.device": ...


class HasDevice(Protocol):
    """A training loop, a module or an accelerator with its ``device``; None if unknown."""

    @property
    def device(self) -> "torch.device | str | None": ...


class HasAccelerator(Protocol):
    """A training loop with an ``accelerator`` of Hugging Face's accelerate, such as transformers' Trainer."""

    @property
    def accelerator(self) -> object: ...


class HasFitLoop(Protocol):
    """Lightning's Trainer, whose ``fit_loop`` counts the finished batches and steps."""

    @property
    def fit_loop(self) -> "FitLoop": ...


class HasCheckpoint(Protocol):
    """A training loop with the path of the checkpoint that it loads as ``ckpt_path``; None for no checkpoint."""

    @property
    def ckpt_path(self) -> str | Path | None: ...


class HasData(Protocol):
    """A training loop with its data module as ``datamodule``; None if it has none."""

    @property
    def datamodule(self) -> object: ...


class HasOptimizers(Protocol):
    """A training loop with a list of ``optimizers``, plain or wrapped by Lightning, Fabric or accelerate."""

    @property
    def optimizers(self) -> "Sequence[Optimizer]": ...


class HasOptimizer(Protocol):
    """A training loop with a single ``optimizer``, wrapped or not; None before it is created."""

    @property
    def optimizer(self) -> "Optimizer | None": ...


# Protocols of a callback and of a data module


class HasEnvironment(Protocol):
    """A callback with the ``environment`` that produces its rollouts; None if the policy only completes prompts."""

    @property
    def environment(self) -> object: ...


class HasPromptFormat(Protocol):
    """A data module with the :class:`~rlightning.data.formatting.PromptFormat` by which it converts rows to prompts."""

    @property
    def format(self) -> object: ...


class HasPromptLimit(Protocol):
    """A data module with a limit on prompt length in tokens, ``max_prompt_tokens``; None for the model's limit."""

    @property
    def max_prompt_tokens(self) -> int | None: ...


class HasValidationSets(Protocol):
    """A data module with a list of ``validation_sets``, each with a name and perhaps a sampling temperature."""

    @property
    def validation_sets(self) -> "Sequence[NamedSet]": ...


class NamedSet(Protocol):
    """A validation set with its name, and its sampling temperature; None for the run's temperature."""

    @property
    def name(self) -> str: ...

    @property
    def temperature(self) -> float | None: ...


class HasLongestLimit(Protocol):
    """A data module whose rows may limit their own completion tokens: ``longest_limit`` is the maximum, or 0."""

    @property
    def longest_limit(self) -> int: ...


class HasPredictPrompts(Protocol):
    """A data module with the prompts of ``trainer.predict()`` as ``predict_prompts``; None before it has read them."""

    @property
    def predict_prompts(self) -> "Sequence[Prompt] | None": ...


class LeavesOutPrompts(Protocol):
    """A data module whose ``leave_out()`` excludes prompts from a prediction, such as those already completed."""

    def leave_out(self, is_done: "Callable[[Prompt], bool] | None", /) -> None: ...


# Protocols of a tokenizer


class HasBackend(Protocol):
    """A "fast" tokenizer of transformers, with the object of the tokenizers library as ``backend_tokenizer``."""

    @property
    def backend_tokenizer(self) -> "Tokenizer": ...


# Protocols of a module


class SampledPolicy(Protocol):
    """What a rollout callback needs of a module to sample from its policy; ``examples/plain_loop.py`` has a small one.

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
    """A module with the version of its weights, ``weight_version``, which grows when the weights change."""

    @property
    def weight_version(self) -> int: ...


class AdapterSettings(Protocol):
    """The settings of a LoRA adapter: its rank, the adapted layers with their sizes, and its number of parameters."""

    @property
    def rank(self) -> int: ...

    @property
    def modules(self) -> "Mapping[str, tuple[int, int]]": ...

    @property
    def num_parameters(self) -> int: ...

    def peft_settings(self) -> dict[str, object]: ...


class HasAdapter(Protocol):
    """A module that may train a LoRA adapter of a frozen base model; ``adapter`` is None if it trains all weights.

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
    """Return the settings of the adapter that a module trains; None if it trains all weights."""
    return module.adapter if has(module, HasAdapter) else None


class Generates(Protocol):
    """A module that declares, by ``generates``, whether it trains on sampled completions or on the data set's."""

    @property
    def generates(self) -> bool: ...


class SelectsSampled(Protocol):
    """A module whose ``select_sampled()`` returns a batch of only the trajectories to train on, without failed ones."""

    def select_sampled(self, batch: "RolloutBatch") -> "RolloutBatch": ...


class HasTensorParallelRank(Protocol):
    """A module with this rank's index in its tensor-parallel group, whose ranks all get the same batch."""

    @property
    def tensor_parallel_rank(self) -> int: ...


class HasTensorParallelSize(Protocol):
    """A module or strategy with the number of ranks that split each layer, ``tensor_parallel_size``."""

    @property
    def tensor_parallel_size(self) -> int: ...


class HasModel(Protocol):
    """A module with its model's path or Hugging Face name as ``model_path``."""

    @property
    def model_path(self) -> str: ...


class HasSampling(Protocol):
    """A module with the sampling parameters of its completions, such as the temperature, as ``sampling``."""

    @property
    def sampling(self) -> "DataclassInstance": ...


class CountsTimeouts(Protocol):
    """A module with ``count_timeouts``: whether trajectories that have timed out count as sampled."""

    @property
    def count_timeouts(self) -> bool: ...


class ScoresGroups(Protocol):
    """A module that can call its reward functions on a prompt's trajectories before the step that takes them."""

    def serve_rewards(self, num_ranks: int) -> "Callable[[Sequence[Trajectory]], Awaitable[None]] | None":
        """Prepare to score prompts of ``num_ranks`` ranks, and return a coroutine function that sets the
        ``reward_results`` of trajectories; None if the module needs a step's batch to reward it.
        """


class HasGroupSize(Protocol):
    """A module with the number of trajectories that it samples of each prompt, ``samples_per_prompt``."""

    @property
    def samples_per_prompt(self) -> int: ...


class HasConfig(Protocol):
    """A module with the transformers configuration of its network as ``model_config``."""

    @property
    def model_config(self) -> "PreTrainedConfig": ...


class HasPlan(Protocol):
    """A module with the numbers of prompts, samples, minibatches and epochs of a training step as ``plan``."""

    @property
    def plan(self) -> "BatchPlan": ...


class HasCosts(Protocol):
    """A module whose ``costs()`` returns the floating point operations of training on each sequence of a batch: [N]."""

    def costs(self, batch: "RolloutBatch") -> "Tensor": ...


class HasRoles(Protocol):
    """A module with several networks: ``roles`` maps a role, such as "reference", to its network and settings."""

    @property
    def roles(self) -> Mapping[str, object]: ...


class SumsOverRanks(Protocol):
    """A module whose ``world_sum()`` sums a tensor over all ranks; every rank must call it."""

    def world_sum(self, values: "Tensor") -> "Tensor": ...


class LogsMetrics(Protocol):
    """A module whose ``log_dict()`` logs metrics by name."""

    def log_dict(self, metrics: Mapping[str, float], /) -> None: ...


class Closes(Protocol):
    """An object with processes or other resources that :meth:`close` frees."""

    def close(self) -> None: ...


class HasUsualOptimizers(Protocol):
    """A module that says, by ``has_usual_optimizers``, whether ``configure_optimizers()`` is this package's.

    Other optimizers are checked before engines start.
    """

    @property
    def has_usual_optimizers(self) -> bool: ...


class SavesHF(Protocol):
    """A module whose ``save_hf()`` writes its model as a Hugging Face folder."""

    def save_hf(self, path: Path) -> None: ...


class SavesAdapter(HasAdapter, Protocol):
    """A module whose ``save_adapter()`` writes its adapter alone as a PEFT folder."""

    def save_adapter(self, path: Path) -> None: ...


def generates(module: object) -> bool:
    """Return whether training samples completions, and so needs an engine; True if the module does not declare it."""
    return module.generates if has(module, Generates) else True


def callbacks_of(loop: object) -> Sequence[object]:
    """Return a loop's callbacks; empty for a loop without callbacks."""
    return loop.callbacks if has(loop, CallsHooks) else ()
