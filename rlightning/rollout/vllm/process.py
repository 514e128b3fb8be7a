"""The engine process: ``python -m rlightning.rollout.vllm.process FD`` serves one trainer over the socket FD.

Messages are pickled tuples. The trainer sends ``(request_id, method, arguments)``, where the method is one of
:class:`~rlightning.rollout.vllm.server.VLLMServer` or ``cancel``. The process answers each once, in any order, with
``(request_id, "ok", result)``, ``(request_id, "error", traceback)`` or ``(request_id, "cancelled", None)``; and while
something is asked of it and the workers answer, it says ``(None, "alive", None)`` every few seconds. It ends, with all
that it started, when the trainer's end of the socket closes or the trainer is gone, however that came about.
"""

import asyncio
import contextlib
import os
import pickle
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.engine.exceptions import EngineDeadError

from rlightning import intervals
from rlightning.processes.process_group import end_own_group
from rlightning.rollout.engine_hello import make_hello
from rlightning.rollout.host_check import raise_open_files
from rlightning.rollout.model_files import ModelFiles
from rlightning.rollout.vllm.server import ArgumentsRefusedError, VLLMServer, start_engine


class Mailbox:
    """The socket to the trainer, read by a thread, so that the event loop never waits for it.

    Args:
        connection: to the trainer, which is this process's parent.
        scratch: removed when the trainer is gone.
    """

    def __init__(self, connection: Connection, scratch: Path) -> None:
        self.connection, self.scratch = connection, scratch
        self.lock = threading.Lock()
        self.is_ending = threading.Event()
        self._parent = os.getppid()

    def listen(self, loop: asyncio.AbstractEventLoop, inbox: "asyncio.Queue[Any]") -> None:
        """Hand on each message; end the whole process group when the trainer is gone."""
        with contextlib.suppress(EOFError, OSError):
            # A child that the trainer has forked holds the socket open too: its end alone does not tell.
            while os.getppid() == self._parent:
                if self.connection.poll(intervals.HEARTBEAT_INTERVAL):
                    loop.call_soon_threadsafe(inbox.put_nowait, self.connection.recv())
        self.is_ending.set()
        end_own_group(self.scratch)

    def send(self, *message: Any) -> None:
        """Answer the trainer."""
        with self.lock:
            self.connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


class Calls:
    """What the trainer has asked and has not been answered yet.

    Args:
        server: answers.
        mailbox: takes the answers.
    """

    def __init__(self, server: VLLMServer, mailbox: Mailbox) -> None:
        self.server, self.mailbox = server, mailbox
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises what ended the engine."""
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def begin(self, request_id: int, method: str, arguments: tuple[Any, ...]) -> None:
        """Have it answered, sooner or later."""
        task = asyncio.create_task(self._answer(request_id, method, arguments))
        self._tasks[request_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(request_id, None))

    async def cancel(self, request_ids: list[int]) -> None:
        """End these calls of ``generate``, unless they have been answered; returns when nothing of them is left."""
        tasks = {request_id: task for request_id in request_ids if (task := self._tasks.pop(request_id, None))}
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        for request_id, task in tasks.items():
            if task.cancelled():
                self.mailbox.send(request_id, "cancelled", None)

    async def _answer(self, request_id: int, method: str, arguments: tuple[Any, ...]) -> None:
        call = self.cancel if method == "cancel" else getattr(self.server, method)
        try:
            self.mailbox.send(request_id, "ok", await call(*arguments))
        except EngineDeadError as error:
            if not self.failure.done():
                self.failure.set_exception(error)
        except Exception:  # the trainer's process is where it is raised again
            self.mailbox.send(request_id, "error", traceback.format_exc())


async def serve(mailbox: Mailbox, inbox: "asyncio.Queue[Any]") -> None:
    """Start the engine that the first message describes, then answer requests until it fails."""
    _, _, engine_args = await inbox.get()
    facts = ModelFiles.read(engine_args["model"], trust_remote_code=engine_args.get("trust_remote_code", False)).facts
    server = VLLMServer(start_engine(engine_args))
    config = server.engine.vllm_config
    hello = make_hello(
        facts=facts,
        pid=os.getpid(),
        device=current_platform.device_type,
        dtype=str(config.model_config.dtype),
        max_model_len=config.model_config.max_model_len,
        tensor_parallel_size=config.parallel_config.tensor_parallel_size,
    )
    mailbox.send(None, "ready", hello)
    calls = Calls(server, mailbox)

    async def heartbeat() -> None:
        while True:
            await asyncio.sleep(intervals.HEARTBEAT_INTERVAL)
            if calls:
                await server.ping()
                mailbox.send(None, "alive", None)

    async def core() -> None:
        # A call other than generate() that its end finds waiting would wait for ever.
        while not server.engine.errored:
            await asyncio.sleep(intervals.POLL_INTERVAL)
        raise server.engine.dead_error

    async def requests() -> None:
        while True:
            calls.begin(*await inbox.get())

    await asyncio.gather(heartbeat(), core(), requests(), calls.failure)


def main() -> None:
    """Serve the trainer at the other end of file descriptor ``sys.argv[1]``; ``sys.argv[2]`` is a scratch folder."""
    mailbox = Mailbox(Connection(int(sys.argv[1])), Path(sys.argv[2]))

    async def run() -> None:
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        thread = threading.Thread(target=mailbox.listen, args=(asyncio.get_running_loop(), inbox), daemon=True)
        thread.start()
        try:
            await serve(mailbox, inbox)
        except ArgumentsRefusedError as error:
            traceback.print_exc()
            mailbox.send(None, "refused", str(error))
        except Exception:  # into the log, which the trainer quotes
            traceback.print_exc()
        if mailbox.is_ending.is_set():
            thread.join()  # it has killed the engine's core, and has to remove the scratch folder before it ends this
        os._exit(1)  # vLLM's own way out takes seconds; the trainer ends what it leaves

    raise_open_files()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    asyncio.run(run())


if __name__ == "__main__":
    main()
