"""A model's weight files: which file contains which weight, their dtype, and whether they match config.json."""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from lightning.fabric.utilities.rank_zero import rank_zero_only
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from rlightning.checksums import MANIFEST, DamagedError, verify_manifest
from rlightning.errors import ConfigError
from rlightning.foreign_text import cut_line
from rlightning.models.counts import build_empty
from rlightning.models.transformers_internals import weight_conversions

log = logging.getLogger(__name__)

_BIN = "pytorch_model.bin"
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_ROWS = 4096
"""Number of rows of two matrices that are compared at once."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype with a name such as "bfloat16"."""
    dtype = getattr(torch, name)  # a configuration names it
    assert isinstance(dtype, torch.dtype)
    return dtype


def find_weights(model: str) -> dict[str, Path]:
    """Return the safetensors file of each weight, by the weight's name; an empty dict for other file formats.

    Like transformers, it prefers a single file to an index of several.
    """
    single = find_file(model, _SINGLE)
    try:
        if single is not None:
            with safe_open(single, "pt") as file:
                return dict.fromkeys(file.keys(), single)
        index = find_file(model, _INDEX)
        if index is None:
            return {}
        names = read_index(index)
    except (SafetensorError, ValueError) as error:
        raise ConfigError(f"model='{model}' has no readable weights: {cut_line(error)}") from error
    paths = {file: find_file(model, file) for file in sorted(set(names.values()))}
    absent = [file for file, path in paths.items() if path is None]
    if absent:
        raise ConfigError(
            f"model='{model}' lacks {len(absent)} of its {len(paths)} files of weights, such as '{absent[0]}'. Use a "
            "whole model's folder."
        )
    return {name: path for name, file in names.items() if (path := paths[file]) is not None}


def read_index(path: Path) -> dict[str, str]:
    """Return the file name of each weight, by weight name, from a model's JSON index; raise a ValueError if it is
    invalid.
    """
    try:
        content = json.loads(path.read_text())
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path.name} is no JSON: {error}") from error
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
        raise ValueError(f'{path.name} has no "weight_map" from names of weights to files')
    return names


def find_file(model: str, name: str) -> Path | None:
    """Return the path of one of a model's files, downloaded from the hub if necessary; None if the model has no such
    file.
    """
    if Path(model).is_dir():
        path = Path(model) / name
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(model, name))
    except EntryNotFoundError:
        return None
    except (HFValidationError, OSError) as error:
        raise ConfigError(f"model='{model}' has no readable weights: {cut_line(error)}") from error


def stored_dtype(files: Mapping[str, Path]) -> torch.dtype | None:
    """Return the floating-point dtype that most of the stored weights have, regardless of config.json.

    None if the files (:func:`find_weights`) contain no tensor in float64, float32, bfloat16 or float16.
    """
    sizes: Counter[torch.dtype] = Counter()
    for path in sorted(set(files.values())):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no dictionary
                stored = file.get_slice(name)
                if stored.get_dtype() in _DTYPES:
                    sizes[_DTYPES[stored.get_dtype()]] += torch.Size(stored.get_shape()).numel()
    return sizes.most_common(1)[0][0] if sizes else None


def is_converted(policy: PreTrainedModel) -> bool:
    """Return whether a model's files store weights in another form than transformers uses, such as one tensor for each
    expert, rather than only under other names.
    """
    conversions = weight_conversions(policy)
    if conversions is None:
        conversions = get_model_conversion_mapping(policy, add_legacy=False)
    return any(isinstance(conversion, WeightConverter) for conversion in conversions)


def _find_bin_names(model: str) -> set[str]:
    """Return the weight names of a local folder in PyTorch's format; empty for other formats."""
    index, single = Path(model) / f"{_BIN}.index.json", Path(model) / _BIN
    try:
        if single.is_file():
            return set(torch.load(single, map_location="meta", weights_only=True))
        return set(read_index(index)) if index.is_file() else set()
    except (OSError, RuntimeError, ValueError, UnpicklingError) as error:
        raise ConfigError(f"model='{model}' has no readable weights: {cut_line(error)}") from error


