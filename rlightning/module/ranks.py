"""The process groups of a module's ranks, and reductions over them."""

from contextlib import AbstractContextManager, nullcontext

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from rlightning.parallel.collectives import all_reduce, global_rank, world_size
from rlightning.parallel.fsdp import FSDP
from rlightning.protocols import HasTensorParallelSize, has


class Ranks(LightningModule):
    """A Lightning module with the sizes of its data-parallel and tensor-parallel groups, and with reductions over
    ranks.
    """

    @property
    def tensor_parallel_size(self) -> int:
        """The number of consecutive ranks that split each layer of the actor and compute on the same batch."""
        strategy = None if self._trainer is None else self.trainer.strategy
        return strategy.tensor_parallel_size if has(strategy, HasTensorParallelSize) else 1

    @property
    def tensor_parallel_rank(self) -> int:
        """This rank's index in its tensor-parallel group."""
        return global_rank() % self.tensor_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """The number of data-parallel ranks, over which an update's data is split."""
        return world_size() // self.tensor_parallel_size

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over the data-parallel ranks; a tensor-parallel group counts once. Every rank must
        call it.
        """
        summed = all_reduce(tensor)
        return summed if self.tensor_parallel_size == 1 else summed / self.tensor_parallel_size

    def world_sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, for values of rollouts, which differ on each rank; every rank must
        call it.
        """
        return all_reduce(tensor)

    def all_max(self, tensor: Tensor) -> Tensor:
        """Return the element-wise maximum of a tensor over all ranks; every rank must call it."""
        return all_reduce(tensor, "max")

    def local_gradients(self) -> AbstractContextManager[None]:
        """Context manager in which backward passes accumulate gradients on each rank without averaging them over ranks.

        It is used for all micro-batches of an optimizer step except the last.
        """
        strategy = self.trainer.strategy
        return strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext()

    def average_gradients(self) -> None:
        """With FSDP, average over the ranks the gradients of parameters that are not sharded; every rank must call it.
        Other strategies average these themselves.
        """
        if isinstance(self.trainer.strategy, FSDP):
            self.trainer.strategy.average_gradients()
