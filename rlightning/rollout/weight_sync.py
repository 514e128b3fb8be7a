"""Weight syncs: which engines need the actor's weights, and the hooks that tell callbacks of each sync."""

from contextlib import nullcontext, suppress
from typing import Protocol

from rlightning.errors import EngineDiedError
from rlightning.hooks import fire
from rlightning.parallel.collectives import gather_objects
from rlightning.protocols import HasAdapter, Loop, SampledPolicy, has
from rlightning.rollout.canary import Verification
from rlightning.rollout.engine_pool import EngineId, EnginePool
from rlightning.rollout.placement import COLLECTOR_RANK
from rlightning.rollout.rank_engines import RankEngines, check_living
from rlightning.rpc.client import LoopThread


class MemoryCallback(Protocol):
    """Makes room on a device that engines share with the actor, as a callback would."""

    def on_weight_sync_start(self, trainer: Loop, module: object, weight_version: int) -> None:
        """Called before engines wake, or start."""

    def on_engine_wake(self, trainer: Loop, module: object) -> None:
        """Called when they hold weights, and before they take the memory of their KV caches."""

    def on_weight_sync_end(self, trainer: Loop, module: object, weight_version: int) -> None:
        """Called when they are awake."""


class WeightSync:
    """Keeps the engines of all ranks at the actor's weights. All ranks make one, and call it alike."""

    def __init__(
        self,
        trainer: Loop,
        module: SampledPolicy,
        engines: RankEngines,
        verification: Verification,
        memory: MemoryCallback,
        pool: EnginePool | None = None,
        loop: LoopThread | None = None,
    ) -> None:
        self._trainer, self._module, self._engines = trainer, module, engines
        self._verification, self._memory = verification, memory
        self._pool, self._loop = pool, loop

    def sync_weights(self) -> None:
        """Send the actor's current weights to all engines that need them, until each has them; a collective.

        Engines that have died are started again.

        Raises:
            EngineError: no engine is left.
        """
        engines, version = self._engines, self._module.weight_version
        while True:
            self._restart_dead()
            if not engines.is_colocated:  # they are sent weights only once they are up
                self._wait_for_start()
            states = gather_objects(engines.states(version), name="weights are there")
            check_living(states)
            if not any(state.is_stale for state in states):
                break
            if engines.can_sleep and any(state.serving for state in states):
                engines.sleep_before_sync()  # they have memory that the actor needs, for the others' sync
            self._sync()
        if self._pool is not None and self._loop is not None:
            serving = {EngineId(rank, number) for rank, state in enumerate(states) for number in state.serving}
            self._loop.call(self._pool.set_serving, serving)

    def needs_sync(self) -> bool:
        """Whether, on rank 0, no engine serves, or an engine could be brought back beside those that do."""
        assert self._pool is not None
        return self._pool.num_serving == 0 or self._engines.needs_sync()

    def _restart_dead(self) -> None:
        dead = self._engines.dead
        if not dead:
            return
        if self._pool is not None and self._loop is not None:
            self._loop.call(self._pool.remove, {EngineId(COLLECTOR_RANK, number) for number in dead})
        if self._engines.can_sleep:  # an engine that starts takes all of its memory at once
            self._memory.on_weight_sync_start(self._trainer, self._module, self._module.weight_version)
        self._engines.restart_dead()

    def _wait_for_start(self) -> None:
        """Wait until there is an engine to send weights to. One that died meanwhile is found at the next sync."""
        if self._engines.is_starting:
            fire(self._trainer, self._module, "on_engine_start")
            self._engines.wait_for_start()
            fire(self._trainer, self._module, "on_engine_ready")

    def _sync(self) -> None:
        """Send the actor's weights; all ranks take part, though one alone may have an engine that needs them.

        Engines that are new to an adapter are sent another one before: of an adapter that changes nothing yet, as each
        does that has just been made, nothing can be seen.
        """
        engines = self._engines
        if self._verification.needs_proof(self._module, engines.engines):
            self._send(is_proof=True)
            if engines.can_sleep:
                engines.sleep_before_sync()
            engines.forget_weights()
        self._send()

    def _send(self, *, is_proof: bool = False) -> None:
        trainer, module, engines, version = self._trainer, self._module, self._engines, self._module.weight_version
        fire(trainer, module, "on_weight_sync_start", version)
        if engines.can_sleep:
            self._memory.on_weight_sync_start(trainer, module, version)
        with module.perturbed_adapter() if is_proof and has(module, HasAdapter) else nullcontext():
            # While the actor has the device: its memory may be somewhere else once the engine is awake.
            is_due = self._verification.evaluate(module, engines.engines, is_proof=is_proof)
            self._wait_for_start()
            engines.send_weights(module, version, unproven=is_proof)
        if engines.can_sleep:
            fire(trainer, module, "on_engine_wake")
            self._memory.on_engine_wake(trainer, module)
        engines.activate_weights(version)
        for engine in engines.updated if is_due else ():
            with suppress(EngineDiedError):  # it is found dead at the next sync
                self._verification.verify(module, engine)
                engine.is_proven |= is_proof
        if engines.can_sleep:
            self._memory.on_weight_sync_end(trainer, module, version)
        fire(trainer, module, "on_weight_sync_end", version)
