"""The engine process: ``python -m rlightning.rollout.vllm.process FOLDER SOCKET LIFELINE`` serves its parent.

The trainer calls ``start`` with the engine's arguments, and then the methods of
:class:`~rlightning.rollout.vllm.server.VLLMServer`. The process sends heartbeats while the engine's workers answer.
When the trainer has ended in any way, the process ends with all processes that it has started.
"""

import asyncio
import gc
import os
import select
import signal
import sys
import threading
import traceback
from pathlib import Path

from vllm.platforms import current_platform
from vllm.v1.engine.exceptions import EngineDeadError

from rlightning import intervals
from rlightning.processes.process_group import end_own_group
from rlightning.rollout.engine_config import EngineArguments
from rlightning.rollout.engine_connection import METHODS
from rlightning.rollout.engine_facts import EngineFacts, make_facts
from rlightning.rollout.host_check import raise_open_files
from rlightning.rollout.model_files import ModelFiles
from rlightning.rollout.vllm.server import ArgumentsRefusedError, VLLMServer, start_engine
from rlightning.rpc import serve_parent
from rlightning.rpc.peer import Method


class EngineHost:
    """The methods of an engine process that the trainer may call by RPC.

    Attributes:
        methods: methods by name; once the engine is up, also the engine's.
        failure: future that raises the error that ended the engine.
    """

    def __init__(self) -> None:
        self.methods: dict[str, Method] = {"start": self.start}
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_up = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    async def start(self, engine_args: EngineArguments) -> EngineFacts:
        """Start the engine, and return its device, dtype, sequence limit and further facts once it is up."""
        try:
            return self._start(engine_args)
        except ArgumentsRefusedError:
            traceback.print_exc()
            raise
        except Exception as error:
            await self._fail(error)
            raise

    async def check_alive(self) -> None:
        """Wait until the engine is up and every worker has answered."""
        await self._is_up.wait()
        await self.methods["ping"]()

    def _start(self, engine_args: EngineArguments) -> EngineFacts:
        trust = engine_args.get("trust_remote_code", False)
        files = ModelFiles.read(engine_args["model"], trust_remote_code=trust).facts
        server = VLLMServer(start_engine(engine_args))
        self.methods |= {name: self._guard(getattr(server, name)) for name in METHODS}  # requests name them
        self._watch = asyncio.ensure_future(self._watch_core(server))
        self._is_up.set()
        config = server.engine.vllm_config
        adapters = config.lora_config
        return make_facts(
            files=files,
            pid=os.getpid(),
            device=current_platform.device_type,
            dtype=str(config.model_config.dtype),
            max_model_len=config.model_config.max_model_len,
            tensor_parallel_size=config.parallel_config.tensor_parallel_size,
            adapter_rank=adapters.max_lora_rank if adapters is not None else 0,
            adapter_targets=adapters.target_modules if adapters is not None else None,
        )

    def _guard(self, method: Method) -> Method:
        async def call(*arguments: object) -> object:
            try:
                return await method(*arguments)
            except EngineDeadError as error:
                await self._fail(error)
                raise

        return call

    async def _fail(self, error: BaseException) -> None:
        """End this process; the caller's connection ends without a response."""
        if not self.failure.done():
            self.failure.set_exception(error)
        await asyncio.Event().wait()

    async def _watch_core(self, server: VLLMServer) -> None:
        # A call other than generate() that is waiting when the engine ends would wait forever.
        while not server.engine.errored:
            await asyncio.sleep(intervals.POLL_INTERVAL)
        await self._fail(server.engine.dead_error)


class ParentWatch:
    """Ends this process's group when the trainer has ended.

    Args:
        lifeline: end of a pipe whose other end the trainer keeps open.
        scratch: temporary folder that is then removed.
    """

    def __init__(self, lifeline: int, scratch: Path) -> None:
        self._lifeline, self._scratch, self._parent = lifeline, scratch, os.getppid()
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="parent-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # A child that the trainer has forked holds the pipe open too: waiting for the pipe's end does not suffice.
        poll = select.poll()  # select() takes no descriptor from 1,024 on
        poll.register(self._lifeline, select.POLLIN)
        while os.getppid() == self._parent:
            if poll.poll(1000 * intervals.HEARTBEAT_INTERVAL):
                break
        self._is_ending.set()
        end_own_group(self._scratch)

    def finish(self) -> None:
        """If the process group is being ended, wait until it has ended and the temporary folder is removed."""
        if self._is_ending.is_set():
            self._thread.join()


def main() -> None:
    """Serve the trainer; the command-line arguments are a temporary folder, a socket and a pipe."""
    folder, connection, lifeline = sys.argv[1:4]
    raise_open_files()
    gc.freeze()  # what is imported stays: vLLM collects garbage five times as it starts, each time 0.3 s over that
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
    watch = ParentWatch(int(lifeline), Path(folder))

    async def run() -> None:
        try:
            host = EngineHost()
            await serve_parent(int(connection), host.methods, check_alive=host.check_alive)
            await host.failure
        except Exception:  # into the log, which the trainer quotes
            traceback.print_exc()
        watch.finish()
        os._exit(1)  # vLLM's own shutdown takes seconds; the trainer ends remaining processes

    asyncio.run(run())


if __name__ == "__main__":
    main()
