"""Receives weights in each of vLLM's workers, which load this module as ``worker_extension_cls``.

Weights arrive under transformers' names, and are converted to the names and shapes in a model's files for loading. The
first sync checks that the model has read each weight; every sync checks that all parameters were set.
"""

import pickle
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pkgutil import resolve_name
from types import MethodWrapperType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform

from rlightning.models.remote_code import read_config
from rlightning.parallel.device import synchronize_stream
from rlightning.processes.process_group import die_with_parent
from rlightning.rollout.vllm.packed_weights import keep_experts_unpacked, pack_weights, unpack_weights
from rlightning.rollout.vllm.vllm_internals import keep_linears_unpacked
from rlightning.rollout.weights import ChunkPlan, driver
from rlightning.torch_internals import copy_tensors

if TYPE_CHECKING:
    from rlightning.rollout.vllm.adapters import InstalledAdapter

die_with_parent()  # workers must not outlive an engine process that is killed, and so cannot end them

if current_platform.is_cpu():
    keep_linears_unpacked()
    keep_experts_unpacked()


class WorkerExtension:
    """A mixin of vLLM's worker; its methods are called by ``AsyncLLM.collective_rpc``."""

    model_runner: Any
    vllm_config: VllmConfig
    device: torch.device
    rank: int
    _rl_receiver: driver.WeightReceiver | None = None
    _rl_stored_form: "StoredForm | None" = None
    _rl_loaded: set[str]
    _rl_unread: set[str]
    _rl_adapter: dict[str, Tensor]
    _rl_installed: "InstalledAdapter | None" = None
    _rl_is_checked = False

    def rl_open_receiver(self, receivers: list[bytes]) -> None:
        """Unpickle and open this worker's receiver, ``receivers[rank]``, and close the previous one."""
        if self._rl_receiver is not None:
            self._rl_receiver.close()
            self._rl_receiver = None
        receiver: driver.WeightReceiver = pickle.loads(receivers[self.rank])
        receiver.open(torch.device(self.device))
        self._rl_receiver, self._rl_adapter, self._rl_installed = receiver, {}, None
        if self._rl_stored_form is None:
            with set_current_vllm_config(self.vllm_config):  # vLLM's transformers backend has changed the classes
                self._rl_stored_form = StoredForm(self.vllm_config.model_config)

    def rl_receive_weights(self, chunk: int) -> tuple[list[str], list[str]]:
        """Wait for a chunk of weights, and load it into the model; return names of unset parameters and unread weights.

        Returns:
            After a sync's last chunk, the model's parameters that no chunk has set; in the first sync also the weights
            that the model has not read. After an adapter's last chunk, its modules that the model does not have, as
            such weights. Else empty lists.
        """
        stored_form = self._rl_stored_form
        assert self._rl_receiver is not None and stored_form is not None, "rl_open_receiver comes first"
        model, plan, received = self.model_runner.model, self._rl_receiver.plan, self._rl_receiver.receive(chunk)
        if chunk < plan.num_adapter_chunks:
            return [], self._rl_receive_adapter(chunk, plan, received)
        with self._rl_own_layers(plan):
            if chunk == plan.num_adapter_chunks:
                self._rl_loaded, self._rl_unread = set(), set()
                unpack_weights(model)
            reads = ReadWeights()
            try:
                with nullcontext() if self._rl_is_checked else reads:
                    self._rl_loaded |= set(model.load_weights(reads.watch(stored_form.convert(received))) or ())
            except (AssertionError, KeyError, RuntimeError, ValueError) as error:
                raise ValueError(
                    f"the actor's {stored_form.latest} does not fit the engine's model: {type(error).__name__} "
                    f"{error}. The engine must be of the actor's architecture."
                ) from error
            if not self._rl_is_checked:
                self._rl_unread |= reads.unread()
            synchronize_stream(self.device)  # the sender refills the bucket after this returns
            if chunk < len(plan.chunks) - 1:
                return [], []
            pack_weights(model, self.vllm_config.model_config.dtype)  # type: ignore[arg-type]  # a torch.dtype by now
            self._rl_is_checked = True  # the names of later syncs are the same
            return sorted(unset_parameters(model, self._rl_loaded)), sorted(self._rl_unread)

    def _rl_own_layers(self, plan: ChunkPlan) -> AbstractContextManager[None]:
        """Context manager in which layers that are wrapped for an adapter are replaced by the model's own."""
        if not plan.num_adapter_chunks:
            return nullcontext()
        from rlightning.rollout.vllm.adapters import without_wrappers

        return without_wrappers(self.model_runner.model)

    def _rl_receive_adapter(self, chunk: int, plan: ChunkPlan, received: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Store a chunk of an adapter; after the last, install the adapter and return weights without a module."""
        # Copies: the sender refills the bucket, and vLLM scales the tensors in place.
        names, tensors = map(list, zip(*received, strict=True))
        if names[0] not in self._rl_adapter:  # the receiver's first sync
            self._rl_adapter |= dict(zip(names, map(torch.empty_like, tensors), strict=True))
        copy_tensors([self._rl_adapter[name] for name in names], tensors)
        synchronize_stream(self.device)
        if chunk < plan.num_adapter_chunks - 1:
            return []
        assert plan.adapter is not None
        return sorted(self.rl_install_adapter(plan.adapter, self._rl_adapter))

    def rl_install_adapter(self, settings: Mapping[str, object], weights: Mapping[str, Tensor]) -> Sequence[str]:
        """Replace the worker's adapter; return the names of its modules that the engine's model does not have.

        One receiver's settings and tensors are always the same; only the tensors' values change.
        """
        from rlightning.rollout.vllm.adapters import install_adapter

        last, self._rl_installed = self._rl_installed, None  # None if this fails
        manager, device = self.model_runner.lora_manager, torch.device(self.device)
        self._rl_installed = install_adapter(manager, settings, weights, device, last)
        return self._rl_installed.unplaced

    def rl_ping(self) -> None:
        """Do nothing: a worker that hangs does not return."""


class StoredForm:
    """Converts weights, one by one, from transformers' parameters to the format of a model's files.

    Files have other names for some weights, and one tensor for each expert instead of one for each layer.

    Attributes:
        latest: name and shape of the last converted weight.
    """

    def __init__(self, model: ModelConfig) -> None:
        config = read_config(model.model, trust_remote_code=model.trust_remote_code)
        if type(config).__module__.startswith("vllm."):  # registered by vLLM in place of transformers' class
            name = CONFIG_MAPPING_NAMES[config.model_type]
            config = resolve_name(f"transformers:{name}").from_pretrained(model.model)
        with torch.device("meta"):
            policy: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        self.latest = ""
        self._policy = policy if get_model_conversion_mapping(policy, add_legacy=False) else None

    def convert(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors that a model's files contain for these weights; most weights are unchanged."""
        for name, weight in weights:
            self.latest = f"{name} {tuple(weight.shape)}"
            if self._policy is None:
                yield name, weight
            else:
                yield from revert_weight_conversion(self._policy, {name: weight}).items()


class ReadWeights(TorchFunctionMode):
    """Context manager that records which weights torch's operations read, to find those that a model's loader skips.

    A model's loader silently skips a weight of an unknown name, without reading its tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self._addresses: dict[str, range] = {}
        self._read: set[int] = set()
        self._is_recording = True

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights, which are contiguous, and record their addresses."""
        self._is_recording = False  # operations that create the tensors are not the loader's
        for name, weight in weights:
            self._addresses[name] = range(weight.data_ptr(), weight.data_ptr() + weight.nbytes)
            self._is_recording = True
            yield name, weight
            self._is_recording = False
        self._is_recording = True

    def unread(self) -> set[str]:
        """The names of the watched weights that no operation has read."""
        read = [*sorted(self._read), sys.maxsize]
        return {
            name
            for name, addresses in self._addresses.items()
            if addresses and read[bisect_left(read, addresses.start)] not in addresses
        }

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Record the tensors that ``func`` reads; access to a property such as the shape does not count."""
        kwargs = kwargs or {}
        is_property = isinstance(func, MethodWrapperType) and func.__name__ == "__get__"
        if self._is_recording and not is_property:
            self._read |= {tensor.data_ptr() for tensor in _tensors((args, kwargs.values())) if tensor.numel()}
        return func(*args, **kwargs)


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """Yield the tensors among arguments, also those in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)) or type(value) is type({}.values()):
            yield from _tensors(value)


def unset_parameters(model: nn.Module, loaded: set[str]) -> set[str]:
    """Return the names of a model's parameters that loading has not set.

    Args:
        model: vLLM's model.
        loaded: names that the model's loader reports; for a tied parameter one of its names suffices.
    """
    parameters = list(model.named_parameters(remove_duplicate=False))
    done = {id(parameter) for name, parameter in parameters if name in loaded}
    return {name for name, parameter in parameters if id(parameter) not in done}
