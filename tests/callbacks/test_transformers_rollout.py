"""Whole runs without an engine: training, validation, prediction, resume, ranks and the command line."""

import asyncio
import logging
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import openai
import pytest
import torch
from cli_project import fit_here
from engine_run import Witness, drawn, make_data, make_module, make_trainer, versions
from lightning.pytorch.callbacks import ModelCheckpoint
from programs import read_csv, run_python, steps_with
from rank_processes import finish, start_calls
from tiny import copy_weights, write_sums
from waiting import PATIENCE_SECONDS

from rlightning.callbacks import TransformersRollout
from rlightning.data import ValidationSet
from rlightning.environments import AgentProgram, Environment, Policy
from rlightning.environments.collector import Collector
from rlightning.errors import EngineError, EnvironmentFailedError
from rlightning.parallel.fsdp import FSDP
from rlightning.rollout.sampler import MAX_SUPPORT
from rlightning.types import Outcome, Prompt, RolloutBatch
from rlightning.types.supports import Supports


def make_rollout(**kwargs: Any) -> TransformersRollout:
    """Verified at every sync."""
    return TransformersRollout(**{"max_new_tokens": 8, "verify_every": 1, "seed": 0} | kwargs)


def saves(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder / "checkpoints", save_top_k=-1, every_n_train_steps=10)


@pytest.fixture
def begins_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the prompts of a step reach the sampler at once.

    Otherwise the threads' turns decide which of them are in its first batch, and products of other shapes add in other
    orders.
    """
    start_groups = Collector._start_groups

    def start_held(collector: Collector, *arguments: Any) -> None:
        assert collector._runner is not None
        is_over = threading.Event()
        collector._runner.loop.loop.call_soon_threadsafe(is_over.wait, PATIENCE_SECONDS)
        try:
            start_groups(collector, *arguments)
        finally:
            is_over.set()

    monkeypatch.setattr(Collector, "_start_groups", start_held)


@pytest.mark.processes
@pytest.mark.usefixtures("begins_together")
def test_run_learns_and_resumes_bit_equal(engine_model: str, tmp_path: Path) -> None:
    path = write_sums(tmp_path)
    sets = {
        "greedy": ValidationSet(path, temperature=0.0, limit=8),
        "sampled": ValidationSet(path, samples_per_prompt=4, temperature=1.0, limit=8),
    }
    witness, module = Witness(), make_module(engine_model, lr=1e-2, samples_per_prompt=8)
    data = make_data(tmp_path, validation=sets)
    trainer = make_trainer(tmp_path, 12, make_rollout(), witness, saves(tmp_path), enable_checkpointing=True)
    trainer.fit(module, data)
    rewards = [step["reward/mean"] for step in witness.steps]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2
    assert [versions(batch) for batch in witness.batches] == [[number] for number in range(12)]
    sampled_from = [prompt.index for batch in witness.batches for prompt in batch.prompts[::8]]
    assert sampled_from == drawn(trainer, 48)
    # exact in float32, after updates too: the temperature is 1
    assert all(step["policy/rollout_gap_max"] < 1e-5 for step in witness.steps)
    assert witness.events[:6] == ["validation", "sync 0", "rollout", "update", "rollout", "sync 1"]

    greedy, sampled = trainer.validate(module, data, verbose=False)
    assert "val/greedy/pass@1" in greedy and "val/sampled/pass@4" in sampled
    predictions: Any = trainer.predict(module, data)
    pairs = [pair for batch in predictions for pair in batch]
    assert [prompt.index for prompt, _ in pairs] == list(range(16))
    assert {version for _, group in pairs for one in group for version in one.completion.weight_versions} == {12}

    again = Witness()
    resumed = make_module(engine_model, lr=1e-2, samples_per_prompt=8)
    trainer = make_trainer(tmp_path / "resumed", 12, make_rollout(), again)
    (checkpoint,) = (tmp_path / "checkpoints").glob("*step=10.ckpt")
    trainer.fit(resumed, make_data(tmp_path, validation=sets), ckpt_path=checkpoint)
    assert len(again.batches) == 2
    for one, other in zip(again.batches, witness.batches[10:], strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.rollout_logprobs, other.rollout_logprobs)
    for name, weight in copy_weights(resumed).items():
        assert torch.equal(weight, copy_weights(module)[name]), name


@pytest.mark.long
def test_truncated_run_has_gap_of_plain_one(
    engine_model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In micro-batches; the reference is truncated as the actor is, and until the first update it is the actor."""
    plan = {"max_tokens_per_microbatch": 64, "samples_per_prompt": 8}
    module = make_module(engine_model, lr=1e-3, kl_coef=0.1, entropy_coef=0.01, **plan)
    witness, data = Witness(), make_data(tmp_path)
    trainer = make_trainer(tmp_path, 3, make_rollout(top_p=0.8, min_p=0.02), witness)
    trainer.fit(module, data)
    assert len(witness.steps) == 3 and all(step["policy/rollout_gap_max"] < 1e-5 for step in witness.steps)
    for batch in witness.batches:
        assert batch.supports is not None
        assert (batch.supports == batch.token_ids[batch.sampled_index][:, None]).any(1).all()
    assert witness.steps[0]["policy/kl"] == pytest.approx(0, abs=1e-6) and witness.steps[1]["policy/kl"] > 1e-4
    assert "Sample.supports" not in caplog.text
    predictions: Any = trainer.predict(module, data)  # which train nothing
    samples = [one.completion for batch in predictions for _, group in batch for one in group]
    assert len(samples) == 16 * 8 and all(one.supports is None for one in samples)


