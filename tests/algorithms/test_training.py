"""Every algorithm takes real steps through the real Trainer."""

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import copy_weights, in_this_process, make_algorithm, make_data, make_trainer, share_of_ones

from rlightning.algorithms import (
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    RLOO,
    SAPO,
    DrGRPO,
    REINFORCEPlusPlus,
    REINFORCEPlusPlusBaseline,
)
from rlightning.module import RLModule
from rlightning.objectives import RolloutCorrection
from rlightning.rewards import RewardFunction
from rlightning.types import Prompt, RolloutBatch


@in_this_process
async def is_three(prompt: str) -> float:
    """Says nothing within a group, but for the prompts that start with a 3."""
    is_three.calls += 1  # type: ignore[attr-defined]
    return float(prompt.startswith("3") and is_three.calls % 2)  # type: ignore[attr-defined]


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "arguments", "metrics"),
    [
        (GRPO, {"updates_per_rollout": 2, "kl_coef": 0.04}, {"policy/clip_low", "policy/clip_high", "policy/kl"}),
        (DrGRPO, {"updates_per_rollout": 2}, {"policy/clip_high"}),
        (DAPO, {"epochs_per_rollout": 2}, {"policy/clip_high", "reward/overlong"}),
        (RLOO, {}, {"policy/kl"}),
        (REINFORCEPlusPlus, {"updates_per_rollout": 2}, {"policy/clip_high", "policy/kl"}),
        (REINFORCEPlusPlusBaseline, {"updates_per_rollout": 2}, {"policy/clip_high", "policy/kl"}),
        (GSPO, {"updates_per_rollout": 4}, {"policy/clip_high"}),
        (CISPO, {"rollout_correction": RolloutCorrection("icepop")}, {"policy/correction_out_of_bounds"}),
        (SAPO, {"updates_per_rollout": 2}, {"policy/gate"}),
    ],
)
def test_two_steps_train_and_log_metrics(
    algorithm: type[RLModule], arguments: dict[str, Any], metrics: set[str], model_folder: str, tmp_path: Path
) -> None:
    module = algorithm(model_folder, rewards=[RewardFunction(share_of_ones)], prompts_per_step=8, lr=1e-3, **arguments)
    module.configure_model()
    before = copy_weights(module)
    trainer = make_trainer(tmp_path, 2)
    trainer.fit(module, make_data(tmp_path))
    assert trainer.global_step == module.weight_version == 2
    assert metrics | {"reward/mean", "policy/loss", "policy/entropy"} <= set(trainer.callback_metrics)
    # The sampler is the actor itself: there is no gap beyond rounding.
    if module.plan.optimizer_steps == 1:
        assert trainer.callback_metrics["policy/rollout_gap_max"] < 1e-4
    assert all(weight.isfinite().all() for _, weight in module.named_weights())
    assert any(not torch.equal(weight, before[name]) for name, weight in module.named_weights())


@pytest.mark.long
@pytest.mark.parametrize("scale", [1e12, -1.1e12, 1e20])
@pytest.mark.parametrize(
    ("algorithm", "arguments"),
    [(DrGRPO, {}), (GRPO, {"scale_by_std": False}), (RLOO, {}), (REINFORCEPlusPlus, {})],
)
def test_huge_reward_skips_no_step(
    algorithm: type[RLModule], arguments: dict[str, Any], scale: float, model_folder: str, tmp_path: Path
) -> None:
    signs = cycle([1.0, -1.0])

    async def huge_for_one_prompt(prompt: str) -> float:
        return (scale if prompt == "0+0=" else 1.0) * next(signs)

    rewards = [RewardFunction(huge_for_one_prompt)]
    module = make_algorithm(algorithm, model_folder, rewards=rewards, max_failed_share=0.25, **arguments)
    trainer = make_trainer(tmp_path, 1)
    trainer.fit(module, make_data(tmp_path))
    metrics = trainer.callback_metrics
    assert metrics["optim/skipped"] == 0 and metrics["optim/grad_norm"].isfinite()
    assert metrics["reward/failed"] == (0 if scale == 1e12 else 0.25)  # both samples of one of four prompts


@pytest.mark.long
def test_huge_reward_of_an_override_is_left_out(
    model_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Overriding(DrGRPO):
        def compute_rewards(self, batch: RolloutBatch) -> torch.Tensor:
            return torch.tensor([1e20, -1e20, *([1.0, -1.0] * 3)])

    trainer = make_trainer(tmp_path, 1)
    trainer.fit(make_algorithm(Overriding, model_folder), make_data(tmp_path))
    assert trainer.callback_metrics["optim/skipped"] == 0
    assert trainer.callback_metrics["reward/failed"] == 0.25  # 2 of 8
    assert "compute_rewards: a reward of 1e+20 is beyond 1e+12" in caplog.text
    assert "left out, 2 of this batch" in caplog.text


def test_dapo_refills_until_enough_groups_say_something(model_folder: str, tmp_path: Path) -> None:
    taken: list[int] = []
    trained: list[RolloutBatch] = []

    class WatchedDAPO(DAPO):
        def take_prompts(self, num_prompts: int) -> list[Prompt]:
            taken.append(num_prompts)
            return super().take_prompts(num_prompts)

        def update(self, batch: RolloutBatch) -> dict[str, float]:
            trained.append(batch)
            return super().update(batch)

    is_three.calls = 0  # type: ignore[attr-defined]
    # The last four of sixteen prompts have a signal: a step of four takes an epoch to fill.
    module = WatchedDAPO(model_folder, rewards=[RewardFunction(is_three)], prompts_per_step=4, overlong_cache=0)
    make_trainer(tmp_path, 1).fit(module, make_data(tmp_path))
    batch = trained[0]
    assert sum(taken) >= 4
    assert all(prompt.text.startswith("3") for prompt in batch.prompts)
    assert len(set(batch.group_ids.tolist())) == 4
    assert batch.num_sequences == 4 * 8
    assert batch.advantages is not None
    assert (batch.advantages[batch.is_sampled] != 0).all()
