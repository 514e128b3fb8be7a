"""Mixins by which a strategy saves and loads sharded checkpoints."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rlightning.atomic_save import find_saved, partial_of, prepare_partial, remove_leftovers, swap_in
from rlightning.checksums import DamagedError
from rlightning.errors import ConfigError
from rlightning.parallel.checkpoint_folder import (
    empty_shard,
    find_tied,
    is_checkpoint_folder,
    named_optimizer_state,
    read_meta,
    read_model,
    read_optimizer,
    saved_ties,
    stored_tensors,
    stored_weights,
    write_meta,
    write_tensors,
)
from rlightning.parallel.checkpoint_io import SUFFIX, AtomicCheckpointIO, saving_checkpoint, verify_checkpoint
from rlightning.parallel.gathering import local_part
from rlightning.parallel.saved_weights import (
    Shapes,
    check_optimizer_state,
    check_shapes,
    check_ties,
    find_shared,
    parameter_names,
    shapes_of,
)
from rlightning.parallel.sharding import local_tensor
from rlightning.protocols import StateDict, has


class StateOnHost(Protocol):
    """An optimizer with a flag ``is_state_on_host``: if True, a checkpoint's optimizer state is read to host memory."""

    is_state_on_host: bool


class LoadsByItself(Strategy):
    """Mixin of strategies whose :meth:`load_checkpoint` restores model and optimizers, so that Lightning does not.

    List it before Lightning's strategy class.
    """

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: the model must be set up before a checkpoint is loaded into it."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: :meth:`load_checkpoint` restores the optimizers."""
        return False

    def load_model_state_dict(self, checkpoint: Mapping[str, object], strict: bool = True) -> None:
        """Do nothing: :meth:`load_checkpoint` has filled the model."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, object]) -> None:
        """Do nothing: :meth:`load_checkpoint` has filled the optimizers."""


class ShardedCheckpoints(LoadsByItself, ParallelStrategy):
    """Mixin of strategies for sharded checkpoints: folders to which each rank writes its shards.

    List it before Lightning's strategy class.

    Folders can be read with any number of ranks and any sharding. Single-file checkpoints of strategies that do not
    shard can be read too. Messages between the ranks use the CPU group.
    """

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name, tied ones once, as this rank's shards and without copies."""
        assert self.lightning_module is not None
        tied = find_tied(self.lightning_module)
        state = self.lightning_module.state_dict()
        return {name: tensor.detach() for name, tensor in state.items() if name not in tied}

    def optimizer_state(self, optimizer: Optimizer) -> StateDict:
        """Return the optimizer's state dict with parameter names in place of numbers, without copying tensors."""
        assert self.lightning_module is not None
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return named_optimizer_state(inner, self.lightning_module)

    def save_checkpoint(self, checkpoint: StateDict, filepath: str | Path, storage_options: object = None) -> None:
        """Write the checkpoint to a temporary folder, then rename it to rank 0's ``filepath``; all ranks call this.

        Raises:
            ConfigError: ``storage_options`` are given, or the path is a URL.
            SaveError: writing failed; an earlier folder of the same name is kept.
        """
        if storage_options is not None or "://" in str(filepath):
            raise ConfigError(f"A sharded checkpoint is a folder on a disk that all ranks see, not {filepath}.")
        path = Path(self.broadcast(str(filepath)))
        with saving_checkpoint(path):
            if self.is_global_zero:
                remove_leftovers(path.parent, SUFFIX)
                prepare_partial(path).mkdir()
            self.barrier("there is a folder for the checkpoint")
            partial = partial_of(path)
            names = set(checkpoint["state_dict"])  # may be fewer than the model's, without those of a frozen base
            files = write_tensors(partial, checkpoint)
            if self.is_global_zero:
                assert self.lightning_module is not None
                tied = {name: first for name, first in find_tied(self.lightning_module).items() if first in names}
                write_meta(partial, checkpoint, tied, files)
                swap_in(partial, path)
            self.barrier("the checkpoint has its name")

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> StateDict:
        """Load this rank's shards of the model and, to resume training, of the optimizers; every rank must call this.

        Returns:
            The rest of the checkpoint.

        Raises:
            ConfigError: the checkpoint is of another model; raised on every rank.
        """
        assert self.lightning_module is not None
        path = self._verified(checkpoint_path)
        weights = self.lightning_module_state_dict()
        if not is_checkpoint_folder(path):
            return self._load_file(path, weights, weights_only)
        checkpoint, stored = read_meta(path, weights_only), stored_tensors(path)
        ties = saved_ties(checkpoint)
        self._check_weights(path, weights, stored_weights(stored, ties), ties)
        read_model(path, weights)
        parameters = dict(self.lightning_module.named_parameters())
        states = checkpoint.pop("optimizer_states", [])
        for number, (optimizer, named) in enumerate(zip(self.optimizers, states, strict=False)):
            is_on_host = has(optimizer, StateOnHost) and optimizer.is_state_on_host
            state = read_optimizer(path, stored, number, named, parameters, is_on_host=is_on_host)
            check_optimizer_state(state, optimizer)
            optimizer.load_state_dict(state)
        return checkpoint

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint's folder; a partly removed folder is not recognized as a checkpoint."""
        if self.is_global_zero:
            AtomicCheckpointIO().remove_checkpoint(filepath)

    def _verified(self, checkpoint_path: str | Path) -> Path:
        """Verify a checkpoint on rank 0; return rank 0's path, or raise a DamagedError on every rank."""
        path, reason = find_saved(Path(checkpoint_path)), None
        if self.is_global_zero:
            try:
                verify_checkpoint(path)
            except DamagedError as error:
                reason = error.reason
        name, reason = self.broadcast((str(path), reason))
        if reason is not None:
            raise DamagedError(Path(name), reason)
        return Path(name)

    def _check_weights(
        self,
        path: Path,
        weights: Mapping[str, Tensor],
        saved: Shapes,
        ties: Mapping[str, str],
        values: Mapping[str, object] | None = None,
    ) -> None:
        """Raise a ConfigError for a checkpoint of another model, or for additional weights with ``strict_loading``."""
        assert self.lightning_module is not None
        tied = {name: first for name, first in find_tied(self.lightning_module).items() if first in weights}
        own = {name: tensor.shape for name, tensor in weights.items()}
        own |= {name: own[first] for name, first in tied.items()}
        if not self.lightning_module.strict_loading:
            saved = {name: shape for name, shape in saved.items() if name in own}
        what = f"ckpt_path={path}"
        check_shapes(saved, own, what)
        check_ties({name: first for name, first in ties.items() if {name, first} <= own.keys()}, tied, what, values)

    def _load_file(self, path: Path, weights: dict[str, Tensor], weights_only: bool | None) -> StateDict:
        """Load a single-file checkpoint: every rank maps it into memory and reads its own parts."""
        checkpoint: StateDict = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
        if "state_dict" not in checkpoint:
            raise ConfigError(f"ckpt_path={path} is no checkpoint of a run. To start from a model, name it in model.")
        whole = checkpoint.pop("state_dict")
        assert self.lightning_module is not None
        ties = find_shared(whole, parameter_names(self.lightning_module))
        self._check_weights(path, weights, shapes_of(whole), ties, whole)
        for name, tensor in weights.items():
            local_tensor(tensor).copy_(local_part(whole[name], tensor))
        for optimizer, state in zip(self.optimizers, checkpoint.pop("optimizer_states", []), strict=False):
            check_optimizer_state(state, optimizer)
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            shards = {
                number: {key: shard_like(value, parameters[number]) for key, value in values.items()}
                for number, values in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": shards})
        return checkpoint


def shard_like(value: object, parameter: nn.Parameter) -> object:
    """Shard a full tensor of an optimizer's state as its parameter is sharded; return other values unchanged."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or not value.ndim:
        return value
    shard = empty_shard(parameter.detach(), value.shape, value.dtype, parameter.to_local().device)
    local_tensor(shard).copy_(local_part(value, shard))
    return shard
