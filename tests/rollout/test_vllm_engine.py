"""The engine against the actor: what it samples, with what probability, from which weights."""

import asyncio
import json
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import (
    LONG_PROMPT,
    PROMPTS,
    Actor,
    Weights,
    assert_sampled_from,
    generate,
    make_sender,
    relayed,
    running_engine,
    save_model,
    send,
)
from engine_run import find_core
from tiny import VOCABULARY
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rlightning.errors import EngineDiedError, EngineError, RequestRefusedError
from rlightning.rollout import Sampling
from rlightning.rollout.engine import Engine
from rlightning.rollout.engine_pool import EngineId, EnginePool
from rlightning.rollout.engine_relay import RemoteEngine
from rlightning.rollout.prefix_cache import PrefixCacheUse
from rlightning.rollout.weights import plan_chunks
from rlightning.rollout.weights.driver import WeightUpdater
from rlightning.rollout.weights.source import weight_shapes
from rlightning.types import Sample

GREEDY = Sampling(temperature=0, max_new_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def census(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the engine counts what its process holds, when it is pinged."""
    return tmp_path_factory.mktemp("engine") / "census.json"


@pytest.fixture(scope="module")
def engine(folder: str, census: Path, starts_processes: None) -> Iterator[Engine]:
    counting = {"worker": "engine_census.Census", "CENSUS": str(census), "PYTHONPATH": str(Path(__file__).parent)}
    # A bucket that takes several chunks: the model has about 400 kB of weights, none larger than 33 kB.
    with running_engine(folder, census.with_name("engine.log"), bucket_bytes=50_000, **counting) as engine:
        yield engine


@pytest.fixture
def actor(folder: str, engine: Engine) -> Actor:
    """The actor as it was saved; the engine holds its weights as version 0."""
    actor = Actor(folder)
    send(engine, actor, 0)
    return actor


def texts(groups: list[list[Sample]]) -> list[list[str]]:
    return [[completion.text for completion in group] for group in groups]


def test_tokens_that_the_prefix_cache_has_are_counted(engine: Engine, actor: Actor) -> None:
    engine.prefix_cache.take()
    for num_cached in (0, 128):
        asyncio.run(engine.sample(LONG_PROMPT.token_ids, GREEDY))
        assert engine.prefix_cache.take() == PrefixCacheUse(len(LONG_PROMPT.token_ids), num_cached)


def test_decoded_text_matches_vllm_with_stop_strings(engine: Engine, actor: Actor) -> None:
    free, stopped = (
        texts(generate(engine, PROMPTS, 8, Sampling(max_new_tokens=16, seed=5, stop=stop))) for stop in ((), ("never",))
    )
    assert free == stopped


@pytest.mark.processes
def test_trainers_tokenizer_decides_ends_and_texts(
    engine: Engine, actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has read that token 0 ends one; the trainer has read that 3 does, and that "1" stands for token 2."""
    vocabulary = {character: (3 - token if token in (1, 2) else token) for character, token in VOCABULARY.items()}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    assert engine.files.end_token_ids == (0,)
    files = replace(engine.files, end_token_ids=(3,), tokenizer=tokenizer)
    monkeypatch.setattr(engine, "config", replace(engine.config, files=files))
    (group,) = generate(engine, PROMPTS[:1], 32, Sampling(max_new_tokens=32, seed=1))
    swapped = {token: character for character, token in vocabulary.items()}
    assert any(0 in completion.token_ids[:-1] for completion in group)
    for completion in group:
        *before, last = completion.token_ids.tolist()
        assert 3 not in before and (last == 3) == (completion.finish_reason == "stop")
        kept = before if last == 3 else [*before, last]
        assert completion.text == "".join(swapped[token] for token in kept if token)


def test_a_stream_gives_the_beginnings_of_its_samples(engine: Engine, actor: Actor) -> None:
    sampling, prompt = Sampling(max_new_tokens=64, seed=7), PROMPTS[1]
    parts: list[list[int]] = [[] for _ in range(4)]

    async def sample() -> tuple[list[Sample], list[Sample]]:
        for _ in range(50):  # on a busy machine all may have been sampled before anything could be read
            if any(parts):
                break
            streamed = await engine.sample(
                prompt.token_ids,
                sampling,
                num_samples=4,
                on_tokens=lambda number, token_ids: parts[number].extend(token_ids),
            )
        return streamed, await engine.sample(prompt.token_ids, sampling, num_samples=4)

    streamed, whole = asyncio.run(sample())
    assert [one.token_ids for one in streamed] == [one.token_ids for one in whole]
    assert any(parts)
    for one, part in zip(streamed, parts, strict=True):
        assert one.token_ids.tolist()[: len(part)] == part
        assert_sampled_from(actor, prompt, one)


def test_schema_is_followed_and_part_of_log_probabilities(engine: Engine, actor: Actor) -> None:
    sampling = Sampling(max_new_tokens=16, seed=3, json_schema='{"enum": [12, 345]}')
    samples = asyncio.run(engine.sample(PROMPTS[0].token_ids, sampling, num_samples=32))
    assert {one.text for one in samples} == {"12", "345"}
    whole = {text: sum(next(one.logprobs for one in samples if one.text == text)) for text in ("12", "345")}
    assert sum(map(math.exp, whole.values())) == pytest.approx(1.0, abs=1e-3)
    with pytest.raises(RequestRefusedError):
        asyncio.run(engine.sample(PROMPTS[0].token_ids, Sampling(json_schema='{"type": "nothing"}')))
    assert generate(engine, PROMPTS[:1], 1, GREEDY)


def test_engine_samples_from_new_weights_after_update(engine: Engine, actor: Actor) -> None:
    prompts, before = [*PROMPTS, LONG_PROMPT], None
    for version in (0, 1, 2, 3):
        if version:
            actor.perturb(version)
            send(engine, actor, version)
        assert engine.weight_version == version
        after = generate(engine, prompts, 1, GREEDY)
        for prompt, (completion,) in zip(prompts, after, strict=True):
            assert completion.token_ids.tolist() == actor.greedy(prompt, 12)
            assert all(logprob <= 0 for logprob in completion.logprobs)
            assert completion.weight_versions.tolist() == [version] * len(completion.token_ids)
        for prompt, (completion,) in zip(prompts, generate(engine, prompts, 1, Sampling()), strict=True):
            assert_sampled_from(actor, prompt, completion)
        assert texts(after) != before
        before = texts(after)


def test_keys_and_values_of_old_weights_are_forgotten(engine: Engine, actor: Actor) -> None:
    """Also if other weights come under the same version, as those of another trainer may."""
    sampling = Sampling(max_new_tokens=4)
    ((before,),) = generate(engine, [LONG_PROMPT], 1, sampling)
    actor.perturb(1)
    send(engine, actor, 0)
    ((after,),) = generate(engine, [LONG_PROMPT], 1, sampling)
    assert_sampled_from(actor, LONG_PROMPT, after)
    assert abs(before.logprobs - actor.logprobs(LONG_PROMPT, before, 1.0).numpy()).max() > 0.01


def test_weights_that_are_missing_are_named(engine: Engine, actor: Actor) -> None:
    fewer = Weights((name, weight) for name, weight in actor.named_weights() if "layers.1.self_attn" not in name)
    with pytest.raises(EngineError, match=r"^\d+ of the engine's parameters .* such as model\.layers\.1\.self_attn\."):
        send(engine, fewer, 4)
    assert engine.weight_version is None


def test_weights_of_another_shape_are_refused(engine: Engine, actor: Actor) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    wrong = Weights((n, w[:, :100] if n == name else w) for n, w in actor.named_weights())
    with pytest.raises(EngineError, match=rf"{name} \(64, 100\) does not fit the engine's model"):
        send(engine, wrong, 4)


def test_on_the_cpu_it_never_sleeps(engine: Engine, actor: Actor) -> None:
    engine.sleep()
    assert engine.weight_version == 0
    assert generate(engine, PROMPTS[:1], 1, GREEDY)


@pytest.mark.parametrize("transport", ["shared memory", "broadcast", "files"])
def test_engine_samples_from_weights_of_each_transport(
    transport: str, engine: Engine, actor: Actor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor.perturb(1)
    plan = plan_chunks(weight_shapes(actor), torch.float32, 50_000)
    updater = WeightUpdater(make_sender(transport, plan, tmp_path))
    assert engine.process is not None
    asked: list[str] = []
    submit = engine.process.submit

    def noted(method: str, *arguments: Any) -> Any:
        asked.append(method)
        return submit(method, *arguments)

    monkeypatch.setattr(engine.process, "submit", noted)
    for version in (7, 8):
        assert updater.update_weights(actor, version, [engine.process]) == [engine.process]
    assert len(plan.chunks) > 3
    sync = ["receive_weights"] * len(plan.chunks) + ["finish_weight_update"]
    assert asked == ["open_weight_receivers", *sync, *sync]
    updater.close()
    for prompt, (completion,) in zip(PROMPTS, generate(engine, PROMPTS, 1, Sampling()), strict=True):
        assert_sampled_from(actor, prompt, completion)
        assert set(completion.weight_versions) == {8}


@pytest.mark.processes
def test_a_killed_core_ends_a_waiting_call(folder: str, tmp_path: Path) -> None:
    """At once, not after the 120 s in which an engine may be silent; vLLM itself would let it wait for ever."""
    with running_engine(folder, tmp_path / "engine.log") as engine:
        assert engine.process is not None
        core = find_core(engine.process.pid)
        os.kill(core, signal.SIGSTOP)
        answer = engine.submit("ping")
        with pytest.raises(EngineError, match="no method 'abort'"):
            engine.submit("abort").result(100)  # answered without the core, after the ping has been handed to it
        os.kill(core, signal.SIGKILL)
        with pytest.raises(EngineDiedError, match="The engine died"):
            answer.result(100)


@pytest.mark.processes
def test_relayed_death_is_the_engines_death(folder: str, tmp_path: Path) -> None:
    async def sample(remote: RemoteEngine, pid: int) -> None:
        pool = EnginePool({EngineId(1, 0): remote}, (found := asyncio.Event()).set)
        pool.set_serving({EngineId(1, 0)})
        os.kill(pid, signal.SIGSTOP)  # so that it dies before it has answered
        request = asyncio.ensure_future(pool.sample(PROMPTS[0].token_ids, GREEDY))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(found.wait(), 60)
        assert pool.num_serving == 0 and not request.done()
        with pytest.raises(EngineDiedError, match="The engine died"):
            await remote.sample([1], GREEDY)
        request.cancel()

    with running_engine(folder, tmp_path / "engine.log") as engine, relayed(engine) as remote:
        send(engine, Actor(folder), 0)
        assert engine.process is not None
        asyncio.run(sample(remote, engine.process.pid))


def test_engine_process_holds_weights_once_without_trainer_state(engine: Engine, actor: Actor, census: Path) -> None:
    """Also after weights have come and been used. vLLM pads the vocabulary of both embeddings to 64 rows."""
    generate(engine, PROMPTS, 1, GREEDY)
    engine.submit("ping").result(500)
    weights = dict(actor.named_weights())
    padding = sum(
        (64 - weight.shape[0]) * weight[0].nbytes for weight in weights.values() if len(weight) == len(VOCABULARY)
    )
    assert json.loads(census.read_text()) == {
        "parameter_bytes": sum(weight.nbytes for weight in weights.values()) + padding,
        "Optimizer": 0,
        "FSDPModule": 0,
        "PreTrainedModel": 0,
    }
