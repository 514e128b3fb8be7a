"""DDP: the whole actor on every device, as a Lightning strategy."""

from typing import Any

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch.nn.parallel import DistributedDataParallel

from rlightning.parallel.barrier import barrier
from rlightning.parallel.strategy import ConnectedRanks


class DDP(ConnectedRanks, DDPStrategy):
    """Lightning's ``DDPStrategy`` whose ranks meet at named barriers with a timeout, and end together.

    Args:
        barrier_timeout: seconds after which a rank that waits for the others gives up and says who is missing: at a
            barrier, and in a collective of the devices.
        failure_grace: seconds that ranks get to clean up after a failure before they are ended hard.
        kwargs: of ``DDPStrategy``, such as ``find_unused_parameters``.
    """

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Meet the other ranks before the module's step: nothing could interrupt DDP's own collectives ahead of it."""
        barrier("training step")
        return super().training_step(*args, **kwargs)

    def teardown(self) -> None:
        """Have DDP let go of the process group, though a traceback may hold DDP itself until Python ends.

        As the last to hold the group it would end gloo's threads while it holds Python's lock, and wait for ever for
        one that waits for the lock (https://github.com/pytorch/pytorch/issues/56297).
        """
        wrapped = self.model
        super().teardown()
        if isinstance(wrapped, DistributedDataParallel):
            vars(wrapped).update(reducer=None, logger=None)


def replace_lightning_ddp() -> None:
    """Make ``trainer.strategy: ddp``, its variants, and what Lightning takes for several devices this package's DDP."""
    for name, entry in StrategyRegistry.items():
        if entry["strategy"] is DDPStrategy:
            description = f"{entry['description']}; its ranks end together"
            StrategyRegistry.register(name, DDP, description, override=True, **entry["init_params"])
