"""Training on what engines have sampled ahead: what they do meanwhile, and what steps that refill take of it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_run import (
    PER_STEP,
    Witness,
    check_each_once,
    consumed,
    make_data,
    make_module,
    make_rollout,
    make_trainer,
    versions,
)
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import in_this_process, share_of_ones
from waiting import wait_for

from rlightning.algorithms import DAPO
from rlightning.callbacks import VLLMRollout
from rlightning.data import ValidationSet
from rlightning.environments import collector
from rlightning.environments.collector import Collector
from rlightning.environments.policy import GroupRequest
from rlightning.hooks import RLCallback
from rlightning.rewards import RewardFunction
from rlightning.rollout import Sampling
from rlightning.rollout.in_flight import Group, InFlight
from rlightning.rollout.requests import SeededPrompt
from rlightning.types import Prompt, RolloutBatch

pytestmark = pytest.mark.processes


@in_this_process
async def ones_beyond_zero(prompt: str, completion: str) -> float:
    """Says nothing about completions of a prompt that begins with a 0."""
    return 1.0 if prompt.startswith("0") else await share_of_ones(completion)


class RecordBatches(RLCallback):
    """Notes for each step what was sampled and rewarded, and what was trained on."""

    def __init__(self) -> None:
        self.sampled: list[list[RolloutBatch]] = []
        self.trained: list[RolloutBatch] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.sampled.append([])

    def on_reward_end(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        self.sampled[-1].append(batch)

    def on_update_start(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        self.trained.append(batch)


class InterruptedCollector(Collector):
    """Ends each call, once the prompts are in flight, as Ctrl-C does."""

    def _start_groups(self, added: Sequence[SeededPrompt], *_: Any) -> None:
        self.in_flight.add(added)

    def _wait(self, *_: Any) -> None:
        raise KeyboardInterrupt


def test_interrupted_step_can_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same random streams, and all ranks' prompts once; those that were taken for later steps stay."""
    rollout = VLLMRollout(placement="standalone", max_staleness=1)
    weights: Any = SimpleNamespace(sync_weights=lambda: None)
    runner: Any = SimpleNamespace(cancel=lambda _: None)
    rollout._collector = InterruptedCollector(runner, rollout.in_flight, weights)
    rollout._engines = SimpleNamespace(config=SimpleNamespace(engine_args={"max_model_len": 64}))  # type: ignore[assignment]
    rollout._policy = SimpleNamespace(weight_version=0, named_weights=dict)
    rollout._is_started = True
    prompts, further = ([Prompt(index, "1", [1], {}) for index in indices] for indices in ((0, 1, 1), (5, 6, 7)))
    others = [(Prompt(index, "1", [1], {}), 0) for index in (20, 21, 25)]  # of a second rank: two, and one for later
    monkeypatch.setattr(collector, "all_to_all_objects", lambda sent, name: {0: sent[0], 1: (others, 2)})
    in_flight: list[list[SeededPrompt]] = []
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            rollout.collect_trajectories(
                prompts, 2, Sampling(max_new_tokens=4, seed=1), None, lambda number: further[:number]
            )
        in_flight.append([(group.prompt, group.stream) for group in rollout.in_flight.waiting])
    later = others[2][0]
    assert [prompt for prompt, _ in in_flight[0]] == [*further, later]
    assert in_flight[1] == [*in_flight[0], (later, 0)]
    drawn = rollout._streams.draw(prompts, 0)
    rollout.begin_step()
    assert rollout._streams.draw(prompts, 0) == drawn


