"""Sharded checkpoints: folders to which each rank writes its shards, and which any number of ranks can read.

    last.ckpt/.metadata       which file holds which part of which tensor (torch.distributed.checkpoint)
    last.ckpt/__0_0.distcp    rank 0's shards, and so on
    last.ckpt/meta.pt         everything else that Lightning puts into a checkpoint, and the other files' checksums

Tensors have the names ``model/<name>`` and ``optimizer/<number>/<name>/<key of the state>``, independent of ranks.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from rlightning.checksums import Checksums, DamagedError, checksums_of, seal_file, verify_file, verify_files
from rlightning.errors import ConfigError
from rlightning.parallel.collectives import gather_objects, global_rank
from rlightning.parallel.cpu_group import cpu_group
from rlightning.parallel.sharding import local_tensor
from rlightning.protocols import StateDict
from rlightning.torch_internals import with_local_tensor

META, INDEX = "meta.pt", ".metadata"
"""Names of the folder's files, the same as Lightning's."""
FORMAT = "rlightning_checkpoint"
"""Key of the metadata that identifies a folder of this module."""
VERSION = 2
"""Version of the folder's format, which is increased when earlier code cannot read new folders."""

Stored = Mapping[str, TensorStorageMetadata]


def is_checkpoint_folder(path: Path) -> bool:
    """Return whether ``path`` is a folder with a complete sharded checkpoint."""
    return (path / META).is_file() and (path / INDEX).is_file()


def named_optimizer_state(optimizer: Optimizer, module: nn.Module) -> StateDict:
    """Return an optimizer's ``state_dict`` with parameter names in place of numbers, without copying tensors."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    return {
        "state": {names[parameter]: dict(state) for parameter, state in optimizer.state.items()},
        "param_groups": [
            {**group, "params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
        ],
    }


def numbered_optimizer_state(named: StateDict, tensors: Mapping[str, Tensor], number: int) -> StateDict:
    """Return the ``state_dict`` of the optimizer of index ``number``, as ``Optimizer.load_state_dict`` expects it: with
    a folder's tensors, and with parameter numbers in place of names.
    """
    for key, name, what in _keys_of_optimizer(tensors, number):
        named["state"].setdefault(name, {})[what] = tensors[key]
    order = [name for group in named["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(order)}
    return {
        "state": {numbers[name]: state for name, state in named["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in named["param_groups"]
        ],
    }


def write_tensors(folder: Path, checkpoint: StateDict) -> Checksums:
    """Write this rank's shards to ``folder``, and remove the tensors from ``checkpoint``; every rank must call this.

    Args:
        folder: folder that exists on every rank.
        checkpoint: Lightning's, with ``state_dict`` by name and ``optimizer_states`` of :func:`named_optimizer_state`.
            Single numbers and values other than tensors stay in it, for :func:`write_meta`.

    Returns:
        On rank 0 the checksums of all files; on other ranks those of the rank's files.
    """
    tensors: dict[str, Tensor] = {f"model/{name}": tensor for name, tensor in checkpoint.pop("state_dict").items()}
    for number, named in enumerate(checkpoint.get("optimizer_states", [])):
        for name, state in named["state"].items():
            # single numbers, such as the count of steps, would each be an entry and a message between the ranks
            for key in [key for key, value in state.items() if isinstance(value, Tensor) and value.ndim]:
                tensors[f"optimizer/{number}/{name}/{key}"] = state.pop(key)
    group = cpu_group()
    with _alone_on_purpose():
        state_dict_saver.save(
            tensors, storage_writer=FileSystemWriter(folder), process_group=group, no_dist=group is None
        )
    own = [path.name for path in folder.glob(f"__{global_rank()}_*")] + [INDEX] * (global_rank() == 0)
    parts = gather_objects(checksums_of(folder, own), name="checksums of the checkpoint")
    return {name: found for part in parts for name, found in part.items()}


def write_meta(folder: Path, checkpoint: StateDict, tied: Mapping[str, str], files: Checksums | None = None) -> None:
    """Write ``meta.pt``: what :func:`write_tensors` left of the checkpoint, names of tied parameters, and checksums.

    Args:
        folder: the checkpoint's folder.
        checkpoint: Lightning's, after :func:`write_tensors`.
        tied: result of :func:`find_tied`.
        files: checksums of the folder's other files, by name.
    """
    own = {"version": VERSION, "tied": dict(tied), "files": dict(files or {})}
    torch.save({**checkpoint, FORMAT: own}, folder / META)
    seal_file(folder / META)


def verify_checkpoint_folder(folder: Path) -> None:
    """Verify the checksums of all files in a sharded checkpoint; raise a DamagedError if one is damaged or missing."""
    for name in (META, INDEX):
        if not (folder / name).is_file():
            raise DamagedError(folder, f"'{name}' is missing")
    try:
        verify_file(folder / META)
    except DamagedError as error:
        raise DamagedError(folder, f"of '{META}', {error.reason}") from error
    meta = torch.load(folder / META, map_location="cpu", weights_only=False)
    verify_files(folder, meta.get(FORMAT, {}).get("files", {}))


def read_meta(folder: Path, weights_only: bool | None = None) -> StateDict:
    """Return the part of a checkpoint that :func:`write_meta` wrote, which has no weights.

    Raises:
        ConfigError: the folder is not from this package, or is from a newer version.
    """
    meta: StateDict = torch.load(folder / META, map_location="cpu", weights_only=weights_only)
    if FORMAT not in meta:
        raise ConfigError(
            f"ckpt_path={folder} was not written by rlightning's strategies. To start from a model's weights, name its "
            "Hugging Face folder in model."
        )
    version = meta[FORMAT]["version"]
    if version > VERSION:
        raise ConfigError(
            f"ckpt_path={folder} is a checkpoint of version {version}, and this rlightning reads versions up to "
            f"{VERSION}. Use the rlightning that wrote it, or a newer one."
        )
    return meta


def saved_ties(meta: StateDict) -> dict[str, str]:
    """Return a checkpoint's tied weights from the result of :func:`read_meta`: for each further name the first name."""
    own = meta[FORMAT]
    ties: dict[str, str] = own["twins" if own["version"] == 1 else "tied"]
    return ties