async def truncate(client: openai.AsyncOpenAI, prompt: Any) -> float:
    """A turn as the run samples, and one or two by parameters of the agent's."""
    text = prompt.text
    for own in ({}, {"top_p": 0.6}, {"top_k": 3, "min_p": 0.01})[: 2 + prompt.index % 2]:
        answer = await client.completions.create(model="any", prompt=text, extra_body=own)
        text += answer.choices[0].text
    return float(len(text) % 3)


@pytest.mark.long
def test_agents_own_truncation_has_gap_of_plain_one(
    engine_model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also with plain turns beside, in micro-batches and with a reference; verification leaves them out."""
    plan = {"max_tokens_per_microbatch": 64, "samples_per_prompt": 4}
    module = make_module(engine_model, lr=1e-3, kl_coef=0.1, entropy_coef=0.01, rewards=[], **plan)
    agent = AgentProgram(truncate, endpoint={"allowed": ["top_p", "top_k", "min_p"]})
    rollout, witness = make_rollout(environment=agent, max_new_tokens=4, verify_trajectories=True), Witness()
    make_trainer(tmp_path, 3, rollout, witness).fit(module, make_data(tmp_path))
    assert len(witness.steps) == 3 and all(step["policy/rollout_gap_max"] < 1e-5 for step in witness.steps)
    assert witness.steps[0]["policy/kl"] == pytest.approx(0, abs=1e-6)
    for batch in witness.batches:
        assert {one.metrics["truncated_turns"] for one in batch.trajectories} == {1.0, 2.0}
        assert batch.supports is not None
        is_cut = (batch.supports >= 0).any(1)
        assert 0 < int(is_cut.sum()) < len(is_cut)
        assert ((batch.supports == batch.token_ids[batch.sampled_index][:, None]).any(1) == is_cut).all()
    assert rollout.max_support == MAX_SUPPORT and make_rollout().max_support == 0
    assert "Sample.supports" not in caplog.text and "tokens were drawn from more" not in caplog.text


def test_missing_supports_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rollout, batch = make_rollout(top_p=0.8), RolloutBatch.of_sequences([[1, 2, 3]])
    for _ in range(2):
        rollout.on_rollout_end(cast(Any, None), None, batch)
    assert caplog.text.count("The sampler returns no Sample.supports") == 1
    assert "are cut as the sampler's were" not in caplog.text
    make_rollout().on_rollout_end(cast(Any, None), None, batch)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("truncation", "num_lines"), [({"top_p": 0.9}, 1), ({"top_p": 0.9, "top_k": 500}, 0), ({"top_k": 3}, 0)]
)
def test_known_supports_without_top_k_are_described_once(
    truncation: dict[str, Any], num_lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rollout, batch = make_rollout(**truncation), RolloutBatch.of_sequences([[1, 2, 3]])
    for one in batch.trajectories[0].samples:
        one.supports = Supports(one.token_ids, [1] * len(one.token_ids))
    for _ in range(2):
        rollout.on_rollout_end(cast(Any, None), None, batch)
    assert len(caplog.records) == num_lines
    assert caplog.text.count("top_p and min_p leave the 128 likeliest tokens at most") == num_lines


def test_larger_supports_are_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    rollout, batch = make_rollout(top_k=500, top_p=0.5), RolloutBatch.of_sequences([[1, 2, 3], [4, 5]])
    batch.trajectories[0].samples[0].supports = Supports([2, 7], [2, 0])
    batch.trajectories[1].samples[0].supports = Supports([5], [1])
    for _ in range(2):
        rollout.on_rollout_end(cast(Any, None), None, batch)
    (record,) = caplog.records
    assert record.getMessage().startswith("1 of 3 tokens were drawn from more than 128 tokens each: what top_p")


def sample_on_ranks(folder: Path, model: str, num_ranks: int) -> list[list[Any]]:
    """Two steps that change nothing; the prompts of this rank, each with its tokens, and their log-probabilities."""
    witness = Witness()
    ranks: dict[str, Any] = {"devices": num_ranks, "strategy": FSDP()} if num_ranks > 1 else {}
    module = make_module(model, lr=1e-30)
    make_trainer(folder, 2, make_rollout(), witness, **ranks).fit(module, make_data(folder))
    return [found for batch in witness.batches for found in completions_of(batch)]


def completions_of(batch: RolloutBatch) -> list[list[Any]]:
    rows = zip(batch.prompts, batch.completions, strict=True)
    return [[prompt.index, list(one.token_ids), list(one.logprobs)] for prompt, one in rows]


@pytest.mark.processes
def test_two_sharded_ranks_sample_as_one(engine_model: str, tmp_path: Path) -> None:
    one = sample_on_ranks(tmp_path, engine_model, 1)
    first, second = finish(start_calls(sample_on_ranks, 2, tmp_path, engine_model, 2))
    assert len(first) == len(second) == len(one) / 2
    by_prompt: dict[int, list[Any]] = {}
    for index, *completion in one:
        by_prompt.setdefault(index, []).append(completion)
    for index, tokens, logprobs in first + second:
        expected, expected_logprobs = by_prompt[index].pop(0)
        assert tokens == expected
        # Products of other shapes add in other orders: a few units in the last place of float32, by the CPU's kernels.
        assert logprobs == pytest.approx(expected_logprobs, abs=5e-6)


CONFIG = """\
model: {class_path: GRPO, init_args: {model: model, rewards: [rlightning.rewards.exact_match], prompts_per_step: 4}}
rollout: {class_path: TransformersRollout, init_args: {max_new_tokens: 4}}
data: {train: sums.jsonl, max_prompt_tokens: 16, validation: {sums: {path: sums.jsonl, limit: 4}}}
trainer: {accelerator: cpu, max_steps: 2, default_root_dir: run}
"""

WITHOUT_VLLM = """\
import sys
for name in list(sys.modules):  # those of the process that this one may be a fork of
    if name.split(".")[0] in ("lightning", "rlightning", "vllm"):
        del sys.modules[name]
sys.modules["vllm"] = None  # as if it were not installed
from rlightning.__main__ import main
main(["fit", "--config", "run.yaml"])
"""


@pytest.mark.processes
def test_command_line_needs_no_vllm(project: Path) -> None:
    write_sums(project)
    (project / "run.yaml").write_text(CONFIG)
    (project / "without_vllm.py").write_text(WITHOUT_VLLM)
    done = run_python("without_vllm.py", folder=project)
    assert "transformers in the trainer's process, float32" in done.stdout + done.stderr
    rows = read_csv(next((project / "run").glob("metrics/version_*/metrics.csv")))
    assert steps_with(rows, "val/sums/pass@1") == [0] and steps_with(rows, "reward/mean") == [1, 2]


@pytest.mark.long
@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("max_sequences", "0"), r"^error: rollout\.max_sequences=0 must be at least 1\."),
        (
            ("gpu_memory_utilization", "0.5"),
            r"^error: rollout\.(init_args\.)?gpu_memory_utilization: TransformersRollout has no such",
        ),
        (("temperature", "0"), r"^error: rollout\.temperature=0 makes all samples of a prompt alike"),
        (("verify_every", "-1"), r"^error: rollout\.verify_every=-1 must be at least 0"),
    ],
)
def test_bad_argument_is_one_line(
    option: tuple[str, str], message: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sums(project)
    (project / "run.yaml").write_text(CONFIG)
    code, errors = fit_here(capsys, "--config", "run.yaml", f"--rollout.{option[0]}", option[1])
    assert code != 0
    lines = [line for line in errors.splitlines() if line.startswith("error")]
    assert len(lines) == 1
    assert re.match(message, lines[0]), lines[0]


class Hangs(Environment):
    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        await asyncio.Event().wait()
        return Outcome()


def test_run_whose_environment_hangs_ends_with_its_limit(engine_model: str, tmp_path: Path) -> None:
    module = make_module(engine_model, rewards=[], samples_per_prompt=4)
    line = (
        r"^All \d+ trajectories of the step timed out.* than 0\.1 s\. Raise rollout\.trajectory_timeout=0\.1, or a limi"
    )
    with pytest.raises(EnvironmentFailedError, match=line):
        make_trainer(tmp_path, 3, make_rollout(environment=Hangs(), trajectory_timeout=0.1)).fit(
            module, make_data(tmp_path)
        )


@pytest.mark.parametrize(
    ("module", "limits"),
    [
        (SimpleNamespace(), {"rollout.trajectory_timeout": 3600.0, "rollout.turn_timeout": 60.0}),
        (SimpleNamespace(count_timeouts=False), {"rollout.trajectory_timeout": 3600.0, "rollout.turn_timeout": 60.0}),
        (SimpleNamespace(count_timeouts=True), None),
    ],
)
def test_time_limits_are_none_if_timeouts_count(module: Any, limits: dict[str, float] | None) -> None:
    rollout = TransformersRollout(turn_timeout=60.0)
    rollout._policy = module
    assert rollout.time_limits == limits


def test_rollout_without_set_up_is_an_error() -> None:
    with pytest.raises(EngineError, match="There is no sampler"):
        make_rollout().generate([], 1, make_rollout().sampling)
    with pytest.raises(EngineError, match="There is no sampler"):
        _ = make_rollout().max_sequence_length
