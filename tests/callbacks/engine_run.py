"""Runs with a real engine on the CPU: a tiny model, a Trainer for it, and what such a run may leave behind."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
from small_steps import ComputesAll
from tiny import make_algorithm, share_of_ones, write_sums

from rlightning.algorithms import GRPO
from rlightning.callbacks import VLLMRollout
from rlightning.data import PromptDataModule
from rlightning.data.stream import PromptStream
from rlightning.hooks import RLCallback
from rlightning.rewards import RewardFunction
from rlightning.rollout.engine import Engine
from rlightning.types import Prompt, RolloutBatch

PER_STEP = 4
"""Prompts a step, each with two completions."""


def save_model(folder: Path, **config: Any) -> str:
    """A tiny model with an opinion: a random one of usual weights gives all tokens nearly the same chance."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 256}
    return tiny.save_model(folder, **sizes | config, initializer_range=0.1)


def make_module(model_folder: str, **kwargs: Any) -> GRPO:
    """A learning rate that changes the weights by far more than the canary tolerates, in each step.

    Sequences without advantage are computed, too: what they were sampled from is looked at.
    """
    rewards = [RewardFunction(share_of_ones, timeout=500)]
    usual: dict[str, Any] = {"rewards": rewards, "prompts_per_step": PER_STEP, "lr": 3e-2}
    return make_algorithm(ComputesAll, model_folder, **usual | kwargs)


def make_data(folder: Path, **kwargs: Any) -> PromptDataModule:
    """Sixteen sums, which are what there is to predict too."""
    path = write_sums(folder)
    return PromptDataModule(path, predict=path, max_prompt_tokens=16, **kwargs)


def make_rollout(**kwargs: Any) -> VLLMRollout:
    """A small engine, verified at every sync, and what it samples, if it can be."""
    engine = {"kv_cache_memory_bytes": 1 << 25, **kwargs.pop("engine", {})}
    is_plain = kwargs.keys().isdisjoint(("temperature", "top_p", "top_k", "min_p"))
    usual: dict[str, Any] = {"max_new_tokens": 8, "verify_every": 1, "verify_trajectories": is_plain}
    return VLLMRollout(**usual | kwargs, engine=engine)


make_trainer = tiny.bare_trainer


class Witness(RLCallback):
    """Notes which hooks came, the batches, and the metrics of each step and validation."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.batches: list[RolloutBatch] = []
        self.steps: list[dict[str, float]] = []
        self.validations: list[tuple[int, dict[str, float]]] = []

    def on_rollout_start(self, trainer: Any, module: Any, prompts: list[Prompt]) -> None:
        self.events.append("rollout")

    def on_weight_sync_start(self, trainer: Any, module: Any, weight_version: int) -> None:
        self.events.append(f"sync {weight_version}")

    def on_engine_sleep(self, trainer: Any, module: Any) -> None:
        self.events.append("engine_sleep")

    def on_engine_wake(self, trainer: Any, module: Any) -> None:
        self.events.append("engine_wake")

    def on_rollout_end(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        self.batches.append(batch)

    def on_update_end(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        self.events.append("update")

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.events.append("validation")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        self.validations.append((trainer.global_step, metrics))


class Origins(RLCallback):
    """Notes how far each token's log-probability is from that under the weights that it says it is of."""

    def __init__(self) -> None:
        self.actors: list[Any] = []
        self.gaps: list[float] = []
        self.num_workers: list[int] = []

    def on_update_start(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        self.actors.append(copy.deepcopy(module.loaded_actor))
        for version in versions(batch):
            logprobs = module.evaluate_logprobs(batch, self.actors[version], temperature=1.0, max_tokens=10_000)
            own = batch.is_sampled & (batch.weight_versions == version)
            self.gaps.append((logprobs - batch.rollout_logprobs)[own].abs().max().item())
        (engine,) = module.sampler._engines.samplers
        self.num_workers.append(sum("Worker_TP" in command for command in in_session(engine.process.pid)))


class InterruptionError(Exception):
    """Ends a run in the middle of a step."""


class Interrupts(RLCallback):
    """Raises in the update of one step, on all ranks: the first to raise ends the others."""

    def __init__(self, version: int) -> None:
        self.version = version

    def on_update_start(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        if module.weight_version == self.version:
            trainer.strategy.barrier("interrupted")
            raise InterruptionError


def versions(batch: RolloutBatch) -> list[int]:
    """Return the versions of the weights that sampled its tokens."""
    return sorted(set(batch.weight_versions[batch.is_sampled].tolist()))


def check_on_policy(witness: Witness) -> None:
    """Each step's eight completions are of its own weights, by version and by log-probabilities."""
    assert [batch.num_sequences for batch in witness.batches] == [2 * PER_STEP] * len(witness.steps)
    assert [versions(batch) for batch in witness.batches] == [[step] for step in range(len(witness.steps))]
    assert all(step["policy/rollout_gap_max"] < 1e-4 for step in witness.steps)


def check_staleness(batches: Sequence[RolloutBatch], most: int) -> None:
    """Each step's tokens are of its own weights, or of those of up to so many updates before."""
    for version, batch in enumerate(batches):
        assert version - most <= min(versions(batch)) and max(versions(batch)) <= version


def consumed(batches: Sequence[RolloutBatch], group_size: int = 2) -> list[int]:
    """The prompts that were trained on, once a group."""
    return [prompt.index for batch in batches for prompt in batch.prompts[::group_size]]


def drawn(trainer: Any, count: int) -> list[int]:
    """The first prompts of the training set, in its order."""
    stream = trainer.datamodule.stream
    again = PromptStream(stream.prompts, shuffle=stream.shuffle, seed=stream.seed)
    return [prompt.index for prompt in again.take(count)]


def in_flight(rollout: VLLMRollout) -> list[int]:
    """The prompts that a checkpoint would go on with."""
    return [group["prompt"]["index"] for group in rollout.in_flight.state_dict()["groups"]]


def check_each_once(trainer: Any, consumed: list[int], rollout: VLLMRollout, *, num_in_flight: int) -> None:
    """Assert that each prompt taken from the training set was consumed or is in flight, once."""
    under_way = in_flight(rollout)
    assert len(under_way) == num_in_flight
    assert sorted(consumed + under_way) == sorted(drawn(trainer, trainer.datamodule.stream.position))


def note_sessions(patch: pytest.MonkeyPatch) -> list[int]:
    """Record the sessions of engines that are started from here on."""
    sessions: list[int] = []
    start = Engine.start

    def noted(engine: Engine) -> None:
        start(engine)
        assert engine.process is not None
        sessions.append(engine.process.pid)

    patch.setattr(Engine, "start", noted)
    return sessions


def processes(session: int) -> dict[int, str]:
    """The command lines of a session's living processes, by their numbers."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            state, _, _, sid = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(sid) == session and state not in "ZX":
                command = (entry / "cmdline").read_text().replace("\0", " ")
                if command:  # one that is ending has none any more
                    found[int(entry.name)] = command
        except (OSError, ValueError):
            continue
    return found


def in_session(session: int) -> list[str]:
    """The command lines of a session's living processes."""
    return list(processes(session).values())


def find_core(session: int) -> int:
    """vLLM's EngineCore among the processes of an engine's session."""
    (core,) = (pid for pid, command in processes(session).items() if "EngineCore" in command)
    return core
