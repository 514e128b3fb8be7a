"""Starts verifiers' environment server in verifiers' interpreter, and lists the tasks of its task set.

The trainer sends the settings through a socket, as a line of JSON, and gets a line back: ``roles`` and ``tasks``, or
``error``. The server itself listens at the address in the settings.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import threading

from rlightning.foreign_text import describe_error
from rlightning.python_values import JsonObject

GRACE = 10.0
"""Seconds for the server to end by itself after the trainer has ended."""


class Announcement:
    """Replaces the queue into which verifiers' server puts its address once it listens: reports to the trainer, through
    a socket, that the server listens.
    """

    def __init__(self, trainer: socket.socket, found: JsonObject) -> None:
        self.trainer, self.found, self.is_made = trainer, found, False

    def put(self, address: object) -> None:
        """Report to the trainer that the server listens. ``address`` is ignored: the trainer has chosen it."""
        self.tell(self.found)

    def tell(self, found: JsonObject) -> None:
        """Send ``found`` to the trainer as a line of JSON; only the first call sends, later calls do nothing."""
        if not self.is_made:
            self.is_made = True
            self.trainer.sendall(json.dumps(found).encode() + b"\n")


class Lifeline:
    """Replaces the pipe by which verifiers' server detects its parent's exit; detects the trainer's exit instead."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def recv(self) -> None:
        """Wait until the trainer has exited, then return, so that the server ends; a timer kills the server if it has
        not ended after :data:`GRACE` seconds.
        """
        while os.read(self.descriptor, 1):
            pass
        timer = threading.Timer(GRACE, lambda: os.killpg(0, signal.SIGKILL))
        timer.daemon = True
        timer.start()


def main() -> None:
    """Read settings from the trainer, and run verifiers' server with them until the trainer exits or sends SIGTERM."""
    trainer, lifeline = socket.socket(fileno=int(sys.argv[-2])), int(sys.argv[-1])
    with trainer.makefile("r") as lines:
        settings = json.loads(lines.readline())
    sys.path += settings["search_path"]
    announcement = Announcement(trainer, {})
    try:
        config = settings["config"]
        announcement.found = {
            "roles": run_here(config),
            "tasks": list_tasks(config, settings["num_tasks"]),
            "has_uv": shutil.which("uv") is not None,
        }
        serve(config, settings["address"], announcement, Lifeline(lifeline))
    except Exception as error:  # raised by the task set or by verifiers; the trainer shows one line of it
        announcement.tell({"error": describe_error(error)})
        raise


def serve(config: JsonObject, address: str, announcement: Announcement, lifeline: Lifeline) -> None:
    """Run verifiers' server in this process until it ends."""
    from verifiers.v1.serve import serve_env

    serve_env(max_workers=1, address=address, address_queue=announcement, death_pipe=lifeline, config_data=config)


def run_here(config: JsonObject) -> list[str]:
    """Set each agent's runtime in ``config`` to a subprocess on this host, unless ``config`` names a runtime; return
    the agents' names.

    Verifiers' own default is a remote service.
    """
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import resolve_env_config

    roles = list(agent_config_fields(resolve_env_config(json.loads(json.dumps(config)))))
    for role in roles:
        config.setdefault(role, {}).setdefault("runtime", {"type": "subprocess"})
    return roles


def list_tasks(config: JsonObject, count: int) -> list[JsonObject]:
    """Return the data of the first ``count`` tasks of the task set."""
    from verifiers.v1.utils.loaders import load_taskset, resolve_env_config

    if not count:
        return []
    taskset = load_taskset(resolve_env_config(json.loads(json.dumps(config))).taskset)
    return [task.data.model_dump(mode="json") for task in taskset.take(count)]
