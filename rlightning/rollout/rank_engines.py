"""The engines of a rank: their processes and their weights.

::

    ranks                 0        1        2        3              rollout.engine.tensor_parallel_size: 2
    colocated engines     0 ------------    1 ------------          a process belongs to its first rank
    bucket of weights     0        1        2        3              one a rank, on its own device

    ranks                 0        1        2        3              rollout.placement: standalone
    engines               all of them, on other devices
    bucket of weights     0                                         the other ranks send their shards to rank 0
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial

from rlightning import intervals
from rlightning.errors import AdapterRefusedError, EngineDiedError, EngineError, EngineStartError
from rlightning.parallel.barrier import barrier
from rlightning.parallel.collectives import any_rank, global_rank, world_size
from rlightning.processes.liveness import RestartPolicy
from rlightning.protocols import HasAdapter, has
from rlightning.rollout.canary import VerifiedSampler
from rlightning.rollout.engine import Engine
from rlightning.rollout.engine_config import EngineConfig
from rlightning.rollout.placement import COLLECTOR_RANK, lent_devices
from rlightning.rollout.vllm.adapter_support import without_adapter
from rlightning.rollout.weight_sync import RankSamplers, SamplerStates
from rlightning.rollout.weights import WeightSource
from rlightning.rollout.weights.driver import WeightSender, WeightUpdater
from rlightning.rollout.weights.source import AdapterSource
from rlightning.rollout.weights.transports import make_colocated_sender, make_standalone_sender

log = logging.getLogger(__name__)

MAX_RESTARTS = 1
"""Maximum number of restarts of one engine in a step."""


class RankEngines(RankSamplers):
    """The engines of this rank. Each rank creates one, and all ranks call the same methods in the same order.

    A dead engine is restarted at the next weight sync, at most once in a step. The run continues without engines that
    die twice in a step, or cannot be restarted, as long as another engine is left.

    Args:
        configs: configurations of this rank's engines; on ranks without engines, which only send weights, of rank 0's.
        engines: this rank's engines.
        make_sender: creates the sender of the weights.
        is_colocated: whether engines share devices with actors. The run then waits until all engines are up, and sends
            weights only while none of them samples.
        is_shared: whether ranks share an engine.
        keeps_cache: see :class:`~rlightning.rollout.weights.driver.WeightUpdater`.

    Attributes:
        pause_seconds: seconds for which the last weight sync paused engines that were sampling.
    """

    samplers: list[Engine]

    def __init__(
        self,
        configs: Sequence[EngineConfig],
        engines: Sequence[Engine],
        make_sender: Callable[[WeightSource], WeightSender],
        *,
        is_colocated: bool,
        is_shared: bool = False,
        keeps_cache: bool = True,
    ) -> None:
        self.config, self.samplers, self.can_sleep = configs[0], list(engines), configs[0].can_sleep
        self.is_colocated, self.is_shared, self.keeps_cache = is_colocated, is_shared, keeps_cache
        self.pause_seconds = 0.0
        self._make_sender = make_sender
        self._updater: WeightUpdater | None = None
        self._restarts = [RestartPolicy(MAX_RESTARTS) for _ in engines]
        self._lost: dict[int, EngineError] = {}  # indices of the engines that are not restarted
        self._has_served = self._has_waited = False

    # Processes

    def start(self) -> None:
        """Start the engines' processes; returns before they are up."""
        for engine in self.samplers:
            engine.start()

    def wait_for_first(self) -> None:
        """Wait until the first of the started engines is up or has failed.

        Raises:
            EngineStartError: that engine could not start, and is not started again for merged weights.
        """
        starts = [engine.ready for engine in self.samplers if engine.process is not None]
        for start in wait(starts, return_when=FIRST_COMPLETED).done:
            if isinstance(error := start.exception(), EngineStartError) and not self._will_merge(error):
                raise error

    @property
    def living(self) -> list[Engine]:
        """Engines that run, or that will be restarted."""
        return [engine for number, engine in enumerate(self.samplers) if number not in self._lost]

    @property
    def reachable(self) -> list[Engine]:
        """Engines that a weight sync can send weights to: standalone ones that are up, colocated ones that start, too.

        A sync waits for colocated engines.
        """
        return [engine for engine in self.living if self.is_colocated or engine.is_up]

    @property
    def dead(self) -> list[int]:
        """Indices of the engines that have died and will be restarted."""
        return [n for n, engine in enumerate(self.samplers) if n not in self._lost and not engine.is_alive]

    @property
    def is_starting(self) -> bool:
        """Whether the run has to wait until an engine of this rank has started (:meth:`wait_for_start`)."""
        starting = [engine for engine in self.living if engine.is_alive and not engine.is_up]
        has_one = self._has_waited and any(engine.is_up for engine in self.living)
        return bool(starting) and (self.is_colocated or not has_one)

    def wait_for_start(self) -> None:
        """Block until each engine of this rank is up or dead; with standalone engines, until one is up.

        The first call also waits up to ``intervals.ENGINE_START_GRACE`` seconds for the other standalone engines, since
        otherwise the first engine would get all requests.
        """
        while starting := [engine.ready for engine in self.living if engine.is_alive and not engine.is_up]:
            if not self.is_colocated and any(engine.is_up for engine in self.living):
                break
            wait(starting, timeout=intervals.POLL_INTERVAL, return_when=FIRST_COMPLETED)
        if not self._has_waited:
            wait(starting, timeout=intervals.ENGINE_START_GRACE)
        self._has_waited = True

    def needs_sync(self) -> bool:
        """Return whether a standalone engine of this rank has died, or is up without weights, and so needs a sync.

        The sync may take place while other engines sample. False for colocated engines.
        """
        if self.is_colocated:
            return False
        return bool(self.dead) or any(engine.is_up and engine.weight_version is None for engine in self.living)

    def restart_dead(self) -> None:
        """Restart dead engines, within their restart budget; they then need weights.

        Raises:
            EngineError: a colocated engine cannot be restarted.
        """
        for number in self.dead:
            engine = self.samplers[number]
            error = engine.error
            assert error is not None, "it is dead"
            if self._will_merge(error):
                continue  # all ranks start theirs again: merge_adapter
            if not isinstance(error, EngineDiedError):
                if self.is_colocated and not self._has_served:
                    raise error
            elif self._restarts[number].take():
                how = "connected to again" if engine.config.url else "restarted"
                log.warning("%s is %s, once in this step: %s", self._describe(number), how, error.line)
                try:
                    engine.start()
                    continue
                except (EngineError, OSError) as problem:
                    error = EngineError(f"The engine cannot be started: {problem}")
            else:
                error = EngineError(f"The engine died twice in one step. {error.line}", error.details)
            self._lost[number] = error
            log.warning("%s is not restarted: %s", self._describe(number), error.line)

    def merge_adapter(self) -> None:
        """Start this rank's engines again, without room for an adapter: they get base and adapter merged."""
        self.close()  # the updater sends the adapter separately
        self.config = self._without_adapter(self.config)
        self._lost.clear()
        for engine in self.samplers:
            engine.config = self._without_adapter(engine.config)
            engine.start()

    @staticmethod
    def _without_adapter(config: EngineConfig) -> EngineConfig:
        return replace(config, engine_args=without_adapter(config.engine_args))

    def _will_merge(self, error: EngineError | None) -> bool:
        """Return whether an engine that ended with ``error`` is started again for merged weights."""
        is_refusal = isinstance(error, AdapterRefusedError)
        return is_refusal and self.config.has_adapter and self.config.may_merge and not self._has_served

    def reset_restart_budget(self) -> None:
        """Allow one more restart of each engine; called at the beginning and at the end of a step."""
        for policy in self._restarts:
            policy.reset()

    def sleep(self) -> None:
        """Have the engines free their device memory. An engine that dies meanwhile is detected at the next sync."""
        self._sleep([engine for engine in self.samplers if engine.is_alive])
        if self.is_shared:
            barrier("engine sleeps")

    def sleep_before_sync(self) -> None:
        """Have engines with weights free their memory, which a weight sync of other engines needs."""
        self._sleep([engine for engine in self.samplers if engine.weight_version is not None])

    def _sleep(self, engines: Sequence[Engine]) -> None:
        pool = ThreadPoolExecutor(max(len(engines), 1))
        try:
            for engine, done in [(engine, pool.submit(engine.sleep)) for engine in engines]:
                try:
                    done.result()
                except EngineDiedError as error:
                    number = self.samplers.index(engine)
                    log.warning("%s died while it freed its memory: %s", self._describe(number), error.line)
        finally:
            pool.shutdown(wait=False)  # an interrupted run need not wait for engines, which are ended next

    def close(self) -> None:
        """End the engines, and free the bucket of weights. May be called twice; not a collective."""
        for engine in self.samplers:
            engine.close()
        if self._updater is not None:
            self._updater.close()
            self._updater = None

    # Weights

    def states(self, weight_version: int) -> SamplerStates:
        """Return which of this rank's engines have weights of this version, and how many run or will be restarted."""
        living = self.living
        return SamplerStates(
            is_stale=any(engine.weight_version != weight_version for engine in self.reachable),
            serving=[n for n, engine in enumerate(self.samplers) if engine.weight_version == weight_version],
            num_living=len(living),
            num_samplers=len(self.samplers),
            error=next(reversed(self._lost.values()), None),
            refusal=next(filter(None, map(self._find_refusal, living)), ""),
        )

    def _find_refusal(self, engine: Engine) -> str:
        """Return why an engine cannot start with room for the adapter, if it gets merged weights instead; else ""."""
        error = engine.error
        return error.reason if isinstance(error, AdapterRefusedError) and self._will_merge(error) else ""

    def update_weights(
        self,
        source: WeightSource,
        weight_version: int,
        on_loaded: Callable[[], None],
        *,
        among: Sequence[VerifiedSampler],
    ) -> Sequence[Engine]:
        """Send the actor's weights to engines that lack them (:meth:`RankSamplers.update_weights`)."""
        self._has_waited = True  # the run has begun: from now on one engine that is up suffices
        stale = [engine for engine in self.living if engine.is_up and engine.weight_version != weight_version]
        stale = [engine for engine in stale if engine in among]
        if self.config.has_adapter:
            assert has(source, HasAdapter), "its adapter is what the engines were started for"
            lacks_base = any(not engine.has_base for engine in stale)
            source = AdapterSource(source, has_base=any_rank(lacks_base, name="engines lack the base"))
        if self._updater is None:
            sender = self._make_sender(source)
            self._updater = WeightUpdater(sender, keeps_cache=self.keeps_cache, is_shared=self.is_shared)
        is_pausing = any(engine.weight_version is not None for engine in stale)
        if self.is_colocated:
            for engine in stale:
                engine.weight_version = None
        processes = [engine.process for engine in stale if engine.process is not None]
        complete = self._updater.update_weights(source, weight_version, processes, on_loaded)
        if complete and is_pausing:
            self.pause_seconds = self._updater.seconds
        updated = [engine for engine in stale if engine.process in complete]
        for engine in stale:
            engine.weight_version = weight_version if engine in updated else None
        for engine in updated:
            engine.has_base = self._has_served = True
        return updated

    def _describe(self, number: int) -> str:
        return f"Engine {number}" if world_size() == 1 else f"Engine {number} of rank {global_rank()}"


