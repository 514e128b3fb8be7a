"""The canary: tokens that actor and engine score, to tell an engine that rounds otherwise from one with other weights.

The actor scores the canary several times, each time with other rounding errors. An engine that holds the actor's
weights is as far from each of these evaluations as they are from each other; other weights lead further away. Former
weights, be they as near as rounding errors, lead in a direction that is known: towards what the actor gave before the
update.

Letters: ``K`` evaluations, ``N`` sequences, ``L`` tokens of each, ``S`` scored tokens: all but each sequence's first.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedConfig

from rlightning.errors import EngineError
from rlightning.models.architecture import describe_traits
from rlightning.models.shards import local_tensor
from rlightning.rollout.engine_link import VLLMConfig
from rlightning.types import RolloutBatch

Floats = NDArray[np.float64]
Score = Callable[[RolloutBatch, torch.dtype], Tensor]
"""[T] log-probabilities of a batch under the actor at temperature 1, computed in the engine's dtype."""

MAX_DISTANCE = 1.5
"""Of an engine from the actor's evaluations, as a multiple of their distance from each other."""
MAX_SHARE = 0.1
"""Of the way from the current weights back to the former ones: errors of other sizes than the actor's look like 3%."""
MAX_ERRORS = 6.0
"""Standard errors by which an engine may be on that way: chance leads as far in less than one of 10^7 syncs."""

NUM_EVALUATIONS = 4
CANARY_TOKENS = 2048
CANARY_LENGTH = 128
LEAST_CANARY_LENGTH = 32
BLOCK_LENGTH = 16
"""Consecutive tokens that count as one observation: their errors may hang together."""
TRIMMED = 0.01
"""The share of tokens that are left out of means, those that differ most: experts of a token may change by rounding."""
MAX_SCORE = 2.0
"""A token's step and side count up to so many times its own noise."""
LEAST_DEVIATION = 0.01
"""Of the scores of blocks, which are all alike where the weights are far apart."""
LEAST_NOISE = 2e-6
"""Nats: steps of float32 near log-probabilities of -10."""

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-18}
"""The relative error that the embeddings get. In half precision it is one of rounding, and has all later layers round
otherwise. In float32 it stands for what sums of a thousand products lose."""
TF32_ROUNDING = 2.0**-8
"""The same for the products of TF32, which vLLM multiplies float32 matrices in on a GPU."""


class Comparison(NamedTuple):
    """How far an engine is from the actor.

    Attributes:
        distance: mean difference of its log-probabilities from the actor's, in nats a token.
        noise: that of the actor's evaluations from each other.
        share: of the way from the actor's weights back to those before; 0 if those are not known.
        errors: standard errors by which that is above 0.
    """

    distance: float
    noise: float
    share: float = 0.0
    errors: float = 0.0


