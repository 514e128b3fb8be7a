"""Launches the ranks of one machine, as Lightning does, and ends the ranks that it started."""

import contextlib
import logging
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from lightning.pytorch import Trainer

from rlightning import intervals
from rlightning.errors import ConfigError
from rlightning.foreign_text import cut_line
from rlightning.lightning_internals import SubprocessLauncher
from rlightning.parallel.device import share_host_threads
from rlightning.parallel.execution_mode import ExecutionMode, execution_mode, read_launch
from rlightning.parallel.failure_watch import active_watch, end_children, exit_now, report_failure

T = TypeVar("T")

log = logging.getLogger(__name__)

PER_NODE = {"torchrun": "--nproc-per-node", "SLURM": "--ntasks-per-node"}
"""Option for the number of ranks on a node, by the external launcher's name."""


class RankLauncher(SubprocessLauncher):
    """Lightning launcher that starts the other ranks, and reports this rank's exception to them before the clean-up.

    Lightning's launcher leaves child processes running when rank 0 raises, and kills rank 0 when a child has failed.
    Here the failure watch ends all ranks; before it has started, the failure of a child ends rank 0, and vice versa.
    """

    def launch(self, function: Callable[..., T], *args: object, trainer: Trainer | None = None, **kwargs: object) -> T:
        """Start the other ranks, unless torchrun or SLURM has, and return the result of ``function`` on this rank."""
        check_launch(self.num_processes, self.num_nodes)
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            if self.cluster_environment.node_rank() == 0:
                os.environ.setdefault("MASTER_PORT", str(find_port()))
                check_port(self.cluster_environment.main_port)
            self._call_children_scripts()
            threading.Thread(target=_end_with, args=(self.procs,), name="child-watch", daemon=True).start()
        if execution_mode() is not ExecutionMode.WORKER:  # a worker has its share
            share_host_threads(self.num_processes)
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            # The callbacks' on_exception comes later and takes long, since engines have to close.
            report_failure(error)
            if active_watch() is None:
                end_children(self.procs, 0)  # the other ranks wait in the rendezvous
            raise

    def kill(self, signum: int) -> None:
        """Forward a signal to the ranks started here, but not SIGKILL while a failure watch runs, which ends them."""
        if signum != signal.SIGKILL or active_watch() is None:
            super().kill(signum)


def check_launch(num_devices: int, num_nodes: int) -> None:
    """Raise a ConfigError for numbers of devices and nodes that differ from those of torchrun or SLURM."""
    launch = read_launch(os.environ)
    wanted = num_devices * num_nodes
    if launch is None or launch.launcher not in PER_NODE or launch.world_size == wanted:
        return
    per_node, rest = divmod(launch.world_size, num_nodes)
    fitting = f"Set trainer.devices={per_node}, or" if not rest else "Set trainer.num_nodes to its number of nodes, or"
    raise ConfigError(
        f"trainer.devices={num_devices} x trainer.num_nodes={num_nodes} {'are' if wanted > 1 else 'is'} {wanted} "
        f"rank{'s' if wanted > 1 else ''}, but {launch.launcher} started {launch.world_size}. "
        f"{fitting} {PER_NODE[launch.launcher]} {num_devices}."
    )


def find_port() -> int:
    """Return a free port below the system's range for ephemeral ports.

    An ephemeral port, which Lightning would choose, may be taken by another program before the ranks connect.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def check_port(port: int) -> None:
    """Raise a ConfigError for a rendezvous port that another program uses, before ranks are started."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does: a port that is closing is free
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(
                f"MASTER_PORT={port} cannot be listened on ({error.strerror}). Set it to a free port, or leave it out."
            ) from error


def describe_rendezvous(error: Exception) -> ConfigError:
    """Return a ConfigError that explains why the ranks could not connect at MASTER_ADDR, from torch's ``error``."""
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "")
    reason = cut_line(str(error).partition("\n")[0])
    if isinstance(error, dist.DistStoreError):
        return ConfigError(
            f"The ranks have not all come: {reason.rstrip('.')}. See why the others have not started; if they take so "
            "long, raise trainer.strategy.barrier_timeout."
        )
    if "EADDRINUSE" in str(error):
        return ConfigError(f"MASTER_PORT={port} is taken by another program. Set it to a free port, for all ranks.")
    took_too_long = "timed out" in str(error).lower()
    longer = "; if rank 0 takes so long to start, raise trainer.strategy.barrier_timeout" if took_too_long else ""
    return ConfigError(
        f"The ranks cannot meet at MASTER_ADDR={address}, MASTER_PORT={port}: {reason.rstrip('.')}. Both are rank 0's, "
        f"and have to be reachable from every rank{longer}."
    )


def _end_with(children: "list[subprocess.Popen[bytes]]") -> None:
    """Wait until the failure watch has started, and pass it the children; end this process if a child fails before."""
    while (watch := active_watch()) is None:
        codes = {rank: child.poll() for rank, child in enumerate(children, start=1)}
        for rank, code in codes.items():
            if code:
                # The child has shown its own message; the other ranks wait for it in the rendezvous.
                log.error("rank 0 ends because rank %d ended with exit code %d before the ranks had met", rank, code)
                end_children(children, 0)
                exit_now(code if code > 0 else 1)
        if all(code == 0 for code in codes.values()):
            return
        time.sleep(intervals.POLL_INTERVAL)
    watch.children = children
