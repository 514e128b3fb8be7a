"""The fork server's own process, and what its forks do to be as fresh interpreters. fork_server.py asks for them."""

import atexit
import contextlib
import faulthandler
import fcntl
import functools
import gc
import importlib
import io
import os
import random
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import fork_server
from fork_server import ForkServer, Program, Request, install, prctl

PRELOADED = (
    "rlightning.cli.hidden_packages",
    "rlightning.cli.lightning_cli",
    "rlightning.controller.ray_controller",
    "rlightning.models.sharded_policy",
    "rlightning.rollout.vllm.process",
    "rlightning.rollout.vllm.weight_receiver",
    "rlightning.rollout.vllm.scheduler",
    "transformers.models.qwen3.modeling_qwen3",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.worker.cpu_worker",
    "torch.distributed.run",
)
MAX_BYTES = 1 << 17
"""Of a request, most of it the environment; a socket's buffer holds 208 KiB."""
MAX_FILES = 64
PR_SET_PDEATHSIG = 1
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
"""Signals whose handlers of the preloaded libraries a fork does not keep, as a new interpreter would not have them."""
_set_by_imports: dict[str, str] = {}
"""Variables of the environment that the preloaded modules have set."""


def main() -> None:
    """Serve the socket whose number is the last argument, until its other end closes."""
    connection, listener = socket.socket(fileno=int(sys.argv[-1])), listen()
    _die_with(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _name("fork server")  # while the arguments' memory is as the system laid it
    before = dict(os.environ)
    gc.disable()  # while all that is made stays: a second less
    sys.modules["ray"] = None  # type: ignore[assignment]  # it reads its variables when it is loaded; vLLM does without
    for name in PRELOADED:
        importlib.import_module(name)
    replace_kernels()
    deny_ray()
    parse_config()
    del sys.modules["ray"]
    _set_by_imports.update({k: v for k, v in os.environ.items() if k not in before})
    sys.path.remove(str(Path(__file__).parent))
    install()
    gc.collect()
    gc.enable()
    gc.freeze()  # or each fork's collector would write to, and so copy, all that it has imported
    end(serve(connection, listener))


def replace_kernels() -> None:
    """Do once what each of vLLM's workers on a CPU begins with: look through all modules for kernels to replace."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.register_triton_kernel_overrides()
    CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)  # type: ignore[method-assign,assignment]


def deny_ray() -> None:
    """Have engines ask whether an actor of Ray runs them without importing Ray, in 0.2 CPU seconds."""
    from vllm.ray import lazy_utils

    for name in ("is_ray_initialized", "is_in_ray_actor"):
        asked: Callable[[], bool] = getattr(lazy_utils, name)
        answer = functools.partial(_ask_if_imported, asked)
        for module in [module for path, module in sys.modules.items() if path.startswith("vllm.")]:
            if vars(module).get(name) is asked:
                setattr(module, name, answer)


def _ask_if_imported(asked: Callable[[], bool]) -> bool:
    """Whether it is so; what has not been imported has not been begun to use."""
    return "ray" in sys.modules and asked()


CONFIG = """\
model: {class_path: GRPO, init_args: {model: model, rewards: [rlightning.rewards.exact_match], prompts_per_step: 1}}
data: {train: rows.jsonl}
rollout: {max_new_tokens: 1}
trainer: {callbacks: [{class_path: ModelCheckpoint}]}
"""


def parse_config() -> None:
    """Parse a configuration: what is found in the classes' sources is kept; it takes each run half a CPU second."""
    from rlightning.cli.config_precheck import check_early
    from rlightning.cli.lightning_cli import RLCLI

    filters = list(warnings.filters)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(CONFIG)
        file.flush()
        options = ["--config", file.name]
        check_early("fit", options)
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
            RLCLI(args=["fit", *options, "--print_config"])
    warnings.filters[:] = filters  # type: ignore[index]


def end(program: Program) -> NoReturn:
    """Run the program, and end this process as an interpreter ends, but without freeing object by object (3 s)."""
    code: Any = 0
    for number in CRASHES:  # of a library that describes a crash for seconds before the process ends
        signal.signal(number, signal.SIG_DFL)
    try:
        program.run()
    except SystemExit as stop:
        code = stop.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    gc.freeze()  # an interpreter keeps a script's globals until it goes; here they may be garbage before
    if not isinstance(code, int | None):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


def listen() -> socket.socket:
    """A socket under this process's number, for stand-ins."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0fork-server-{os.getpid()}")
    listener.listen(64)
    return listener


def serve(connection: socket.socket, listener: socket.socket) -> Program:
    """Fork for each request. Returns in the forks only, each a process as its request describes."""
    while True:
        ready, _, _ = select.select([connection, listener], [], [])
        for one in ready:
            asking = connection if one is connection else listener.accept()[0]
            try:
                text, files, _, _ = socket.recv_fds(asking, MAX_BYTES, MAX_FILES)
            except ConnectionError:
                text, files = b"", []
            if text:
                pid = _fork_orphan()
                if not pid:
                    for socket_ in {connection, listener, asking}:
                        socket_.close()
                    return become(Request.parse(text), files)
                with contextlib.suppress(ConnectionError):
                    asking.send(str(pid).encode())
            elif asking is connection:
                os._exit(0)
            if asking is not connection:
                asking.close()
            for number in files:
                os.close(number)


def _fork_orphan() -> int:
    """Fork twice: the process between ends at once. 0 in the fork, the fork's id in this process."""
    reader, writer = os.pipe()
    between = os.fork()
    if not between:
        pid = os.fork()
        if pid:
            os.write(writer, str(pid).encode())
            os._exit(0)
        os.close(reader)
        os.close(writer)
        return 0
    os.waitpid(between, 0)
    pid = int(os.read(reader, 32))
    os.close(reader)
    os.close(writer)
    return pid


def become(request: Request, files: list[int]) -> Program:
    """Make this fork the process of the request, with a fork server of its own."""
    while request.parent and os.getppid() != request.parent:
        if not Path(f"/proc/{request.parent}").exists():
            os._exit(0)  # it was killed, and has no use for its child
        time.sleep(0.001)  # the fork between ends just now
    if request.starts_session:
        os.setsid()
    elif request.group >= 0:
        os.setpgid(0, request.group)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner = os.getpid()
    server = os.fork()
    if not server:
        _die_with(owner)
        ours.close()
        for number in files:
            os.close(number)
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        os.close(null)
        _name(f"fork server of {owner}")
        return serve(theirs, listen())
    theirs.close()
    above = max(request.targets) + 1
    fork_server._server = ForkServer(_moved(ours, above), server, request.environment)
    held = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, above) for number in files[len(request.targets) :]]
    for number in files[len(request.targets) :]:
        os.close(number)
    del files[len(request.targets) :]
    _place(files, request.targets, above)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(_set_by_imports | request.environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN if request.ignores_interrupt else signal.default_int_handler)
    for number in held:
        threading.Thread(target=_end_with, args=(number,), daemon=True).start()
    program = request.program
    _set_up_interpreter(program, request.environment)
    _name(" ".join([sys.executable, *(["-m"] if program.is_module else []), *program.arguments]))
    return program


