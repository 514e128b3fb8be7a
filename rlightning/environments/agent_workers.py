"""Worker processes for agents that are functions, so that their clients take no CPU time of the trainer's process."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from rlightning.environments.agent_function import Access, AgentFunction
from rlightning.environments.endpoint import Session
from rlightning.environments.messages import Fields
from rlightning.environments.worker_environment import UNSENDABLE, WorkerEnvironment
from rlightning.errors import ConfigError, check_rules
from rlightning.foreign_text import cut_line, cut_value
from rlightning.processes.cpu_cores import num_cores
from rlightning.python_values import JsonObject
from rlightning.rpc.connection import encode
from rlightning.rpc.peer import Method
from rlightning.types.trajectory import Outcome, Prompt

log = logging.getLogger(__name__)

FUNCTION = f"{AgentFunction.__module__}.{AgentFunction.__name__}"
MAX_DEFAULT_WORKERS = 8
HANG_TIMEOUT = 600.0
"""Default seconds for which an agent may block its worker's event loop: some run tests there, without a thread."""
MIN_CORES = 4
"""Least number of cores for workers by default, since the trainer and an engine need cores too."""


class AgentWorkers(WorkerEnvironment):
    """Calls an agent's function in worker processes, while the endpoint that it calls runs in the trainer's process."""

    prefix = "environment.workers"

    def __init__(self, function: AgentFunction, settings: JsonObject, *, is_required: bool) -> None:
        arguments = {"agent": function.agent, "arguments": function.arguments}
        super().__init__(FUNCTION, arguments, **{"hang_timeout": HANG_TIMEOUT, **settings})
        self.name, self.key = str(function.agent), function.name
        self._is_required, self._logs_unsendable = is_required, True

    def takes(self, prompt: Prompt) -> bool:
        """Return whether a prompt can be sent to a worker unchanged; the first one that cannot be is logged.

        Raises a ConfigError for such a prompt if workers are required.
        """
        reason = _find_unsendable(prompt.columns)
        if reason and self._is_required:
            raise ConfigError(
                f"{self.key}: prompt {prompt.index} cannot be sent to workers: {reason} Make the column plain "
                "data, such as a text, or leave out num_workers and workers: it runs in the trainer's process then."
            )
        if reason and self._logs_unsendable:
            self._logs_unsendable = False
            log.info(
                "%s runs in the trainer's process for prompts that cannot be sent to workers, such as %d: %s",
                *(self.key, prompt.index, reason),
            )
        return reason is None

    async def call(self, prompt: Prompt, session: Session, access: Callable[..., Access]) -> Outcome:
        """Run the agent for one trajectory in a worker process, and return its outcome.

        Raises the errors of :meth:`WorkerEnvironment.run`. ``access`` returns how the agent reaches the endpoint.
        """

        async def open_session(wants_messages: bool) -> Fields:
            try:
                return [*access(wants_messages=wants_messages)]
            except Exception as error:
                session.fail(error)
                raise

        async def has_reached_limit() -> bool:
            return session.has_reached_limit

        methods: dict[str, Method] = {"open_session": open_session, "has_reached_limit": has_reached_limit}
        return await self.run(prompt, session.policy, methods)


def start_workers(
    function: AgentFunction, num_workers: int | None, max_trajectories: int, settings: Mapping[str, Any]
) -> AgentWorkers | None:
    """Return an agent's worker pool, which starts with its first trajectory; None to run the agent in this process.

    Args:
        function: the agent.
        num_workers: number of processes; None for a number by the cores.
        max_trajectories: maximum number of concurrent trajectories of a worker.
        settings: additional arguments of :class:`WorkerEnvironment`.

    Raises:
        ConfigError: a setting is invalid, or workers are required and the agent cannot run in them.
    """
    is_required = bool(num_workers or settings)
    if num_workers is None:
        cores = num_cores()
        num_workers = min(MAX_DEFAULT_WORKERS, cores - 1) if cores >= MIN_CORES else int(bool(settings))
    check_rules({f"AgentProgram: workers={cut_value(settings)} needs num_workers": bool(num_workers) or not settings})
    if not num_workers:
        return None
    reason = _why_not(function)
    if reason is not None and is_required:
        raise ConfigError(
            f"{function.name} cannot run in workers: {reason}. Leave out num_workers and workers: it runs in the "
            "trainer's process then."
        )
    if reason is not None:
        log.info("%s runs in the trainer's process, not in workers: %s.", function.name, reason)
        return None
    try:
        numbers = {"num_workers": num_workers, "max_trajectories": max_trajectories}
        return AgentWorkers(function, {**numbers, **settings}, is_required=is_required)
    except TypeError as error:
        raise ConfigError(f"AgentProgram: workers={cut_value(settings)}: {cut_line(error)}.") from error


def _why_not(function: AgentFunction) -> str | None:
    """Return why an agent cannot run in workers; None if it can."""
    if not isinstance(function.agent, str):
        return "it is no dotted path"
    if function.agent.startswith("__main__."):
        return "workers do not run the script"
    try:
        return "its arguments hold arrays" if encode(function.arguments)[1] else None
    except UNSENDABLE as error:
        return f"its arguments cannot be sent ({cut_line(error)})"


def _find_unsendable(columns: Mapping[str, object]) -> str | None:
    """Return a sentence that names a column which cannot be sent to a worker, and why; None if there is none."""
    for name, value in columns.items():
        try:
            if encode(value)[1]:
                return f"Its column '{name}' holds arrays."
        except UNSENDABLE as error:
            return f"Its column '{name}': {cut_line(error)}"
    return None
