"""The ranks that a module is trained on, and what they reduce over each other."""

from contextlib import AbstractContextManager, nullcontext

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from rlightning.parallel.collectives import all_reduce, global_rank, world_size
from rlightning.parallel.fsdp import FSDP
from rlightning.protocols import HasTensorParallelSize, has


class Ranks(LightningModule):
    """A module on one process, or on several that share data, shards of weights or parts of layers."""

    @property
    def tensor_parallel_size(self) -> int:
        """How many neighbouring ranks hold one copy of the actor together, and so compute on the same batch."""
        strategy = None if self._trainer is None else self.trainer.strategy
        return strategy.tensor_parallel_size if has(strategy, HasTensorParallelSize) else 1

    @property
    def tensor_parallel_rank(self) -> int:
        """This rank's place among them."""
        return global_rank() % self.tensor_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Return into how many shares an update is split."""
        return world_size() // self.tensor_parallel_size

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Sum over the data-parallel ranks, the shares of an update; on one, the tensor itself."""
        summed = all_reduce(tensor)
        return summed if self.tensor_parallel_size == 1 else summed / self.tensor_parallel_size

    def world_sum(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, each of which samples for itself."""
        return all_reduce(tensor)

    def all_max(self, tensor: Tensor) -> Tensor:
        """The largest over all ranks, element by element."""
        return all_reduce(tensor, "max")

    def local_gradients(self) -> AbstractContextManager[None]:
        """Inside, a backward adds to this rank's gradients, as far as they need not be averaged over the ranks yet.

        For all micro-batches of an optimizer step but the last.
        """
        strategy = self.trainer.strategy
        return strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext()

    def average_gradients(self) -> None:
        """Average over the ranks the gradients that the strategy has not: of parameters beside sharded ones."""
        if isinstance(self.trainer.strategy, FSDP):
            self.trainer.strategy.average_gradients()
