"""A program that the fork server starts is the process that an interpreter of its own would be."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fork_server import START_BY_EXEC, XDIST_WORKER
from waiting import still_running

SHOW = """
import os, sys, torch
print(os.getppid(), sys.argv[1:], os.getcwd(), os.environ.get("GIVEN"), os.environ.get("HOME"), __name__)
print(os.getsid(0) == os.getpid(), sys.path[0], os.read(int(sys.argv[1]), 5).decode(), torch.get_num_threads())
print("to stderr", file=sys.stderr)
sys.exit(3)
"""


pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="not used on a machine with a GPU"),
]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(SHOW)
    return path


def run(script: Path, source: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    script.write_text(source)
    environment = os.environ | variables
    return subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)


in_a_fork_and_an_interpreter = pytest.mark.parametrize("how", [{}, {START_BY_EXEC: "1"}], ids=["fork", "exec"])


@in_a_fork_and_an_interpreter
def test_process_has_what_was_asked_for(script: Path, tmp_path: Path, how: dict[str, str]) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"piped")
    done = subprocess.run(
        [sys.executable, str(script), str(reader), "a b"],
        env={"GIVEN": "yes", "OMP_NUM_THREADS": "1"} | how,
        cwd=tmp_path,
        pass_fds=[reader],
        start_new_session=True,
        capture_output=True,
        text=True,
    )
    os.close(reader)
    os.close(writer)
    assert (done.returncode, done.stderr) == (3, "to stderr\n")
    assert done.stdout.splitlines() == [
        f"{os.getpid()} ['{reader}', 'a b'] {tmp_path} yes None __main__",
        f"True {tmp_path} piped 1",
    ]


def test_modules_are_there_before_the_program_starts(script: Path) -> None:
    done = run(script, "import sys; print('vllm' in sys.modules, __import__('time').process_time() < 2)")
    assert done.stdout == "True True\n"


def test_forks_draw_different_random_numbers(script: Path) -> None:
    source = (
        "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.initial_seed(), torch.rand(1))"
    )
    one, other = (run(script, source).stdout.split() for _ in range(2))
    assert len(one) == 4 and all(a != b for a, b in zip(one, other, strict=True))


def test_workers_of_xdist_are_forks_too() -> None:
    line = repr("print('vllm' in sys.modules, sys.argv)") + "\n"
    done = subprocess.run([sys.executable, "-u", *XDIST_WORKER], input=line, stdout=subprocess.PIPE, text=True)
    assert done.stdout == "True ['-c']\n"


def test_spawned_processes_are_forks_too(script: Path) -> None:
    source = (
        "import multiprocessing, os, sys\n"
        "def tell(answers):\n    answers.send((os.getppid(), 'vllm' in sys.modules, __name__))\n    sys.exit(3)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    answer, answers = context.Pipe()\n"
        "    process = context.Process(target=tell, args=(answers,))\n"
        "    process.start()\n"
        "    print(answer.recv() == (os.getpid(), True, '__mp_main__'), process.join(), process.exitcode)\n"
    )
    assert run(script, source, PYTHONWARNINGS="ignore:resource_tracker").stdout == "True None 3\n"


@in_a_fork_and_an_interpreter
def test_filters_of_warnings_are_applied(script: Path, how: dict[str, str]) -> None:
    source = "import sys, warnings; print(sys.warnoptions, flush=True); warnings.warn('odd', RuntimeWarning)"
    done = run(script, source, PYTHONWARNINGS="ignore::UserWarning,error::RuntimeWarning", **how)
    assert done.stdout == "['ignore::UserWarning', 'error::RuntimeWarning']\n"
    assert done.returncode == 1 and done.stderr.endswith("RuntimeWarning: odd\n")


@pytest.mark.parametrize(("name", "values"), [("PYTHONHASHSEED", ("1", "2")), ("PYTHONIOENCODING", ("utf-8", "ascii"))])
def test_variable_read_at_start_has_its_value(script: Path, name: str, values: tuple[str, str]) -> None:
    source = "import sys; print('vllm' in sys.modules, hash('a'), sys.stdout.encoding)"
    first, same, other = (run(script, source, **{name: value}).stdout.split() for value in (*values[:1], *values))
    place = 1 if name == "PYTHONHASHSEED" else 2
    assert first[place] == same[place] != other[place]
    assert first[0] == other[0] == "False"


@pytest.mark.parametrize(
    ("source", "code", "error"),
    [
        ("raise ValueError('boom')", 1, "ValueError: boom"),
        ("raise SystemExit('a line')", 1, "a line"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import atexit, sys; atexit.register(print, 'at exit', file=sys.stderr)", 0, "at exit"),
    ],
)
@in_a_fork_and_an_interpreter
def test_end_is_an_interpreters_end(script: Path, source: str, code: int, error: str, how: dict[str, str]) -> None:
    done = run(script, source, **how)
    assert done.returncode == code
    assert error in done.stderr


def test_programs_of_a_program_are_forked_too(script: Path, tmp_path: Path) -> None:
    inner = tmp_path / "inner.py"
    inner.write_text("import os, sys; print(os.getppid(), 'vllm' in sys.modules)")
    start = f"subprocess.run([sys.executable, {str(inner)!r}])"
    done = run(script, f"import os, subprocess, sys; print(os.getpid(), flush=True); {start}")
    pid, inner_line = done.stdout.splitlines()
    assert inner_line == f"{pid} True"


def test_fork_server_of_a_program_ends_with_it(script: Path) -> None:
    script.write_text("import time; print('up', flush=True); time.sleep(600)")
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 1
        command = Path(f"/proc/{process.pid}/cmdline").read_text()
        assert str(script) in command
        process.kill()
    assert still_running([int(children[0])]) == []
