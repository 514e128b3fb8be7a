"""The sampler in this process: exact log-probabilities, streams that no batch changes, requests that come and go."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine_run
import pytest
import torch
from tiny_models import save_tiny
from torch import Tensor

from rlightning.errors import EngineError
from rlightning.models import load_config, load_policy, packed_logprobs
from rlightning.parallel.sharding import named_weights
from rlightning.rollout import Sampler, Sampling
from rlightning.rollout.model_files import ModelFiles
from rlightning.rollout.transformers_sampler import TransformersSampler
from rlightning.types import Prompt, RolloutBatch, Sample, single_turns

PROMPTS = [[1 + i % 10, 11, *range(1, 1 + i % 5), 12] for i in range(12)]
SAMPLING = Sampling(max_new_tokens=24, temperature=0.8)


class Source:
    """A policy's weights, but one."""

    def __init__(self, model: Any, without: str = "") -> None:
        self.model, self.without = model, without

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return (pair for pair in named_weights(self.model) if pair[0] != self.without)


def make_sampler(folder: str, files: ModelFiles, **options: Any) -> TransformersSampler:
    usual: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "max_length": 256}
    return TransformersSampler(load_config(folder), files, **usual | options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return engine_run.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def files(folder: str) -> ModelFiles:
    return ModelFiles.read(folder)


@pytest.fixture(scope="module")
def actor(folder: str) -> Any:
    return load_policy(folder)


@pytest.fixture(scope="module")
def loaded(folder: str, files: ModelFiles, actor: Any) -> Iterator[TransformersSampler]:
    sampler = make_sampler(folder, files)
    sampler.update_weights(Source(actor), 3)
    yield sampler
    sampler.close()


def sample(
    sampler: Sampler, prompts: Sequence[list[int]], sampling: Sampling = SAMPLING, num_samples: int = 4
) -> list[list[Sample]]:
    """All at once, each prompt with a seed of its own, by its tokens."""

    async def sample_all() -> list[list[Sample]]:
        seeded = [(prompt, replace(sampling, seed=1000 * PROMPTS.index(prompt))) for prompt in prompts]
        return await asyncio.gather(*(sampler.sample(*one, num_samples=num_samples) for one in seeded))

    return asyncio.run(sample_all())


def pack(prompts: Sequence[list[int]], groups: list[list[Sample]]) -> RolloutBatch:
    return RolloutBatch.pack(single_turns([Prompt(i, "", prompt, {}) for i, prompt in enumerate(prompts)], groups))


def tokens(groups: list[list[Sample]]) -> list[list[list[int]]]:
    return [[one.token_ids.tolist() for one in group] for group in groups]


def gap(actor: Any, batch: RolloutBatch, temperature: float) -> float:
    """The largest difference of a sampled token's log-probability from the trainer's."""
    with torch.no_grad():
        logprobs, _ = packed_logprobs(actor, batch, temperature=temperature)
    return float((logprobs - batch.rollout_logprobs)[batch.is_sampled].abs().max())


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
    kind: str, config: dict[str, Any], files: ModelFiles, tmp_path: Path
) -> None:
    folder = save_tiny(kind, tmp_path, **config)
    model = load_policy(folder)
    sampler = make_sampler(folder, files, max_length=64)
    sampler.update_weights(Source(model), 1)
    groups = sample(sampler, PROMPTS, replace(SAMPLING, max_new_tokens=16))
    sampler.close()
    assert gap(model, pack(PROMPTS, groups), 0.8) < 1e-5


