"""Trajectories as readable text, turn by turn, and as plain data."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rlightning.foreign_text import visible, visible_on_one_line
from rlightning.types import Branch, Trajectory, Turn

INDENT = "  "


class ScoredTrajectory(NamedTuple):
    """A trajectory with the rewards that it would get in training.

    Attributes:
        trajectory: the whole trajectory.
        is_sampled: whether it would be trained on.
        reward: the total reward; None if a reward function failed, or there is no reward.
        scores: unweighted result of each reward function; None if it does not apply, or failed.
        has_failed_reward: whether a reward function failed.
        beginning: what the policy read before its first turn, with special tokens; "" to use the prompt's text.
    """

    trajectory: Trajectory
    is_sampled: bool = False
    reward: float | None = None
    scores: Mapping[str, float | None] = {}
    has_failed_reward: bool = False
    beginning: str = ""


def describe_trajectory(scored: ScoredTrajectory) -> str:
    """Return a trajectory as lines of text: its status, reward, turns, branches and error."""
    one = scored.trajectory
    status = one.status if scored.is_sampled else f"{one.status} (would not be trained on)"
    lines = [f"== row {one.prompt.index}: {status}, {_describe_reward(scored)}"]
    lines.append(INDENT + _describe_size(one))
    if one.metrics:
        lines.append(INDENT + ", ".join(f"{name} {value:g}" for name, value in one.metrics.items()))
    lines += _block("prompt", scored.beginning or one.prompt.text)
    began = first_turns(one)
    rewards = iter(one.turn_rewards or ())
    num_read = next((n for n, turn in enumerate(one.turns) if turn.sample is not None), 0) if scored.beginning else 0
    for place, turn in list(enumerate(one.turns))[num_read:]:
        lines += [f"{INDENT}-- a branch begins: {branch.reason}" for branch in began.get(place, ())]
        lines += _block(*_describe_turn(turn, next(rewards, None) if turn.sample is not None else None))
    if one.error:
        lines += _block("error", one.error)
    return "\n".join(lines) + "\n"


def to_data(scored: ScoredTrajectory) -> dict[str, object]:
    """Convert a trajectory to plain data for JSON."""
    one = scored.trajectory
    return {
        "row": one.prompt.index,
        "prompt": one.prompt.text,
        "beginning": scored.beginning,
        "columns": one.prompt.columns,
        "status": one.status,
        "is_sampled": scored.is_sampled,
        "error": one.error,
        "reward": scored.reward,
        "scores": dict(scored.scores),
        "environment_reward": one.reward,
        "turn_rewards": one.turn_rewards,
        "traces": None if one.traces is None else [trace._asdict() for trace in one.traces],
        "metrics": one.metrics,
        "timings": one.timings,
        "turns": [
            {**turn.message, "num_tokens": len(turn.sample.token_ids), "finish_reason": turn.sample.finish_reason}
            if turn.sample is not None
            else turn.message
            for turn in one.turns
        ],
        "branches": [
            {"reason": branch.reason, "num_tokens": len(branch.token_ids), "num_sampled": sum(branch.is_sampled)}
            for branch in one.branches
        ],
    }


def first_turns(trajectory: Trajectory) -> dict[int, list[Branch]]:
    """Return all branches but the first, keyed by the index of the first turn that was sampled in the branch.

    Earlier turns in a branch are history.
    """
    began: dict[int, list[Branch]] = {}
    for branch in trajectory.branches[1:]:
        sampled = [turn for turn, is_sampled in zip(branch.turns, branch.is_sampled, strict=True) if is_sampled]
        if sampled:
            began.setdefault(min(sampled), []).append(branch)
    return began


def _describe_reward(scored: ScoredTrajectory) -> str:
    one = scored.trajectory
    parts = [f"{name} {'none' if value is None else f'{value:.4g}'}" for name, value in scored.scores.items()]
    if one.reward is not None:
        parts.append(f"environment {one.reward:.4g}")
    reward = "no reward" if scored.reward is None else f"reward {scored.reward:.4g}"
    reward = "a reward function failed" if scored.has_failed_reward else reward
    return f"{reward} ({', '.join(parts)})" if parts else reward


def _describe_size(one: Trajectory) -> str:
    seconds = one.timings.get("trajectory", 0.0)
    num_turns = len(one.samples)
    text = f"{num_turns} {'turn' if num_turns == 1 else 'turns'}, {one.num_sampled} tokens sampled, {seconds:.2f} s"
    waits = [f"{name} {one.timings[name]:.2f} s" for name in ("engine", "environment") if name in one.timings]
    return f"{text} ({', '.join(waits)})" if waits else text


def _describe_turn(turn: Turn, reward: float | None) -> tuple[str, str]:
    """Return the label of a turn and its text."""
    role, content = str(turn.message.get("role", "?")), turn.message.get("content")
    others = {name: value for name, value in turn.message.items() if name not in ("role", "content")}
    text = "" if content is None else str(content)
    text += "".join(f"\n[{name}: {value}]" for name, value in others.items())
    if turn.sample is None:
        return role, text
    label = f"{role} ({len(turn.sample.token_ids)} tokens, {turn.sample.finish_reason})"
    return label if reward is None else f"{label} reward {reward:.4g}", text


def _block(label: str, text: str) -> Iterator[str]:
    yield f"{INDENT}[{visible_on_one_line(label)}]"
    yield from (f"{INDENT}{INDENT}{line}" for line in visible(text).splitlines() or [""])
