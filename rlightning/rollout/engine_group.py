"""The engines on some ranks' devices: weights, prompts and completions on their way between them.

::

    ranks                 0        1        2        3              rollout.engine.tensor_parallel_size: 2
    engine of group       0 ------------    1 ------------          its process belongs to the group's first rank
    bucket of weights     0        1        2        3              one a rank, on its own device
    prompts               own  ->  0        own  ->  2              completions go back the same way

With an engine a rank, which is the usual case, each group is one rank, and nothing passes between ranks but the shards
of the weights. A group may have several engines, which all load what is in the buckets, and share its prompts. Where
more prompts are begun than a step needs, rank 0 deals them out, and keeps those that were not complete in time.
"""

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import replace
from itertools import cycle
from typing import Any, NamedTuple

from rlightning.errors import ConfigError, EngineDiedError, EngineError
from rlightning.parallel.barrier import barrier
from rlightning.parallel.collectives import any_rank, exchange, gather_objects, global_rank, world_size
from rlightning.rollout.engine import Engine
from rlightning.rollout.engine_config import EngineConfig
from rlightning.rollout.in_flight import OWNER, STOPPED, Consumed, Group, InFlight
from rlightning.rollout.placement import lent_devices
from rlightning.rollout.sampler import OnCompleted, Request, Sampling
from rlightning.rollout.weights import WeightSource
from rlightning.rollout.weights.driver import WeightUpdater
from rlightning.rollout.weights.transports import make_colocated_sender
from rlightning.types import Trajectory

log = logging.getLogger(__name__)


class Share(NamedTuple):
    """What the engines of a rank are to begin.

    Attributes:
        groups: at least as many as are wanted.
        wanted: by rank of the engines' group; nothing on a rank that only lends its device.
        num_spare: how many more than are wanted all ranks begin.
    """

    groups: list[Group]
    wanted: dict[int, int]
    num_spare: int


