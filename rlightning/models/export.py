"""Writes the policy as a Hugging Face folder: rank 0 writes, with the shards of all ranks gathered."""

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.core_model_loading import revert_weight_conversion

from rlightning.atomic_save import written_aside
from rlightning.checksums import write_manifest
from rlightning.models.adapter import LoRA, import_peft
from rlightning.models.adapter_files import BASE_DIGEST, WEIGHTS_FILE
from rlightning.models.adapter_layers import adapter_parameters, computed_weights, loaded_digest
from rlightning.models.files import is_converted, torch_dtype
from rlightning.models.finite import check_finite
from rlightning.models.quantized import QuantizedLinear
from rlightning.models.transformers_internals import keys_left_out
from rlightning.parallel.barrier import barrier
from rlightning.parallel.collectives import global_rank
from rlightning.parallel.gathering import gather_into, split_by_bytes
from rlightning.parallel.sharding import base_name, is_adapter_weight, reshard

MAX_FILE_BYTES = 4 << 30
"""Maximum bytes of a safetensors file, and of host memory on the writing rank; a larger tensor has its own file."""
WRITER = 0
"""The rank that writes."""


def save_policy(
    policy: PreTrainedModel,
    tokenizer: Tokenizer,
    path: Path,
    *,
    dtype: torch.dtype | str | None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a policy and its tokenizer as a Hugging Face folder with checksums, under a temporary name that is then
    changed to ``path``, so that ``path`` is always complete.

    Every rank must call it, also for a policy that is not sharded; rank 0 writes. Rank 0 needs host memory for one
    file's tensors, and each rank the device memory of :func:`~rlightning.parallel.gathering.gather_into`.

    Args:
        policy: the model.
        tokenizer: written to the same folder.
        path: the folder, on rank 0; an existing folder is replaced.
        dtype: dtype of the weights in the folder, except buffers, which keep theirs; None for the policy's dtype.
        max_file_bytes: maximum size of a file; further weights are written to other files, as by transformers.

    Raises:
        WeightError: a weight is not finite; an existing folder is not replaced.
    """
    dtype = (torch_dtype(dtype) if isinstance(dtype, str) else dtype) or policy.dtype
    check_finite(policy.named_parameters(), f"The model is not saved to {path}")
    weights = exported_weights(policy)
    dtypes = dict.fromkeys(weights, dtype) | {
        name: buffer.dtype for name, buffer in policy.named_buffers() if name in weights
    }  # a router's biases keep their dtype: they decide between experts with close scores
    sizes = {name: tensor.numel() * dtypes[name].itemsize for name, tensor in weights.items()}
    batch_bytes = math.inf if is_converted(policy) else max_file_bytes  # converting back needs all weights together
    batches = list(split_by_bytes(sizes, sizes.__getitem__, batch_bytes))
    if global_rank() == WRITER:
        with written_aside(path) as folder:
            folder.mkdir()
            _write_weights(policy, weights, dtypes, batches, folder, max_file_bytes)
            _write_rest(policy, tokenizer, folder, dtype)
            write_manifest(folder)
    else:
        for names in batches:
            _gather(policy, {name: weights[name] for name in names}, dtypes, torch.device("meta"))
    barrier(f"the model is saved to {path.name}")


def exported_weights(policy: PreTrainedModel) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers to export, by name. Tied weights appear once, and sharded weights
    stay sharded.

    For a policy with an adapter, return those of the base model. Quantised matrices are placeholders on the meta
    device.
    """
    reshard(policy)  # some are still gathered after a forward pass, in the dtype it computed in
    tied_names = {name for name, _ in policy.named_parameters(remove_duplicate=False)}
    tied_names -= {name for name, _ in policy.named_parameters()}
    ignored = tied_names | keys_left_out(policy)
    weights = dict(policy.state_dict())
    for name, module in policy.named_modules():
        if isinstance(module, QuantizedLinear):  # its matrix is computed when it is written
            shape = (module.out_features, module.in_features)
            weights[f"{name}.weight"] = torch.empty(shape, dtype=module.dtype, device="meta")
            ignored |= {f"{name}.codes", f"{name}.scales"}
    return {
        base_name(name): tensor.detach()
        for name, tensor in weights.items()
        if name not in ignored and not is_adapter_weight(name)
    }


def _gather(
    policy: PreTrainedModel, weights: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], device: torch.device
) -> dict[str, Tensor]:
    """Return full weights, with the adapter merged, on the writing rank; on other ranks ``device`` is meta."""
    full = {name: torch.empty(tensor.shape, dtype=dtypes[name], device=device) for name, tensor in weights.items()}
    computed = computed_weights(policy)
    plain = [name for name in weights if name not in computed]
    gather_into([full[name] for name in plain], [weights[name] for name in plain], destination=WRITER)
    for name in (name for name in weights if name in computed):
        gather_into([full[name]], [computed[name]().detach()], destination=WRITER)  # one at a time: computed in float32
    return full


