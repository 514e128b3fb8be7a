from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from tiny import ActorSampler, UseSampler, in_this_process, make_data, make_trainer
from torch import Tensor

from rlightning import callbacks
from rlightning.algorithms import GRPO, SFT
from rlightning.hooks import RLCallback, call_hook
from rlightning.module import RLModule
from rlightning.rewards import RewardFunction
from rlightning.types import RolloutBatch

ROLLOUT = ["on_rollout_start", "on_rollout_end", "on_reward_start", "on_reward_end"]
SYNCED_ROLLOUT = ["on_rollout_start", "on_weight_sync_start", "on_weight_sync_end", *ROLLOUT[1:]]
UPDATE = ["on_update_start", "on_update_end"]
COLOCATED_ENGINE = ["on_engine_start", "on_engine_ready", "on_engine_wake", "on_engine_sleep"]


@in_this_process
async def length(completion: str) -> float:
    """A reward that differs between completions."""
    return float(len(completion))


class SyncingSampler(ActorSampler):
    """Calls the sync hooks as VLLMRollout does: when the weights are others than those it has."""

    has_version = -1

    def generate(self, *args: Any) -> Any:
        if self.has_version != self.module.weight_version:
            self.has_version = self.module.weight_version
            for hook in ("on_weight_sync_start", "on_weight_sync_end"):
                call_hook(self.module.trainer, self.module, hook, self.has_version)
        return super().generate(*args)


class Recorder(RLCallback):
    """Writes down each hook of a batch, and looks at what it is given."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.versions: list[int] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.calls.append("on_train_batch_start")

    def on_train_batch_end(self, *args: Any) -> None:
        self.calls.append("on_train_batch_end")

    def on_rollout_start(self, trainer: Any, module: Any, prompts: Any) -> None:
        assert prompts and prompts[0].token_ids
        self.calls.append("on_rollout_start")

    def on_rollout_end(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        assert batch.rewards is None and batch.is_sampled.any()
        self.calls.append("on_rollout_end")

    def on_reward_start(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        assert batch.rewards is None
        self.calls.append("on_reward_start")

    def on_reward_end(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        assert batch.rewards is not None
        self.calls.append("on_reward_end")

    def on_update_start(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        assert batch.advantages is not None
        self.versions.append(module.weight_version)
        self.calls.append("on_update_start")

    def on_update_end(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        self.versions.append(module.weight_version)
        self.calls.append("on_update_end")

    def on_weight_sync_start(self, trainer: Any, module: Any, weight_version: int) -> None:
        self.calls.append("on_weight_sync_start")

    def on_weight_sync_end(self, trainer: Any, module: Any, weight_version: int) -> None:
        self.calls.append("on_weight_sync_end")


def record(module: RLModule, folder: Path, max_steps: int) -> Recorder:
    recorder = Recorder()
    trainer = make_trainer(folder, max_steps, UseSampler(SyncingSampler), recorder)
    trainer.fit(module, make_data(folder))
    return recorder


def around(*hooks: str) -> list[str]:
    return ["on_train_batch_start", *hooks, "on_train_batch_end"]


def test_hooks_come_in_order(model_folder: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"prompts_per_step": 4, "samples_per_prompt": 2, "updates_per_rollout": 2}
    recorder = record(GRPO(model_folder, rewards=[RewardFunction(length)], **arguments), tmp_path, 2)
    assert recorder.calls == around(*SYNCED_ROLLOUT, *UPDATE) * 2
    # The version grows before the end of the update: who syncs there sends the new weights.
    assert recorder.versions == [0, 1, 1, 2]


class TwoRefills(GRPO):
    """Keeps no group of a step's first rollout, one of the second, and all of the third."""

    max_refills = 5
    seen = 0

    def keep_sequences(self, batch: RolloutBatch) -> Tensor:
        self.seen += 1
        kept = (0, 1, 4)[(self.seen - 1) % 3]
        return batch.group_ids < kept

    def update(self, batch: RolloutBatch) -> dict[str, float]:
        assert sorted(set(batch.group_ids.tolist())) == [0, 1, 2, 3]
        return super().update(batch)


@pytest.mark.long
def test_refills_repeat_the_rollout_hooks(model_folder: str, tmp_path: Path) -> None:
    module = TwoRefills(model_folder, rewards=[RewardFunction(length)], prompts_per_step=4, samples_per_prompt=2)
    recorder = record(module, tmp_path, 2)
    assert recorder.calls == around(*SYNCED_ROLLOUT, *ROLLOUT, *ROLLOUT, *UPDATE) * 2


def test_order_without_an_engine(model_folder: str, tmp_path: Path) -> None:
    recorder = record(SFT(model_folder, completion_column="answer", prompts_per_step=4), tmp_path, 1)
    assert recorder.calls == around(*ROLLOUT, *UPDATE)


def test_hook_is_called_on_defining_callbacks_in_order() -> None:
    calls: list[tuple[str, Any]] = []

    class Named(RLCallback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_weight_sync_end(self, trainer: Any, module: Any, weight_version: int) -> None:
            calls.append((self.name, (trainer, module, weight_version)))

    class Loop:
        callbacks = (Named("a"), Callback(), object(), Named("b"))

    loop, module = Loop(), torch.nn.Module()
    call_hook(loop, module, "on_weight_sync_end", 3)
    assert calls == [("a", (loop, module, 3)), ("b", (loop, module, 3))]


def test_an_rl_callback_has_every_hook_and_does_nothing() -> None:
    hooks = {name for name in vars(RLCallback) if name.startswith("on_")}
    num_arguments = dict.fromkeys([*SYNCED_ROLLOUT, *UPDATE], 3) | dict.fromkeys(COLOCATED_ENGINE, 2)
    assert hooks == {*num_arguments, "on_predict_prompt_end"}
    for name in hooks:
        getattr(RLCallback(), name)(*[None] * num_arguments.get(name, 4))


def test_device_callbacks_run_in_controller_workers() -> None:
    runs_in = {name: getattr(getattr(callbacks, name), "runs_in", "controller") for name in callbacks.__all__}
    assert {name for name, where in runs_in.items() if where == "workers"} == {
        "DeviceSyncBeforeBarrier",
        "EmptyCacheAfterUpdate",
        "MakeRoomForEngine",
        "OffloadDuringRollout",
        "RemotizeOnHeadOnly",
        "Throughput",
        "TransformersRollout",
        "VLLMRollout",
    }
