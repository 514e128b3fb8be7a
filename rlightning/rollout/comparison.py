"""Compares an engine's log-probabilities with an actor's: distance in units of rounding errors, and direction.

Letters: ``K`` evaluations of the actor, ``S`` scored tokens.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BLOCK_LENGTH = 16
"""Consecutive tokens that count as one observation: their errors may be correlated."""
TRIMMED = 0.01
"""Share of tokens left out, those that differ most: rounding may route a token to other experts."""
MAX_SIDE = 2.0
"""Limit of a token's normalized deviation, so that no single token dominates."""
LEAST_DEVIATION = 0.01
"""Least standard deviation of the scores of blocks; they are all alike where the weights are far apart."""
LEAST_NOISE = 2e-6
"""Least noise in nats: the spacing of float32 numbers near a log-probability of -10."""


class Comparison(NamedTuple):
    """The distance of an engine's log-probabilities from the actor's, and the noise among the actor's own.

    Attributes:
        distance: root mean square difference between engine and actor, in nats.
        noise: root mean square difference between the actor's evaluations, in nats.
    """

    distance: float
    noise: float


class MissingUpdate(NamedTuple):
    """An estimate of which share of the update from the former to the current weights an engine lacks.

    Attributes:
        length: distance between the actor's log-probabilities under both weights, root mean square in nats.
        share: share of the update that is missing: 0 with the current weights, 1 with the former ones. Meaningless if
            the two differ by no more than rounding errors.
        errors: number of standard errors by which the share is above 0.
    """

    length: float
    share: float
    errors: float


class Findings(NamedTuple):
    """What a check of an engine measured, whether or not it passed: distance from the actor, and missing updates.

    Attributes:
        comparison: comparison of the engine with the actor.
        missing_updates: estimates of a missing update, by the version of the former weights.
    """

    comparison: Comparison
    missing_updates: dict[int, MissingUpdate]


def compare(actor: Floats, engine: Floats) -> Comparison:
    """Return the root mean square differences, in nats, between engine and actor and between the actor's evaluations.

    One is between the engine's log-probabilities and the actor's K evaluations, the other, plus ``LEAST_NOISE``,
    between pairs of the actor's evaluations. Both leave out the tokens that differ most.

    Args:
        actor: [K, S], the actor's log-probabilities of S tokens in K evaluations, at least 2.
        engine: [S], the engine's log-probabilities.
    """
    pairs = np.stack([actor[i] - actor[j] for i in range(len(actor)) for j in range(i)])
    return Comparison(root_mean_square(actor - engine), root_mean_square(pairs) + LEAST_NOISE)


def root_mean_square(differences: Floats) -> float:
    """Return the root mean square of differences [., S] without the ``TRIMMED`` largest; NaN if one is not finite."""
    squares = np.sort(np.mean(differences**2, 0))
    if not np.isfinite(squares).all():
        return math.nan
    return float(np.sqrt(squares[: len(squares) - int(TRIMMED * len(squares))].mean()))


def estimate_missing_update(actor: Floats, former: Floats, engine: Floats) -> MissingUpdate:
    """Return an estimate, from log-probabilities, of which share of an update from former weights an engine lacks.

    A token's score is the product of two numbers: the step from its current to its former log-probability, and the
    engine's distance from the midpoint of both. Both are divided by the root of the sum of squares of noise and half
    the step. The share is the position of the engine's mean score between the mean scores of current and former
    evaluations.

    Args:
        actor: [K, S], log-probabilities under the current weights.
        former: [K, S], log-probabilities under the former weights.
        engine: [S], the engine's log-probabilities; or [K, S], one for each evaluation.
    """
    engines = np.broadcast_to(engine, actor.shape)
    moved, whole = [], []
    for k in range(len(actor)):
        others, former_others = np.delete(actor, k, 0), np.delete(former, k, 0)
        start = _score(actor[k], others, former_others)
        moved.append(_score(engines[k], others, former_others) - start)
        whole.append(_score(former[k], others, former_others) - start)
    share = float(np.mean(moved) / np.mean(whole)) if np.mean(whole) > 0 else 0.0
    scores = np.mean(moved, 0)
    blocks = scores[: len(scores) // BLOCK_LENGTH * BLOCK_LENGTH].reshape(-1, BLOCK_LENGTH).mean(1)
    deviation = math.hypot(blocks.std(ddof=1), LEAST_DEVIATION)
    errors = float(blocks.mean() / deviation * math.sqrt(len(blocks)))
    return MissingUpdate(root_mean_square(actor - former), share, errors)


def _score(values: Floats, now: Floats, before: Floats) -> Floats:
    """Return the scores [S] of log-probabilities, from evaluations of the current and of the former weights."""
    variance = (now.var(0, ddof=1) + before.var(0, ddof=1)) / 2
    variance = (variance + np.median(variance)) / 2  # the noise of few evaluations is itself uncertain
    step = before.mean(0) - now.mean(0)
    side = values - (now.mean(0) + before.mean(0)) / 2
    unit = np.sqrt(variance + step**2 / 4) + LEAST_NOISE
    return np.asarray(step / unit * (side / unit).clip(-MAX_SIDE, MAX_SIDE))
