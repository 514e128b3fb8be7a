"""The trainer's connection to one engine, from start to end: a child process, or an engine served at a URL."""

import asyncio
import atexit
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

from rlightning import intervals
from rlightning.errors import EngineDiedError, EngineError, EngineStartError, RequestRefusedError
from rlightning.foreign_text import cut_line
from rlightning.processes.liveness import Deadline
from rlightning.rollout.engine_config import EngineConfig
from rlightning.rollout.engine_facts import EngineFacts, check_facts
from rlightning.rpc import (
    AuthenticationError,
    BusyError,
    ConnectionLostError,
    Peer,
    RemoteError,
    background_loop,
    connect,
)
from rlightning.rpc.run_key import RUN_KEY_VARIABLE, read_key

log = logging.getLogger(__name__)

SAMPLING_METHODS = ("generate", "read_tokens", "score")
"""Methods during which the engine's workers still answer heartbeats, and which may be cancelled."""
METHODS = (
    *SAMPLING_METHODS,
    "open_weight_receivers",
    "receive_weights",
    "finish_weight_update",
    "sleep",
    "ping",
)
"""Methods of :class:`~rlightning.rollout.vllm.server.VLLMServer` that the trainer may call."""
NAME = "the engine"
BUSY = "it serves another trainer"


class EngineConnection(ABC):
    """Calls methods of an engine. It may be used from any thread; calls run on the background event loop.

    Calls before the engine is up wait for the engine. After its end every call fails with the same error. This class
    implements :class:`~rlightning.rollout.weights.driver.UpdatableEngine` for weight updates.

    Args:
        config: configuration of the engine.

    Attributes:
        death: the error with which calls fail; None while the engine is alive.
        ready: future of the engine's facts, done when the engine is up.
        ended: future of the error, done when the engine is dead and calls have had time to fail.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.death: EngineError | None = None
        self.ready: Future[EngineFacts] = Future()
        self.ended: Future[EngineError] = Future()
        self._is_closing = False
        self._has_sampled = False
        self._num_calls = Counter[bool]()  # running calls, by whether they sample
        self._calls: set[asyncio.Future[Any]] = set()
        self._is_up, self._is_over = asyncio.Event(), asyncio.Event()
        self._peer: Peer | None = None
        self._use: asyncio.Task[str] | None = None

    @property
    @abstractmethod
    def pid(self) -> int:
        """The process id of the engine on its host."""

    @abstractmethod
    async def _connect(self) -> Peer:
        """Connect to the process that runs the engine.

        Raises:
            EngineError: the engine cannot be reached or started.
        """

    @abstractmethod
    async def _start(self, peer: Peer) -> EngineFacts:
        """Wait until the engine is up, and return its facts."""

    @abstractmethod
    async def _end(self, how: str) -> EngineError:
        """Clean up after the engine's end; return the error with which calls fail. ``how`` is a clause on its end."""

    @abstractmethod
    def _terminate(self) -> None:
        """Immediately kill the processes that this process has started for the engine."""

    # Calls

    def submit(self, method: str, *arguments: object) -> "Future[Any]":
        """Call a method of the engine; its result is plain data, with arrays as memoryviews.

        Cancelling the future cancels the call, before the engine receives any later call.

        Returns:
            A future; it fails with an EngineDiedError if the engine died, with another EngineError if the engine
            rejected the call.
        """
        return background_loop().submit(self.call(method, *arguments))

    async def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the engine's server from the background event loop, and return its result."""
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        is_sampling = method in SAMPLING_METHODS
        try:
            await self._is_up.wait()
            if self.death is not None:
                raise self.death.with_traceback(None)
            assert self._peer is not None
            with self._counted(is_sampling):
                result = await self._peer.call(method, *arguments)
                self._has_sampled |= is_sampling
            return result
        except RemoteError as error:
            raise RequestRefusedError(error.traceback or error.message) from None
        except ConnectionLostError:
            await self._is_over.wait()
            assert self.death is not None
            raise self.death.with_traceback(None) from None  # all calls raise the same object
        finally:
            self._calls.discard(task)

    @property
    def worker_devices(self) -> Sequence[str]:
        """The name of each worker's device, unique over all hosts (:attr:`UpdatableEngine.worker_devices`)."""
        return self.config.worker_devices

    # Start and end of the connection

    def close(self) -> None:
        """End the engine, or this trainer's use of a served one. May be called twice."""
        atexit.unregister(self.close)
        self._is_closing = True
        self._terminate()
        if not self.ended.done():
            background_loop().loop.call_soon_threadsafe(self._leave)
            if not wait([self.ended], timeout=intervals.LOOP_TIMEOUT).done:
                log.warning("The connection to the engine did not end in %g s.", intervals.LOOP_TIMEOUT)

    def _begin(self) -> None:
        """Start to connect; called when a subclass's constructor is done."""
        atexit.register(self.close)
        background_loop().submit(self._live())

    async def _live(self) -> None:
        """Connect to the engine, serve calls until it ends, and make all further calls fail."""
        error: EngineError | None = None
        how = "died"
        try:
            if not self._is_closing:
                self._use = asyncio.ensure_future(self._run())
                how = await self._use
        except asyncio.CancelledError:  # cancelled by close()
            pass
        except EngineError as refusal:
            error = refusal
        except Exception as problem:  # arguments that are not plain data, for example
            log.debug("The engine failed.", exc_info=True)
            error = EngineError(f"The engine cannot be used: {type(problem).__name__}: {cut_line(problem)}")
        try:
            ending = await self._end(how)
        except RuntimeError:  # the interpreter exits and executors are shut down: close() ends the process
            ending = EngineDiedError(f"The engine {how}.")
        self.death = ending if error is None or self._is_closing else error
        if not self.ready.done():
            self.ready.set_exception(self.death)
        self._is_up.set()
        self._is_over.set()
        try:
            if self._peer is not None:
                self._peer.abort("it has ended")
            if self._calls:
                await asyncio.wait(list(self._calls), timeout=intervals.CANCEL_GRACE)
        finally:
            self.ended.set_result(self.death)

    async def _run(self) -> str:
        """Wait until the engine ends, and return how it ended."""
        peer = self._peer = await self._connect()
        try:
            facts = await self._start(peer)
        except RemoteError as refusal:
            if refusal.type_name != "ArgumentsRefusedError":
                raise
            raise EngineStartError(
                f"vLLM refuses the engine's arguments, which rollout.engine adds to: {cut_line(refusal.message)}"
            ) from None
        except ConnectionLostError as lost:
            return self._describe(lost).replace("gave no heartbeat", "did not come up")
        check_facts(self.config, facts)
        log.info("The engine is up: %s, up to %s tokens.", facts.get("dtype"), facts.get("max_model_len"))
        self.ready.set_result(facts)
        self._limit_silence()
        self._is_up.set()
        await peer.wait_closed()
        return self._describe(peer.closed.result())

    def _leave(self) -> None:
        if self._use is not None:
            self._use.cancel()

    def _describe(self, lost: ConnectionLostError) -> str:
        """Return how a connection was lost: "died", unless this side has closed the connection."""
        text = str(lost).removeprefix(f"{NAME}: ")
        return text if text.startswith("gave no heartbeat") else "died"

    @contextmanager
    def _counted(self, is_sampling: bool) -> Iterator[None]:
        """Context manager during which a call counts as running."""
        self._num_calls[is_sampling] += 1
        self._limit_silence()
        try:
            yield
        finally:
            self._num_calls[is_sampling] -= 1
            self._limit_silence()

    def _limit_silence(self) -> None:
        """Set the heartbeat timeout: it is longer while weights load, or the engine compiles for its first samples."""
        if self._peer is None:
            return
        timeout = self.config.hang_timeout
        if self._has_sampled and self._num_calls[True] and not self._num_calls[False]:
            timeout = min(timeout, intervals.ENGINE_PROGRESS_TIMEOUT)
        self._peer.heartbeat_timeout = timeout


