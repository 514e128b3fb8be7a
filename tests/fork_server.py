"""Start Python programs as forks of a process that has imported the heavy modules already.

A program that imports torch, transformers and vLLM spends 6 to 9 CPU seconds before its first line; tests start
hundreds. While :func:`install` is in force, ``subprocess.Popen`` starts ``python script``, ``python -m module`` and the
console scripts of this environment in some milliseconds instead: a fork server with the modules of ``PRELOADED`` forks,
and the fork sets up what a fresh interpreter would have: arguments, environment, folder, file descriptors, session,
``sys.path``, ``__main__``. The new process is the caller's child (it can be waited for and killed, and dies with its
parent where it asks for that), and has a fork server of its own, so that what it starts is forked, too.

Programs given by ``-c``, and those with ``START_BY_EXEC`` in their environment, start as always; but for the workers of
pytest-xdist, so that the heavy modules are imported once for all of them, and what multiprocessing spawns. Ray's
raylet, which is no Python program, starts its workers by :data:`STAND_IN`, a small script in place of the interpreter:
it has the fork server of the raylet's parent start the worker, and ends with it.

    caller -- request, file descriptors --> fork server -- fork --> fork -- fork --> program and its own fork server
       ^------------ the program's parent, once the fork between has ended -----------'
"""

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import hashlib
import importlib
import json
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

START_BY_EXEC = "START_BY_EXEC"
"""A variable of a program's environment: set, it starts in an interpreter of its own."""
PRELOADED = (
    "rlightning.cli.lightning_cli",
    "rlightning.rollout.vllm.process",
    "rlightning.rollout.vllm.weight_receiver",
    "rlightning.rollout.vllm.scheduler",
    "transformers.models.qwen3.modeling_qwen3",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.worker.cpu_worker",
    "torch.distributed.run",
)
SCRIPTS = ("rlightning", "torchrun")
XDIST_WORKER = ["-c", "import sys;exec(eval(sys.stdin.readline()))"]
"""How execnet starts a worker."""
SPAWNED = "--multiprocessing-fork"
"""The last argument of what multiprocessing spawns, by ``-c``."""
MAX_BYTES = 1 << 17
"""Of a request, most of it the environment; a socket's buffer holds 208 KiB."""
MAX_FILES = 64
SERVER_VARIABLE = "FORK_SERVER"
"""Names the process whose fork server the stand-in asks."""
STAND_IN = """\
#!{python} -IS
import json, os, select, signal, socket, sys

connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect("\\0fork-server-" + os.environ["{variable}"])
is_open = lambda number: os.path.exists(f"/proc/self/fd/{{number}}")
files = [number for number in range(64) if is_open(number) and os.get_inheritable(number)]
held, alive = os.pipe()
message = {{"command": sys.argv, "cwd": os.getcwd(), "environment": dict(os.environ), "targets": files}}
socket.send_fds(connection, [json.dumps(message).encode()], [*files, held])
os.close(held)  # the program holds it, and ends when no process holds the other end
program = os.pidfd_open(int(connection.recv(32)))
signal.signal(signal.SIGTERM, lambda *_: signal.pidfd_send_signal(program, signal.SIGTERM))
while not select.select([program], [], [], None)[0]:
    pass
"""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
"""Signals whose handlers of the preloaded libraries a fork does not keep, as a new interpreter would not have them."""


