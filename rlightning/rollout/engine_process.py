"""An engine in a child process of the trainer's."""

import contextlib
import itertools
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import rlightning
from rlightning import intervals
from rlightning.errors import EngineError, EngineStartError
from rlightning.foreign_text import cut, cut_line
from rlightning.processes.process_group import end_group
from rlightning.rollout.engine_link import EngineDiedError, EngineLink, VLLMConfig, limit_waiting
from rlightning.rollout.host_check import check_host, describe_host
from rlightning.scratch import ScratchFolder

log = logging.getLogger(__name__)

LOG_LINES = 25
"""Lines of the engine's log that an error ends with."""
LOG_BYTES = 1 << 16
"""Of the end of the log that lines are looked for in."""
LOG_PREFIX = re.compile(r"^\(\w+ pid=\d+\) [A-Z]+ .*?\] ?")
"""Of a line that vLLM logs in another process than its own."""
CAUSE = re.compile(r"\b\w+(Error|Exception): .+|^[\w.]*(Error|Exception)$|Fatal Python error: .+|(?<=what\(\):  ).+")
"""Of Python's exceptions, of signals that end Python, and of exceptions in C++."""
FATAL = "Fatal Python error"
"""What Python writes before a signal ends it."""
PLACE = re.compile(r'File "(?:.*/)?(.+)", (line \d+), in ')
"""Of a call in a traceback; the next line quotes its code."""
FAULTS = (signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV)
"""Signals by which a process ends itself."""
NO_CAUSE = "See root cause above"
"""In vLLM's last error, where it has another one before."""
LAUNCHER_VARIABLES = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|NODE_RANK|ROLE_NAME|MASTER_.*|TORCHELASTIC_.*)"
)
"""A launcher's rendezvous is the trainer's; vLLM would join it."""


