"""vLLM's scheduler with less work for a token. Loaded by vLLM's core as ``scheduler_cls``.

The core is one Python process that goes through all running sequences in every step. Where a model is small, that takes
longer than the GPU's part of the step (docs/performance.md). What runs when, and in which blocks, is as vLLM decides;
two things that it does for every token are done more rarely:

- to look for a slot in the KV cache: a sequence needs another block when its last one is full, and not before;
- to send log-probabilities: what is seen only when it is whole has them sent :data:`ROWS_AT_ONCE` tokens at a time.
"""

import multiprocessing
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus

from rlightning.rollout.process_group import die_with_parent

ROWS_AT_ONCE = 32
"""Tokens between two messages with a sequence's log-probabilities: the last ones, when all end at once, are few."""


class BlockwiseCache(KVCacheManager):
    """The KV cache's bookkeeping, for sequences that grow by a token only where they begin or fill a block.

    Attributes:
        block_tokens: of a block.
    """

    block_tokens: int

    def allocate_slots(self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """See KVCacheManager: a request's new blocks; none for a token that neither begins nor fills one."""
        offset = request.num_computed_tokens % self.block_tokens
        if num_new_tokens == 1 and 0 < offset < self.block_tokens - 1 and request.status is RequestStatus.RUNNING:
            return self.empty_kv_cache_blocks
        return super().allocate_slots(request, num_new_tokens, *args, **kwargs)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """See KVCacheManager: let others find the request's full blocks."""
        if num_computed_tokens % self.block_tokens == 0:
            super().cache_blocks(request, num_computed_tokens)


class CollectedLogprobs:
    """A step's log-probabilities, in the place of vLLM's: gives a request's own together with those held back before.

    Args:
        logprobs: of the step, a row a token.
        requests: in the order of the rows; None for one that is gone.
    """

    def __init__(self, logprobs: LogprobsLists, requests: list[Request | None]) -> None:
        self.step, self.requests = logprobs, requests
        # The first column is the sampled token's. What is held is numbers, which no garbage collector goes through.
        self._ids = logprobs.logprob_token_ids[:, 0].tolist()
        self._logprobs = logprobs.logprobs[:, 0].tolist()
        self._ranks = logprobs.sampled_token_ranks.tolist()
        self._first = logprobs.cu_num_generated_tokens or range(len(requests))

    def slice_request(self, index: int, num_tokens: int) -> LogprobsLists | None:
        """The rows that are to be sent for the request at ``index``, which has sampled so many tokens; or None."""
        request = self.requests[index]
        if request is None or not is_seen_whole(request):
            rows: LogprobsLists = self.step.slice_request(index, num_tokens)
            return rows
        if not num_tokens:
            return None  # nothing will be sent for it, whatever has become of it
        held: tuple[list[Any], ...] = request.__dict__.get("held_logprobs") or ([], [], [])
        ids, logprobs, ranks = held
        first, end = self._first[index], self._first[index] + num_tokens
        ids += self._ids[first:end]
        logprobs += self._logprobs[first:end]
        ranks += self._ranks[first:end]
        if len(ranks) < ROWS_AT_ONCE and request.status is RequestStatus.RUNNING:
            request.__dict__["held_logprobs"] = held
            return None
        request.__dict__.pop("held_logprobs", None)
        like = self.step
        return LogprobsLists(
            np.array(ids, like.logprob_token_ids.dtype)[:, None],
            np.array(logprobs, like.logprobs.dtype)[:, None],
            np.array(ranks, like.sampled_token_ranks.dtype),
        )


def is_seen_whole(request: Request) -> bool:
    """Whether nobody looks at a request before it has ended, as for stop strings, and then at what it sampled alone."""
    params = request.sampling_params
    if params is None or params.logprobs != 0:
        return False
    return params.output_kind is RequestOutputKind.FINAL_ONLY and not params.detokenize


class RolloutScheduler(Scheduler):
    """What makes a scheduler do less for a token; see the module's docstring."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Several groups of layers may have blocks of different sizes; those with a window free blocks as they go on.
        groups = self.kv_cache_config.kv_cache_groups
        is_plain = len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
        if is_plain and self.connector is None and not self.num_spec_tokens:
            manager: Any = self.kv_cache_manager
            manager.__class__ = BlockwiseCache  # the scheduler makes it itself
            manager.block_tokens = self.block_size

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """See Scheduler: take in what a step has sampled."""
        if model_runner_output.logprobs is not None:
            requests = [self.requests.get(request_id) for request_id in model_runner_output.req_ids]
            model_runner_output.logprobs = CollectedLogprobs(model_runner_output.logprobs, requests)
        return super().update_from_output(scheduler_output, model_runner_output)


class AsyncRolloutScheduler(RolloutScheduler, AsyncScheduler):
    """The same, for steps that are scheduled ahead of the device."""


def make_scheduler(vllm_config: Any, **arguments: Any) -> Scheduler:
    """A scheduler, for a core that ends with the process that it was forked from; the arguments are those of vLLM's."""
    if multiprocessing.parent_process() is not None:
        die_with_parent()
    kind = AsyncRolloutScheduler if vllm_config.scheduler_config.async_scheduling else RolloutScheduler
    return kind(vllm_config=vllm_config, **arguments)
