"""VLLMRollout in runs of the real Trainer, in a loop of one's own, and refusing what cannot work."""

import contextlib
import re
import runpy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from engine_run import Witness, check_on_policy, in_session, make_module, make_rollout, make_trainer, note_sessions
from lightning.pytorch import Trainer
from tiny import make_batch

from rlightning.callbacks import VLLMRollout
from rlightning.data import PromptDataModule, ValidationSet
from rlightning.errors import ConfigError, EngineError
from rlightning.module import RLModule
from rlightning.rewards import RewardFunction, RewardRunner
from rlightning.rollout.canary import canary_tokens
from rlightning.rollout.weights.shared_memory import SharedMemorySender
from rlightning.types import Prompt, RolloutBatch, Trajectory

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_loop.py"


# A whole run


class Run(NamedTuple):
    """The objects of a run, and what was seen of it while it ran."""

    trainer: Trainer
    module: RLModule
    data: PromptDataModule
    rollout: VLLMRollout
    witness: Witness
    sessions: list[int]
    begun: list[Trajectory]


@pytest.fixture(scope="module")
def run(engine_model: str, tmp_path_factory: pytest.TempPathFactory, starts_processes: None) -> Run:
    """Five steps, validation before the first and after each second one, on a greedy set and one for pass@k."""
    folder = tmp_path_factory.mktemp("run")
    begun: list[Trajectory] = []
    begin = RewardRunner.begin

    def noted_begin(runner: RewardRunner, trajectories: list[Trajectory]) -> None:
        begin(runner, trajectories)
        begun.extend(trajectories)

    with pytest.MonkeyPatch.context() as patch:
        sessions = note_sessions(patch)
        patch.setattr(RewardRunner, "begin", noted_begin)
        witness, rollout = Witness(), make_rollout(temperature=0.7, bucket_bytes=50_000)
        trainer = make_trainer(folder, 5, rollout, witness, val_check_interval=2, check_val_every_n_epoch=None)
        rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
        sampled = {"path": rows, "limit": 3, "samples_per_prompt": 4}
        sets: dict[str, Any] = {"greedy": ValidationSet(rows, limit=4), "sampled": sampled}
        data = PromptDataModule(rows, validation=sets, predict=rows)
        module = make_module(engine_model)
        trainer.fit(module, data)
    seen = Witness()
    for name in vars(seen):
        setattr(seen, name, list(getattr(witness, name)))
    return Run(trainer, module, data, rollout, seen, sessions, begun)


def test_weights_are_sent_once_an_update(run: Run) -> None:
    step = ["rollout", "update"]
    assert run.witness.events == [
        *("validation", "sync 0", *step),
        *("rollout", "sync 1", "update", "validation", "sync 2", *step),
        *("rollout", "sync 3", "update", "validation", "sync 4", *step),
    ]


def test_prompt_limit_is_the_engines(run: Run) -> None:
    assert run.data.max_prompt_tokens == 248  # 256 positions, less 8 of a completion


def test_each_step_samples_from_its_own_weights(run: Run) -> None:
    assert len(run.witness.steps) == 5
    check_on_policy(run.witness)


def test_rewards_are_begun_as_completions_come(run: Run) -> None:
    # Five steps of 4 x 2 completions, and three validations of 4 and of 3 x 4.
    assert len(run.begun) == 5 * 8 + 3 * (4 + 12)
    for batch in run.witness.batches:
        assert {id(one.turns) for one in run.begun} >= {id(one.turns) for one in batch.trajectories}


def test_validation_goes_through_the_engine(run: Run) -> None:
    assert [step for step, _ in run.witness.validations] == [0, 2, 4]
    for _, metrics in run.witness.validations:
        assert {"val/greedy/pass@1", "val/sampled/pass@1", "val/sampled/pass@2", "val/sampled/pass@4"} <= set(metrics)
        assert not {"val/greedy/pass@2", "val/sampled/pass@8"} & set(metrics)
        assert metrics["val/sampled/pass@1"] <= metrics["val/sampled/pass@2"] <= metrics["val/sampled/pass@4"]
        assert 1 <= metrics["val/greedy/length"] <= 8
        assert all(np.isfinite(value) for value in metrics.values())


def test_the_engine_ends_with_the_run(run: Run) -> None:
    assert run.rollout.engine is None
    assert [in_session(session) for session in run.sessions] == [[]] * len(run.sessions)
    assert (Path(run.trainer.default_root_dir) / "engine.log").stat().st_size


@pytest.mark.parametrize("read", [lambda rollout: rollout.max_sequence_length, lambda rollout: rollout.collector])
def test_rollout_without_set_up_is_an_error(read: Callable[[VLLMRollout], object]) -> None:
    with pytest.raises(EngineError, match=r"^There is no engine"):
        read(VLLMRollout())


