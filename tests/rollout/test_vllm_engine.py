"""The engine against the actor: what it samples, with what probability, from which weights."""

import asyncio
import json
import math
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import (
    CHARACTERS,
    LONG_PROMPT,
    PROMPTS,
    Actor,
    Weights,
    assert_sampled_from,
    generate,
    make_prompt,
    running_engine,
    save_model,
    send,
    stopped,
)
from engine_run import find_core
from tiny import VOCABULARY
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rlightning.errors import EngineDiedError, EngineError, RequestRefusedError
from rlightning.rollout import Sampler, Sampling
from rlightning.rollout.engine import Engine
from rlightning.rollout.prefix_cache import PrefixCacheUse
from rlightning.rollout.requests import group_sampling
from rlightning.rollout.weights import plan_chunks
from rlightning.rollout.weights.broadcast import BroadcastSender
from rlightning.rollout.weights.driver import WeightUpdater
from rlightning.rollout.weights.files import FileSender
from rlightning.rollout.weights.shared_memory import SharedMemorySender
from rlightning.rollout.weights.source import weight_shapes
from rlightning.types import Prompt, Sample

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


def sample_texts(
    engine: Engine, seed: int | None, num_samples: int = 4, prompts: list[Prompt] = PROMPTS, stop: tuple[str, ...] = ()
) -> list[list[str]]:
    return texts(generate(engine, prompts, num_samples, Sampling(max_new_tokens=16, seed=seed, stop=stop)))


def test_tokens_that_the_prefix_cache_has_are_counted(engine: Engine, actor: Actor) -> None:
    engine.prefix_cache.take()
    for num_cached in (0, 128):
        asyncio.run(engine.sample(LONG_PROMPT.token_ids, GREEDY))
        assert engine.prefix_cache.take() == PrefixCacheUse(len(LONG_PROMPT.token_ids), num_cached)


def test_prompts_own_temperature_and_limit_are_the_engines(engine: Engine, actor: Actor) -> None:
    own = [PROMPTS[0]._replace(temperature=2.0, max_new_tokens=3), PROMPTS[1]._replace(temperature=0.5)]
    groups = generate(engine, own, 16, Sampling(max_new_tokens=16))
    for prompt, group, longest in zip(own, groups, (3, 16), strict=True):
        assert all(len(completion.token_ids) <= longest for completion in group)
        for completion in group:
            assert_sampled_from(actor, prompt, completion, prompt.temperature or 1.0)
    assert max(len(completion.token_ids) for completion in groups[1]) > 3


def test_tokens_come_as_sampled_with_the_actors_logprobs(engine: Engine, actor: Actor) -> None:
    num_samples = 16  # so many are not alike by chance
    groups = generate(engine, PROMPTS, num_samples, Sampling(max_new_tokens=16))
    assert [len(group) for group in groups] == [num_samples] * len(PROMPTS)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        assert len({completion.token_ids.tobytes() for completion in group}) > 1
        for completion in group:
            assert_sampled_from(actor, prompt, completion)
    completions = [completion for group in groups for completion in group]
    characters = {token: character for character, token in VOCABULARY.items()}
    for completion in completions:
        tokens = completion.token_ids.tolist()
        assert len(tokens) == len(completion.logprobs) == len(completion.weight_versions)
        if completion.finish_reason == "stop":
            assert tokens[-1] == 0 and 0 not in tokens[:-1]
        else:
            assert len(tokens) == 16 and 0 not in tokens and completion.is_truncated
        assert completion.text == "".join(characters[token] for token in tokens if token)
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}


def test_a_stop_string_ends_a_completion(engine: Engine, actor: Actor) -> None:
    (group,) = generate(engine, PROMPTS[:1], 32, Sampling(max_new_tokens=32, stop=("1", "+2")))
    stopped = [completion for completion in group if completion.finish_reason == "stop"]
    by_string = [completion for completion in stopped if completion.token_ids[-1] != 0]
    assert by_string
    # It was sampled and is trained, so it is in the tokens and in the text, and no more after it.
    for completion in by_string:
        whole = "".join(CHARACTERS[token - 1] for token in completion.token_ids)
        assert completion.text == whole and whole.endswith(("1", "+2"))
        assert not any(stop in whole[:-1] for stop in ("1", "+2"))


def test_decoded_text_matches_vllm_with_stop_strings(engine: Engine, actor: Actor) -> None:
    assert sample_texts(engine, 5, 8) == sample_texts(engine, 5, 8, stop=("never",))