def save_adapter(policy: PreTrainedModel, lora: LoRA, base: str, tokenizer: Tokenizer, path: Path) -> None:
    """Write a policy's adapter as a PEFT folder with checksums, under a temporary name that is then changed to
    ``path``. Every rank must call it; rank 0 writes.

    Raises a WeightError if a weight is not finite; an existing folder is then not replaced. ``base`` is the folder or
    name of the base model.
    """
    weights = {name: weight.detach() for name, weight in adapter_parameters(policy)}
    check_finite(weights.items(), f"The adapter is not saved to {path}")
    is_writer = global_rank() == WRITER
    device = torch.device("cpu" if is_writer else "meta")
    full = {name: torch.empty(weight.shape, dtype=weight.dtype, device=device) for name, weight in weights.items()}
    gather_into(list(full.values()), list(weights.values()), destination=WRITER)
    if is_writer:
        with written_aside(path) as folder:
            folder.mkdir()
            metadata = {"format": "pt", BASE_DIGEST: loaded_digest(policy, base)}
            save_file(full, folder / WEIGHTS_FILE, metadata=metadata)
            settings = lora.peft_settings() | {"base_model_name_or_path": base, "inference_mode": True}
            import_peft().LoraConfig(**settings).save_pretrained(str(folder))
            tokenizer.save_pretrained(folder)
            write_manifest(folder)
    barrier(f"the adapter is saved to {path.name}")


def _write_weights(
    policy: PreTrainedModel,
    weights: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    batches: list[list[str]],
    folder: Path,
    max_bytes: int,
) -> None:
    """Gather and write the weights in batches, under the names and in the form of transformers' files."""
    files: list[list[str]] = []
    for batch in batches:
        full = _gather(policy, {name: weights[name] for name in batch}, dtypes, torch.device("cpu"))
        stored: dict[str, Tensor] = revert_weight_conversion(policy, full)
        del full
        stored_bytes = {name: tensor.nbytes for name, tensor in stored.items()}
        for names in split_by_bytes(stored_bytes, stored_bytes.__getitem__, max_bytes):
            part = {name: stored.pop(name).contiguous() for name in names}
            save_file(part, folder / f"{len(files)}.safetensors", metadata={"format": "pt"})
            files.append(names)
    pattern = "model-{:05d}-of-{:05d}.safetensors" if len(files) > 1 else "model.safetensors"
    index: dict[str, str] = {}
    for number, names in enumerate(files):
        file = pattern.format(number + 1, len(files))
        (folder / f"{number}.safetensors").rename(folder / file)
        index |= dict.fromkeys(names, file)
    if len(files) > 1:
        num_elements = sum(tensor.numel() for tensor in weights.values())
        num_bytes = sum(tensor.numel() * dtypes[name].itemsize for name, tensor in weights.items())
        metadata = {"total_parameters": num_elements, "total_size": num_bytes}
        text = json.dumps({"metadata": metadata, "weight_map": index}, indent=2, sort_keys=True)
        (folder / "model.safetensors.index.json").write_text(f"{text}\n", encoding="utf-8")


def _write_rest(policy: PreTrainedModel, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype) -> None:
    """Write the files of a model's folder that are not weights."""
    config = copy.deepcopy(policy.config)
    config.dtype = dtype
    config.architectures = [type(policy).__name__.removeprefix("FSDP")]  # FSDP derives its own class
    config.save_pretrained(folder)
    generation = policy.generation_config
    if generation is not None:
        # save_pretrained rejects some configs that transformers can read
        generation.to_json_file(folder / "generation_config.json")
    tokenizer.save_pretrained(folder)
