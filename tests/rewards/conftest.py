"""What the tests of rewards share."""

from collections.abc import Iterator
from typing import Any

import pytest
from scoring import MakeRunner

from rlightning.rewards import RewardRunner


@pytest.fixture
def make_runner() -> Iterator[MakeRunner]:
    """Runners of two workers that tolerate failures; closed at the end."""
    runners: list[RewardRunner] = []

    def make(*rewards: Any, **options: Any) -> RewardRunner:
        runners.append(RewardRunner(rewards, **{"num_workers": 2, "max_failed_share": 1.0, **options}))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()
