"""Each random stream of the project against those of the same purpose of a neighbouring run."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from rlightning.data.stream import PromptStream
from rlightning.module.batching import deal_groups, deal_seed
from rlightning.optim.adamw import seeded
from rlightning.seeds import mix_seed, run_seed
from rlightning.types import Prompt


@pytest.mark.processes
def test_mix_seed_is_the_same_in_every_process() -> None:
    command = "from rlightning.seeds import mix_seed; print(mix_seed(0, 'engine', 1))"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert int(done.stdout) == mix_seed(0, "engine", 1)


def test_mix_seed_tells_all_parts_apart() -> None:
    parts: list[tuple[int | str, ...]] = [(), (0,), (0, 1), (1, 0), (1,), (10,), ("0", 1), (0, "1"), ("0", "1")]
    assert len({mix_seed(*one) for one in parts}) == len(parts)
    assert all(0 <= mix_seed(*one) < 1 << 62 for one in parts)


def test_mix_seed_neighbours_differ_in_half_of_their_bits() -> None:
    flipped = [(mix_seed(seed, "x") ^ mix_seed(seed + 1, "x")).bit_count() for seed in range(500)]
    assert np.mean(flipped) == pytest.approx(31, abs=1)  # of 62; the mean's deviation is 4 / sqrt(500) = 0.18


def test_run_seed_is_that_of_seed_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert run_seed() is None
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    assert run_seed() == 7


def correlation(first: list[int], second: list[int]) -> float:
    return abs(float(np.corrcoef(first, second)[0, 1]))


def test_prompt_orders_of_neighbouring_seeds_are_independent() -> None:
    prompts = [Prompt(i, str(i), [1], {}) for i in range(2000)]
    orders = [[prompt.index for prompt in PromptStream(prompts, seed=seed).take(2000)] for seed in (0, 1, 2)]
    # Of independent orders: 1 / sqrt(2000) = 0.022.
    assert max(correlation(orders[0], other) for other in orders[1:]) < 0.1


def test_minibatches_follow_from_the_run_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def deal(seed: int, version: int) -> list[list[list[int]]]:
        monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
        return deal_groups(64, 4, deal_seed(version))

    assert deal(0, 3) == deal(0, 3)
    deals = [deal(seed, version) for seed in (0, 1) for version in (3, 4)]
    assert all(deals[i] != deals[j] for i in range(4) for j in range(i))


def test_rounding_of_optimizer_states_follows_from_the_run_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(seed: int) -> torch.Tensor:
        monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
        parameter = torch.zeros(1)
        return torch.rand(4000, generator=seeded("1 0 0 exp_avg", parameter, torch.device("cpu")))

    assert torch.equal(draw(0), draw(0))
    assert abs(torch.corrcoef(torch.stack([draw(0), draw(1)]))[0, 1]) < 0.06
