"""vLLM's scheduler with less work for each token. Loaded by vLLM's core as ``scheduler_cls``.

The core is one Python process that loops over all running sequences in every step. For a small model this takes longer
than the GPU's part of the step (docs/performance.md), mostly without need: a sequence whose last block has room, and
which the sampled token does not end, needs only one more token. Such sequences are deferred: their tokens are written
into arrays, for all sequences together. A sequence is returned to vLLM's code, with its tokens, when its state may
change: its block is full, it ends, it is aborted or paused, or vLLM may preempt it. Schedule and blocks are vLLM's, but
requests that come while many sequences run, as turns of agents do, begin together, in one of every few steps
(:data:`STEPS_TO_GATHER`), and those that wait through a pause share no blocks with earlier ones (cache_salts.py).

Tokens of a sequence that is read only at its end are sent to the client process :data:`TOKENS_AT_ONCE` at a time; all
of them before a pause begins.
"""

import functools
import logging
import multiprocessing
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

import numpy as np
import vllm
import vllm.envs as envs
from vllm.config import VllmConfig
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from rlightning.processes.process_group import die_with_parent
from rlightning.rollout.vllm.cache_salts import renew_salts
from rlightning.rollout.vllm.supports import drop_cut_tokens

log = logging.getLogger(__name__)

TOKENS_AT_ONCE = 32
"""Tokens of a sequence in a message: few enough that little is left to send when all sequences end at once."""
TESTED_VERSIONS = "0.24.", "0.32."
"""Versions of vLLM with whose schedulers deferring sequences is tested."""
STEPS_TO_GATHER = 4
"""While many sequences run, waiting requests begin in each fourth step, several together."""
RUNNING_PER_WAITING = 16
"""Requests are gathered only while more than this many sequences run for each waiting request."""
MOST_IN_FLIGHT = 2
"""Maximum number of steps that vLLM has scheduled and not yet processed, without pipeline parallelism."""


