"""Checks that weights are finite before they are saved: a model with NaN can be neither trained nor sampled."""

from collections.abc import Iterable

import torch
from torch import Tensor

from rlightning.errors import WeightError
from rlightning.parallel.collectives import gather_objects
from rlightning.parallel.sharding import local_tensor


def check_finite(weights: Iterable[tuple[str, Tensor]], consequence: str) -> None:
    """Raise a WeightError on all ranks if weights of any rank, whole or sharded, contain NaN or infinity; every rank
    must call it.

    The error begins with the clause ``consequence``, and names the first such weight.
    """
    own = next(iter(find_not_finite(weights)), None)
    found = [name for name in gather_objects(own, name="weights are finite") if name is not None]
    if found:
        raise WeightError(
            f"{consequence}: the weight '{found[0]}' is NaN or infinite, and what was saved before stays. Go on from "
            "there with a lower model.lr."
        )


@torch.no_grad()
def find_not_finite(weights: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of weights that contain NaN or infinity, with one synchronisation per device."""
    bounds_by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, weight in weights:
        own = local_tensor(weight.detach())
        if own.is_floating_point() and own.numel():
            # Both are NaN for a tensor with a NaN; neither needs memory.
            bounds_by_device.setdefault(own.device, {})[name] = torch.stack(own.aminmax()).float()
    names: list[str] = []
    for bounds in bounds_by_device.values():
        is_finite = torch.stack(list(bounds.values())).isfinite().all(dim=1).tolist()
        names += [name for name, fine in zip(bounds, is_finite, strict=True) if not fine]
    return names
