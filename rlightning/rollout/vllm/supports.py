"""The supports of truncated distributions, from the log-probabilities that vLLM returns with each token.

With ``logprobs_mode="processed_logprobs"`` these are log-probabilities under the truncated distribution: minus infinity
for tokens that ``top_p``, ``top_k`` or ``min_p`` exclude. The support consists of those of the K most likely tokens
that have a finite value.

Letters: ``C`` tokens of a sample, ``K`` most likely tokens that vLLM returns.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from vllm.logprobs import FlatLogprobs
from vllm.v1.outputs import LogprobsLists


class TruncatedLogprobs(NamedTuple):
    """The log-probabilities of a sample's tokens under their truncated distributions, and the distributions' supports.

    Attributes:
        logprobs: [C].
        token_ids: the supports, concatenated, each with the sampled token first.
        sizes: [C], tokens of each support; 0 for a support of more tokens than vLLM returned.
    """

    logprobs: NDArray[np.float32]
    token_ids: NDArray[np.int32]
    sizes: NDArray[np.int32]


def drop_cut_tokens(logprobs: LogprobsLists) -> LogprobsLists:
    """Return log-probabilities from vLLM's core without the last columns, if these contain only excluded tokens.

    Args:
        logprobs: [C, 1 + K], of the sampled token and the most likely ones.
    """
    if logprobs.logprobs.shape[1] == 1:
        return logprobs
    width = 1 + int(np.isfinite(logprobs.logprobs[:, 1:]).sum(1).max(initial=0))
    return logprobs._replace(
        logprob_token_ids=np.ascontiguousarray(logprobs.logprob_token_ids[:, :width]),
        logprobs=np.ascontiguousarray(logprobs.logprobs[:, :width]),
    )


def read_supports(flat: FlatLogprobs, max_support: int) -> TruncatedLogprobs:
    """Return the log-probabilities of a sample's tokens and their supports, from the output of vLLM's client.

    With equal logits ``top_k=K`` may leave more than K tokens, of which vLLM returns K and the sampled one. The sampled
    token's log-probability is normalized over the returned ones, as in the trainer.

    Args:
        flat: for each token its own log-probability, followed by those of the K most likely tokens.
        max_support: maximum tokens of a support, besides the sampled one.
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
