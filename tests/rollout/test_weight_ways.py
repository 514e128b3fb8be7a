"""The ways of the weights: what arrives at several workers, and what happens if one of them does not take it."""

import contextlib
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sharded_net
import torch
import torch.distributed as dist
from engine_models import Actor, make_prompt, running_engine, save_model
from torch import Tensor

from rlightning.errors import ConfigError, EngineError
from rlightning.rollout import Sampling, broadcast_bucket
from rlightning.rollout.broadcast_bucket import BroadcastBucket
from rlightning.rollout.folder_bucket import FolderBucket
from rlightning.rollout.rendezvous import join_rendezvous
from rlightning.rollout.transfer_group import Place, TransferSender
from rlightning.rollout.vllm_engine import VLLMEngine
from rlightning.rollout.weight_swap import group_by_device
from rlightning.rollout.weights import SendingEnd, Shapes, ShardGiver, WeightBucket, open_end

CPU = torch.device("cpu")
WAYS = ["shared memory", "broadcast", "folder"]
PATIENCE_SECONDS = 60.0
WEIGHTS = {"a": torch.randn(3, 5), "scalar": torch.tensor(2.5), "b": torch.randn(64), "c": torch.randn(9)}
LARGE = {"a": torch.ones(1000), "large": torch.ones(1 << 24)}
"""Too large for the buffers of a connection: it cannot be sent to somebody who takes nothing."""


def shapes_of(weights: dict[str, Tensor]) -> Shapes:
    return [(name, tuple(weight.shape)) for name, weight in weights.items()]


def make_end(way: str, shapes: Shapes, dtype: torch.dtype, bucket_bytes: int, folder: Path) -> SendingEnd:
    if way == "shared memory":
        return WeightBucket(shapes, dtype, CPU, bucket_bytes)
    if way == "folder":
        return FolderBucket(shapes, dtype, CPU, bucket_bytes, folder=folder)
    return BroadcastBucket(shapes, dtype, CPU, bucket_bytes)


def work(connection: Connection, device: torch.device) -> None:
    """A worker without vLLM: opens its end, tells what it gets, and keeps a process group of its own meanwhile."""
    torch.set_num_threads(1)
    c10d: Any = dist  # which has no types for its stores
    dist.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
    end = None
    while True:
        asked = connection.recv()
        try:
            if isinstance(asked, str):
                connection.send("idle")
            elif isinstance(asked, bytes):
                if end is not None:
                    end.close()
                end = open_end(asked, device)
                connection.send(None)
            else:
                assert end is not None
                received = end.receive(asked)
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
        assert self.connection.poll(PATIENCE_SECONDS), "no answer"
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
        while self.connection.poll(PATIENCE_SECONDS):
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


def connect(end: SendingEnd, workers: list[Worker], groups: list[int] | None = None) -> None:
    for worker, handle in zip(workers, end.handles(groups or [0] * len(workers)), strict=True):
        worker.ask(handle)
    end.connect()
    for worker in workers:
        worker.answer()


def wait_until_joined(place: Place) -> None:
    """Until the worker in this place has come to where the sender waits for it."""
    store = join_rendezvous(place.host, place.port, place.secret, PATIENCE_SECONDS)
    store.wait([f"joined/{place.rank}"], timedelta(seconds=PATIENCE_SECONDS))


def send(end: SendingEnd, workers: list[Worker], weights: dict[str, Tensor]) -> None:
    """Send all, and compare what arrives."""
    seen: list[str] = []
    for index in end.fill(weights.items()):
        for worker in workers:
            worker.ask(index)
        end.send(index)
        answers = [worker.answer() for worker in workers]
        for answer in answers:
            assert answer == {
                name: (tuple(weights[name].shape), weights[name].bfloat16().flatten()[:100].tolist()) for name in answer
            }
        seen += answers[0]
    assert index > 0 and seen == list(weights)


