"""A short sequence on which actor and engine must agree: stale or wrong weights show in its log-probabilities."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig

from rlightning.errors import EngineError
from rlightning.models.architecture import describe_traits
from rlightning.models.shards import local_tensor
from rlightning.rollout.engine_link import VLLMConfig

CANARY_TEXT = "Question: what is 12 + 34? Answer: 12 + 34 = 46."
CANARY_TOKENS = 32
VERIFY_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
TF32_TOLERANCE = 0.02
"""Nats a token, in the mean. Measured between an actor and a vLLM of equal weights: 5e-7 in float32, 0.007 in bfloat16;
with one wrong matrix 0.2 and more."""

_BLOCK = 4096
_PART = 2048 * _BLOCK  # elements that are multiplied at once, 64 MiB of products
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def canary_tokens(tokenizer: Any, max_tokens: int) -> list[int]:
    """The canary [P]: a short text, filled up where the tokenizer makes too little of it.

    Args:
        tokenizer: the policy's.
        max_tokens: cut it here.
    """
    token_ids = list(tokenizer(CANARY_TEXT, add_special_tokens=False).input_ids)
    token_ids += [(7 * i + 1) % len(tokenizer) for i in range(CANARY_TOKENS - len(token_ids))]
    return token_ids[: min(CANARY_TOKENS, max_tokens)]


class WeightPrint:
    """Tells whether weights have changed since it was asked last, by whatever way they were written.

    It keeps a checksum of each tensor's bits. Neither ``tensor._version`` nor addresses would do: writes through
    ``.data`` do not count up the one, and offloading to the host changes the other.
    """

    def __init__(self) -> None:
        self._known: list[int] | None = None

    def has_changed(self, weights: Iterable[tuple[str, Tensor]]) -> bool:
        """Compare this rank's shards with those of the call before, on whatever device; False for the first call.

        Args:
            weights: names, which are not compared, and tensors.
        """
        tensors = [local_tensor(tensor) for _, tensor in weights]
        if any(tensor.numel() and not tensor.untyped_storage().nbytes() for tensor in tensors):
            return False  # they wait in the host's memory, where nothing writes to them
        sums = [checksum(tensor) for tensor in tensors]
        known, self._known = self._known, torch.stack(sums).tolist() if sums else []
        return known is not None and known != self._known


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return a number of a tensor's bits in their order, equal on all devices.

    Each element has an odd factor of its own, modulo 2^64: a change of one element always shows, and one of several
    stays unseen once in 2^32 times or less. Elements are multiplied and summed by blocks, so are the blocks' sums, and
    theirs.

    Args:
        tensor: of any shape and dtype.

    Returns:
        A scalar of int64.
    """
    numbers = tensor.detach().contiguous().flatten().view(_INTEGERS[tensor.element_size()])
    for factors in _factors(tensor.device):
        sums = [numbers.new_zeros(0, dtype=torch.int64)]
        for part in numbers.split(_PART):
            blocks, rest = part.split([len(part) - len(part) % _BLOCK, len(part) % _BLOCK])
            sums += [(blocks.view(-1, _BLOCK) * factors).sum(1), (rest * factors[: len(rest)]).sum(0, keepdim=True)]
        numbers = torch.cat(sums)
    return numbers.sum()


@cache
def _factors(device: torch.device) -> Tensor:
    """[3, B] odd int64: of the elements of a block, of the blocks of a part, of the rest."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**62), 2**62, (3, _BLOCK), generator=generator)
    return (2 * drawn + 1).to(device)


def default_tolerance(engine: VLLMConfig, actor_precision: str) -> float:
    """The coarser of the two precisions, the engine's and the actor's, decides."""
    tolerance = VERIFY_TOLERANCE[engine.dtype]
    if engine.device.type == "cuda":
        tolerance = max(tolerance, TF32_TOLERANCE)  # which vLLM multiplies float32 matrices in
    if "16" in actor_precision:
        tolerance = max(tolerance, VERIFY_TOLERANCE[torch.bfloat16])
    return tolerance


def check_agreement(
    expected: NDArray[np.float32],
    got: NDArray[np.float32],
    tolerance: float,
    weight_version: int,
    model_config: PreTrainedConfig | None = None,
) -> None:
    """Raise EngineError if an engine's log-probabilities are not the actor's.

    Args:
        expected: [P], the canary's under the actor; the first is not looked at.
        got: [P], under the engine.
        tolerance: the largest mean difference, in nats.
        weight_version: of the weights that the engine was sent.
        model_config: the actor's, for what the error says of its architecture; None where it is not known.
    """
    gap = float(abs(expected - got)[1:].mean())
    if not gap <= tolerance:  # nor is it if the gap is not a number
        traits = [] if model_config is None else describe_traits(model_config)
        raise EngineError(
            f"Actor and engine disagree after weights of version {weight_version} were sent: the canary's mean "
            f"log-probability is {expected[1:].mean():.4f} under the actor and {got[1:].mean():.4f} under the engine, "
            f"and they differ by {gap:.4f} a token, where rollout.verify_tolerance allows {tolerance}. Checked: every "
            f"parameter of the engine's model was loaded, and one prompt of {len(expected)} tokens was compared. Not "
            "known: whether the engine took the values as they were sent, or computes otherwise than the actor. The "
            f"architecture: {'; '.join(traits) or 'unknown'}."
        )
