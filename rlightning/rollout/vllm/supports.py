"""The supports of truncated distributions, from the log-probabilities that vLLM returns with each token.

With ``logprobs_mode="processed_logprobs"`` these are of the distribution that was sampled from, minus infinity for what
``top_p``, ``top_k`` or ``min_p`` have cut off: of the K likeliest tokens, those above that are the support.

Letters: ``C`` tokens of a sample, ``K`` tokens that a support has at most.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from vllm.v1.outputs import LogprobsLists

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs


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


def read_supports(flat: "FlatLogprobs") -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.int32]]:
    """Return the log-probabilities of a sample's tokens among their supports, and these supports.

    Equal logits may leave more than K tokens of ``top_k=K``, of which K travel, and the sampled one: its
    log-probability is that among them, as the trainer's is.

    Args:
        flat: vLLM's FlatLogprobs: of each token its own, and then those of the K likeliest ones.

    Returns:
        [C] float32; the supports' tokens, the sampled one first; and [C] their sizes.
    """
    starts, ends = np.asarray(flat.start_indices, np.int64), np.asarray(flat.end_indices, np.int64)
    token_ids, logprobs = np.asarray(flat.token_ids, np.int32), np.asarray(flat.logprobs, np.float32)
    is_sampled = np.zeros(len(token_ids), np.bool_)
    is_sampled[starts] = True
    is_kept = is_sampled | (np.isfinite(logprobs) & (token_ids != token_ids[starts].repeat(ends - starts)))
    sizes = np.add.reduceat(is_kept, starts, dtype=np.int32) if len(starts) else np.zeros(0, np.int32)
    kept = logprobs[is_kept].astype(np.float64)
    first = sizes.cumsum() - sizes
    mass = np.add.reduceat(np.exp(kept), first) if len(starts) else np.zeros(0)
    return (kept[first] - np.log(mass)).astype(np.float32), token_ids[is_kept], sizes
