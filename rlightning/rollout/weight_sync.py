"""Weight syncs: which samplers need the actor's weights, the hooks around each sync, and its verification.

The same code is used for engines (:class:`~rlightning.rollout.rank_engines.RankEngines`) and for a sampler in the
trainer's process (:class:`~rlightning.rollout.in_process.InProcessSamplers`).
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import NamedTuple

from rlightning.errors import EngineDiedError, EngineError
from rlightning.hooks import RLCallback, call_hook
from rlightning.parallel.collectives import gather_objects, global_rank
from rlightning.protocols import HasAdapter, Loop, SampledPolicy, has
from rlightning.rollout.canary import Verification, VerifiedSampler
from rlightning.rollout.engine_pool import EngineId, EnginePool
from rlightning.rollout.placement import COLLECTOR_RANK
from rlightning.rollout.weights import WeightSource
from rlightning.rpc.client import LoopThread

log = logging.getLogger(__name__)


class SamplerStates(NamedTuple):
    """What a rank reports to the other ranks about its samplers before a weight sync.

    Attributes:
        is_stale: whether a sampler of the rank needs weights.
        serving: indices of the samplers that have the current weights.
        num_living: number of samplers that run, or will be restarted.
        num_samplers: number of all samplers of the rank.
        error: error of the last sampler that will not be restarted; None if there is none.
        refusal: why a sampler cannot start with room for the adapter, if it can get merged weights; "" if none.
    """

    is_stale: bool
    serving: list[int]
    num_living: int
    num_samplers: int
    error: EngineError | None = None
    refusal: str = ""


class RankSamplers(ABC):
    """Base class for the samplers of a rank. Each rank creates one, and all ranks call its methods in the same order.

    The methods that are not abstract are for samplers that cannot die.

    Attributes:
        samplers: this rank's samplers; empty on a rank that only sends weights.
        is_colocated: whether weights are sent only while no sampler samples, and to all samplers.
        can_sleep: whether samplers free their device memory while they are not needed.
    """

    samplers: Sequence[VerifiedSampler]
    is_colocated: bool = True
    can_sleep: bool

    @property
    def reachable(self) -> Sequence[VerifiedSampler]:
        """Samplers that a weight sync can send weights to now, or that it waits for."""
        return self.samplers

    @property
    def dead(self) -> Sequence[int]:
        """Indices of the dead samplers that will be restarted."""
        return ()

    @property
    def is_starting(self) -> bool:
        """Whether the run has to wait for a sampler to start."""
        return False

    def restart_dead(self) -> None:
        """Restart dead samplers, which then need weights."""
        return

    def wait_for_start(self) -> None:
        """Block until :attr:`is_starting` is false: enough samplers have started, or died, for the run to continue."""
        return

    def merge_adapter(self) -> None:
        """Restart the samplers so that they get base and adapter merged; called after a refusal on any rank."""
        return

    def needs_sync(self) -> bool:
        """Return whether a sampler cannot sample until it is sent weights, as after a restart, even if others can."""
        return False

    @abstractmethod
    def states(self, weight_version: int) -> SamplerStates:
        """Return the states of this rank's samplers, to be sent to other ranks."""

    @abstractmethod
    def sleep_before_sync(self) -> None:
        """Free the memory of samplers that have weights, since a weight sync of other samplers needs it."""

    @abstractmethod
    def update_weights(
        self,
        source: WeightSource,
        weight_version: int,
        on_loaded: Callable[[], None],
        *,
        among: Sequence[VerifiedSampler],
    ) -> Sequence[VerifiedSampler]:
        """Have some samplers that lack the actor's weights load them and sample from them; every rank must call it.

        Args:
            source: source of the weights.
            weight_version: version of the weights.
            on_loaded: called when the samplers have the weights; engines then allocate their KV cache.
            among: the samplers of this rank to which weights may be sent.

        Returns:
            The samplers that sample from the weights; one that died meanwhile has none.
        """