def _set_up_interpreter(program: Program, environment: dict[str, str]) -> None:
    """What an interpreter, torch and Hugging Face's libraries take from the environment while they start."""
    sys.path[:0] = [entry or os.getcwd() for entry in program.search_path]
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    tempfile.tempdir = None
    for stream, flushes_lines in ((sys.stdout, program.is_unbuffered or os.isatty(1)), (sys.stderr, True)):
        stream.reconfigure(line_buffering=flushes_lines)  # type: ignore[union-attr]
    if filters := environment.get("PYTHONWARNINGS"):
        sys.warnoptions[:] = filters.split(",")
        warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]
    if environment.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    import numpy
    import torch
    import torch._dynamo.config

    random.seed()  # each by the system's own random numbers: else all forks go on with those of their server
    numpy.random.seed()
    torch.default_generator.seed()
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
    torch._dynamo.config.disable = environment.get("TORCH_COMPILE_DISABLE") == "1"
    import huggingface_hub.constants

    huggingface_hub.constants.HF_HUB_OFFLINE = environment.get("HF_HUB_OFFLINE", "0") == "1"


def _moved(connection: socket.socket, above: int) -> socket.socket:
    """The same socket under a number that no target has."""
    number = fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, above)
    connection.close()
    return socket.socket(fileno=number)


def _place(files: list[int], targets: list[int], above: int) -> None:
    """Give each file descriptor its target's number."""
    aside = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, above) for number in files]
    for number in files:
        os.close(number)
    for number, target in zip(aside, targets, strict=True):
        os.dup2(number, target, inheritable=True)
        os.close(number)


def _die_with(parent: int) -> None:
    """End this process when its parent ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _end_with(pipe: int) -> None:
    """End this process when no process holds the pipe's other end."""
    os.read(pipe, 1)
    os._exit(1)


def _name(command: str) -> None:
    """Show this command line where processes are listed."""
    import setproctitle

    setproctitle.setproctitle(command)
