"""A weight update: from the actor's shards to each engine's ``load_weights``.

::

    trainer, every rank                        an engine's process                   each of its workers
    WeightSync.sync_weights, _send
    RankEngines.update_weights
      WeightUpdater.update_weights
        _connect, if the engines are not those of the update before:
          WeightSender.make_receivers
          open_weight_receivers -------------> VLLMServer.open_weight_receivers ---> rl_open_receiver
          WeightSender.connect <===================================================> WeightReceiver.open
        for each chunk:
          WeightSender.fill: gather it into the bucket
          receive_weights -------------------> VLLMServer.receive_weights ---------> rl_receive_weights
          WeightSender.send  ==== the bucket's bytes, by the transport ============> WeightReceiver.receive
                                                                                     model.load_weights
        on_loaded: room for the KV cache
        finish_weight_update ----------------> VLLMServer.finish_weight_update

``-->`` is :meth:`EngineConnection.submit`: one message to each engine for each chunk, and one at the end. The first
chunk pauses the engine's requests, or wakes a sleeping engine, and ``finish_weight_update`` continues with the new
version.

A transport is a sender in the trainer, and receivers, which the sender makes and the workers open:
:mod:`~rlightning.rollout.weights.transports` chooses one.
"""

import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlightning.errors import EngineDiedError, EngineError
from rlightning.parallel.barrier import barrier
from rlightning.parallel.device import synchronize_stream
from rlightning.parallel.gathering import gather_into
from rlightning.rollout.weights.source import ChunkPlan, ChunkViews, WeightSource


class UpdatableEngine(Protocol):
    """A running engine, as a weight update uses it.

    Attributes:
        ended: future of the error, done when the engine is dead.
    """

    ended: Future[EngineError]

    @property
    def worker_devices(self) -> Sequence[str]:
        """The name of each worker's device, unique on this host; "" if unknown."""

    def submit(self, method: str, *arguments: object) -> Future[Any]:
        """Call a method of :class:`~rlightning.rollout.vllm.server.VLLMServer`, and return a future of its result.

        A weight update calls ``open_weight_receivers``, ``receive_weights`` and ``finish_weight_update``. The future
        fails with an EngineDiedError if the engine dies, and with another EngineError if it rejects the call.
        """


class WeightReceiver(Protocol):
    """Receives weights in an engine's worker, to which the receiver is sent pickled.

    Attributes:
        plan: the sender's plan.
    """

    plan: ChunkPlan

    def open(self, device: torch.device) -> None:
        """Connect to the sender; ``device`` is the worker's."""
        return

    def receive(self, chunk: int) -> Iterable[tuple[str, Tensor]]:
        """Wait for a chunk; return its names and tensors, which are valid until the worker's call returns.

        Raises:
            EngineError: the chunk does not arrive.
        """

    def close(self) -> None:
        """Release the receiver's resources; another receiver may be opened next."""
        return


class WeightSender:
    """Sends a rank's weights to engines, or its shards to another rank. Not thread-safe, except for :meth:`interrupt`.

    A transport subclasses this and :class:`WeightReceiver`; the default of most methods is to do nothing.

    Args:
        plan: plan of the weights.
        bucket: uint8 tensor of the plan's size; None on a rank that only sends its shards to another rank.
        destination: the rank to which sharded weights are gathered; None for all ranks.
    """

    def __init__(self, plan: ChunkPlan, bucket: Tensor | None = None, *, destination: int | None = None) -> None:
        self.plan, self.destination = plan, destination
        self.bucket = torch.empty(plan.num_bytes, dtype=torch.uint8, device="meta") if bucket is None else bucket
        self._views: ChunkViews | None = None

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

    @torch.no_grad()
    def fill(self, source: WeightSource) -> Iterator[int]:
        """Copy or gather a source's weights into the bucket, chunk by chunk, and yield each chunk's index.

        Every rank must iterate over all chunks if weights are sharded.

        Yields:
            The index of the chunk in the bucket, where it stays until the next one is requested.

        Raises:
            EngineError: the source's weights are not those of the plan.
        """
        self._views = self._views or ChunkViews(self.plan, self.bucket)
        weights = self.plan.match(source)
        for index, chunk in enumerate(self.plan.sent_chunks(source)):
            places: list[Tensor] = []
            tensors: list[Tensor] = []
            for (_, place), (_, tensor) in zip(self._views.tensors(index), islice(weights, len(chunk)), strict=True):
                if isinstance(tensor, DTensor) or index < self.plan.num_adapter_chunks:
                    places.append(place)
                    tensors.append(tensor)
                else:  # immediately: a source may compute each weight on request, and need not keep it
                    gather_into([place], [tensor], destination=self.destination)
            gather_into(places, tensors, destination=self.destination)
            # Another process reads the bucket, which this process's streams do not order.
            synchronize_stream(self.bucket.device)
            yield index
        next(weights, None)  # raises an error if there are more

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
        self.bucket, self._views = torch.empty(0, dtype=torch.uint8), None


