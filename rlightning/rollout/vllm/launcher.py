"""Starts an engine in a child process of the trainer, and finds out why it ended."""

import asyncio
import itertools
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

import rlightning
from rlightning import intervals
from rlightning.errors import AdapterRefusedError, EngineDiedError, EngineError, EngineStartError
from rlightning.foreign_text import cut_line
from rlightning.processes.managed_process import ManagedProcess
from rlightning.processes.scratch import ScratchFolder
from rlightning.rollout.engine_config import EngineArguments, EngineConfig
from rlightning.rollout.engine_connection import NAME, EngineConnection
from rlightning.rollout.engine_facts import EngineFacts
from rlightning.rollout.host_check import check_host, describe_host
from rlightning.rpc import Peer

log = logging.getLogger(__name__)

LOG_PREFIX = re.compile(r"^\(\w+ pid=\d+\) [A-Z]+ .*?\] ?")
"""Prefix of a log line of vLLM's child processes."""
CAUSE = re.compile(r"\b\w+(Error|Exception): .+|^[\w.]*(Error|Exception)$|Fatal Python error: .+|(?<=what\(\):  ).+")
"""Pattern of errors in a log: Python's exceptions, fatal signals, and exceptions in C++."""
FATAL = "Fatal Python error"
"""Beginning of the line that Python writes when a signal ends it."""
PLACE = re.compile(r'File "(?:.*/)?(.+)", (line \d+), in ')
"""Pattern of a traceback's frame; the next line quotes its code."""
FAULTS = (signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV)
"""Signals of crashes."""
NO_CAUSE = "See root cause above"
"""Phrase in vLLM's last error if its cause is an earlier error in the log."""
MERGED = "If vLLM takes no adapter of such layers, use rollout.send_adapter: false, which merges base and adapter. "
"""The alternative if an engine with an adapter does not start for a reason that names LoRA."""
LAUNCHER_VARIABLES = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|NODE_RANK|ROLE_NAME|MASTER_.*|TORCHELASTIC_.*)"
)
"""Variables of a launcher such as torchrun, which are removed: vLLM would join the trainer's rendezvous."""