class Canary:
    """What actor and engines score after a sync, and what the actor has given for these weights and those before.

    Args:
        tokenizer: the policy's.
        engine: that will score it.
        tolerance: the largest distance of an engine from the actor, as a multiple of the actor's noise.

    Attributes:
        token_ids: [N, L].
    """

    def __init__(self, tokenizer: Any, engine: VLLMConfig, tolerance: float = MAX_DISTANCE) -> None:
        # An engine samples a token for a sequence that it scores.
        self.token_ids = canary_tokens(tokenizer, int(engine.engine_args["max_model_len"]) - 1)
        self.tolerance, self._dtype = tolerance, engine.dtype
        is_tf32 = engine.dtype == torch.float32 and engine.device.type == "cuda"
        self._rounding = TF32_ROUNDING if is_tf32 else ROUNDING[engine.dtype]
        self._batch = RolloutBatch.of_sequences(self.token_ids.tolist())
        self._version: int | None = None
        self._actor: Floats | None = None
        self._former: Floats | None = None

    def evaluate(self, score: Score, weight_version: int) -> None:
        """Have the actor score it; what it gave for another version counts as that of before."""
        if weight_version != self._version:
            self._former, self._version = self._actor, weight_version
        self._actor = evaluate(score, self._batch, self._dtype, self._rounding)

    def check(self, answers: NDArray[np.float32], model_config: PreTrainedConfig | None = None) -> None:
        """Raise EngineError if an engine has other weights than the actor had when it was evaluated.

        Args:
            answers: [N, L], the engine's log-probabilities; the first of each sequence is not looked at.
            model_config: the actor's, for what the error says of its architecture; None where it is not known.
        """
        assert self._actor is not None, "evaluate comes first"
        engine = answers[:, 1:].flatten().astype(np.float64)
        found = compare(self._actor, engine, self._former)
        reason = self._find_fault(found)
        if reason is None:
            return
        traits = [] if model_config is None else describe_traits(model_config)
        number, length = self.token_ids.shape
        raise EngineError(
            f"Actor and engine disagree after weights of version {self._version} were sent: the canary's mean "
            f"log-probability is {self._actor.mean():.4f} under the actor and {engine.mean():.4f} under the engine, "
            f"and {reason}. Checked: every parameter of the engine's model was loaded, and {number} sequences of "
            f"{length} tokens were compared. The architecture: {'; '.join(traits) or 'unknown'}."
        )

    def _find_fault(self, found: Comparison) -> str | None:
        if found.share > MAX_SHARE and found.errors > MAX_ERRORS:
            return (
                f"it is {found.share:.0%} of the way back from these weights to those before, by {found.errors:.1f} "
                f"standard errors, where {MAX_ERRORS:g} may be chance: it holds former weights, all or some of them"
            )
        if found.distance <= self.tolerance * found.noise:  # which it is not if one of them is not a number
            return None
        return (
            f"they differ by {found.distance:.3g} nats a token, {found.distance / found.noise:.3g} times the "
            f"{found.noise:.3g} that rounding makes of the actor's, where rollout.verify_tolerance allows "
            f"{self.tolerance:g} times: the engine holds other weights, or computes otherwise than the actor"
        )


