"""vLLM's engine with one method for each call that a trainer may make."""

import asyncio
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from vllm import AsyncEngineArgs, CompletionOutput, SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from rlightning.foreign_text import cut_line
from rlightning.rollout.engine_config import EngineArguments
from rlightning.rollout.engine_output import EngineOutput
from rlightning.rollout.vllm.supports import read_supports
from rlightning.rollout.vllm.token_versions import TokenVersions

ALL_AT_ONCE = 1 << 30
"""More than there can be of anything in one step of an engine."""


class ArgumentsRefusedError(ValueError):
    """vLLM does not accept the engine's arguments; the message is vLLM's, in one line."""


def set_variables() -> None:
    """Set the environment variables that vLLM reads in this process and in its core, a child process."""
    # Outputs of a step are processed in one piece, so that an empty queue means that all of them have been processed.
    os.environ["VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"] = str(ALL_AT_ONCE)
    # Outputs of a step are sent in one frame. Until July 2026 vLLM's core wrote the next message over the first of
    # several frames while it was still being sent, if that was longer than 64 KiB: tokens and log-probabilities of
    # other sequences arrived, or what could not be read (vllm-project/vllm, pull request 50053).
    os.environ["VLLM_MSGPACK_ZERO_COPY_THRESHOLD"] = str(ALL_AT_ONCE)


def start_engine(engine_args: EngineArguments) -> AsyncLLM:
    """Start an engine, and return it once it is up.

    Args:
        engine_args: vLLM's arguments.

    Raises:
        ArgumentsRefusedError: vLLM does not accept them.
    """
    set_variables()
    # On a CPU vLLM sets it to "spawn" in what follows, and imports all of itself again: half of an engine's start.
    method = os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    try:
        arguments = AsyncEngineArgs(**engine_args)
        config = arguments.create_engine_config()
    except (AssertionError, KeyError, NotImplementedError, TypeError, ValueError) as error:
        raise ArgumentsRefusedError(describe_refusal(error)) from error
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = method
    return AsyncLLM.from_vllm_config(
        config, enable_log_requests=arguments.enable_log_requests, disable_log_stats=arguments.disable_log_stats
    )


def describe_refusal(error: Exception) -> str:
    """Return, in a line, vLLM's reason to reject arguments, with the name and value of any argument of a wrong type."""
    gist = str(error) or type(error).__name__
    if isinstance(error, ValidationError):
        wrong = ((".".join(map(str, one["loc"])), one) for one in error.errors())
        gist = "; ".join(f"{name or one['type']}={one['input']!r:.80}: {one['msg']}" for name, one in wrong)
    return cut_line(gist)


class TokenStream:
    """Collects the tokens of a running request's samples, for one reader that gets them while they are sampled."""

    def __init__(self) -> None:
        self._outputs: dict[int, CompletionOutput] = {}
        self._num_read: Counter[int] = Counter()
        self._changed = asyncio.Event()

    @property
    def outputs(self) -> list[CompletionOutput]:
        """vLLM's latest output of each sample, with all of its tokens so far."""
        return [self._outputs[number] for number in sorted(self._outputs)]

    def add(self, outputs: Iterable[CompletionOutput]) -> None:
        """Record vLLM's latest outputs of some samples."""
        self._outputs |= {output.index: output for output in outputs}
        self._changed.set()

    async def read(self) -> list[tuple[int, list[int]]]:
        """Wait for new tokens, and return pairs of a sample's index and its tokens since the last call."""
        read: list[tuple[int, list[int]]] = []
        while not read:
            await self._changed.wait()
            self._changed.clear()
            for number, output in self._outputs.items():
                token_ids = list(output.token_ids[self._num_read[number] :])
                self._num_read[number] += len(token_ids)
                read += [(number, token_ids)] if token_ids else []
        return read