@pytest.mark.long
def test_streams_do_not_depend_on_the_batch(
    loaded: TransformersSampler, folder: str, files: ModelFiles, actor: Any
) -> None:
    together = sample(loaded, PROMPTS)
    alone = [group for prompt in PROMPTS for group in sample(loaded, [prompt])]
    few = make_sampler(folder, files, max_sequences=3)  # the others wait
    few.update_weights(Source(actor), 3)
    waiting = sample(few, PROMPTS)
    few.close()
    assert tokens(together) == tokens(alone) == tokens(waiting)
    one, other, third = (pack(PROMPTS, groups).rollout_logprobs for groups in (together, alone, waiting))
    # Products of other shapes add in other orders: a few units in the last place of float32, by the CPU's kernels.
    torch.testing.assert_close(one, other, atol=5e-6, rtol=0.0)
    torch.testing.assert_close(one, third, atol=5e-6, rtol=0.0)
    again = pack(PROMPTS, sample(loaded, PROMPTS)).rollout_logprobs
    assert torch.equal(one, again)


@pytest.mark.long
def test_cancelled_request_leaves_others_and_the_loop_alone(folder: str, files: ModelFiles, actor: Any) -> None:
    sampler = make_sampler(folder, replace(files, end_token_ids=()))  # which go on to their limit
    sampler.update_weights(Source(actor), 3)
    sampling = Sampling(max_new_tokens=200, seed=4)

    async def run() -> tuple[list[Sample], int, bool]:
        kept = asyncio.ensure_future(sampler.sample(PROMPTS[0], sampling))
        dropped = asyncio.ensure_future(sampler.sample(PROMPTS[1], sampling, num_samples=8))
        turns = 0
        while not kept.done():
            await asyncio.sleep(0)
            turns += 1
            if turns == 20:
                dropped.cancel()
        await asyncio.wait([dropped])
        return await kept, turns, dropped.cancelled()

    (completion,), turns, is_cancelled = asyncio.run(run())
    assert is_cancelled and turns > 50  # the loop was free all the time
    assert len(completion.token_ids) == 200
    assert completion.token_ids.tolist() == asyncio.run(sampler.sample(PROMPTS[0], sampling))[0].token_ids.tolist()
    sampler.close()


def test_weights_that_come_meanwhile_sample_what_follows(folder: str, files: ModelFiles, actor: Any) -> None:
    sampler = make_sampler(folder, replace(files, end_token_ids=()))
    sampler.update_weights(Source(actor), 3)

    async def run() -> list[Sample]:
        first = asyncio.ensure_future(sampler.sample(PROMPTS[0], Sampling(max_new_tokens=1)))
        long = asyncio.ensure_future(sampler.sample(PROMPTS[0], Sampling(max_new_tokens=250), num_samples=2))
        await first  # so the other one has begun
        sampler.update_weights(Source(actor), 4)
        return await long

    for one in asyncio.run(run()):
        versions = one.weight_versions.tolist()
        assert versions == sorted(versions) and set(versions) == {3, 4}
    sampler.close()


def test_incomplete_weights_are_refused(folder: str, files: ModelFiles, actor: Any) -> None:
    sampler = make_sampler(folder, files)
    with pytest.raises(EngineError, match="has no weights"):
        asyncio.run(sampler.sample(PROMPTS[0], SAMPLING))
    with pytest.raises(EngineError, match=r"not those of the sampler's model: model\.norm\.weight\.$"):
        sampler.update_weights(Source(actor, without="model.norm.weight"), 1)
    assert sampler.weight_version is None
    sampler.update_weights(Source(actor), 1)
    assert len(asyncio.run(sampler.sample(PROMPTS[0], SAMPLING, num_samples=2))) == 2
    sampler.close()


def test_closed_sampler_fails_what_is_under_way(folder: str, files: ModelFiles, actor: Any) -> None:
    sampler = make_sampler(folder, replace(files, end_token_ids=()))
    sampler.update_weights(Source(actor), 1)

    async def run() -> None:
        first = asyncio.ensure_future(sampler.sample(PROMPTS[0], Sampling(max_new_tokens=1)))
        under_way = asyncio.ensure_future(sampler.sample(PROMPTS[1], Sampling(max_new_tokens=250)))
        await first
        await asyncio.get_running_loop().run_in_executor(None, sampler.close)
        with pytest.raises(EngineError, match="has been closed"):
            await under_way

    asyncio.run(run())
    sampler.close()
