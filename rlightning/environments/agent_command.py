"""An agent that is a program: it runs once for each trajectory, in its own folder, and is killed with its children."""

import asyncio
import contextlib
import inspect
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Literal

from rlightning import intervals
from rlightning.environments.messages import Message
from rlightning.errors import ConfigError
from rlightning.foreign_text import cut, cut_value
from rlightning.processes.process_group import end_group, end_with_parent
from rlightning.rpc.run_key import environment_without_key
from rlightning.types.trajectory import Outcome, Prompt

RewardSource = Literal["last_line", "exit_code", "none"]
WRONG_EXIT_CODE = 10
"""Exit code by which a program reports a wrong result of the policy. Crashes of most programs exit with 1."""
MAX_OUTPUT_BYTES = 1 << 16
"""Bytes that are kept of the end of a program's output; the rest is read and dropped."""
START = f"""\
import fcntl, os, select, signal, sys
{inspect.getsource(end_with_parent)}
end_with_parent(int(sys.argv[1]))
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Program that becomes a command, in the same process, after arranging that the end of the trainer kills its group."""


class AgentCommand:
    """An agent that is a command, run as a process for each trajectory; arguments as in :class:`AgentProgram`."""

    def __init__(
        self, command: Sequence[str], folder: str | None, variables: Mapping[str, str], reward: RewardSource
    ) -> None:
        if isinstance(command, str):
            raise ConfigError(f"environment.command={cut_value(command)} must be a list. Write {command.split()}.")
        # Paths are relative to the folder in which the trainer was started; the program runs in another one.
        self.command = [os.path.abspath(part) if os.path.isfile(part) else part for part in command]
        self.folder, self.variables, self.reward = folder, dict(variables), reward

    def check(self) -> None:
        """Raise a ConfigError if the program or the folder does not exist."""
        if shutil.which(self.command[0]) is None:
            raise ConfigError(
                f"environment.command: there is no program '{self.command[0]}'. Install it, or write its path."
            )
        if self.folder is not None and not Path(self.folder).is_dir():
            raise ConfigError(f"environment.folder={self.folder} is not a folder. Name one with files for the program.")

    async def run(self, prompt: Prompt, messages: list[Message] | None, variables: Mapping[str, str]) -> Outcome:
        """Run the command for one trajectory and return its outcome; raise a ChildProcessError if the command failed.

        Args:
            prompt: sent to the command's standard input as JSON with ``text``, ``index``, ``columns`` and ``messages``.
            messages: the prompt as a chat; None if it is not a chat.
            variables: additional environment variables of this trajectory.
        """
        environment = {**environment_without_key(), **variables, **self.variables}
        given = {"text": prompt.text, "index": prompt.index, "columns": prompt.columns, "messages": messages}
        folder = await asyncio.to_thread(self._make_folder)
        try:
            code, output, errors = await run_process(
                [_fill(part, prompt.columns) for part in self.command],
                stdin=json.dumps(given, default=str).encode(),
                folder=folder,
                environment=environment,
            )
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return self._read_reward(code, output, errors)

    def _make_folder(self) -> str:
        folder = tempfile.mkdtemp(prefix="rlightning.agent.")
        if self.folder is not None:
            shutil.copytree(self.folder, folder, dirs_exist_ok=True, symlinks=True)
        return folder

    def _read_reward(self, code: int, output: str, errors: str) -> Outcome:
        if self.reward == "exit_code" and code in (0, WRONG_EXIT_CODE):
            return Outcome(reward=float(code == 0))
        if code != 0:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise ChildProcessError(f"the program ended with {how}\n{cut(errors or output).strip()}")
        if self.reward != "last_line":
            return Outcome()
        last = output.rstrip().rpartition("\n")[2]
        try:
            said = json.loads(last)
            fields = said if isinstance(said, dict) else {"reward": said}
            reward, metrics = fields.get("reward"), fields.get("metrics", {})
            outcome = Outcome(
                None if reward is None else float(reward),
                metrics={str(name): float(value) for name, value in metrics.items()},
            )
        except (ValueError, TypeError, AttributeError):
            outcome = Outcome(math.nan)
        if outcome.reward is not None and not math.isfinite(outcome.reward):
            raise ChildProcessError(
                f"the program's last line is {cut_value(last)}, and has to be its reward: a number, or JSON such as "
                '{"reward": 1.0}'
            )
        return outcome


async def run_process(
    command: Sequence[str], *, stdin: bytes, folder: str, environment: Mapping[str, str]
) -> tuple[int, str, str]:
    """Run a command until it exits, kill processes that it leaves, and return its output; cancellation kills all.

    Returns:
        The exit code (minus the signal's number if a signal ended the command), and the ends of its stdout and stderr.
    """
    lifeline, ours = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", START, str(lifeline), *command],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[lifeline],
            start_new_session=True,
        )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(lifeline)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    output, errors = bytearray(), bytearray()
    readers = [
        asyncio.ensure_future(_read_tail(pipe, tail))
        for pipe, tail in ((process.stdout, output), (process.stderr, errors))
    ]
    writer = asyncio.ensure_future(_write(process.stdin, stdin))
    try:
        await _wait_for_exit(process.pid)
    finally:
        # Processes that it has left would continue, with its pipes open.
        os.close(ours)
        await asyncio.shield(asyncio.to_thread(end_group, process.pid))
        code = process.wait()
        writer.cancel()
        # A daemon of the program may hold the pipes open for longer.
        await asyncio.wait(readers, timeout=intervals.CANCEL_GRACE)
        for reader in readers:
            reader.cancel()
    return code, output.decode(errors="replace"), errors.decode(errors="replace")


async def _wait_for_exit(pid: int) -> None:
    """Wait until a child process has exited, even if another process still holds its pipes."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    descriptor = os.pidfd_open(pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _read_tail(pipe: IO[bytes], tail: bytearray) -> None:
    """Read a pipe to its end, and keep the last ``MAX_OUTPUT_BYTES`` of it in ``tail``."""
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), pipe
    )
    try:
        while chunk := await stream.read(MAX_OUTPUT_BYTES):
            tail += chunk
            del tail[:-MAX_OUTPUT_BYTES]
    finally:
        transport.close()


async def _write(pipe: IO[bytes], data: bytes) -> None:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, pipe)
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    with contextlib.suppress(ConnectionError):
        writer.write(data)
        await writer.drain()
    writer.close()


def _fill(part: str, columns: Mapping[str, object]) -> str:
    """Replace each ``{column}`` in an argument by the column's value; braces in the values stay."""
    names = "|".join(map(re.escape, columns))
    return re.sub(f"{{({names})}}", lambda found: str(columns[found[1]]), part) if names else part
