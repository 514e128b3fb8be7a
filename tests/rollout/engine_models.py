"""Models that vLLM takes on a CPU (a head_dim of 32), and an engine that holds one."""

import asyncio
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_run
import numpy as np
import torch
from tiny import VOCABULARY
from torch import Tensor

from rlightning.models import load_policy, packed_logprobs
from rlightning.models.attention import packed_inputs
from rlightning.parallel.sharding import named_weights
from rlightning.rollout import Sampling, TokenSampler
from rlightning.rollout.engine import Engine, make_samples, vllm_sampling
from rlightning.rollout.engine_config import EngineConfig
from rlightning.rollout.engine_options import EngineOptions
from rlightning.rollout.engine_pool import EngineId
from rlightning.rollout.engine_relay import EngineRelay, RelayConnection, RemoteEngine
from rlightning.rollout.model_files import ModelFiles
from rlightning.rollout.requests import group_sampling
from rlightning.rollout.sampler import MAX_SUPPORT
from rlightning.rollout.weights import ChunkPlan, WeightSource, plan_chunks
from rlightning.rollout.weights.broadcast import BroadcastSender
from rlightning.rollout.weights.driver import WeightSender, WeightUpdater
from rlightning.rollout.weights.files import FileSender
from rlightning.rollout.weights.shared_memory import SharedMemorySender
from rlightning.rollout.weights.source import weight_shapes
from rlightning.rpc import background_loop
from rlightning.types import Prompt, RolloutBatch, Sample, single_turns
from rlightning.types.supports import Supports

CHARACTERS = "".join(list(VOCABULARY)[1:])


def save_model(folder: Path, **config: Any) -> str:
    """A tiny model with an opinion, and an output layer of its own."""
    return engine_run.save_model(folder, **{"tie_word_embeddings": False} | config)


def bare_config(log_file: Path, **kwargs: Any) -> EngineConfig:
    """Return the configuration of an engine on the CPU, without arguments of vLLM."""
    usual: dict[str, Any] = {"engine_args": {}, "device": torch.device("cpu"), "dtype": torch.float32}
    return EngineConfig(**usual | kwargs, log_file=log_file)


def engine_config(model_folder: str, log_file: Path, bucket_bytes: int = 1 << 20) -> EngineConfig:
    """Return the configuration of a small engine on the CPU."""
    engine_args = {
        "model": model_folder,
        "load_format": "dummy",
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 32,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 25,
        "distributed_executor_backend": "uni",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MAX_SUPPORT + 1,
        "worker_extension_cls": "rlightning.rollout.vllm.weight_receiver.WorkerExtension",
        "scheduler_cls": "rlightning.rollout.vllm.scheduler.make_scheduler",
    }
    return bare_config(
        log_file, engine_args=engine_args, bucket_bytes=bucket_bytes, files=ModelFiles.read(model_folder)
    )


def configure_engine(
    device: str,
    given: dict[str, Any],
    *,
    model_config: Any = None,
    max_model_length: int = 256,
    max_prompt_tokens: int | None = 16,
    max_new_tokens: int = 40,
    **options: Any,
) -> EngineConfig:
    """Return the configuration of a run's engine with the user's arguments."""
    module = SimpleNamespace(model_path="unused", max_model_length=max_model_length, model_config=model_config)
    chosen = EngineOptions(arguments={"kv_cache_memory_bytes": 1 << 28} | given, **options)
    sampling = Sampling(max_new_tokens=max_new_tokens)
    (config,) = chosen.configure(module, torch.device(device), sampling, max_prompt_tokens, Path("unused"))
    return config


@contextmanager
def running_engine(
    model_folder: str, log_file: Path, bucket_bytes: int = 1 << 20, worker: str = "", **environment: str
) -> Iterator[Engine]:
    """A small engine on the CPU; ``worker`` names another class than ours for its worker to extend."""
    config = engine_config(model_folder, log_file, bucket_bytes)
    config.engine_args["worker_extension_cls"] = worker or config.engine_args["worker_extension_cls"]
    config.environment.update(environment)
    with started(config) as engine:
        yield engine


@contextmanager
def started(config: EngineConfig) -> Iterator[Engine]:
    """Within, an engine that is up."""
    engine = Engine(config)
    engine.start()
    try:
        engine.ready.result()
        yield engine
    finally:
        engine.close()


@contextmanager
def relayed(engine: Engine) -> Iterator[RemoteEngine]:
    """Within, the engine as rank 0 has it from another rank."""
    key = b"key of the run" * 2
    relay = EngineRelay([engine], "127.0.0.1", key)
    connection = RelayConnection(relay.url, key)
    try:
        yield RemoteEngine(connection, EngineId(1, 0), engine.files)
    finally:
        background_loop().run(connection.close())
        relay.close()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Within, the process does nothing; what it is sent waits for it, in order."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def make_sender(transport: str, plan: ChunkPlan, folder: Path = Path("unused")) -> WeightSender:
    """On the CPU, by "shared memory", "broadcast" or "files"."""
    cpu = torch.device("cpu")
    if transport == "shared memory":
        return SharedMemorySender(plan, cpu)
    return FileSender(plan, cpu, folder=folder) if transport == "files" else BroadcastSender(plan, cpu)