class EngineProcess(EngineLink):
    """Starts ``rlightning.rollout.vllm.process`` and talks to it. Returns before the engine is up."""

    def __init__(self, config: VLLMConfig, on_alive: Callable[[], None] = lambda: None) -> None:
        super().__init__(config, on_alive)
        self._ours, theirs = Pipe()
        limit_waiting(self._ours, config.hang_timeout)
        check_host(config.engine_args)
        self._scratch = ScratchFolder("engine")
        self.config = config = self._with_log(config)
        command = [sys.executable, "-P", "-m", "rlightning.rollout.vllm.process", str(theirs.fileno())]
        command.append(str(self._scratch.path))
        with config.log_file.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C stays with the trainer, and one signal to the group ends all of it
                env=engine_environment(config, str(self._scratch.path)),
            )
        theirs.close()
        self._send((0, "start", self._find_model(config.engine_args)))
        self._begin()

    @property
    def pid(self) -> int:
        """Of the process, which is that of its group too."""
        return self._process.pid

    def _find_model(self, engine_args: dict[str, Any]) -> dict[str, Any]:
        """The engine's arguments; where the model's folder is gone, with a copy of what was read of it before."""
        model = Path(engine_args["model"])
        if not self.config.copies or (model / "config.json").is_file():
            return engine_args
        log.warning("The model's folder '%s' is gone. The engine starts from what was read of it before.", model)
        copy = self._scratch.path / "model"
        copy.mkdir()
        for name, content in self.config.copies.items():
            (copy / name).write_bytes(content)
        return engine_args | {"model": str(copy)}

    def log_tail(self) -> str:
        """The last lines of the engine's log."""
        return cut("\n".join(self._log_lines()[-LOG_LINES:]))

    def _log_lines(self) -> list[str]:
        if not self.config.log_file.exists():
            return []
        with self.config.log_file.open("rb") as file:
            file.seek(max(self.config.log_file.stat().st_size - LOG_BYTES, 0))
            return file.read().decode(errors="replace").splitlines()

    def _open(self) -> Connection:
        return self._ours

    def _with_log(self, config: VLLMConfig) -> VLLMConfig:
        """The configuration with a log file that can be written: one in the scratch folder where its own cannot."""
        try:
            config.log_file.parent.mkdir(parents=True, exist_ok=True)
            config.log_file.open("ab").close()
        except OSError as error:
            log.warning("The engine's log %s cannot be written (%s). It is not kept.", config.log_file, error.strerror)
            return replace(config, log_file=self._scratch.path / "engine.log")
        return config

    def _end(self, how: str) -> EngineError:
        try:
            return self._end_process(how)
        finally:
            self._scratch.remove()

    def _end_process(self, how: str) -> EngineError:
        status = None
        if not self._is_closing:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._process.wait(intervals.ENGINE_EXIT_GRACE if how == "died" else 0)
        end_group(self._process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # So that no zombie stays: until its last thread is gone, a process that is killed cannot be waited for.
            self._process.wait(intervals.ENGINE_EXIT_GRACE)
        if self._is_closing:
            return EngineDiedError("The engine has been closed.")
        code = f" (exit status {status})" if status is not None else ""
        place = f"(Its log is {self.config.log_file})"
        log_tail = f"The end of {self.config.log_file}:\n{self.log_tail()}"
        # One that gives up by itself while it starts would do so again.
        if not self.ready.done() and status is not None and (status > 0 or -status in FAULTS):
            cause = self._find_cause()
            if cause:
                return EngineStartError(f"The engine could not start: {cause} {place}")
            return EngineError(f"The engine could not start{code}. {place}", log_tail)
        return EngineDiedError(f"The engine {how}{code}. {place}", log_tail)

    def _find_cause(self) -> str:
        """Why the engine did not come up, by its log and, where no exception tells, by the host; "" if neither does."""
        cause = find_cause(self._log_lines()) or ""
        return cause if cause and not cause.startswith(FATAL) else f"{cause} {describe_host()}".strip()


def find_cause(lines: Sequence[str]) -> str | None:
    """Return a log's last error that is none of its consequences, in a line.

    An error without a message, such as a failed assertion, is followed by its place and the code there.
    """
    cause, place = None, ""
    for before, line in itertools.pairwise(LOG_PREFIX.sub("", line) for line in ("", *lines)):
        if call := PLACE.search(before):
            place = f" in {call[1]}, {call[2]}: {line.strip()}"
        if (error := CAUSE.search(line)) and NO_CAUSE not in line:
            cause = error[0] if ": " in error[0] else error[0] + place
    return None if cause is None else cut_line(cause)


def engine_environment(config: VLLMConfig, scratch: str) -> dict[str, str]:
    """Variables of the engine's process; ``scratch`` is a folder of its own."""
    environment = {k: v for k, v in os.environ.items() if not LAUNCHER_VARIABLES.fullmatch(k)}
    package = str(Path(rlightning.__file__).parent.parent)
    paths = [package, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a signal that ends it, as by a full /dev/shm, is said in its log
        "PYTHONWARNINGS": "ignore:resource_tracker",  # it has to clean up: see process_group
        "VLLM_NO_USAGE_STATS": "1",
        # for vLLM's sockets and rendezvous files, which it leaves behind
        "VLLM_RPC_BASE_PATH": scratch,
        "TMPDIR": scratch,
    }
    # worth keeping, and by default in TMPDIR
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor-{os.getuid()}")
    # What torch does on the host in an engine beside a GPU is small.
    environment.setdefault("OMP_NUM_THREADS", "1" if config.device.type == "cuda" else str(torch.get_num_threads()))
    if config.device.type == "cuda":
        if config.visible_devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(config.visible_devices)
    else:
        # Its log-probability code is compiled even in eager mode, 3 to 15 s that gain nothing on a CPU.
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
        # Or vLLM makes a process for its only worker, and 400 MB of shared memory to talk to it.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return environment | config.environment
