"""For controller.py: each step from end to end, the bytes between this process and Ray, its GPU; Ray's object store."""

import json
import math
import os
import subprocess
from time import perf_counter
from typing import Any

import torch
from probes import CSVTrace

from rlightning.parallel.execution_mode import is_controller
from rlightning.run_dir import run_dir


class Traffic:
    """Counts what Ray pickles and unpickles in this process, in bytes.

    Attributes:
        sent: arguments of calls, and what is put into the object store.
        received: results of calls, and what is read from the object store.
        fetched: of these, what handles to tensors stood for.
    """

    def __init__(self) -> None:
        self.sent = self.received = self.fetched = 0

    def watch(self) -> None:
        """Begin to count, for the rest of the process's life."""
        from ray._private.serialization import SerializationContext

        from rlightning.controller.object_store import RayBlock

        context: Any = SerializationContext
        block: Any = RayBlock
        serialize, deserialize, read_all = context.serialize, context.deserialize_objects, block.read_all

        def serialize_counted(self_: Any, value: Any) -> Any:
            found = serialize(self_, value)
            self.sent += found.total_bytes
            return found

        def deserialize_counted(self_: Any, found: Any, *rest: Any, **named: Any) -> Any:
            self.received += sum(memoryview(data).nbytes for data, *_ in found if data is not None)
            return deserialize(self_, found, *rest, **named)

        def read_all_counted(blocks: Any) -> Any:
            before = self.received
            found = read_all(blocks)
            self.fetched += self.received - before
            return found

        context.serialize, context.deserialize_objects = serialize_counted, deserialize_counted
        block.read_all = staticmethod(read_all_counted)


class StepTrace(CSVTrace):
    """Writes each step's seconds since the end of the one before, and from its own beginning; bytes in a controller."""

    def __init__(self) -> None:
        super().__init__("steps", ["seconds", "inside", "sent", "received", "fetched"])
        self.traffic = Traffic()
        self._ended = self._begun = 0.0
        self._counted = (0, 0, 0)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """The first step lasts from here."""
        if is_controller():
            self.traffic.watch()
        self._ended = perf_counter()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a step."""
        super().on_train_batch_start(trainer, module, batch, batch_idx)
        self._begun = perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write the step."""
        now, traffic = perf_counter(), self.traffic
        counted = (traffic.sent, traffic.received, traffic.fetched)
        new = [count - before for count, before in zip(counted, self._counted, strict=True)]
        self.write(trainer, now - self._ended, now - self._begun, *new)
        self._ended, self._counted = now, counted

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Write what a controller has on GPUs, while its workers are there."""
        if is_controller():
            found = {
                "is_initialized": torch.cuda.is_initialized(),
                "mib": own_mib(worker_processes(trainer.strategy.group)),
            }
            (run_dir(trainer) / "device.json").write_text(json.dumps(found))


def object_store_bytes() -> float:
    """What is used of Ray's object store, of all nodes, as these last reported it."""
    import ray

    name = "object_store_memory"
    return float(ray.cluster_resources()[name] - ray.available_resources().get(name, 0.0))


def worker_processes(group: Any) -> list[int]:
    """The process ids of a group's workers."""
    import ray

    return ray.get([actor.process_id.options(concurrency_group="commands").remote() for actor in group.actors])


def own_mib(others: list[int]) -> float | None:
    """What this process holds of the GPUs' memory; None where nvidia-smi does not tell, even of the ``others``."""
    held = held_mib()
    return held.get(os.getpid(), 0.0) if held.keys() & set(others) else None


def held_mib() -> dict[int, float]:
    """MiB of the GPUs' memory by process id, as nvidia-smi has it; NaN where it lists a process and no number."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    held: dict[int, float] = {}
    for line in printed.splitlines():
        pid, _, mib = (part.strip() for part in line.partition(","))
        if pid.isdecimal():
            number = float(mib) if mib.isdecimal() else math.nan
            held[int(pid)] = held.get(int(pid), 0.0) + number
    return held
