"""A sampler in the trainer's process: a Hugging Face model, on any device, without an engine.

Requests are decoded with continuous batching, one token of every sequence in each step, in a thread that runs while
there are requests.
"""

import asyncio
import secrets
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig

from rlightning.errors import EngineError
from rlightning.models.logprobs import compute_packed_logprobs
from rlightning.parallel.sharding import named_weights
from rlightning.rollout.decoding import KeyValueCache, build_model, predict_after_prompts, predict_next
from rlightning.rollout.detokenize import CONTEXT_TOKENS, decode_completions
from rlightning.rollout.engine import make_samples
from rlightning.rollout.engine_output import EngineOutput
from rlightning.rollout.model_files import ModelFiles
from rlightning.rollout.sampler import OnTokens, Sampling
from rlightning.rollout.token_choice import choose_tokens
from rlightning.types import RolloutBatch, Sample

MAX_PROMPT_TOKENS = 8192
"""Maximum number of prompt tokens in one forward pass, unless a single prompt is longer."""


@dataclass(eq=False)
class _SampleRequest:
    """A request to :meth:`TransformersSampler.sample`."""

    token_ids: list[int]
    sampling: Sampling
    sequences: list["_Sequence"] = field(default_factory=list)
    done: "Future[list[Sample]]" = field(default_factory=Future)

    @property
    def is_finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)


@dataclass(eq=False)
class _Sequence:
    """One sample of a request: its tokens so far, and a random number for each token, independent of the batch."""

    request: _SampleRequest
    uniforms: list[float]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    supports: list[list[int]] = field(default_factory=list)
    end: int | str | None = None
    is_finished: bool = False

    @property
    def length(self) -> int:
        """Number of the sequence's tokens in the cache: all but the last sampled one."""
        return len(self.request.token_ids) + len(self.token_ids) - 1


