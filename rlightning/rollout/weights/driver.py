"""A weight sync: from the actor's shards to each engine's ``load_weights``.

::

    trainer, every rank                          an engine's process               each of its workers
    WeightSync.sync_weights, _sync, _send
    RankEngines.send_weights(source)
      WeightUpdater.send_weights
        _connect: only if the engines are not those of the sync before
          WeightSender.make_receivers
          EngineConnection
            .open_weight_receivers ------------> .open_weight_receivers ----------> rl_open_receiver
          WeightSender.connect                                                      WeightReceiver.open
        WeightSender.fill, fill_bucket: gather
          a chunk into the bucket
        EngineConnection.receive_weights ------> VLLMServer.receive_weights ----> rl_receive_weights
          submit, call                                                              WeightReceiver.receive
        _collect
          WeightSender.send(chunk)  ==== the bucket's bytes, by the transport ====>
                                                                                    model.load_weights
      WeightUpdater.activate_weights(version)
        EngineConnection.finish_weight_update -> VLLMServer.finish_weight_update

The first chunk pauses what the engine generates, or wakes an engine that sleeps, and ``finish_weight_update`` lets it
go on with the new version. A sync sends each engine one message for each chunk, and one in the end; the first
sync, and one with other engines than the last, also has the engines open receivers.

A transport is a sender, which the trainer has, and receivers, which the sender makes and the workers open:
:mod:`~rlightning.rollout.weights.transports` has those there are.
"""

import functools
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from itertools import chain, islice
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from rlightning.errors import EngineDiedError, EngineError
from rlightning.rollout.weights.source import ChunkPlan, WeightSource, fill_bucket

T = TypeVar("T")


class UpdatableEngine(Protocol):
    """The methods of a running engine that a weight update calls.

    Each future's exception is an EngineError if the engine refuses, an EngineDiedError if it dies.

    Attributes:
        ended: done when the engine is dead, with the reason.
    """

    ended: Future[EngineError]

    @property
    def worker_devices(self) -> Sequence[str]:
        """The device of each of the engine's workers, by a name that no other device of this host has; or ""."""

    def open_weight_receivers(self, receivers: list[bytes]) -> Future[None]:
        """Have each worker unpickle and open its receiver, and close the one it had."""

    def receive_weights(self, chunk: int) -> Future[list[str]]:
        """Load a chunk; chunk 0 begins an update.

        Returns:
            After the last chunk what is wrong with the model then, in a sentence each.
        """

    def finish_weight_update(self, version: int, keeps_cache: bool) -> Future[None]:
        """Go on with the weights that have been loaded; all chunks were."""


class WeightReceiver(Protocol):
    """Receives weights in an engine's worker, to which it is sent pickled over the engine's connection.

    Attributes:
        plan: the sender's.
    """

    plan: ChunkPlan

    def open(self, device: torch.device) -> None:
        """Connect; ``device`` is the worker's."""
        return

    def receive(self, chunk: int) -> Iterator[tuple[str, Tensor]]:
        """Wait for a chunk; its names and tensors, which may be read until the worker has answered for it.

        Raises:
            EngineError: if it does not come.
        """

    def close(self) -> None:
        """Release what it holds; another receiver is opened next."""
        return


class WeightSender:
    """Sends a rank's weights to engines, or its shards to another rank. One thread calls all but :meth:`interrupt`.

    A transport subclasses this and :class:`WeightReceiver`, and inherits what it has nothing to do for.

    Attributes:
        plan: of the weights.
        bucket: uint8, of the plan's size.
        destination: the one rank that gets sharded weights; None: each rank that gathers them.
    """

    plan: ChunkPlan
    bucket: Tensor
    destination: int | None = None

    def make_receivers(self, devices: Sequence[str]) -> Sequence[WeightReceiver]:
        """Return a receiver for each worker; those made before are left.

        Args:
            devices: of each worker, see :attr:`UpdatableEngine.worker_devices`.
        """
        return []

    def connect(self) -> None:
        """Return when all workers are connected. Called after they have been asked to open their receivers.

        Raises:
            EngineError: if one of them does not come.
        """
        return

    def fill(self, source: WeightSource) -> Iterator[int]:
        """Bring a source's weights into the bucket, chunk by chunk; no more of them are taken than fit into it.

        Yields:
            The index of the chunk that may be sent; it stays in the bucket until the iterator goes on.
        """
        return fill_bucket(self.plan, self.bucket, source, destination=self.destination)

    def send(self, chunk: int) -> None:
        """Hand over the chunk that is in the bucket. Called after the workers have been asked to receive it.

        Raises:
            EngineError: if one of them does not take it. The others need new receivers, and all weights, then.
        """
        return

    def interrupt(self, reason: str) -> None:
        """Let :meth:`connect` or :meth:`send`, until new receivers are made, fail for ``reason``. Thread-safe."""
        return

    def close(self) -> None:
        """Release everything. The engines must be done with it. May be called twice."""
        self.bucket = torch.empty(0, dtype=torch.uint8)


