"""Which syncs are verified."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import save_byte_model
from torch import Tensor

from rlightning.errors import ConfigError
from rlightning.models import load_policy, load_tokenizer, packed_logprobs
from rlightning.rollout.canary import NUM_FORWARDS, Verification
from rlightning.types import RolloutBatch


@pytest.mark.parametrize(
    ("every", "tolerance", "message"),
    [
        (-1, 1.2, r"^rollout\.verify_every=-1 must be at least 0, where 0 verifies nothing\.$"),
        (
            20,
            0.2,
            r"^rollout\.verify_tolerance=0\.2 must be above 1: it is a multiple of .* Leave it out for \d\.\d+\.$",
        ),
        (20, float("nan"), r"^rollout\.verify_tolerance=nan must be above 1"),
    ],
)
def test_what_cannot_verify_is_refused(every: int, tolerance: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Verification(every, tolerance)


def begin(tmp_path: Path, every: int) -> tuple[Any, Verification, list[int]]:
    """A policy, what verifies it, and the versions that it has scored."""
    folder = save_byte_model(tmp_path)
    model = load_policy(folder)
    calls: list[int] = []

    def score(batch: RolloutBatch, dtype: torch.dtype) -> Tensor:
        calls.append(module.weight_version)
        return packed_logprobs(model, batch)[0]

    module = SimpleNamespace(tokenizer=load_tokenizer(folder), score=score, weight_version=0)
    verification = Verification(every, 1.2)
    verification.begin_run(module, 256, torch.float32, torch.device("cpu"))
    return module, verification, calls


@pytest.mark.long
@pytest.mark.parametrize(
    ("every", "due", "scored"),
    [
        (4, [0, 4, 8], [0, 3, 4, 7, 8]),  # and the one before each, whose weights may be what is left in an engine
        (1, list(range(9)), list(range(9))),
        (0, [], []),
    ],
)
def test_the_actor_scores_as_seldom_as_can_be(every: int, due: list[int], scored: list[int], tmp_path: Path) -> None:
    module, verification, calls = begin(tmp_path, every)
    found = []
    for number in range(9):
        module.weight_version = number
        if verification.evaluate(module, []):
            found.append(number)
    assert found == due
    assert calls == [number for number in scored for _ in range(NUM_FORWARDS)]


def test_restarted_engine_is_verified_at_once(tmp_path: Path) -> None:
    module, verification, _ = begin(tmp_path, 100)
    engine: Any = SimpleNamespace(is_alive=True, is_verified=True)
    found = []
    for is_verified in (True, True, False, True):
        engine.is_verified = is_verified
        found.append(verification.evaluate(module, [engine]))
    assert found == [True, False, True, False]
