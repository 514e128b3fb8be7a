"""The trainer's end of a vLLM engine in its own process."""

import atexit
import contextlib
import logging
import os
import pickle
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

import rlightning
from rlightning.errors import EngineError
from rlightning.rollout.engine import OnCompleted, Sampling
from rlightning.rollout.process_group import end_group
from rlightning.types import Completion, Prompt

log = logging.getLogger(__name__)

LOG_LINES = 25
"""Lines of the engine's log that an error ends with."""
EXIT_SECONDS = 1.0
"""How long an engine that has closed its socket may take to exit, for its exit status."""
LAUNCHER_VARIABLES = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|NODE_RANK|ROLE_NAME|MASTER_.*|TORCHELASTIC_.*)"
)
"""A launcher's rendezvous is the trainer's; vLLM would join it."""


class EngineDiedError(EngineError):
    """The engine's process is gone or answers no more; whatever it had finished before has been kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMConfig:
    """How to start an engine.

    Attributes:
        engine_args: of vLLM's AsyncEngineArgs.
        device: this rank's, as the trainer names it; the engine runs on it.
        visible_devices: what CUDA calls the devices that the engine runs on, one a tensor-parallel worker; none: those
            that this process sees.
        dtype: what weights are sent in.
        log_file: the engine's output, appended.
        can_sleep: whether it shares its device with an actor, so that sleeping pays.
        bucket_bytes: see :class:`~rlightning.rollout.weights.WeightBucket`.
        start_timeout: seconds until the engine must be up.
        hang_timeout: seconds without a sign of life, while something is asked of it, until it counts as dead.
        environment: further variables of its process.
    """

    engine_args: dict[str, Any]
    device: torch.device
    dtype: torch.dtype
    log_file: Path
    visible_devices: tuple[str, ...] = ()
    can_sleep: bool = False
    bucket_bytes: int = 2 << 30
    start_timeout: float = 600.0
    hang_timeout: float = 120.0
    environment: dict[str, str] = field(default_factory=dict)


class VLLMEngine:
    """A :class:`~rlightning.rollout.engine.RolloutEngine`: vLLM's AsyncLLM in a child process.

    :meth:`start` returns at once, so that the engine comes up while the actor is loaded; the first call waits for it.

    Raises:
        EngineDiedError: by every method, when the process died or hangs; :meth:`start` may then be called again.
        EngineError: by every method, when the engine refused to start, or refused a request.
    """

    def __init__(self, config: VLLMConfig) -> None:
        self.config = config
        self.weight_version: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._scratch: str | None = None
        self._is_ready = self._is_bucket_open = self._is_asleep = False
        self._missing: list[str] = []
        self._num_requests = 0

    def start(self) -> None:
        """Start the process; returns before the engine is up."""
        self.config.log_file.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = Pipe()
        _limit_sending(ours, self.config.hang_timeout)
        self._scratch = _make_scratch()
        command = [sys.executable, "-P", "-m", "rlightning.rollout.vllm_process", str(theirs.fileno()), self._scratch]
        with self.config.log_file.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C stays with the trainer, and one signal to the group ends all of it
                env=self._environment(self._scratch),
            )
        theirs.close()
        self._connection = ours
        self._is_ready = self._is_bucket_open = self._is_asleep = False
        self.weight_version = None
        self._send(0, "start", self.config.engine_args)
        atexit.register(self.close)

    def wait_until_ready(self) -> None:
        """Block until the engine is up."""
        if self._is_ready:
            return
        _, _, description = self._receive(self.config.start_timeout, "did not come up")
        self._is_ready = True
        log.info("The engine is up: %s.", description)

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        on_completed: OnCompleted | None = None,
    ) -> list[list[Completion]]:
        """See :meth:`RolloutEngine.generate`."""
        requests = [(prompt, stream) for stream, prompt in enumerate(prompts)]
        done: dict[int, list[Completion]] = {}
        for position, completions in self.generate_as_finished(requests, num_samples, sampling):
            done[position] = completions
            if on_completed is not None:
                on_completed(prompts[position], completions)
        return [done[i] for i in range(len(prompts))]

    def generate_as_finished(
        self, requests: Sequence[tuple[Prompt, int]], num_samples: int, sampling: Sampling
    ) -> Iterator[tuple[int, list[Completion]]]:
        """Yield each request's position with its completions, as they finish.

        Args:
            requests: prompts, each with the number of its random stream, which counts if ``sampling.seed`` is set.
            num_samples: completions a prompt.
            sampling: see :class:`Sampling`.
        """
        if self.weight_version is None:
            raise EngineError("The engine has not been sent any weights yet: its own are random. Load some.")
        version = self.weight_version
        calls = [
            ("generate", (prompt.token_ids, _vllm_sampling(sampling, num_samples, stream)))
            for prompt, stream in requests
        ]
        for position, outputs in self._call_many(calls):
            yield position, [_completion(output, version) for output in outputs]

    def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """See :meth:`RolloutEngine.score`."""
        return np.asarray(self._call("score", list(token_ids)), np.float32)

    def begin_loading(self, handles: Sequence[bytes]) -> None:
        """Take the weights' memory, if asleep, and get ready for :meth:`load_chunk`.

        Args:
            handles: of the bucket on each of the engine's devices (:meth:`WeightBucket.handle`).
        """
        self.weight_version = None
        if self._is_asleep:
            self._wake("weights")
        if not self._is_bucket_open:
            self._call("open_bucket", list(handles))
            self._is_bucket_open = True

    def load_chunk(self, index: int) -> None:
        """Load the weights that are in the bucket now, which must stay there until this returns."""
        self._missing = self._call("load_chunk", index)

    def finish_loading(self, weight_version: int) -> None:
        """Take the memory of the KV cache, if asleep, and serve with the weights that were loaded.

        Raises:
            EngineError: if a parameter of the engine's model was set by none of the chunks.
        """
        if self._missing:
            raise EngineError(
                f"{len(self._missing)} of the engine's parameters were not among the actor's weights and are still "
                f"random, such as {', '.join(self._missing[:3])}. The engine must be of the actor's architecture."
            )
        if self._is_asleep:
            self._wake("kv_cache")
            self._is_asleep = False
        if not self._call("reset_prefix_cache"):
            raise EngineError("The engine is still busy with requests of the weights before. Finish them first.")
        self.weight_version = weight_version

    def sleep(self) -> None:
        """See :meth:`RolloutEngine.sleep`."""
        if self.config.can_sleep and not self._is_asleep:
            self._call("sleep")
            self._is_asleep = True
            self.weight_version = None

    def _wake(self, tag: Literal["weights", "kv_cache"]) -> None:
        try:
            self._call("wake", tag)
        except EngineError as error:
            if isinstance(error, EngineDiedError) or "out of memory" not in str(error).lower():
                raise
            raise EngineError(
                f"The engine found no room for its {tag.replace('_', ' ')} when it woke: the trainer holds the "
                "device's memory. Add EmptyCacheAfterUpdate to trainer.callbacks (and OffloadDuringRollout, if that is "
                f"not enough), or lower rollout.gpu_memory_utilization. {error}"
            ) from error

    def close(self) -> None:
        """See :meth:`RolloutEngine.close`."""
        atexit.unregister(self.close)
        self._kill()

    def log_tail(self) -> str:
        """The last lines of the engine's log."""
        if not self.config.log_file.exists():
            return ""
        with self.config.log_file.open("rb") as file:
            file.seek(max(self.config.log_file.stat().st_size - 16384, 0))
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])

    def _call(self, method: str, *arguments: Any) -> Any:
        ((_, result),) = self._call_many([(method, arguments)])
        return result

    def _call_many(self, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> Iterator[tuple[int, Any]]:
        """Ask several things at once; yield each call's position and result as they come."""
        self.wait_until_ready()
        first = self._num_requests + 1
        self._num_requests += len(calls)
        for position, (method, arguments) in enumerate(calls):
            self._send(first + position, method, arguments)
        waiting = set(range(len(calls)))
        while waiting:
            request_id, status, result = self._receive(self.config.hang_timeout, "gave no sign of life")
            if status == "alive" or request_id < first:  # an answer to a call that was given up
                continue
            if status == "error":
                raise EngineError(f"The engine refused a request:\n{result}")
            waiting.discard(request_id - first)
            yield request_id - first, result

    def _send(self, *message: Any) -> None:
        if self._connection is None:
            raise EngineDiedError("The engine is not running.")
        try:
            self._connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
        except OSError as error:
            raise self._died("died") from error

    def _receive(self, timeout: float, complaint: str) -> tuple[Any, str, Any]:
        if self._connection is None:
            raise EngineDiedError("The engine is not running.")
        try:
            if not self._connection.poll(timeout):
                raise self._died(f"{complaint} for {timeout:.0f} s")
            message: tuple[Any, str, Any] = self._connection.recv()
            return message
        except (EOFError, OSError) as error:
            raise self._died("died") from error

    def _died(self, how: str) -> EngineError:
        """The error to raise, after whatever is left of the engine has been ended."""
        status = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._process.wait(EXIT_SECONDS if how == "died" else 0)
        # One that gives up by itself while it starts would do so again.
        has_refused = not self._is_ready and status is not None and status > 0
        self._kill()
        code = f" (exit status {status})" if status is not None else ""
        log_tail = f"The end of {self.config.log_file}:\n{self.log_tail()}"
        if has_refused:
            return EngineError(f"The engine could not start{code}. {log_tail}")
        return EngineDiedError(f"The engine {how}{code}. {log_tail}")

    def _kill(self) -> None:
        """End the process group, whatever state it is in: the one way for an engine to end, and a quick one."""
        if self._process is not None:
            end_group(self._process.pid)
            self._process.poll()  # so that no zombie stays
            self._process = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None
        self._is_ready = False
        self.weight_version = None

    def _environment(self, scratch: str) -> dict[str, str]:
        environment = {k: v for k, v in os.environ.items() if not LAUNCHER_VARIABLES.fullmatch(k)}
        package = str(Path(rlightning.__file__).parent.parent)
        paths = [package, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        environment |= {
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": "ignore:resource_tracker",  # it has to clean up: see process_group
            "VLLM_NO_USAGE_STATS": "1",
            # for vLLM's sockets and rendezvous files, which it leaves behind
            "VLLM_RPC_BASE_PATH": scratch,
            "TMPDIR": scratch,
        }
        # worth keeping, and by default in TMPDIR
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor-{os.getuid()}")
        if self.config.device.type == "cuda":
            if self.config.visible_devices:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.config.visible_devices)
        else:
            # Its log-probability code is compiled even in eager mode, 3 to 15 s that gain nothing on a CPU.
            environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
            # Or vLLM makes a process for its only worker, and 400 MB of shared memory to talk to it.
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        return environment | self.config.environment


def _limit_sending(connection: Connection, seconds: float) -> None:
    """Let writes to the connection fail after some time, which those to a stopped process never would."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


def _make_scratch() -> str:
    """A folder for an engine's sockets; a socket's whole path has 108 bytes, its name here up to 45."""
    folder = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="rlightning-engine-", dir=folder if len(folder) < 36 else "/tmp")


def _vllm_sampling(sampling: Sampling, num_samples: int, stream: int) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams."""
    # vLLM gives the i-th sample of a prompt seed + i: streams must lie num_samples apart.
    seed = None if sampling.seed is None else (sampling.seed + stream * num_samples) % (1 << 63)
    return {
        "n": num_samples,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "seed": seed,
    }


def _completion(output: dict[str, Any], weight_version: int) -> Completion:
    versions = np.broadcast_to(np.int32(weight_version), len(output["token_ids"]))  # one number, however many tokens
    reason: Literal["stop", "length"] = "length" if output["finish_reason"] == "length" else "stop"
    return Completion(output["text"], output["token_ids"], output["logprobs"], versions, reason)