@pytest.mark.slow
def test_the_same_objects_serve_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    version = run.module.weight_version
    sessions = note_sessions(monkeypatch)
    (witness,) = (callback for callback in run.trainer.callbacks if isinstance(callback, Witness))  # type: ignore[attr-defined]
    run.trainer.fit_loop.epoch_loop.max_steps = version + 1
    run.trainer.fit(run.module, run.data)
    assert run.module.weight_version == version + 1
    assert witness.events[-5:] == ["rollout", "sync 5", "update", "validation", "sync 6"]
    greedy, sampled = run.trainer.validate(run.module, run.data, verbose=False)
    assert "val/greedy/pass@1" in greedy and "val/sampled/pass@4" in sampled
    predictions: Any = run.trainer.predict(run.module, run.data)
    pairs = [pair for batch in predictions for pair in batch]
    assert [prompt.index for prompt, _ in pairs] == list(range(16))
    for _, trajectories in pairs:
        assert len(trajectories) == 2
        assert {held for one in trajectories for held in one.completion.weight_versions} == {version + 1}
    assert [in_session(session) for session in sessions] == [[]] * 3


# A loop of one's own


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


@pytest.mark.slow
@pytest.mark.processes
def test_the_example_learns(example: dict[str, Any], engine_model: str, tmp_path: Path) -> None:
    rewards = example["main"](engine_model, num_steps=12, run_dir=str(tmp_path))
    assert len(rewards) == 12
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3])


class PlainLoop(NamedTuple):
    trainer: SimpleNamespace
    rollout: VLLMRollout
    policy: Any
    prompts: list[Prompt]


@pytest.fixture(scope="module")
def loop(
    example: dict[str, Any], engine_model: str, tmp_path_factory: pytest.TempPathFactory, starts_processes: None
) -> Iterator[PlainLoop]:
    """A policy and an engine that stays up, verified at each sync; no Trainer."""
    policy = example["Policy"](engine_model)
    rollout = make_rollout(seed=3, engine={"max_num_seqs": 8, "max_num_batched_tokens": 256})
    trainer = SimpleNamespace(callbacks=[rollout], default_root_dir=tmp_path_factory.mktemp("plain"))
    rollout.setup(trainer, policy, "fit")
    prompts = [Prompt(i, text, policy.tokenizer(text).input_ids, {}) for i, text in enumerate(["1+1=", "2+3="])]
    yield PlainLoop(trainer, rollout, policy, prompts)
    rollout.close()


@torch.no_grad()
def change_weights(policy: Any, size: float = 0.05) -> None:
    for weight in policy.model.parameters():
        weight.add_(torch.randn_like(weight), alpha=size)
    policy.weight_version += 1


def sample(loop: PlainLoop) -> list[list[str]]:
    groups = loop.rollout.generate(loop.prompts, 8, loop.rollout.sampling)
    return [[one.final_text for one in group] for group in groups]


def sample_anew(loop: PlainLoop) -> list[list[str]]:
    """In another step."""
    loop.rollout.on_update_end(loop.trainer, loop.policy, make_batch([[[1, 0]]]))
    return sample(loop)


@pytest.mark.processes
def test_seeded_prompts_beyond_a_batch_are_sampled(loop: PlainLoop) -> None:
    """A batch takes 256 tokens: two of these prompts and most of the third, which vLLM must not cut on a CPU."""
    characters = [str(i % 10) for i in range(100)]
    prompts = [
        Prompt(i, text, loop.policy.tokenizer(text).input_ids, {})
        for i in range(8)
        for text in ["".join(characters[i:] + characters[:i])]
    ]
    assert {len(prompt.token_ids) for prompt in prompts} == {100}
    groups = [loop.rollout.generate(prompts, 2, replace(loop.rollout.sampling, seed=seed)) for seed in (0, 0)]
    assert all(len(group) == 2 for group in groups[0]) and len(groups[0]) == 8
    assert loop.rollout.engine is not None and loop.rollout.engine.is_alive


@pytest.mark.processes
def test_validation_draws_from_other_streams_than_training(loop: PlainLoop) -> None:
    trained = sample_anew(loop)
    loop.rollout.on_validation_start(loop.trainer, loop.policy)
    validated = [sample(loop), sample(loop)]  # as of two sets with the same prompts
    loop.rollout.on_validation_end(loop.trainer, loop.policy)
    assert trained != validated[0] != validated[1] != trained
    assert sample(loop) == trained


