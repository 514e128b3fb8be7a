"""PEFT's adapter folders: their weights, and a digest of the base model."""

import hashlib
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlightning.errors import ConfigError
from rlightning.foreign_text import cut_line
from rlightning.models.files import find_weights

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"
"""PEFT's file of weights without safetensors, which is not read: unpickling can run code."""
BASE_DIGEST = "base_digest"
"""The key of a file's metadata for the digest of the base on which an adapter was trained."""


def find_folder(path: str) -> Path:
    """Return an adapter's folder; for a name on the hub such as ``owner/name``, that of its downloaded files.

    A name whose first part is a folder here is not looked up on the hub.

    Raises:
        ConfigError: there is no such folder, and the hub has no such adapter or cannot be reached.
    """
    folder = Path(path).expanduser()
    if folder.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path):
        return folder
    if folder.parent.is_dir():
        raise ConfigError(
            f"adapter.path='{path}' is no folder, and is not looked up on the hub, since '{folder.parent}' is a folder "
            "here. Name a folder that PEFT or SaveHF has written."
        )
    try:
        hf_hub_download(path, WEIGHTS_FILE)
        return Path(hf_hub_download(path, CONFIG_FILE)).parent
    except (EntryNotFoundError, HFValidationError, OSError) as error:
        raise ConfigError(
            f"adapter.path='{path}' is no folder, and no adapter of that name was read from the hub: "
            f"{cut_line(error).rstrip('.')}. Name a folder that PEFT or SaveHF has written."
        ) from error


def stored_name(module: str, factor: str) -> str:
    """Return the name that PEFT's files use for a layer's low-rank factor "A" or "B"."""
    return f"base_model.model.{module}.lora_{factor}.weight"


def adapted_module(stored: str) -> str:
    """Return the name of the layer to which a weight of a PEFT file belongs."""
    return re.split(r"\.(?:lora_\w+|base_layer|weight)\b", stored.removeprefix("base_model.model."))[0]


def base_digest(model: str) -> str:
    """Return a digest that identifies a base model, computed from the first rows of each weight.

    The digest does not depend on how weights are divided into files. It is "" if they are not in safetensors files.
    """
    digest, files = hashlib.sha256(), find_weights(model)
    with ExitStack() as opened, torch.device("cpu"):  # Lightning loads models with the GPU as the default device
        by_path = {path: opened.enter_context(safe_open(path, "pt")) for path in set(files.values())}
        for name in sorted(files):
            file = by_path[files[name]]
            stored = file.get_slice(name)
            shape = stored.get_shape()
            rows = stored[:1] if shape else file.get_tensor(name)
            digest.update(f"{name} {shape} {stored.get_dtype()}".encode())
            digest.update(rows.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32] if files else ""


def check_files(shapes: Mapping[str, tuple[int, int]], folder: Path, model: str) -> None:
    """Raise a ConfigError unless the adapter's weights in a folder have the expected names and ``shapes``, and were
    trained on this base model. The values are not read.

    Raises:
        ConfigError: a weight is missing, unknown or of another shape (the first one is named), or the adapter was
            trained on a base model with other values. Layers outside of the model's blocks are named as such.
    """
    where = f"adapter.path='{folder}'"
    if not (folder / WEIGHTS_FILE).is_file() and (folder / PICKLED_FILE).is_file():
        raise ConfigError(
            f"{where} has its weights in {PICKLED_FILE}, and only {WEIGHTS_FILE} is read. Save it again by PEFT's "
            "save_pretrained(folder, safe_serialization=True)."
        )
    try:
        with safe_open(folder / WEIGHTS_FILE, "pt") as file:
            stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            digest = (file.metadata() or {}).get(BASE_DIGEST, "")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{where} has no readable {WEIGHTS_FILE}: {cut_line(error)}") from error
    for name in sorted(stored.keys() - shapes.keys()):
        module = adapted_module(name)
        if not re.search(r"\.\d+\.", module):  # blocks are numbered
            raise ConfigError(
                f"{where} adapts '{module}', outside of the model's blocks, and only layers in the blocks are trained "
                f"here. Train it again without '{module}' in target_modules."
            )
    for name in sorted({*stored, *shapes}):
        if stored.get(name) != shapes.get(name):
            held = f"is {list(stored[name])}" if name in stored else "is missing"
            needed = f"should be {list(shapes[name])}" if name in shapes else "has no place"
            raise ConfigError(f"{where} is an adapter of another base than model='{model}': '{name}' {held}, {needed}.")
    if digest and digest != base_digest(model):
        raise ConfigError(
            f"{where} was trained on a base with other weights than model='{model}' has. Name its own base in model."
        )


def read_weights(folder: Path) -> Mapping[str, Tensor]:
    """Return the weights of a PEFT folder by their names in its file."""
    with safe_open(folder / WEIGHTS_FILE, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dictionary