class TransformersSampler:
    """A :class:`~rlightning.rollout.Sampler` with its own copy of the model, which decodes in this process.

    Args:
        config: configuration of the policy.
        files: files of the policy, for its tokenizer and end tokens.
        device: device of the copy.
        dtype: dtype of the copy.
        max_length: maximum tokens of a sequence.
        max_sequences: maximum number of sequences that are decoded concurrently; others wait.

    Attributes:
        weight_version: version of the sampler's weights; None before the first update and while it sleeps.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        files: ModelFiles,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_length: int,
        max_sequences: int = 256,
    ) -> None:
        self.model = build_model(config, device, dtype)
        self.files, self.device, self.dtype = files, device, dtype
        self.max_length, self.max_sequences = max_length, max_sequences
        self.weight_version: int | None = None
        self._shapes = {name: weight.shape for name, weight in self.model.named_parameters()}
        self._cache = KeyValueCache()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        """Sequences that are being generated, in the order of the cache's rows."""
        self._is_working = False
        self._queue_lock = threading.Lock()
        self._model_lock = threading.Lock()
        """A lock that is held during a step, and while weights are written."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sampler")

    # Requests

    async def sample(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        num_samples: int = 1,
        session: str | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[Sample]:
        """Sample continuations (:meth:`Sampler.sample`), without partial output; ``session`` has no effect."""
        request = _SampleRequest(list(token_ids), sampling)
        request.sequences = [_Sequence(request, draw_uniforms(sampling, number)) for number in range(num_samples)]
        longest = len(request.token_ids) + sampling.max_new_tokens
        if longest > self.max_length:
            raise EngineError(f"A sequence of up to {longest} tokens is longer than the sampler's {self.max_length}.")
        with self._queue_lock:
            self._waiting.extend(request.sequences)
        # All requests of this iteration of the event loop begin together, whatever the thread is doing.
        asyncio.get_running_loop().call_soon(self._start_work)
        return await asyncio.wrap_future(request.done)  # a cancelled request is dropped at the next step

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the log-probability of each token given the previous ones, at temperature 1; 0 for the first token."""
        return await asyncio.wrap_future(self._thread.submit(self._score, list(token_ids)))

    def _score(self, token_ids: list[int]) -> NDArray[np.float32]:
        batch = RolloutBatch.of_sequences([token_ids]).to(self.device)
        with self._model_lock, torch.inference_mode():
            logprobs, _ = compute_packed_logprobs(self.model, batch)
        return logprobs.cpu().numpy()

    # Weights

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the actor's weights (:meth:`Sampler.update_weights`); running sequences continue with them.

        Raises:
            EngineError: a weight is missing, unknown to the model or of another shape; the sampler then has no weights.
        """
        with self._model_lock:
            self.weight_version = None
            own = dict(named_weights(self.model))
            missing, unknown = set(own), set[str]()
            for name, weight in weights:
                if name in own and own[name].shape == weight.shape:
                    own[name].copy_(weight)
                    missing.remove(name)
                else:
                    unknown.add(name)
            if faults := sorted(missing | unknown):
                raise EngineError(f"The actor's weights are not those of the sampler's model: {', '.join(faults[:5])}.")
            self.weight_version = version

    def sleep(self) -> None:
        """Free the model's memory, including weights, if it shares the actor's device."""
        if not can_sleep(self.device):
            return
        with self._model_lock:
            self.weight_version = None
            for parameter in self.model.parameters():
                parameter.data = parameter.data.new_empty(0)

    def wake(self) -> None:
        """Allocate the memory that :meth:`sleep` freed."""
        with self._model_lock:
            for name, parameter in self.model.named_parameters():
                if parameter.shape != self._shapes[name]:
                    parameter.data = torch.empty(self._shapes[name], dtype=self.dtype, device=self.device)

    def close(self) -> None:
        """End the thread; running requests fail. May be called twice."""
        with self._queue_lock:
            self._fail_requests(EngineError("The sampler has been closed."))
        self._thread.shutdown(cancel_futures=True)

    # Methods that run in the sampling thread, or start it

    def _start_work(self) -> None:
        with self._queue_lock:
            if self._waiting and not self._is_working:
                self._is_working = True
                self._thread.submit(self._work)

    def _work(self) -> None:
        """Decode until there are no more requests."""
        try:
            while True:
                with self._queue_lock:
                    self._drop_abandoned()
                    if not self._waiting and not self._running:
                        self._is_working = False
                        self._cache = KeyValueCache()
                        return
                self._step()
        except Exception as error:  # the error belongs to the requests, not to this thread
            with self._queue_lock:
                self._is_working = False
                self._fail_requests(error)
                self._running.clear()

    @torch.inference_mode()
    def _step(self) -> None:
        """Compute waiting prompts, or one token of each running sequence."""
        admitted = self._admit()
        with self._model_lock:
            version = self.weight_version
            if version is None:
                raise EngineError("The sampler has no weights.")
            if admitted:
                logits = self._read_prompts(admitted)
            else:
                last = [sequence.token_ids[-1] for sequence in self._running]
                logits = predict_next(self.model, self._cache, last, [one.length for one in self._running])
            chosen = admitted or self._running
            choice = choose_tokens(
                logits,
                [sequence.request.sampling for sequence in chosen],
                [sequence.uniforms[len(sequence.token_ids)] for sequence in chosen],
            )
        columns = choice.tokens.tolist(), choice.logprobs.tolist(), choice.supports
        for sequence, token, logprob, support in zip(chosen, *columns, strict=True):
            sequence.token_ids.append(token)
            sequence.logprobs.append(logprob)
            sequence.weight_versions.append(version)
            sequence.supports.append(support)
            self._end(sequence)
        for sequence in [sequence for sequence in self._running if sequence.is_finished]:
            self._remove(sequence)

    def _admit(self) -> list[_Sequence]:
        """Start waiting sequences in their order, as many as the limit allows, and return them."""
        admitted: list[_Sequence] = []
        num_tokens = 0
        with self._queue_lock:
            while self._waiting and len(self._running) + len(admitted) < self.max_sequences:
                request = self._waiting[0].request
                is_new = not admitted or admitted[-1].request is not request
                num_tokens += len(request.token_ids) if is_new else 0
                if admitted and num_tokens > MAX_PROMPT_TOKENS:
                    break
                admitted.append(self._waiting.popleft())
            self._running += admitted
        return admitted

    def _read_prompts(self, admitted: list[_Sequence]) -> torch.Tensor:
        """Compute each new prompt once; return the logits [N, V] of each sequence's first token."""
        first = len(self._running) - len(admitted)
        requests = list(dict.fromkeys(sequence.request for sequence in admitted))
        rows: dict[_SampleRequest, list[int]] = {request: [] for request in requests}
        for row, sequence in enumerate(admitted, start=first):
            rows[sequence.request].append(row)
        longest = max(len(request.token_ids) + request.sampling.max_new_tokens for request in requests)
        self._cache.reserve(len(self._running), longest)
        logits = predict_after_prompts(
            self.model, self._cache, [request.token_ids for request in requests], [rows[one] for one in requests]
        )
        places = {request: place for place, request in enumerate(requests)}
        return logits[[places[sequence.request] for sequence in admitted]]

    def _end(self, sequence: _Sequence) -> None:
        """Finish a sequence if its last token ends it; finish its request with the last sequence."""
        sampling, token = sequence.request.sampling, sequence.token_ids[-1]
        if token in self.files.end_token_ids or token in sampling.stop_token_ids:
            sequence.end = token
        elif sampling.stop:
            sequence.end = self._find_stop(sequence)
        sequence.is_finished = sequence.end is not None or len(sequence.token_ids) == sampling.max_new_tokens
        request = sequence.request
        if request.is_finished:
            samples = self._samples(request)
            with self._queue_lock:
                if not request.done.done():
                    request.done.set_result(samples)

    def _find_stop(self, sequence: _Sequence) -> str | None:
        """Return the stop string that the last token has completed, if there is one."""
        stop = sequence.request.sampling.stop
        # Each token has at least one byte, unless it is special, and a character at most four.
        split = max(len(sequence.token_ids) - 4 * max(map(len, stop)) - CONTEXT_TOKENS, 0)
        before = sequence.request.token_ids + sequence.token_ids[:split]
        (text,) = decode_completions(self.files.tokenizer, before, [sequence.token_ids[split:]])
        return next((text_end for text_end in stop if text_end in text), None)

    def _samples(self, request: _SampleRequest) -> list[Sample]:
        outputs: list[EngineOutput] = [
            {
                "token_ids": np.array(sequence.token_ids, np.int64),
                "logprobs": np.array(sequence.logprobs, np.float32),
                "weight_versions": np.array(sequence.weight_versions, np.int32),
                "end": sequence.end,
                "supports": ([*chain.from_iterable(sequence.supports)], [*map(len, sequence.supports)])
                if request.sampling.max_support
                else None,
            }
            for sequence in request.sequences
        ]
        return make_samples(self.files, request.token_ids, outputs)

    def _remove(self, sequence: _Sequence) -> None:
        """Remove a sequence from the cache: the last row is moved to its row."""
        row, last = self._running.index(sequence), len(self._running) - 1
        if row != last:
            self._cache.move(last, row)
            self._running[row] = self._running[last]
        self._running.pop()

    @torch.inference_mode()
    def _drop_abandoned(self) -> None:
        """Remove the sequences of requests that were cancelled, or have failed."""
        self._waiting = deque(sequence for sequence in self._waiting if not sequence.request.done.done())
        for sequence in [sequence for sequence in self._running if sequence.request.done.done()]:
            self._remove(sequence)

    def _fail_requests(self, error: Exception) -> None:
        """Fail all requests, and drop those that wait; called with the lock of the queue."""
        if not isinstance(error, EngineError):
            failure = EngineError(f"The sampler failed: {error}")
            failure.__cause__, error = error, failure
        for request in {sequence.request for sequence in (*self._waiting, *self._running)}:
            if not request.done.done():
                request.done.set_exception(error)
        self._waiting.clear()


def can_sleep(device: torch.device) -> bool:
    """Return whether a sampler on this device frees its memory for the actor: yes, except on a CPU."""
    return device.type != "cpu"


def draw_uniforms(sampling: Sampling, number: int) -> list[float]:
    """Return a sample's random numbers in [0, 1), one for each token, independent of device and batch.

    Args:
        sampling: settings of the request; without a seed the numbers differ in each call.
        number: the sample's index in the request.
    """
    seed = secrets.randbits(62) if sampling.seed is None else sampling.seed + number
    drawn: list[float] = np.random.Generator(np.random.Philox(seed)).random(sampling.max_new_tokens).tolist()
    return drawn
