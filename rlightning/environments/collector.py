"""The collector: it keeps the prompts of all ranks in flight on rank 0, and returns finished groups to the ranks.

::

    rank 0     prompts of all ranks --> InFlight --> EnvironmentRunner x sampler --> groups to all ranks
    others     wait for instructions of rank 0: to take part in a weight sync, to receive finished groups
"""

import gc
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Literal, NamedTuple, Protocol, TypeVar

from rlightning import intervals
from rlightning.environments.environment_totals import EnvironmentTotals
from rlightning.environments.policy import GroupRequest
from rlightning.environments.runner import EnvironmentRunner, ScoreGroup
from rlightning.environments.snapshots import SavedTrajectory
from rlightning.environments.trajectory_delivery import TrajectoryDelivery, assign_ranks
from rlightning.environments.verification import Gap, TrajectoryVerifier
from rlightning.errors import EnvironmentFailedError
from rlightning.parallel.collectives import all_to_all_objects, gather_objects, world_size
from rlightning.parallel.cpu_group import barrier_timeout
from rlightning.rollout.async_metrics import StepTotals
from rlightning.rollout.in_flight import Group, InFlight, token_staleness
from rlightning.rollout.placement import COLLECTOR_RANK
from rlightning.rollout.requests import SeededPrompt, group_sampling
from rlightning.rollout.sampler import OnCompleted, Sampling, sampling_settings
from rlightning.types import Prompt, Trajectory

T = TypeVar("T")

OBJECTS_BETWEEN_COLLECTIONS = 10_000
"""After so many new objects, instead of 700 or 2,000, Python looks for reference cycles while the collector works."""

Instruction = Literal["done", "sync weights", "deliver", "wait"]
"""The next action of all ranks, chosen by rank 0."""


class StepPlan(NamedTuple):
    """How many finished groups a training step takes, and how many may be in flight.

    Attributes:
        num_groups: number of groups that this rank takes; over the run at most as many as the prompts that it has
            added.
        per_step: number of groups that all ranks together take.
        room: maximum number of running and finished groups of all ranks; other prompts wait.
        weight_version: version of the weights to be updated: no token of the groups is older than ``weight_version -
            max_staleness``.
    """

    num_groups: int
    per_step: int
    room: int
    weight_version: int