def stored_tensors(folder: Path) -> Stored:
    """Return full size and dtype of each tensor in a checkpoint folder, by its name there; read only the index."""
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def stored_weights(stored: Stored, tied: Mapping[str, str]) -> dict[str, Sequence[int]]:
    """Return the full shape of each of a model's weights in a folder, by all of its names if it is tied.

    Args:
        stored: result of :func:`stored_tensors`.
        tied: result of :func:`saved_ties`.
    """
    prefix = "model/"
    shapes: dict[str, Sequence[int]] = {
        name.removeprefix(prefix): entry.size for name, entry in stored.items() if name.startswith(prefix)
    }
    return shapes | {name: shapes[first] for name, first in tied.items()}


def read_model(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Read a model's weights from a folder into ``tensors``, by name, or into this rank's shards of them.

    Every rank must call this.
    """
    _read(folder, {f"model/{name}": tensor for name, tensor in tensors.items()})


def read_optimizer(
    folder: Path,
    stored: Stored,
    number: int,
    named: StateDict,
    parameters: Mapping[str, Tensor],
    *,
    is_on_host: bool = False,
) -> StateDict:
    """Return an optimizer's ``state_dict`` from a folder, sharded as its parameters are; every rank must call this.

    Args:
        folder: the checkpoint's folder.
        stored: result of :func:`stored_tensors` for this folder.
        number: index of the optimizer.
        named: the optimizer's entry in ``optimizer_states``.
        parameters: the optimizer's parameters, by name.
        is_on_host: whether the state is read to host memory, rather than to the parameters' device.

    Raises:
        ConfigError: if the saved optimizer has other parameters.
    """
    trained = {name for group in named["param_groups"] for name in group["params"]}
    if unknown := sorted(trained - parameters.keys()):
        raise ConfigError(
            f"ckpt_path={folder} optimizes '{unknown[0]}', which this model does not have. Name its own model in model."
        )
    tensors: dict[str, Tensor] = {}
    for key, name, _ in _keys_of_optimizer(stored, number):
        like, entry = parameters[name].detach(), stored[key]
        device = torch.device("cpu") if is_on_host else like.device
        tensors[key] = empty_shard(like, entry.size, entry.properties.dtype, device)
    _read(folder, tensors)
    return numbered_optimizer_state(named, tensors, number)


def _keys_of_optimizer(stored: Iterable[str], number: int) -> Iterator[tuple[str, str, str]]:
    """Yield the keys of an optimizer's tensors, each with the parameter's name and its key in the optimizer's state."""
    prefix = f"optimizer/{number}/"
    for key in stored:
        if key.startswith(prefix):
            name, what = key.removeprefix(prefix).rsplit("/", 1)
            yield key, name, what


def empty_shard(parameter: Tensor, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor for an optimizer's state, sharded as its parameter is.

    ``size``, that of the whole tensor, equals the parameter's, except that its last dimension may be the number of
    blocks, each with a scale.

    Raises:
        ConfigError: if the parameter is split within a block.
    """
    own = local_tensor(parameter)
    if tuple(size) == tuple(parameter.shape):
        return with_local_tensor(parameter, torch.empty_like(own, dtype=dtype, device=device))
    num_blocks, rest = divmod(size[-1] * own.shape[-1], parameter.shape[-1])
    if rest:
        raise ConfigError(
            f"The checkpoint's 8-bit optimizer state is in blocks of {parameter.shape[-1] // size[-1]} numbers, and "
            f"tensor parallelism cuts rows of {parameter.shape[-1]} into parts of {own.shape[-1]}, within a block. Go "
            "on with the tensor_parallel_size that it was written with."
        )
    return with_local_tensor(parameter, torch.empty(*own.shape[:-1], num_blocks, dtype=dtype, device=device), size)


def read_whole(folder: Path, weights_only: bool | None = None) -> StateDict:
    """Read a whole sharded checkpoint to host memory; return it as Lightning's dict for an unsharded strategy."""
    meta, stored = read_meta(folder, weights_only), stored_tensors(folder)
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
    _read(folder, tensors, is_alone=True)
    weights = {name.removeprefix("model/"): tensor for name, tensor in tensors.items() if name.startswith("model/")}
    tied = saved_ties(meta)
    del meta[FORMAT]
    meta["state_dict"] = weights | {name: weights[first] for name, first in tied.items()}
    for number, named in enumerate(meta.get("optimizer_states", [])):
        meta["optimizer_states"][number] = numbered_optimizer_state(named, tensors, number)
    return meta


def find_tied(module: nn.Module) -> dict[str, str]:
    """Return the tied parameters of a module: each additional name, mapped to that in ``named_parameters()``."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    everything: Iterable[tuple[str, nn.Parameter]] = module.named_parameters(remove_duplicate=False)
    return {name: names[parameter] for name, parameter in everything if names[parameter] != name}


def _read(folder: Path, tensors: Mapping[str, Tensor], *, is_alone: bool = False) -> None:
    """Read values from a folder into the given tensors, in place; a collective, unless this rank ``is_alone``."""
    group = None if is_alone else cpu_group()
    with torch.no_grad(), _alone_on_purpose():
        state_dict_loader.load(
            {key: tensor.detach() for key, tensor in tensors.items()},
            storage_reader=FileSystemReader(folder),
            process_group=group,
            no_dist=group is None,
        )


@contextmanager
def _alone_on_purpose() -> Iterator[None]:
    """Context manager in which torch does not warn that a single process reads a sharded checkpoint."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process.*")
        yield