class VLLMServer:
    """An AsyncLLM with the methods that a trainer may call.

    Weights may be updated while requests run or the engine sleeps: :meth:`receive_weights` for each chunk, then
    :meth:`finish_weight_update`. Chunk 0 restarts an update that was not finished.

    Args:
        engine: an engine from :func:`start_engine`.
    """

    def __init__(self, engine: AsyncLLM) -> None:
        self.engine = engine
        self.versions = TokenVersions()
        self._streams: dict[str, TokenStream] = {}
        self._num_requests = self._num_updates = 0
        self._is_asleep = self._is_updating = False
        self._adapter = None
        if engine.vllm_config.lora_config is not None:
            from rlightning.rollout.vllm.adapters import adapter_request  # loading its layers takes a second

            self._adapter = adapter_request()
        self._admission = asyncio.Lock()
        """A lock that is held while a request is passed to vLLM, in several awaits, and during a weight update."""
        self._transition = asyncio.Lock()
        """A lock that is held while an update begins or ends."""
        self._conversion = asyncio.Lock()
        """A lock for one request after the other: of those that end in the same step, each is sent before the next one
        is converted."""

    async def generate(
        self, token_ids: Sequence[int], sampling: dict[str, Any], stream: str | None = None
    ) -> list[EngineOutput]:
        """Sample completions of one prompt, and return them when all have ended.

        Args:
            token_ids: [P], tokens of the prompt.
            sampling: arguments of vLLM's SamplingParams; ``json_schema`` becomes ``structured_outputs``, and with
                ``max_support`` above 0 supports of at most this many tokens are returned.
            stream: name under which :meth:`read_tokens` can read the tokens during the call; None for no reader.

        Returns:
            The completions; with the supports of their tokens if ``sampling`` has ``max_support``.
        """
        schema, max_support = sampling.pop("json_schema", None), sampling.pop("max_support", 0)
        num_logprobs = min(sampling.get("logprobs", 0), self.engine.vllm_config.model_config.get_vocab_size())
        params = SamplingParams(
            **sampling | {"logprobs": num_logprobs},
            structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY if stream is None else RequestOutputKind.CUMULATIVE,
            detokenize=bool(sampling.get("stop")),
        )
        output, versions = await self._run(token_ids, params, stream)
        async with self._conversion:
            return [
                _read_output(one, one_versions, output.num_cached_tokens or 0, max_support)
                for one, one_versions in zip(output.outputs, versions, strict=True)
            ]

    async def read_tokens(self, stream: str) -> list[tuple[int, list[int]]]:
        """Wait for new tokens, and return pairs of a sample's index and its tokens since the last call.

        Args:
            stream: name passed to :meth:`generate`, which may be called later. The caller cancels this call after
                :meth:`generate` has returned.
        """
        tokens = self._streams.setdefault(stream, TokenStream())
        try:
            return await tokens.read()
        except asyncio.CancelledError:
            self._streams.pop(stream, None)
            raise

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token given the previous ones, at temperature 1; 0 for the first token."""
        params = SamplingParams(
            max_tokens=1, temperature=0, prompt_logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False
        )
        output, _ = await self._run(token_ids, params)
        entries = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return [0.0, *(entry[token].logprob for token, entry in entries)]

    async def open_weight_receivers(self, receivers: list[bytes]) -> None:
        """Have each worker open its receiver, from receivers that the trainer has pickled."""
        await self.engine.collective_rpc("rl_open_receiver", args=(receivers,))

    async def receive_weights(self, chunk: int) -> list[str]:
        """Have all workers load a chunk of weights; return messages about faults (:func:`describe_faults`), if any.

        Chunk 0 begins an update. Faults are found after an adapter's last chunk, and after the last of all chunks.
        """
        if chunk == 0:
            await self.begin_weight_update()
        return describe_faults(await self.engine.collective_rpc("rl_receive_weights", args=(chunk,)))

    async def begin_weight_update(self) -> None:
        """Allocate the weights' memory, or pause running requests; new requests wait until the update ends.

        Returns once no step is running and the tokens of all steps have arrived.
        """
        async with self._transition:
            if self._is_updating:
                return
            await self._admission.acquire()
            try:
                if self._is_asleep:
                    await self._wake("weights")
                else:
                    # AsyncLLM.pause_generation is this plus a sleep of 20 ms, which may not suffice for the next call.
                    await self.engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
                    await self._await_outputs()
            except BaseException:
                self._admission.release()
                raise
            self._is_updating = True

    async def finish_weight_update(self, version: int, keeps_cache: bool) -> None:
        """Continue sampling; tokens sampled from now on have the version of the loaded weights.

        Args:
            version: version of the loaded weights.
            keeps_cache: whether paused requests keep the keys and values of older weights, rather than compute them
                again. Requests of which nothing is computed use none of them, except with vLLM's own scheduler.
        """
        async with self._transition:
            if not self._is_updating:
                raise RuntimeError("No weight update has begun: receive_weights comes first.")
            if self._is_asleep:
                await self._wake("kv_cache")
            elif not keeps_cache:
                await self.engine.reset_prefix_cache(reset_running_requests=True)
            self._num_updates += 1
            self.versions.activate(version, self._count_tokens())
            if not self._is_asleep:
                await self.engine.resume_generation()
            self._is_asleep = self._is_updating = False
            self._admission.release()

    async def sleep(self) -> None:
        """Free the memory of the weights and the KV cache."""
        self.versions.current = None
        await self.engine.sleep(level=2)
        self._is_asleep = True

    async def _wake(self, tag: Literal["weights", "kv_cache"]) -> None:
        try:
            await self.engine.wake_up(tags=[tag])
        except Exception as error:  # an error of the engine's core, passed on as text
            if "out of memory" not in str(error).lower():
                raise
            raise MemoryError(
                f"The engine has too little memory for its {tag.replace('_', ' ')} when it wakes, although the "
                "trainer has freed what it can: other processes use it. Lower rollout.gpu_memory_utilization."
            ) from error

    async def ping(self) -> None:
        """Return once every worker has answered."""
        await self.engine.collective_rpc("rl_ping")

    async def _run(
        self, token_ids: Sequence[int], params: SamplingParams, stream: str | None = None
    ) -> tuple[Any, list[NDArray[np.int32]]]:
        """Return vLLM's output for one prompt, and the weight version of each sample's tokens; none for a score."""
        self._num_requests += 1
        request_id = str(self._num_requests)
        collector = None
        lengths: list[int] = []
        tokens = TokenStream() if stream is None else self._streams.setdefault(stream, TokenStream())
        try:
            async with self._admission:
                if params.prompt_logprobs is None:  # otherwise a score, which records no tokens
                    self.versions.begin(request_id, params.n)
                # The salt keeps the request from using keys and values that other weights computed for the same prompt.
                prompt: Any = {"prompt_token_ids": list(token_ids), "cache_salt": str(self._num_updates)}
                collector = await self.engine.add_request(request_id, prompt, params, lora_request=self._adapter)
                if params.detokenize and params.logprobs:
                    self._decode_no_supports(request_id)
            is_finished = False
            while not is_finished:
                output: Any = await collector.get()
                tokens.add(output.outputs)
                is_finished = output.finished
            output.outputs = tokens.outputs
            lengths = [len(one.token_ids) for one in output.outputs]
        except asyncio.CancelledError:
            # With vLLM's own name for the request, vLLM also forgets samples that have finished.
            await self.engine.abort(request_id if collector is None else collector.request_id, collector is not None)
            raise
        finally:
            versions = self.versions.end(request_id, lengths)
            if stream is not None:
                self._streams.pop(stream, None)
        return output, versions

    def _decode_no_supports(self, request_id: str) -> None:
        """Keep vLLM from decoding the tokens of the supports to text, which takes 0.8 ms a token and is not used."""
        for state in self.engine.output_processor.request_states.values():
            if state.external_req_id == request_id and state.logprobs_processor is not None:
                state.logprobs_processor.tokenizer = None

    async def _await_outputs(self) -> None:
        """Wait until all outputs that the engine's core has sent are processed; relies on :func:`set_variables`."""
        # What a step has sampled comes on the same socket as the answer that it has paused, and before it.
        while not self.engine.engine_core.outputs_queue.empty():
            if self.engine.errored:
                raise EngineDeadError()
            await asyncio.sleep(0)

    def _count_tokens(self) -> Iterator[tuple[str, int, int]]:
        """Yield request id, sample index and number of tokens of all unfinished samples."""
        for state in self.engine.output_processor.request_states.values():
            if state.detokenizer is not None:
                yield state.external_req_id, state.request_index, state.detokenizer.num_output_tokens()