def colocated_engines(configs: Sequence[EngineConfig], num_ranks: int = 1) -> RankEngines:
    """Create the engines on this rank's device; with ``num_ranks`` above 1 each on the devices of so many ranks.

    Every rank must call it. Engines are not started yet.

    Args:
        configs: configurations of the engines on this rank's device, as for a single rank.
        num_ranks: number of consecutive ranks on whose devices an engine runs: its ``tensor_parallel_size``.
    """
    first = global_rank() // num_ranks * num_ranks
    ranks = range(first, first + num_ranks)
    devices = lent_devices(configs[0].device, ranks)
    configs = [replace(config, visible_devices=devices) for config in configs]
    return RankEngines(
        configs,
        [Engine(config) for config in configs] if global_rank() == first else [],
        partial(make_colocated_sender, config=configs[0], ranks=ranks),
        is_colocated=True,
        is_shared=num_ranks > 1,
    )


def standalone_engines(configs: Sequence[EngineConfig], *, keeps_cache: bool = True) -> RankEngines:
    """Return a rank's part in engines on devices that no rank uses: all engines on rank 0, none on other ranks.

    Args:
        configs: configurations of the engines.
        keeps_cache: see :class:`~rlightning.rollout.weights.driver.WeightUpdater`.
    """
    return RankEngines(
        configs,
        [Engine(config) for config in configs] if global_rank() == COLLECTOR_RANK else [],
        partial(make_standalone_sender, configs=configs),
        is_colocated=False,
        keeps_cache=keeps_cache,
    )
