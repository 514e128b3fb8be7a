"""Start Python programs as forks of a process that has imported the heavy modules already.

A program that imports torch, transformers and vLLM spends 6 to 9 CPU seconds before its first line; tests start
hundreds. While :func:`install` is in force, ``subprocess.Popen`` starts ``python script``, ``python -m module`` and the
console scripts of this environment in some milliseconds instead: a fork server (forks.py), which has imported them,
forks, and the fork sets up what a fresh interpreter would have: arguments, environment, folder, file descriptors,
session, ``sys.path``, ``__main__``. The new process is the caller's child (it can be waited for and killed, and dies
with its parent where it asks for that), and has a fork server of its own, so that what it starts is forked, too.

Programs given by ``-c``, those with ``START_BY_EXEC`` in their environment, and those for which a variable of
:data:`READ_AT_START` has another value start as always; but for the workers of
pytest-xdist, so that the heavy modules are imported once for all of them, and what multiprocessing spawns. Ray's
raylet, which is no Python program, starts its workers by :data:`STAND_IN`, a small script in place of the interpreter:
it has the fork server of the raylet's parent start the worker, and ends with it.

    caller -- request, file descriptors --> fork server -- fork --> fork -- fork --> program and its own fork server
       ^------------ the program's parent, once the fork between has ended -----------'
"""

import ctypes
import hashlib
import inspect
import json
import multiprocessing.util
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

START_BY_EXEC = "START_BY_EXEC"
"""A variable of a program's environment: set, it starts in an interpreter of its own."""
SCRIPTS = ("rlightning", "torchrun")
READ_AT_START = (
    *("PYTHONHASHSEED", "PYTHONIOENCODING", "PYTHONUTF8", "PYTHONOPTIMIZE", "PYTHONDEVMODE", "PYTHONMALLOC"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE"),
)
"""Variables that an interpreter or a preloaded library reads only while it starts: a program for which one has another
value than for the fork server starts in an interpreter of its own."""
PYTHON = r"python[\d.]*"
"""Names of interpreters."""
XDIST_WORKER = ["-c", "import sys;exec(eval(sys.stdin.readline()))"]
"""How execnet starts a worker."""
SPAWNED = "--multiprocessing-fork"
"""The last argument of what multiprocessing spawns, by ``-c``."""
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
PR_SET_CHILD_SUBREAPER = 36


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
    inherited = [f"-W{text}" for text in environment.get("PYTHONWARNINGS", "").split(",")]  # by multiprocessing
    rest = list(command[1:])
    while rest and rest[0] in ("-u", "-P", "-B", *inherited):
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
        environment: the variables that it was started with.
        owner: the process that it starts children of.
    """

    connection: socket.socket
    pid: int
    environment: dict[str, str]
    owner: int = field(default_factory=os.getpid)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def suits(self, environment: dict[str, str]) -> bool:
        """Whether a fork would be what an interpreter with these variables is."""
        return all(environment.get(name) == self.environment.get(name) for name in READ_AT_START)

    def start(self, request: Request, files: Sequence[int]) -> int:
        """Start a child of this process; its id.

        Raises:
            OSError: the server is gone.
        """
        with self.lock:
            prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self.connection, [request.encode()], files)
                answer = self.connection.recv(32)
            finally:
                prctl(PR_SET_CHILD_SUBREAPER, 0)
        if not answer:
            raise ConnectionError("the fork server has ended")
        return int(answer)


_start_by_multiprocessing = BaseProcess.start
_exec_child: Callable[..., None] = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_CHILD = inspect.signature(_exec_child)
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
UNUSUAL = ("executable", "preexec_fn", "startupinfo", "gid", "gids", "uid")
"""Arguments of Popen with which a program is started as always."""
_exec_spawned = multiprocessing.util.spawnv_passfds
num_started = 0
"""Python processes that this one has started; not tools such as compilers, which libraries start once in a while."""
_server: ForkServer | None = None


def install() -> None:
    """Have ``subprocess.Popen`` and multiprocessing use the fork server; it starts with the first program."""
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = _spawn
    BaseProcess.start = _start_process  # type: ignore[method-assign]


def uninstall() -> None:
    """Have ``subprocess.Popen`` start interpreters again, for programs that outlive this process."""
    subprocess.Popen._execute_child = _exec_child  # type: ignore[attr-defined]


def _start_process(self: BaseProcess) -> None:
    global num_started
    num_started += 1
    _start_by_multiprocessing(self)


def _spawn(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """What multiprocessing spawns processes by; its id."""
    environment = dict(os.environ)
    program = None if START_BY_EXEC in environment else parse_command([os.fsdecode(word) for word in args], environment)
    server = _find_server() if program is not None and SPAWNED in args else None
    if program is None or server is None or not server.suits(environment):
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


def _execute_child(*values: Any) -> None:
    """Popen's own step of starting the child, which sets ``pid`` and closes the child's ends of the pipes."""
    global num_started
    given = _CHILD.bind(*values).arguments
    self, args, env, cwd = (given[name] for name in ("self", "args", "env", "cwd"))
    first = Path(os.fsdecode(args if isinstance(args, str | bytes | os.PathLike) else args[0]))
    num_started += re.fullmatch(PYTHON, first.name) is not None or first.name in (*SCRIPTS, "raylet")
    if first.name == "raylet" and (server := _find_server()) is not None:
        option = f"--python_worker_command={sys.executable} "
        by_stand_in = option.replace(sys.executable, write_stand_in())
        args = given["args"] = [os.fsdecode(word).replace(option, by_stand_in) for word in args]
        env = given["env"] = {**(os.environ if env is None else env), SERVER_VARIABLE: str(server.pid)}
    environment = {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if env is None else env).items()}
    is_plain = given["close_fds"] and not given["shell"] and given["umask"] < 0
    is_plain = is_plain and all(given[name] is None for name in UNUSUAL) and START_BY_EXEC not in environment
    is_plain = is_plain and not isinstance(args, str | bytes | os.PathLike)
    program = parse_command([os.fsdecode(word) for word in args], environment) if is_plain else None
    server = _find_server() if program else None
    if program is None or server is None or not server.suits(environment):
        return _exec_child(**given)
    pipes = [given[name] for name in PIPES]
    streams = [number if pipes[at] == -1 else pipes[at] for number, at in enumerate((0, 3, 5))]  # -1: this process's
    request = Request(
        program=program,
        parent=os.getpid(),
        cwd=str(Path.cwd() if cwd is None else Path(os.fsdecode(cwd)).absolute()),
        environment=environment,
        targets=[0, 1, 2, *given["pass_fds"]],
        starts_session=given["start_new_session"],
        group=given["process_group"],
        ignores_interrupt=signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
    )
    try:
        self.pid = server.start(request, [*streams, *given["pass_fds"]])
    except OSError:
        return _exec_child(**given)
    self._child_created = True
    self._close_pipe_fds(*pipes)


def _find_server() -> ForkServer | None:
    """This process's fork server; None in a fork that is not a program of one."""
    global _server
    if _server is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-c", "import forks; forks.main()", str(theirs.fileno())]
        paths = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
        variables = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", START_BY_EXEC: "1"}
        # Each fork applies its own filters of warnings.
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"} | variables
        with theirs:
            process = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        _server = ForkServer(ours, process.pid, environment)
    return _server if _server.owner == os.getpid() else None


def server_pid() -> int:
    """The id of this process's fork server; 0 if there is none yet."""
    return 0 if _server is None else _server.pid


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


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)
