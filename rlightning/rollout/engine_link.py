"""One life of an engine as its trainer has it: calls and their answers in any order, and its end, however it comes."""

import atexit
import contextlib
import logging
import pickle
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlightning import intervals
from rlightning.errors import EngineError, EngineStartError
from rlightning.foreign_text import cut, cut_line
from rlightning.rollout.engine_hello import check_hello

if TYPE_CHECKING:
    from rlightning.rollout.model_files import ModelFiles

log = logging.getLogger(__name__)


PROGRESS_METHODS = {"generate", "score", "cancel"}
"""Calls between whose steps the engine gives signs of life; others may keep its workers busy for longer."""


class EngineDiedError(EngineError):
    """The engine is gone or answers no more; whatever it had finished before has been kept."""


class RequestCancelledError(EngineError):
    """The trainer has cancelled the request."""


class RequestRefusedError(EngineError):
    """The engine could not do what it was asked for.

    Attributes:
        reason: the engine's traceback.
    """

    def __init__(self, reason: str) -> None:
        self.reason = cut(reason)
        gist = cut_line(self.reason.strip().rpartition("\n")[2])
        super().__init__(f"The engine refused a request: {gist}", self.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMConfig:
    """How to start an engine, or what one that others have started has to be like.

    Attributes:
        engine_args: of vLLM's AsyncEngineArgs.
        device: this rank's, as the trainer names it; the engine runs on it, or on others of its type.
        visible_devices: what CUDA calls the devices that the engine runs on, one a tensor-parallel worker; none: those
            that this process sees.
        dtype: what weights are sent in.
        log_file: the engine's output, appended.
        url: where an engine that others have started listens; "" is one of the trainer's own.
        weight_folder: where weights pass through, if nothing faster connects trainer and engine.
        can_sleep: whether it shares its device with an actor, so that sleeping pays.
        bucket_bytes: see :func:`~rlightning.rollout.weights.plan_chunks`.
        start_timeout: seconds until the engine must be up.
        hang_timeout: seconds without a heartbeat, while something is asked of it, until it counts as dead; while it
            only samples, and has before, ``intervals.ENGINE_PROGRESS_TIMEOUT`` if that is less.
        environment: further variables of its process.
        files: of the model, as the trainer has read them; None for who only starts an engine for others.
        copies: the contents of the model folder's files but the weights, by name: what an engine needs to start again
            where the folder is gone.
    """

    engine_args: dict[str, Any]
    device: torch.device
    dtype: torch.dtype
    log_file: Path
    visible_devices: tuple[str, ...] = ()
    url: str = ""
    weight_folder: Path | None = None
    can_sleep: bool = False
    bucket_bytes: int = 2 << 30
    start_timeout: float = 600.0
    hang_timeout: float = 120.0
    environment: dict[str, str] = field(default_factory=dict)
    files: "ModelFiles | None" = None
    copies: Mapping[str, bytes] = field(default_factory=dict, repr=False)


class EngineLink(ABC):
    """Asks an engine, and hears what it says in a thread.

    Calls may be made before the engine is up, and wait for it. Once it has died, every call fails with the same error.

    Args:
        config: of the engine.
        on_alive: called when the engine gives a heartbeat without an answer.

    Attributes:
        death: the error that calls fail with.
        ready: what the engine says of itself, done when it is up.
        ended: done when it is dead, and every call has been told.
    """

    def __init__(self, config: VLLMConfig, on_alive: Callable[[], None] = lambda: None) -> None:
        self.config = config
        self.death: EngineError | None = None
        self.ready: Future[dict[str, Any]] = Future()
        self.ended: Future[EngineError] = Future()
        self._on_alive = on_alive
        self._pending: dict[int, Future[Any]] = {0: self.ready}
        self._num_calls = 0
        self._blocking: set[int] = {0}
        """Calls that are pending and may keep the engine from signs of life."""
        self._has_sampled = False
        """Whether it has given one without them: what it had to compile, it has."""
        self._silence = 0.0
        self._how = "died"
        self._is_closing = False
        self._connection: Connection | None = None
        self._unsent: list[bytes] = []
        self._state_lock, self._send_lock = threading.RLock(), threading.Lock()
        self._ears = threading.Thread(target=self._listen, name="engine-answers", daemon=True)

    @property
    @abstractmethod
    def pid(self) -> int:
        """Of the engine's process, on its host."""

    @abstractmethod
    def _open(self) -> Connection:
        """Connect to the engine; called by the thread that listens.

        Raises:
            EngineError: there is none, and there will be none.
            EOFError, OSError: it is gone.
        """

    @abstractmethod
    def _end(self, how: str) -> EngineError:
        """End what is left of the engine, whatever state it is in; the error for all who ask something of it."""

    def submit(self, method: str, *arguments: Any) -> "Future[Any]":
        """Ask something of the engine.

        Returns:
            What it answers. Its exception is an EngineError if the engine refused, an EngineDiedError if it died.
        """
        answer: Future[Any] = Future()
        with self._state_lock:
            if self.death is not None:
                answer.set_exception(self.death)
                return answer
            if not self._pending:
                self._silence = 0.0  # it owed nobody a heartbeat
            self._num_calls += 1
            number = self._num_calls
            self._pending[number] = answer
            if method not in PROGRESS_METHODS:
                self._blocking.add(number)
        self._send((number, method, arguments))
        return answer

    # What a weight update asks: rollout.weights.driver.Engine

    @property
    def worker_devices(self) -> Sequence[str]:
        """See :class:`~rlightning.rollout.weights.driver.Engine`."""
        size = int(self.config.engine_args.get("tensor_parallel_size") or 1)
        return self.config.visible_devices or ("",) * size

    def open_weight_receivers(self, receivers: list[bytes]) -> "Future[None]":
        """See :class:`~rlightning.rollout.weights.driver.Engine`."""
        return self.submit("open_weight_receivers", receivers)

    def receive_weights(self, chunk: int) -> "Future[list[str]]":
        """See :class:`~rlightning.rollout.weights.driver.Engine`."""
        return self.submit("receive_weights", chunk)

    def finish_weight_update(self, version: int, keeps_cache: bool) -> "Future[None]":
        """See :class:`~rlightning.rollout.weights.driver.Engine`."""
        return self.submit("finish_weight_update", version, keeps_cache)

    def cancel(self, answers: "list[Future[Any]]") -> None:
        """End calls whose answers nobody waits for any more."""
        with self._state_lock:
            numbers = [number for number, answer in self._pending.items() if answer in answers]
        if numbers:
            self.submit("cancel", numbers)

    def close(self) -> None:
        """End the engine's life, or what this trainer has of it. May be called twice."""
        atexit.unregister(self.close)
        self._is_closing = True
        self._hang_up()
        if threading.current_thread() is not self._ears:
            self._ears.join()

    def log_tail(self) -> str:
        """The last lines of the engine's log, where it is at hand."""
        return ""

    def _begin(self) -> None:
        """Listen from here on."""
        self._ears.start()
        atexit.register(self.close)

    def _send(self, message: tuple[Any, ...]) -> None:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            with self._send_lock:
                if self._connection is None:
                    self._unsent.append(data)
                else:
                    self._connection.send_bytes(data)
        except OSError as error:
            self._note(error)
            self._hang_up()

    def _hang_up(self) -> None:
        """Let the thread that listens find the connection at its end."""
        if self._connection is not None:
            hang_up(self._connection)

    def _listen(self) -> None:
        """Hand out answers until the engine dies, and end it then."""
        error: EngineError | None = None
        try:
            connection = self._open()
            with self._send_lock:
                self._connection = connection
                for data in self._unsent:
                    connection.send_bytes(data)
            while not self._is_closing:
                look = min(intervals.POLL_INTERVAL, self._timeout)
                if connection.poll(look):
                    self._hear(*connection.recv())
                elif self._is_overdue(look):
                    complaint = "gave no heartbeat" if self.ready.done() else "did not come up"
                    self._how = f"{complaint} for {self._timeout:.0f} s"
                    break
        except EngineError as refusal:
            error = refusal
        except (EOFError, OSError) as problem:
            self._note(problem)
        ending = self._end(self._how)
        if error is None or self._is_closing:
            error = ending
        with self._send_lock:
            if self._connection is not None:
                self._connection.close()
        with self._state_lock:
            self.death = error
            pending, self._pending = list(self._pending.values()), {}
        for answer in pending:
            answer.set_exception(error)
        self.ended.set_result(error)

    def _hear(self, number: int | None, status: str, result: Any) -> None:
        if status == "refused":
            raise EngineStartError(f"vLLM refuses the engine's arguments, which rollout.engine adds to: {result}")
        if status == "ready":
            check_hello(self.config, result)
            log.info("The engine is up: %s, up to %s tokens.", result.get("dtype"), result.get("max_model_len"))
        with self._state_lock:
            self._silence = 0.0
            self._has_sampled |= not self._blocking
            answer = None
            if status != "alive":
                answer = self._pending.pop(number or 0, None)
                self._blocking.discard(number or 0)
        if answer is None:
            self._on_alive()
        elif status == "error":
            answer.set_exception(RequestRefusedError(result))
        elif status == "cancelled":
            answer.set_exception(RequestCancelledError("The request was cancelled."))
        else:
            answer.set_result(result)

    @property
    def _timeout(self) -> float:
        if not self.ready.done():
            return self.config.start_timeout
        if self._has_sampled and not self._blocking:
            return min(self.config.hang_timeout, intervals.ENGINE_PROGRESS_TIMEOUT)
        return self.config.hang_timeout

    def _note(self, problem: EOFError | OSError) -> None:
        """Tell an engine that stopped in the middle of a message from one that is gone."""
        if isinstance(problem, BlockingIOError):  # limit_waiting's
            self._how = f"gave no heartbeat for {self.config.hang_timeout:.0f} s"

    def _is_overdue(self, look: float) -> bool:
        """Whether the engine, silent for another ``look``, owes somebody an answer and has been so for too long.

        Looks are added up, not read off a clock: a trainer that did not run itself, nor perhaps the engine, as in a job
        that is suspended, accuses nobody.
        """
        with self._state_lock:
            self._silence += look
            return bool(self._pending) and self._silence > self._timeout


def limit_waiting(connection: Connection, seconds: float) -> None:
    """Let writes, and reads that have begun, fail after some time, which those of a stopped process never would."""
    with borrowed_socket(connection) as end:
        timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for direction in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, direction, timeval)


def hang_up(connection: Connection) -> None:
    """Let both ends find the connection at its end, whoever reads or writes now."""
    with contextlib.suppress(OSError), borrowed_socket(connection) as end:
        end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def borrowed_socket(connection: Connection) -> Iterator[socket.socket]:
    """Give what the connection runs over as a socket, without a file descriptor more."""
    end = socket.socket(fileno=connection.fileno())
    try:
        yield end
    finally:
        end.detach()