class EngineGroup:
    """The engines of this rank, which it may share with its neighbours. All ranks make one, and call it alike.

    Args:
        configs: of the engines, as this rank would start them alone; all share its device.
        in_flight: what :meth:`consume` was handed and has not given back; rank 0's counts.
        num_ranks: neighbours, this one among them, that lend them their devices: their ``tensor_parallel_size``.

    Attributes:
        engines: none on a rank that only lends its device.
    """

    def __init__(self, configs: Sequence[EngineConfig], in_flight: InFlight, *, num_ranks: int = 1) -> None:
        first = global_rank() // num_ranks * num_ranks
        self.ranks = range(first, first + num_ranks)
        self.in_flight = in_flight
        devices = lent_devices(configs[0].device, self.ranks)
        configs = [replace(config, visible_devices=devices) for config in configs]
        self.config = configs[0]
        self.engines = [Engine(config) for config in configs] if global_rank() == first else []
        self._updater: WeightUpdater | None = None
        self._death: EngineDiedError | None = None
        self._restarted: list[Engine] = []
        self._num_stopped = 0  # in this step

    @property
    def can_sleep(self) -> bool:
        """Whether engines give their device's memory back while they are not needed."""
        return self.config.can_sleep

    @property
    def fresh(self) -> list[Engine]:
        """Those that a sync has to do with."""
        return self.engines

    def start(self) -> None:
        """Start the engines' processes; returns before they are up."""
        for engine in self.engines:
            engine.start()

    @property
    def is_starting(self) -> bool:
        """Whether an engine of this rank has been started and is not up yet."""
        return any(engine.process is not None and not engine.process.ready.done() for engine in self.engines)

    def wait_for_start(self) -> None:
        """Block until each engine of this rank is up or has died."""
        wait([engine.process.ready for engine in self.engines if engine.process is not None])

    def is_stale(self, weight_version: int) -> bool:
        """Whether this rank has an engine that holds other weights."""
        return any(engine.weight_version != weight_version for engine in self.engines)

    def send_weights(self, source: WeightSource, weight_version: int) -> None:
        """Have each engine that is stale load the actor's weights; see :meth:`WeightUpdater.send_weights`.

        Args:
            source: of the weights.
            weight_version: of them.
        """
        if self._updater is None:
            self._updater = WeightUpdater(make_colocated_sender(source, self.config, self.ranks))
        stale = [engine for engine in self.engines if engine.weight_version != weight_version]
        for engine in stale:
            engine.weight_version = None
        self._updater.send_weights(source, [engine.process for engine in stale if engine.process is not None])

    def activate_weights(self, weight_version: int) -> None:
        """Have each engine that was sent weights take the memory for its KV cache, and sample from them.

        Raises:
            EngineDiedError: if an engine of this rank died, now or while it loaded.
        """
        assert self._updater is not None, "send_weights comes first"
        self._meet("engine takes its KV cache")
        updated = self._updater.activate_weights(weight_version)
        for engine in self.engines:
            if engine.process in updated:
                engine.weight_version = weight_version
        if self._updater.deaths:
            raise self._updater.deaths[-1]

    def generate(
        self,
        requests: Sequence[Request],
        num_samples: int,
        sampling: Sampling,
        on_completed: OnCompleted | None,
        send_weights: Callable[[], None],
    ) -> list[list[Trajectory]]:
        """Complete this rank's requests, in their order; an engine that dies is started again, once a step.

        Args:
            requests: prompts, each with the number of its random stream.
            num_samples: completions of each.
            sampling: how.
            on_completed: see :class:`~rlightning.rollout.sampler.Generator`.
            send_weights: brings the current ones to all engines that need them; a collective.
        """
        work = self.take_in(requests)
        done = self._complete(work, len(work), num_samples, sampling, on_completed, send_weights)
        return self.hand_back([(work[i][0], done[i]) for i in range(len(work))])

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
        """Hand in requests, and get the first that are complete; the others are stopped, and begin again next time.

        The first are those of each group of ranks: none of them takes over what another has begun.

        Args:
            requests: of this rank.
            num_samples: as of :meth:`generate`.
            sampling: as of :meth:`generate`.
            on_completed: called for each that is consumed, on a rank that shares its engines with no other.
            send_weights: as of :meth:`generate`.
            num_groups: how many this rank wants, at most as many as it has handed in ever.
            per_step: how many all ranks want in a step.
            room: how many of all ranks' are begun; the others wait.
            weight_version: of the actor's weights.
        """
        received = exchange({OWNER: (list(requests), num_groups)}, name="prompts")
        shares: dict[int, Share] = {}
        if global_rank() == OWNER:
            self.in_flight.admit(request for handed, _ in received.values() for request in handed)
            wanted = {rank: int(number) for rank, (_, number) in received.items()}
            begun = self.in_flight.waiting[: max(room, sum(wanted.values()))]
            for group in begun:
                group.begun = weight_version
            shares = deal(begun, wanted, len(self.ranks))
        share: Share = next(iter(exchange(shares, name="prompts to begin").values()))

        work = [(global_rank(), (group.prompt, group.stream)) for group in share.groups]
        told = on_completed if len(self.ranks) == 1 else None
        done = self._complete(work, sum(share.wanted.values()), num_samples, sampling, told, send_weights)
        completed = [done[i] for i in sorted(done)]

        numbers = exchange({OWNER: [share.groups[i].number for i in sorted(done)]}, name="prompts completed")
        if global_rank() == OWNER:
            self.in_flight.take_numbers(number for some in numbers.values() for number in some)
            self.in_flight.stop()
        self._num_stopped += share.num_spare
        metrics, parcels = {STOPPED: float(self._num_stopped)}, {}
        for rank, number in share.wanted.items():
            parcels[rank], completed = Consumed(completed[:number], metrics), completed[number:]
        if len(self.ranks) == 1:
            return parcels[global_rank()]
        consumed: Consumed = next(iter(exchange(parcels, name="completions").values()))
        return consumed

    def _complete(
        self,
        work: Sequence[tuple[int, Request]],
        num_wanted: int,
        num_samples: int,
        sampling: Sampling,
        on_completed: OnCompleted | None,
        send_weights: Callable[[], None],
    ) -> dict[int, list[Trajectory]]:
        """Of this rank's work the first that is complete, by its place; what is under way then is stopped."""
        done: dict[int, list[Trajectory]] = {}
        while any_rank(len(done) < num_wanted, name="completions are there"):
            send_weights()
            self._death = None
            missing = range(len(work)) if len(done) < num_wanted else ()
            asked = self._ask([(i, work[i][1]) for i in missing if i not in done], num_samples, sampling)
            for answer in as_completed(asked):
                try:
                    outputs = answer.result()
                except EngineDiedError as error:
                    self._death = error
                    continue
                rank, (prompt, _) = work[asked[answer]]
                samples = self.engines[0].read(prompt, outputs)
                done[asked[answer]] = trajectories = [Trajectory.single_turn(prompt, one) for one in samples]
                if on_completed is not None and rank == global_rank():
                    on_completed(prompt, trajectories)
                if len(done) == num_wanted:
                    break
            self._stop([answer for answer in asked if not answer.done()])
            if self._death is not None and len(done) < num_wanted:
                self.restart(self._death)
        return done

    def _stop(self, answers: list[Future[Any]]) -> None:
        """End what is under way; the engines have nothing to do then."""
        for answer in answers:
            answer.cancel()
        wait(answers)

    def _ask(
        self, requests: Sequence[tuple[int, Request]], num_samples: int, sampling: Sampling
    ) -> dict[Future[Any], int]:
        """Deal numbered requests out to the engines; the number of each by its answer to come."""
        asked: dict[Future[Any], int] = {}
        for place, engine in enumerate(self.engines):
            share = requests[place :: len(self.engines)]
            try:
                answers = engine.ask([request for _, request in share], num_samples, sampling)
            except EngineDiedError as error:
                self._death = error
            else:
                asked.update(zip(answers, (number for number, _ in share), strict=True))
        return asked

    def restart(self, error: EngineDiedError) -> None:
        """Start what has died again; whoever asks for completions next sends it the weights."""
        dead = [engine for engine in self.engines if not engine.is_alive]
        if not dead or any(engine in self._restarted for engine in dead):
            raise EngineError(f"The engine died twice in one step. {error.line}", error.details) from error
        self._restarted += dead
        log.warning("The engine is restarted, once in this step: %s", error.line)
        for engine in dead:
            engine.start()

    def forgive(self) -> None:
        """Let each engine die once more: a step begins, or has ended."""
        self._restarted, self._num_stopped = [], 0

    def take_in(self, requests: Sequence[Request]) -> list[tuple[int, Request]]:
        """The requests of all ranks of the group, each with its rank, to the one that has the engine; else none."""
        if len(self.ranks) == 1:
            return [(self.ranks[0], request) for request in requests]
        received = exchange({self.ranks[0]: list(requests)}, name="prompts")
        return [(rank, request) for rank, some in received.items() for request in some]

    def hand_back(self, completed: Sequence[tuple[int, list[Trajectory]]]) -> list[list[Trajectory]]:
        """The trajectories of this rank's own requests, in their order.

        Args:
            completed: what :meth:`take_in` gave, completed, in its order.
        """
        if len(self.ranks) == 1:
            return [trajectories for _, trajectories in completed]
        parcels: dict[int, Any] = {}
        if self.engines:
            parcels = {rank: [found for to, found in completed if to == rank] for rank in self.ranks}
        return next(iter(exchange(parcels, name="completions").values()))

    def sleep(self) -> None:
        """Have the engines give their devices' memory back.

        Raises:
            EngineDiedError: if one of this rank died meanwhile; its memory is free, then, too.
        """
        deaths = _at_once(Engine.sleep, self.engines)
        self._meet("engine sleeps")
        for death in filter(None, deaths):
            raise death

    def close(self) -> None:
        """End the engines and release the bucket's memory. May be called twice, and by one rank alone."""
        for engine in self.engines:
            engine.close()
        if self._updater is not None:
            self._updater.close()
            self._updater = None

    def _meet(self, name: str) -> None:
        if len(self.ranks) > 1:
            barrier(name)