@dataclass(frozen=True)
class Program:
    """What a fork is to run, in the words of a command line.

    Attributes:
        arguments: ``sys.argv`` to be, the module's or script's name first; or ``-c`` and the code of ``XDIST_WORKER``
            or of a spawned process.
        is_module: whether that is a module's name.
        search_path: put before the installed packages in ``sys.path``.
        is_unbuffered: whether each line is written at once.
    """

    arguments: list[str]
    is_module: bool
    search_path: list[str]
    is_unbuffered: bool = False

    def run(self) -> None:
        """Run it as ``__main__``; it ends as the interpreter would end."""
        if self.arguments[0] == "-c":
            text = self.arguments.pop(1)
            sys.argv[:] = self.arguments
            exec(text, vars(sys.modules["__main__"]))
            return
        sys.argv[:] = self.arguments
        if self.is_module:
            runpy.run_module(self.arguments[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(self.arguments[0], run_name="__main__")


@dataclass(frozen=True)
class Request:
    """A program, and the process that it is to run in.

    Attributes:
        targets: the numbers that the file descriptors sent along have in it; others are closed. One more is a pipe's
            end, if a stand-in asks: the program ends when the pipe's other end is closed.
        parent: the process that asks; None if a stand-in does.
    """

    program: Program
    cwd: str
    environment: dict[str, str]
    targets: list[int]
    parent: int | None = None
    starts_session: bool = False
    group: int = -1
    ignores_interrupt: bool = False

    @classmethod
    def parse(cls, text: bytes) -> "Request":
        """Read what :meth:`encode` has written, or a stand-in."""
        fields = json.loads(text)
        if "command" not in fields:
            return cls(**fields | {"program": Program(**fields["program"])})
        command = [sys.executable, *fields.pop("command")[1:]]
        command, variables = skip_setup(command)
        fields["environment"] |= variables
        program = parse_command(command, fields["environment"])
        assert program is not None, command
        return cls(program=program, **fields)

    def encode(self) -> bytes:
        """JSON; a name that is not UTF-8 keeps its bytes."""
        return json.dumps(asdict(self)).encode()


def parse_command(command: Sequence[str], environment: dict[str, str]) -> Program | None:
    """What a command line runs, if a fork server can; None for anything but a script or module without rare options."""
    folder = Path(sys.executable).parent
    executable = Path(command[0])
    own_path = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    is_unbuffered = bool(environment.get("PYTHONUNBUFFERED"))
    is_safe = bool(environment.get("PYTHONSAFEPATH"))
    if executable.parent == folder and executable.name in SCRIPTS:
        return Program(list(command), False, [str(folder), *own_path], is_unbuffered)
    if str(executable) != sys.executable:
        return None
    rest = list(command[1:])
    while rest and rest[0] in ("-u", "-P", "-B"):
        option = rest.pop(0)
        is_unbuffered, is_safe = is_unbuffered or option == "-u", is_safe or option == "-P"
    if rest == XDIST_WORKER or (rest[:1] == ["-c"] and rest[-1] == SPAWNED):
        return Program(rest, False, ["", *own_path], is_unbuffered)
    if not rest or (rest[0].startswith("-") and rest[0] != "-m"):
        return None
    is_module = rest[0] == "-m"
    first = "" if is_module else str(Path(rest[0]).parent)  # the current folder is filled in where it is known
    arguments = rest[1:] if is_module else rest
    return Program(arguments, is_module, [*([] if is_safe else [first]), *own_path], is_unbuffered)


def skip_setup(command: list[str]) -> tuple[list[str], dict[str, str]]:
    """Of a Ray worker's command line, that of the program which Ray's set-up program would execute; its variables."""
    if len(command) < 3 or Path(command[1]).name != "setup_worker.py":
        return command, {}
    context = [word.partition("=")[2] for word in command if word.startswith("--serialized-runtime-env-context=")]
    kept = [word for word in command[2:] if not word.startswith(("--serialized-runtime-env-context=", "--language="))]
    return [command[0], *kept], json.loads(context[0]).get("env_vars", {}) if context else {}


@dataclass
class ForkServer:
    """A process's way to its own fork server.

    Attributes:
        pid: of the server.
        owner: the process that it starts children of.
    """

    connection: socket.socket
    pid: int
    owner: int = field(default_factory=os.getpid)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, request: Request, files: Sequence[int]) -> int:
        """Start a child of this process; its id.

        Raises:
            OSError: the server is gone.
        """
        with self.lock:
            _prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self.connection, [request.encode()], files)
                answer = self.connection.recv(32)
            finally:
                _prctl(PR_SET_CHILD_SUBREAPER, 0)
        if not answer:
            raise ConnectionError("the fork server has ended")
        return int(answer)


_start_by_multiprocessing = BaseProcess.start
_exec_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_exec_spawned = multiprocessing.util.spawnv_passfds
num_started = 0
"""Python processes that this one has started; not tools such as compilers, which libraries start once in a while."""
_server: ForkServer | None = None
_set_by_imports: dict[str, str] = {}
"""Variables of the environment that the preloaded modules have set."""


def install() -> None:
    """Have ``subprocess.Popen`` and multiprocessing use the fork server; it starts with the first program."""
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = _spawn
    BaseProcess.start = _start_process  # type: ignore[method-assign]


def _start_process(self: BaseProcess) -> None:
    global num_started
    num_started += 1
    _start_by_multiprocessing(self)