class WeightSync:
    """Sends the actor's weights to the samplers of all ranks. Each rank creates one, and calls it at the same points.

    Args:
        trainer: the loop whose callbacks' hooks are called at each sync.
        module: the module with the actor's weights.
        samplers: this rank's samplers.
        verification: verifies the weights of the samplers after a sync.
        memory: frees memory on a device that engines share with the actor; None if that is not needed.
        pool: on rank 0, the pool of the engines of all ranks; None on other ranks, and without a pool.
        loop: event loop of the pool.
    """

    def __init__(
        self,
        trainer: Loop,
        module: SampledPolicy,
        samplers: RankSamplers,
        verification: Verification,
        memory: RLCallback | None = None,
        pool: EnginePool | None = None,
        loop: LoopThread | None = None,
    ) -> None:
        self._trainer, self._module, self._samplers = trainer, module, samplers
        self._verification, self._memory = verification, memory or RLCallback()
        self._pool, self._loop = pool, loop

    def sync_weights(self) -> None:
        """Send the actor's current weights to all engines that lack them; every rank must call it.

        Dead engines are restarted.

        Raises:
            EngineError: no engine is left.
        """
        samplers, version = self._samplers, self._module.weight_version
        while True:
            self._restart_dead()
            if not samplers.is_colocated:  # weights are sent to them only once they are up
                self._wait_for_start()
            states = gather_objects(samplers.states(version), name="weights are there")
            check_living(states)
            if refusal := next((state.refusal for state in states if state.refusal), ""):
                self._merge_adapter(refusal)
                continue
            if not any(state.is_stale for state in states):
                break
            if samplers.can_sleep and any(state.serving for state in states):
                samplers.sleep_before_sync()  # they use memory that the actor needs for the sync of others
            reachable = samplers.reachable  # an engine that starts meanwhile is sent weights, and verified, after this
            self._prove_adapter(reachable)
            self._send(reachable)
        if self._pool is not None and self._loop is not None:
            serving = {EngineId(rank, number) for rank, state in enumerate(states) for number in state.serving}
            self._loop.call(self._pool.set_serving, serving)

    def needs_sync(self) -> bool:
        """Return whether weights must be sent while requests wait; False except on rank 0, and without an engine pool.

        They must be if no engine is serving, or if a restarted engine lacks the current weights.
        """
        return self._pool is not None and (self._pool.num_serving == 0 or self._samplers.needs_sync())

    def _restart_dead(self) -> None:
        dead = self._samplers.dead
        if not dead:
            return
        if self._pool is not None and self._loop is not None:
            self._loop.call(self._pool.remove, {EngineId(COLLECTOR_RANK, number) for number in dead})
        if self._samplers.can_sleep:  # a starting engine allocates all of its memory immediately
            self._memory.on_weight_sync_start(self._trainer, self._module, self._module.weight_version)
        self._samplers.restart_dead()

    def _wait_for_start(self) -> None:
        """Wait until there is an engine to send weights to. One that died meanwhile is detected at the next sync."""
        if self._samplers.is_starting:
            call_hook(self._trainer, self._module, "on_engine_start")
            self._samplers.wait_for_start()
            call_hook(self._trainer, self._module, "on_engine_ready")

    def _merge_adapter(self, reason: str) -> None:
        """Have all engines start again for merged weights, as they cannot start with room for the adapter."""
        assert has(self._module, HasAdapter), "engines were started for its adapter"
        if global_rank() == 0:
            log.warning(
                "Engines are sent base and adapter merged, rounded to their dtype: vLLM cannot start with an adapter "
                "of this model (%s). rollout.send_adapter: false spares the attempt.",
                reason,
            )
        self._module.sends_adapter = False
        if self._samplers.can_sleep:  # a starting engine allocates all of its memory immediately
            self._memory.on_weight_sync_start(self._trainer, self._module, self._module.weight_version)
        self._samplers.merge_adapter()

    def _prove_adapter(self, reachable: Sequence[VerifiedSampler]) -> None:
        """Send a test adapter to engines that have not yet been shown to apply one; a new one changes no outputs."""
        if self._verification.needs_proof(self._module, reachable):
            updated = self._send([sampler for sampler in reachable if not sampler.is_proven], is_proof=True)
            if self._samplers.can_sleep:
                self._samplers.sleep_before_sync()
            for sampler in updated:  # it gets other weights next
                sampler.weight_version, sampler.is_verified = None, False

    def _send(self, among: Sequence[VerifiedSampler], *, is_proof: bool = False) -> Sequence[VerifiedSampler]:
        """Send the actor's weights, or a test adapter; a collective, even if only one rank has an engine that needs it.

        Args:
            among: the samplers of this rank to which weights may be sent.
            is_proof: whether to send a test adapter.

        Returns:
            The samplers of this rank that sample from them.
        """
        trainer, module, samplers, version = self._trainer, self._module, self._samplers, self._module.weight_version
        call_hook(trainer, module, "on_weight_sync_start", version)
        if samplers.can_sleep:
            self._memory.on_weight_sync_start(trainer, module, version)
        with ExitStack() as perturbation:
            if is_proof and has(module, HasAdapter):
                perturbation.enter_context(module.perturbed_adapter())
            # Before the engine wakes: afterwards the actor's memory may be offloaded.
            is_due = self._verification.evaluate(module, among, is_proof=is_proof)
            self._wait_for_start()
            on_loaded = partial(self._make_room, perturbation)
            updated = samplers.update_weights(module, version, on_loaded, among=among)
        for sampler in updated if is_due else ():
            with suppress(EngineDiedError):  # its death is detected at the next sync
                self._verification.verify(module, sampler)
                sampler.is_proven |= is_proof
        if samplers.can_sleep:
            self._memory.on_weight_sync_end(trainer, module, version)
        call_hook(trainer, module, "on_weight_sync_end", version)
        return updated

    def _make_room(self, perturbation: ExitStack) -> None:
        """Free device memory for KV caches, once the engines have the weights; ``perturbation`` ends before."""
        perturbation.close()
        if self._samplers.can_sleep:
            call_hook(self._trainer, self._module, "on_engine_wake")
            self._memory.on_engine_wake(self._trainer, self._module)


def check_living(states: Sequence[SamplerStates]) -> None:
    """Raise an EngineError if no engine of any rank is left."""
    if any(state.num_living for state in states):
        return
    number = sum(state.num_samplers for state in states)
    error = next(state.error for state in states if state.error is not None)
    if number == 1:
        raise error
    raise EngineError(f"No engine is left of {number}. The last one: {error.line}", error.details) from error
