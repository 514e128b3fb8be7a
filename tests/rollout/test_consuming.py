"""What steps consume of engines that answer at once, as far as it can be counted: no engine is started."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_models import engine_config, make_prompt

from rlightning.rollout import Sampling
from rlightning.rollout.async_metrics import WINDOW_STEPS
from rlightning.rollout.engine_pool import Answer
from rlightning.rollout.in_flight import InFlight
from rlightning.rollout.standalone import StandaloneEngines
from rlightning.types import Sample


class PromptPool:
    """In place of the pool of engines: answers what ``answers`` says, which may be nothing."""

    def __init__(self, answers: Callable[[str], bool]) -> None:
        self.answers = answers
        self.version = 0

    def submit(self, prompt: Any, *_: Any) -> Answer:
        answer = Answer()
        if self.answers(prompt.text):
            one = Sample([1], [0.0], [self.version], "1", "stop")
            answer.set_result([one])
        return answer

    def take_idle_seconds(self) -> float:
        return 1e6  # far more than any test takes

    def has_joiners(self) -> bool:
        return False

    def check(self) -> None: ...
    def forgive(self) -> None: ...
    def cancel(self, answers: Any) -> None: ...


class Consumer:
    """Standalone engines with that pool, and the updates of a run with them."""

    def __init__(self, folder: Path, answers: Callable[[str], bool] = lambda text: True) -> None:
        self.pool = PromptPool(answers)
        self.engines = StandaloneEngines([engine_config("unused", folder / "log")], InFlight(1))
        self.engines._pool = self.pool  # type: ignore[assignment]

    def begin_step(self, version: int) -> None:
        self.pool.version = version
        self.engines.forgive()

    def consume(self, num_groups: int, *texts: str, room: int = 100) -> dict[str, float]:
        """Hand in prompts and take as many groups; the metrics."""
        requests = [(make_prompt(text), 0) for text in texts]
        return self.engines.consume(
            requests,
            1,
            Sampling(),
            None,
            lambda: None,
            num_groups=num_groups,
            per_step=num_groups,
            room=room,
            weight_version=self.pool.version,
        ).metrics


def test_pace_counts_steps_however_often_they_are_refilled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run = Consumer(tmp_path)
    for version in range(WINDOW_STEPS):
        run.begin_step(version)
        for _ in range(4):  # a step and three refills
            run.consume(1, "1+1=")
        if version < WINDOW_STEPS - 1:
            run.engines.forgive()  # once more when an update is done, and with each batch of a validation
            run.engines.forgive()
    assert not any(record.name.startswith("rlightning") for record in caplog.records)
    run.engines.forgive()
    assert caplog.text.count("of the last 20 steps") == 1


def test_a_prompt_that_grew_too_old_is_counted(tmp_path: Path) -> None:
    run = Consumer(tmp_path, answers=lambda text: text != "9+9=")
    expired = []
    for version in range(4):
        run.begin_step(version)
        texts = ["1+1=", "9+9="] if version == 0 else ["1+1="]
        expired.append(run.consume(1, *texts)["async/expired"])
    assert expired == [0.0, 0.0, 1.0, 0.0]  # begun at version 0, and again at 2
