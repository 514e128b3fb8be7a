"""The engine against the actor: what it samples, with what probability, from which weights."""

import asyncio
import json
import math
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import CHARACTERS, Actor, Weights, make_prompt, running_engine, save_model, send, stopped
from engine_run import find_core
from tiny import VOCABULARY
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rlightning.errors import EngineDiedError, EngineError, RequestRefusedError
from rlightning.rollout import Sampler, Sampling
from rlightning.rollout.engine import Engine
from rlightning.rollout.engine_config import EngineConfig
from rlightning.rollout.prefix_cache import PrefixCacheUse
from rlightning.rollout.requests import group_sampling
from rlightning.rollout.vllm.launcher import engine_environment
from rlightning.rollout.vllm.server import VLLMServer
from rlightning.types import Prompt, Sample

PROMPTS = [make_prompt(text, index) for index, text in enumerate(["1+1=", "2+3=", "7", "12 + 34 = 46 "])]
LONG_PROMPT = make_prompt("12+3=15 " * 25)
"""It fills a block of the prefix cache, of 128 tokens."""
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


def assert_sampled_from(actor: Actor, prompt: Prompt, completion: Sample, temperature: float) -> None:
    expected = actor.logprobs(prompt, completion, temperature).numpy()
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def texts(groups: list[list[Sample]]) -> list[list[str]]:
    return [[completion.text for completion in group] for group in groups]


def test_weights_first(folder: str, engine: Engine) -> None:
    engine.weight_version = None
    with pytest.raises(EngineError, match="not been sent any weights yet"):
        engine.generate(PROMPTS, 1, GREEDY)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_are_the_actors(engine: Engine, actor: Actor, temperature: float) -> None:
    num_samples = 16  # so many are not alike by chance
    groups = engine.generate(PROMPTS, num_samples, Sampling(temperature=temperature, max_new_tokens=16))
    assert [len(group) for group in groups] == [num_samples] * len(PROMPTS)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        assert len({completion.token_ids.tobytes() for completion in group}) > 1
        for completion in group:
            assert_sampled_from(actor, prompt, completion, temperature)


