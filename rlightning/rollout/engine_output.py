"""One sample as a sampler's own code has it, before it is a :class:`~rlightning.types.Sample`."""

from collections.abc import Sequence
from typing import NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64] | NDArray[np.int32] | memoryview
"""An array of integers; from another process, its memory."""
Floats = NDArray[np.float32] | memoryview


class EngineOutput(TypedDict):
    """One sample, as :meth:`~rlightning.rollout.vllm.server.VLLMServer.generate` returns it.

    Attributes:
        token_ids: [C].
        logprobs: [C], under the distribution that each token was drawn from.
        weight_versions: [C], of the weights that sampled each.
        end: the stop token or stop string that ended it; None for its length.
        num_cached_tokens: of the prompt, whose keys and values the engine had.
        supports: the tokens that each token was drawn from, one token's after the other's, and the number of each.
    """

    token_ids: Integers
    logprobs: Floats
    weight_versions: Integers
    end: int | str | None
    num_cached_tokens: NotRequired[int]
    supports: NotRequired[tuple[Integers | Sequence[int], Integers | Sequence[int]] | None]
