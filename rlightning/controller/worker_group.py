"""The Ray workers of a run: starting them, calling them, and finding the cause when one ends."""

import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

from rlightning import intervals
from rlightning.controller.cluster import check_own_node, import_ray
from rlightning.controller.commands import Command, Completed, Entry, Failed, WorkerDiedError, raise_failure
from rlightning.controller.driver import DriverContext
from rlightning.errors import ConfigError, EngineError, find_run_error
from rlightning.foreign_text import cut_line
from rlightning.parallel.cpu_group import DEFAULT_BARRIER_TIMEOUT
from rlightning.processes.liveness import Deadline, Heartbeat

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

    from rlightning.controller.worker import Worker

log = logging.getLogger(__name__)

T = TypeVar("T")
Ref: TypeAlias = "ObjectRef[Any]"


class WorkerGroup:
    """The Ray actors of the training ranks: starts them, sends them commands, and raises an error when one has died.

    Args:
        each: cluster resources of each worker.
        hang_timeout: seconds without an answer after which a worker counts as dead.
    """

    def __init__(
        self,
        num_workers: int,
        each: Mapping[str, float],
        placement: str,
        driver: DriverContext,
        *,
        hang_timeout: float = DEFAULT_BARRIER_TIMEOUT,
    ) -> None:
        self._ray = ray = import_ray()
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from rlightning.controller.worker import Worker

        self.num_workers = num_workers
        self.hang_timeout = hang_timeout
        self._numbers = itertools.count()
        self._supplies = itertools.count()
        self._runs: dict[Ref, int] = {}
        self._engines: list[Ref] = []
        self._place = placement_group([dict(each)] * num_workers, strategy=placement)
        self.actors: list[ActorHandle[Worker]] = []
        if not self._place.wait(intervals.PLACEMENT_TIMEOUT):
            self.kill()
            free = ray.available_resources()
            raise ConfigError(
                f"trainer.strategy: num_workers={num_workers} x {describe_resources(each)} with placement={placement} "
                f"found no room in {intervals.PLACEMENT_TIMEOUT:g} s; free in the Ray cluster are "
                f"{describe_resources(free)}, on {sum(node['Alive'] for node in ray.nodes())} nodes. "
                "Lower what is asked for, choose placement=PACK, or end what else runs there."
            )
        actor = ray.remote(concurrency_groups={"fit": 1, "commands": 8})(Worker)
        self.actors = [
            actor.options(
                num_cpus=each["CPU"],
                num_gpus=each.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._place, rank),
                **driver.actor_options,
            ).remote(rank, num_workers, driver, os.environ.get("OMP_NUM_THREADS"))
            for rank in range(num_workers)
        ]

    def start(self, config: object, stage: str, engines: Sequence[Ref] = ()) -> None:
        """Begin a stage, such as "fit", on all workers; returns at once, but the first stage waits for their start.

        ``config`` is None for a later stage. ``engines`` are Ray's references, which must not end before the workers.
        """
        # One copy of the configuration in the object store, for all workers.
        shared = None if config is None else self._ray.put(config)
        rendezvous = ("", 0)
        if config is not None:
            rendezvous = self._get([self._call(self.actors[0], "rendezvous")])[0]
            found = self._get(self._call_all("describe_differences"))
            for sentence in dict.fromkeys(sentence for sentences in found for sentence in sentences):
                log.warning(sentence)  # one warning for all workers of a host
        self._engines = list(engines)
        number = next(self._numbers)
        self._runs = {
            self._call(actor, "run", number, shared, rendezvous, stage, group="fit"): rank
            for rank, actor in enumerate(self.actors)
        }

    def execute(self, commands: Sequence[Command[T]], handle: Callable[[int, Entry], None]) -> list[T]:
        """Have each worker execute its command, wait, and return the results by rank.

        ``handle`` is called with a rank and each of its entries before the result.

        Raises:
            WorkerError: a worker raised an exception.
            WorkerDiedError: a worker's process has ended.
        """
        if not self.actors:
            raise WorkerDiedError("The workers of this run have ended, and take no commands.")
        number = next(self._numbers)
        asked = {
            self._call(actor, "execute", number, command, 0): rank for rank, actor, command in self._each(commands)
        }
        seen: list[int] = [0] * self.num_workers
        answers: list[Any] = [None] * self.num_workers
        # Kept until the command is done: two hooks of a step may refer to the same batch, and Ray deletes an object
        # whose last local reference is dropped while another reference is in transit (ReferenceCountingAssertionError).
        received: list[Entry] = []
        for rank, entries in self._entries(asked):
            received += entries
            seen[rank] += len(entries)
            for entry in entries:
                if isinstance(entry, Failed):
                    self._fail(entry)
                elif isinstance(entry, Completed):
                    answers[rank] = entry.result
                else:
                    handle(rank, entry)
            if not entries or not isinstance(entries[-1], Completed):
                asked[self._call(self.actors[rank], "collect", number, seen[rank])] = rank
            else:
                self._call(self.actors[rank], "forget", number)
        return answers

    def supply(self, shares: Sequence[object]) -> None:
        """Send each worker its share of the training prompts that the workers have requested."""
        number = next(self._supplies)
        for _, actor, share in self._each(shares):
            self._call(actor, "supply", number, share)

    def record_stacks(self, reason: str) -> None:
        """Have each worker append its stack traces to the run's ``stacks.txt``; returns before they are written."""
        self._call_all("record_stacks", reason)

    def await_end(self) -> None:
        """Wait until the stage has ended on all workers."""
        self._get(self._runs)

    def close(self) -> None:
        """End the workers; those that are alive first deregister from each other."""
        if self.actors and self._ray.is_initialized():
            self._wait_for_all("leave", intervals.GROUP_LEAVE_GRACE)
        self.kill()

    def kill(self) -> None:
        """Kill the workers."""
        actors, self.actors = self.actors, []
        if not self._ray.is_initialized():
            return
        for actor in actors:
            with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
                self._ray.kill(actor)
        from ray.util.placement_group import remove_placement_group

        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            remove_placement_group(self._place)

    def _each(self, shares: Sequence[T]) -> Iterator[tuple[int, "ActorHandle[Worker]", T]]:
        assert len(shares) == self.num_workers
        return zip(range(self.num_workers), self.actors, shares, strict=True)

    def _call(self, actor: "ActorHandle[Worker]", method: str, *arguments: object, group: str = "commands") -> Ref:
        remote = getattr(actor, method)  # an actor's handle has the methods of its class as attributes only
        called: Ref = remote.options(concurrency_group=group).remote(*arguments)
        return called

    def _call_all(self, method: str, *arguments: object) -> dict[Ref, int]:
        """Call a method of all workers; return Ray's references to the results, with their ranks."""
        return {self._call(actor, method, *arguments): rank for rank, actor in enumerate(self.actors)}

    def _wait_for_all(self, method: str, seconds: float) -> dict[int, bool]:
        """Call a method of all workers; return for each rank whether it answered within ``seconds``."""
        asked = self._call_all(method)
        answered, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=seconds)
        return {rank: ref in answered for ref, rank in asked.items()}

    def _get(self, refs: "Iterable[ObjectRef[T]]") -> list[T]:
        try:
            found: list[T] = self._ray.get(list(refs))
        except self._ray.exceptions.RayActorError as error:
            raise WorkerDiedError(f"a worker ended: {_reason(error)}") from None
        return found

    def _entries(self, asked: dict[Ref, int]) -> Iterator[tuple[int, list[Entry]]]:
        """Yield each rank with its new entries as they arrive, until all commands have a result."""
        while asked:
            # Workers record the end of a run in their commands' entries, unless the run could not begin.
            ready = self._wait([*asked, *self._runs, *self._engines])
            if ready in self._engines:
                self._lose_engine(ready)
            rank = asked.pop(ready) if ready in asked else self._runs.pop(ready)
            try:
                entries = self._ray.get(ready)
            except self._ray.exceptions.RayActorError as error:
                self._lose(rank, _reason(self._find_cause(rank, error)))
            except self._ray.exceptions.RayTaskError as error:
                self._fail(Failed(rank, str(error.cause), str(error), exit_code=None, is_first=True))
            if entries is not None:
                yield rank, entries

    def _wait(self, refs: Sequence[Ref]) -> Ref:
        """Return the first Ray reference that is ready; there is no timeout while all workers run."""
        heartbeats = [Heartbeat(intervals.WAIT_REPORT_DELAY) for _ in self.actors]
        while True:
            ready, _ = self._ray.wait(list(refs), num_returns=1, timeout=intervals.WAIT_REPORT_DELAY)
            if ready:
                first: Ref = ready[0]
                return first
            self._check_silence(heartbeats)

    def _check_silence(self, heartbeats: Sequence[Heartbeat]) -> None:
        """Log which workers do not answer; raise a WorkerDiedError if one has not answered for ``hang_timeout``."""
        for rank, has_answered in self._wait_for_all("process_id", intervals.SILENT_AFTER).items():
            silent = heartbeats[rank].tick()
            if has_answered:
                heartbeats[rank].beat()
            elif silent >= self.hang_timeout:
                self.kill()
                raise WorkerDiedError(
                    f"worker {rank} of {self.num_workers} hangs: its process has answered nothing for {silent:.0f} s. "
                    "The workers have been ended."
                )
            else:
                log.warning("Waiting: worker %d has answered nothing for %.0f s.", rank, silent)

    def _fail(self, failure: Failed) -> NoReturn:
        """End the other workers, and raise the error behind a worker's failure."""
        if not failure.is_first:
            failure = self._find_first(failure)
        self.kill()
        raise_failure(failure)

    def _find_first(self, failure: Failed) -> Failed:
        """Return the failure of the rank that failed first, by default the given one; raise an error if one died."""
        deadline, asked = Deadline(intervals.CAUSE_GRACE), self._call_all("await_failure")
        while asked and not deadline.is_over:
            ready, _ = self._ray.wait(list(asked), num_returns=1, timeout=deadline.remaining)
            for ref in ready:
                rank = asked.pop(ref)
                try:
                    found: Failed = self._ray.get(ref)
                except self._ray.exceptions.RayActorError as error:
                    self._lose(rank, _reason(error))
                if found.is_first:
                    return found
        return failure

    def _find_cause(self, rank: int, error: BaseException) -> BaseException:
        """Return why a worker has ended; for a while Ray may report only a lost connection."""
        deadline = Deadline(intervals.CAUSE_GRACE)
        while isinstance(error, self._ray.exceptions.ActorUnavailableError) and not deadline.is_over:
            check_own_node()
            time.sleep(intervals.POLL_INTERVAL)
            try:
                self._ray.get(self._call(self.actors[rank], "process_id"), timeout=deadline.remaining)
            except self._ray.exceptions.RayActorError as later:
                error = later
            except self._ray.exceptions.GetTimeoutError:
                break
        return error

    def _lose_engine(self, ref: Ref) -> None:
        """Raise an error because an engine's Ray actor has ended, although it would restart a dead engine."""
        self.kill()
        try:
            self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            cause = find_run_error(error.cause)
            line, details = (str(error.cause), str(error)) if cause is None else (cause.line, cause.details)
            raise EngineError(f"engine {self._engines.index(ref)}: {line}", details) from None
        except self._ray.exceptions.RayActorError as error:
            raise EngineError(f"engine {self._engines.index(ref)}: its actor died: {_reason(error)}") from None

    def _lose(self, rank: int, reason: str) -> NoReturn:
        self.kill()
        raise WorkerDiedError(
            f"worker {rank} of {self.num_workers} died: {reason} Its step cannot be finished; the other workers have "
            "been ended."
        ) from None


def describe_resources(resources: Mapping[str, float]) -> str:
    """Return cores and GPUs as text, such as "2 CPUs, 1 GPUs"."""
    return ", ".join(f"{resources.get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))


def _reason(error: BaseException) -> str:
    """Return Ray's reason for an actor's death, in one line."""
    text = " ".join(str(error).split())
    _, _, detail = text.rpartition("Worker exit detail: ")
    return cut_line(detail.partition(" Some common causes")[0])