class Weights(dict[str, Tensor]):
    """A source of these weights."""

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        return self.items()


def send(engine: Engine, source: WeightSource, weight_version: int) -> None:
    """Let the engine load a source's weights through a bucket of their own, and serve with them."""
    config = engine.config
    plan = plan_chunks(weight_shapes(source), config.dtype, config.bucket_bytes)
    updater = WeightUpdater(SharedMemorySender(plan, config.device))
    engine.weight_version = None
    assert engine.process is not None
    updater.update_weights(source, weight_version, [engine.process])
    updater.close()
    engine.weight_version = weight_version


def generate(engine: Engine, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling) -> list[list[Sample]]:
    """Sample each prompt so many times; its place is the number of its random stream."""
    answers = []
    for stream, prompt in enumerate(prompts):
        arguments = vllm_sampling(group_sampling(sampling, prompt, stream), num_samples, engine.files.end_token_ids)
        answers.append(engine.submit("generate", prompt.token_ids, arguments))
    pairs = zip(prompts, answers, strict=True)
    return [make_samples(engine.files, prompt.token_ids, answer.result()) for prompt, answer in pairs]


class Actor:
    """A policy on the CPU, whose weights a test changes at will."""

    def __init__(self, folder: str) -> None:
        self.model = load_policy(folder, torch.float32)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights by name, as ``RLModule.named_weights`` does."""
        yield from named_weights(self.model)

    @torch.no_grad()
    def perturb(self, seed: int) -> None:
        """Change every weight by a good share of its size."""
        generator = torch.Generator().manual_seed(seed)
        for weight in self.model.parameters():
            weight.add_(0.5 * weight.std(correction=0) * torch.randn(weight.shape, generator=generator))

    @torch.no_grad()
    def logprobs(self, prompt: Prompt, completion: Sample, temperature: float) -> Tensor:
        """[C], of the completion's tokens."""
        batch = RolloutBatch.pack(single_turns([prompt], [[completion]]))
        return packed_logprobs(self.model, batch, temperature=temperature)[0][batch.is_sampled]

    @torch.no_grad()
    def likeliest(self, prompt: Prompt, completion: Sample, count: int) -> Supports:
        """Supports of so many likeliest tokens for each of the completion's."""
        batch = RolloutBatch.pack(single_turns([prompt], [[completion]]))
        inputs = packed_inputs(batch.token_ids, batch.position_ids, batch.cu_seqlens, batch.max_length)
        logits = self.model(**inputs).logits[0, batch.sampled_index - 1]
        return Supports(logits.topk(count).indices.flatten().tolist(), [count] * len(completion.token_ids))

    @torch.no_grad()
    def greedy(self, prompt: Prompt, num_tokens: int) -> list[int]:
        """The likeliest tokens, one by one, as transformers itself sees it; up to and with token 0."""
        tokens = list(prompt.token_ids)
        length = torch.tensor([0, 0], dtype=torch.int32)
        while len(tokens) < len(prompt.token_ids) + num_tokens and (
            len(tokens) == len(prompt.token_ids) or tokens[-1] != 0
        ):
            length[1] = len(tokens)
            logits = self.model(
                torch.tensor([tokens]), use_cache=False, cu_seq_lens_q=length, max_length_q=len(tokens)
            ).logits
            tokens.append(int(logits[0, -1].argmax()))
        return tokens[len(prompt.token_ids) :]


def make_prompt(text: str, index: int = 0) -> Prompt:
    """A prompt, tokenized by character."""
    return Prompt(index, text, [VOCABULARY[character] for character in text], {})


def assert_sampled_from(
    actor: Actor, prompt: Prompt, completion: Sample, temperature: float = 1.0, *, atol: float = 1e-4
) -> None:
    """Compare each token's log-probability with the actor's."""
    expected = actor.logprobs(prompt, completion, temperature).numpy()
    np.testing.assert_allclose(completion.logprobs, expected, atol=atol)


def sample_all(
    sampler: TokenSampler, prompts: Sequence[Prompt], sampling: Sampling, num_samples: int = 4
) -> list[list[Sample]]:
    """Sample from all prompts at once, each with a stream of its own."""

    async def sample() -> list[list[Sample]]:
        calls = ((prompt.token_ids, group_sampling(sampling, prompt, prompt.index)) for prompt in prompts)
        return await asyncio.gather(*(sampler.sample(*call, num_samples=num_samples) for call in calls))

    return asyncio.run(sample())


PROMPTS = [make_prompt(text, index) for index, text in enumerate(["1+1=", "2+3=", "7", "12 + 34 = 46 "])]
LONG_PROMPT = make_prompt("12+3=15 " * 25)
"""It fills a block of the prefix cache, of 128 tokens."""
