"""Standalone engines as Ray actors, which Ray places on separate devices anywhere in the cluster.

::

    controller                 actor                                    workers
    start_engines  ------->    EngineActor: what `rlightning serve`
                               runs, on the devices that Ray gave it
                   <-------    tcp://host:port
    WorkerConfig   ----------------------------------------------->     rollout.engines: [tcp://host:port]
"""

import copy
import logging
import os
import secrets
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlightning import intervals
from rlightning.controller.cluster import import_ray
from rlightning.controller.driver import DriverContext
from rlightning.controller.worker_group import describe_resources
from rlightning.errors import ConfigError
from rlightning.protocols import SampledPolicy
from rlightning.rollout.engine_options import EngineOptions, HasEngineOptions
from rlightning.rollout.sampler import Sampling
from rlightning.rollout.service import EngineService, open_listener
from rlightning.rpc import make_url

log = logging.getLogger(__name__)


class EngineActor:
    """An engine that serves one trainer after another; the class of the Ray actors."""

    def __init__(self, driver: DriverContext) -> None:
        driver.enter()
        import ray

        find_address: Any = ray.util.get_node_ip_address
        self._host = str(find_address())
        self._listener: socket.socket = open_listener(self._host, 0)
        self._has_run = False

    def url(self) -> str:
        """Return the URL at which the engine will listen."""
        return make_url(self._host, self._listener.getsockname()[1])

    def run(
        self,
        options: EngineOptions,
        module: SampledPolicy,
        sampling: Sampling,
        max_prompt_tokens: int | None,
        log_file: Path,
        key: str,
    ) -> None:
        """Start the engine and serve trainers until an exception. Later calls do nothing.

        Args:
            options: engine options of the rollout callback.
            module: the user's module, before its weights are loaded.
            sampling: settings of training completions.
            max_prompt_tokens: maximum tokens of a prompt; None for the model's limit.
            log_file: the engine's log.
            key: shared key with which trainers authenticate.
        """
        if self._has_run:
            return
        self._has_run = True
        device = torch.device("cuda" if os.environ.get("CUDA_VISIBLE_DEVICES") else "cpu")
        config = options.configure_served(module, device, sampling, max_prompt_tokens, log_file)
        EngineService(config, self._listener, key.encode()).run(lambda: None)


class RayEngines:
    """The standalone engines of a run as Ray actors, which outlive the training workers.

    Args:
        callback: the rollout callback that uses the engines.
    """

    def __init__(self, callback: HasEngineOptions) -> None:
        self.callback = callback
        self.run_key: str | None = None
        self.actors: list[Any] = []
        self.runs: list[Any] = []
        self._uses_gpus = False

    def check_room(self, num_workers: int, each: dict[str, float]) -> None:
        """Raise a ConfigError if the Ray cluster has too few GPUs, or CPUs, for the engines in addition to the workers.

        Raises:
            ConfigError: names the needed and the available resources.
        """
        options = self.callback.options
        has = import_ray().cluster_resources()
        self._uses_gpus = each.get("GPU", 0) > 0
        kind = "GPU" if self._uses_gpus else "CPU"
        per_engine = options.devices_per_engine if self._uses_gpus else 1
        needed = num_workers * each[kind] + options.num_engines * per_engine
        if needed > has.get(kind, 0):
            raise ConfigError(
                f"rollout.num_engines={options.num_engines} x {per_engine} {kind}s beside num_workers={num_workers} x "
                f"{each[kind]:g} are {needed:g}, but the Ray cluster has {has.get(kind, 0):g}. Lower either, or add "
                "nodes."
            )

    def start(
        self, module: object, max_prompt_tokens: int | None, folder: Path, driver: DriverContext
    ) -> HasEngineOptions:
        """Start the engines unless they are running; return before they are up.

        Args:
            module: the user's module, before its weights are loaded.
            max_prompt_tokens: maximum tokens of a prompt; None for the model's limit.
            folder: folder for the engines' logs.
            driver: settings of this process that the actors adopt.

        Returns:
            A copy of the callback with the engines' URLs.

        Raises:
            ConfigError: Ray lacks the resources for an actor.
        """
        ray = import_ray()
        if not self.actors:
            self._start_actors(driver)
        try:
            urls: list[str] = ray.get(
                [actor.url.remote() for actor in self.actors], timeout=intervals.ACTOR_START_TIMEOUT
            )
        except ray.exceptions.GetTimeoutError:
            raise ConfigError(
                f"rollout.num_engines={len(self.actors)}: their actors have not started in "
                f"{intervals.ACTOR_START_TIMEOUT:g} s; free in the Ray cluster are "
                f"{describe_resources(ray.available_resources())}. Lower num_engines or "
                "engine.tensor_parallel_size, or end what else runs there."
            ) from None
        options, sampling = self.callback.options, self.callback.sampling
        shared = None if self.runs else ray.put(module)
        for number, actor in enumerate([] if self.runs else self.actors):
            log_file = folder.absolute() / f"engine.{number}.log"
            run = actor.run.options(concurrency_group="serve")
            self.runs.append(run.remote(options, shared, sampling, max_prompt_tokens, log_file, self.run_key))
        log.info("engines: %s", ", ".join(urls))
        knowing = copy.copy(self.callback)
        knowing.options = replace(options, engines=tuple(urls))
        return knowing

    def _start_actors(self, driver: DriverContext) -> None:
        options = self.callback.options
        actor = import_ray().remote(concurrency_groups={"serve": 1})(EngineActor)
        gpus = options.devices_per_engine if self._uses_gpus else 0
        self.run_key = secrets.token_hex(16)
        reserved = {"num_cpus": 1, "num_gpus": gpus, **driver.actor_options}
        self.actors = [actor.options(**reserved).remote(driver) for _ in range(options.num_engines)]

    def close(self) -> None:
        """Kill the Ray actors of the engines; :meth:`start` then starts new ones."""
        ray = import_ray()
        if ray.is_initialized():
            for actor in self.actors:
                ray.kill(actor)
        self.actors, self.runs = [], []