def _spawn(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """What multiprocessing spawns processes by; its id."""
    environment = dict(os.environ)
    program = None if START_BY_EXEC in environment else parse_command([os.fsdecode(word) for word in args], environment)
    server = _find_server() if program is not None and SPAWNED in args else None
    if program is None or server is None:
        return _exec_spawned(path, args, passfds)
    files = sorted({0, 1, 2, *map(int, passfds)})
    request = Request(
        program=program, parent=os.getpid(), cwd=str(Path.cwd()), environment=environment, targets=files,
        ignores_interrupt=signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
    )  # fmt: skip
    try:
        return server.start(request, files)
    except OSError:
        return _exec_spawned(path, args, passfds)


def _execute_child(
    self: "subprocess.Popen[Any]",
    args: Any,
    executable: Any,
    preexec_fn: Any,
    close_fds: bool,
    pass_fds: Sequence[int],
    cwd: Any,
    env: Any,
    startupinfo: Any,
    creationflags: Any,
    shell: bool,
    p2cread: int,
    p2cwrite: int,
    c2pread: int,
    c2pwrite: int,
    errread: int,
    errwrite: int,
    restore_signals: bool,
    gid: Any,
    gids: Any,
    uid: Any,
    umask: int,
    start_new_session: bool,
    process_group: int,
) -> None:
    """Popen's own step of starting the child, which sets ``pid`` and closes the child's ends of the pipes."""
    global num_started

    def start_by_exec() -> None:
        _exec_child(
            self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
            start_new_session, process_group,
        )  # fmt: skip

    first = Path(os.fsdecode(args if isinstance(args, str | bytes | os.PathLike) else args[0]))
    num_started += str(first) == sys.executable or first.name in (*SCRIPTS, "raylet")
    if first.name == "raylet":
        server = _find_server()
        if server is not None:
            stand_in = write_stand_in()
            option = f"--python_worker_command={sys.executable} "
            args = [os.fsdecode(word).replace(option, option.replace(sys.executable, stand_in)) for word in args]
            env = {**(os.environ if env is None else env), SERVER_VARIABLE: str(server.pid)}
    environment = {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if env is None else env).items()}
    unusual = (executable, preexec_fn, startupinfo, gid, gids, uid)
    is_plain = close_fds and not shell and umask < 0 and all(option is None for option in unusual)
    if not is_plain or isinstance(args, str | bytes | os.PathLike) or START_BY_EXEC in environment:
        return start_by_exec()
    program = parse_command([os.fsdecode(word) for word in args], environment)
    server = _find_server() if program else None
    if program is None or server is None:
        return start_by_exec()
    streams = [
        number if given == -1 else given for number, given in enumerate((p2cread, c2pwrite, errwrite))
    ]  # -1: as this process's
    request = Request(
        program=program,
        parent=os.getpid(),
        cwd=str(Path.cwd() if cwd is None else Path(os.fsdecode(cwd)).absolute()),
        environment=environment,
        targets=[0, 1, 2, *pass_fds],
        starts_session=start_new_session,
        group=process_group,
        ignores_interrupt=signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
    )
    try:
        self.pid = server.start(request, [*streams, *pass_fds])
    except OSError:
        return start_by_exec()
    self._child_created = True  # type: ignore[attr-defined]
    self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def _find_server() -> ForkServer | None:
    """This process's fork server; None in a fork that is not a program of one."""
    global _server
    if _server is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-c", "import fork_server; fork_server.main()", str(theirs.fileno())]
        paths = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
        variables = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", START_BY_EXEC: "1"}
        with theirs:
            process = subprocess.Popen(
                command, env={**os.environ, **variables}, pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        _server = ForkServer(ours, process.pid)
    return _server if _server.owner == os.getpid() else None


def write_stand_in() -> str:
    """The stand-in's path; it is written unless it is there."""
    text = STAND_IN.format(python=sys.executable, variable=SERVER_VARIABLE)
    path = Path(tempfile.gettempdir()) / f"python-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if not path.exists():
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_text(text)
        aside.chmod(0o755)
        aside.replace(path)
    return str(path)


def main() -> None:
    """Serve the socket whose number is the last argument, until its other end closes."""
    connection, listener = socket.socket(fileno=int(sys.argv[-1])), listen()
    _die_with(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _name("fork server")  # while the arguments' memory is as the system laid it
    before = dict(os.environ)
    sys.modules["ray"] = None  # type: ignore[assignment]  # it reads its variables when it is loaded; vLLM does without
    for name in PRELOADED:
        importlib.import_module(name)
    replace_kernels()
    del sys.modules["ray"]
    _set_by_imports.update({k: v for k, v in os.environ.items() if k not in before})
    sys.path.remove(str(Path(__file__).parent))
    install()
    gc.collect()
    gc.freeze()  # or each fork's collector would write to, and so copy, all that it has imported
    end(serve(connection, listener))


def replace_kernels() -> None:
    """Do once what each of vLLM's workers on a CPU begins with: look through all modules for kernels to replace."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.register_triton_kernel_overrides()
    CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)  # type: ignore[method-assign,assignment]


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
    global _server
    while request.parent and os.getppid() != request.parent:
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
    _server = ForkServer(_moved(ours, above), server)
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
    if environment.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    import torch
    import torch._dynamo.config

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
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _end_with(pipe: int) -> None:
    """End this process when no process holds the pipe's other end."""
    os.read(pipe, 1)
    os._exit(1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def _name(command: str) -> None:
    """Show this command line where processes are listed."""
    import setproctitle

    setproctitle.setproctitle(command)
