"""Metrics of a step's environments: turns, tokens, waiting times. docs/metrics.md explains each name."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field

from rlightning.rollout.prefix_cache import PrefixCacheUse
from rlightning.types import Trajectory


@dataclass(slots=True)
class TurnTotals:
    """A rank's sums of turns, tokens, seconds and tool calls over the trajectories of a step. Single-turn trajectories
    that one request sampled for a group are left out.

    Attributes:
        num_trajectories: number of trajectories, trained on or not.
        num_turns: turns of the policy.
        num_tokens: sampled tokens.
        engine_seconds: seconds in which the trajectories had a request at the engine.
        environment_seconds: seconds in which they had none.
        num_with_tools: number of trajectories whose environment counts tool calls.
        num_tool_calls: tool calls in these trajectories.
        num_tool_failures: tool calls that got an error.
        prefix_cache: prefix cache use of the engines; zero on ranks other than 0.
    """

    num_trajectories: int = 0
    num_turns: int = 0
    num_tokens: int = 0
    engine_seconds: float = 0.0
    environment_seconds: float = 0.0
    num_with_tools: int = 0
    num_tool_calls: float = 0.0
    num_tool_failures: float = 0.0
    prefix_cache: PrefixCacheUse = field(default_factory=PrefixCacheUse)

    def add(self, trajectories: Iterable[Trajectory]) -> None:
        """Add the turns, tokens, seconds and tool calls of ``trajectories`` to the sums."""
        for one in trajectories:
            if "engine" in one.timings:
                self.num_trajectories += 1
                self.num_turns += len(one.samples)
                self.num_tokens += one.num_sampled
                self.engine_seconds += one.timings["engine"]
                self.environment_seconds += one.timings["environment"]
            if "tool_calls" in one.metrics:
                self.num_with_tools += 1
                self.num_tool_calls += one.metrics["tool_calls"]
                self.num_tool_failures += one.metrics.get("tool_failures", 0.0)


def turn_metrics(totals: Sequence[TurnTotals]) -> dict[str, float]:
    """Return the metrics of a step by name, from the totals of each rank."""
    num_trajectories, num_turns, num_tokens, engine, environment, num_with_tools, num_calls, num_failures = (
        sum(column) for column in zip(*(astuple(one)[:8] for one in totals), strict=True)
    )
    metrics = {
        "environment/turns": num_turns / max(num_trajectories, 1),
        "environment/tokens_per_turn": num_tokens / max(num_turns, 1),
        "environment/time_in_engine": engine / max(num_trajectories, 1),
        "environment/time_in_environment": environment / max(num_trajectories, 1),
        "environment/engine_share": engine / max(engine + environment, 1e-9),
    }
    if num_with_tools:
        metrics["environment/tool_calls"] = num_calls / num_with_tools
        metrics["environment/tool_failures"] = num_failures / num_with_tools
    cache = PrefixCacheUse()
    for one in totals:
        cache.add(one.prefix_cache)
    if cache.num_tokens:
        metrics["environment/prefix_cache_hits"] = cache.num_cached / cache.num_tokens
    return metrics
