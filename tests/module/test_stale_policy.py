"""What an older policy has sampled, and what a callback copies of a module at work."""

import copy
import logging
import math
import threading
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_steps import REWARDS, SMALL, ComputesAll, assert_close, train
from tiny import ActorSampler, UseSampler, copy_weights, share_of_ones
from torch import Tensor

from rlightning.algorithms import GRPO
from rlightning.hooks import RLCallback
from rlightning.models import load_policy
from rlightning.module import RLModule
from rlightning.rewards import RewardFunction
from rlightning.types import RolloutBatch, Sample, Trajectory


class HalfAsSure(ActorSampler):
    """Samples like the actor, and says that each token was twice as likely: its importance weight is a half."""

    def complete(self, *args: Any) -> list[Sample]:
        samples = super().complete(*args)
        for sample in samples:
            sample.logprobs = array("f", [logprob + math.log(2) for logprob in sample.logprobs])
        return samples


class OneBehind(HalfAsSure):
    """May be an update behind the actor."""

    max_staleness = 1


@pytest.mark.long
def test_default_correction_weighs_loss_of_stale_tokens(
    model_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def metrics(make: Any, **arguments: Any) -> dict[str, Tensor]:
        caplog.clear()
        module = GRPO(model_folder, rewards=REWARDS, kl_coef=0.0, **SMALL | arguments)
        train(module, tmp_path, 1, UseSampler(make))
        return dict(module.trainer.callback_metrics)

    corrected = metrics(OneBehind)
    assert caplog.text.count("Completions may be 1 update old: each token's loss is weighed") == 1
    assert corrected["policy/correction_weight"] == pytest.approx(0.5, abs=1e-4)
    assert corrected["policy/correction_out_of_bounds"] == 0

    for make, arguments in ((OneBehind, {"rollout_correction": None}), (HalfAsSure, {})):
        plain = metrics(make, **arguments)
        assert "Completions may be" not in caplog.text
        assert not [name for name in plain if "correction" in name]
        assert plain["optim/grad_norm"] > 0
        assert corrected["optim/grad_norm"] == pytest.approx(plain["optim/grad_norm"].item() / 2, rel=1e-3)


class LockedSampler(ActorSampler):
    """Has what no copy can have, as an engine does."""

    def __init__(self, module: RLModule) -> None:
        super().__init__(module)
        self.lock = threading.RLock()


class CopiedAverage(RLCallback):
    """An exponential moving average by hand, in a copy of the module."""

    average: Any = None

    def on_update_end(self, trainer: Any, pl_module: Any, batch: RolloutBatch) -> None:
        if self.average is None:
            self.average = copy.deepcopy(pl_module)
        else:
            for mean, weight in zip(self.average.parameters(), pl_module.parameters(), strict=True):
                mean.data.lerp_(weight.data, 0.5)


@pytest.mark.long
def test_copy_of_the_module_leaves_run_out(model_folder: str, tmp_path: Path) -> None:
    """The reward functions' loop and threads and the engine are at work when it is made."""
    rewards = [RewardFunction(share_of_ones), RewardFunction(lambda completion: float("1" in completion), name="one")]
    copied, module = CopiedAverage(), GRPO(model_folder, rewards=rewards, **SMALL)
    trained = train(module, tmp_path, 2, UseSampler(LockedSampler), copied)
    average = copied.average
    assert average._trainer is None and average.sampler is None
    assert average.lr == 1e-3 and average.rewarder.functions[0].name == module.rewarder.functions[0].name
    assert average.actor is not module.actor
    for name, weight in copy_weights(average).items():
        assert weight.shape == trained[name].shape
        assert not torch.equal(weight, trained[name]) or "norm" in name
    average.save_hf(tmp_path / "average")
    assert_close(dict(load_policy(str(tmp_path / "average")).named_parameters()), copy_weights(average))


class StepBehind(ActorSampler):
    """Samples from the weights of the step before; in the first step from the actor's."""

    max_staleness = 1

    def __init__(self, module: RLModule) -> None:
        super().__init__(module)
        self.trained: Any = module
        self.before: Any = None

    def generate(self, *args: Any) -> list[list[Trajectory]]:
        actor = copy.deepcopy(self.trained.loaded_actor)
        now: Any = SimpleNamespace(loaded_actor=actor, weight_version=self.trained.weight_version)
        self.module, self.before = self.before or now, now
        return super().generate(*args)


@pytest.mark.long
def test_stale_proximal_policy_is_approximated_without_forward_pass(model_folder: str, tmp_path: Path) -> None:
    seen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    class Watched(ComputesAll):
        def policy_loss(self, logprobs: Tensor, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
            assert batch.old_logprobs is not None
            now, old, sampler = logprobs.detach(), batch.old_logprobs, batch.rollout_logprobs
            ages, sampled = self.weight_version - batch.weight_versions, batch.is_sampled
            seen.append((now[sampled], old[sampled], sampler[sampled], ages[sampled]))
            return super().policy_loss(logprobs, batch)

        def evaluate_logprobs(self, *args: Any, **kwargs: Any) -> Tensor:
            raise AssertionError("A pass of its own.")

    arguments = SMALL | {"kl_coef": 0.0, "updates_per_rollout": 2, "proximal_policy": "approximated"}
    module = Watched(model_folder, rewards=REWARDS, **arguments)
    train(module, tmp_path, 2, UseSampler(StepBehind))
    assert [sorted(set(ages.tolist())) for *_, ages in seen] == [[0], [0], [1], [1]]
    # Before a rollout's first update it is the policy now; after half of them, by the versions of the sampler and of
    # now, all of the way back to a sampler that is not behind, and a third of it to one that is an update behind.
    for (now, old, sampler, _), share in zip(seen, (1, 0, 1, 2 / 3), strict=True):
        torch.testing.assert_close(old, sampler + share * (now - sampler), atol=1e-6, rtol=0)
    now, _, sampler, _ = seen[3]
    assert (now - sampler).abs().max() > 1e-3
    # What the sampler is behind is the correction's: truncated importance sampling.
    ratios = torch.cat([(old - sampler).exp() for _, old, sampler, _ in seen[2:]])
    weight = module.trainer.callback_metrics["policy/correction_weight"]
    assert weight == pytest.approx(ratios.clamp(max=2).mean().item(), abs=1e-6)
