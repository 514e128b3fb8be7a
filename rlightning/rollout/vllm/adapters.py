"""Replaces the adapter of a vLLM worker by one that is in memory."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from rlightning.rollout.vllm.recorded_writes import RecordedWrites
from rlightning.rollout.vllm.vllm_internals import adapters_of, forget_last_mapping

log = logging.getLogger(f"vllm.{__name__}")  # below vLLM's logger, whose level is VLLM_LOGGING_LEVEL

ADAPTER_ID = 1
"""The adapter's id, the same for all versions: a running request continues with the newest. The prefix cache
distinguishes versions by the salt of requests (:class:`~rlightning.rollout.vllm.server.VLLMServer`)."""


def adapter_request() -> LoRARequest:
    """Return the LoRARequest with which requests use the actor's adapter; its path is a placeholder."""
    return LoRARequest(lora_name="actor", lora_int_id=ADAPTER_ID, lora_path="/sent/by/the/trainer")


@dataclass(frozen=True, slots=True)
class InstalledAdapter:
    """The adapter of a vLLM worker.

    Attributes:
        unplaced: names of the adapter's modules that are not in the engine's model, which vLLM has skipped.
        writes: what vLLM has written into the model's layers.
    """

    unplaced: Sequence[str]
    writes: RecordedWrites


def install_adapter(
    manager: Any,
    settings: Mapping[str, object],
    weights: Mapping[str, Tensor],
    device: torch.device,
    last: InstalledAdapter | None = None,
) -> InstalledAdapter:
    """Replace the adapter of a vLLM worker by one whose weights are in memory.

    Args:
        manager: the worker's LRUCacheWorkerLoRAManager.
        settings: PEFT's adapter configuration.
        weights: the adapter's weights, by their names in PEFT's files; they are scaled in place.
        device: the worker's device.
        last: the adapter that is replaced, if it has the same settings and the same tensors, which have new values by
            now. To write them as ``last`` was written takes a tenth of the time.
    """
    adapters = adapters_of(manager)
    if last is not None and last.writes.is_repeatable and manager.list_adapters() == {ADAPTER_ID}:
        last.writes.repeat()
        forget_last_mapping(adapters)
        return last
    helper = PEFTHelper.from_dict(dict(settings))
    helper.validate_legal(manager.lora_config)
    model: Any = adapters.model
    mapper: Any = model.hf_to_vllm_mapper if hasattr(model, "hf_to_vllm_mapper") else None
    if hasattr(mapper, "get_rename_mapper"):
        mapper = mapper.get_rename_mapper()
    with RecordedWrites(weights.values()) as writes:
        adapter = LoRAModel.from_lora_tensors(
            lora_model_id=ADAPTER_ID,
            tensors=dict(weights),
            peft_helper=helper,
            device=str(device),
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=mapper,
        )
        # All: this also resets the worker's record of the last batch's adapters, whose memory a sleep has changed.
        manager.remove_all_adapters()
        forget_last_mapping(adapters)
        packed = {name for names in adapters.packed_modules.values() for name in names}
        unplaced = sorted(adapter.loras.keys() - adapters.modules.keys() - packed)
        adapters.add_adapter(adapter)
        adapters.activate_adapter(ADAPTER_ID)
    if last is None:
        way = (
            "written in three calls"
            if writes.is_repeatable
            else f"installed by vLLM, too: {writes.reason_not_repeatable}"
        )
        log.debug("vLLM has installed the adapter. Its later versions are %s.", way)
    return InstalledAdapter(unplaced, writes)


@contextmanager
def without_wrappers(model: nn.Module) -> Iterator[None]:
    """Context manager in which vLLM's LoRA layers are replaced, in the model, by the base layers that they wrap."""
    wrapped = [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, BaseLayerWithLoRA) and hasattr(module, "base_layer")
    ]
    for name, module in wrapped:
        _replace(model, name, module.base_layer)
    try:
        yield
    finally:
        for name, module in wrapped:
            _replace(model, name, module)


def _replace(model: nn.Module, name: str, module: object) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)
