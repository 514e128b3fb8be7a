"""A collector over a sampler of the test's, without engines and ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rlightning.environments import Environment
from rlightning.environments.collector import Collector, StepPlan
from rlightning.environments.runner import EnvironmentRunner
from rlightning.rollout import Sampling
from rlightning.rollout.in_flight import InFlight
from rlightning.types import Prompt, Trajectory


class CollectorRun:
    """The steps of a run; its sampler has the ``version`` of its weights.

    Attributes:
        num_syncs: of the weights, so far.
        num_needed: of these, while requests wait.
        error: raised instead, if there is one.
    """

    def __init__(
        self,
        sampler: Any,
        environment: Environment | None = None,
        *,
        max_staleness: int = 1,
        timeout: float | None = None,
        **limits: Any,
    ) -> None:
        self.sampler, self.num_syncs, self.num_needed = sampler, 0, 0
        self.error: BaseException | None = None
        runner = EnvironmentRunner(sampler, sampler.tokenizer, environment, max_length=4000, timeout=timeout)
        # Engines that have had nothing to do for far longer than any test takes.
        self.collector = Collector(runner, InFlight(max_staleness), self, lambda: 1e6, **limits)

    def sync_weights(self) -> None:
        self.num_syncs += 1

    def needs_sync(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.num_syncs < self.num_needed

    def collect(
        self,
        num_groups: int,
        *requests: tuple[Prompt, int],
        num_samples: int = 1,
        sampling: Sampling = Sampling(),  # noqa: B008  # it is frozen
        per_step: int | None = None,
        room: int = 100,
    ) -> list[list[Trajectory]]:
        """Hand in prompts, and take as many groups."""
        plan = StepPlan(num_groups, num_groups if per_step is None else per_step, room, self.sampler.version)
        return self.collector.collect_trajectories(requests, num_samples, sampling, None, plan)


@contextmanager
def runs_of(kind: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield what makes runs, which are closed in the end."""
    made: list[Any] = []

    def make(*arguments: Any, **options: Any) -> Any:
        made.append(kind(*arguments, **options))
        return made[-1]

    yield make
    for run in made:
        run.collector.close()
