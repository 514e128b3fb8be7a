"""FSDP: a Lightning strategy that shards the models of a run over several devices."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from rlightning import intervals
from rlightning.errors import ConfigError, check_rules, did_you_mean
from rlightning.lightning_internals import set_device_mesh, update_device_properties
from rlightning.parallel.checkpoint import ShardedCheckpoints
from rlightning.parallel.replicated import average_gradients, broadcast_replicated, move_replicated
from rlightning.parallel.sharding import Automatic, CPUOffload, Sharding, shard_parts
from rlightning.parallel.strategy import ConnectedRanks
from rlightning.torch_internals import set_group_timeout


class FSDP(ConnectedRanks, ShardedCheckpoints, ModelParallelStrategy):
    """Shards weights, gradients and optimizer state over the ranks (FSDP2), optionally with tensor parallelism.

    ``trainer.strategy: rlightning.parallel.FSDP``, or ``fsdp2`` without arguments. With ``trainer.precision:
    bf16-mixed`` weights are gathered and used in bfloat16, and kept, reduced and optimized in float32. The number of
    data-parallel ranks is the number of ranks divided by ``tensor_parallel_size``. The mesh has three dimensions:
    copies of the weights, their shards, and tensor parallelism. Global rank = data-parallel rank x
    ``tensor_parallel_size`` + tensor-parallel rank.

    Args:
        tensor_parallel_size: number of neighbouring ranks that split each layer, and compute the same tokens.
        shard_size: number of data-parallel ranks that share one copy of the weights; other ranks have further copies
            (hybrid sharding), so that weights are gathered within a node, for example. None for all ranks: one copy.
        cpu_offload: what is kept in host memory. ``optimizer``: the optimizer state, copied to the device for each
            optimizer step; ``parameters``: weights, gradients and optimizer state, with optimizer steps on the host.
        reshard_after_forward: whether to free a layer's gathered weights between its forward and its backward. False
            gathers once for each optimizer step, and needs memory for the whole model in the dtype of the forward.
            "auto" is False on CUDA devices with ample memory for this, by the memory plan, and otherwise True.
        reduce_every_microbatch: whether to reduce gradients over the ranks after each micro-batch, so that a rank keeps
            only its shard of them. False reduces once for each optimizer step, and needs memory for all gradients in
            float32. "auto" as above.
        barrier_timeout: maximum seconds for which a rank waits for others, at a barrier or in a collective of the
            devices, before it fails with an error that names them.
        failure_grace: seconds in which ranks can clean up after a failure before they are killed.
    """

    def __init__(
        self,
        *,
        tensor_parallel_size: int = 1,
        shard_size: int | None = None,
        cpu_offload: CPUOffload = "none",
        reshard_after_forward: Automatic = "auto",
        reduce_every_microbatch: Automatic = "auto",
        barrier_timeout: float = 1800.0,
        failure_grace: float = intervals.CLEANUP_GRACE,
    ) -> None:
        is_split, is_shared = tensor_parallel_size >= 1, shard_size is None or shard_size >= 1
        check_rules(
            {
                f"tensor_parallel_size={tensor_parallel_size} must be at least 1. Use 1 for none": is_split,
                f"shard_size={shard_size} must be at least 1. Leave it out for all ranks": is_shared,
            }
        )
        if cpu_offload not in get_args(CPUOffload):
            raise ConfigError(
                f"cpu_offload='{cpu_offload}' is unknown. {did_you_mean(cpu_offload, get_args(CPUOffload))}"
            )
        for name, value in (
            ("reshard_after_forward", reshard_after_forward),
            ("reduce_every_microbatch", reduce_every_microbatch),
        ):
            if value not in (True, False, "auto"):
                raise ConfigError(f"{name}={value} is unknown. Use true, false or auto.")
        super().__init__(
            barrier_timeout=barrier_timeout, failure_grace=failure_grace, tensor_parallel_size=tensor_parallel_size
        )
        self.tensor_parallel_size, self.shard_size = tensor_parallel_size, shard_size
        self.cpu_offload: CPUOffload = cpu_offload
        # "auto" is the same as True until decide_gathering().
        self.reshard_after_forward: Automatic = reshard_after_forward
        self.reduce_every_microbatch: Automatic = reduce_every_microbatch

    def _configure_launcher(self) -> None:
        """Create the launcher; called before any process is started or device is used."""
        self.check_world_size()
        super()._configure_launcher()

    @property
    def data_parallel_size(self) -> int:
        """The number of data-parallel ranks: all ranks divided by ``tensor_parallel_size``."""
        return self.num_nodes * self.num_processes // self.tensor_parallel_size

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Arguments of Lightning's distributed sampler; ranks of one tensor-parallel group get the same data."""
        return {"num_replicas": self.data_parallel_size, "rank": self.global_rank // self.tensor_parallel_size}

    def check_world_size(self) -> None:
        """Raise a ConfigError if ``tensor_parallel_size`` and ``shard_size`` do not divide the number of ranks."""
        world_size = self.num_nodes * self.num_processes
        if world_size % self.tensor_parallel_size:
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_parallel_size} does not divide {world_size} ranks "
                f"(trainer.num_nodes={self.num_nodes} x {self.num_processes} devices). Use a divisor of {world_size}."
            )
        if self.shard_size is not None and self.data_parallel_size % self.shard_size:
            raise ConfigError(
                f"shard_size={self.shard_size} does not divide {self.data_parallel_size} data-parallel ranks "
                f"({world_size} ranks / tensor_parallel_size={self.tensor_parallel_size}). "
                f"Use a divisor of {self.data_parallel_size}, or leave it out."
            )

    def connect_ranks(self) -> None:
        """Create the process groups and the device mesh over all ranks; every rank must call this."""
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup_device(self.root_device)
        self._setup_distributed()
        shard_size = self.shard_size or self.data_parallel_size
        self._device_mesh = init_device_mesh(
            self.root_device.type,
            (self.data_parallel_size // shard_size, shard_size, self.tensor_parallel_size),
            mesh_dim_names=("replicate", "shard", "tensor_parallel"),
        )
        if self._timeout is not None:
            # A mesh's groups have torch's default timeout, not that of the default group.
            for dim in range(self._device_mesh.ndim):
                set_group_timeout(self._device_mesh.get_group(dim), self._timeout)
        set_device_mesh(self.lightning_module, self._device_mesh)

    def decide_gathering(self, *, reshard_after_forward: bool, reduce_every_microbatch: bool) -> None:
        """Replace the settings that are "auto", equally on all ranks; call it before models are loaded."""
        if self.reshard_after_forward == "auto":
            self.reshard_after_forward = reshard_after_forward
        if self.reduce_every_microbatch == "auto":
            self.reduce_every_microbatch = reduce_every_microbatch

    @property
    def sharding(self) -> Sharding:
        """The settings with which models are sharded over the ranks; available after :meth:`connect_ranks`."""
        return Sharding(
            mesh=self.device_mesh,
            device=self.root_device,
            compute_dtype=torch.bfloat16 if self.precision_plugin.precision == "bf16-mixed" else None,
            cpu_offload=self.cpu_offload,
            reshard_after_forward=bool(self.reshard_after_forward),
        )

    def setup(self, trainer: Trainer) -> None:
        """Set up model and optimizers as Lightning does; evaluations use ``no_grad`` in place of inference mode."""
        super().setup(trainer)
        # Weights that a forward pass has gathered in inference mode cannot be trained with afterwards.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False

    def model_to_device(self) -> None:
        """Move what is not sharded yet to the device with rank 0's values, and shard it where FSDP can; a collective.

        The run's models themselves were already sharded while loading.
        """
        assert self.model is not None
        move_replicated(self.model, self.root_device)
        broadcast_replicated(self.model)
        shard_parts(self.model, self.sharding)
        # Sets module.device, which otherwise only module.to() does.
        update_device_properties(self.model, device=self.root_device)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context manager in which backward passes postpone communication to the last micro-batch of an optimizer step.

        The postponed communication is the sum over copies of the weights (hybrid sharding), and with
        ``reduce_every_microbatch=False`` the whole reduction. Weights that a forward keeps gathered for its backward
        stay gathered for the next forward too: those of embedding and output layer, and with
        ``reshard_after_forward=False`` of all layers.
        """
        assert self.model is not None
        sharded = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        kept = sharded
        if self.reshard_after_forward:
            kept = [module for module in self.model.children() if isinstance(module, FSDPModule)]
        is_partial = self.reduce_every_microbatch
        set_sync = FSDPModule.set_requires_all_reduce if is_partial else FSDPModule.set_requires_gradient_sync
        for module in sharded:
            set_sync(module, False, recurse=False)
        for module in kept:
            module.set_reshard_after_backward(False, recurse=False)
        try:
            yield
        except BaseException:  # the weights may change before the next forward
            for module in kept:
                module.reshard()
            raise
        finally:
            for module in sharded:
                set_sync(module, True, recurse=False)
            for module in kept:
                module.set_reshard_after_backward(True, recurse=False)

    def average_gradients(self) -> None:
        """Average the gradients of unsharded parameters over all ranks, which must all call this before each step."""
        assert self.model is not None
        average_gradients(self.model)


StrategyRegistry.register("fsdp2", FSDP, description="FSDP2: weights, gradients and optimizer state are sharded.")
