"""A server process of verifiers' environment, in verifiers' interpreter, and its client.

The server neither lists its tasks nor reports hangs or its own exit. Hence a launcher starts it and lists the tasks,
and this module monitors it.
"""

import asyncio
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from rlightning import intervals
from rlightning.environments.worker_environment import own_search_path
from rlightning.errors import ConfigError
from rlightning.foreign_text import cut_line
from rlightning.processes.liveness import Heartbeat
from rlightning.processes.managed_process import ManagedProcess, python_command
from rlightning.python_values import JsonObject
from rlightning.rpc.run_key import environment_without_key

LAUNCHER = "rlightning.environments.verifiers.launcher"
KEY_VARIABLE = "RLIGHTNING_POLICY_KEY"
"""Environment variable of the server with its key for the endpoint."""
MAX_ANNOUNCEMENT_BYTES = 1 << 30
CLOSE_GRACE = 4.0
"""Seconds for a server to clean up after SIGTERM."""

Event = tuple[str, JsonObject] | Exception
"""``delta`` or ``reply`` and the message's content; an exception if no more messages will come."""


class ServerEndedError(Exception):
    """A server has exited, or was killed because it hung."""


class ServersClosedError(ServerEndedError):
    """The environment is being closed: trajectories of its servers are not requeued."""


class Announcement(NamedTuple):
    """The first message of a server, sent when it listens: the agents of its environment, and its first tasks.

    ``has_uv`` says whether the host has the program uv, which verifiers' own harnesses need.
    """

    roles: list[str]
    tasks: list[JsonObject]
    has_uv: bool