def test_a_stop_token_ends_a_completion(engine: Engine, actor: Actor) -> None:
    (free,) = generate(engine, PROMPTS[:1], 32, Sampling(max_new_tokens=32))
    sampled = Counter(int(token) for completion in free for token in completion.token_ids if token)
    tokens = tuple(token for token, _ in sampled.most_common(2))
    (group,) = generate(engine, PROMPTS[:1], 32, Sampling(max_new_tokens=32, stop_token_ids=tokens))
    assert {completion.token_ids[-1] for completion in group} >= set(tokens)
    for completion in group:
        assert not set(tokens) & set(completion.token_ids[:-1].tolist())
        assert completion.is_truncated == (completion.token_ids[-1] not in (0, *tokens))
        assert completion.text == "".join(CHARACTERS[token - 1] for token in completion.token_ids if token)


def change_files(engine: Engine, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let the trainer have read something else of the model's files than the engine has."""
    own = engine.config.files
    assert own is not None and own.end_token_ids == (0,)
    monkeypatch.setattr(engine, "config", replace(engine.config, files=replace(own, **changes)))


@pytest.mark.processes
def test_trainer_decides_what_ends_a_completion_and_what_it_says(
    engine: Engine, actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has read that token 0 ends one; the trainer has read that 3 does, and that "1" stands for token 2."""
    vocabulary = {character: (3 - token if token in (1, 2) else token) for character, token in VOCABULARY.items()}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    change_files(engine, monkeypatch, end_token_ids=(3,), tokenizer=tokenizer)
    (group,) = generate(engine, PROMPTS[:1], 32, Sampling(max_new_tokens=32, seed=1))
    swapped = {token: character for character, token in vocabulary.items()}
    assert any(0 in completion.token_ids[:-1] for completion in group)
    for completion in group:
        *before, last = completion.token_ids.tolist()
        assert 3 not in before and (last == 3) == (completion.finish_reason == "stop")
        kept = before if last == 3 else [*before, last]
        assert completion.text == "".join(swapped[token] for token in kept if token)


@pytest.mark.processes
def test_neighbouring_seeds_sample_independently(engine: Engine, actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    change_files(engine, monkeypatch, end_token_ids=())  # short completions are alike by chance
    runs = [sample_texts(engine, seed, 8) for seed in (0, 1, 2)]
    # Each with each, and each sample with those of all other prompts and numbers.
    assert len({text for run in runs for group in run for text in group}) == 3 * len(PROMPTS) * 8


@pytest.mark.processes
def test_a_seed_repeats_what_was_sampled(engine: Engine, actor: Actor) -> None:
    first = sample_texts(engine, 7)
    assert sample_texts(engine, 7) == first
    others = [sample_texts(engine, seed) for seed in (8, None, None)]
    assert first not in others and others[1] != others[2]
    # Prompts that are alike do not get completions that are alike, nor do samples of one.
    same = sample_texts(engine, 7, prompts=[PROMPTS[0]] * 4)
    assert len({text for group in same for text in group}) > 12


def test_a_stream_stays_the_requests_own(engine: Engine, actor: Actor) -> None:
    # What is asked again after a restart comes out as it would have, whatever was done before.
    sampling = Sampling(max_new_tokens=16, seed=7)
    own = [group_sampling(sampling, prompt, 5 * i) for i, prompt in enumerate(PROMPTS)]

    async def sample() -> tuple[list[list[Sample]], list[Sample]]:
        calls = (engine.sample(prompt.token_ids, s, num_samples=4) for prompt, s in zip(PROMPTS, own, strict=True))
        return await asyncio.gather(*calls), await engine.sample(PROMPTS[2].token_ids, own[2], num_samples=4)

    whole, again = asyncio.run(sample())
    assert texts([again]) == texts([whole[2]])


def test_engine_is_a_sampler_on_any_event_loop(engine: Engine, actor: Actor) -> None:
    sampler: Sampler = engine
    sampler.update_weights(actor, 3)
    sampling = Sampling(max_new_tokens=16, seed=7)

    async def sample_all() -> list[list[Sample]]:
        own = [group_sampling(sampling, prompt, 5 * i) for i, prompt in enumerate(PROMPTS)]
        with stopped(find_core(engine.process.pid if engine.process else 0)):
            long = Sampling(max_new_tokens=200)
            doomed = asyncio.ensure_future(sampler.sample(PROMPTS[0].token_ids, long, num_samples=64))
            await asyncio.sleep(0.05)
            doomed.cancel()
        calls = (sampler.sample(prompt.token_ids, s, num_samples=4) for prompt, s in zip(PROMPTS, own, strict=True))
        groups = await asyncio.gather(*calls)
        assert doomed.cancelled()
        return groups

    groups = asyncio.run(sample_all())
    assert texts(groups) != texts(generate(engine, PROMPTS, 4, sampling)), "whose streams are others"
    assert texts(groups)[0] == texts(generate(engine, PROMPTS, 4, sampling))[0], "but for the first"
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for one in group:
            assert set(one.weight_versions) == {3} == {sampler.weight_version}
            assert_sampled_from(actor, prompt, one)


def test_a_stream_gives_the_beginnings_of_its_samples(engine: Engine, actor: Actor) -> None:
    sampling, prompt = Sampling(max_new_tokens=64, seed=7), PROMPTS[1]
    parts: list[list[int]] = [[] for _ in range(4)]

    async def sample() -> tuple[list[Sample], list[Sample]]:
        for _ in range(50):  # on a busy machine all may have been sampled before anything could be read
            if any(parts):
                break
            streamed = await engine.stream(
                lambda number, token_ids: parts[number].extend(token_ids), prompt.token_ids, sampling, num_samples=4
            )
        return streamed, await engine.sample(prompt.token_ids, sampling, num_samples=4)

    streamed, whole = asyncio.run(sample())
    assert [one.token_ids for one in streamed] == [one.token_ids for one in whole]
    assert any(parts)
    for one, part in zip(streamed, parts, strict=True):
        assert one.token_ids.tolist()[: len(part)] == part
        assert_sampled_from(actor, prompt, one)


def test_a_schema_is_followed_and_part_of_the_log_probability(engine: Engine, actor: Actor) -> None:
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


def test_score_is_the_actors(engine: Engine, actor: Actor) -> None:
    prompt, completion = make_prompt("1"), "2+34=46"
    tokens = make_prompt("1" + completion).token_ids
    scored = asyncio.run(engine.score(tokens))
    np.testing.assert_array_equal(engine.score_all(np.array([tokens])), [scored])
    assert scored.shape == (8,) and scored[0] == 0
    given = Sample(tokens[1:], [0.0] * 7, [0] * 7, completion, "stop")
    np.testing.assert_allclose(scored[1:], actor.logprobs(prompt, given, 1.0).numpy(), atol=1e-4)


def test_weights_that_are_missing_are_named(engine: Engine, actor: Actor) -> None:
    fewer = Weights((name, weight) for name, weight in actor.named_weights() if "layers.1.self_attn" not in name)
    with pytest.raises(EngineError, match=r"^\d+ of the engine's parameters .* such as model\.layers\.1\.self_attn\."):
        send(engine, fewer, 4)
    assert engine.weight_version is None


def test_weights_of_another_shape_are_refused_by_the_engine(engine: Engine, actor: Actor) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    wrong = Weights((n, w[:, :100] if n == name else w) for n, w in actor.named_weights())
    with pytest.raises(EngineError, match=rf"{name} \(64, 100\) does not fit the engine's model"):
        send(engine, wrong, 4)


def test_a_request_that_the_engine_refuses_is_an_error(engine: Engine, actor: Actor) -> None:
    with pytest.raises(EngineError, match=r"(?s)refused a request.*256"):
        generate(engine, [make_prompt("1" * 300)], 1, GREEDY)
    assert generate(engine, PROMPTS, 1, GREEDY)  # and it goes on


def test_on_the_cpu_it_never_sleeps(engine: Engine, actor: Actor) -> None:
    engine.sleep()
    assert engine.weight_version == 0
    assert generate(engine, PROMPTS[:1], 1, GREEDY)


@pytest.mark.parametrize("transport", [SharedMemorySender, BroadcastSender, FileSender])
def test_engine_samples_from_weights_of_each_transport(
    transport: Callable[..., Any], engine: Engine, actor: Actor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor.perturb(1)
    plan = plan_chunks(weight_shapes(actor), torch.float32, 50_000)
    folder = {"folder": tmp_path} if transport is FileSender else {}
    updater = WeightUpdater(transport(plan, torch.device("cpu"), **folder))
    assert engine.process is not None
    asked: list[str] = []
    submit = engine.process.submit

    def noted(method: str, *arguments: Any) -> Any:
        asked.append(method)
        return submit(method, *arguments)

    monkeypatch.setattr(engine.process, "submit", noted)
    for version in (7, 8):
        updater.send_weights(actor, [engine.process])
        assert updater.activate_weights(version) == [engine.process]
    assert len(plan.chunks) > 3
    sync = ["receive_weights"] * len(plan.chunks) + ["finish_weight_update"]
    assert asked == ["open_weight_receivers", *sync, *sync]
    updater.close()
    for prompt, (completion,) in zip(PROMPTS, generate(engine, PROMPTS, 1, Sampling()), strict=True):
        assert_sampled_from(actor, prompt, completion)
        assert set(completion.weight_versions) == {8}


@pytest.mark.processes
def test_tied_weights_travel_once(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", tie_word_embeddings=True)
    actor = Actor(folder)
    names = [name for name, _ in actor.named_weights()]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    with running_engine(folder, tmp_path / "engine.log") as engine:
        for version in (0, 1):
            send(engine, actor, version)
            for prompt, group in zip(PROMPTS, generate(engine, PROMPTS, 2, Sampling()), strict=True):
                for completion in group:
                    assert_sampled_from(actor, prompt, completion)
            actor.perturb(version)


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