class WeightUpdater:
    """Sends weights to engines, even while they sample. Each rank creates one, and calls it at the same points.

    If an engine dies during an update, other engines may have only a part of the weights. They stay paused until the
    next update has sent all weights.

    Args:
        sender: this rank's sender.
        keeps_cache: whether running requests keep the keys and values of the old weights.
        is_shared: whether ranks share an engine, whose workers read the buckets of all of these ranks.

    Attributes:
        deaths: errors of the engines that died in the last update.
        seconds: duration of the last update, from the first chunk on.
    """

    def __init__(self, sender: WeightSender, *, keeps_cache: bool = True, is_shared: bool = False) -> None:
        self.sender, self.keeps_cache, self.is_shared = sender, keeps_cache, is_shared
        self.deaths: list[EngineDiedError] = []
        self.seconds = 0.0
        self._engines: list[UpdatableEngine] = []
        self._connected: list[UpdatableEngine] = []
        self._lock = threading.Lock()

    def update_weights(
        self,
        source: WeightSource,
        version: int,
        engines: Sequence[UpdatableEngine],
        on_loaded: Callable[[], None] = lambda: None,
    ) -> Sequence[UpdatableEngine]:
        """Have engines load a source's weights, and sample from them.

        This is a collective: sharded weights are gathered from all ranks, so that a rank takes part even if its engines
        die.

        Args:
            source: source of the weights, whose shapes must not change between calls.
            version: version of the weights.
            engines: this rank's engines; with standalone engines, empty on all ranks except 0.
            on_loaded: called when the engines have the weights. They are paused, and awake except for their KV cache.

        Returns:
            The engines that sample from the weights; empty if an engine died before it had all weights.

        Raises:
            EngineError: a weight does not fit, or a parameter of an engine's model is not set.
        """
        self._engines, self.deaths = list(engines), []
        self._connect()
        faults = set[str]()
        started_at = time.monotonic()
        for chunk in self.sender.fill(source):
            self._synchronize("weights in the bucket")
            if chunk == 0:
                started_at = time.monotonic()
            if self._engines and not self.deaths:
                answers = [engine.submit("receive_weights", chunk) for engine in self._engines]
                faults.update(*self._collect(answers, partial(self.sender.send, chunk)))
            self._synchronize("weights in the engine")
        if faults and not self.deaths:
            raise EngineError(" ".join(sorted(faults)))
        on_loaded()
        self._synchronize("engine takes its KV cache")
        if self.deaths:
            return []
        self._collect([engine.submit("finish_weight_update", version, self.keeps_cache) for engine in self._engines])
        self.seconds = time.monotonic() - started_at
        return self._engines

    def close(self) -> None:
        """Release the sender's memory. May be called twice."""
        self.sender.close()

    def _connect(self) -> None:
        """Have the engines open their receivers, unless they are the engines of the last update."""
        if not self._engines or self._engines == self._connected:
            return
        with self._lock:
            self._connected = list(self._engines)
        devices = [device for engine in self._engines for device in engine.worker_devices]
        receivers = map(pickle.dumps, self.sender.make_receivers(devices))
        answers = [
            engine.submit("open_weight_receivers", list(islice(receivers, len(engine.worker_devices))))
            for engine in self._engines
        ]
        for engine in self._connected:
            engine.ended.add_done_callback(partial(self._interrupt, engine))
        self._collect(answers, self.sender.connect)

    def _interrupt(self, engine: UpdatableEngine, ended: Future[EngineError]) -> None:
        """If a connected engine has died, interrupt the sender, which may be waiting for it."""
        with self._lock:
            if engine in self._connected:
                self.sender.interrupt(ended.result().line)

    def _collect(self, answers: Sequence[Future[Any]], send: Callable[[], None] = lambda: None) -> list[Any]:
        """Wait for the engines' results and return them; engines that died are removed from the update.

        Args:
            answers: future of the result of each engine's method.
            send: sends the data that the engines' methods receive.

        Raises:
            EngineError: an engine rejected the call, or the sender failed although no engine died.
        """
        failure: EngineError | None = None
        try:
            send()
        except EngineError as error:
            failure = error
        wait(answers)
        results = []
        for engine, answer in zip(list(self._engines), answers, strict=True):
            death = answer.exception()
            if isinstance(death, EngineDiedError):
                self._engines.remove(engine)
                self.deaths.append(death)
            elif failure is None:
                results.append(answer.result())
        if failure is not None and not self.deaths:
            raise failure
        return results

    def _synchronize(self, name: str) -> None:
        """Wait for the ranks that share an engine."""
        if self.is_shared:
            barrier(name)
