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

The first chunk pauses the engine's requests, or wakes a sleeping engine, and ``finish_weight_update`` continues with
the new version. A sync sends each engine one message for each chunk, and one at the end. The first sync, and any with
other engines than the last, also has the engines open receivers.

A transport is a sender in the trainer, and receivers, which the sender makes and the workers open:
:mod:`~rlightning.rollout.weights.transports` chooses one.
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

    Futures fail with an EngineDiedError if the engine dies, and with another EngineError if it rejects the call.

    Attributes:
        ended: future of the error, done when the engine is dead.
    """

    ended: Future[EngineError]

    @property
    def worker_devices(self) -> Sequence[str]:
        """The name of each worker's device, unique on this host; "" if unknown."""

    def open_weight_receivers(self, receivers: list[bytes]) -> Future[None]:
        """Have each worker unpickle and open its receiver, and close the previous one."""

    def receive_weights(self, chunk: int) -> Future[list[str]]:
        """Load a chunk of weights; chunk 0 begins an update.

        Returns:
            After the last chunk, descriptions of the model's faults.
        """

    def finish_weight_update(self, version: int, keeps_cache: bool) -> Future[None]:
        """Continue sampling, with the loaded weights; called after all chunks."""


class WeightReceiver(Protocol):
    """Receives weights in an engine's worker, to which the receiver is sent pickled.

    Attributes:
        plan: the sender's plan.
    """

    plan: ChunkPlan

    def open(self, device: torch.device) -> None:
        """Connect to the sender; ``device`` is the worker's."""
        return

    def receive(self, chunk: int) -> Iterator[tuple[str, Tensor]]:
        """Wait for a chunk; yield its names and tensors, which are valid until the worker's call returns.

        Raises:
            EngineError: the chunk does not arrive.
        """

    def close(self) -> None:
        """Release the receiver's resources; another receiver may be opened next."""
        return


class WeightSender:
    """Sends a rank's weights to engines, or its shards to another rank. Not thread-safe, except for :meth:`interrupt`.

    A transport subclasses this and :class:`WeightReceiver`; the default of most methods is to do nothing.

    Attributes:
        plan: plan of the weights.
        bucket: uint8 tensor of the plan's size.
        destination: the rank to which sharded weights are gathered; None for all ranks.
    """

    plan: ChunkPlan
    bucket: Tensor
    destination: int | None = None

    def make_receivers(self, devices: Sequence[str]) -> Sequence[WeightReceiver]:
        """Return a receiver for each worker; earlier receivers become invalid.

        Args:
            devices: device of each worker (:attr:`UpdatableEngine.worker_devices`).
        """
        return []

    def connect(self) -> None:
        """Wait until all workers are connected; called while they open their receivers.

        Raises:
            EngineError: a worker does not connect.
        """
        return

    def fill(self, source: WeightSource) -> Iterator[int]:
        """Write a source's weights into the bucket, chunk by chunk, and yield each chunk's index.

        Every rank must iterate over all chunks if weights are sharded.

        Yields:
            The index of the chunk in the bucket, where it stays until the next one is requested.
        """
        return fill_bucket(self.plan, self.bucket, source, destination=self.destination)

    def send(self, chunk: int) -> None:
        """Send the chunk in the bucket; called while the workers receive it.

        Raises:
            EngineError: a worker does not receive the chunk. All workers then need new receivers and all weights.
        """
        return

    def interrupt(self, reason: str) -> None:
        """Make :meth:`connect` or :meth:`send` fail with ``reason``, until new receivers are made. Thread-safe."""
        return

    def close(self) -> None:
        """Release all resources, after the last engine has stopped using them. May be called twice."""
        self.bucket = torch.empty(0, dtype=torch.uint8)


class WeightUpdater:
    """Sends weights to engines, even while they sample. Each rank creates one, and calls it at the same points.

    If an engine dies during an update, other engines may have only a part of the weights. They stay paused until the
    next update has sent all weights.

    Args:
        sender: this rank's sender.
        keeps_cache: whether running requests keep the keys and values of the old weights.

    Attributes:
        deaths: errors of the engines that died in the last update.
        seconds: duration of the last update, from the first chunk on.
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
        """Have engines load a source's weights. Afterwards engines are paused, and awake except for their KV cache.

        This is a collective: sharded weights are gathered from all ranks, so that a rank takes part even if its engines
        die.

        Args:
            source: source of the weights, whose shapes must not change between calls.
            engines: this rank's engines; with standalone engines, empty on all ranks except 0.

        Raises:
            EngineError: a weight does not fit, or a parameter of an engine's model is not set.
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
        """Let the engines sample from the weights that were sent to them.

        Returns:
            The engines that do so; empty if an engine died before it had all weights.
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
        """Have the engines open their receivers, unless they are the engines of the last sync."""
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
        """If a connected engine has died, interrupt the sender, which may be waiting for it."""
        with self._lock:
            if engine in self._connected:
                self.sender.interrupt(ended.result().line)

    def _collect(self, answers: Mapping[UpdatableEngine, Future[T]], send: Callable[[], None] | None = None) -> list[T]:
        """Wait for the engines' results and return them; engines that died are removed from the update.

        Args:
            answers: future of the result of each engine's method.
            send: sends the data that the engines' methods receive; None if they receive none.

        Raises:
            EngineError: an engine rejected the call, or the sender failed although no engine died.
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
