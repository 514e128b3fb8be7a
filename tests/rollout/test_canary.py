"""Telling an engine that rounds otherwise from one with other weights; the engine is vLLM, in both precisions."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from engine_models import Weights as Source
from engine_models import engine_config, send, started
from tiny import save_byte_model
from tiny_models import tiny_config
from torch import Tensor, nn

from rlightning.errors import EngineError
from rlightning.models import load_policy, load_tokenizer, packed_logprobs
from rlightning.parallel.sharding import named_weights
from rlightning.rollout.canary import (
    MAX_DISTANCE,
    MAX_ERRORS,
    Canary,
    canary_tokens,
    evaluate,
    perturbed_embeddings,
)
from rlightning.rollout.comparison import LEAST_NOISE, compare, estimate_missing_update, root_mean_square
from rlightning.rollout.engine import Engine
from rlightning.types import RolloutBatch

Weights = dict[str, Tensor]


def make_canary(tokenizer: Any, engine: Engine) -> Canary:
    config = engine.config
    return Canary(tokenizer, config.engine_args["max_model_len"], config.dtype, config.device)


class Policy:
    """An actor, and the engine that its weights are sent to."""

    def __init__(self, folder: str, engine: Engine) -> None:
        self.engine = engine
        self.model = load_policy(folder, torch.float32)
        self.tokenizer = load_tokenizer(folder)
        self.canary = make_canary(self.tokenizer, engine)
        self.version = 0
        self.start = {name: weight.detach().clone() for name, weight in named_weights(self.model)}
        self.weights: Weights = {}

    def score(self, batch: RolloutBatch, dtype: torch.dtype) -> Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            return packed_logprobs(self.model, batch)[0]

    @torch.no_grad()
    def take(self, weights: Weights) -> None:
        """Go on with these, and have them evaluated."""
        self.weights, self.version = weights, self.version + 1
        for name, weight in named_weights(self.model):
            weight.copy_(weights[name])
        self.canary.evaluate(self.score, self.version)

    def verify(self, sent: Weights) -> None:
        """Send the engine weights, and check them against the actor's."""
        send(self.engine, Source(sent), self.version)
        self.canary.check(self.engine.score_all(self.canary.token_ids), self.model.config)

    def rejects(self, sent: Weights) -> bool:
        """Whether that fails."""
        try:
            self.verify(sent)
        except EngineError as error:
            return "the engine holds other weights, or computes otherwise than the actor" in str(error)
        return False


SLOW_BFLOAT16 = pytest.param(torch.bfloat16, marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[torch.float32, SLOW_BFLOAT16], ids=["float32", "bfloat16"])
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, starts_processes: None
) -> Iterator[Policy]:
    """Four layers whose queries are as wide as the model: a square matrix."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "max_position_embeddings": 256}
    save_byte_model(folder, **sizes)
    config = engine_config(str(folder), folder / "engine.log")
    config.engine_args["dtype"] = str(request.param).removeprefix("torch.")
    with started(replace(config, dtype=request.param)) as engine:
        yield Policy(str(folder), engine)


@pytest.fixture
def policy(loaded: Policy) -> Policy:
    """With masters between bfloat16's numbers, as they are once some updates are done, evaluated twice."""
    generator = torch.Generator().manual_seed(1)
    masters = {
        name: weight * (1 + 2**-8 * (torch.rand(weight.shape, generator=generator) - 0.5))
        for name, weight in loaded.start.items()
    }
    loaded.canary = make_canary(loaded.tokenizer, loaded.engine)  # that has seen nothing of the test before
    loaded.take(masters)
    loaded.take(update(masters, 1e-5))
    return loaded


