"""vLLM's scheduler with less work for a token. Loaded by vLLM's core as ``scheduler_cls``.

The core is one Python process that goes through all running sequences in every step. Where a model is small, that takes
longer than the GPU's part of the step (docs/performance.md). What runs when, and in which blocks, is as vLLM decides;
two things that it does for every token are done more rarely:

- to look for a slot in the KV cache: a sequence needs another block when its last one is full, and not before;
- to send log-probabilities: what is seen only when it is whole has them sent :data:`ROWS_AT_ONCE` tokens at a time.
"""

from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus

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
        is_amid = (
            0 < request.num_computed_tokens % self.block_tokens < self.block_tokens - 1
        )  # neither begins nor fills
        if num_new_tokens == 1 and is_amid and request.status is RequestStatus.RUNNING:
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
        columns = (logprobs.logprob_token_ids, logprobs.logprobs, logprobs.sampled_token_ranks)
        self._rows = list(zip(*(column.tolist() for column in columns), strict=True))
        self._types = [column.dtype for column in columns]
        self._first = logprobs.cu_num_generated_tokens or range(len(requests))

    def slice_request(self, index: int, num_tokens: int) -> LogprobsLists | None:
        """The rows that are to be sent for the request at ``index``, which has sampled so many tokens; or None."""
        request = self.requests[index]
        if request is None or not is_seen_whole(request):
            rows: LogprobsLists = self.step.slice_request(index, num_tokens)
            return rows
        held: list[Any] = request.__dict__.setdefault("held_logprobs", [])
        first = self._first[index]
        held += self._rows[first : first + num_tokens]
        is_under_way = len(held) < ROWS_AT_ONCE and request.status is RequestStatus.RUNNING
        if is_under_way or not held:
            return None
        ids, logprobs, ranks = (np.array(*column) for column in zip(zip(*held, strict=True), self._types, strict=True))
        held.clear()
        return LogprobsLists(ids, logprobs, ranks)


def is_seen_whole(request: Request) -> bool:
    """Whether nobody looks at a request before it has ended: nobody streams it, or looks for stop strings in it."""
    params = request.sampling_params
    return params is not None and params.output_kind is RequestOutputKind.FINAL_ONLY and not params.detokenize


class RolloutScheduler(Scheduler):
    """What makes a scheduler do less for a token; see the module's docstring."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Several groups of layers may have blocks of different sizes; guessed tokens need slots ahead.
        is_plain = self.connector is None and not self.num_lookahead_tokens
        if is_plain and len(self.kv_cache_config.kv_cache_groups) == 1:
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
    """A scheduler; the arguments are those of vLLM's."""
    kind = AsyncRolloutScheduler if vllm_config.scheduler_config.async_scheduling else RolloutScheduler
    return kind(vllm_config=vllm_config, **arguments)