def _read_output(
    output: CompletionOutput, versions: NDArray[np.int32], num_cached_tokens: int, max_support: int
) -> EngineOutput:
    flat, supports = output.logprobs, None
    assert isinstance(flat, FlatLogprobs), "flat_logprobs=True"
    if max_support:
        logprobs, token_ids, sizes = read_supports(flat, max_support)
        supports = token_ids, sizes
    else:  # one entry for each position: the sampled token
        logprobs = np.asarray(flat.logprobs, np.float32)
    return {
        "token_ids": np.asarray(output.token_ids, np.int64),
        "logprobs": logprobs,
        "weight_versions": versions,
        "end": output.stop_reason,
        "num_cached_tokens": num_cached_tokens,
        "supports": supports,
    }


def describe_faults(reports: Sequence[tuple[Sequence[str], Sequence[str]]]) -> list[str]:
    """Return messages about parameters that no weight has set, and weights that no worker has read; empty if none.

    Args:
        reports: for each worker its parameters that no weight has set, and the weights that it has not read. Workers
            that split a model may each read a part of the weights.
    """
    unset = sorted(set(chain.from_iterable(unset for unset, _ in reports)))
    unread = sorted(set.intersection(*(set(unread) for _, unread in reports)))
    faults = []
    if unset:
        faults.append(
            f"{len(unset)} of the engine's parameters were set by none of the weights that the actor sent and are "
            f"still random, such as {', '.join(unset[:3])}. vLLM's model has them, the actor's files would not."
        )
    if unread:
        faults.append(
            f"{len(unread)} of the weights that the actor sent were not taken, such as {', '.join(unread[:3])}: vLLM's "
            "model of this architecture has no place for them, and would compute without. Choose another model, or for "
            "an adapter rollout.send_adapter: false."
        )
    return faults
