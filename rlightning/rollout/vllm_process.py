"""The engine process: ``python -m rlightning.rollout.vllm_process FD`` serves one trainer over the socket FD.

Messages are pickled tuples. The trainer sends ``(request_id, method, arguments)``; the process answers ``(request_id,
"ok", result)`` or ``(request_id, "error", traceback)``, in any order, and ``(None, "alive", None)`` every few seconds
while something is asked of it and the workers answer. It ends, with all that it started, when the trainer's end of the
socket closes or the trainer is gone, however that came about.
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

import numpy as np
from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from rlightning.rollout.detokenize import can_decode, decode_completions
from rlightning.rollout.process_group import end_own_group

RESET_TRIES = 5
HEARTBEAT_SECONDS = 2.0
PARENT_SECONDS = 2.0
"""Between two looks whether the trainer is there."""


class VLLMServer:
    """One AsyncLLM, and the methods that a trainer may call on it."""

    def __init__(self, engine: AsyncLLM) -> None:
        self.engine = engine
        self._num_requests = 0

    async def generate(self, token_ids: list[int], sampling: dict[str, Any]) -> list[dict[str, Any]]:
        """Sample completions of one prompt: for each, its text, tokens, log-probabilities and reason to finish."""
        tokenizer = self.engine.get_tokenizer()
        decodes_itself = bool(sampling.get("stop")) or not can_decode(tokenizer)
        params = SamplingParams(
            **sampling,
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            detokenize=decodes_itself,
        )
        completions = (await self._run(token_ids, params)).outputs
        if decodes_itself:
            texts = [one.text for one in completions]
        else:
            sampled, reasons = [one.token_ids for one in completions], [one.finish_reason for one in completions]
            texts = decode_completions(tokenizer, token_ids, sampled, reasons)
        return [
            {
                "text": text,
                "token_ids": np.asarray(one.token_ids, np.int64),
                # logprobs=0: one entry a position, the sampled token's
                "logprobs": np.asarray(one.logprobs.logprobs, np.float32),
                "finish_reason": one.finish_reason,
            }
            for text, one in zip(texts, completions, strict=True)
        ]

    async def score(self, token_ids: list[int]) -> list[float]:
        """Log-probability of each token given those before it; 0 for the first."""
        params = SamplingParams(
            max_tokens=1, temperature=0, prompt_logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False
        )
        output = await self._run(token_ids, params)
        entries = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return [0.0, *(entry[token].logprob for token, entry in entries)]

    async def open_bucket(self, handles: list[bytes]) -> None:
        """Let each worker open the memory that weights come in on its device."""
        await self.engine.collective_rpc("rl_open_bucket", args=(handles,))

    async def load_chunk(self, index: int) -> list[str]:
        """Load what is in the bucket; after the last chunk, the parameters that were not set."""
        missing = await self.engine.collective_rpc("rl_load_chunk", args=(index,))
        return sorted({name for names in missing for name in names})

    async def reset_prefix_cache(self) -> bool:
        """Forget the keys and values of prompts: they belong to the weights that computed them.

        Returns:
            False if requests still hold some.
        """
        for _ in range(RESET_TRIES):
            if await self.engine.reset_prefix_cache():
                return True
            await asyncio.sleep(0.02)  # a step that was scheduled ahead may still run
        return False

    async def sleep(self) -> None:
        """Free the weights' and the KV cache's memory."""
        await self.engine.sleep(level=2)

    async def wake(self, tag: str) -> None:
        """Take memory again, for "weights" or for "kv_cache"."""
        await self.engine.wake_up(tags=[tag])

    async def ping(self) -> None:
        """Return once every worker has answered."""
        await self.engine.collective_rpc("rl_ping")

    async def _run(self, token_ids: list[int], params: SamplingParams) -> Any:
        self._num_requests += 1
        prompt: Any = {"prompt_token_ids": token_ids}
        # FINAL_ONLY: there is one output.
        (output,) = [output async for output in self.engine.generate(prompt, params, str(self._num_requests))]
        return output


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
                if self.connection.poll(PARENT_SECONDS):
                    loop.call_soon_threadsafe(inbox.put_nowait, self.connection.recv())
        self.is_ending.set()
        end_own_group(self.scratch)

    def send(self, *message: Any) -> None:
        """Answer the trainer."""
        with self.lock:
            self.connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


async def serve(mailbox: Mailbox, inbox: "asyncio.Queue[Any]") -> None:
    """Start the engine that the first message describes, then answer requests until it fails."""
    _, _, engine_args = await inbox.get()
    server = VLLMServer(AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args)))
    config = server.engine.vllm_config
    mailbox.send(
        None, "ready", {"dtype": str(config.model_config.dtype), "max_model_len": config.model_config.max_model_len}
    )
    pending: set[asyncio.Task[None]] = set()
    failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def answer(request_id: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            mailbox.send(request_id, "ok", await getattr(server, method)(*arguments))
        except EngineDeadError as error:
            if not failure.done():
                failure.set_exception(error)
        except Exception:  # the trainer's process is where it is raised again
            mailbox.send(request_id, "error", traceback.format_exc())

    async def heartbeat() -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            if pending:
                await server.ping()
                mailbox.send(None, "alive", None)

    async def requests() -> None:
        while True:
            task = asyncio.create_task(answer(*await inbox.get()))
            pending.add(task)
            task.add_done_callback(pending.discard)

    await asyncio.gather(heartbeat(), requests(), failure)


def main() -> None:
    """Serve the trainer at the other end of file descriptor ``sys.argv[1]``; ``sys.argv[2]`` is a scratch folder."""
    mailbox = Mailbox(Connection(int(sys.argv[1])), Path(sys.argv[2]))

    async def run() -> None:
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        thread = threading.Thread(target=mailbox.listen, args=(asyncio.get_running_loop(), inbox), daemon=True)
        thread.start()
        try:
            await serve(mailbox, inbox)
        except Exception:  # into the log, which the trainer quotes
            traceback.print_exc()
        if mailbox.is_ending.is_set():
            thread.join()  # it has killed the engine's core, and has to remove the scratch folder before it ends this
        os._exit(1)  # vLLM's own way out takes seconds; the trainer ends what it leaves

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    asyncio.run(run())


if __name__ == "__main__":
    main()
