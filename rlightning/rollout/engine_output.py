"""The raw output of one sample, before it is converted to a :class:`~rlightning.types.Sample`."""

from collections.abc import Sequence
from typing import NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64] | NDArray[np.int32] | memoryview
"""An array of integers; a memoryview if it came from another process."""
Floats = NDArray[np.float32] | memoryview


class EngineOutput(TypedDict):
    """One sample, as :meth:`~rlightning.rollout.vllm.server.VLLMServer.generate` returns it.

    Attributes:
        token_ids: [C].
        logprobs: [C], under the distribution that each token was drawn from.
        weight_versions: [C], the version of the weights that sampled each token.
        end: the stop token or stop string that ended the sample; None if it reached its maximum length.
        num_cached_tokens: tokens of the prompt that were in the engine's prefix cache.
        supports: for truncated sampling the token ids from which each token was drawn, concatenated, and their number
            for each token.
    """

    token_ids: Integers
    logprobs: Floats
    weight_versions: Integers
    end: int | str | None
    num_cached_tokens: NotRequired[int]
    supports: NotRequired[tuple[Integers | Sequence[int], Integers | Sequence[int]] | None]
