"""Engines on devices of their own, for all ranks together; they generate while the actor is updated.

::

    ranks                 0        1        2        3
    engines               pool                                      one or many, whatever the number of ranks
    bucket of weights     0                                         the others give their shards of the weights
    prompts               own  ->  0  <---  own  <-  own            completions go back the same way

Rank 0 decides what happens next, and the others follow. What is handed in is in flight until it is consumed, and
``max_staleness`` bounds the age of what is consumed (:mod:`rlightning.rollout.in_flight`).
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlightning import intervals
from rlightning.errors import EngineDiedError
from rlightning.parallel.collectives import exchange, gather_objects, global_rank, world_size
from rlightning.rollout.async_metrics import Pace
from rlightning.rollout.engine import Engine
from rlightning.rollout.engine_config import EngineConfig
from rlightning.rollout.engine_connection import EngineConnection
from rlightning.rollout.engine_pool import Answer, EnginePool, Member
from rlightning.rollout.in_flight import OWNER, STOPPED, Consumed, Group, InFlight, ages
from rlightning.rollout.sampler import OnCompleted, Request, Sampling, sampling_settings
from rlightning.rollout.weights import WeightSource
from rlightning.rollout.weights.driver import WeightUpdater
from rlightning.rollout.weights.transports import make_standalone_sender
from rlightning.types import Sample, Trajectory

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class StepTotals:
    """Of all that a step consumes, at once or, with refills, by and by.

    Attributes:
        ages: of each token, in updates: [T] by part.
        expired: prompts that had grown too old.
        stopped: prompts that were under way when there were enough, and have to begin again.
        waited: seconds that the trainer waited for completions.
        idle: seconds that an engine had nothing to do, in the mean.
    """

    ages: list[NDArray[np.int64]] = field(default_factory=list)
    expired: int = 0
    stopped: int = 0
    waited: float = 0.0
    idle: float = 0.0

    def metrics(self, max_staleness: int, weight_version: int) -> dict[str, float]:
        """By the names of docs/metrics.md, in a step that updates the weights of this version."""
        age = np.concatenate([np.zeros(0, np.int64), *self.ages])
        shares = np.bincount(age, minlength=max_staleness + 1) / max(len(age), 1)
        mean, oldest = (float(age.mean()), float(age.max())) if len(age) else (0.0, 0.0)
        return {
            "async/age_mean": mean,
            "async/age_max": oldest,
            **{f"async/age_{years}": float(share) for years, share in enumerate(shares)},
            "async/version_trained": float(weight_version),
            "async/version_sampled_mean": weight_version - mean,
            "async/version_sampled_min": weight_version - oldest,
            "async/expired": float(self.expired),
            **({} if max_staleness else {STOPPED: float(self.stopped)}),
            "async/trainer_waited": self.waited,
            "async/engines_idle": self.idle,
        }


class Arrivals(Generic[T]):
    """Answers in the order in which they come in.

    Args:
        on_arrival: called with each, in any thread.
    """

    def __init__(self, on_arrival: Callable[[], None]) -> None:
        self._on_arrival = on_arrival
        self._asked: dict[Answer, T] = {}
        self._came: SimpleQueue[Answer] = SimpleQueue()

    def expect(self, asker: T, answer: Answer) -> None:
        """Wait for ``answer`` on behalf of ``asker``."""
        self._asked[answer] = asker

        def note(answer: Answer) -> None:
            self._came.put(answer)
            self._on_arrival()

        answer.add_done_callback(note)

    def forget(self, askers: Sequence[T]) -> list[Answer]:
        """Wait no more for these; the answers that they will not get."""
        unwanted = [answer for answer, asker in self._asked.items() if asker in askers]
        for answer in unwanted:
            del self._asked[answer]
        return unwanted

    def __len__(self) -> int:
        return len(self._asked)

    def __iter__(self) -> Iterator[tuple[T, list[Sample]]]:
        """Those that have come in since the last time."""
        while True:
            try:
                answer = self._came.get_nowait()
            except Empty:
                return
            if answer in self._asked:
                yield self._asked.pop(answer), answer.result()


class StandaloneEngines:
    """The engines of a run, on devices of their own. All ranks make one, and call it alike.

    Args:
        configs: of the engines.
        in_flight: what has been handed in before, and will be.
        engines_key: see :class:`~rlightning.rollout.async_metrics.Pace`.
        keeps_cache: see :class:`~rlightning.rollout.weights.driver.WeightUpdater`.

    Attributes:
        fresh: engines of this rank that were given weights last.
    """

    can_sleep = False

    def __init__(
        self,
        configs: Sequence[EngineConfig],
        in_flight: InFlight,
        *,
        engines_key: str = "rollout.num_engines",
        keeps_cache: bool = True,
    ) -> None:
        self.config, self._configs = configs[0], configs
        self.in_flight = in_flight
        self._keeps_cache = keeps_cache
        self.fresh: list[Engine] = []
        self._changed = threading.Event()
        self._pool = EnginePool(configs, self._changed.set) if global_rank() == OWNER else None
        self._updater: WeightUpdater | None = None
        self._stale: dict[Member, EngineConnection] = {}
        self._is_paused = False
        self._pause_seconds = 0.0
        self._arrivals: Arrivals[Group] = Arrivals(self._changed.set)
        self._pace = Pace(in_flight.max_staleness, len(configs), engines_key)
        self._waited_seconds = 0.0
        self._totals = StepTotals()

    # Their life

    @property
    def engines(self) -> list[Engine]:
        """Those that this rank owns."""
        return [] if self._pool is None else [member.engine for member in self._pool.members]

    def start(self) -> None:
        """Start the engines; returns before they are up."""
        if self._pool is not None:
            self._pool.start()

    def sleep(self) -> None:
        """They share no device with an actor: there is nothing to give back."""

    def forgive(self) -> None:
        """Let each engine die once more: a step begins, or has ended."""
        if self._totals.ages:  # several exchanges, where it was refilled; none, if this has been called for it
            sentence = self._pace.add(self._totals.waited, self._totals.idle)
            if sentence is not None:
                log.info(sentence)
        self._totals = StepTotals()
        if self._pool is not None:
            self._pool.forgive()

    def restart(self, error: EngineDiedError) -> None:
        """The pool has done so."""

    def close(self) -> None:
        """End the engines; what is in flight stays known. May be called twice."""
        if self._pool is not None:
            self._pool.close()
        if self._updater is not None:
            self._updater.close()
            self._updater = None

    # Weights

    @property
    def is_starting(self) -> bool:
        """Whether none of this rank's engines is up."""
        return self._pool is not None and not self._pool.has_up()

    def wait_for_start(self) -> None:
        """Block until one of this rank's engines is up.

        Raises:
            EngineError: no engine is left.
        """
        if self._pool is not None:
            self._pool.wait_for_one()

    def is_stale(self, weight_version: int) -> bool:
        """Whether an engine of this rank's is up and holds other weights; waits for the first that comes up.

        Raises:
            EngineError: no engine is left.
        """
        if self._pool is None:
            return False
        if not self._pool.serving_members(weight_version):
            self._pool.wait_for_one()
        self._pool.check()
        return bool(self._pool.stale_links(weight_version))

    def send_weights(self, source: WeightSource, weight_version: int) -> None:
        """Have each engine that is up and stale load the actor's weights; see :meth:`WeightUpdater.send_weights`.

        Args:
            source: of the weights.
            weight_version: of them.
        """
        if self._updater is None:
            self._updater = WeightUpdater(make_standalone_sender(source, self._configs), keeps_cache=self._keeps_cache)
        if self._pool is not None:
            self._stale = self._pool.stale_links(weight_version)
            self._is_paused = any(member.engine.weight_version is not None for member in self._stale)
        self._updater.send_weights(source, list(self._stale.values()))

    def activate_weights(self, weight_version: int) -> None:
        """Let the engines go on, with the weights that they were sent; those that were not stay paused."""
        assert self._updater is not None, "send_weights comes first"
        updated = self._updater.activate_weights(weight_version)
        if self._pool is None:
            return
        if updated and self._is_paused:
            self._pause_seconds = self._updater.seconds
        incomplete = {member: link for member, link in self._stale.items() if link not in updated}
        self._pool.note_weights(incomplete, None)
        held = {member: link for member, link in self._stale.items() if link in updated}
        self.fresh = [member.engine for member in self._pool.note_weights(held, weight_version)]
        self._pool.resume()

    # Completions

    def generate(
        self,
        requests: Sequence[Request],
        num_samples: int,
        sampling: Sampling,
        on_completed: OnCompleted | None,
        send_weights: Callable[[], None],
    ) -> list[list[Trajectory]]:
        """Complete this rank's requests, in their order, beside whatever is in flight.

        Args:
            requests: prompts, each with the number of its random stream.
            num_samples: completions of each.
            sampling: how.
            on_completed: see :class:`~rlightning.rollout.sampler.Generator`; of the owner's prompts.
            send_weights: brings the current ones to all engines that need them; a collective.
        """
        send_weights()
        received = exchange({OWNER: list(requests)}, name="prompts")
        work = [(rank, request) for rank, handed in received.items() for request in handed]
        arrivals: Arrivals[int] = Arrivals(self._changed.set)
        done: dict[int, list[Trajectory]] = {}
        if self._pool is not None:
            for i, (_, (prompt, stream)) in enumerate(work):
                arrivals.expect(i, self._pool.submit(prompt, stream, num_samples, sampling))

        def is_done() -> bool:
            for i, samples in arrivals:
                rank, (prompt, _) = work[i]
                done[i] = [Trajectory.single_turn(prompt, one) for one in samples]
                if on_completed is not None and rank == OWNER:
                    on_completed(prompt, done[i])
            return len(done) == len(work)

        self._wait(is_done, send_weights)
        parcels = {rank: [done[i] for i, (owner, _) in enumerate(work) if owner == rank] for rank in received}
        return next(iter(exchange(parcels, name="completions").values()))

    def consume(
        self,
        requests: Sequence[Request],
        num_samples: int,
        sampling: Sampling,
        on_completed: OnCompleted | None,
        send_weights: Callable[[], None],
        *,
        num_groups: int,
        per_step: int,
        room: int,
        weight_version: int,
    ) -> Consumed:
        """Hand in requests, and get completed ones, perhaps earlier ones (:meth:`InFlight.choose`).

        Args:
            requests: of this rank.
            num_samples: as of :meth:`generate`.
            sampling: as of :meth:`generate`.
            on_completed: called for each that is going to be consumed, if there is one rank.
            send_weights: as of :meth:`generate`.
            num_groups: how many this rank wants, at most as many as it has handed in ever.
            per_step: how many all ranks want in a step.
            room: how many of all ranks' may be under way or complete; the others wait.
            weight_version: of the weights that they will update: none of their tokens is older than
                ``weight_version - max_staleness``.
        """
        send_weights()
        received = exchange({OWNER: (list(requests), num_groups)}, name="prompts")
        num_wanted = sum(int(number) for _, number in received.values())
        flight = self.in_flight
        if self._pool is not None:
            for group, samples in self._arrivals:
                flight.finish(group, [Trajectory.single_turn(group.prompt, one) for one in samples])
            settings = sampling_settings(num_samples, sampling)
            unwanted = flight.requeue_changed(settings) + flight.expire(weight_version)
            self._pool.cancel(self._arrivals.forget(unwanted))
            flight.admit(request for handed, _ in received.values() for request in handed)
            for group in flight.waiting[: max(max(room, num_wanted) - flight.num_begun, 0)]:
                group.begun, group.settings = weight_version, settings
                self._arrivals.expect(group, self._pool.submit(group.prompt, group.stream, num_samples, sampling))

        def is_done() -> bool:
            for group, samples in self._arrivals:
                flight.finish(group, [Trajectory.single_turn(group.prompt, one) for one in samples])
            for group in flight.choose(num_wanted, weight_version, per_step=per_step, room=room):
                if on_completed is not None and world_size() == 1:
                    on_completed(group.prompt, group.trajectories or [])
            return flight.num_chosen == num_wanted

        before = self._waited_seconds
        self._wait(is_done, send_weights)
        parcels = {}
        if self._pool is not None:
            totals = self._totals
            totals.waited += self._waited_seconds - before
            totals.idle += self._pool.take_idle_seconds()
            totals.expired += flight.num_expired
            taken = flight.take()
            totals.ages.append(ages(taken, weight_version))
            if flight.max_staleness == 0:
                stopped = flight.stop()
                totals.stopped += len(stopped)
                self._pool.cancel(self._arrivals.forget(stopped))
            metrics = {
                **totals.metrics(flight.max_staleness, weight_version),
                "async/swap_pause": self._pause_seconds,
                "async/running": float(len(flight) - flight.num_finished),
                "async/finished": float(flight.num_finished),
            }
            for rank, (_, number) in received.items():
                own, taken = taken[:number], taken[number:]
                parcels[rank] = Consumed([group.trajectories or [] for group in own], metrics)
        consumed: Consumed = next(iter(exchange(parcels, name="completions").values()))
        return consumed

    def _wait(self, is_done: Callable[[], bool], send_weights: Callable[[], None]) -> None:
        """Until the owner has what is asked for; an engine that comes up meanwhile is sent the weights."""
        while (step := gather_objects(self._next(is_done), name="engines")[OWNER]) != "done":
            if step == "weights":
                send_weights()

    def _next(self, is_done: Callable[[], bool]) -> Literal["done", "weights", "waiting"]:
        if self._pool is None:
            return "done"  # the owner decides
        began = time.monotonic()
        try:
            while True:
                self._changed.clear()
                self._pool.check()
                if is_done():
                    return "done"
                if self._pool.has_joiners():
                    return "weights"
                if time.monotonic() - began > intervals.RANK_SYNC_INTERVAL:
                    return "waiting"
                self._changed.wait(intervals.POLL_INTERVAL)
        finally:
            self._waited_seconds += time.monotonic() - began
