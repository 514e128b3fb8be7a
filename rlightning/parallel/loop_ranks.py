"""This process's place among the ranks of a loop, whoever drives it."""

from typing import Any

import torch.distributed as dist


def rank_in(loop: Any) -> int:
    """Return the rank of this process: ``loop.global_rank``, else that of torch.distributed, else 0."""
    rank: int | None = getattr(loop, "global_rank", None)
    return rank if rank is not None else dist.get_rank() if _has_group() else 0


def num_ranks_in(loop: Any) -> int:
    """Return the number of ranks: ``loop.world_size``, else that of torch.distributed, else 1."""
    number: int | None = getattr(loop, "world_size", None)
    return number if number is not None else dist.get_world_size() if _has_group() else 1


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()