class WeightUpdater:
    """Sends weights to engines, also amid what they generate. Every rank has one, and calls it alike.

    If an engine dies of an update, the others hold half of the weights, and stay paused until they are sent all of
    them in the next one.

    Args:
        sender: of this rank.
        keeps_cache: whether running requests keep the keys and values that the old weights made of them.

    Attributes:
        deaths: of engines, in the last update.
        seconds: from the first chunk's sending to the end of the last update.
    """

    def __init__(self, sender: WeightSender, *, keeps_cache: bool = True) -> None:
        self.sender, self.keeps_cache = sender, keeps_cache
        self.deaths: list[EngineDiedError] = []
        self.seconds = 0.0
        self._engines: list[UpdatableEngine] = []
        self._connected: list[UpdatableEngine] = []
        self._lock = threading.Lock()
        self._started_at = 0.0

    def send_weights(self, source: WeightSource, engines: Sequence[UpdatableEngine]) -> None:
        """Have engines load a source's weights; they are awake then, but for their KV cache, and paused.

        Sharded weights are gathered from all ranks, so all take part to the end, whatever becomes of their engines.

        Args:
            source: of the weights; the same shapes each time.
            engines: of this rank; on most ranks of a run with engines of its own, none.

        Raises:
            EngineError: if a weight does not fit, or a parameter of an engine's model was set by none of them.
        """
        self._engines, self.deaths = list(engines), []
        self._connect()
        faults: list[list[str]] = []
        for chunk in self.sender.fill(source):
            if self._engines and not self.deaths:
                if chunk == 0:
                    self._started_at = time.monotonic()
                answers = {engine: engine.receive_weights(chunk) for engine in self._engines}
                faults += self._collect(answers, functools.partial(self.sender.send, chunk))
        if not self.deaths and any(faults):
            raise EngineError(" ".join(sorted(set(chain(*faults)))))

    def activate_weights(self, version: int) -> Sequence[UpdatableEngine]:
        """Let the engines sample from the weights that they were sent, as those of a version.

        Returns:
            The engines that do; none if one of them died before it had all weights.
        """
        if self.deaths:
            self._connected = []
            return []
        self._collect({engine: engine.finish_weight_update(version, self.keeps_cache) for engine in self._engines})
        self.seconds = time.monotonic() - self._started_at
        return self._engines

    def close(self) -> None:
        """Release the sender's memory. May be called twice."""
        self.sender.close()

    def _connect(self) -> None:
        """Have the engines open their receivers, unless they are the ones that have."""
        if not self._engines or self._engines == self._connected:
            return
        with self._lock:
            self._connected = list(self._engines)
        devices = [device for engine in self._engines for device in engine.worker_devices]
        receivers = map(pickle.dumps, self.sender.make_receivers(devices))
        answers = {
            engine: engine.open_weight_receivers(list(islice(receivers, len(engine.worker_devices))))
            for engine in self._engines
        }
        for engine in self._connected:
            engine.ended.add_done_callback(functools.partial(self._interrupt, engine))
        self._collect(answers, self.sender.connect)

    def _interrupt(self, engine: UpdatableEngine, ended: Future[EngineError]) -> None:
        """End the sender's waiting for an engine that has died, if it is connected."""
        with self._lock:
            if engine in self._connected:
                self.sender.interrupt(ended.result().line)

    def _collect(self, answers: Mapping[UpdatableEngine, Future[T]], send: Callable[[], None] | None = None) -> list[T]:
        """Return what engines answer; those that have died take part no longer.

        Args:
            answers: of the engines.
            send: the sender's part of what they have been asked for.

        Raises:
            EngineError: an engine has refused, or the sender has failed though no engine has died.
        """
        failure: EngineError | None = None
        try:
            if send is not None:
                send()
        except EngineError as error:
            failure = error
        wait(answers.values())
        results: list[T] = []
        for engine, answer in answers.items():
            death = answer.exception()
            if isinstance(death, EngineDiedError):
                self._engines.remove(engine)
                self.deaths.append(death)
            elif failure is None:
                results.append(answer.result())
        if failure is not None and not self.deaths:
            raise failure
        return results
