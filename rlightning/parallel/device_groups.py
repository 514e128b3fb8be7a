"""Ends collectives on devices that wait for ranks which will not come."""

import contextlib
import threading

import torch
import torch.distributed as dist


def abort_device_groups(seconds: float) -> None:
    """Abort NCCL's communicators of all process groups, so that what waits in their collectives goes on.

    A rank that waited gets garbage from its collective, or an error, and can use the groups no more.

    Args:
        seconds: to wait for it. Aborts can wait for one another, so each has a thread of its own.
    """
    if not dist.is_available() or not dist.is_initialized() or not dist.is_nccl_available():
        return
    threads = [threading.Thread(target=backend.abort, daemon=True) for backend in _nccl_backends()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)


def _nccl_backends() -> "list[dist.ProcessGroupNCCL]":
    found = []
    for group in list(dist.distributed_c10d._world.pg_names):
        with contextlib.suppress(RuntimeError):  # a group without a backend for this device
            backend = group._get_backend(torch.device("cuda"))
            if isinstance(backend, dist.ProcessGroupNCCL):
                found.append(backend)
    return found