@pytest.mark.processes
def test_requests_the_engine_would_cut_are_refused(loop: PlainLoop) -> None:
    long = loop.prompts[0]._replace(token_ids=[1] * 249)
    message = r"A prompt of 249 tokens \+ max_new_tokens=8 = 257, but the engine takes 256 .* Lower max_new_tokens by 1"
    with pytest.raises(ConfigError, match=message):
        loop.rollout.generate([long], 1, loop.rollout.sampling)
    with pytest.raises(ConfigError, match=r"temperature=0 makes all 2 samples of a prompt alike"):
        loop.rollout.generate(loop.prompts, 2, replace(loop.rollout.sampling, temperature=0))


@pytest.mark.processes
def test_seed_repeats_step_but_not_run(loop: PlainLoop) -> None:
    first = sample_anew(loop)
    # A prompt that comes again within a step, as in a refill, is not answered with the same completions.
    assert sample(loop) != first
    assert sample_anew(loop) == first
    # The same weights under the next version draw from other streams: no step repeats the one before.
    loop.policy.weight_version += 1
    assert sample_anew(loop) != first
    loop.policy.weight_version -= 1
    assert sample_anew(loop) == first


def test_reward_runs_before_last_completion_arrives(loop: PlainLoop, tmp_path: Path) -> None:
    start, called = time.monotonic(), tmp_path / "called"
    arrived: list[float] = []
    arguments = {"start": start, "note": str(called)}
    runner = RewardRunner([RewardFunction("clock_reward.seconds_since", arguments=arguments, timeout=500)])

    def on_completed(prompt: Prompt, trajectories: list[Trajectory]) -> None:
        runner.begin(trajectories)
        while not called.exists():  # that takes a process's start
            time.sleep(0.01)
        arrived.append(time.monotonic() - start)

    prompts = [loop.prompts[0]._replace(index=index) for index in range(64)]
    with contextlib.closing(runner):
        groups = loop.rollout.generate(prompts, 4, loop.rollout.sampling, on_completed)  # eight sequences at once
        batch = RolloutBatch.pack(groups)
        rewards = runner.score(batch.trajectories).rewards
    assert len(arrived) == 64
    assert rewards.min() < arrived[0]


def test_weights_changed_without_version_are_sent_and_verified(loop: PlainLoop) -> None:
    """A callback may change the weights without a new version, as for a validation of averaged weights."""
    sample(loop)
    version, syncs = loop.policy.weight_version, loop.rollout.verification.num_syncs
    weight = next(iter(loop.policy.model.parameters()))
    trained = weight.detach().clone()
    for change in (trained * 1.5, trained):
        weight.data.copy_(change)
        sample(loop)
        sample(loop)
    assert loop.rollout.verification.num_syncs == syncs + 2  # each with a canary: verify_every is 1
    assert loop.policy.weight_version == version + 2


def leave_as_it_was(sender: SharedMemorySender, source: Any) -> Iterator[int]:
    """In the place of ``fill``: the bucket keeps the weights of the sync before."""
    yield from range(len(sender.plan.chunks))


def test_withheld_weights_are_caught(loop: PlainLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    sample(loop)
    before = loop.policy.weight_version

    with monkeypatch.context() as patch:
        patch.setattr(SharedMemorySender, "fill", leave_as_it_was)
        change_weights(loop.policy)
        with pytest.raises(EngineError, match="Actor and engine disagree after weights") as caught:
            sample(loop)
        with pytest.raises(EngineError):  # nor does it the next time
            sample(loop)
    canary = RolloutBatch.of_sequences(canary_tokens(loop.policy.tokenizer, 255).tolist())
    mean = loop.policy.score(canary, torch.float32)[canary.is_sampled].mean()
    assert f"of version {before + 1}" in str(caught.value)
    said = re.search(r"is (-\d+\.\d{4}) under the actor and -", str(caught.value))
    assert said is not None and float(said[1]) == pytest.approx(float(mean), abs=2e-4)
    assert sample(loop)  # sent in full, it passes


def test_a_stale_bucket_is_caught(loop: PlainLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    sample(loop)

    with monkeypatch.context() as patch:
        patch.setattr(SharedMemorySender, "fill", leave_as_it_was)
        change_weights(loop.policy, 1e-5)  # as much as an update
        with pytest.raises(EngineError, match=r"is -\d+\.\d+ under the actor and -.* of the way back"):
            sample(loop)
    assert sample(loop)


def test_canary_of_nan_is_caught(loop: PlainLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    change_weights(loop.policy)
    with monkeypatch.context() as patch:
        score = loop.policy.score
        patch.setattr(loop.policy, "score", lambda batch, dtype: score(batch, dtype) * float("nan"))
        with pytest.raises(EngineError, match="nan under the actor"):
            sample(loop)
    assert sample(loop)
