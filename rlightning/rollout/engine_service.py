"""The serving side of an engine that trainers on other hosts use, one after the other.

::

    trainer                     rlightning serve                engine process
      ServedEngine  ---tcp--->    Visit ---> EngineProcess  --->  VLLMServer

The engine outlives its trainers. One that dies is started again, and the trainer, whose connection ends, connects anew.
"""

import contextlib
import logging
import pickle
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from rlightning import intervals, rpc
from rlightning.errors import ConfigError
from rlightning.rollout.acceptor import Acceptor
from rlightning.rollout.engine_link import (
    EngineDiedError,
    RequestCancelledError,
    RequestRefusedError,
    VLLMConfig,
    hang_up,
    limit_waiting,
)
from rlightning.rollout.engine_process import EngineProcess
from rlightning.rollout.engine_wire import BUSY, WELCOME, let_in

log = logging.getLogger(__name__)

CANCELLABLE = ("generate", "score")
"""Whatever else a trainer has asked for is soon done, and is not to be left half done."""

Message = tuple[int | None, str, Any]


class Visit:
    """One trainer's time with the engine.

    Args:
        connection: to the trainer, who has been let in.
        engine: that it has to itself.
    """

    def __init__(self, connection: Connection, engine: EngineProcess) -> None:
        self.engine = engine
        self._connection = connection
        self._outbox: SimpleQueue[Message | None] = SimpleQueue()
        self._asked: dict[int, Future[Any]] = {}
        self._cancellable: dict[int, Future[Any]] = {}

    def serve(self) -> None:
        """Return when the trainer has gone or the engine has died, and nothing is left of what was asked for."""
        sender = threading.Thread(target=self._send, name="trainer-answers", daemon=True)
        sender.start()
        self.engine.ready.add_done_callback(self._greet)
        self.engine.ended.add_done_callback(lambda ended: self._close(str(ended.result())))
        try:
            with contextlib.suppress(EOFError, OSError):
                while self._connection.poll(None):
                    self._take(*self._connection.recv())
        finally:
            self._close("The trainer has gone.")
            sender.join()
            self.engine.cancel(list(self._cancellable.values()))
            wait(list(self._asked.values()))

    def say_alive(self) -> None:
        """The engine does something for this trainer."""
        self._outbox.put((None, "alive", None))

    def _greet(self, ready: "Future[dict[str, Any]]") -> None:
        if ready.exception() is None:
            self._outbox.put((None, "ready", ready.result()))

    def _close(self, reason: str) -> None:
        """Say why; what comes after that is heard by nobody."""
        self._outbox.put((None, "over", reason))
        self._outbox.put(None)

    def _take(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        if method == "cancel":
            [numbers] = arguments
            self.engine.cancel([answer for one in numbers if (answer := self._asked.get(one)) is not None])
            self._outbox.put((number, "ok", None))
            return
        answer = self.engine.submit(method, *arguments)
        self._asked[number] = answer
        if method in CANCELLABLE:
            self._cancellable[number] = answer
        answer.add_done_callback(lambda done: self._pass_on(number, done))

    def _pass_on(self, number: int, answer: "Future[Any]") -> None:
        self._asked.pop(number, None)
        self._cancellable.pop(number, None)
        error = answer.exception()
        if error is None:
            self._outbox.put((number, "ok", answer.result()))
        elif isinstance(error, RequestCancelledError):
            self._outbox.put((number, "cancelled", None))
        elif not isinstance(error, EngineDiedError):  # that it has died is the last thing to be said
            reason = error.reason if isinstance(error, RequestRefusedError) else str(error)
            self._outbox.put((number, "error", reason))

    def _send(self) -> None:
        """Until there is nothing more to say, or nobody takes it; the connection is at its end then."""
        with contextlib.suppress(OSError):
            while (message := self._outbox.get()) is not None:
                self._connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
        hang_up(self._connection)


class EngineService:
    """Keeps an engine up, and lets one trainer at a time use it.

    Args:
        config: of the engine.
        listener: where trainers come to, from :func:`listen`.
        token: that they must know; None lets in all of this user's on this host.
    """

    def __init__(self, config: VLLMConfig, listener: socket.socket, token: bytes | None) -> None:
        self.config = config
        self._listener, self._token = listener, token
        self._engine: EngineProcess | None = None
        self._visit: Visit | None = None
        self._acceptor: Acceptor | None = None
        self._is_taken = threading.Lock()
        """Held by the thread of the trainer that is served."""

    def run(self, on_ready: Callable[[], None]) -> None:
        """Serve until this thread is interrupted; ``on_ready`` is called when the engine is up for the first time.

        Raises:
            EngineError: the engine could not start.
        """
        try:
            self._start()
            self._acceptor = Acceptor(self._listener, partial(let_in, token=self._token), self._meet)
            self._live_once()
            on_ready()
            while True:
                assert self._engine is not None
                death = self._engine.ended.result()
                log.warning("The engine is started again: %s", death.line)
                self._start()
                self._live_once()
        finally:
            if self._acceptor is not None:
                self._acceptor.close()
            self._listener.close()
            if self._engine is not None:
                self._engine.close()

    def _start(self) -> None:
        self._engine = EngineProcess(self.config, self._pass_on_life)

    def _live_once(self) -> None:
        """Return when the engine is up."""
        assert self._engine is not None
        self._engine.ready.result()

    def _pass_on_life(self) -> None:
        visit = self._visit
        if visit is not None:
            visit.say_alive()

    def _meet(self, connection: Connection, peer: str) -> None:
        """Serve a trainer that has been let in, unless another is there."""
        if not self._is_taken.acquire(blocking=False):
            connection.send_bytes(BUSY)
            return
        try:
            connection.send_bytes(WELCOME)
            self._attend(connection, peer)
        finally:
            self._is_taken.release()

    def _attend(self, connection: Connection, peer: str) -> None:
        limit_waiting(connection, self.config.hang_timeout)
        while (engine := self._engine) is None or engine.death is not None:
            time.sleep(intervals.SHORT_POLL_INTERVAL)
        log.info("A trainer has come from %s.", peer)
        self._visit = Visit(connection, engine)
        try:
            self._visit.serve()
        finally:
            self._visit = None
        log.info("The trainer from %s has gone.", peer)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 is any that is free."""
    try:
        return rpc.listen(host, port)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: nothing can listen there ({error}).") from error
