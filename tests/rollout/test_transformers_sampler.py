"""The sampler in this process: exact log-probabilities, streams that no batch changes, requests that come and go."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import engine_run
import numpy as np
import pytest
import torch
from engine_models import Actor, assert_sampled_from, sample_all
from tiny_models import save_tiny
from waiting import PATIENCE_SECONDS

from rlightning.errors import EngineError
from rlightning.models import load_config
from rlightning.rollout import Sampling
from rlightning.rollout.model_files import ModelFiles
from rlightning.rollout.transformers_sampler import TransformersSampler
from rlightning.rollout.weights import WeightSource
from rlightning.types import Prompt, Sample

PROMPTS = [Prompt(i, "", [1 + i % 10, 11, *range(1, 1 + i % 5), 12], {}) for i in range(12)]
FIRST, SECOND = PROMPTS[0].token_ids, PROMPTS[1].token_ids
SAMPLING = Sampling(max_new_tokens=24, temperature=0.8, seed=1)
Make = Callable[..., TransformersSampler]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return engine_run.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def actor(folder: str) -> Actor:
    return Actor(folder)


@pytest.fixture
def make(folder: str) -> Iterator[Make]:
    """Samplers, closed at the end; of a source they have the weights as version 3, and endless ones stop at limits."""
    with ExitStack() as stack:

        def make(
            source: WeightSource | None = None, model: str = "", *, is_endless: bool = False, **options: Any
        ) -> TransformersSampler:
            files = ModelFiles.read(folder)
            files = replace(files, end_token_ids=()) if is_endless else files
            usual: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "max_length": 256}
            sampler = TransformersSampler(load_config(model or folder), files, **usual | options)
            stack.callback(sampler.close)
            if source is not None:
                sampler.update_weights(source.named_weights(), 3)
            return sampler

        yield make


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("mistral", {"sliding_window": 4}),
        (
            "gemma2",
            {"sliding_window": 4, "head_dim": 8, "final_logit_softcapping": 2.0, "attn_logit_softcapping": None},
        ),
        ("qwen3_moe", {}),
        ("gpt_neox", {}),
    ],
)
def test_architectures_decode_as_the_trainer_computes(
    kind: str, config: dict[str, Any], make: Make, tmp_path: Path
) -> None:
    actor = Actor(model := save_tiny(kind, tmp_path, **config))
    groups = sample_all(make(actor, model, max_length=64), PROMPTS, replace(SAMPLING, max_new_tokens=16))
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for one in group:
            assert_sampled_from(actor, prompt, one, 0.8, atol=1e-5)


@pytest.mark.long
def test_streams_do_not_depend_on_the_batch(make: Make, actor: Actor) -> None:
    sampler = make(actor)
    together = sample_all(sampler, PROMPTS, SAMPLING)
    alone = [group for prompt in PROMPTS for group in sample_all(sampler, [prompt], SAMPLING)]
    waiting = sample_all(make(actor, max_sequences=3), PROMPTS, SAMPLING)
    again = sample_all(sampler, PROMPTS, SAMPLING)
    for whole, one, late, same in zip(chain(*together), chain(*alone), chain(*waiting), chain(*again), strict=True):
        assert whole.token_ids == one.token_ids == late.token_ids
        # Products of other shapes add in other orders: a few units in the last place of float32, by the CPU's kernels.
        np.testing.assert_allclose([one.logprobs, late.logprobs], [whole.logprobs] * 2, atol=5e-6, rtol=0.0)
        assert same.logprobs == whole.logprobs


@pytest.mark.long
def test_cancelled_request_leaves_others_and_the_loop_alone(make: Make, actor: Actor) -> None:
    sampler = make(actor, is_endless=True)
    pause, sampling = Pause(sampler), Sampling(max_new_tokens=200, seed=4)

    async def run() -> tuple[list[Sample], bool]:
        kept = asyncio.ensure_future(sampler.sample(FIRST, sampling))
        dropped = asyncio.ensure_future(sampler.sample(SECOND, sampling, num_samples=8))
        await pause.begin()  # amid a step of the sampler's thread, during which the loop is free
        dropped.cancel()
        await asyncio.wait([dropped])
        assert not kept.done()
        pause.end()
        return await kept, dropped.cancelled()

    (completion,), is_cancelled = asyncio.run(run())
    assert is_cancelled
    assert len(completion.token_ids) == 200
    assert completion.token_ids.tolist() == asyncio.run(sampler.sample(FIRST, sampling))[0].token_ids.tolist()


class Pause:
    """Holds a sampler's thread before its third step."""

    def __init__(self, sampler: TransformersSampler) -> None:
        self._numbers, self._step = itertools.count(1), sampler._step
        self._has_begun, self._is_over = threading.Event(), threading.Event()
        sampler._step = self.step  # type: ignore[method-assign]

    def step(self) -> None:
        if next(self._numbers) == 3:
            self._has_begun.set()
            assert self._is_over.wait(PATIENCE_SECONDS)
        self._step()

    async def begin(self) -> None:
        """Return when it has begun."""
        assert await asyncio.to_thread(self._has_begun.wait, PATIENCE_SECONDS)

    def end(self) -> None:
        self._is_over.set()


def test_weights_that_come_meanwhile_sample_what_follows(make: Make, actor: Actor) -> None:
    sampler = make(actor, is_endless=True)
    pause = Pause(sampler)

    async def run() -> list[Sample]:
        long = asyncio.ensure_future(sampler.sample(FIRST, Sampling(max_new_tokens=8), num_samples=2))
        await pause.begin()
        sampler.update_weights(actor.named_weights(), 4)
        pause.end()
        return await long

    for one in asyncio.run(run()):
        versions = one.weight_versions.tolist()
        assert versions == [3] * 2 + [4] * 6


def test_incomplete_weights_are_refused(make: Make, actor: Actor) -> None:
    sampler = make()
    with pytest.raises(EngineError, match="has no weights"):
        asyncio.run(sampler.sample(FIRST, SAMPLING))
    with pytest.raises(EngineError, match=r"not those of the sampler's model: model\.norm\.weight\.$"):
        sampler.update_weights((pair for pair in actor.named_weights() if pair[0] != "model.norm.weight"), 1)
    assert sampler.weight_version is None
    sampler.update_weights(actor.named_weights(), 1)
    assert len(asyncio.run(sampler.sample(FIRST, SAMPLING, num_samples=2))) == 2


def test_closed_sampler_fails_what_is_under_way(make: Make, actor: Actor) -> None:
    sampler = make(actor, is_endless=True)
    pause = Pause(sampler)

    async def run() -> None:
        under_way = asyncio.ensure_future(sampler.sample(SECOND, Sampling(max_new_tokens=8)))
        await pause.begin()
        closing = asyncio.create_task(asyncio.to_thread(sampler.close))
        with pytest.raises(EngineError, match="has been closed"):
            await under_way
        pause.end()
        await closing

    asyncio.run(run())
    sampler.close()
