"""The transports of weights: what arrives at several workers, and what happens if one of them does not take it."""

import contextlib
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import sharded_net
import torch
import torch.distributed as dist
from engine_models import Weights, make_sender

from rlightning.errors import ConfigError, EngineError
from rlightning.rollout.weights import ChunkPlan, plan_chunks
from rlightning.rollout.weights import broadcast as broadcast_file
from rlightning.rollout.weights.broadcast import BroadcastSender, number_by_device
from rlightning.rollout.weights.driver import WeightReceiver, WeightSender
from rlightning.rollout.weights.files import FileSender
from rlightning.rollout.weights.rendezvous import Place, RendezvousServer, join_rendezvous

CPU = torch.device("cpu")
TRANSPORTS = ["shared memory", "broadcast", "files"]
TIMEOUT = 60.0
WEIGHTS = Weights(a=torch.randn(3, 5), scalar=torch.tensor(2.5), b=torch.randn(64), c=torch.randn(9))
LARGE = Weights(a=torch.ones(1000), large=torch.ones(1 << 24))
"""Too large for the buffers of a connection: it cannot be sent to a worker that takes nothing."""


def plan_of(weights: Weights, dtype: torch.dtype, bucket_bytes: int) -> ChunkPlan:
    return plan_chunks([(name, tuple(weight.shape)) for name, weight in weights.items()], dtype, bucket_bytes)


def scaled(weights: Weights, factor: float) -> Weights:
    return Weights((name, weight * factor) for name, weight in weights.items())


PLAN = plan_of(WEIGHTS, torch.bfloat16, 600)


def open_receivers(sender: WeightSender, count: int) -> list[WeightReceiver]:
    """In this process, as they come to workers."""
    receivers: list[WeightReceiver] = [pickle.loads(pickle.dumps(one)) for one in sender.make_receivers([""] * count)]
    for receiver in receivers:
        receiver.open(CPU)
    return receivers


def work(connection: Connection, device: torch.device) -> None:
    """A worker without vLLM: makes its receiver, tells what it gets, and keeps a process group of its own meanwhile."""
    torch.set_num_threads(1)
    c10d: Any = dist  # which has no types for its stores
    dist.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
    receiver = None
    while True:
        asked = connection.recv()
        try:
            if isinstance(asked, str):
                connection.send("idle")
            elif isinstance(asked, bytes):
                if receiver is not None:
                    receiver.close()
                receiver = pickle.loads(asked)
                receiver.open(device)
                connection.send(None)
            else:
                assert receiver is not None
                received = receiver.receive(asked)
                connection.send({name: (tuple(one.shape), one.flatten()[:100].tolist()) for name, one in received})
            dist.all_reduce(torch.ones(1))
        except EngineError as error:
            connection.send(error)


