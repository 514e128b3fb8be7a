"""A worker process that makes trajectories of another environment, many concurrently on one event loop."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlightning import intervals
from rlightning.dotted_path import import_object
from rlightning.environments.environment import AskLimitError, Environment, LimitReachedError, Reply
from rlightning.environments.messages import AssistantMessage, Fields, Message, ToolCall
from rlightning.environments.outcomes import check_outcome, outcome_to_plain
from rlightning.environments.step_object import await_user_code
from rlightning.errors import ConfigError
from rlightning.foreign_text import describe_error
from rlightning.python_values import JsonObject
from rlightning.rpc.peer import Peer, RemoteError
from rlightning.rpc.progress import CALL, track_tasks
from rlightning.rpc.worker import Worker
from rlightning.types.trajectory import Outcome, Prompt, Sample

log = logging.getLogger(__name__)


@contextmanager
def reraise_remote(kind: type[Exception] = LimitReachedError) -> Iterator[None]:
    """Context manager that converts a RemoteError caused by an exception of class ``kind`` to that exception."""
    try:
        yield
    except RemoteError as error:
        if error.type_name == kind.__name__:
            raise kind(error.message) from None
        raise


class RemotePolicy:
    """A worker's proxy for a :class:`~rlightning.environments.environment.Policy` of the trainer's process."""

    def __init__(self, trainer: Peer, key: int) -> None:
        self._trainer, self._key = trainer, key

    async def open_session(self, *, wants_messages: bool) -> Fields:
        """Return the URL and the key with which an agent calls the policy; only for agents' workers."""
        return list(await self._request("open_session", wants_messages))

    async def has_reached_limit(self) -> bool:
        """Return whether the sequence of the last request to the endpoint had its maximum length."""
        return bool(await self._request("has_reached_limit"))

    async def chat(self, *observations: Message, tools: Sequence[Message] | None = None) -> Reply:
        """Sample the policy's next turn in the chat (:meth:`Policy.chat`)."""
        return _read_reply(await self._request("chat", None if tools is None else list(tools), *observations))

    async def ask(self, *messages: Message, temperature: float = 0.0, max_new_tokens: int | None = None) -> Reply:
        """Sample a reply of the policy in a separate conversation, which is not part of the trajectory
        (:meth:`Policy.ask`).
        """
        with reraise_remote(AskLimitError):
            return _read_reply(await self._request("ask", temperature, max_new_tokens, *messages))

    async def sample(self, token_ids: Sequence[int]) -> Sample:
        """Sample the policy's next turn from a token sequence (:meth:`Policy.sample`)."""
        return Sample(*await self._request("sample", [int(token) for token in token_ids]))

    async def report(self, outcome: Outcome, state: object = None) -> None:
        """Send the trainer a preliminary outcome, valid if the trajectory times out, and a state for checkpoints
        (:meth:`Policy.report`).
        """
        await self._request("report", outcome_to_plain(outcome), state)

    async def resume(self) -> object:
        """Restore the turns of a trajectory from a checkpoint, and return its reported state; None for a new trajectory
        (:meth:`Policy.resume`).
        """
        return await self._request("resume")

    async def _request(self, method: str, *arguments: object) -> Any:
        with reraise_remote():
            return await self._trainer.call("request", self._key, method, *arguments)


def _read_reply(sent: Fields) -> Reply:
    sample, message = sent
    content, reasoning, calls, errors, places = message
    tool_calls = tuple(ToolCall(*call) for call in calls)
    return Reply(Sample(*sample), AssistantMessage(content, reasoning, tool_calls, tuple(errors), tuple(places)))


class EnvironmentWorker:
    """The server in a worker process: constructs an environment, and makes trajectories at the trainer's request."""

    def __init__(self) -> None:
        self._worker = Worker()
        self._environment: Environment
        self._trainer: Peer
        self._trajectories: set[asyncio.Task[Outcome]] = set()

    async def serve(self) -> None:
        """Make trajectories until the connection is closed."""
        track_tasks(asyncio.get_running_loop(), self._worker.progress.show)
        self._beat()
        self._trainer = await self._worker.connect({"setup": self._set_up, "call": self._call, "finish": self._finish})
        await self._trainer.wait_closed()

    def _beat(self) -> None:
        self._worker.progress.show(0, False)
        asyncio.get_running_loop().call_later(intervals.WORKER_POLL_INTERVAL, self._beat)

    async def _set_up(self, path: str, arguments: JsonObject, search_path: list[str]) -> None:
        """Construct the environment; raises a ConfigError if its class cannot be found or used."""
        sys.path[:0] = [entry for entry in search_path if entry not in sys.path]
        kind = find_class(path)
        if not kind.runs_in_workers:
            raise ConfigError(
                f"environment.environment={path} serves the policy from the trainer's process, and does not run in "
                "workers. Name it as the environment itself; a program that it starts is a process of its own."
            )
        try:
            self._environment = kind(**arguments)
            await self._environment.check()
        except ConfigError:
            raise
        except Exception as error:
            given = f"the arguments {', '.join(arguments)}" if arguments else "no arguments"
            raise ConfigError(
                f"environment.environment={path} cannot be made with {given}: {describe_error(error)}. Change "
                "environment.arguments, or the class."
            ) from error

    async def _call(self, key: int, prompt: Fields) -> Fields:
        """Make a trajectory, and return the fields of its outcome."""
        CALL.set(key)
        task = asyncio.ensure_future(self._run(Prompt(*prompt), RemotePolicy(self._trainer, key)))
        self._trajectories.add(task)
        task.add_done_callback(self._trajectories.discard)
        outcome = await task
        return outcome_to_plain(outcome)

    async def _run(self, prompt: Prompt, policy: RemotePolicy) -> Outcome:
        try:
            outcome = await await_user_code(self._environment.run(prompt, policy))
        except LimitReachedError as error:
            raise LimitReachedError(str(error)) from None  # may be a subclass; only the class's name is sent
        return check_outcome(outcome, f"{type(self._environment).__name__}.run()")

    async def _finish(self) -> None:
        """Wait for cancelled trajectories to clean up, and close the environment."""
        if self._trajectories:
            await asyncio.wait(self._trajectories, timeout=intervals.CANCEL_GRACE)
        try:
            await self._environment.close()
        except Exception:
            log.exception("The environment could not be closed.")


def find_class(path: str) -> type[Environment]:
    """Import an environment's class; raises a ConfigError if the dotted path does not name one."""
    what = f"environment.environment={path}"
    kind = import_object(path, what)
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        found = "class" if isinstance(kind, type) else type(kind).__name__
        rule = "Name a subclass of rlightning.environments.Environment."
        raise ConfigError(f"{what} is a {found} that is no environment. {rule}")
    return kind


def main() -> None:
    """Make trajectories until the trainer closes the connection."""
    asyncio.run(EnvironmentWorker().serve())