@pytest.mark.parametrize(
    "truncation", [{"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.1}, {"top_p": 0.9, "top_k": 5, "min_p": 0.02}]
)
def test_truncated_logprobs_are_the_actors(engine: Engine, actor: Actor, truncation: dict[str, Any]) -> None:
    """As closely as plain ones; without the supports they are further apart than that by orders of magnitude."""
    sampling = Sampling(temperature=0.9, max_new_tokens=12, seed=0, **truncation)
    groups = engine.generate(PROMPTS, 8, sampling)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            assert_sampled_from(actor, prompt, completion, 0.9)
            supports = completion.supports
            assert (
                supports is not None and min(supports.sizes) >= 1 and len(supports.sizes) == len(completion.token_ids)
            )
            assert max(supports.sizes) <= truncation.get("top_k", len(VOCABULARY))
            completion.supports = None
            gap = np.abs(completion.logprobs - actor.logprobs(prompt, completion, 0.9).numpy())
            assert gap.max() > 1e-3


def test_plain_requests_beside_truncated_ones_have_no_supports(engine: Engine, actor: Actor) -> None:
    async def sample_both() -> list[list[Sample]]:
        kinds = Sampling(max_new_tokens=8), Sampling(max_new_tokens=8, top_k=2), GREEDY
        return await asyncio.gather(*(engine.sample(PROMPTS[0].token_ids, one) for one in kinds))

    (plain,), (cut,), (greedy,) = asyncio.run(sample_both())
    assert plain.supports is None and greedy.supports is None
    assert cut.supports is not None and set(cut.supports.sizes) <= {1, 2}
    for completion in (plain, cut):
        assert_sampled_from(actor, PROMPTS[0], completion, 1.0)


def test_tokens_that_the_prefix_cache_has_are_counted(engine: Engine, actor: Actor) -> None:
    engine.prefix_cache.take()
    for num_cached in (0, 128):
        asyncio.run(engine.sample(LONG_PROMPT.token_ids, GREEDY))
        assert engine.prefix_cache.take() == PrefixCacheUse(len(LONG_PROMPT.token_ids), num_cached)


def test_prompts_own_temperature_and_limit_are_the_engines(engine: Engine, actor: Actor) -> None:
    own = [PROMPTS[0]._replace(temperature=2.0, max_new_tokens=3), PROMPTS[1]._replace(temperature=0.5)]
    groups = engine.generate(own, 16, Sampling(max_new_tokens=16))
    for prompt, group, longest in zip(own, groups, (3, 16), strict=True):
        assert all(len(completion.token_ids) <= longest for completion in group)
        for completion in group:
            assert_sampled_from(actor, prompt, completion, prompt.temperature or 1.0)
    assert max(len(completion.token_ids) for completion in groups[1]) > 3


def test_tokens_come_as_sampled(engine: Engine, actor: Actor) -> None:
    groups = engine.generate(PROMPTS, 16, Sampling(max_new_tokens=16))
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
    (group,) = engine.generate(PROMPTS[:1], 32, Sampling(max_new_tokens=32, stop=("1", "+2")))
    stopped = [completion for completion in group if completion.finish_reason == "stop"]
    by_string = [completion for completion in stopped if completion.token_ids[-1] != 0]
    assert by_string
    # It was sampled and is trained, so it is in the tokens and in the text, and no more after it.
    for completion in by_string:
        whole = "".join(CHARACTERS[token - 1] for token in completion.token_ids)
        assert completion.text == whole and whole.endswith(("1", "+2"))
        assert not any(stop in whole[:-1] for stop in ("1", "+2"))


def test_decoded_text_matches_vllm_with_stop_strings(engine: Engine, actor: Actor) -> None:
    def sample(stop: tuple[str, ...]) -> list[list[str]]:
        return texts(engine.generate(PROMPTS, 8, Sampling(max_new_tokens=16, seed=5, stop=stop)))

    assert sample(()) == sample(("never",))


def test_a_stop_token_ends_a_completion(engine: Engine, actor: Actor) -> None:
    (free,) = engine.generate(PROMPTS[:1], 32, Sampling(max_new_tokens=32))
    sampled = Counter(int(token) for completion in free for token in completion.token_ids if token)
    tokens = tuple(token for token, _ in sampled.most_common(2))
    (group,) = engine.generate(PROMPTS[:1], 32, Sampling(max_new_tokens=32, stop_token_ids=tokens))
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
    (group,) = engine.generate(PROMPTS[:1], 32, Sampling(max_new_tokens=32, seed=1))
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

    def sample(seed: int) -> list[list[str]]:
        return texts(engine.generate(PROMPTS, 8, Sampling(max_new_tokens=16, seed=seed)))

    runs = [sample(seed) for seed in (0, 1, 2)]
    # Each with each, and each sample with those of all other prompts and numbers.
    assert len({text for run in runs for group in run for text in group}) == 3 * len(PROMPTS) * 8


@pytest.mark.processes
def test_a_seed_repeats_what_was_sampled(engine: Engine, actor: Actor) -> None:
    def sample(seed: int | None, prompts: list[Prompt] = PROMPTS) -> list[list[str]]:
        return texts(engine.generate(prompts, 4, Sampling(max_new_tokens=16, seed=seed)))

    first = sample(7)
    assert sample(7) == first
    assert sample(8) != first and sample(None) != first and sample(None) != sample(None)
    # Prompts that are alike do not get completions that are alike, nor do samples of one.
    same = sample(7, [PROMPTS[0]] * 4)
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
    assert texts(groups) != texts(engine.generate(PROMPTS, 4, sampling)), "whose streams are others"
    assert texts(groups)[0] == texts(engine.generate(PROMPTS, 4, sampling))[0], "but for the first"
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for one in group:
            assert set(one.weight_versions) == {3} == {sampler.weight_version}
            assert_sampled_from(actor, prompt, one, 1.0)


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
        assert_sampled_from(actor, prompt, one, 1.0)


def test_a_schema_is_followed_and_part_of_the_log_probability(engine: Engine, actor: Actor) -> None:
    sampling = Sampling(max_new_tokens=16, seed=3, json_schema='{"enum": [12, 345]}')
    samples = asyncio.run(engine.sample(PROMPTS[0].token_ids, sampling, num_samples=32))
    assert {one.text for one in samples} == {"12", "345"}
    whole = {text: sum(next(one.logprobs for one in samples if one.text == text)) for text in ("12", "345")}
    assert sum(map(math.exp, whole.values())) == pytest.approx(1.0, abs=1e-3)
    with pytest.raises(RequestRefusedError):
        asyncio.run(engine.sample(PROMPTS[0].token_ids, Sampling(json_schema='{"type": "nothing"}')))
    assert engine.generate(PROMPTS[:1], 1, GREEDY)


def test_greedy_completions_are_the_actors(engine: Engine, actor: Actor) -> None:
    for prompt, (completion,) in zip(PROMPTS, engine.generate(PROMPTS, 1, GREEDY), strict=True):
        assert completion.token_ids.tolist() == actor.greedy(prompt, 12)
        assert all(logprob <= 0 for logprob in completion.logprobs)


def test_engine_samples_from_new_weights_after_update(engine: Engine, actor: Actor) -> None:
    prompts = [*PROMPTS, LONG_PROMPT]
    before = engine.generate(prompts, 1, GREEDY)
    for version in (1, 2, 3):
        actor.perturb(version)
        send(engine, actor, version)
        assert engine.weight_version == version
        after = engine.generate(prompts, 1, GREEDY)
        for prompt, (completion,) in zip(prompts, after, strict=True):
            assert completion.token_ids.tolist() == actor.greedy(prompt, 12)
            assert completion.weight_versions.tolist() == [version] * len(completion.token_ids)
        for prompt, (completion,) in zip(prompts, engine.generate(prompts, 1, Sampling()), strict=True):
            assert_sampled_from(actor, prompt, completion, 1.0)
        assert texts(after) != texts(before)
        before = after


def test_keys_and_values_of_old_weights_are_forgotten(engine: Engine, actor: Actor) -> None:
    """Also if other weights come under the same version, as those of another trainer may."""
    sampling = Sampling(max_new_tokens=4)
    ((before,),) = engine.generate([LONG_PROMPT], 1, sampling)
    actor.perturb(1)
    send(engine, actor, 0)
    ((after,),) = engine.generate([LONG_PROMPT], 1, sampling)
    assert_sampled_from(actor, LONG_PROMPT, after, 1.0)
    assert abs(before.logprobs - actor.logprobs(LONG_PROMPT, before, 1.0).numpy()).max() > 0.01


def test_an_update_waits_for_no_request(engine: Engine, actor: Actor) -> None:
    assert engine.process is not None
    actor.perturb(1)
    with stopped(find_core(engine.process.pid)):  # or all tokens might be there before the update comes
        unfinished = engine.submit("generate", PROMPTS[0].token_ids, {"n": 8, "max_tokens": 240, "ignore_eos": True})
        update = threading.Thread(target=send, args=(engine, actor, 1))
        update.start()
        time.sleep(0.3)
    update.join()
    assert {len(sample["weight_versions"]) for sample in unfinished.result(60)} == {240}
    assert {sample["weight_versions"][-1] for sample in unfinished.result(60)} == {1}
    assert engine.generate(PROMPTS, 1, GREEDY)


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
        engine.generate([make_prompt("1" * 300)], 1, GREEDY)
    assert engine.generate(PROMPTS, 1, GREEDY)  # and it goes on


def test_on_the_cpu_it_never_sleeps(engine: Engine, actor: Actor) -> None:
    engine.sleep()
    assert engine.weight_version == 0
    assert engine.generate(PROMPTS[:1], 1, GREEDY)


def test_a_full_device_is_told_with_the_ways_out() -> None:
    """As vLLM 0.24 reports it; on a CPU nothing sleeps."""

    class FullDevice:
        vllm_config = SimpleNamespace(lora_config=None)

        async def sleep(self, level: int) -> None:
            assert level == 2

        async def wake_up(self, tags: list[str]) -> None:
            raise RuntimeError("CUDA Error: out of memory at /workspace/cumem_allocator.cpp")

    async def wake() -> None:
        server = VLLMServer(FullDevice())  # type: ignore[arg-type]
        await server.sleep()
        for _ in range(2):  # what is held for an update is released again
            with pytest.raises(MemoryError, match=r"no room for its weights when .* Lower rollout\.gpu_memory_"):
                await server.receive_weights(0)

    asyncio.run(asyncio.wait_for(wake(), 60))


@pytest.mark.processes
def test_tied_weights_travel_once(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", tie_word_embeddings=True)
    actor = Actor(folder)
    names = [name for name, _ in actor.named_weights()]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    with running_engine(folder, tmp_path / "engine.log") as engine:
        for version in (0, 1):
            send(engine, actor, version)
            for prompt, group in zip(PROMPTS, engine.generate(PROMPTS, 2, Sampling()), strict=True):
                for completion in group:
                    assert_sampled_from(actor, prompt, completion, 1.0)
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


def test_what_is_compiled_outlives_the_engines_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    config = EngineConfig(engine_args={}, device=torch.device("cpu"), dtype=torch.float32, log_file=tmp_path / "log")
    first, second = (engine_environment(config, str(tmp_path / name)) for name in ("first", "second"))
    folders = {name for name in first if first[name] != second[name]}
    assert folders == {"TMPDIR", "VLLM_RPC_BASE_PATH"}  # of sockets; neither is part of a cache's key
    assert not first["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path / "first"))


def test_a_launchers_variables_stay_with_the_trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RANKING", "stays")
    config = EngineConfig(engine_args={}, device=torch.device("cpu"), dtype=torch.float32, log_file=tmp_path / "log")
    environment = engine_environment(config, str(tmp_path))
    assert not any(name.startswith(("TORCHELASTIC", "MASTER", "ROLE", "GROUP")) for name in environment)
    assert "RANK" not in environment and environment["RANKING"] == "stays"


@pytest.mark.parametrize(
    ("device", "asked", "threads"), [("cuda", None, "1"), ("cuda", "3", "3"), ("cpu", None, "own")]
)
def test_engine_threads_are_limited_unless_user_sets_them(
    device: str, asked: str | None, threads: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    config = EngineConfig(engine_args={}, device=torch.device(device), dtype=torch.float32, log_file=tmp_path / "log")
    expected = str(torch.get_num_threads()) if threads == "own" else threads
    assert engine_environment(config, str(tmp_path))["OMP_NUM_THREADS"] == expected


def test_engine_process_holds_weights_once_without_trainer_state(engine: Engine, actor: Actor, census: Path) -> None:
    """Also after weights have come and been used. vLLM pads the vocabulary of both embeddings to 64 rows."""
    engine.generate(PROMPTS, 1, GREEDY)
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