class EngineProcess(EngineConnection):
    """Starts an engine in a new process, and calls its methods. The constructor returns before the engine is up.

    Raises:
        EngineStartError: the host lacks resources for any engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        check_host(len(config.worker_devices))
        self._scratch = ScratchFolder("engine")
        config = self._with_log(config)
        super().__init__(config)
        self._process = ManagedProcess(
            [sys.executable, "-P", "-m", "rlightning.rollout.vllm.process", str(self._scratch.path)],
            name=NAME,
            log_file=config.log_file,
            environment=engine_environment(config, str(self._scratch.path)),
        )
        self._begin()

    @property
    def pid(self) -> int:
        """The id of the engine's process, which is also the id of its process group."""
        return self._process.pid

    async def _connect(self) -> Peer:
        return await Peer.open(self._process.connection, {}, name=NAME, heartbeat_timeout=self.config.start_timeout)

    async def _start(self, peer: Peer) -> EngineFacts:
        facts: EngineFacts = await peer.call("start", self._find_model(self.config.engine_args))
        return facts

    def _find_model(self, engine_args: EngineArguments) -> EngineArguments:
        """Return the engine's arguments; if the model's folder is gone, with a folder of its copied files instead."""
        model = Path(engine_args["model"])
        if not self.config.copies or (model / "config.json").is_file():
            return engine_args
        log.warning("The model's folder '%s' is gone. The engine starts from what was read of it before.", model)
        copy = self._scratch.path / "model"
        copy.mkdir()
        for name, content in self.config.copies.items():
            (copy / name).write_bytes(content)
        return engine_args | {"model": str(copy)}

    def _with_log(self, config: EngineConfig) -> EngineConfig:
        """Return the configuration with a writable log file, in the scratch folder if the configured one is not."""
        try:
            config.log_file.parent.mkdir(parents=True, exist_ok=True)
            config.log_file.open("ab").close()
        except OSError as error:
            log.warning("The engine's log %s cannot be written (%s). It is not kept.", config.log_file, error.strerror)
            return replace(config, log_file=self._scratch.path / "engine.log")
        return config

    async def _end(self, how: str) -> EngineError:
        if self._is_closing:
            if self._peer is None:
                self._process.connection.close()
            return EngineDiedError("The engine has been closed.")
        loop = asyncio.get_running_loop()
        try:
            # A process that closed its connection exits by itself; one that rejects its arguments continues to serve.
            is_leaving = how == "died" and (self._peer is None or self._peer.closed.done())
            grace = intervals.ENGINE_EXIT_GRACE if is_leaving else 0.0
            code = await loop.run_in_executor(None, self._process.wait, grace)
            await loop.run_in_executor(None, self._process.terminate)
            return self._explain(how, code)
        finally:
            self._scratch.remove()

    def _explain(self, how: str, code: int | None) -> EngineError:
        """Return the error of an engine that has ended: how, with which exit code, and the cause in its log."""
        if self._is_closing:
            return EngineDiedError("The engine has been closed.")
        end = f" ({self._process.describe_end()})" if code is not None else ""
        place = f"(Its log is {self.config.log_file})"
        log_tail = f"The end of {self.config.log_file}:\n{self._process.log_tail()}"
        # An engine that exits by itself while starting would do so again.
        if not self.ready.done() and code is not None and (code > 0 or -code in FAULTS):
            cause = self._find_cause()
            if cause:
                if self.config.has_adapter and "LoRA" in cause:
                    return AdapterRefusedError(f"The engine could not start: {cause} {MERGED}{place}", cause)
                return EngineStartError(f"The engine could not start: {cause} {place}")
            return EngineError(f"The engine could not start{end}. {place}", log_tail)
        return EngineDiedError(f"The engine {how}{end}. {place}", log_tail)

    def _terminate(self) -> None:
        self._process.terminate()
        self._scratch.remove()

    def _find_cause(self) -> str:
        """Return why the engine did not start, from its log, or else from the host's resources; "" if unknown."""
        cause = find_cause(self._process.log_lines()) or ""
        return cause if cause and not cause.startswith(FATAL) else f"{cause} {describe_host()}".strip()


def find_cause(lines: Sequence[str]) -> str | None:
    """Return the root cause of an error in a log, as one line: the last error that did not follow from another; None
    without errors.

    For an error without a message, such as a failed assertion, the line contains its file, line number and code.
    """
    cause, place = None, ""
    for before, line in itertools.pairwise(LOG_PREFIX.sub("", line) for line in ("", *lines)):
        if call := PLACE.search(before):
            place = f" in {call[1]}, {call[2]}: {line.strip()}"
        if (error := CAUSE.search(line)) and NO_CAUSE not in line:
            cause = error[0] if ": " in error[0] else error[0] + place
    return None if cause is None else cut_line(cause)


def engine_environment(config: EngineConfig, scratch: str) -> dict[str, str]:
    """Return the environment variables of an engine's process; ``scratch`` is the engine's temporary folder."""
    environment = {k: v for k, v in os.environ.items() if not LAUNCHER_VARIABLES.fullmatch(k)}
    package = str(Path(rlightning.__file__).parent.parent)
    paths = [package, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # its log reports a signal that ends it, such as for a full /dev/shm
        "PYTHONWARNINGS": "ignore:resource_tracker",  # trackers clean up after a killed engine: see process_group
        "VLLM_NO_USAGE_STATS": "1",
        # vLLM does not remove its sockets and rendezvous files.
        "VLLM_RPC_BASE_PATH": scratch,
        "TMPDIR": scratch,
    }
    # The cache of compiled code outlives the engine; by default it would be in TMPDIR.
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor-{os.getuid()}")
    # torch computes little on the host of an engine with a GPU.
    environment.setdefault("OMP_NUM_THREADS", "1" if config.device.type == "cuda" else str(torch.get_num_threads()))
    if config.device.type == "cuda":
        if config.visible_devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(config.visible_devices)
    else:
        # vLLM compiles its log-probability code even in eager mode: 3 to 15 s without a gain on a CPU.
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
        # Otherwise vLLM starts a process for its only worker, with 400 MB of shared memory for messages.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return environment | config.environment
