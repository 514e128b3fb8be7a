"""The Ray cluster of a run: joining or starting it, and checking that it has the resources for the workers."""

import atexit
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

from rlightning import intervals
from rlightning.controller.commands import ClusterLostError
from rlightning.controller.reaper import OwnNode, describe_loss, watch_own_node
from rlightning.errors import ConfigError, check_rules
from rlightning.processes.scratch import ScratchFolder
from rlightning.python_values import module_name

log = logging.getLogger(__name__)

PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
LONGEST_REASON = 400
TOLD_BY_US = r"Raylet is terminated\.|has been marked dead because the detector"
"""Pattern of Ray's log lines about a killed raylet, which are hidden: this package reports it in one line."""
START_ONE = "Start one by `ray start --head`, or leave address out to have one started on this machine."


_own_nodes: dict[str, OwnNode] = {}
"""Nodes of the Ray clusters that this process started, by Ray session; their reapers run until this process ends."""


def import_ray() -> ModuleType:
    """Return the package ray, or raise a ConfigError if it is missing."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", TOLD_BY_US)  # read as it is imported
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "trainer.strategy=RayController needs ray, which is not installed. Install it: pip install "
            "'rlightning[ray]'."
        ) from error
    return ray


def join_cluster(address: str | None, options: Mapping[str, object]) -> bool:
    """Connect this process to a Ray cluster, or start one, unless it is connected already.

    Args:
        address: "auto" for the cluster of which this machine is a node, or "host:port". None for the cluster in
            RAY_ADDRESS, as in a submitted job, else for a new one on this machine, which ends with this process.
        options: additional arguments of ``ray.init``.

    Returns:
        Whether the cluster is new, and so inherits this process's environment.

    Raises:
        ConfigError: there is no such cluster, or it rejects this process.
    """
    ray = import_ray()
    from rlightning.controller.ray_internals import SESSION_FOLDER, session_folder

    if ray.is_initialized():
        release_sigterm(signal.SIG_DFL)
        return False
    # Without an address Ray joins any cluster that it finds on the machine, such as another run's, and ends with that.
    where = address or os.environ.get("RAY_ADDRESS") or "local"
    if where.startswith("ray://"):
        raise ConfigError(
            f"trainer.strategy: address={where} is that of a Ray client, which cannot hold handles to tensors. Start "
            "the run on a node of the cluster, with address=auto."
        )
    if ":" in where:
        check_reachable(where)
        check_admitted(where, where)
    # Workers have the usual nice value: with Ray's 15, every other process on the host would run before engines.
    os.environ.setdefault("RAY_worker_niceness", "0")
    handler = signal.getsignal(signal.SIGTERM)
    settings: dict[str, Any] = {"logging_level": logging.WARNING, "include_dashboard": False, **options}
    if where == "local" and SESSION_FOLDER not in options and "RAY_TMPDIR" not in os.environ:
        settings[SESSION_FOLDER] = _make_session_folder()
    try:
        ray.init(address=where, **settings)
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        tried = re.search(r"cluster at (\S+:\d+)", str(error))  # the address that "auto" has found
        if tried:
            check_admitted(where, tried[1])
        raise _refused(where, error) from error
    release_sigterm(handler)
    if where == "local" and (node := watch_own_node(session_folder())) is not None:
        _own_nodes[ray.get_runtime_context().get_session_name()] = node
    return where == "local"


def check_own_node() -> None:
    """Raise a ClusterLostError if the raylet of the Ray cluster that this process started has ended."""
    ray = import_ray()
    node = _own_nodes.get(ray.get_runtime_context().get_session_name()) if ray.is_initialized() else None
    if node is not None and node.has_ended:
        raise ClusterLostError(describe_loss(node.raylet))


def _make_session_folder() -> str:
    """Create the folder for the sockets and logs of this process's cluster, which is removed at its end."""
    folder = ScratchFolder("ray")

    def end() -> None:
        import_ray().shutdown()
        folder.remove()

    atexit.register(end)
    return str(folder.path)


