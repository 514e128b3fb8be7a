"""One CUDA device that torch finds in this process, and a list of what would have begun to use it."""

import traceback
from types import SimpleNamespace
from typing import Any

import torch

touched: list[str] = []
"""The stacks of whatever makes a CUDA context."""


def note_touch(*args: Any, **kwargs: Any) -> None:
    """In place of what makes a context."""
    touched.append("".join(traceback.format_stack(limit=6)))


def note_stream(*args: Any) -> Any:
    """In place of a stream, which torch's build for CUDA would ask the driver for."""
    note_touch()
    return SimpleNamespace(is_capturing=lambda: False)


def pretend_cuda() -> None:
    """Have torch find the device."""
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda._lazy_init = note_touch
    torch.cuda.get_rng_state_all = lambda: [note_touch()]  # type: ignore[func-returns-value, list-item]
    torch.cuda.set_rng_state_all = note_touch
    torch.accelerator.current_stream = note_stream
