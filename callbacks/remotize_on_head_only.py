"""Lets only one of several ranks with equal results store them."""

import logging
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rlightning.controller.tensor_store import set_stores_results
from rlightning.errors import ConfigError
from rlightning.hooks import RLCallback, check_repeated
from rlightning.protocols import HasAccelerator, HasStrategy, Loop, callbacks_of, has

log = logging.getLogger(__name__)

TENSOR_PARALLEL_DIMS = ("tensor_parallel", "tp")
"""Names of the tensor-parallel mesh dimension in Lightning and rlightning, and in transformers and torchtitan."""


class RemotizeOnHeadOnly(RLCallback):
    """Makes ``store_tensors`` store only on the first rank of a tensor-parallel group; on others it returns None.

    The ranks of such a group compute the same results, of which only one copy is read. Without reference counting the
    other copies would never be freed (docs/rtensor.md).

    The callback applies from ``setup`` to ``teardown`` or an exception, to all calls of
    :func:`~rlightning.controller.rtensor.store_tensors`. At other times, in a process that does not train (a
    controller, an engine), and without tensor parallelism, everything is stored.

    In a loop that is not Lightning's, call ``setup(loop, module, "fit")`` after the mesh is created, and at the end
    ``teardown(loop, module, "fit")``. The mesh is a ``DeviceMesh`` with names: ``loop.strategy.device_mesh``
    (Lightning, Fabric), ``loop.accelerator.torch_device_mesh`` (transformers), ``loop.device_mesh``, or the module's.
    Without a mesh, give ``group_size``.

    Args:
        mesh_dims: the mesh's dimensions along which results are equal; None for "tensor_parallel" or "tp", if present.
        group_size: without a mesh, the number of consecutive ranks that form a group.

    Attributes:
        is_head: whether this process stores results; None outside of a run and without a group, when it stores them.
    """

    runs_in = "workers"

    def __init__(self, *, mesh_dims: Sequence[str] | None = None, group_size: int | None = None) -> None:
        super().__init__()
        if group_size is not None and group_size < 1:
            raise ConfigError(f"group_size={group_size} must be at least 1. Leave it out where there is a mesh.")
        if group_size is not None and mesh_dims is not None:
            raise ConfigError(
                f"mesh_dims={list(mesh_dims)} and group_size={group_size} both say which ranks are a group. Keep one."
            )
        self.mesh_dims = mesh_dims
        self.group_size = group_size
        self.is_head: bool | None = None

    def setup(self, trainer: Loop, module: object, stage: str) -> None:
        """Make ``store_tensors`` store results only if this rank is the first of its tensor-parallel group."""
        check_repeated(callbacks_of(trainer))
        self.is_head = self._find_place(trainer, module)
        if self.is_head is False:
            log.info("results of this rank are not stored: the first rank of its group stores the same")
        set_stores_results(self.is_head is not False)

    def teardown(self, trainer: Loop, module: object, stage: str) -> None:
        """Make ``store_tensors`` store the results of this rank again."""
        self.is_head = None
        set_stores_results(True)

    def on_exception(self, trainer: Loop, module: object, exception: BaseException) -> None:
        """Undo :meth:`setup`, because ``teardown`` is not called after an exception."""
        self.teardown(trainer, module, "fit")

    def _find_place(self, trainer: Loop, module: object) -> bool | None:
        """Return whether this rank is the first of its group; None if it is in no group."""
        if self.group_size is not None:
            return _is_first_neighbour(self.group_size)
        mesh = _find_mesh(trainer, module)
        if self.mesh_dims is not None:
            _check_dims(mesh, self.mesh_dims)
        coordinate = None if mesh is None else mesh.get_coordinate()
        if mesh is None or coordinate is None:
            return None
        dims = self.mesh_dims or TENSOR_PARALLEL_DIMS
        return not any(place for name, place in zip(_names(mesh), coordinate, strict=False) if name in dims)


def _is_first_neighbour(group_size: int) -> bool | None:
    if not dist.is_initialized():
        return None
    if dist.get_world_size() % group_size:
        raise ConfigError(
            f"group_size={group_size} does not divide {dist.get_world_size()} ranks. "
            f"Use a divisor of {dist.get_world_size()}."
        )
    return dist.get_rank() % group_size == 0


def _find_mesh(trainer: Loop, module: object) -> DeviceMesh | None:
    places = [(trainer, "device_mesh"), (module, "device_mesh")]
    if has(trainer, HasAccelerator):
        places.insert(0, (trainer.accelerator, "torch_device_mesh"))
    if has(trainer, HasStrategy):
        places.insert(0, (trainer.strategy, "device_mesh"))
    for owner, name in places:
        try:
            mesh = getattr(owner, name, None)
        except RuntimeError:  # Lightning's strategies, while they have none
            continue
        if isinstance(mesh, DeviceMesh):
            return mesh
    return None


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()


def _check_dims(mesh: DeviceMesh | None, dims: Sequence[str]) -> None:
    unknown = [name for name in dims if mesh is None or name not in _names(mesh)]
    if unknown:
        there = f"a mesh with {list(_names(mesh))}" if mesh is not None else "no device mesh"
        raise ConfigError(
            f"mesh_dims={list(dims)}: '{unknown[0]}' is no dimension, there is {there}. "
            "Name one of a mesh's, or give group_size."
        )