@dataclass
class Tokens:
    """Sampled tokens of a sequence, each with its log-probability and rank."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, more: "Tokens") -> None:
        """Append the tokens that the sequence has sampled next."""
        self.ids += more.ids
        self.logprobs += more.logprobs
        self.ranks += more.ranks

    def as_lists(self) -> LogprobsLists:
        """Return the tokens in vLLM's format of log-probabilities, with only the sampled token's column."""
        ids, logprobs = np.array(self.ids, np.int32), np.array(self.logprobs, np.float32)
        return LogprobsLists(ids[:, None], logprobs[:, None], np.array(self.ranks, np.int64))


class DeferredSequences:
    """Running sequences that vLLM's scheduler skips, since a step only adds a token to each; stored as rows of arrays.

    Attributes:
        rows: row of each request, by its id.
        step: the number of the next step to be scheduled.
        stop_ids: tokens that end any of the sequences.
    """

    def __init__(self, most: int, block_tokens: int) -> None:
        self.rows: dict[str, int] = {}
        self.step = 0
        self.stop_ids = np.array([], np.int64)
        self._free = list(range(most))
        self._due: dict[int, list[str]] = defaultdict(list)
        # Of each row: the first step, the step before which it ends, vLLM's count at the first; the outputs so far.
        self._first, self._end, self._computed, self._prompt, self._count = np.zeros((5, most), np.int64)
        size = (most, block_tokens + MOST_IN_FLIGHT)
        self._ids, self._ranks = np.zeros((2, *size), np.int64)
        self._logprobs = np.zeros(size, np.float32)

    def begin(self, request: Request, num_steps: int) -> None:
        """Defer a request for the next ``num_steps`` steps."""
        name, row = request.request_id, self._free.pop()
        self.rows[name] = row
        self._first[row], self._end[row] = self.step, self.step + num_steps
        self._computed[row], self._prompt[row] = request.num_computed_tokens, request.num_prompt_tokens
        self._count[row] = 0
        self._due[self.step + num_steps].append(name)

    def end(self, name: str) -> tuple[int, Tokens]:
        """Stop deferring a request; return the number of steps scheduled in the meantime, and the sampled tokens."""
        row = self.rows.pop(name)
        self._free.append(row)
        columns = (column[row, : self._count[row]].tolist() for column in (self._ids, self._logprobs, self._ranks))
        return int(self.step - self._first[row]), Tokens(*columns)

    def due(self) -> list[str]:
        """Return the requests that must no longer be deferred when the next step is scheduled."""
        names = self._due.pop(self.step, [])
        return [name for name in names if name in self.rows and self._end[self.rows[name]] == self.step]

    def schedule(self, output: SchedulerOutput) -> None:
        """Add these sequences, which vLLM's scheduler has skipped, to its schedule of a step, with one token for each.

        ``output``, the schedule, is changed in place. The sequences need no new KV cache blocks.
        """
        names, rows = list(self.rows), np.fromiter(self.rows.values(), np.int64, len(self.rows))
        computed = self._computed[rows] + self.step - self._first[rows]
        cached = output.scheduled_cached_reqs
        cached.req_ids += names
        cached.new_block_ids += [None] * len(names)
        cached.num_computed_tokens += computed.tolist()
        cached.num_output_tokens += (computed + 1 - self._prompt[rows]).tolist()
        output.num_scheduled_tokens |= dict.fromkeys(names, 1)
        output.total_num_scheduled_tokens += len(names)

    def record(self, output: ModelRunnerOutput) -> tuple[set[str], list[str]]:
        """Record the sampled tokens of a step.

        Returns:
            The requests whose tokens were recorded, and those that must no longer be deferred, because they may end.
        """
        names, sampled = output.req_ids, output.sampled_token_ids
        rows = np.fromiter(map(self.rows.get, names, repeat(-1)), np.int64, len(names))
        places = np.flatnonzero(rows >= 0)
        if not len(places):
            return set(), []
        rows = rows[places]
        ids = np.array([sampled[place][0] if len(sampled[place]) == 1 else -1 for place in places], np.int64)
        is_loud = (ids < 0) | np.isin(ids, self.stop_ids)
        loud = [names[place] for place in places[is_loud]]
        places, rows, ids = places[~is_loud], rows[~is_loud], ids[~is_loud]
        quiet = {names[place] for place in places}
        column = self._count[rows]
        logprobs = output.logprobs
        assert logprobs is not None, "deferred ones ask for the log-probability of what they sample"
        starts = logprobs.cu_num_generated_tokens
        if starts is not None:
            places = np.asarray(starts)[places]
        self._ids[rows, column] = ids
        self._logprobs[rows, column] = logprobs.logprobs[places, 0]
        self._ranks[rows, column] = logprobs.sampled_token_ranks[places]
        self._count[rows] += 1
        return quiet, loud


@functools.cache
def is_tested(version: str) -> bool:
    """Return whether this module's deferring of sequences was tested with a version of vLLM; if not, log that once."""
    if version.startswith(TESTED_VERSIONS):
        return True
    log.warning(
        "vLLM %s schedules each token of each sequence, which costs its core more CPU time: rlightning's shortcut has "
        "been tested with vLLM %s only.",
        version,
        " and ".join(tested.rstrip(".") for tested in TESTED_VERSIONS),
    )
    return False


def is_read_at_end(request: Request) -> bool:
    """Return whether a request's output is read only at its end, and has only sampled tokens with log-probabilities.

    False also for structured output, stop strings, and log-probabilities of other tokens. Of adapters, vLLM counts how
    many run at a time and misses those of deferred requests: there is one, the actor's.
    """
    params = request.sampling_params
    if params is None or params.logprobs != 0 or params.prompt_logprobs is not None or params.detokenize:
        return False
    if request.use_structured_output or request.has_encoder_inputs or request.resumable:
        return False
    return params.output_kind is RequestOutputKind.FINAL_ONLY and params.repetition_detection is None