def canary_tokens(tokenizer: Any, max_length: int) -> NDArray[np.int64]:
    """Return the canary [N, L]: sums in every other sequence, tokens drawn at random in the others.

    Args:
        tokenizer: the policy's. Special and added tokens are left out: some of them stand for what is no text.
        max_length: the most tokens of a sequence, at least 2.
    """
    rng = np.random.default_rng(0)
    length = min(CANARY_LENGTH, max_length)
    excluded = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    token_ids = rng.choice(
        [token for token in range(len(tokenizer)) if token not in excluded], (CANARY_TOKENS // length, length)
    )
    for row in token_ids[::2]:
        terms = rng.integers(1000, size=(length, 2)).tolist()
        text = "".join(f"What is {a} + {b}? {a} + {b} = {a + b}. " for a, b in terms)
        sums = tokenizer(text, add_special_tokens=False).input_ids[:length]
        row[: len(sums)] = sums
    return token_ids


@contextmanager
def perturbed_embeddings(rounding: float, seed: int) -> Iterator[None]:
    """Within, each number that an ``nn.Embedding`` gives has a relative error, drawn anew.

    Args:
        rounding: the largest error, unless the embedding's dtype, or autocast's, is coarser.
        seed: of the errors.

    Raises:
        EngineError: if no embedding was called.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def perturb(module: nn.Module, inputs: Any, output: Any) -> None:
        if not isinstance(module, nn.Embedding):
            return
        values = local_tensor(output)
        device = values.device
        is_autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if is_autocast else values.dtype
        size = max(rounding, ROUNDING.get(dtype, 0.0))
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)  # the run's own numbers are left alone
        errors = torch.empty(values.shape, device=device).uniform_(-size, size, generator=generators[device])
        values.copy_(values * (1 + errors))

    handle = register_module_forward_hook(perturb)  # whatever the model is, sharded or compiled
    try:
        yield
    finally:
        handle.remove()
    if not generators:
        raise EngineError("The actor cannot be verified: its score() calls no torch.nn.Embedding.")


@torch.no_grad()
def evaluate(score: Score, batch: RolloutBatch, dtype: torch.dtype, rounding: float) -> Floats:
    """Return the actor's log-probabilities [K, S], each time with other rounding errors.

    Args:
        score: the actor's.
        batch: of ``N`` sequences, on the CPU.
        dtype: the engine's.
        rounding: see :func:`perturbed_embeddings`.
    """
    evaluations = []
    for seed in range(NUM_EVALUATIONS):
        with perturbed_embeddings(rounding, seed):
            evaluations.append(score(batch, dtype))
    return torch.stack(evaluations).double().cpu()[:, batch.completion_mask].numpy()


def compare(actor: Floats, engine: Floats, former: Floats | None = None) -> Comparison:
    """Compare an engine's log-probabilities with the actor's.

    Args:
        actor: [K, S].
        engine: [S].
        former: [K, S], of the weights that the engine held before; None if they are not known.
    """
    pairs = [abs(actor[i] - actor[j]) for i in range(len(actor)) for j in range(i)]
    distance, noise = trimmed_mean(abs(actor - engine).mean(0)), trimmed_mean(np.mean(pairs, 0)) + LEAST_NOISE
    share, errors = (0.0, 0.0) if former is None else way_back(actor, former, engine)
    return Comparison(distance, noise, share, errors)


def trimmed_mean(values: Floats) -> float:
    """Return the mean of all but the largest hundredth; NaN if one of them is not finite."""
    return (
        float(np.sort(values)[: len(values) - int(TRIMMED * len(values))].mean())
        if np.isfinite(values).all()
        else math.nan
    )


def way_back(actor: Floats, former: Floats, engine: Floats) -> tuple[float, float]:
    """Find out how far back an engine is on the way from the current weights to the former ones.

    A token's score is the step from now to before, times the side of the middle between both that a value is on, each
    in units of the token's noise and at most ``MAX_SCORE`` large. An engine with the current weights scores as each
    evaluation of the actor does against the others, one with the former weights as those of before do.

    Args:
        actor: [K, S], of the current weights.
        former: [K, S].
        engine: [S].

    Returns:
        The share of the way, 0 with the current weights and 1 with the former ones, and the standard errors by which it
        is above 0. Where the weights differ by less than can be told from rounding, the share means nothing.
    """
    moved, whole = [], []
    for k in range(len(actor)):
        others, former_others = np.delete(actor, k, 0), np.delete(former, k, 0)
        start = _score(actor[k], others, former_others)
        moved.append(_score(engine, others, former_others) - start)
        whole.append(_score(former[k], others, former_others) - start)
    share = float(np.mean(moved) / np.mean(whole)) if np.mean(whole) > 0 else 0.0
    scores = np.mean(moved, 0)
    blocks = scores[: len(scores) // BLOCK_LENGTH * BLOCK_LENGTH].reshape(-1, BLOCK_LENGTH).mean(1)
    deviation = math.hypot(blocks.std(ddof=1), LEAST_DEVIATION)
    return share, float(blocks.mean() / deviation * math.sqrt(len(blocks)))


def _score(values: Floats, now: Floats, before: Floats) -> Floats:
    """[S] scores of values that neither ``now`` nor ``before``, evaluations of both weights, contain."""
    variance = (now.var(0, ddof=1) + before.var(0, ddof=1)) / 2
    noise = np.sqrt((variance + np.median(variance)) / 2) + LEAST_NOISE  # that of few evaluations is itself uncertain
    step = (before.mean(0) - now.mean(0)) / noise
    side = (values - (now.mean(0) + before.mean(0)) / 2) / noise
    return np.asarray(step.clip(-MAX_SCORE, MAX_SCORE) * side.clip(-MAX_SCORE, MAX_SCORE))
