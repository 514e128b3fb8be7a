"""The supports of truncated distributions, from the log-probabilities that vLLM returns with each token.

With ``logprobs_mode="processed_logprobs"`` these are of the distribution that was sampled from, minus infinity for what
``top_p``, ``top_k`` or ``min_p`` have cut off: of the K likeliest tokens, those above that are the support.

Letters: ``C`` tokens of a sample, ``K`` likeliest tokens that vLLM returns.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from vllm.logprobs import FlatLogprobs
from vllm.v1.outputs import LogprobsLists


class TruncatedLogprobs(NamedTuple):
    """The log-probabilities of a sample's tokens among their supports, and these supports.

    Attributes:
        logprobs: [C].
        token_ids: the supports' tokens, one support after the other, the sampled token first.
        sizes: [C], of the supports; 0 where more tokens were left than are known.
    """

    logprobs: NDArray[np.float32]
    token_ids: NDArray[np.int32]
    sizes: NDArray[np.int32]


def drop_cut_tokens(logprobs: LogprobsLists) -> LogprobsLists:
    """Return what vLLM's core has of some tokens without columns in which all is cut off, the last ones.

    Args:
        logprobs: [C, 1 + K], the sampled token and the likeliest ones.
    """
    if logprobs.logprobs.shape[1] == 1:
        return logprobs
    width = 1 + int(np.isfinite(logprobs.logprobs[:, 1:]).sum(1).max(initial=0))
    return logprobs._replace(
        logprob_token_ids=np.ascontiguousarray(logprobs.logprob_token_ids[:, :width]),
        logprobs=np.ascontiguousarray(logprobs.logprobs[:, :width]),
    )


def read_supports(flat: FlatLogprobs, max_support: int) -> TruncatedLogprobs:
    """Return the log-probabilities of a sample's tokens and their supports, from what vLLM's client has of it.

    Equal logits may leave more than K tokens of ``top_k=K``, of which K travel, and the sampled one: its
    log-probability is that among them, as the trainer's is.

    Args:
        flat: of each token its own log-probability, and then those of the K likeliest ones.
        max_support: of the likeliest tokens, those of a support that is known.
    """
    starts = np.asarray(flat.start_indices, np.int64)
    if not len(starts):
        return TruncatedLogprobs(np.zeros(0, np.float32), np.zeros(0, np.int32), np.zeros(0, np.int32))
    num_returned = np.asarray(flat.end_indices) - starts
    token_ids, logprobs = np.asarray(flat.token_ids, np.int32), np.asarray(flat.logprobs)
    is_left = np.isfinite(logprobs)
    is_left[starts] = True
    is_known = np.add.reduceat(is_left, starts, dtype=np.int32) <= 1 + max_support
    is_repeated = token_ids == token_ids[starts].repeat(num_returned)
    is_repeated[starts] = False
    is_kept = is_left & ~is_repeated & is_known.repeat(num_returned)
    mass = np.add.reduceat(np.exp(logprobs) * is_kept, starts)
    among_support = logprobs[starts] - np.log(np.where(is_known, mass, 1))
    sizes = np.add.reduceat(is_kept, starts, dtype=np.int32)
    return TruncatedLogprobs(among_support.astype(np.float32), token_ids[is_kept], sizes)