def update(weights: Weights, lr: float, seed: int = 2) -> Weights:
    """One of AdamW's first: each weight goes up or down by the learning rate."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: weight + lr * (2 * torch.randint(0, 2, weight.shape, generator=generator) - 1)
        for name, weight in weights.items()
    }


def test_right_weights_pass_after_each_of_many_updates(policy: Policy) -> None:
    for step in range(8):
        policy.take(update(policy.weights, 1e-5, seed=100 + step))
        policy.verify(policy.weights)


@pytest.mark.parametrize("scale", [8.0, 0.125], ids=["sharp", "flat"])
def test_scale_of_logits_changes_nothing(policy: Policy, scale: float) -> None:
    sharpened = policy.weights | {"model.norm.weight": policy.weights["model.norm.weight"] * scale}
    policy.take(sharpened)
    policy.verify(sharpened)
    # Large enough for the share to be told well beside what bfloat16 on a CPU without AVX-512 rounds.
    policy.take(update(sharpened, 1e-5 if policy.engine.config.dtype == torch.float32 else 4e-5))
    policy.verify(policy.weights)
    name = "model.layers.2.self_attn.k_proj.weight"
    with pytest.raises(EngineError, match=r"they differ by .* nats, .* where rollout\.verify_tolerance allows"):
        policy.verify(policy.weights | {name: policy.weights[name].flip(0)})
    with pytest.raises(EngineError, match=r"is ([89]\d|1[0-2]\d)% of the way back to the weights of version \d+, by"):
        policy.verify(sharpened)


def test_lasting_deviation_in_an_updates_direction_passes(policy: Policy) -> None:
    """As other kernels than the actor's may have; old weights are told beside it."""
    if policy.engine.config.dtype != torch.float32:
        pytest.skip("beside bfloat16's rounding neither shows in a model of this size")
    versions = [policy.weights]
    for seed in (2, 3):
        versions.append(update(versions[-1], 2e-6, seed))
    answers: list[np.ndarray] = []
    for weights in versions:
        send(policy.engine, Source(weights), len(answers))
        answers.append(policy.engine.score_all(policy.canary.token_ids))
    deviation = 0.3 * (answers[0] - answers[1])

    policy.canary = make_canary(policy.tokenizer, policy.engine)
    policy.take(versions[0])
    deviations = policy.canary.check(answers[0] + deviation)
    policy.take(versions[1])
    with pytest.raises(EngineError, match=r"of the way back to the weights of version \d+, by"):
        policy.canary.check(answers[1] + deviation)  # of an engine of which nothing is known
    with pytest.raises(EngineError, match=r"of the way back to the weights of version \d+, by"):
        policy.canary.check(answers[0] + deviation, deviations=deviations)  # which has kept its weights
    deviations = policy.canary.check(answers[1] + deviation, deviations=deviations)
    policy.take(versions[2])
    with pytest.raises(EngineError, match=r"of the way back to the weights of version \d+, by"):
        policy.canary.check(answers[1] + deviation, deviations=deviations)
    policy.canary.check(answers[2] + deviation, deviations=deviations)


def in_layer(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Weights], Weights]:
    name = f"model.layers.2.{name}.weight"
    return lambda weights: {name: change(weights[name])}


def exchange_layers(weights: Weights) -> Weights:
    one, other = "model.layers.1.", "model.layers.2."
    first = {name: weights[name.replace(one, other)] for name in weights if name.startswith(one)}
    return first | {name: weights[name.replace(other, one)] for name in weights if name.startswith(other)}


def other_values(weight: Tensor) -> Tensor:
    return 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))


