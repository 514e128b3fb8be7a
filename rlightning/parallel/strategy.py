"""The common base of strategies with several processes: named barriers, a CPU group, and handling of failures."""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, StrategyRegistry
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from rlightning import intervals
from rlightning.errors import check_rules
from rlightning.lightning_internals import SubprocessLauncher
from rlightning.parallel.barrier import barrier
from rlightning.parallel.collectives import OPS
from rlightning.parallel.cpu_group import cpu_group, set_barrier_timeout
from rlightning.parallel.failure_watch import FailureWatch, active_watch, report_failure
from rlightning.parallel.launcher import RankLauncher, describe_rendezvous
from rlightning.parallel.stacks import run_folder
from rlightning.parallel.stop_signal import stop_signal
from rlightning.parallel.trainer_stages import prepare_data_at_barrier

T = TypeVar("T")


class ConnectedRanks(ParallelStrategy):
    """Mixin of multi-rank Lightning strategies: named barriers, a CPU process group, and if one rank fails, all end.

    It comes first in the bases, as in ``class DDP(ConnectedRanks, DDPStrategy)``.

    - Lightning's barriers are :func:`~rlightning.parallel.barrier.barrier`, with the name of the calling function.
    - Broadcasts, reductions of metrics and decisions use the CPU group, and use the device only to read a tensor.
    - The first failure of a rank ends all ranks (:class:`~rlightning.parallel.failure_watch.FailureWatch`).
    - SIGTERM stops all ranks before the same batch.

    Args:
        barrier_timeout: maximum seconds for which a rank waits for others, at a barrier or in a collective of the
            devices, before it fails with an error that names them.
        failure_grace: seconds in which ranks can clean up after a failure before they are killed.
    """

    _timeout: timedelta | None  # Lightning's strategies set it: the timeout of the default process group

    def __init__(
        self, *, barrier_timeout: float = 1800.0, failure_grace: float = intervals.CLEANUP_GRACE, **kwargs: Any
    ) -> None:
        timeout = kwargs.get("timeout", default_pg_timeout)
        check_rules(
            {
                f"timeout={timeout} has no effect here. Set barrier_timeout, in seconds": timeout == default_pg_timeout,
                f"barrier_timeout={barrier_timeout} must be positive. Use some minutes, such as 1800": barrier_timeout
                > 0,
                f"failure_grace={failure_grace} must be positive. Use some seconds, such as 15": failure_grace > 0,
            }
        )
        super().__init__(**kwargs)
        self._timeout = timedelta(seconds=barrier_timeout)
        self.barrier_timeout = barrier_timeout
        self.failure_grace = failure_grace

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._launcher is None or type(self._launcher) is SubprocessLauncher:
            strategy: Any = self  # which has the counts; this mixin does not
            # Also under torchrun and SLURM, where the launcher starts nothing: it is the first to catch an exception.
            self._launcher = RankLauncher(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)

    def setup_environment(self) -> None:
        """Create the process groups, and start the FailureWatch that ends all ranks if one fails; a collective.

        Raises:
            ConfigError: the ranks cannot connect.
        """
        if self.root_device.type == "cuda":
            # NCCL kills a process whose collective has timed out. The failure watch acts earlier, to clean up.
            self._timeout = timedelta(seconds=self.barrier_timeout + intervals.DEVICE_TIMEOUT_MARGIN)
        try:
            self.connect_ranks()
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise describe_rendezvous(error) from error
        set_barrier_timeout(self.barrier_timeout)
        barrier("the ranks meet")
        cpu_group()
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if active_watch() is None:
            watch = FailureWatch(grace=self.failure_grace, folder=run_folder(trainer.default_root_dir))
            watch.start()
            watch.stop_at_exit()
        prepare_data_at_barrier(trainer)

    def connect_ranks(self) -> None:
        """Create the process groups as Lightning's strategy does; a subclass overrides this to create others."""
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """Set up as Lightning does, then install this package's handling of SIGTERM and Ctrl-C."""
        super().setup(trainer)
        stop_signal(trainer)

    def barrier(self, name: str | None = None, *args: object, **kwargs: object) -> None:
        """Wait until all ranks have called this, or raise a BarrierError; ``name`` defaults to the calling function."""
        barrier(name or sys._getframe(1).f_code.co_qualname)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return rank ``src``'s ``obj``, which must be picklable, on every rank; every rank must call this."""
        group = cpu_group()
        if group is None:
            return obj
        barrier("broadcast")
        holder = [obj]
        dist.broadcast_object_list(holder, src, group=group)
        return holder[0]

    def reduce(self, tensor: T, group: dist.ProcessGroup | None = None, reduce_op: object = "mean") -> T | Tensor:
        """Reduce a tensor over all ranks in place, by default to its mean, and return it; every rank must call this.

        Values other than tensors are returned unchanged.

        Args:
            tensor: a tensor on any device. The mean of integers is a new float tensor.
            group: a process group other than that of all ranks, in which the tensor is reduced on its own device.
            reduce_op: "mean", "avg", one of :data:`~rlightning.parallel.collectives.OPS`, or torch's object.
        """
        shared = cpu_group()
        if not isinstance(tensor, Tensor) or shared is None:
            return tensor
        is_mean = reduce_op in ("mean", "avg", dist.ReduceOp.AVG)
        named = "sum" if is_mean else reduce_op
        op = OPS[named.lower()] if isinstance(named, str) else named
        if group is None or group is dist.group.WORLD:
            group = shared
            barrier("reduce")
            reduced = tensor.detach().to("cpu", copy=True)
        else:
            reduced = tensor.detach()
        dist.all_reduce(reduced, op, group=group)
        if is_mean:
            reduced = reduced / dist.get_world_size(group)
            if not tensor.is_floating_point():
                # Lightning divides means by counts that it averages here: rounded to integers they would be wrong.
                return reduced.to(tensor.device)
        with torch.no_grad():
            return tensor.copy_(reduced)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether ``decision`` is True on all ranks, or with ``all=False`` on any; every rank must call this."""
        votes = int(self.reduce(torch.tensor(int(decision)), reduce_op="sum"))
        return votes == self.world_size if all else votes > 0

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, object]:
        """Load the checkpoint at rank 0's path, and return it; every rank must call this.

        Only rank 0 has verified which checkpoint is the newest undamaged one.
        """
        return super().load_checkpoint(self.broadcast(checkpoint_path), weights_only)

    def on_exception(self, exception: BaseException) -> None:
        """Report the exception, which ends the run, to the other ranks. Lightning calls this."""
        # Ranks that multiprocessing started have Lightning's launcher, which does not report.
        report_failure(exception)
        super().on_exception(exception)


class DDP(ConnectedRanks, DDPStrategy):
    """Lightning's ``DDPStrategy`` with barriers that have a name and a timeout; a failure of one rank ends all ranks.

    Arguments are those of :class:`ConnectedRanks` and of ``DDPStrategy``, such as ``find_unused_parameters``.
    """

    def training_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        """Run the module's step after a barrier, because DDP's own collectives cannot be interrupted."""
        barrier("training step")
        return super().training_step(*args, **kwargs)

    def teardown(self) -> None:
        """Release DDP's reference to the process group, because a traceback may keep DDP alive until exit.

        If DDP had the last reference, its destructor would wait for gloo's threads while holding Python's GIL, and one
        of them may wait for the GIL (https://github.com/pytorch/pytorch/issues/56297).
        """
        wrapped = self.model
        super().teardown()
        if isinstance(wrapped, DistributedDataParallel):
            vars(wrapped).update(reducer=None, logger=None)


def replace_lightning_ddp() -> None:
    """Register this package's DDP in Lightning's registry in place of ``DDPStrategy``, under all of its names.

    Thus ``trainer.strategy: ddp`` uses it, and so does the default strategy for several devices.
    """
    for name, entry in StrategyRegistry.items():
        if entry["strategy"] is DDPStrategy:
            description = f"{entry['description']}; its ranks end together"
            StrategyRegistry.register(name, DDP, description, override=True, **entry["init_params"])
