"""An engine that does not apply the adapter as the actor does, told from rounding; actor and engine are synthetic."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from tiny import save_byte_model
from torch import Tensor, nn

from rlightning.errors import EngineError
from rlightning.models import load_tokenizer
from rlightning.rollout.canary import ROUNDING, Canary, perturbed_embeddings
from rlightning.types import RolloutBatch

NUM_LAYERS = 4
ROUNDED = ROUNDING[torch.bfloat16]
NOISE = 4 * ROUNDED / 3**0.5
"""The standard deviation of the noise of :class:`AdaptedActor`, in nats: its errors are uniform up to 4 roundings."""


class AdaptedActor:
    """Log-probabilities of -4, with bfloat16's rounding errors, to which an adapter's layers add random amounts.

    Args:
        effect: root mean square of the sum that the layers add to a log-probability, as a multiple of ``NOISE``.
    """

    def __init__(self, effect: float, num_tokens: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.embedding = nn.Embedding(300, 1, _weight=torch.full((300, 1), -4.0))
        self.effects = torch.randn(NUM_LAYERS, num_tokens, generator=generator) * effect * NOISE / NUM_LAYERS**0.5
        self.scales = torch.ones(NUM_LAYERS, 1)

    @contextmanager
    def scaled(self, scales: float | list[float]) -> Iterator[None]:
        """Multiply what each layer adds."""
        before, self.scales = self.scales, torch.tensor(scales).expand(NUM_LAYERS)[:, None]
        yield
        self.scales = before

    @torch.no_grad()
    def score(self, batch: RolloutBatch, dtype: torch.dtype) -> Tensor:
        values: Tensor = self.embedding(batch.token_ids)[:, 0]
        added: Tensor = (self.scales * self.effects).sum(0)
        return values + added.repeat(len(values) // len(added))

    def answers(self, canary: Canary, seed: int) -> Any:
        """What an engine answers that computes as this actor does now, with rounding errors of its own."""
        with perturbed_embeddings(ROUNDED, seed):
            scored = self.score(RolloutBatch.of_sequences(canary.token_ids.tolist()), torch.bfloat16)
        return scored.view(canary.token_ids.shape).numpy()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(save_byte_model(tmp_path_factory.mktemp("model")))


def make_canary(tokenizer: Any, effect: float) -> tuple[AdaptedActor, Canary]:
    """An actor, and a canary that has not evaluated it yet."""
    canary = Canary(tokenizer, 129, torch.bfloat16, torch.device("cuda"))  # on a CPU more rounding is allowed
    return AdaptedActor(effect, canary.token_ids.size), canary


def evaluated(tokenizer: Any, effect: float, *, has_adapter: bool = True) -> tuple[AdaptedActor, Canary]:
    """An actor, and a canary that has evaluated it once."""
    actor, canary = make_canary(tokenizer, effect)
    canary.evaluate(actor.score, 0, (lambda: actor.scaled(0.0)) if has_adapter else None)
    return actor, canary


FAULTS: dict[str, tuple[float, float | list[float], str]] = {
    "not applied": (3.0, 0.0, "the engine is where the actor is without its adapter: it does not apply the adapter"),
    "not applied, within tolerance": (0.75, 0.0, r"the engine is \d+% of the way back to the model without its"),
    "twice": (3.0, 2.0, r"the engine is \d+% of the way further away from the model without its adapter"),
    "twice, within tolerance": (0.75, 2.0, r"the engine is \d+% of the way further away from the model without its"),
    "half": (3.0, 0.5, r"the engine is (4[5-9]|5[0-5])% of the way back to the model without its adapter"),
    "half, within tolerance": (1.5, 0.5, r"the engine is (4[0-9]|5[0-9])% of the way back to the model without its"),
    "a layer missing": (3.0, [0.0, 1.0, 1.0, 1.0], r"the engine is (2[0-9]|30)% of the way back to the model without"),
}


@pytest.mark.parametrize(("effect", "scales", "message"), FAULTS.values(), ids=FAULTS)
def test_adapter_applied_otherwise_is_caught(
    effect: float, scales: float | list[float], message: str, tokenizer: Any
) -> None:
    actor, canary = evaluated(tokenizer, effect)
    with actor.scaled(scales):
        answers = actor.answers(canary, seed=9)
    with pytest.raises(EngineError, match=message):
        canary.check(answers)
    assert canary.findings is not None
    is_far = canary.findings.comparison.distance > canary.tolerance * canary.findings.comparison.noise
    assert is_far is (effect == 3)  # otherwise only the direction tells


@pytest.mark.parametrize("effect", [0.0, 0.1, 1.0, 20.0])
def test_adapter_applied_as_by_the_actor_gives_no_alarm(effect: float, tokenizer: Any) -> None:
    """An effect of 0 is that of a new adapter, whose ``B`` is 0."""
    actor, canary = evaluated(tokenizer, effect)
    for seed in range(9, 17):
        canary.check(actor.answers(canary, seed))


@pytest.mark.parametrize("share", [0.45, 0.75])
def test_lasting_deviation_in_the_adapters_direction_passes(share: float, tokenizer: Any) -> None:
    """As other kernels than the actor's may have; an adapter that stays behind is told beside it."""
    actor, canary = make_canary(tokenizer, 1.0)
    deviation = share * actor.effects.sum(0).view(canary.token_ids.shape).numpy()
    with actor.scaled(0.0):  # a new adapter
        canary.evaluate(actor.score, 0, lambda: actor.scaled(0.0))
        deviations = canary.check(actor.answers(canary, seed=9) + deviation)
        stale = actor.answers(canary, seed=10) + deviation
    canary.evaluate(actor.score, 1, lambda: actor.scaled(0.0))
    deviated = actor.answers(canary, seed=11) + deviation
    with pytest.raises(EngineError, match="further away from the model without its adapter"):
        canary.check(deviated)  # of an engine of which nothing is known
    canary.check(deviated, deviations=deviations)
    with pytest.raises(EngineError, match="of the way back to"):
        canary.check(stale, deviations=deviations)


