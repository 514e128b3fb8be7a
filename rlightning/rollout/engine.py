"""A vLLM engine as a sampler, which can be started again after its process has died."""

import asyncio
import secrets
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlightning.errors import EngineDiedError, EngineError
from rlightning.rollout.detokenize import decode_completions
from rlightning.rollout.engine_config import EngineConfig
from rlightning.rollout.engine_connection import EngineConnection, ServedEngine
from rlightning.rollout.engine_facts import EngineFacts
from rlightning.rollout.engine_output import EngineOutput
from rlightning.rollout.model_files import ModelFiles
from rlightning.rollout.prefix_cache import PrefixCacheUse
from rlightning.rollout.sampler import OnTokens, Sampling
from rlightning.rollout.vllm.launcher import EngineProcess
from rlightning.types import Sample
from rlightning.types.supports import Supports


class EngineSampler(ABC):
    """Base of samplers that forward requests to an engine's server.

    Attributes:
        prefix_cache: counts the cached tokens of requests to :meth:`sample`.
    """

    follows_schemas = True

    def __init__(self) -> None:
        self.prefix_cache = PrefixCacheUse()

    @property
    @abstractmethod
    def files(self) -> ModelFiles:
        """Return the files of the model that the engine runs."""

    @abstractmethod
    async def _request(self, method: str, *arguments: object) -> object:
        """Call a method of :class:`~rlightning.rollout.vllm.server.VLLMServer` by its name."""

    async def sample(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        num_samples: int = 1,
        session: str | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[Sample]:
        """Sample from the engine (:meth:`TokenSampler.sample`); ``session`` has no effect on a single engine.

        During a weight update the call waits until the update has ended.
        """
        files = self.files
        arguments = vllm_sampling(sampling, num_samples, files.end_token_ids)
        if on_tokens is None:
            outputs = await self._request("generate", token_ids, arguments)
        else:
            stream = secrets.token_hex(8)
            reading = asyncio.ensure_future(self._read_along(stream, on_tokens))  # begins after what follows
            try:
                outputs = await self._request("generate", token_ids, arguments, stream)
            finally:
                reading.cancel()
        assert isinstance(outputs, list)
        self.prefix_cache.count(token_ids, outputs)
        return make_samples(files, token_ids, outputs)

    async def _read_along(self, stream: str, on_tokens: OnTokens) -> None:
        with suppress(EngineError):  # which the request itself meets
            while True:
                read = await self._request("read_tokens", stream)
                assert isinstance(read, list)
                for number, token_ids in read:
                    on_tokens(number, token_ids)

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the log-probabilities of ``token_ids`` at temperature 1: [P], 0 for the first token."""
        return np.asarray(await self._request("score", token_ids), np.float32)


class Engine(EngineSampler):
    """vLLM's AsyncLLM in a child process, or served elsewhere by ``rlightning serve``.

    A :class:`~rlightning.rollout.sampler.TokenSampler`, whose methods other threads may call by :meth:`submit`. A
    :class:`~rlightning.rollout.weights.driver.WeightUpdater` sends it weights. :meth:`start` returns at once, since
    engine and actor load at the same time; the first call waits for the engine.

    Raises:
        EngineDiedError: raised by every method if the process has died or hangs; :meth:`start` may then be called
            again.
        EngineError: raised by every method if the engine did not start, or rejected a request.

    Attributes:
        process: the connection to the most recently started engine.
        is_verified: whether a check since the engine's start has shown that it has the actor's weights.
        is_proven: whether a check since the engine's start has shown that it applies the adapter.
        has_base: whether the engine has the frozen weights of the adapter's base model.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self.config = config
        self.process: EngineConnection | None = None
        self.is_verified = self.is_proven = self.has_base = False
        self._held_version: int | None = None
        self._is_asleep = False

    @property
    def weight_version(self) -> int | None:
        """The version of the engine's weights; None before the first update, in sleep, and after the engine's death."""
        return self._held_version if self.is_alive else None

    @weight_version.setter
    def weight_version(self, version: int | None) -> None:
        self._held_version = version
        self._is_asleep &= version is None  # an update wakes it

    @property
    def is_alive(self) -> bool:
        """Whether the engine's process runs, as far as known."""
        return self.process is not None and self.process.death is None

    @property
    def ready(self) -> "Future[EngineFacts]":
        """A future of the most recently started engine process, done when the engine is up or has failed to start."""
        return self._running.ready

    @property
    def is_up(self) -> bool:
        """Whether the engine is alive and can be sent weights."""
        return self.is_alive and self.ready.done()

    @property
    def error(self) -> EngineError | None:
        """The error that ended the engine; None while it is alive."""
        return EngineDiedError("The engine is not running.") if self.process is None else self.process.death

    def start(self) -> None:
        """Start a process, or connect to an engine served elsewhere; returns before the engine is up."""
        self._held_version = None
        self.is_verified = self.is_proven = self.has_base = False
        self._is_asleep = False
        self.process = ServedEngine(self.config) if self.config.url else EngineProcess(self.config)

    def submit(self, method: str, *arguments: object) -> "Future[Any]":
        """Call a method of the engine's process by name, from any thread (:meth:`EngineConnection.submit`)."""
        return self._running.submit(method, *arguments)

    @property
    def files(self) -> ModelFiles:
        """Return the files of the model that the engine runs."""
        if self.config.files is None:
            raise EngineError(
                "EngineConfig.files is None: completions cannot be decoded. Set it by ModelFiles.read(model)."
            )
        return self.config.files

    async def _request(self, method: str, *arguments: object) -> object:
        return await asyncio.wrap_future(self.submit(method, *arguments))

    def sleep(self) -> None:
        """Free the memory, including weights, of an engine that shares its device with an actor; else do nothing."""
        if self.config.can_sleep and not self._is_asleep:
            self.submit("sleep").result()
            self._is_asleep, self.has_base = True, False
            self.weight_version = None

    def close(self) -> None:
        """End the engine and all processes that it started. May be called twice."""
        if self.process is not None:
            self.process.close()
            self.process = None

    def score_all(self, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return log-probabilities [N, L] of sequences [N, L] (:meth:`score`). Not to be called on the event loop."""
        answers = [self.submit("score", sequence) for sequence in token_ids.tolist()]
        return np.array([answer.result() for answer in answers], np.float32)

    @property
    def _running(self) -> EngineConnection:
        if self.process is None:
            raise EngineDiedError("The engine is not running.")
        return self.process


def vllm_sampling(sampling: Sampling, num_samples: int, end_token_ids: Sequence[int]) -> dict[str, object]:
    """Return the arguments of vLLM's SamplingParams for a request.

    Args:
        sampling: settings of one request; vLLM adds the sample's index to the seed.
        num_samples: completions of the prompt.
        end_token_ids: tokens that end a completion, besides ``sampling.stop_token_ids``.
    """
    return {
        "n": num_samples,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.effective_top_k,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop),
        "json_schema": sampling.json_schema,  # the engine's process makes vLLM's parameters of it
        # The trainer decides what ends a completion, not the files that the engine has read.
        "ignore_eos": True,
        "stop_token_ids": sorted({*end_token_ids, *sampling.stop_token_ids}),
        "seed": sampling.seed,
        # Of this many most likely tokens, and the sampled one: one more than a support may have shows that it is cut.
        "logprobs": sampling.max_support and min(sampling.effective_top_k, sampling.max_support + 1),
        "max_support": sampling.max_support,
    }


def make_samples(files: ModelFiles, prompt: Sequence[int], outputs: Sequence[EngineOutput]) -> list[Sample]:
    """Return a prompt's samples from the outputs of the engine's process.

    A sample's text includes a stop string, but not the end of sequence.

    Args:
        files: files of the policy.
        prompt: [P] tokens.
        outputs: outputs of the engine, one for each sample.
    """
    written = [output["token_ids"].tolist() for output in outputs]
    written = [tokens[:-1] if tokens and tokens[-1] in files.end_token_ids else tokens for tokens in written]
    texts = decode_completions(files.tokenizer, prompt, written)
    return [make_sample(text, output) for text, output in zip(texts, outputs, strict=True)]


def make_sample(text: str, output: EngineOutput) -> Sample:
    """Return one sample from its text and the engine's output."""
    reason: Literal["stop", "length"] = "length" if output["end"] is None else "stop"
    token_ids = array("q", np.asarray(output["token_ids"], np.int64).tobytes())
    logprobs = array("f", np.asarray(output["logprobs"], np.float32).tobytes())
    weight_versions = array("i", np.asarray(output["weight_versions"], np.int32).tobytes())
    supports, parts = None, output.get("supports")
    if parts is not None:
        supports = Supports(*(array("i", np.asarray(part, np.int32).tobytes()) for part in parts))
    return Sample(token_ids, logprobs, weight_versions, text, reason, supports)