def old_shard(weights: Weights, former: Weights) -> Weights:
    """One of two ranks has given its shards of the former weights."""
    return {name: torch.cat([former[name][: len(w) // 2], w[len(w) // 2 :]]) for name, w in weights.items()}


def other_shard(weight: Tensor) -> Tensor:
    """The second of four ranks has not got it."""
    rows = len(weight) // 4
    return torch.cat([weight[:rows], other_values(weight[rows : 2 * rows]), weight[2 * rows :]])


FAULTS: dict[str, Callable[[Weights], Weights]] = {
    "another q_proj": in_layer("self_attn.q_proj", other_values),
    "another k_proj": in_layer("self_attn.k_proj", other_values),
    "another down_proj": in_layer("mlp.down_proj", other_values),
    "q_proj transposed": in_layer("self_attn.q_proj", lambda weight: weight.T),
    "gate_proj left out": in_layer("mlp.gate_proj", lambda weight: weight * 0.01),
    "a norm left out": in_layer("input_layernorm", lambda weight: weight * 0.01),
    "a shard of q_proj": in_layer("self_attn.q_proj", other_shard),
    "a shard of the embedding": lambda weights: {
        "model.embed_tokens.weight": other_shard(weights["model.embed_tokens.weight"])
    },
    "two layers exchanged": exchange_layers,
    "all norms off by 3%": lambda weights: {
        name: weight * (1 + 1.5 * other_values(weight)) for name, weight in weights.items() if weight.ndim == 1
    },
    "not a number": in_layer("self_attn.q_proj", lambda weight: weight * float("nan")),
}


def test_wrong_weights_are_caught(policy: Policy) -> None:
    missed = [name for name, fault in FAULTS.items() if not policy.rejects(policy.weights | fault(policy.weights))]
    assert missed == []
    policy.verify(policy.weights)


@pytest.mark.parametrize("updates", [1, 3])
def test_weights_stale_by_updates_are_caught(policy: Policy, updates: int) -> None:
    """Those of the sync before, or those that were verified before some syncs were lost."""
    former, version = policy.weights, policy.version
    policy.verify(former)
    for step in range(updates):
        policy.take(update(policy.weights, 1e-5, seed=10 + step))
    with pytest.raises(EngineError) as caught:
        policy.verify(former)
    assert str(caught.value).startswith(
        f"Actor and engine disagree after weights of version {policy.version} were sent:"
    )
    assert f"% of the way back to the weights of version {version}, by" in str(caught.value)
    assert "it holds former weights, all or some of them. Checked: every parameter" in str(caught.value)
    policy.verify(policy.weights)


def test_findings_of_passed_and_failed_checks_are_kept(policy: Policy) -> None:
    former, version = policy.weights, policy.version
    policy.verify(former)
    policy.take(update(former, 1e-5, seed=10))
    policy.verify(policy.weights)
    passed = policy.canary.findings
    assert passed is not None and list(passed.missing_updates) == [version]
    assert passed.comparison.distance < MAX_DISTANCE * passed.comparison.noise
    with pytest.raises(EngineError) as caught:
        policy.verify(former)
    failed = policy.canary.findings
    assert failed is not None and failed.missing_updates[version].errors > max(
        MAX_ERRORS, passed.missing_updates[version].errors
    )
    assert f"the engine is {failed.missing_updates[version].share:.0%} of the way back" in str(caught.value)


def test_shards_stale_by_one_update_are_caught(policy: Policy) -> None:
    former, dtype = policy.weights, policy.engine.config.dtype
    # Half a step of 1e-5 in random directions is too small beside bfloat16's rounding in a model of this size.
    policy.take(update(former, 1e-5 if dtype == torch.float32 else 4e-5, seed=10))
    with pytest.raises(
        EngineError, match=r"the engine is \d\d% of the way back .* it holds former weights, all or some of them"
    ):
        policy.verify(old_shard(policy.weights, former))


def test_disagreement_says_what_was_compared_and_traits(policy: Policy) -> None:
    config = tiny_config("glm4_moe", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    answers = policy.engine.score_all(policy.canary.token_ids) * 0 - 1
    with pytest.raises(
        EngineError, match=r"mean log-probability is -\d\.\d{4} under the actor and -1\.0000 under"
    ) as caught:
        policy.canary.check(answers, config)
    text = str(caught.value)
    assert "Checked: every parameter of the engine's model was loaded, and 8 sequences of 128 tokens" in text
    traits = (
        "glm4_moe",
        "rotary positions are scaled (linear)",
        "buffers are weights (e_score_correction_bias)",
        "its weights are stored under other names or in other shapes than they run in",
        "4 experts",
    )
    assert text.endswith(f"The architecture: {'; '.join(traits)}.")
    with pytest.raises(EngineError, match=r"The architecture: unknown\.$"):
        policy.canary.check(answers)


# The statistic by itself


def test_compare_means_distances_of_evaluations() -> None:
    actor = np.stack([np.full(32, -1.0), np.full(32, -3.0)])
    found = compare(actor, np.full(32, -2.0))  # 1 from either, which are 2 apart
    assert found == (1.0, 2.0 + LEAST_NOISE)
    assert compare(actor, np.full(32, 4.0)).distance == np.sqrt((25 + 49) / 2)  # 5 and 7
    assert np.isnan(compare(actor, np.full(32, np.nan)).distance)
    assert np.isnan(compare(actor, np.full(32, -np.inf)).distance)


def test_one_token_in_a_hundred_does_not_count() -> None:
    values = np.ones((1, 200))
    values[0, [17, 140]] = 1e6
    assert root_mean_square(values) == 1.0
    values[0, 3] = 14.0  # the third largest is the first that counts: 197 ones and 196
    assert root_mean_square(values) == np.sqrt((197 + 196) / 198)


def test_missing_update_has_share_and_standard_errors() -> None:
    # Three evaluations each, 1 apart, which is nothing beside a step of 10,000: in units of half of that a step is 2,
    # and a value is on side -1 with the current weights, and 1 with the former ones: a score of -2 or 2.
    spread = np.array([[-1.0], [0.0], [1.0]])
    actor, former = np.zeros(32) + spread, np.full(32, 1e4) + spread
    stale = estimate_missing_update(actor, former, np.full(32, 1e4))
    assert stale.length == 1e4
    # From -2 to 2 in each block alike, so that the deviation is the least one, of two blocks.
    assert stale.share == pytest.approx(1) and stale.errors == pytest.approx(4 / 0.01 * np.sqrt(2), rel=1e-4)
    current = estimate_missing_update(actor, former, np.zeros(32))
    assert abs(current.share) < 1e-4 and abs(current.errors) < 0.1
    half = estimate_missing_update(actor, former, np.repeat([0.0, 1e4], 16))
    # Blocks of 0 and 4: a mean of 2, a deviation of sqrt(8), whose standard error of two is 2.
    assert half.share == pytest.approx(0.5) and half.errors == pytest.approx(1, rel=1e-3)
    assert estimate_missing_update(actor, former, np.full(32, 2500.0)).share == pytest.approx(0.25)
    # Not back, but away: on side -3, which counts as -2, a score of -4.
    assert estimate_missing_update(actor, former, np.full(32, -1e4)).share == pytest.approx(-0.5)


class Noise(NamedTuple):
    """Rounding as models have it: of other sizes at other tokens, with heavy tails."""

    generator: np.random.Generator
    sizes: np.ndarray

    def draw(self, *shape: int) -> np.ndarray:
        return self.sizes * self.generator.standard_t(4, (*shape, len(self.sizes)))


@pytest.mark.long
def test_a_thousand_syncs_give_no_alarm() -> None:
    generator = np.random.default_rng(0)
    noise = Noise(generator, 0.02 * generator.lognormal(0, 1, 1016))
    ratios, errors = [], []
    for _ in range(1000):
        actor, engine, former = noise.draw(4), noise.draw(), noise.draw(4)  # of an update that changes nothing
        found = compare(actor, engine)
        ratios.append(found.distance / found.noise)
        errors.append(estimate_missing_update(actor, former, engine).errors)
    assert min(ratios) > 1 / MAX_DISTANCE and max(ratios) < MAX_DISTANCE
    assert np.mean(ratios) == pytest.approx(1, abs=0.01)
    assert max(errors) < 5 < MAX_ERRORS
    # Rounding has a variance of 2 sizes squared, and the step one of 4.
    step = 2 * noise.sizes * generator.standard_normal(1016)
    for share in (0.5, 1.0):
        back = [
            estimate_missing_update(noise.draw(4), noise.draw(4) + step, noise.draw() + share * step) for _ in range(20)
        ]
        assert min(one.errors for one in back) > 6
        assert np.mean([one.share for one in back]) == pytest.approx(share, abs=0.05)


# What the actor scores


def test_canary_is_sums_and_random_text_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_byte_model(tmp_path))
    tokenizer.add_tokens(["<image>"])
    token_ids = canary_tokens(tokenizer, 40)
    assert token_ids.shape == (25, 40)  # 1,024 tokens
    assert str(tokenizer.decode(token_ids[0])).startswith("What is ") and "?" in tokenizer.decode(token_ids[24])
    assert token_ids.min() > 0 and token_ids.max() == 256  # no end of sequence, no image
    assert (canary_tokens(tokenizer, 40) == token_ids).all()
    assert canary_tokens(tokenizer, 4096).shape == (8, 128)


def score_embeddings(embedding: nn.Embedding, dtype: torch.dtype) -> np.ndarray:
    batch = RolloutBatch.of_sequences([[0, 1, 2, 3]] * 2)
    return evaluate(lambda batch, _: embedding(batch.token_ids)[:, 0], batch, dtype, 2**-8)


def test_evaluations_differ_by_rounding_and_repeat() -> None:
    embedding = nn.Embedding(4, 1, _weight=torch.ones(4, 1))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    found = score_embeddings(embedding, torch.float32)
    assert found.shape == (4, 3) and len(np.unique(found)) == 12  # no two tokens alike
    assert 0 < abs(found - 1).max() <= 2**-8
    assert (score_embeddings(embedding, torch.float32) == found).all()
    assert torch.equal(torch.get_rng_state(), state)  # a run with verification samples what one without does
    assert torch.equal(embedding(torch.arange(4)), torch.ones(4, 1))  # nothing is left behind


def test_perturbation_is_no_finer_than_the_actors_dtype() -> None:
    wide = nn.Embedding(64, 64, _weight=torch.ones(64, 64, dtype=torch.bfloat16))
    with perturbed_embeddings(2**-18, 0):
        changed = wide(torch.arange(64)) != 1
    assert 0.1 < changed.float().mean() < 0.9  # 2^-18 would be lost in it


def test_a_score_without_embedding_is_refused() -> None:
    with (
        pytest.raises(EngineError, match=r"score\(\) calls no torch\.nn\.Embedding"),
        perturbed_embeddings(2**-8, 0),
    ):
        nn.Linear(2, 2)(torch.ones(1, 2))