@pytest.mark.parametrize("way", WAYS)
def test_two_workers_get_all_of_every_sync(
    way: str, start_workers: Callable[[int], list[Worker]], tmp_path: Path
) -> None:
    workers = start_workers(2)
    end = make_end(way, shapes_of(WEIGHTS), torch.bfloat16, 600, tmp_path)
    connect(end, workers)
    for factor in (1.0, 2.0):
        send(end, workers, {name: weight * factor for name, weight in WEIGHTS.items()})
    # Another set of engines: those that were there open their ends anew.
    connect(end, workers[1:])
    send(end, workers[1:], WEIGHTS)
    end.close()
    end.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_workers_of_one_device_receive_weights_in_turn(start_workers: Callable[[int], list[Worker]]) -> None:
    workers = start_workers(3)
    end = BroadcastBucket(shapes_of(WEIGHTS), torch.bfloat16, CPU, 600, timeout=PATIENCE_SECONDS)
    connect(end, workers, groups=[0, 1, 0])
    send(end, workers, WEIGHTS)
    # One has died: new handles for the others, of whom two share a device.
    connect(end, workers[1:], groups=[1, 0])
    send(end, workers[1:], WEIGHTS)
    end.close()


@pytest.mark.long
def test_missing_worker_in_second_group_stops_first_group(
    start_workers: Callable[[int], list[Worker]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (worker,) = start_workers(1)
    timeouts = iter([PATIENCE_SECONDS, 1.0])  # only the second waits in vain

    def make_sender(*args: Any, **options: Any) -> TransferSender:
        return TransferSender(*args, **options | {"timeout": next(timeouts)})

    monkeypatch.setattr(broadcast_bucket, "TransferSender", make_sender)
    end = BroadcastBucket(shapes_of(WEIGHTS), torch.bfloat16, CPU, 600)
    worker.ask(end.handles([0, 1])[0])
    with pytest.raises(EngineError, match="no sign of number 0"):
        end.connect()
    worker.answer()  # it had been connected
    worker.ask(0)
    with pytest.raises(EngineError, match="Chunk 0 of the weights did not come"):
        worker.answer()
    end.close()


def test_when_all_engines_are_gone_nothing_is_sent() -> None:
    end = BroadcastBucket(shapes_of(WEIGHTS), torch.bfloat16, CPU, 600, timeout=3.0)
    assert end.handles([]) == []
    end.connect()
    for index in end.fill(WEIGHTS.items()):
        end.send(index)
    end.close()


def test_engines_on_the_same_devices_are_told_apart() -> None:
    def link(*names: str) -> Any:
        return SimpleNamespace(config=SimpleNamespace(visible_devices=names))

    assert group_by_device([link("2"), link("3"), link("2"), link("2"), link("3")]) == [0, 0, 1, 2, 1]
    assert group_by_device([link("2", "3"), link("4", "5"), link("2", "3")]) == [0, 0, 1]
    assert group_by_device([link(), link()]) == [0, 0]  # on other hosts, or on CPUs


@pytest.mark.long
def test_a_worker_that_never_comes_is_named(start_workers: Callable[[int], list[Worker]]) -> None:
    workers = start_workers(1)
    end = BroadcastBucket(shapes_of(WEIGHTS), torch.bfloat16, CPU, 600, timeout=5.0)
    handle, _ = end.handles([0, 0])
    workers[0].ask(handle)
    wait_until_joined(pickle.loads(handle)[-1])
    with pytest.raises(EngineError, match=r"no sign of number 1 of 0 to 1, and it took longer than 5 s"):
        end.connect()
    with pytest.raises(EngineError, match=r"No weights from 127\.0\.0\.1"):
        workers[0].answer()
    end.timeout = PATIENCE_SECONDS
    connect(end, workers)
    send(end, workers, WEIGHTS)
    end.close()


def test_a_worker_killed_between_chunks(start_workers: Callable[[int], list[Worker]]) -> None:
    killed, *others = start_workers(3)
    end = BroadcastBucket(shapes_of(LARGE), torch.bfloat16, CPU, 4000)
    connect(end, [killed, *others])
    chunks = end.fill(LARGE.items())
    for worker in [killed, *others]:
        worker.ask(next(chunks) if worker is killed else 0)
    end.send(0)
    for worker in [killed, *others]:
        worker.answer()
    killed.process.kill()
    killed.process.join()
    for worker in others:
        worker.ask(next(chunks) if worker is others[0] else 1)
    with pytest.raises(EngineError, match=r"^The engines' workers did not take chunk 1 of the weights: "):
        end.send(1)
    for worker in others:  # to whom some or all of it may have come
        with contextlib.suppress(EngineError):
            worker.answer()
    with pytest.raises(EngineError, match="There is no connection"):
        end.send(1)
    connect(end, others)
    send(end, others, LARGE)
    end.close()


@pytest.mark.slow
@pytest.mark.parametrize("timeout", [5.0, 600.0])
def test_a_worker_that_hangs(timeout: float, start_workers: Callable[[int], list[Worker]]) -> None:
    (hung,) = start_workers(1)
    end = BroadcastBucket(shapes_of(LARGE), torch.bfloat16, CPU, 1 << 30, timeout=timeout)
    connect(end, [hung])
    os.kill(hung.process.pid or 0, signal.SIGSTOP)
    next(end.fill(LARGE.items()))
    told = threading.Timer(0.5, end.interrupt, ["The engine hangs, it is said"])
    if timeout > PATIENCE_SECONDS:
        told.start()
    reason = "longer than 5 s" if timeout < PATIENCE_SECONDS else "The engine hangs, it is said"
    with pytest.raises(EngineError, match=rf"did not take chunk 0 of the weights: .*{reason}"):
        end.send(0)
    end.close()


def test_workers_learn_that_the_trainer_has_gone(start_workers: Callable[[int], list[Worker]]) -> None:
    (worker,) = start_workers(1)
    end = BroadcastBucket(shapes_of(WEIGHTS), torch.bfloat16, CPU, 600, timeout=600.0)
    connect(end, [worker])
    worker.ask(0)
    end.close()
    with pytest.raises(EngineError, match="Chunk 0 of the weights did not come"):
        worker.answer()


def test_strangers_cannot_reach_where_the_workers_meet() -> None:
    end = BroadcastBucket(shapes_of(WEIGHTS), torch.bfloat16, CPU, 600)
    port = pickle.loads(end.handles([0])[0])[-1].port
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if f":{port:04X} " in line]
    assert f"0100007F:{port:04X}" in listening and f"00000000:{port:04X}" not in listening
    end.close()
    elsewhere = BroadcastBucket(shapes_of(WEIGHTS), torch.bfloat16, CPU, 600, host="192.0.2.1")
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        elsewhere.handles([0])


def test_stale_weight_file_is_rejected(tmp_path: Path) -> None:
    """As a disk behind a network may show one."""
    weights = {"a": torch.zeros(64), "b": torch.zeros(64)}
    bucket = FolderBucket(shapes_of(weights), torch.float32, CPU, 256, folder=tmp_path, timeout=0.2)
    first, late = (open_end(handle, CPU) for handle in bucket.handles([0, 0]))
    old: dict[Path, bytes] = {}
    for index in bucket.fill(weights.items()):
        ((name, tensor),) = first.receive(index)
        assert (name, tensor.tolist()) == (list(weights)[index], [0.0] * 64)
        (file,) = tmp_path.iterdir()
        old[file] = file.read_bytes()
    for file, contents in old.items():
        file.write_bytes(contents)
    with pytest.raises(
        EngineError, match=r"Chunk 0 of the weights did not come: .*\.safetensors is not there, or of an"
    ):
        first.receive(0)
    for index in bucket.fill((name, weight + 1) for name, weight in weights.items()):
        for end in (first, late):
            ((_, tensor),) = end.receive(index)
            assert tensor.tolist() == [1.0] * 64
        for file, contents in old.items():
            if not file.exists():
                file.write_bytes(contents)
    bucket.close()
    assert list(tmp_path.iterdir()) == []


def test_interrupted_sync_leaves_no_file_next_succeeds(tmp_path: Path) -> None:
    weights = {"a": torch.zeros(64), "b": torch.zeros(64)}
    bucket = FolderBucket(shapes_of(weights), torch.float32, CPU, 256, folder=tmp_path, timeout=0.2)
    (end,) = (open_end(handle, CPU) for handle in bucket.handles([0]))
    for index in bucket.fill(weights.items()):
        end.receive(index)
        break
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(EngineError, match="Chunk 1 of the weights did not come"):
        end.receive(1)
    for index in bucket.fill((name, weight + 1) for name, weight in weights.items()):
        ((_, tensor),) = end.receive(index)
        assert tensor.tolist() == [1.0] * 64
    bucket.close()


def test_leftover_weight_files_of_killed_run_are_removed(tmp_path: Path) -> None:
    for name in ("weights-0-00000.safetensors", ".weights-0-00001.safetensors.partial", "mine.safetensors"):
        (tmp_path / name).touch()
    FolderBucket(shapes_of(WEIGHTS), torch.bfloat16, CPU, 600, folder=tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.safetensors"]


def fill_from_two_ranks(folder: Path) -> None:
    """Rank 0 alone has a bucket, and rank 1 gives its shards; in the end rank 0 has seen all weights."""
    net = sharded_net.shard_net(sharded_net.make_net(), 0, 1, 2)
    shapes = [(name, tuple(parameter.shape)) for name, parameter in net.named_parameters()]
    if dist.get_rank() == 1:
        assert list(ShardGiver(shapes, torch.bfloat16, 400, destination=0).fill(net.named_parameters()))[:2] == [0, 1]
        return
    bucket = FolderBucket(shapes, torch.bfloat16, CPU, 400, folder=folder / "weights", destination=0)
    (end,) = (open_end(handle, CPU) for handle in bucket.handles([0]))
    weights = dict(sharded_net.make_net().named_parameters())
    seen = []
    for index in bucket.fill(net.named_parameters()):
        for name, tensor in end.receive(index):
            seen.append(name)
            assert torch.equal(tensor, weights[name].bfloat16())
    assert seen == list(weights)
    bucket.close()


@pytest.mark.processes
@pytest.mark.slow
def test_the_other_ranks_give_their_shards(tmp_path: Path) -> None:
    sharded_net.run_ranks(fill_from_two_ranks, 2, tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder: str, tmp_path_factory: pytest.TempPathFactory, starts_processes: None) -> Iterator[VLLMEngine]:
    with running_engine(folder, tmp_path_factory.mktemp("log") / "engine.log") as engine:
        yield engine


@pytest.mark.parametrize("version", range(len(WAYS)))
def test_an_engine_samples_from_what_came(version: int, engine: VLLMEngine, folder: str, tmp_path: Path) -> None:
    actor = Actor(folder)
    actor.perturb(version)
    weights = {name: weight.detach() for name, weight in actor.weights()}
    end = make_end(WAYS[version], shapes_of(weights), torch.float32, 50_000, tmp_path)
    opened = engine.submit("open_bucket", end.handles([0]))
    end.connect()
    opened.result(PATIENCE_SECONDS)
    engine.submit("pause").result(PATIENCE_SECONDS)
    for index in end.fill(weights.items()):
        loaded = engine.submit("load_chunk", index)
        end.send(index)
        missing = loaded.result(PATIENCE_SECONDS)
    engine.submit("adopt", version, False).result(PATIENCE_SECONDS)
    end.close()
    assert index > 3 and missing == []
    engine.weight_version = version
    prompts = [make_prompt("1+1="), make_prompt("2+3=", 1)]
    for prompt, (completion,) in zip(prompts, engine.generate(prompts, 1, Sampling(max_new_tokens=12)), strict=True):
        expected = actor.logprobs(prompt, completion, 1.0).numpy()
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        assert completion.weight_versions.tolist() == [version] * len(completion.token_ids)


@pytest.mark.multigpu
def test_two_workers_on_one_other_gpu() -> None:
    sender, other = (torch.device("cuda", index) for index in range(2))
    weights = {name: weight.to(sender) for name, weight in LARGE.items()}
    workers = [Worker(other), Worker(other)]
    end = BroadcastBucket(shapes_of(weights), torch.bfloat16, sender, 4000, timeout=20.0)
    connect(end, workers, groups=[0, 1])
    for factor in (1.0, 2.0):
        send(end, workers, {name: weight * factor for name, weight in weights.items()})
    end.close()
    for worker in workers:
        worker.end()


@pytest.mark.multigpu
def test_workers_on_other_gpus() -> None:
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    sender, others = devices[0], devices[1:3]
    weights = {name: weight.to(sender) for name, weight in LARGE.items()}
    workers = [Worker(device) for device in others]
    end = BroadcastBucket(shapes_of(weights), torch.bfloat16, sender, 4000, timeout=20.0)
    connect(end, workers)
    for factor in (1.0, 2.0):
        send(end, workers, {name: weight * factor for name, weight in weights.items()})
    workers[0].process.kill()
    workers[0].process.join()
    next(end.fill(weights.items()))
    with pytest.raises(EngineError, match="did not take chunk 0"):
        for _ in range(64):  # NCCL keeps some for the one that is gone
            end.send(0)
    left = [*workers[1:], Worker(others[0])]
    connect(end, left)
    send(end, left, weights)
    end.close()
    for worker in left:
        worker.end()
