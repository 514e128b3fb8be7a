"""The devices on which engines run, by names that are valid for CUDA on the whole host."""

import logging
import os
import socket

import torch

from rlightning.errors import ConfigError
from rlightning.parallel.collectives import gather_objects

log = logging.getLogger(__name__)

COLLECTOR_RANK = 0
"""The rank that samples from all engines. It owns the standalone engines and their weight sender, or the sampler in the
trainer's process.
"""


def lent_devices(own: torch.device, ranks: range) -> tuple[str, ...]:
    """Return the CUDA device of each of the ranks that share an engine, () on the CPU.

    If ``ranks`` are several, every rank of the run must call it.

    A device is its index or UUID on the host, as for ``CUDA_VISIBLE_DEVICES``, so that it is the same on each rank.

    Args:
        own: this rank's device.
        ranks: the ranks that share an engine.
    """
    if own.type != "cuda":
        return ()
    name = _name(own)
    names = [name] if len(ranks) == 1 else gather_objects(name, name="devices")[ranks.start : ranks.stop]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"Ranks {ranks.start} to {ranks.stop - 1} are to share an engine, but their devices all go by the name of "
            f"{names[0]}. Let each rank see all devices of its host (SLURM: --gpus-per-node, not --gpus-per-task)."
        )
    return tuple(names)


def check_group_size(size: int, num_ranks: int) -> None:
    """Raise a ConfigError if the ranks cannot be divided into groups of ``size`` that share an engine."""
    if num_ranks % size:
        raise ConfigError(
            f"rollout.engine.tensor_parallel_size={size} runs one engine on the devices of {size} neighbouring ranks, "
            f"but there are {num_ranks} ranks. Set trainer.devices to a multiple of {size}."
        )


def check_group_hosts(size: int) -> None:
    """Raise a ConfigError if :func:`check_group_size` does, or if the ranks of a group are on several hosts.

    Every rank must call it.
    """
    if size == 1:
        return
    hosts = gather_objects(socket.gethostname(), name="hosts")
    check_group_size(size, len(hosts))
    if any(len(set(hosts[first : first + size])) > 1 for first in range(0, len(hosts), size)):
        raise ConfigError(
            f"rollout.engine.tensor_parallel_size={size} runs one engine on the devices of {size} neighbouring ranks, "
            "which must be on one host. Use a size that divides the ranks of each host."
        )


def free_devices(own: torch.device, num_engines: int, devices_per_engine: int) -> list[tuple[str, ...]]:
    """Return for each standalone engine the names of its CUDA devices, which no rank of this host uses; () on the CPU.

    If too few devices are free, several engines get the same ones. Every rank must call it.

    Args:
        own: this rank's device.
        num_engines: number of engines, all on rank 0's host.
        devices_per_engine: number of devices of an engine.

    Raises:
        ConfigError: there are too few free devices for one engine.
    """
    host = socket.gethostname()
    taken = {name for other, name in gather_objects((host, _name(own)), name="devices") if other == host}
    if own.type != "cuda":
        return [()] * num_engines
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    free = [name for name in names if name not in taken]
    starts = range(0, len(free) - devices_per_engine + 1, devices_per_engine)
    places = [tuple(free[start : start + devices_per_engine]) for start in starts]
    if not places:
        raise ConfigError(
            f"A standalone engine of {devices_per_engine} devices (rollout.engine.tensor_parallel_size) needs as many "
            f"beside the trainer's, which leaves {len(free)} of {len(names)}. Lower trainer.devices."
        )
    if num_engines > len(places):
        log.info("rollout.num_engines=%d share %d free places.", num_engines, len(places))
    return [places[number % len(places)] for number in range(num_engines)]


def _name(own: torch.device) -> str:
    """Return the device's name on the host, which ``CUDA_VISIBLE_DEVICES`` of this process does not change."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    index = own.index or 0
    return visible.split(",")[index] if visible else str(index)