def test_engine_that_misses_many_small_updates_is_detected(tokenizer: Any) -> None:
    """Each is below the rounding; on the way to the base they add up."""
    actor, canary = make_canary(tokenizer, 4.0)
    deviations = None
    with pytest.raises(EngineError, match="of the way back to the model without its adapter"):
        for step in range(50):
            with actor.scaled(0.02 * step):
                canary.evaluate(actor.score, step, lambda: actor.scaled(0.0))
            with actor.scaled(0.0):  # as at the first step
                deviations = canary.check(actor.answers(canary, seed=100 + step), deviations=deviations)
    assert 2 < step < 12  # at 12 all of them are further than an engine may be


def test_other_weights_are_not_blamed_on_the_adapter(tokenizer: Any) -> None:
    actor, canary = evaluated(tokenizer, 3.0)
    answers = np.asarray(actor.answers(canary, seed=9))
    noise = np.random.default_rng(0).normal(scale=2.0, size=answers.shape)  # hundreds of times the rounding
    with pytest.raises(EngineError, match="the engine holds other weights, or computes otherwise than the actor"):
        canary.check((answers + noise).astype(answers.dtype))


def test_actor_without_adapter_blames_none(tokenizer: Any) -> None:
    actor, canary = evaluated(tokenizer, 3.0, has_adapter=False)
    with actor.scaled(0.0):
        answers = actor.answers(canary, seed=9)
    with pytest.raises(EngineError, match="the engine holds other weights, or computes otherwise than the actor"):
        canary.check(answers)


@pytest.mark.parametrize(("effect", "is_seen"), [(0.0, False), (0.1, False), (6.0, False), (9.0, True), (20.0, True)])
def test_effect_below_five_times_the_rounding_cannot_be_told(effect: float, is_seen: bool, tokenizer: Any) -> None:
    """The noise between two evaluations is the root of 2 times that of one: the least effect is one of about 7."""
    canary = evaluated(tokenizer, effect)[1]
    message = r"Whether the engine uses the adapter cannot be told: .* moves by \S+ nats, and by 0\.012\d from rounding"
    with nullcontext() if is_seen else pytest.raises(EngineError, match=message):
        canary.check_adapter_effect()
