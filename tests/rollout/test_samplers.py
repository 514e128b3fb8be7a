"""What every sampler does, vLLM's engine, another rank's and the one in this process: it samples from the actor."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import (
    CHARACTERS,
    PROMPTS,
    Actor,
    assert_sampled_from,
    make_prompt,
    relayed,
    running_engine,
    sample_all,
    save_model,
    send,
)

import rlightning.rollout.sampler
from rlightning.errors import EngineError
from rlightning.models import load_config
from rlightning.rollout import Sampling, TokenSampler
from rlightning.rollout.engine import Engine
from rlightning.rollout.model_files import ModelFiles
from rlightning.rollout.transformers_sampler import TransformersSampler
from rlightning.types import Prompt, Sample
from rlightning.types.supports import Supports

SAMPLING = Sampling(max_new_tokens=24, temperature=0.8, seed=1)
VERSION = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its embeddings are its head too: a sampler that keeps the head of the weights before is found by all tests."""
    return save_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def actor(folder: str) -> Actor:
    """The actor whose weights are the second that samplers are sent."""
    actor = Actor(folder)
    actor.perturb(1)
    names = [name for name, _ in actor.named_weights()]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    return actor


@pytest.fixture(scope="module")
def engine(folder: str, actor: Actor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running_engine(folder, tmp_path_factory.mktemp("log") / "engine.log") as engine:
        send(engine, Actor(folder), 1)
        send(engine, actor, VERSION)
        yield engine


KINDS = [
    pytest.param("vllm", marks=pytest.mark.processes),
    pytest.param("relayed", marks=[pytest.mark.processes, pytest.mark.slow]),
    "transformers",
]


@pytest.fixture(scope="module", params=KINDS)
def sampler(request: pytest.FixtureRequest, folder: str, actor: Actor) -> Iterator[TokenSampler]:
    if request.param == "vllm":
        yield request.getfixturevalue("engine")
    elif request.param == "relayed":
        with relayed(request.getfixturevalue("engine")) as remote:
            yield remote
    else:
        usual: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "max_length": 256}
        sampler = TransformersSampler(load_config(folder), ModelFiles.read(folder), **usual)
        sampler.update_weights(Actor(folder).named_weights(), 1)
        sampler.update_weights(actor.named_weights(), VERSION)
        yield sampler
        sampler.close()


def sample(
    sampler: TokenSampler, sampling: Sampling = SAMPLING, num_samples: int = 16, prompts: Sequence[Prompt] = PROMPTS
) -> list[list[Sample]]:
    return sample_all(sampler, prompts, sampling, num_samples)


def tolerance(sampler: TokenSampler) -> float:
    """Of log-probabilities: vLLM computes by other kernels than the actor."""
    return 1e-5 if isinstance(sampler, TransformersSampler) else 1e-4


def tokens(groups: list[list[Sample]]) -> list[list[list[int]]]:
    return [[one.token_ids.tolist() for one in group] for group in groups]


def written(token_ids: Sequence[int]) -> str:
    return "".join(CHARACTERS[token - 1] for token in token_ids if token)


def test_samples_have_the_actors_logprobs(sampler: TokenSampler, actor: Actor) -> None:
    groups = sample(sampler)
    assert [len(group) for group in groups] == [16] * len(PROMPTS)  # so many are not alike by chance
    for prompt, group in zip(PROMPTS, groups, strict=True):
        assert len({one.token_ids.tobytes() for one in group}) > 1
        for one in group:
            assert_sampled_from(actor, prompt, one, 0.8, atol=tolerance(sampler))
    samples = [one for group in groups for one in group]
    for one in samples:
        token_ids, is_ended = one.token_ids.tolist(), one.finish_reason == "stop"
        assert one.weight_versions.tolist() == [VERSION] * len(token_ids)
        assert is_ended == (token_ids[-1] == 0) and 0 not in token_ids[:-1]
        assert is_ended or (len(token_ids) == 24 and one.is_truncated)
        assert one.text == written(token_ids)
    assert {one.finish_reason for one in samples} == {"stop", "length"}


TRUNCATIONS: list[dict[str, Any]] = [
    {"top_p": 0.8},
    {"top_k": 3},
    {"min_p": 0.1},
    {"top_p": 0.9, "top_k": 5, "min_p": 0.02},
]


@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_truncated_logprobs_are_the_actors(sampler: TokenSampler, actor: Actor, truncation: dict[str, Any]) -> None:
    """As closely as plain ones; without the supports they are further apart than that by orders of magnitude."""
    groups = sample(sampler, replace(SAMPLING, **truncation), 8)
    gaps = []
    for prompt, one in ((prompt, one) for prompt, group in zip(PROMPTS, groups, strict=True) for one in group):
        assert_sampled_from(actor, prompt, one, 0.8, atol=tolerance(sampler))
        supports = one.supports
        assert supports is not None and len(supports.sizes) == len(one.token_ids) and min(supports.sizes) >= 1
        assert max(supports.sizes) <= truncation.get("top_k", len(CHARACTERS) + 1)
        one.supports = None
        gaps.append(np.abs(one.logprobs - actor.logprobs(prompt, one, 0.8).numpy()).max())
    assert max(gaps) > 1e-2


