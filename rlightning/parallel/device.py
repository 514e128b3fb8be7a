"""The only module that synchronizes with the device and calls its memory allocator.

The functions do nothing, and create no CUDA context, for a CPU device or in a controller
(:mod:`~rlightning.parallel.execution_mode`).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from rlightning.parallel.execution_mode import is_controller
from rlightning.processes.cpu_cores import num_cores
from rlightning.protocols import HasAccelerator, HasDevice, HasRootDevice, HasStrategy, has
from rlightning.torch_internals import set_allocator

GIB = 1 << 30
HOST_THREADS = 4
"""Maximum number of torch's threads on the host of a process with a GPU."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with the user's settings of PyTorch's caching allocator."""
EXPANDABLE, PLAIN = "expandable_segments:True", "expandable_segments:False"


@dataclass(frozen=True)
class MemoryUse:
    """A device's memory use, in bytes.

    Attributes:
        allocated: allocated by this process's tensors.
        reserved: reserved by this process's caching allocator.
        peak: maximum of ``allocated`` since the start or :func:`torch.cuda.reset_peak_memory_stats`.
        free: not used by any process.
        total: the device's memory.
    """

    allocated: int
    reserved: int
    peak: int
    free: int
    total: int


def share_host_threads(num_processes: int) -> None:
    """Set torch's number of CPU threads to this rank's share of the cores, unless ``OMP_NUM_THREADS`` is set.

    Lightning sets that variable, which child processes would then take for the user's setting.

    Args:
        num_processes: number of ranks on this host.
    """
    if not _is_thread_count_set():
        torch.set_num_threads(max(1, num_cores() // num_processes))


def limit_host_threads() -> None:
    """Limit torch to :data:`HOST_THREADS` CPU threads, unless ``OMP_NUM_THREADS`` is set.

    With a GPU the host copies a few megabytes a step; waking a thread on every core can take longer than the copy.
    """
    if not _is_thread_count_set():
        torch.set_num_threads(min(torch.get_num_threads(), HOST_THREADS))


def _is_thread_count_set() -> bool:
    """Return whether the user has set ``OMP_NUM_THREADS``; torchrun sets it to 1 if it is not set."""
    count = os.environ.get("OMP_NUM_THREADS")
    return count is not None and not (count == "1" and "TORCHELASTIC_RUN_ID" in os.environ)


def use_tensor_cores(device: torch.device, precision: str) -> None:
    """Allow TF32 for CUDA's float32 matrix products, in a run that computes in bfloat16.

    Such a run has few float32 products, of factors that were rounded to bfloat16. A run in float32 is not affected.
    """
    if device.type == "cuda" and precision.startswith("bf16"):
        torch.set_float32_matmul_precision("high")


@contextmanager
def exact_float32() -> Iterator[None]:
    """Context manager in which CUDA computes float32 matrix products without TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def use_expandable_segments() -> None:
    """Have PyTorch's caching allocator use expandable segments, which avoid fragmentation.

    Without them, micro-batches of varying lengths left 13 of an H100's 79 GiB fragmented (docs/measurements.md). A
    user's setting (:data:`ALLOCATOR_VARIABLES`) takes precedence.
    """
    if torch.cuda.is_available() and not _allocator_settings():
        set_allocator(EXPANDABLE)


@contextmanager
def shareable_memory() -> Iterator[None]:
    """Context manager in which CUDA memory is allocated such that other processes can open it.

    Other processes can open expandable segments only if the system lets them trace this one (pytorch issue 165685).
    """
    settings = _allocator_settings() or EXPANDABLE
    if EXPANDABLE not in settings or not torch.cuda.is_available():
        yield
        return
    set_allocator(settings.replace(EXPANDABLE, PLAIN))
    try:
        yield
    finally:
        set_allocator(settings)


def _allocator_settings() -> str:
    return next(filter(None, map(os.environ.get, ALLOCATOR_VARIABLES)), "")


def synchronize(device: torch.device | None = None) -> None:
    """Wait until the device has finished all work that this process queued, on any stream.

    None stands for the CUDA device that this process uses, if any.
    """
    if _is_used(device):
        torch.cuda.synchronize(device)


def synchronize_stream(device: torch.device | None = None) -> None:
    """Wait until the device has finished the work of the current stream; other streams may continue."""
    if _is_used(device):
        torch.cuda.current_stream(device).synchronize()


def empty_cache(device: torch.device | None = None) -> None:
    """Return the caching allocator's unused blocks to the device, where other processes can use them."""
    if _is_used(device):
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def memory_use(device: torch.device | None = None) -> MemoryUse | None:
    """Return the device's memory use; None if this process uses no CUDA device."""
    if not _is_used(device):
        return None
    free, total = torch.cuda.mem_get_info(device)
    return MemoryUse(
        allocated=torch.cuda.memory_allocated(device),
        reserved=torch.cuda.memory_reserved(device),
        peak=torch.cuda.max_memory_allocated(device),
        free=free,
        total=total,
    )


def has_context() -> bool:
    """Return whether this process has a CUDA context."""
    return bool(torch.cuda.is_initialized())


def device_of(trainer: object, module: object) -> torch.device | None:
    """Return the device of a training loop of any kind; None if it is unknown.

    The trainer may be Lightning's or a Fabric (``strategy.root_device``), transformers' (``accelerator.device``), or a
    user's object (``device``); otherwise the device is that of the module's ``device`` or parameters.
    """
    for device in _named_devices(trainer, module):
        if device is not None:
            return torch.device(device)
    parameters = module.parameters() if isinstance(module, torch.nn.Module) else iter(())
    first = next(parameters, None)
    return None if first is None else first.device


def _named_devices(trainer: object, module: object) -> Iterator[torch.device | str | None]:
    if has(trainer, HasStrategy) and has(trainer.strategy, HasRootDevice):
        yield trainer.strategy.root_device
    if has(trainer, HasAccelerator) and has(trainer.accelerator, HasDevice):
        yield trainer.accelerator.device
    for owner in (trainer, module):
        if has(owner, HasDevice):
            yield owner.device


def host_bytes(num_bytes: int, device: torch.device) -> Tensor:
    """Return uninitialised host memory, [num_bytes] uint8, for copies to and from ``device``; pinned for CUDA."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=_is_used(device))


def _is_used(device: torch.device | None) -> bool:
    """Return whether this process can have work or memory on the device, which needs a CUDA context."""
    is_cuda = device is None or device.type == "cuda"
    return is_cuda and torch.cuda.is_initialized() and not is_controller()
