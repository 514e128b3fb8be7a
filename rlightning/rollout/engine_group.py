"""One engine and the ranks whose devices it runs on: weights, prompts and completions on their way between them.

::

    ranks                 0        1        2        3              rollout.engine.tensor_parallel_size: 2
    engine of group       0 ------------    1 ------------          its process belongs to the group's first rank
    bucket of weights     0        1        2        3              one a rank, on its own device
    prompts               own  ->  0        own  ->  2              completions go back the same way

With an engine a rank, which is the usual case, each group is one rank, and nothing passes between ranks but the shards
of the weights.
"""

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rlightning.distributed.barrier import barrier
from rlightning.distributed.collectives import any_rank, exchange, gather_objects, global_rank, world_size
from rlightning.errors import ConfigError, EngineError
from rlightning.rollout.devices import lent_devices
from rlightning.rollout.engine import OnCompleted, Request, Sampling
from rlightning.rollout.engine_link import EngineDiedError, VLLMConfig
from rlightning.rollout.vllm_engine import VLLMEngine
from rlightning.rollout.weights import WeightBucket, Weights
from rlightning.types import Completion

log = logging.getLogger(__name__)


class EngineGroup:
    """The engine of this rank, which it may share with its neighbours. All ranks make one, and call it alike.

    Args:
        config: of the engine, as this rank would start it alone.
        num_ranks: neighbours, this one among them, that lend it their devices: its ``tensor_parallel_size``.

    Attributes:
        engine: None on a rank that only lends its device.
    """

    def __init__(self, config: VLLMConfig, *, num_ranks: int = 1) -> None:
        first = global_rank() // num_ranks * num_ranks
        self.ranks = range(first, first + num_ranks)
        self.config = replace(config, visible_devices=lent_devices(config.device, self.ranks))
        self.engine = VLLMEngine(self.config) if global_rank() == first else None
        self._bucket: WeightBucket | None = None
        self._handles: list[bytes] = []
        self._death: EngineDiedError | None = None
        self._has_restarted = False

    @property
    def can_sleep(self) -> bool:
        """Whether the engine gives its device's memory back while it is not needed."""
        return self.config.can_sleep

    @property
    def engines(self) -> list[VLLMEngine]:
        """The one of this rank, if it has one."""
        return [] if self.engine is None else [self.engine]

    @property
    def fresh(self) -> list[VLLMEngine]:
        """Those that a sync has to do with."""
        return self.engines

    def start(self) -> None:
        """Start the engine's process; returns before it is up."""
        if self.engine is not None:
            self.engine.start()

    def is_stale(self, weight_version: int) -> bool:
        """Whether this rank has an engine that holds other weights."""
        return self.engine is not None and self.engine.weight_version != weight_version

    def load_weights(self, weights: Callable[[], Weights], weight_version: int) -> None:
        """Bring the actor's weights into each engine that is stale; it is awake then, but for its KV cache.

        Sharded weights are gathered from all ranks, so all take part to the end, whatever becomes of their engines.

        Args:
            weights: gives names and tensors, whole or sharded, anew with each call.
            weight_version: of the weights.
        """
        if self._bucket is None:
            shapes = [(name, tuple(tensor.shape)) for name, tensor in weights()]
            config = self.config
            self._bucket = WeightBucket(shapes, config.dtype, config.device, config.bucket_bytes)
            received = exchange({self.ranks[0]: self._bucket.handle()}, name="buckets")
            self._handles = list(received.values())
        engine = self.engine if self.is_stale(weight_version) else None
        self._death = None
        self._meet("engine wakes")  # its neighbours' devices have room for it now
        if engine is not None:
            self._death = _attempt(engine.begin_loading, self._handles)
        for chunk in self._bucket.fill(weights()):
            self._meet("weights in the bucket")
            if engine is not None and self._death is None:
                self._death = _attempt(engine.load_chunk, chunk)
            self._meet("weights in the engine")

    def finish_loading(self, weight_version: int) -> None:
        """Let each engine that was stale take the memory for its KV cache, and be ready.

        Raises:
            EngineDiedError: if this rank's engine died, now or while it loaded.
            EngineError: if a parameter of its model was set by none of the weights.
        """
        self._meet("engine takes its KV cache")
        if self._death is not None:
            raise self._death
        if self.engine is not None and self.is_stale(weight_version):
            self.engine.finish_loading(weight_version)

    def generate(
        self,
        requests: Sequence[Request],
        num_samples: int,
        sampling: Sampling,
        on_completed: OnCompleted | None,
        send_weights: Callable[[], None],
    ) -> list[list[Completion]]:
        """Complete this rank's requests, in their order; an engine that dies is started again, once a step.

        Args:
            requests: prompts, each with the number of its random stream.
            num_samples: completions of each.
            sampling: how.
            on_completed: see :class:`~rlightning.rollout.engine.Generator`.
            send_weights: brings the current ones to all engines that need them; a collective.
        """
        work = self.take_in(requests)
        done: dict[int, list[Completion]] = {}
        while any_rank(len(done) < len(work), name="completions are there"):
            send_weights()
            todo = [i for i in range(len(work)) if i not in done]
            if self.engine is None or not todo:
                continue
            try:
                asked = [work[i][1] for i in todo]
                for position, completions in self.engine.generate_as_finished(asked, num_samples, sampling):
                    done[todo[position]] = completions
                    rank, (prompt, _) = work[todo[position]]
                    if on_completed is not None and rank == global_rank():
                        on_completed(prompt, completions)
            except EngineDiedError as error:
                self.restart(error)
        return self.hand_back([(work[i][0], done[i]) for i in range(len(work))])

    def restart(self, error: EngineDiedError) -> None:
        """Start this rank's engine again; whoever asks for completions next sends it the weights."""
        if self._has_restarted or self.engine is None:
            raise EngineError(f"The engine died twice in one step. {error}") from error
        self._has_restarted = True
        log.warning("The engine is restarted, once in this step: %s", str(error).splitlines()[0])
        self.engine.start()

    def forgive(self) -> None:
        """Let the engine die once more."""
        self._has_restarted = False

    def take_in(self, requests: Sequence[Request]) -> list[tuple[int, Request]]:
        """The requests of all ranks of the group, each with its rank, to the one that has the engine; else none."""
        if len(self.ranks) == 1:
            return [(self.ranks[0], request) for request in requests]
        received = exchange({self.ranks[0]: list(requests)}, name="prompts")
        return [(rank, request) for rank, some in received.items() for request in some]

    def hand_back(self, completed: Sequence[tuple[int, list[Completion]]]) -> list[list[Completion]]:
        """The completions of this rank's own requests, in their order.

        Args:
            completed: what :meth:`take_in` gave, completed, in its order.
        """
        if len(self.ranks) == 1:
            return [completions for _, completions in completed]
        if self.engine is None:
            parcels: dict[int, Any] = {}
        else:
            parcels = {rank: [found for to, found in completed if to == rank] for rank in self.ranks}
        return next(iter(exchange(parcels, name="completions").values()))

    def sleep(self) -> None:
        """Have the engine give its devices' memory back.

        Raises:
            EngineDiedError: if this rank's engine died meanwhile; its memory is free, then, too.
        """
        died = None if self.engine is None else _attempt(self.engine.sleep)
        self._meet("engine sleeps")
        if died is not None:
            raise died

    def close(self) -> None:
        """End the engine and give the bucket's memory back. May be called twice, and by one rank alone."""
        if self.engine is not None:
            self.engine.close()
        if self._bucket is not None:
            self._bucket.close()
            self._bucket = None

    def _meet(self, name: str) -> None:
        if len(self.ranks) > 1:
            barrier(name)


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


def _attempt(call: Callable[..., None], *arguments: Any) -> EngineDiedError | None:
    """Call; the engine's death is returned, so that this rank can go on with the others for now."""
    try:
        call(*arguments)
    except EngineDiedError as error:
        return error
    return None