def test_supports_above_the_limit_are_left_out(
    sampler: TokenSampler, actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``top_k`` is above it, and what is left decides: one token each in the first samples, and 8 in the others."""
    monkeypatch.setattr(rlightning.rollout.sampler, "MAX_SUPPORT", 5)
    few, many = (sample(sampler, replace(SAMPLING, top_k=8, min_p=share), 4) for share in (1.0, 0.0))
    for prompt, group in zip(PROMPTS, few, strict=True):
        for one in group:
            assert one.supports == Supports(one.token_ids, [1] * len(one.token_ids))
            assert_sampled_from(actor, prompt, one, 0.8, atol=tolerance(sampler))
    for prompt, group in zip(PROMPTS, many, strict=True):
        for one in group:
            assert one.supports == Supports([], [0] * len(one.token_ids))
            one.supports = actor.likeliest(prompt, one, 8)
            assert_sampled_from(actor, prompt, one, 0.8, atol=tolerance(sampler))


def test_plain_requests_beside_truncated_ones_have_no_supports(sampler: TokenSampler, actor: Actor) -> None:
    async def sample_all_kinds() -> list[list[Sample]]:
        kinds = SAMPLING, replace(SAMPLING, top_k=2), replace(SAMPLING, temperature=0)
        return await asyncio.gather(*(sampler.sample(PROMPTS[0].token_ids, one) for one in kinds))

    (plain,), (cut,), (greedy,) = asyncio.run(sample_all_kinds())
    assert plain.supports is None and greedy.supports is None
    assert cut.supports is not None and set(cut.supports.sizes) <= {1, 2}
    for one in (plain, cut):
        assert_sampled_from(actor, PROMPTS[0], one, 0.8, atol=tolerance(sampler))


def test_prompts_own_temperature_and_limit_hold(sampler: TokenSampler, actor: Actor) -> None:
    own = [PROMPTS[0]._replace(temperature=2.0, max_new_tokens=3), PROMPTS[1]._replace(temperature=0.5)]
    groups = sample(sampler, prompts=own)
    for prompt, group, longest in zip(own, groups, (3, 24), strict=True):
        assert all(len(one.token_ids) <= longest for one in group)
        for one in group:
            assert_sampled_from(actor, prompt, one, prompt.temperature or 1.0, atol=tolerance(sampler))
    assert max(len(one.token_ids) for one in groups[1]) > 3


def test_score_is_the_actors(sampler: TokenSampler, actor: Actor) -> None:
    prompt, completion = make_prompt("1"), "2+34=46"
    token_ids = make_prompt("1" + completion).token_ids
    scored = asyncio.run(sampler.score(token_ids))
    assert scored.shape == (8,) and scored[0] == 0
    given = Sample(token_ids[1:], [0.0] * 7, [0] * 7, completion, "stop")
    np.testing.assert_allclose(scored[1:], actor.logprobs(prompt, given, 1.0).numpy(), atol=tolerance(sampler))


def test_greedy_takes_the_actors_likeliest_token(sampler: TokenSampler, actor: Actor) -> None:
    greedy = Sampling(temperature=0.0, max_new_tokens=12)
    for prompt, (one,) in zip(PROMPTS, sample(sampler, greedy, 1), strict=True):
        assert one.token_ids.tolist() == actor.greedy(prompt, 12)
        assert_sampled_from(actor, prompt, one, atol=tolerance(sampler))


def test_streams_do_not_depend_on_the_batch(sampler: TokenSampler) -> None:
    """A seeded request gives the same tokens after a restart, and whatever else is in the batch."""
    together = sample(sampler, num_samples=4)
    alone = [group for prompt in PROMPTS for group in sample(sampler, num_samples=4, prompts=[prompt])]
    assert tokens(together) == tokens(alone)
    for one, other in zip(chain(*together), chain(*alone), strict=True):
        # Products of other shapes add in other orders: a few units in the last place of float32, by the CPU's kernels.
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_samples_draw_from_neighbouring_seeds(sampler: TokenSampler) -> None:
    def draw(seed: int | None, num_samples: int) -> list[list[int]]:
        drawn = sampler.sample(PROMPTS[0].token_ids, replace(SAMPLING, seed=seed), num_samples=num_samples)
        return [one.token_ids.tolist() for one in asyncio.run(drawn)]

    assert draw(5, 3) == [*draw(5, 1), *draw(6, 1), *draw(7, 1)]
    assert draw(5, 8) != draw(13, 8)
    assert draw(None, 8) != draw(None, 8)


def test_stop_strings_and_ids_end_a_completion(sampler: TokenSampler) -> None:
    free = [one for group in sample(sampler) for one in group]
    pair = next(one.text[3:5] for one in free if len(one.text) > 8)
    stop_id = next(int(one.token_ids[2]) for one in free if len(one.token_ids) > 8)
    ended = sample(sampler, replace(SAMPLING, stop=(pair, "no such text"), stop_token_ids=(stop_id,)))
    num_stopped = 0
    for one, whole in zip((one for group in ended for one in group), free, strict=True):
        places = [whole.text.find(pair) + 2] if pair in whole.text else []
        places += [place + 1 for place, token in enumerate(whole.token_ids.tolist()) if token == stop_id]
        # It was sampled and is trained, so it is in the tokens and in the text, and no more after it.
        length = min([*places, len(whole.token_ids)])
        assert one.token_ids.tolist() == whole.token_ids[:length].tolist()
        assert one.text == whole.text[:length]
        assert one.finish_reason == ("stop" if places else whole.finish_reason)
        num_stopped += bool(places)
    assert num_stopped > 4


def test_too_long_request_is_refused(sampler: TokenSampler) -> None:
    with pytest.raises(EngineError, match=r"(?s)\b256\b"):
        asyncio.run(sampler.sample([1] * 257, SAMPLING))
    assert sample(sampler, num_samples=1)  # and it goes on