class ServedEngine(EngineConnection):
    """An engine served at a URL by ``rlightning serve``.

    The constructor returns at once; connecting is retried for ``config.start_timeout`` seconds.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._key = read_key()
        self._reason = ""
        self._begin()

    @property
    def pid(self) -> int:
        """The process id of the engine on its host; waits until the engine is up."""
        return int(self.ready.result()["pid"])

    async def _connect(self) -> Peer:
        url, deadline = self.config.url, Deadline(self.config.start_timeout)
        reason = ""
        while True:
            seconds = min(intervals.CONNECT_TIMEOUT, max(deadline.remaining, intervals.RECONNECT_INTERVAL))
            is_first = not reason
            try:
                return await connect(
                    url,
                    self._key,
                    {"engine_ended": self._note_reason},
                    timeout=seconds,
                    name=NAME,
                    heartbeat_timeout=self.config.start_timeout,
                )
            except AuthenticationError as error:
                raise EngineError(
                    f"The engine at {url} cannot be used: {error}. Both sides need the same secret in the environment "
                    f"variable {RUN_KEY_VARIABLE}, or none for one user on one host."
                ) from None
            except BusyError:
                reason = BUSY
            except ConnectionLostError as error:
                if reason != BUSY:
                    reason = str(error).replace(f"{url} ", "it ", 1)
            if deadline.is_over:
                raise EngineError(
                    f"The engine at {url} could not be reached for {self.config.start_timeout:g} s: {reason}. Start it "
                    "with `rlightning serve`, or see rollout.engines."
                )
            if is_first:
                log.warning(
                    "The engine at %s cannot be reached yet: %s. Retrying for %.0f s.", url, reason, deadline.remaining
                )
            await asyncio.sleep(min(intervals.RECONNECT_INTERVAL, deadline.remaining))

    async def _start(self, peer: Peer) -> EngineFacts:
        facts: EngineFacts = await peer.call("describe")
        return facts

    async def _note_reason(self, reason: str) -> None:
        self._reason = reason

    async def _end(self, how: str) -> EngineError:
        if self._is_closing:
            return EngineDiedError("The engine's connection has been closed.")
        if self._reason:
            return EngineDiedError(f"{self.config.url}: {self._reason}")
        how = "closed the connection" if how == "died" else how
        return EngineDiedError(f"The engine at {self.config.url} {how}.")

    def _terminate(self) -> None:
        """Do nothing: a served engine keeps running, for other trainers."""