class Weights(Protocol):
    """Weight sync as the collector uses it: whether the sampler needs new weights, and a collective that sends them."""

    def sync_weights(self) -> None:
        """Send the actor's weights to all engines that lack them; every rank must call it."""

    def needs_sync(self) -> bool:
        """Return, on rank 0, whether to sync before requests end: no engine serves, or one died or lacks weights."""


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Context in which Python looks for reference cycles less often.

    Each trajectory is a dozen objects, and every few thousand trajectories Python visits all objects of the process, of
    which the imported packages have hundreds of thousands, although nearly all of them stay.
    """
    usual = gc.get_threshold()
    if 0 < usual[0] < OBJECTS_BETWEEN_COLLECTIONS:
        gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


class Collector:
    """Runs the prompts of all ranks through environments, on rank 0, and returns each rank its finished groups.

    Every rank constructs one, and all call its methods in the same order.

    Args:
        runner: runs the environments, on rank 0; None on other ranks.
        in_flight: prompts that were added and whose groups have not been returned.
        weights: sends the actor's weights to the sampler.
        take_idle_seconds: returns the engines' idle seconds since its last call.
        max_failed_share, time_limits: see :class:`~rlightning.environments.environment_totals.EnvironmentTotals`.
        verifier: verifies the trajectories of each step; None for no verification.
        score: scores each group in flight before it counts as finished; None to leave that to the step that takes it.

    Attributes:
        has_changed: event to be set when the result of :meth:`Weights.needs_sync` may have changed.
        is_training: whether trajectories are for training. Otherwise any may fail, and none is verified.
        totals: counts of the step.
        environments: counts of failed, timed-out and verified trajectories in the step.
    """

    def __init__(
        self,
        runner: EnvironmentRunner | None,
        in_flight: InFlight,
        weights: Weights,
        take_idle_seconds: Callable[[], float] = lambda: 0.0,
        *,
        max_failed_share: float = 1.0,
        time_limits: Mapping[str, float] | None = None,
        verifier: TrajectoryVerifier | None = None,
        score: ScoreGroup | None = None,
    ) -> None:
        self._score = score
        self.in_flight, self.has_changed, self.totals = in_flight, threading.Event(), StepTotals()
        self.is_training, self.environments = True, EnvironmentTotals(max_failed_share, time_limits)
        self._verifier = verifier
        self._verification: Future[Gap] | None = None
        self._runner, self.weights, self._take_idle_seconds = runner, weights, take_idle_seconds
        self._running: dict[Future[list[Trajectory]], Group] = {}
        self._wait_seconds = 0.0

    def begin_step(self) -> StepTotals:
        """Reset the counts for a new step, and return the totals of the step before."""
        totals, self.totals = self.totals, StepTotals()
        self.environments = self.environments.next_step()
        if self._runner is not None:
            self._runner.num_requeues, self._runner.first_failure = 0, None
        return totals

    @rare_garbage_collection()
    def generate(
        self, requests: Sequence[SeededPrompt], num_samples: int, sampling: Sampling, on_completed: OnCompleted | None
    ) -> list[list[Trajectory]]:
        """Complete this rank's prompts, and return a list of trajectories for each; every rank must call it.

        Sends weights to the engines first. Groups that are in flight continue meanwhile.

        Args:
            requests: prompts, each with the number of its random stream.
            num_samples: trajectories of each prompt.
            sampling: settings of all requests.
            on_completed: see :data:`~rlightning.rollout.sampler.OnCompleted`; called slightly later on ranks other than
                0.
        """
        self.weights.sync_weights()
        received = all_to_all_objects({COLLECTOR_RANK: list(requests)}, name="prompts")
        work = [(rank, place, one) for rank, handed in received.items() for place, one in enumerate(handed)]
        running = {
            self._submit(_group_request(prompt, stream, num_samples, sampling)): (rank, place)
            for rank, place, (prompt, stream) in work
        }
        self._expect(len(work) * num_samples)
        made: list[Trajectory] = []
        delivery = TrajectoryDelivery(received, on_completed)

        def is_done() -> bool:
            for (rank, place), trajectories in _pop_done(running):
                self._count_failures(trajectories)
                made.extend(trajectories)
                delivery.add(rank, (place, received[rank][place][0], trajectories))
            return not running and self._is_verified(made, sampling)

        try:
            self._wait(is_done, delivery)
        except BaseException:
            if self._runner is not None:
                self._runner.cancel(running)
            raise
        return delivery.received()

    @rare_garbage_collection()
    def collect_trajectories(
        self,
        requests: Sequence[SeededPrompt],
        num_samples: int,
        sampling: Sampling,
        on_completed: OnCompleted | None,
        plan: StepPlan,
    ) -> list[list[Trajectory]]:
        """Add this rank's prompts, and return its share of finished groups of trajectories; every rank must call it.

        Sends weights to the engines first. The groups may be of earlier prompts (:meth:`InFlight.select_ready`).

        Args:
            requests: this rank's prompts and their random streams.
            num_samples: see :meth:`generate`.
            sampling: see :meth:`generate`.
            on_completed: called for each group that the step takes, on the rank that gets it; see :meth:`generate`.
                Which rank that is depends on which groups finish first.
            plan: the number of groups that the step takes.
        """
        self.weights.sync_weights()
        self._wait_seconds = 0.0
        received = all_to_all_objects({COLLECTOR_RANK: (list(requests), plan.num_groups)}, name="prompts")
        missing = {rank: int(number) for rank, (_, number) in received.items()}
        num_wanted = sum(missing.values())
        flight, version, made = self.in_flight, plan.weight_version, list[Trajectory]()
        delivery = TrajectoryDelivery(received, on_completed)
        self._expect(num_wanted * num_samples)
        own = _own_numbers(received.values(), flight.num_added)
        if self._runner is not None:
            added = [request for handed, _ in received.values() for request in handed]
            self._start_groups(added, max(plan.room, num_wanted), version, num_samples, sampling)

        def is_done() -> bool:
            self._finish_groups()
            selected = flight.select_ready(num_wanted, version, per_step=plan.per_step, room=plan.room)
            selected.sort(key=lambda group: group.number)
            for rank, group in zip(assign_ranks(len(selected), missing), selected, strict=True):
                self._count_failures(group.trajectories or [])
                made.extend(group.trajectories or [])
                delivery.add(rank, (group.number, group.prompt, group.trajectories or []))
            return flight.num_selected == num_wanted and self._is_verified(made, sampling, version)

        try:
            self._wait(is_done, delivery)
        except Exception:
            self._requeue_all()
            flight.discard(own)
            raise
        except BaseException:  # a signal: the run may be resumed, or the loop may begin the step again
            self._suspend()
            flight.discard(own)
            raise
        if self._runner is not None:
            self._take(version)
        return delivery.received()

    def _start_groups(
        self, added: Sequence[SeededPrompt], room: int, version: int, num_samples: int, sampling: Sampling
    ) -> None:
        """Add prompts, and start groups that wait, also requeued and resumed ones, while fewer than ``room`` run."""
        flight, settings = self.in_flight, sampling_settings(num_samples, sampling)
        self._finish_groups()
        for group in self._running.values():
            group.saved = None  # a checkpoint has it, and the next one saves it again
        requeued = {*flight.requeue_changed(settings), *flight.requeue_stale(version)}
        self._cancel([future for future, group in self._running.items() if group in requeued])
        flight.add(added)
        running = set(self._running.values())
        resumed = [group for group in flight.running if group not in running]
        waiting = flight.waiting[: max(room - flight.num_started, 0)]
        for group in waiting:
            group.first_weight_version, group.settings = version, settings
        for group in [*resumed, *waiting]:
            request = _group_request(group.prompt, group.stream, num_samples, sampling, group.saved)
            self._running[self._submit(request, self._score)] = group

    def save_progress(self) -> None:
        """Store the progress of the trajectories in each running group, for a checkpoint."""
        if self._runner is not None:
            for future, group in list(self._running.items()):
                if future.done() and future.exception() is None:
                    del self._running[future]
                    self.in_flight.finish(group, future.result())
                else:
                    group.saved = self._runner.save(future)
            self._hold_unscored()

    def close(self) -> None:
        """Cancel all running groups; their prompts stay in flight. May be called twice."""
        if self._runner is not None:
            try:
                self.save_progress()
            finally:
                self._cancel(list(self._running))
                self._runner.close()

    def environment_metrics(self) -> dict[str, float]:
        """Return the metrics of the step's environments on rank 0; {} on other ranks."""
        if self._runner is None:
            return {}
        return self.environments.metrics(self._runner.num_requeues)

    def check_timeouts(self) -> None:
        """Raise an error on every rank if the time limits have left the step no trajectory; every rank must call it,
        after the step's last refill.

        Raises:
            EnvironmentFailedError: all have timed out, or some of them, and all others have failed.
        """
        line = gather_objects(self.environments.describe_timeouts(), name="trajectories")[COLLECTOR_RANK]
        if line is not None:
            raise EnvironmentFailedError(line)

    def _expect(self, num_trajectories: int) -> None:
        if self.is_training:
            self.environments.num_expected += num_trajectories

    def _count_failures(self, trajectories: Sequence[Trajectory]) -> None:
        """Raise an EnvironmentFailedError if too many of the step's trajectories have failed."""
        if self.is_training and self._runner is not None:
            self.environments.count(trajectories, self._runner.first_failure)

    def _is_verified(self, trajectories: list[Trajectory], sampling: Sampling, version: int | None = None) -> bool:
        """Start verifying the step's trajectories at the first call; return whether that is done or not required.

        Raises a VerificationError if recorded and sampled tokens differ.
        """
        if self._verifier is None or self._runner is None or not self.is_training:
            return True
        if self._verification is None:
            self._verification = self._runner.loop.submit(self._verifier.verify(trajectories, sampling, version))
            self._verification.add_done_callback(lambda _: self.has_changed.set())
        if not self._verification.done():
            return False
        verification, self._verification = self._verification, None
        self.environments.gap = self.environments.gap.merge(verification.result())
        return True

    def _submit(self, request: GroupRequest, score: ScoreGroup | None = None) -> Future[list[Trajectory]]:
        assert self._runner is not None
        future = self._runner.submit(request, score)
        future.add_done_callback(lambda _: self.has_changed.set())
        return future

    def _take(self, weight_version: int) -> None:
        """Remove the selected groups from those in flight, and add them to the step's totals."""
        flight, totals = self.in_flight, self.totals
        totals.trainer_wait_seconds += self._wait_seconds
        totals.engine_idle_seconds += self._take_idle_seconds()
        totals.num_stale += flight.num_stale
        taken = flight.pop_selected()
        totals.staleness.append(token_staleness(taken, weight_version))
        if flight.max_staleness == 0:
            totals.num_stopped += self._requeue_all()
        totals.num_running, totals.num_finished = len(self._running), flight.num_finished
        totals.num_scoring = sum(group.unscored is not None for group in self._running.values())

    def _requeue_all(self) -> int:
        """Requeue all started groups, and return their number."""
        num_groups = self.in_flight.requeue_all()
        self._cancel(list(self._running))
        return num_groups

    def _suspend(self) -> None:
        """Save and cancel the running groups; a later call resumes those whose environments support it."""
        self.save_progress()
        running = list(self._running.items())
        self._cancel([future for future, _ in running])
        for _, group in running:
            if group.unscored is not None:
                self.in_flight.finish(group, group.unscored)
        self.in_flight.suspend()

    def _finish_groups(self) -> None:
        for group, trajectories in _pop_done(self._running):
            self.in_flight.finish(group, trajectories)
        self._hold_unscored()

    def _hold_unscored(self) -> None:
        """Keep the trajectories of running groups of which only the scores are missing."""
        assert self._runner is not None
        for future, group in self._running.items():
            if group.unscored is None and (made := self._runner.trajectories(future)) is not None:
                self.in_flight.hold_unscored(group, made)

    def _cancel(self, futures: Collection[Future[list[Trajectory]]]) -> None:
        """Cancel running groups, and forget them."""
        for future in futures:
            del self._running[future]
        if self._runner is not None:
            self._runner.cancel(futures)

    def _wait(self, is_done: Callable[[], bool], delivery: TrajectoryDelivery) -> None:
        """Wait until ``is_done`` is true on rank 0; meanwhile all ranks execute rank 0's instructions.

        An error cancels a running verification.

        Args:
            is_done: whether rank 0 has all groups.
            delivery: sends finished groups to their ranks.
        """
        try:
            while True:
                instruction = gather_objects(self._next(is_done, delivery), name="trajectories")[COLLECTOR_RANK]
                if instruction == "done":
                    break
                if instruction == "sync weights":
                    self.weights.sync_weights()
                if instruction == "deliver":
                    delivery.send()
            if world_size() > 1:
                delivery.send()
        finally:
            if self._verification is not None:
                self._verification.cancel()
                self._verification = None

    def _next(self, is_done: Callable[[], bool], delivery: TrajectoryDelivery) -> Instruction:
        if self._runner is None:
            return "done"  # rank 0 decides
        started_at = time.monotonic()
        try:
            while True:
                self.has_changed.clear()
                if is_done():
                    return "done"
                if self.weights.needs_sync():
                    return "sync weights"
                self._runner.report_oldest()
                seconds = time.monotonic() - started_at
                if seconds > intervals.DELIVERY_INTERVAL and delivery.is_waiting():
                    return "deliver"
                if seconds > min(intervals.RANK_SYNC_INTERVAL, barrier_timeout() / 3):
                    return "wait"
                self.has_changed.wait(intervals.POLL_INTERVAL)
        finally:
            self._wait_seconds += time.monotonic() - started_at


def _group_request(
    prompt: Prompt,
    stream: int,
    num_samples: int,
    sampling: Sampling,
    saved: Sequence[SavedTrajectory | None] | None = None,
) -> GroupRequest:
    return GroupRequest(prompt, group_sampling(sampling, prompt, stream), num_samples, saved)


def _own_numbers(handed: Iterable[tuple[Sequence[SeededPrompt], int]], first: int) -> set[int]:
    """Return the numbers that a step's own prompts get in flight, from ``first`` on: those of each rank, followed by
    what it has taken for later steps.
    """
    numbers = set[int]()
    for requests, num_own in handed:
        numbers.update(range(first, first + num_own))
        first += len(requests)
    return numbers


def _pop_done(running: dict[Future[list[Trajectory]], T]) -> Iterator[tuple[T, list[Trajectory]]]:
    """Remove finished futures from a dictionary; yield the value and the trajectories of each."""
    for future in [future for future in running if future.done()]:
        yield running.pop(future), future.result()