class Worker:
    """Asks a process that runs :func:`work`."""

    def __init__(self, device: torch.device = CPU) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, device), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, asked: bytes | int | str) -> None:
        self.connection.send(asked)

    def answer(self) -> Any:
        assert self.connection.poll(TIMEOUT), "no answer"
        answer = self.connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def is_idle(self) -> bool:
        """Whether it lives, and has nothing to do any more."""
        if not self.process.is_alive():
            return False
        os.kill(self.process.pid or 0, signal.SIGCONT)
        self.ask("idle?")
        while self.connection.poll(TIMEOUT):
            if self.connection.recv() == "idle":
                return True
        return False

    def end(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture(scope="module")
def workers_on_cpu(starts_processes: None) -> Iterator[list[Worker]]:
    """Those that outlive a test."""
    workers: list[Worker] = []
    yield workers
    for worker in workers:
        worker.end()


@pytest.fixture
def start_workers(workers_on_cpu: list[Worker]) -> Iterator[Callable[[int], list[Worker]]]:
    def start(num_workers: int) -> list[Worker]:
        workers_on_cpu[:] = [worker for worker in workers_on_cpu if worker.is_idle()]
        workers_on_cpu.extend(Worker() for _ in range(num_workers - len(workers_on_cpu)))
        assert all(worker.is_idle() for worker in workers_on_cpu)
        return workers_on_cpu[:num_workers]

    yield start
    for worker in workers_on_cpu:
        if worker.process.is_alive():
            os.kill(worker.process.pid or 0, signal.SIGCONT)


def connect(sender: WeightSender, workers: list[Worker], devices: list[str] | None = None) -> None:
    for worker, receiver in zip(workers, sender.make_receivers(devices or [""] * len(workers)), strict=True):
        worker.ask(pickle.dumps(receiver))
    sender.connect()
    for worker in workers:
        worker.answer()


def limit_waits(sender: BroadcastSender, seconds: float) -> None:
    """Let the sender's side alone time out after so many seconds: workers have all the time to connect."""
    for group in sender._groups:
        group.place = replace(group.place, timeout=seconds)


def wait_until_joined(place: Place) -> None:
    """Until the worker in this place has come to where the sender waits for it."""
    store = join_rendezvous(place)
    store.wait([f"joined/{place.rank}"], timedelta(seconds=TIMEOUT))


def send(sender: WeightSender, workers: list[Worker], weights: Weights) -> None:
    """Send all, and compare what arrives."""
    seen: list[str] = []
    for index in sender.fill(weights):
        for worker in workers:
            worker.ask(index)
        sender.send(index)
        answers = [worker.answer() for worker in workers]
        for answer in answers:
            assert answer == {
                name: (tuple(weights[name].shape), weights[name].bfloat16().flatten()[:100].tolist()) for name in answer
            }
        seen += answers[0]
    assert index > 0 and seen == list(weights)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_workers_get_all_of_every_sync(
    transport: str, start_workers: Callable[[int], list[Worker]], tmp_path: Path
) -> None:
    workers = start_workers(2)
    sender = make_sender(transport, PLAN, tmp_path)
    connect(sender, workers)
    for factor in (1.0, 2.0):
        send(sender, workers, scaled(WEIGHTS, factor))
    # Another set of engines: those that were there open their ends anew.
    connect(sender, workers[1:])
    send(sender, workers[1:], WEIGHTS)
    sender.close()
    sender.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_workers_of_one_device_receive_weights_in_turn(start_workers: Callable[[int], list[Worker]]) -> None:
    workers = start_workers(3)
    sender = BroadcastSender(PLAN, CPU, timeout=TIMEOUT)
    connect(sender, workers, devices=["2", "2", "3"])
    send(sender, workers, WEIGHTS)
    # One has died: new handles for the others, of whom two share a device.
    connect(sender, workers[1:], devices=["2", "2"])
    send(sender, workers[1:], WEIGHTS)
    sender.close()


@pytest.mark.long
def test_missing_worker_in_second_group_stops_first_group(
    start_workers: Callable[[int], list[Worker]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (worker,) = start_workers(1)
    timeouts = iter([TIMEOUT, 1.0])  # the second group alone times out

    def make_server(host: str, size: int, timeout: float) -> RendezvousServer:
        return RendezvousServer(host, size, next(timeouts))

    monkeypatch.setattr(broadcast_file, "RendezvousServer", make_server)
    sender = BroadcastSender(PLAN, CPU)
    worker.ask(pickle.dumps(sender.make_receivers(["2", "2"])[0]))
    with pytest.raises(EngineError, match="no sign of number 0"):
        sender.connect()
    worker.answer()  # it had been connected
    worker.ask(0)
    with pytest.raises(EngineError, match="Chunk 0 of the weights did not come"):
        worker.answer()
    sender.close()


def test_when_all_engines_are_gone_nothing_is_sent() -> None:
    sender = BroadcastSender(PLAN, CPU, timeout=3.0)
    assert sender.make_receivers([]) == []
    sender.connect()
    for index in sender.fill(WEIGHTS):
        sender.send(index)
    sender.close()


def test_workers_on_the_same_device_are_numbered() -> None:
    assert number_by_device(["2", "3", "2", "2", "3"]) == [0, 0, 1, 2, 1]
    assert number_by_device(["2", "3", "4", "5", "2", "3"]) == [0, 0, 0, 0, 1, 1]  # three engines of two workers
    assert number_by_device(["", ""]) == [0, 0]  # on other hosts, or on CPUs


@pytest.mark.long
def test_a_worker_that_never_comes_is_named(start_workers: Callable[[int], list[Worker]]) -> None:
    workers = start_workers(1)
    sender = BroadcastSender(PLAN, CPU, timeout=TIMEOUT)
    receiver, _ = sender.make_receivers(["", ""])
    workers[0].ask(pickle.dumps(receiver))
    wait_until_joined(receiver._place)
    limit_waits(sender, 1.0)
    with pytest.raises(EngineError, match=r"no sign of number 1 of 0 to 1, and it took longer than 1 s"):
        sender.connect()
    with pytest.raises(EngineError, match=r"No weights from 127\.0\.0\.1"):
        workers[0].answer()
    connect(sender, workers)
    send(sender, workers, WEIGHTS)
    sender.close()


def test_a_worker_killed_between_chunks(start_workers: Callable[[int], list[Worker]]) -> None:
    killed, *others = start_workers(3)
    sender = BroadcastSender(plan_of(LARGE, torch.bfloat16, 4000), CPU)
    connect(sender, [killed, *others])
    chunks = sender.fill(LARGE)
    for worker in [killed, *others]:
        worker.ask(next(chunks) if worker is killed else 0)
    sender.send(0)
    for worker in [killed, *others]:
        worker.answer()
    killed.process.kill()
    killed.process.join()
    for worker in others:
        worker.ask(next(chunks) if worker is others[0] else 1)
    with pytest.raises(EngineError, match=r"^The engines' workers did not take chunk 1 of the weights: "):
        sender.send(1)
    for worker in others:  # to whom some or all of it may have come
        with contextlib.suppress(EngineError):
            worker.answer()
    with pytest.raises(EngineError, match="There is no connection"):
        sender.send(1)
    connect(sender, others)
    send(sender, others, LARGE)
    sender.close()


@pytest.mark.slow
@pytest.mark.parametrize("timeout", [5.0, 600.0])
def test_a_worker_that_hangs(timeout: float, start_workers: Callable[[int], list[Worker]]) -> None:
    (hung,) = start_workers(1)
    sender = BroadcastSender(plan_of(LARGE, torch.bfloat16, 1 << 30), CPU, timeout=600.0)
    connect(sender, [hung])
    limit_waits(sender, timeout)
    os.kill(hung.process.pid or 0, signal.SIGSTOP)
    next(sender.fill(LARGE))
    told = threading.Timer(0.5, sender.interrupt, ["The engine hangs, it is said"])
    if timeout > TIMEOUT:
        told.start()
    reason = "longer than 5 s" if timeout < TIMEOUT else "The engine hangs, it is said"
    with pytest.raises(EngineError, match=rf"did not take chunk 0 of the weights: .*{reason}"):
        sender.send(0)
    sender.close()


def test_workers_learn_that_the_trainer_has_gone(start_workers: Callable[[int], list[Worker]]) -> None:
    (worker,) = start_workers(1)
    sender = BroadcastSender(PLAN, CPU, timeout=600.0)
    connect(sender, [worker])
    worker.ask(0)
    sender.close()
    with pytest.raises(EngineError, match="Chunk 0 of the weights did not come"):
        worker.answer()


def test_strangers_cannot_reach_where_the_workers_meet() -> None:
    sender = BroadcastSender(PLAN, CPU)
    port = sender.make_receivers([""])[0]._place.port
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if f":{port:04X} " in line]
    assert f"0100007F:{port:04X}" in listening and f"00000000:{port:04X}" not in listening
    sender.close()
    elsewhere = BroadcastSender(PLAN, CPU, host="192.0.2.1")
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        elsewhere.make_receivers([""])


ZEROS = Weights(a=torch.zeros(64), b=torch.zeros(64))
ONES = Weights(a=torch.ones(64), b=torch.ones(64))
IN_TWO_FILES = plan_of(ZEROS, torch.float32, 256)


def test_stale_weight_file_is_rejected(tmp_path: Path) -> None:
    """As a disk behind a network may show one."""
    sender = FileSender(IN_TWO_FILES, CPU, folder=tmp_path, timeout=0.2)
    first, late = open_receivers(sender, 2)
    old: dict[Path, bytes] = {}
    for index in sender.fill(ZEROS):
        ((name, tensor),) = first.receive(index)
        assert (name, tensor.tolist()) == (list(ZEROS)[index], [0.0] * 64)
        (file,) = tmp_path.iterdir()
        old[file] = file.read_bytes()
    for file, contents in old.items():
        file.write_bytes(contents)
    with pytest.raises(
        EngineError, match=r"Chunk 0 of the weights did not come: .*\.safetensors is not there, or of an"
    ):
        first.receive(0)
    for index in sender.fill(ONES):
        for receiver in (first, late):
            ((_, tensor),) = receiver.receive(index)
            assert tensor.tolist() == [1.0] * 64
        for file, contents in old.items():
            if not file.exists():
                file.write_bytes(contents)
    sender.close()
    assert list(tmp_path.iterdir()) == []


def test_interrupted_sync_leaves_no_file_next_succeeds(tmp_path: Path) -> None:
    sender = FileSender(IN_TWO_FILES, CPU, folder=tmp_path, timeout=0.2)
    (receiver,) = open_receivers(sender, 1)
    for index in sender.fill(ZEROS):
        receiver.receive(index)
        break
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(EngineError, match="Chunk 1 of the weights did not come"):
        receiver.receive(1)
    for index in sender.fill(ONES):
        ((_, tensor),) = receiver.receive(index)
        assert tensor.tolist() == [1.0] * 64
    sender.close()


def test_leftover_weight_files_of_killed_run_are_removed(tmp_path: Path) -> None:
    for name in ("weights-0-00000.safetensors", ".weights-0-00001.safetensors.partial", "mine.safetensors"):
        (tmp_path / name).touch()
    FileSender(PLAN, CPU, folder=tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.safetensors"]


def fill_from_two_ranks(folder: Path) -> None:
    """Rank 0 alone has a bucket, and rank 1 gives its shards; in the end rank 0 has seen all weights."""
    sharded = Weights(sharded_net.shard_net(sharded_net.make_net(), 0, 1, 2).named_parameters())
    plan = plan_of(sharded, torch.bfloat16, 400)
    if dist.get_rank() == 1:
        assert list(WeightSender(plan, destination=0).fill(sharded))[:2] == [0, 1]
        return
    sender = FileSender(plan, CPU, folder=folder / "weights", destination=0)
    (receiver,) = open_receivers(sender, 1)
    weights = dict(sharded_net.make_net().named_parameters())
    seen = []
    for index in sender.fill(sharded):
        for name, tensor in receiver.receive(index):
            seen.append(name)
            assert torch.equal(tensor, weights[name].bfloat16())
    assert seen == list(weights)
    sender.close()


@pytest.mark.processes
@pytest.mark.slow
def test_the_other_ranks_give_their_shards(tmp_path: Path) -> None:
    sharded_net.run_ranks(fill_from_two_ranks, 2, tmp_path)


@pytest.mark.multigpu
def test_workers_on_other_gpus() -> None:
    own, *others = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    weights = Weights({name: weight.to(own) for name, weight in LARGE.items()})
    sender = BroadcastSender(plan_of(weights, torch.bfloat16, 4000), own, timeout=20.0)
    pair, workers = [Worker(others[0]), Worker(others[0])], [Worker(device) for device in others[:2]]
    for connected, devices in ((pair, ["1", "1"]), (workers, None)):
        connect(sender, connected, devices)
        for factor in (1.0, 2.0):
            send(sender, connected, scaled(weights, factor))
    workers[0].process.kill()
    workers[0].process.join()
    next(sender.fill(weights))
    with pytest.raises(EngineError, match="did not take chunk 0"):
        for _ in range(64):  # NCCL keeps some for the one that is gone
            sender.send(0)
    left = [*workers[1:], Worker(others[0])]
    connect(sender, left)
    send(sender, left, weights)
    sender.close()
    for worker in [*pair, *left]:
        worker.end()
