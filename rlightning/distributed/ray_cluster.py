"""A Ray cluster as a run needs it: joined or started, and with room for what is to run on it."""

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlightning.errors import ConfigError, check_rules

log = logging.getLogger(__name__)

PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
CONNECT_SECONDS = 5.0
"""How long the head of a cluster may take to accept a connection."""


def import_ray() -> Any:
    """Ray, or how to get it."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "trainer.strategy=RayController needs ray, which is not installed. Install it: pip install "
            "'rlightning[ray]'."
        ) from error
    return ray


def join_cluster(address: str | None, options: Mapping[str, Any]) -> None:
    """Make this process a driver of a cluster, unless it is one.

    Args:
        address: "auto" for the cluster that this machine is a node of, or "host:port". None is the one that RAY_ADDRESS
            names, as for a job that was submitted to it, else a new one on this machine, which ends with this process.
        options: further arguments of ``ray.init``.
    """
    ray = import_ray()
    if ray.is_initialized():
        return
    # Without an address Ray joins whatever cluster it finds on the machine, such as another run's, and ends with it.
    where = address or os.environ.get("RAY_ADDRESS") or "local"
    if where.startswith("ray://"):
        raise ConfigError(
            f"trainer.strategy: address={where} is that of a Ray client, which cannot hold handles to tensors. Start "
            "the run on a node of the cluster, with address=auto."
        )
    if ":" in where:
        host, _, port = where.rpartition(":")
        try:
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        except (OSError, ValueError) as error:
            raise _unknown(where, str(error)) from error
    # As any process: with Ray's 15, whatever else runs on the host goes before the engines.
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        ray.init(address=where, **{"logging_level": logging.WARNING, "include_dashboard": False, **options})
    except ConnectionError as error:
        raise _unknown(where, "there is no cluster") from error


def _unknown(address: str, reason: str) -> ConfigError:
    return ConfigError(
        f"trainer.strategy: no Ray cluster answers at address={address} ({reason}). Start one by `ray start "
        "--head`, or leave address out to have one started on this machine."
    )


@dataclass(frozen=True)
class Resources:
    """What each worker takes of the cluster.

    Attributes:
        cpus: cores.
        gpus: GPUs; None is one where the cluster has any and the workers' accelerator is not the CPU.
        placement: how workers are spread over nodes: PACK, SPREAD, STRICT_PACK, or STRICT_SPREAD.
    """

    cpus: float = 1.0
    gpus: float | None = None
    placement: str = "PACK"

    def check(self) -> None:
        """Refuse numbers and names that mean nothing."""
        check_rules(
            {
                f"cpus_per_worker={self.cpus} must be at least 0. Use 1": self.cpus >= 0,
                f"gpus_per_worker={self.gpus} must be at least 0. Leave it out for one": (self.gpus or 0) >= 0,
                f"placement={self.placement} is unknown. Choose from: {', '.join(PLACEMENTS)}": self.placement
                in PLACEMENTS,
            }
        )

    def settle(self, num_workers: int | None, accelerator: str) -> "tuple[int, dict[str, float]]":
        """How many workers there are, and what each takes.

        Args:
            num_workers: None is one a GPU of the cluster, or one.
            accelerator: of the workers.

        Raises:
            ConfigError: if the cluster has less.
        """
        has = import_ray().cluster_resources()
        uses_gpus = accelerator != "cpu" and has.get("GPU", 0) > 0
        gpus = float(uses_gpus) if self.gpus is None else self.gpus
        count = num_workers or (int(has.get("GPU", 0) / gpus) if gpus else 1)
        for kind, name, each in (("CPU", "cpus", self.cpus), ("GPU", "gpus", gpus)):
            if count * each > has.get(kind, 0):
                raise ConfigError(
                    f"trainer.strategy: num_workers={count} x {name}_per_worker={each:g} is {count * each:g} {kind}s, "
                    f"but the Ray cluster has {has.get(kind, 0):g}. Lower either, or add nodes."
                )
        return count, {"CPU": self.cpus, **({"GPU": gpus} if gpus else {})}