class RolloutScheduler(Scheduler):
    """A vLLM scheduler that spends less time in Python: it skips sequences while each step only adds a token to them.

    Attributes:
        deferred: sequences that vLLM's code skips.
        unsent: tokens that are not yet sent, of requests that are read only at their end, by request id.
    """

    has_placeholders = False
    """Whether vLLM counts tokens in flight as placeholders in the output."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.deferred = DeferredSequences(self.max_num_running_reqs, self.block_size)
        self.unsent: dict[str, Tokens] = {}
        self._is_paused, self._steps_gathered = False, 0
        limits = "max_num_active_reqs", "max_num_running_reqs", "max_num_scheduled_tokens"
        self._limits = [name for name in limits if hasattr(self, name)]
        self._admission_limit = self._limits[0]  # the number of running requests up to which vLLM admits others
        self._may_defer = self._is_plain()
        further = "aux_output_connector", "enable_return_routed_experts", "return_sampling_mask"  # outputs of a token
        self._may_hold_back = not any(getattr(self, name, None) for name in further)  # vLLM's versions differ in them

    def _is_plain(self) -> bool:
        """Whether this module reproduces everything that vLLM does with a sequence inside a block."""
        groups = self.kv_cache_config.kv_cache_groups  # layers with a sliding window free blocks as the sequence grows
        is_single = len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
        has_more = self.connector or self.ec_connector or self.num_spec_tokens or self.use_pp
        has_room = self.max_num_running_reqs <= self.max_num_scheduled_tokens
        config = self.scheduler_config
        is_special = config.long_prefill_token_threshold or config.watermark or config.policy != "fcfs"
        is_special = is_special or envs.VLLM_COMPUTE_NANS_IN_LOGITS
        return is_single and has_room and not has_more and not is_special and is_tested(vllm.__version__)

    def add_request(self, request: Request) -> None:
        """Add a request; one for prompt log-probabilities goes to the front of the queue: the trainer waits for it."""
        super().add_request(request)
        params = request.sampling_params
        if params is not None and params.prompt_logprobs is not None and request in self.waiting:
            self.waiting.remove_request(request)
            self.waiting.prepend_request(request)
            self._steps_gathered = STEPS_TO_GATHER

    def _should_gather(self) -> bool:
        """Whether waiting requests do not begin in this step, but in a later one together with others.

        A step in which requests begin takes longer, by a part that does not grow with their number.
        """
        num_running, num_waiting = self.get_request_counts()
        are_few = 0 < num_waiting * RUNNING_PER_WAITING < num_running
        return self._may_defer and are_few and self._steps_gathered < STEPS_TO_GATHER - 1

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Return the requests that run in the next step."""
        deferred = self.deferred
        is_gathering = not throttle_prefills and self._should_gather()
        self._wake(deferred.due())
        awake = [request for request in self.running if request.request_id not in deferred.rows]
        num_missing = len(deferred.rows) if throttle_prefills else self._num_missing_blocks(awake)
        if deferred.rows and num_missing > 0:
            self._wake_last(num_missing)
            awake = [request for request in self.running if request.request_id not in deferred.rows]
        running, num_awake, num_deferred = self.running, len(awake), len(deferred.rows)
        self.running = awake
        limits = {name: getattr(self, name) for name in self._limits}
        lowered = {name: limit - num_deferred for name, limit in limits.items()}  # each of these takes one token
        if is_gathering:
            lowered[self._admission_limit] = num_awake
        vars(self).update(lowered)
        output = super().schedule(throttle_prefills)
        vars(self).update(limits)
        begun = [request for request in self.running if output.num_scheduled_tokens.get(request.request_id) == 1]
        if num_deferred:
            if len(self.running) < num_awake:  # some were preempted; then vLLM admits no other request
                left = {request.request_id for request in self.running}.union(deferred.rows)
                self.running = [request for request in running if request.request_id in left]
            else:
                self.running = running + self.running[num_awake:]
            self._schedule_deferred(output)
        # Once requests have begun to begin, all do as soon as vLLM has room for them.
        self._steps_gathered = self._steps_gathered + is_gathering if self.get_request_counts()[1] else 0
        deferred.step += 1
        self._defer(begun)
        return output

    def _schedule_deferred(self, output: SchedulerOutput) -> None:
        """Add the deferred sequences to a step of the other sequences."""
        self.deferred.schedule(output)
        scheduled, names = output.num_scheduled_tokens, [request.request_id for request in self.running]
        output.num_scheduled_tokens = {name: scheduled[name] for name in names if name in scheduled}  # in this order
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids |= self.deferred.rows.keys()

    def _num_missing_blocks(self, awake: list[Request]) -> int:
        """Return how many more blocks than are free these requests may need in the next step; deferred ones need none.

        All blocks that a prompt still needs are counted, although a step may compute only a part of it.
        """
        needed = 0
        for request in awake:
            if request.is_prefill_chunk:
                needed += request.num_tokens // self.block_size + 1 - request.num_computed_tokens // self.block_size
            elif request.num_computed_tokens % self.block_size == 0:
                needed += 1
        return needed - int(self.kv_cache_manager.block_pool.get_num_free_blocks())

    def _wake_last(self, number: int) -> None:
        """Return the last ``number`` deferred requests of ``running`` to vLLM's code, which may preempt them.

        vLLM preempts from the end of ``running``. A deferred request has a block of its own, which is not yet full,
        so that preempting these frees at least ``number`` blocks, and vLLM preempts no request before them.
        """
        names = [request.request_id for request in self.running if request.request_id in self.deferred.rows]
        self._wake(names[-number:])

    def _defer(self, requests: Iterable[Request]) -> None:
        """Defer those of ``requests`` that can be."""
        if self._is_paused:
            return
        for request in requests:
            if num_steps := self._steps_to_defer(request):
                self.deferred.begin(request, num_steps)

    def _steps_to_defer(self, request: Request) -> int:
        """Return the number of steps, beginning with the next, in which a request only gets one more token."""
        if not self._may_defer or request.request_id not in self.unsent or request.is_prefill_chunk:
            return 0
        # A chunk of the prompt is still in flight, or was when the request was preempted.
        if _counted(request, "num_in_flight_tokens") > MOST_IN_FLIGHT:
            return 0
        if _counted(request, "num_stale_output_tokens") or _counted(request, "async_tokens_to_discard"):
            return 0
        computed = request.num_computed_tokens
        offset = computed % self.block_size
        most_tokens = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        # A step that computes token p (counted from 0) samples the token after it, so that there are p + 2 tokens.
        num_steps = min(self.block_size - 1 - offset, most_tokens - 3 - computed)
        return num_steps if offset and num_steps > 0 else 0

    def _wake(self, names: Iterable[str]) -> None:
        """Return deferred requests to vLLM's code, with their tokens."""
        for name in names:
            if name not in self.deferred.rows:
                continue
            request = self.requests[name]
            num_scheduled, tokens = self.deferred.end(name)
            in_flight = num_scheduled - len(tokens)
            request.num_computed_tokens += num_scheduled
            if self.has_placeholders:
                request.num_output_placeholders += in_flight
            if hasattr(request, "num_in_flight_tokens"):
                request.num_in_flight_tokens += in_flight
            if tokens.ids:
                request.append_output_token_ids(tokens.ids)
                self.unsent[name].add(tokens)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Record the sampled tokens of a step, and return the outputs to send."""
        if self.deferred.rows:
            quiet, loud = self.deferred.record(model_runner_output)
            self._wake(loud)
            left = {name: n for name, n in scheduler_output.num_scheduled_tokens.items() if name not in quiet}
            scheduler_output = replace(scheduler_output, num_scheduled_tokens=left)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for client, of_client in list(outputs.items()):
            for one in of_client.outputs:
                if one.new_logprobs is not None:
                    one.new_logprobs = drop_cut_tokens(one.new_logprobs)
            of_client.outputs = [one for one in of_client.outputs if self._is_sent(one)]
            if not (of_client.outputs or of_client.finished_requests or of_client.scheduler_stats):
                del outputs[client]
        if self._is_paused:
            for name, tokens in self.unsent.items():
                if tokens:
                    output = EngineCoreOutput(name, tokens.ids, new_logprobs=tokens.as_lists())
                    outputs.setdefault(self.requests[name].client_index, EngineCoreOutputs()).outputs.append(output)
                    self.unsent[name] = Tokens()
        return outputs

    def _is_sent(self, output: EngineCoreOutput) -> bool:
        """Whether a request's output is sent now, with its tokens that were not yet sent."""
        name, has_ended = output.request_id, output.finish_reason is not None
        unsent = self.unsent.get(name)
        if unsent is None:  # the first output also has the number of cached prompt tokens
            if not has_ended and self._may_hold_back and is_read_at_end(self.requests[name]):
                self._hold_back(self.requests[name])
            return True
        if output.new_logprobs is not None:
            ids, logprobs, ranks = output.new_logprobs[:3]
            unsent.add(Tokens(ids[:, 0].tolist(), logprobs[:, 0].tolist(), ranks.tolist()))
        if not (has_ended or len(unsent) >= TOKENS_AT_ONCE):
            return False
        if unsent:
            output.new_token_ids, output.new_logprobs = unsent.ids, unsent.as_lists()
        if has_ended:
            del self.unsent[name]
        else:
            self.unsent[name] = Tokens()
        return True

    def _hold_back(self, request: Request) -> None:
        """From now on, do not send a request's tokens one by one."""
        self.unsent[request.request_id] = Tokens()
        params: Any = request.sampling_params
        stop_ids = {*(params.stop_token_ids or ()), *([] if params.eos_token_id is None else [params.eos_token_id])}
        if not stop_ids <= (known := set(self.deferred.stop_ids.tolist())):
            self.deferred.stop_ids = np.array(sorted(stop_ids | known), np.int64)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> Any:
        """Abort requests, or all of them for None. Tokens that were not yet sent are dropped."""
        ids = self.requests if request_ids is None else request_ids
        names = [ids] if isinstance(ids, str) else list(ids)
        self._wake(names)
        for name in names:
            self.unsent.pop(name, None)
        return super().finish_requests(names, finished_status)

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause or continue scheduling."""
        self._wake(list(self.deferred.rows))
        was_paused, self._is_paused = self._is_paused, pause_state != PauseState.UNPAUSED
        if was_paused and not self._is_paused:
            renew_salts(self.requests.values())
        super().set_pause_state(pause_state)

    def has_requests(self) -> bool:
        """Return whether there is work to do; in a pause, whether there are tokens that were not yet sent."""
        return bool(super().has_requests()) or (self._is_paused and any(self.unsent.values()))

    def reset_prefix_cache(self, *args: bool, **kwargs: bool) -> bool:
        """Clear the prefix cache, if necessary by preempting all requests."""
        self._wake(list(self.deferred.rows))
        return bool(super().reset_prefix_cache(*args, **kwargs))


class AsyncRolloutScheduler(RolloutScheduler, AsyncScheduler):
    """A :class:`RolloutScheduler` for vLLM's asynchronous scheduling, which schedules steps ahead of the device."""

    has_placeholders = True


def _counted(request: Request, name: str) -> int:
    """Return a request's counter of tokens by its name; 0 if this version of vLLM has no such counter."""
    return int(getattr(request, name, 0))


def make_scheduler(vllm_config: VllmConfig, **arguments: Any) -> Scheduler:
    """Return the scheduler for vLLM's core, which calls this with vLLM's arguments.

    A core in a separate process is also set to end with its parent process.
    """
    if multiprocessing.parent_process() is not None:
        die_with_parent()
    kind = AsyncRolloutScheduler if vllm_config.scheduler_config.async_scheduling else RolloutScheduler
    return kind(vllm_config=vllm_config, **arguments)