@pytest.mark.slow
def test_dapo_refill_completions_respect_max_staleness(
    engine_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requeued = [0] * 6
    requeue_stale = InFlight.requeue_stale

    def counted(flight: InFlight, weight_version: int) -> list[Group]:
        streams = {group: group.stream for group in flight._groups}
        running = requeue_stale(flight, weight_version)
        requeued[weight_version] += sum(group.stream != stream for group, stream in streams.items())
        return running

    monkeypatch.setattr(InFlight, "requeue_stale", counted)
    record, witness = RecordBatches(), Witness()
    rollout = make_rollout(placement="standalone", max_staleness=1, oversample=2.0, max_new_tokens=24)
    trainer = make_trainer(tmp_path, 6, rollout, record, witness)
    arguments: dict[str, Any] = {"prompts_per_step": PER_STEP, "samples_per_prompt": 2, "lr": 1e-3}
    module = DAPO(engine_model, rewards=[RewardFunction(ones_beyond_zero)], overlong_cache=0, **arguments)
    trainer.fit(module, make_data(tmp_path))
    for version, sampled in enumerate(record.sampled):
        assert all(version - 1 <= min(versions(batch)) and max(versions(batch)) <= version for batch in sampled)
        rewards = torch.cat([batch.rewards for batch in sampled if batch.rewards is not None]).view(-1, 2)
        has_signal = rewards[:, 0] != rewards[:, 1]
        assert sampled[0].num_sequences == 2 * PER_STEP
        assert has_signal.sum() >= PER_STEP or len(sampled) == 1 + module.max_refills
        assert record.trained[version].num_sequences == 2 * has_signal.sum()
        step = witness.steps[version]
        assert step["reward/no_signal"] == pytest.approx(1 - has_signal.float().mean().item())
        assert step["async/requeued"] == requeued[version]
    # A quarter of the prompts begin with a 0, and six steps take more than the sixteen that there are.
    assert any(len(sampled) > 1 for sampled in record.sampled)
    assert sum(requeued) > 0
    check_each_once(trainer, consumed(witness.batches), rollout, num_in_flight=3 * PER_STEP)


class SilentAtFirst(DAPO):
    """Rewards of the first two steps are all equal."""

    def compute_rewards(self, batch: RolloutBatch) -> torch.Tensor:
        rewards = super().compute_rewards(batch)
        return torch.ones_like(rewards) if self.weight_version < 2 else rewards


@pytest.mark.slow
def test_asynchronous_steps_without_signal_are_skipped(engine_model: str, tmp_path: Path) -> None:
    record, witness = RecordBatches(), Witness()
    rollout = make_rollout(placement="standalone", max_staleness=1, max_new_tokens=24)
    trainer = make_trainer(tmp_path, 4, rollout, record, witness)
    arguments: dict[str, Any] = {"prompts_per_step": PER_STEP, "samples_per_prompt": 4, "lr": 1e-3, "max_refills": 1}
    rewards = [RewardFunction(share_of_ones, timeout=500)]
    trainer.fit(SilentAtFirst(engine_model, rewards=rewards, overlong_cache=0, **arguments), make_data(tmp_path))
    assert [step["optim/skipped"] for step in witness.steps] == [1.0, 1.0, 0.0, 0.0]
    assert [len(sampled) for sampled in record.sampled[:2]] == [2, 2] and len(record.trained) == 2
    assert [step["async/version_trained"] for step in witness.steps] == [0, 1, 2, 3]
    assert all(step["async/staleness_max"] <= 1 for step in witness.steps)
    check_each_once(trainer, consumed(witness.batches, group_size=4), rollout, num_in_flight=PER_STEP)


class Swaps(RLCallback):
    """Changes the weights once engines that run ahead have been sent those of the update."""

    def on_update_end(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        for _, weight in module.named_weights():
            weight.data.mul_(1.1)


@pytest.mark.slow
def test_weights_changed_after_an_asynchronous_sync_are_sent(engine_model: str, tmp_path: Path) -> None:
    witness = Witness()
    rollout = make_rollout(placement="standalone", max_staleness=1)
    module = make_module(engine_model)
    make_trainer(tmp_path, 3, rollout, Swaps(), witness).fit(module, make_data(tmp_path))
    # Each update has a version, and so has each of the two changes that a rollout follows.
    assert module.weight_version == 3 + 2
    assert [event for event in witness.events if event.startswith("sync")] == [
        f"sync {version}" for version in range(6)
    ]


class HeldRewards(RLCallback):
    """Rewards that come only in the first update, but for those of its own step."""

    def __init__(self) -> None:
        self.num_called = self.num_returned = 0
        self.num_during_update = -1
        self.has_update_begun = Event()

    async def reward(self, completion: str) -> float:
        self.num_called += 1
        while self.num_called > 2 * PER_STEP and not self.has_update_begun.is_set():
            await asyncio.sleep(0.01)
        self.num_returned += 1
        return completion.count("1") / max(len(completion), 1)

    def on_update_start(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        before = self.num_returned
        self.has_update_begun.set()
        if self.num_during_update < 0:
            wait_for(lambda: self.num_returned > before)
            self.num_during_update = self.num_returned - before


def test_prompts_in_flight_are_rewarded_during_updates(engine_model: str, tmp_path: Path) -> None:
    held, witness = HeldRewards(), Witness()
    rollout = make_rollout(placement="standalone", max_staleness=2, max_new_tokens=24)
    module = make_module(engine_model, rewards=[RewardFunction(held.reward, timeout=500)], check_rewards=False)
    trainer = make_trainer(tmp_path, 3, rollout, held, witness)
    trainer.fit(module, make_data(tmp_path))
    assert held.num_during_update > 0
    assert all(0 <= step["reward/mean"] <= 1 for step in witness.steps)
    check_each_once(trainer, consumed(witness.batches), rollout, num_in_flight=2 * PER_STEP)
    assert held.num_called <= 2 * (3 + 2) * PER_STEP  # each completion once


def test_steps_that_carry_nothing_over_reward_themselves() -> None:
    """Else they would take those that are rewarded fast, and stop the others."""
    cases: list[tuple[dict[str, Any], Any]] = [({"max_staleness": 1}, 1), ({"oversample": 0.5}, None), ({}, None)]
    for settings, expected in cases:
        rollout = VLLMRollout(placement="standalone", **settings)
        module: Any = SimpleNamespace(serve_rewards=lambda num_ranks: num_ranks)
        rollout._policy = module
        assert rollout._serve_rewards() == expected


class Asks(RLCallback):
    """Goes on only when a completion has been sampled meanwhile, after those that had been asked for before."""

    def __init__(self, rollout: VLLMRollout) -> None:
        self.rollout = rollout
        self.asked: list[tuple[str, int, set[int]]] = []

    def ask(self, moment: str) -> None:
        runner = self.rollout.collector._runner
        assert runner is not None
        prompt = Prompt(0, "1+1=", [2, 11, 2, 12], {})
        trajectories = runner.submit(GroupRequest(prompt, Sampling(max_new_tokens=4), 2)).result()
        sampled = {int(version) for one in trajectories for version in one.completion.weight_versions}
        self.asked.append((moment, self.rollout._module.weight_version, sampled))

    def on_update_start(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        self.ask("update")

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.ask("checkpoint")

    def on_validation_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        self.ask("validation")


def test_engines_generate_during_rewards_updates_checkpoints_and_validation(engine_model: str, tmp_path: Path) -> None:
    # One prompt at a time: an answer says that the engine has worked through what it was asked for before.
    rollout = make_rollout(placement="standalone", max_staleness=2, max_new_tokens=24, engine={"max_num_seqs": 2})
    asks = Asks(rollout)

    def waits(completion: str) -> float:
        asks.ask("reward")
        return completion.count("1") / max(len(completion), 1)

    sums = ValidationSet(str(tmp_path / "sums.jsonl"), limit=4)
    checkpoint = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=1, save_top_k=-1)
    often: dict[str, Any] = {"val_check_interval": 1, "check_val_every_n_epoch": None, "enable_checkpointing": True}
    trainer = make_trainer(tmp_path, 2, rollout, asks, checkpoint, **often)
    # Rewards are not called again to check them: such calls may last until weights have another version.
    once: dict[str, Any] = {"check_rewards": False, "validate_first": False}
    module = make_module(engine_model, rewards=[RewardFunction(waits, timeout=500)], **once)
    trainer.fit(module, make_data(tmp_path, validation={"sums": sums}))
    assert [trained for name, trained, _ in asks.asked if name == "update"] == [0, 1]
    for moment in ("checkpoint", "validation"):
        assert [trained for name, trained, _ in asks.asked if name == moment] == [1, 2]
    assert sum(name == "reward" for name, _, _ in asks.asked) >= 2 * 2 * PER_STEP
    # Of the weights that the update has made, which were sent at once.
    assert all(sampled == {trained} for _, trained, sampled in asks.asked)
