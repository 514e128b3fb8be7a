"""Chooses the transport that sends weights to a run's engines."""

import contextlib
import ipaddress
from collections.abc import Sequence

from rlightning import intervals
from rlightning.parallel.collectives import global_rank, world_size
from rlightning.rollout.engine_config import EngineConfig
from rlightning.rollout.placement import COLLECTOR_RANK
from rlightning.rollout.weights.broadcast import BroadcastSender
from rlightning.rollout.weights.driver import WeightSender
from rlightning.rollout.weights.files import FileSender
from rlightning.rollout.weights.rendezvous import find_own_address
from rlightning.rollout.weights.shared_memory import SharedMemorySender
from rlightning.rollout.weights.source import ChunkPlan, WeightSource, plan_source
from rlightning.rpc.authentication import parse_url


def make_colocated_sender(source: WeightSource, config: EngineConfig, ranks: Sequence[int]) -> WeightSender:
    """Return this rank's sender to engines on its own device.

    Args:
        source: source of the weights.
        config: configuration of the engines.
        ranks: consecutive ranks, including this one, on whose devices one engine runs.
    """
    return SharedMemorySender(_plan(source, config), config.device, ranks=ranks)


def make_standalone_sender(source: WeightSource, configs: Sequence[EngineConfig]) -> WeightSender:
    """Return this rank's sender to standalone engines; only rank 0 is connected to them."""
    config = configs[0]
    plan = _plan(source, config)
    if global_rank() != COLLECTOR_RANK:
        return WeightSender(plan, destination=COLLECTOR_RANK)
    destination = COLLECTOR_RANK if world_size() > 1 else None
    # A receiving worker answers no other call, and must not count as hanging.
    timeout = min(intervals.TRANSFER_TIMEOUT, config.hang_timeout / 2)
    if config.weight_folder is not None:
        folder = config.weight_folder
        return FileSender(plan, config.device, folder=folder, timeout=timeout, destination=destination)
    urls = [config.url for config in configs if config.url]
    if config.device.type == "cpu" and not urls:
        return SharedMemorySender(plan, config.device, destination=destination)
    return BroadcastSender(plan, config.device, host=own_address(urls), timeout=timeout, destination=destination)


def own_address(urls: Sequence[str]) -> str:
    """Return the address of this machine that engines at ``urls`` can reach; the loopback address if all are local."""
    found = "127.0.0.1"
    for url in urls:
        with contextlib.suppress(OSError):
            found = find_own_address(*parse_url(url))
            if not ipaddress.ip_address(found).is_loopback:
                break
    return found


def _plan(source: WeightSource, config: EngineConfig) -> ChunkPlan:
    return plan_source(source, config.dtype, config.bucket_bytes)