def deal(groups: Sequence[Group], wanted: Mapping[int, int], num_ranks: int) -> dict[int, Share]:
    """Share groups out by rank, in proportion to what each wants.

    Args:
        groups: at least as many as are wanted.
        wanted: by rank.
        num_ranks: neighbours whose engines belong to the first of them.
    """
    num_spare = len(groups) - sum(wanted.values())
    shares = {rank: Share([], {}, num_spare) for rank in wanted}
    for rank, number in wanted.items():
        shares[rank // num_ranks * num_ranks].wanted[rank] = number
    # Those that were too slow before come first, so that each rank gets some of them.
    turns = sorted(((i + 0.5) / number, rank) for rank, number in wanted.items() for i in range(number))
    for group, (_, rank) in zip(groups, cycle(turns), strict=False):
        shares[rank // num_ranks * num_ranks].groups.append(group)
    return shares


def check_group_size(size: int) -> None:
    """Refuse a number of ranks an engine that the run cannot be cut into.

    Args:
        size: ``rollout.engine.tensor_parallel_size``.
    """
    if size == 1:
        return
    hosts = gather_objects(socket.gethostname(), name="hosts")
    rule = f"rollout.engine.tensor_parallel_size={size} runs one engine on the devices of {size} neighbouring ranks"
    if world_size() % size:
        raise ConfigError(f"{rule}, but there are {world_size()} ranks. Set trainer.devices to a multiple of {size}.")
    if any(len(set(hosts[first : first + size])) > 1 for first in range(0, len(hosts), size)):
        raise ConfigError(f"{rule}, which must be on one host. Use a size that divides the ranks of each host.")


def _at_once(step: Callable[[Engine], None], engines: Sequence[Engine]) -> list[EngineDiedError | None]:
    """Do something with all engines; deaths are returned, so that this rank can go on with the others for now."""

    def attempt(engine: Engine) -> EngineDiedError | None:
        try:
            step(engine)
        except EngineDiedError as error:
            return error
        return None

    pool = ThreadPoolExecutor(max(len(engines), 1))
    try:
        return list(pool.map(attempt, engines))
    finally:
        pool.shutdown(wait=False)  # an interrupt need not wait for engines, which are ended next
