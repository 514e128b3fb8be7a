"""Schedulers in a core like vLLM's, with made-up samples for a model, and the requests that they get."""

import os
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from rlightning.rollout.vllm.adapters import adapter_request

BLOCK_TOKENS = 16
STOP_TOKEN = 7
KINDS = {True: AsyncScheduler, False: Scheduler}


def sample(request_id: str, position: int) -> tuple[int, float, int]:
    """The token at a position, its log-probability and its rank: any, but always the same."""
    number = zlib.crc32(f"{request_id} {position}".encode())
    return number % 200, -(number % 1000) / 1000, number % 5


@dataclass
class Core:
    """What vLLM's core does with a scheduler, with made-up samples for a model."""

    scheduler: Any
    steps: list[Any] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    messages: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    reasons: dict[str, str] = field(default_factory=dict)
    shares: list[float] = field(default_factory=list)
    """Of the running requests, those that are deferred after each step with fewer free blocks than running requests."""
    num_columns: int = 1

    def begin(self) -> tuple[Any, ModelRunnerOutput]:
        """Schedule a step and run it."""
        scheduled = self.scheduler.schedule()
        cached = scheduled.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        blocks = {new.req_id: new.block_ids for new in scheduled.scheduled_new_reqs}
        blocks |= dict(zip(cached.req_ids, cached.new_block_ids, strict=True))
        preempted = scheduled.preempted_req_ids or set()
        outputs = dict(zip(cached.req_ids, cached.num_output_tokens, strict=True))
        running = [request.request_id for request in self.scheduler.running]
        whole = scheduled.total_num_scheduled_tokens, cached.all_token_ids, cached.resumed_req_ids, outputs, running
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        if free < len(running) and hasattr(self.scheduler, "deferred"):
            self.shares.append(len(self.scheduler.deferred.rows) / len(running))
        ended = scheduled.finished_req_ids
        self.steps.append((scheduled.num_scheduled_tokens, computed, blocks, ended, whole, free, preempted))
        rows, sampled = [], []
        for request_id in scheduled.num_scheduled_tokens:
            rows.append(sample(request_id, computed[request_id] + scheduled.num_scheduled_tokens[request_id]))
            sampled.append([] if self.scheduler.requests[request_id].is_prefill_chunk else [rows[-1][0]])
        ids, logprobs, ranks = (np.array(column) for column in zip(*rows, strict=True)) if rows else [np.array([])] * 3
        names = list(scheduled.num_scheduled_tokens)
        columns = [np.repeat(column[:, None], self.num_columns, axis=1) for column in (ids, logprobs)]
        lists = LogprobsLists(columns[0].astype(np.int32), columns[1].astype(np.float32), ranks, None)
        index = {name: place for place, name in enumerate(names)}
        return scheduled, ModelRunnerOutput(names, index, sampled_token_ids=sampled, logprobs=lists)

    def end(self, scheduled: Any, output: ModelRunnerOutput) -> None:
        """Take in what a step has sampled."""
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            for one in outputs.outputs:
                self.tokens[one.request_id] += one.new_token_ids
                if one.new_logprobs is not None:
                    self.messages[one.request_id] += 1
                    columns = (column.tolist() for column in one.new_logprobs[:3])
                    self.logprobs[one.request_id] += zip(*columns, strict=True)
                if one.finish_reason is not None:
                    self.reasons[one.request_id] = str(one.finish_reason)

    def run(self, arrivals: dict[int, list[Request]], aborts: dict[int, str], *, is_ahead: bool) -> None:
        """Until all have ended; ``is_ahead``: a step is scheduled before the one before it has been taken in."""
        under_way: list[Any] = []
        number = 0
        while self.scheduler.has_unfinished_requests() or under_way or number <= max(arrivals):
            for request in arrivals.get(number, []):
                self.scheduler.add_request(request)
            if number in aborts:
                self.scheduler.finish_requests(aborts[number], RequestStatus.FINISHED_ABORTED)
            under_way.append(self.begin())
            while len(under_way) > is_ahead:
                self.end(*under_way.pop(0))
            number += 1
            assert number < 2000
            if is_ahead and not self.scheduler.has_unfinished_requests():
                self.end(*under_way.pop(0))


def make_core(
    folder: str,
    make: Any,
    num_blocks: int,
    max_batched_tokens: int,
    *,
    is_ahead: bool,
    max_num_seqs: int = 12,
    has_adapter: bool = False,
) -> tuple[Core, Any]:
    """A core, and what hashes its requests' blocks."""
    with patch.dict(os.environ):  # vLLM sets some for its engines, which later tests would inherit
        config = EngineArgs(
            model=folder,
            max_model_len=256,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_batched_tokens,
            block_size=BLOCK_TOKENS,
            enforce_eager=True,
            enable_lora=has_adapter,
        ).create_engine_config()
    config.scheduler_config.async_scheduling = is_ahead  # vLLM has no such thing on a CPU
    config.cache_config.num_gpu_blocks = num_blocks
    layers = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32)
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    scheduler = make(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], layers)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        log_stats=False,
    )
    return Core(scheduler), get_request_block_hasher(BLOCK_TOKENS, hash_function)


def make_request(
    name: str,
    hasher: Any,
    length: int,
    prompt: int = 0,
    *,
    prompt_tokens: int = 20,
    streams: bool = False,
    salt: str | None = None,
) -> Request:
    kind = RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY
    params = SamplingParams(
        max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False, output_kind=kind, stop_token_ids=[STOP_TOKEN]
    )
    tokens = [1 + (prompt + place) % 50 for place in range(prompt_tokens)]
    return Request(name, tokens, sampling_params=params, pooling_params=None, block_hasher=hasher, cache_salt=salt)


def run(
    folder: str,
    make: Any,
    *,
    num_blocks: int,
    is_ahead: bool,
    max_batched_tokens: int = 2048,
    seed: int = 0,
    has_adapter: bool = False,
) -> Core:
    """Thirty requests, samples of ten prompts, that come in the course of time and end at different lengths.

    With an adapter all but each fifth use it.
    """
    core, hasher = make_core(folder, make, num_blocks, max_batched_tokens, is_ahead=is_ahead, has_adapter=has_adapter)
    random = np.random.default_rng(seed)
    arrivals: dict[int, list[Request]] = defaultdict(list)
    for number in range(30):
        length, tokens = int(random.integers(1, 150)), 20 + number // 3
        streams = number % 7 == 0
        request = make_request(str(number), hasher, length, number // 3, prompt_tokens=tokens, streams=streams)
        request.lora_request = adapter_request() if has_adapter and number % 5 else None
        arrivals[number // 3 * int(random.integers(1, 20))].append(request)
    core.run(arrivals, {40: "4", 90: "17"}, is_ahead=is_ahead)
    return core


SIZES = [(200, 2048), (45, 2048), (30, 16)]
"""Of the KV cache, in blocks, and of a step, in tokens: in the last prompts are read piece by piece."""
