"""Calls reward functions a second time to check whether they are deterministic, informative and fast enough."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from rlightning.rewards.calls import RewardResult, error_line

REPEATED_CALLS = 8
"""Number of completions for which each function is called again."""
REPEAT_SECONDS = 0.8
"""Maximum seconds for all repeated calls; a call that has not returned by then is only known to take longer."""
SAME = 1e-9
"""Relative difference below which two results are equal up to rounding."""


class Repeat(NamedTuple):
    """The two results of a reward function for each of some completions, which it scored twice.

    Attributes:
        first: results in the step; NaN for a failure or None.
        again: results of the repeated calls, in the same order; None for calls that have not returned or were not made.
        seconds: duration of the repeated calls, up to the time limit; 0 if they were not made.
    """

    first: Sequence[float]
    again: Sequence[RewardResult | None]
    seconds: float


def describe_repeat(
    name: str,
    repeat: Repeat,
    all_values: Sequence[float],
    *,
    num_parallel: int,
    deadline: float,
    everywhere: Sequence[float] | None = None,
    is_final: bool = True,
) -> str | None:
    """Return a warning if a reward function is not deterministic, rewards all completions equally, or is slow.

    Args:
        name: name of the reward function.
        repeat: results for the completions that were scored twice.
        all_values: the function's results for all completions of the step on this rank; NaN where it has none.
        num_parallel: number of concurrent calls.
        deadline: seconds for which other ranks wait for a step's rewards.
        everywhere: the function's results on all ranks; None or empty for a single rank.
        is_final: whether no further call will return; otherwise :func:`describe_noise` follows.
    """
    speed = _describe_speed(repeat, len(all_values), num_parallel, deadline)
    noise = _describe_noise(repeat) if is_final else ()
    return _join(name, *noise, _describe_values(everywhere or all_values), speed)


def describe_noise(name: str, repeat: Repeat) -> str | None:
    """Return a warning if a reward function is not deterministic, or if that is unknown."""
    return _join(name, *_describe_noise(repeat))


def _join(name: str, *findings: str | None) -> str | None:
    said = "; ".join(filter(None, findings))
    return f"Reward '{name}': {said}. model.check_rewards: false leaves this check out." if said else None


def _describe_noise(repeat: Repeat) -> tuple[str | None, ...]:
    return _describe_differences(repeat), _describe_failures(repeat), _describe_unknown(repeat)


def _describe_failures(repeat: Repeat) -> str | None:
    """Return a sentence about second calls that failed for completions with a first result; None if there are none."""
    errors = [
        outcome.error
        for first, outcome in zip(repeat.first, repeat.again, strict=True)
        if outcome is not None and outcome.error is not None and not math.isnan(first)
    ]
    if not errors:
        return None
    return f"{len(errors)} of {len(repeat.again)} second calls failed, unlike the first ones: {error_line(errors[0])}"


def _describe_unknown(repeat: Repeat) -> str | None:
    """Return a sentence about calls that have not returned, whose results may differ; None if there are none."""
    num_late = sum(outcome is None for outcome in repeat.again)
    if not num_late:
        return None
    late = f"{num_late} of {len(repeat.again)} second calls had not returned after {repeat.seconds:.2g} s"
    why = late if repeat.seconds else "it was not asked again, as another function's late calls were still running"
    return f"{why}: how much its results differ from call to call is unknown"


def _describe_differences(repeat: Repeat) -> str | None:
    """Return a sentence about how much the results of two calls differ; None if they are equal. Calls that failed are
    left out.
    """
    pairs = [
        (first, math.nan if outcome.value is None else outcome.value)
        for first, outcome in zip(repeat.first, repeat.again, strict=True)
        if outcome is not None and outcome.error is None
    ]
    num_different = sum(not _is_same(first, again) for first, again in pairs)
    if not num_different:
        return None
    finding = f"asked again, it gave {num_different} of {len(pairs)} completions another result"
    distances = [abs(again - first) for first, again in pairs if not math.isnan(again - first)]
    num_once = sum(math.isnan(first) != math.isnan(again) for first, again in pairs)
    if num_once:
        finding += f", {num_once} of them a reward in only one of the two calls"
    if num_once == num_different:
        return finding
    # Two calls have equal variance; their difference has twice as much.
    noise = math.sqrt(sum(d * d for d in distances) / (2 * len(distances)))
    return (
        f"{finding}, up to {max(distances):g} apart, a standard deviation of {noise:.3g} from call to call, which is "
        "noise in the advantages"
    )


def _is_same(first: float, again: float) -> bool:
    if math.isnan(first) or math.isnan(again):
        return math.isnan(first) and math.isnan(again)
    return abs(again - first) <= SAME * max(abs(first), abs(again))


def _describe_values(values: Sequence[float]) -> str | None:
    """Return a sentence if all completions of the step got the same reward; else None."""
    known = [value for value in values if not math.isnan(value)]
    if len(known) < 2 or not _is_same(min(known), max(known)):
        return None
    return f"it gave all {len(known)} completions of the first step {min(known):g}, from which nothing can be learned"


def _describe_speed(repeat: Repeat, num_samples: int, num_parallel: int, deadline: float) -> str | None:
    """Return a sentence if a step's calls take longer than other ranks wait; else None."""
    rounds = math.ceil(len(repeat.again) / num_parallel)
    seconds = repeat.seconds / max(rounds, 1) * math.ceil(num_samples / num_parallel)
    if seconds <= deadline:
        return None
    bound = "more than " if None in repeat.again else ""
    return (
        f"{len(repeat.again)} calls took {bound}{repeat.seconds:.2g} s, so that the {num_samples} of a step, "
        f"{num_parallel} at once, take {bound}{seconds:.3g} s, and other ranks wait for {deadline:g} s"
    )