class EnvironmentServer:
    """A server process that can be restarted after it has exited.

    Args:
        python: path of the interpreter.
        config: configuration of verifiers' environment.
        variables: additional environment variables of the process.
        hang_timeout: seconds without an answer after which the server is killed.

    Attributes:
        runs: queues of events of the running tasks, by name.
        num_assigned: number of trajectories that run on the server or wait for it.
        starting: lock that is held while the server is started.
        is_up: whether the server runs.
        has_run: whether the server has been started before.
        process: the server's process; None while it is not running.
    """

    def __init__(self, python: str, config: JsonObject, variables: Mapping[str, str], hang_timeout: float) -> None:
        self._python, self._config, self._variables, self.hang_timeout = python, config, variables, hang_timeout
        self.runs: dict[str, asyncio.Queue[Event]] = {}
        self.num_assigned = 0
        self.is_up = self.has_run = False
        self.starting = asyncio.Lock()
        self.process: ManagedProcess | None = None
        self._folder = Path()
        self._tasks: list[asyncio.Task[None]] = []
        self._context: Any = None
        self._socket: Any = None

    async def start(self, num_tasks: int = 0) -> Announcement:
        """Start the server process, wait until it listens, and return its first message; raises a ConfigError if it
        fails.
        """
        import zmq
        import zmq.asyncio

        await self.close()
        self._folder = Path(tempfile.mkdtemp(prefix="rlightning.verifiers."))
        address = f"ipc://{self._folder}/server"
        self.process = ManagedProcess(
            python_command(LAUNCHER, interpreter=self._python),
            name="verifiers' server",
            log_file=self._folder / "log",
            environment=self._make_environment(),
        )
        settings = {
            "config": self._config,
            "num_tasks": num_tasks,
            "address": address,
            "search_path": own_search_path(),
        }
        try:
            announced = await asyncio.wait_for(self._configure(self.process, settings), intervals.TASK_SET_TIMEOUT)
        except BaseException:
            await self.close()
            raise
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._socket.connect(address)
        heartbeat = Heartbeat(intervals.POLL_INTERVAL)
        receiving = asyncio.ensure_future(self._receive(heartbeat))
        self._tasks = [receiving, asyncio.ensure_future(self._watch(self.process, heartbeat, receiving))]
        self.is_up = self.has_run = True
        return announced

    async def close(self) -> None:
        """End the server and the processes that it started."""
        self.is_up = False
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        self._tell_all(ServersClosedError("its environment servers were closed"))
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
        process, self.process = self.process, None
        if process is not None:
            await asyncio.to_thread(process.terminate, CLOSE_GRACE)
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    @asynccontextmanager
    async def running(self, request: JsonObject) -> AsyncIterator["asyncio.Queue[Event]"]:
        """Context manager that has the server run a task, and yields the queue of the server's messages about it;
        exiting before the last message cancels the task.
        """
        name = secrets.token_hex(8)
        events = self.runs[name] = asyncio.Queue()
        try:
            await self._send(name, b"run", request)
            yield events
        finally:
            if self.runs.pop(name, None) is not None and self.is_up:
                await asyncio.shield(self._send(secrets.token_hex(8), b"cancel", {"request_id": name}))

    def _make_environment(self) -> dict[str, str]:
        folder = str(Path(self._python).absolute().parent)  # contains the programs of that interpreter, such as uv
        own = environment_without_key()
        paths = {"PATH": os.pathsep.join((folder, own.get("PATH", os.defpath)))}
        modules = {"PYTHONPATH": os.pathsep.join(own_search_path())}  # for the processes that the server starts
        return {**own, **paths, **modules, **self._variables}

    async def _configure(self, process: ManagedProcess, settings: JsonObject) -> Announcement:
        """Send the settings to the launcher in a process, and return its announcement, in a line of JSON each."""
        reader, writer = await asyncio.open_connection(sock=process.connection, limit=MAX_ANNOUNCEMENT_BYTES)
        try:
            writer.write(json.dumps(settings).encode() + b"\n")
            line = await reader.readline()
        except ConnectionError:
            line = b""
        finally:
            writer.close()
        if not line:
            await asyncio.to_thread(process.wait, intervals.EXIT_STATUS_GRACE)
            raise ConfigError(f"Verifiers' server ended as it started ({process.describe_end()}).", process.log_tail())
        found = json.loads(line)
        if "error" in found:
            raise ConfigError(f"Verifiers: {cut_line(found['error'])}", process.log_tail())
        return Announcement(**found)

    async def _send(self, name: str, method: bytes, payload: JsonObject) -> None:
        await self._socket.send_multipart([name.encode(), method, msgpack.packb(payload)])

    async def _receive(self, heartbeat: Heartbeat) -> None:
        while True:
            name, kind, data = await self._socket.recv_multipart()
            heartbeat.beat()
            events = self.runs.get(name.decode())
            if events is None:  # a response to a heartbeat, or of a cancelled run
                continue
            if kind == b"reply":
                del self.runs[name.decode()]
            events.put_nowait((kind.decode(), msgpack.unpackb(data, strict_map_key=False)))

    async def _watch(self, process: ManagedProcess, heartbeat: Heartbeat, receiving: "asyncio.Task[None]") -> None:
        """Make all running tasks fail when the server exits; kill the server when it hangs."""
        num_polls, every = 0, round(intervals.HEARTBEAT_INTERVAL / intervals.POLL_INTERVAL)
        while process.exit_code is None and not receiving.done() and heartbeat.tick() < self.hang_timeout:
            if num_polls % every == 0:
                await self._send(secrets.token_hex(8), b"health", {})
            num_polls += 1
            await asyncio.sleep(intervals.POLL_INTERVAL)
        self.is_up = False
        ended = process.describe_end()
        how = f"ended ({ended})" if ended else f"did not respond for {self.hang_timeout:g} s"
        if receiving.done():
            how = f"sent what is not of its protocol ({receiving.exception()})"
        tail = process.log_tail()
        self._tell_all(ServerEndedError(f"its environment server {how}", tail))
        await asyncio.to_thread(process.terminate)

    def _tell_all(self, error: ServerEndedError) -> None:
        for events in self.runs.values():
            events.put_nowait(error)
        self.runs.clear()