def check_folder(model: str, config: PreTrainedConfig) -> None:
    """Raise a ConfigError if the output layer in a local folder's files does not match config.json; called before
    weights are loaded or an engine starts.

    Logs the number of stored layers that config.json does not have.

    Raises:
        ConfigError: the output layer is missing, or differs from the embedding to which it should be tied.
    """
    files, policy = find_weights(model), build_empty(config)
    check_head(model, config, files)
    names = set(files) or _find_bin_names(model)
    embedding, head = policy.get_input_embeddings(), policy.get_output_embeddings()
    own = [name for name, weight in policy.named_parameters() if head is not None and weight is head.weight]
    is_stored = any(name.endswith(".".join(own[0].split(".")[-2:])) for name in names) if own else True
    if names and not config.get_text_config().tie_word_embeddings and head is not embedding and not is_stored:
        raise ConfigError(
            f"model='{model}' says tie_word_embeddings=false in config.json, but its files hold no '{own[0]}'. Use a "
            "whole model's folder, or write tie_word_embeddings=true if the embedding is its output layer."
        )
    _tell_of_unused_layers(model, policy, names)


@rank_zero_only
def check_export(model: str) -> None:
    """Verify a folder that SaveHF has written by its checksums, on rank 0; folders without checksums are not checked.

    Raises a ConfigError that names the first missing or damaged file.
    """
    try:
        verify_manifest(Path(model))
    except DamagedError as error:
        raise ConfigError(
            f"model='{model}' is damaged: {error.reason}. Use another copy; if you have changed it yourself, remove "
            f"its {MANIFEST}."
        ) from error


@rank_zero_only
def _tell_of_unused_layers(model: str, policy: PreTrainedModel, names: Iterable[str]) -> None:
    used = policy.config.get_text_config().num_hidden_layers
    base = policy.base_model
    lists = [name for name, one in base.named_modules() if isinstance(one, nn.ModuleList) and len(one) == used]
    if not lists:
        return
    layer = re.compile(rf"(?:{re.escape(policy.base_model_prefix)}\.)?{re.escape(lists[0])}\.(\d+)\.")
    stored = {int(match[1]) for name in names if (match := layer.match(name))}
    unused = sorted(number for number in stored if number >= used)
    if unused:
        log.warning(
            "model='%s' stores %d layers, and config.json's num_hidden_layers=%d uses the first %d of them; the other "
            "%d are left out. For layers that predict further tokens (multi-token prediction) that is as it should be.",
            model, len(stored), used, used, len(unused),
        )  # fmt: skip


def check_head(model: str, config: PreTrainedConfig, files: Mapping[str, Path]) -> None:
    """Raise a ConfigError if a model's files store an output layer that differs from the embedding, although
    config.json ties the two.

    transformers would use the stored layer, a sharded policy and vLLM the embedding. A layer with equal values is
    accepted.
    """
    if not config.get_text_config().tie_word_embeddings:
        return
    policy = build_empty(config)
    policy.tie_weights()
    embedding = policy.get_input_embeddings().weight
    parameters = policy.named_parameters(remove_duplicate=False)
    stored = [name for name, weight in parameters if weight is embedding and name in files]
    for other in stored[1:]:
        if not _is_equal(files, stored[0], other):
            raise untied_head(model, stored[0], other)


def other_shape(model: str, name: str, stored: Sequence[int], shape: Sequence[int]) -> ConfigError:
    """Return a ConfigError which says that a stored weight has another shape than config.json implies."""
    return ConfigError(
        f"model='{model}' stores '{name}' with the shape {list(stored)}, but its config.json makes it {list(shape)}. "
        "Use a folder whose files belong together."
    )


def untied_head(model: str, embedding: str, head: str) -> ConfigError:
    """Return a ConfigError which says that a stored output layer differs from the embedding to which config.json ties
    it.
    """
    return ConfigError(
        f"model='{model}' says tie_word_embeddings=true in config.json, but its files hold '{head}' with other values "
        f"than '{embedding}': transformers would use it, and vLLM would not. Write tie_word_embeddings=false to train "
        f"'{head}', or take it out of the files."
    )


def _is_equal(files: Mapping[str, Path], first: str, second: str) -> bool:
    with safe_open(files[first], "pt") as file, safe_open(files[second], "pt") as other:
        a, b = file.get_slice(first), other.get_slice(second)
        if a.get_shape() != b.get_shape() or a.get_dtype() != b.get_dtype():
            return False
        rows = range(0, a.get_shape()[0], _ROWS)
        return all(torch.equal(a[row : row + _ROWS], b[row : row + _ROWS]) for row in rows)