def release_sigterm(handler: Callable[[int, FrameType | None], object] | int | None) -> None:
    """If Ray handles SIGTERM, install ``handler`` instead; Ray's would exit immediately with code 15.

    Lightning calls existing handlers after its own, so that Ray's would end a fit before its last state is saved.
    """
    is_main = threading.current_thread() is threading.main_thread()
    current = signal.getsignal(signal.SIGTERM)
    if is_main and module_name(current).partition(".")[0] == "ray":
        signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)


def check_reachable(address: str) -> None:
    """Raise a ConfigError for an address that accepts no connection; Ray would retry for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), intervals.CONNECT_TIMEOUT).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"trainer.strategy: no Ray cluster answers at address={address} ({error}). {START_ONE}"
        ) from error


def check_admitted(where: str, address: str) -> None:
    """Raise a ConfigError for a cluster that rejects this process, with the cause, which ``ray.init`` omits."""
    ray = import_ray()
    from ray.autoscaler.v2.sdk import get_cluster_status

    try:
        get_cluster_status(address, timeout=int(intervals.CONNECT_TIMEOUT))
    except ray.exceptions.RayError as error:
        raise _refused(where, error) from error


def _refused(where: str, error: Exception) -> ConfigError:
    """Return a ConfigError that states the cause of Ray's exception; if that is unknown, Ray's own message."""
    if isinstance(error, import_ray().exceptions.AuthenticationError):
        return ConfigError(
            f"trainer.strategy: the Ray cluster at address={where} asks for its authentication token, and this process "
            "has none or another one. Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the "
            "cluster's; `ray start` has read it there, or in ~/.ray/auth_token."
        )
    reason = " ".join(str(error).split())[:LONGEST_REASON]
    return ConfigError(
        f"trainer.strategy: no Ray cluster could be joined at address={where}. Ray says: {reason} {START_ONE}"
    )


@dataclass(frozen=True)
class Resources:
    """The cluster resources of each worker.

    Attributes:
        cpus: number of cores.
        gpus: number of GPUs; None for one if the cluster has any and the workers' accelerator is not the CPU.
        placement: Ray's strategy to place workers on nodes: PACK, SPREAD, STRICT_PACK, or STRICT_SPREAD.
    """

    cpus: float = 1.0
    gpus: float | None = None
    placement: str = "PACK"

    def check(self) -> None:
        """Raise a ConfigError for an invalid number of cores or GPUs, or an unknown placement."""
        check_rules(
            {
                f"cpus_per_worker={self.cpus} must be at least 0. Use 1": self.cpus >= 0,
                f"gpus_per_worker={self.gpus} must be at least 0. Leave it out for one": (self.gpus or 0) >= 0,
                f"placement={self.placement} is unknown. Choose from: {', '.join(PLACEMENTS)}": self.placement
                in PLACEMENTS,
            }
        )

    def settle(self, num_workers: int | None, accelerator: str) -> "tuple[int, dict[str, float]]":
        """Return the number of workers, by default one for each GPU, and the CPUs and GPUs of each, by Ray's names.

        Raises:
            ConfigError: if the cluster has fewer GPUs or cores.
        """
        has = import_ray().cluster_resources()
        uses_gpus = accelerator != "cpu" and has.get("GPU", 0) > 0
        gpus = float(uses_gpus) if self.gpus is None else self.gpus
        count = num_workers or (max(int(has.get("GPU", 0) / gpus), 1) if gpus else 1)
        for kind, name, each in (("CPU", "cpus", self.cpus), ("GPU", "gpus", gpus)):
            if count * each > has.get(kind, 0):
                raise ConfigError(
                    f"trainer.strategy: num_workers={count} x {name}_per_worker={each:g} is {count * each:g} {kind}s, "
                    f"but the Ray cluster has {has.get(kind, 0):g}. Lower either, or add nodes."
                )
        return count, {"CPU": self.cpus, **({"GPU": gpus} if gpus else {})}
