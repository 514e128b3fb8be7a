"""Runs with environments of several turns: through the real Trainer and the command line."""

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_project import fit_here
from engine_run import Origins, Witness, make_module, make_trainer, save_model
from metrics_table import undocumented
from programs import read_csv
from tiny import make_data, write_sums

from rlightning.callbacks import CompletionsTable, TransformersRollout, VLLMRollout
from rlightning.data import PromptDataModule
from rlightning.environments import AgentProgram, Environment, Policy, SelfCorrection, WorkerEnvironment
from rlightning.environments.runner import EnvironmentRunner
from rlightning.errors import ConfigError, EnvironmentFailedError
from rlightning.models import load_tokenizer
from rlightning.report.trajectories import read_trajectories
from rlightning.rollout.vllm.memory import CPU_BLOCK_TOKENS
from rlightning.types import Outcome, Prompt, RolloutBatch, Sample, Trajectory


class FailsSometimes(Environment):
    """Rewards ones; a prompt that begins with 3 is never attempted."""

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        if prompt.text.startswith("3"):
            raise ConnectionError("no sandbox")
        sample = await policy.chat()
        return Outcome(reward=sample.text.count("1") / 8)


class Trained(Witness):
    """Keeps the prompts that each update trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.indices: list[list[int]] = []

    def on_update_start(self, trainer: Any, module: Any, batch: Any) -> None:
        self.indices.append([prompt.index for prompt in batch.prompts])


def make_rollout(environment: Any, **arguments: Any) -> TransformersRollout:
    return TransformersRollout(environment=environment, **{"max_new_tokens": 8, "seed": 0, **arguments})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.long
def test_two_turns_are_trained_as_sampled(folder: str, tmp_path: Path) -> None:
    witness = Witness()
    verdict = "+"
    rollout = make_rollout(SelfCorrection(verdict=verdict), verify_trajectories=True)
    make_trainer(tmp_path, 2, rollout, witness).fit(make_module(folder), make_data(tmp_path))
    for batch, metrics in zip(witness.batches, witness.steps, strict=True):
        assert metrics["policy/rollout_gap_max"] < 1e-5 and metrics["environment/verify_gap"] < 1e-5
        for one in batch.trajectories:
            first = one.samples[0]
            assert len(one.samples) == (1 if first.text.strip() == one.prompt.columns["answer"] else 2)
            assert [turn.message["content"] for turn in one.turns[1:2]] == [verdict] * (len(one.samples) - 1)
        assert len(batch.completion_lengths) == 8
        num_turns = [len(one.samples) for one in batch.trajectories]
        assert metrics["environment/turns"] == pytest.approx(sum(num_turns) / 8)
        lengths = batch.completion_lengths.sum().item()
        assert metrics["environment/tokens_per_turn"] == pytest.approx(lengths / sum(num_turns))
        assert 0 < metrics["environment/engine_share"] <= 1
        seconds = [metrics[f"environment/time_in_{where}"] for where in ("engine", "environment")]
        assert sum(seconds) == pytest.approx(sum(one.timings["trajectory"] for one in batch.trajectories) / 8)
        assert "environment/prefix_cache_hits" not in metrics and not undocumented(metrics)


@pytest.mark.long
def test_single_turns_have_no_metrics_of_environments(folder: str, tmp_path: Path) -> None:
    witness = Witness()
    make_trainer(tmp_path, 1, make_rollout(None), witness).fit(make_module(folder), make_data(tmp_path))
    assert not [name for name in witness.steps[0] if name.startswith("environment/")]
    assert all(set(one.timings) == {"trajectory"} for one in witness.batches[0].trajectories)


@pytest.mark.processes
def test_engine_trains_two_turns_as_sampled(folder: str, tmp_path: Path) -> None:
    """Of prompts that are longer than a block of the KV cache, which later turns find there."""
    witness, origins, verdict = Witness(), Origins(), "+"
    rollout = VLLMRollout(
        environment=SelfCorrection(verdict=verdict),
        verify_trajectories=True,
        placement="standalone",
        max_staleness=1,
        cache_after_sync="recompute",  # or what spans a sync has keys and values of the weights before
        max_new_tokens=8,
        seed=0,
        engine={"kv_cache_memory_bytes": 1 << 28},
    )
    rows = [{"prompt": f"{index % 10}+" * (CPU_BLOCK_TOKENS // 2) + "1=", "answer": "1"} for index in range(16)]
    data = PromptDataModule(rows, max_prompt_tokens=CPU_BLOCK_TOKENS + 2)
    make_trainer(tmp_path, 3, rollout, witness, origins).fit(make_module(folder), data)
    assert len(origins.gaps) >= 3 and max(origins.gaps) < 1e-4  # of each token, under the weights that sampled it
    num_turns, hits = set(), []
    for version, (batch, metrics) in enumerate(zip(witness.batches, witness.steps, strict=True)):
        assert set(batch.weight_versions[batch.is_sampled].tolist()) <= {version - 1, version}
        for one in batch.trajectories:
            num_turns.add(len(one.samples))
            assert [turn.message["content"] for turn in one.turns[1:2]] == [verdict] * (len(one.samples) - 1)
        samples = [sample for one in batch.trajectories for sample in one.samples]
        assert batch.num_sequences == batch.num_trajectories == 8
        assert int(batch.is_sampled.sum()) == sum(len(sample.token_ids) for sample in samples)
        hits.append(metrics["environment/prefix_cache_hits"])
    assert 2 in num_turns
    assert 0.1 < max(hits) < 1  # none where all later turns come after new weights
    assert witness.steps[0]["policy/rollout_gap_max"] < 1e-4
    assert witness.steps[0]["environment/verify_gap"] < 1e-4  # later ones hold tokens of former weights
    assert rollout.last["async/running"] + rollout.last["async/finished"] == 4


@pytest.mark.long
def test_failed_trajectories_are_not_trained(folder: str, tmp_path: Path) -> None:
    witness = Trained()
    module = make_module(folder, rewards=[], samples_per_prompt=4)
    table = CompletionsTable(every_n_steps=1, num_console=0)
    rollout = make_rollout(FailsSometimes(), max_failed_share=1.0)
    make_trainer(tmp_path, 4, rollout, witness, table).fit(module, make_data(tmp_path))
    sampled = [prompt.index for batch in witness.batches for prompt in batch.prompts]
    assert sorted(set(sampled)) == list(range(16))
    assert max(index for indices in witness.indices for index in indices) < 12  # those of the fourth row begin with 3
    assert witness.steps[-1]["trajectory/not_sampled"] == 16
    records = read_trajectories(tmp_path / "completions")
    lost = [one.trajectory for one in records if one.reward is None]
    assert {one.prompt.index for one in lost} == {12, 13, 14, 15} and len(lost) == 16
    assert {(one.status, one.error) for one in lost} == {("failed", "ConnectionError: no sandbox")}
    assert len(records) == 4 * 16


@pytest.mark.long
def test_too_many_failures_raise_the_first(folder: str, tmp_path: Path) -> None:
    """All of the fourth step fail; the group that is one too many ends the run. A prediction goes on."""
    module = make_module(folder, rewards=[], samples_per_prompt=4)
    witness = Witness()
    trainer = make_trainer(tmp_path, 4, make_rollout(FailsSometimes()), witness)
    line = (
        r"^At least 12 of the 16 trajectories of the step failed, more than rollout\.max_failed_share=0\.5 allows\. "
        r"The first failure: ConnectionError: no sandbox\nTraceback(?s:.*)raise ConnectionError"
    )
    with pytest.raises(EnvironmentFailedError, match=line):
        trainer.fit(module, make_data(tmp_path))
    assert len(witness.steps) == 3
    prompts = PromptDataModule([{"prompt": "3+1=", "answer": "4"}], predict=write_sums(tmp_path), max_prompt_tokens=16)
    tiny_run = make_trainer(tmp_path / "predict", 1, make_rollout(FailsSometimes()))
    predicted = tiny_run.predict(make_module(folder, rewards=[]), prompts)
    assert "failed" in {one.status for batch in predicted or [] for _, group in batch for one in group}


def test_missing_reward_without_reward_functions_is_nan(folder: str) -> None:
    sample = Sample([1], [0.0], [0], "a", "stop")
    given = [Trajectory.single_turn(Prompt(0, "", [1], {}), sample) for _ in range(3)]
    given[0].reward, given[1].status = 0.5, "timeout"
    batch = RolloutBatch.pack([given])
    rewards = make_module(folder, rewards=[]).compute_rewards(batch).tolist()
    assert rewards[:2] == [0.5, 0.0] and math.isnan(rewards[2])


class FailsOnce(Environment):
    """Leaves the groups of the first prompts one and two trajectories of three, and the others whole."""

    def __init__(self) -> None:
        self.num_calls = [0, 0]

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        sample = await policy.chat()
        if prompt.index < 2:
            self.num_calls[prompt.index] += 1
            if self.num_calls[prompt.index] <= 2 - prompt.index:
                raise ConnectionError("no sandbox")
        return Outcome(reward=sample.text.count("1") / 8)


@pytest.mark.long
def test_groups_train_on_two_that_are_left(folder: str, tmp_path: Path) -> None:
    trained, module = Trained(), make_module(folder, rewards=[], samples_per_prompt=3)
    make_trainer(tmp_path, 1, make_rollout(FailsOnce()), trained).fit(module, make_data(tmp_path))
    assert trained.indices == [[1, 1, 2, 2, 2, 3, 3, 3]]


@pytest.mark.long
def test_rows_name_their_environment(folder: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": "1", "environment": ("one", "two")[i % 2]} for i in range(8)]
    environments = {"one": FailsSometimes(), "two": SelfCorrection(verdict="+")}
    witness = Witness()
    module = make_module(folder)
    data = PromptDataModule(rows, max_prompt_tokens=16, shuffle=False)
    make_trainer(tmp_path, 1, make_rollout(environments), witness).fit(module, data)
    (batch,) = witness.batches
    for one in batch.trajectories:
        assert ("first_right" in one.metrics) == (one.prompt.index % 2 == 1)
    del environments["two"]
    with pytest.raises(ConfigError, match=r"^Prompt 1 has environment='two', which is none of the run's: one\. Name"):
        make_trainer(tmp_path / "2", 1, make_rollout(environments)).fit(make_module(folder), data)


SECTION = 'environment: {class_path: SelfCorrection, init_args: {verdict: "+"}}'
IN_WORKERS = """\
environment:
  class_path: rlightning.environments.WorkerEnvironment
  init_args: {environment: rlightning.environments.SelfCorrection, arguments: {verdict: "+"}, num_workers: 2}
"""
CONFIG = f"""\
model: {{class_path: GRPO, init_args: {{model: model, rewards: [rlightning.rewards.exact_match], prompts_per_step: 4}}}}
{SECTION}
rollout: {{class_path: TransformersRollout, init_args: {{max_new_tokens: 4}}}}
data: {{train: sums.jsonl, max_prompt_tokens: 16}}
trainer: {{accelerator: cpu, max_steps: 1, default_root_dir: run}}
"""


@pytest.mark.processes
def test_environment_stands_beside_rollout(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sums(project)
    (project / "run.yaml").write_text(CONFIG)
    code, errors = fit_here(capsys, "--config", "run.yaml")
    assert code == 0, errors
    (project / "workers.yaml").write_text(CONFIG.replace(SECTION, IN_WORKERS))
    code, errors = fit_here(capsys, "--config", "workers.yaml", "--trainer.default_root_dir", "workers")
    assert code == 0, errors
    here, there = (read_csv(project / run / "metrics" / "version_0" / "metrics.csv")[0] for run in ("run", "workers"))
    assert here["completion/length"] == there["completion/length"]
    elsewhere = ("--config", "run.yaml", "--trainer.default_root_dir", "elsewhere")
    code, errors = fit_here(capsys, *elsewhere, "--rollout", "null")
    assert code == 2 and "error: environment: this run has no rollout, which environments need." in errors
    code, errors = fit_here(capsys, *elsewhere, "--environment.verdikt", "no")
    assert code == 2 and "environment.verdikt: there is no such key. Did you mean 'verdict'?" in errors


AGENT = """\
async def agent(client, prompt, bonus=0.0):
    messages = [{"role": "user", "content": prompt.columns["prompt"]}]
    first = await client.chat.completions.create(model="any", messages=messages)
    messages += [first.choices[0].message, {"role": "user", "content": "+"}]
    last = await client.chat.completions.create(model="any", messages=messages)
    if prompt.index % 4 == 1:
        await client.chat.completions.create(model="any", messages=messages[:1])
    return (last.choices[0].message.content or "").count("1") + bonus
"""
AGENT_SECTION = """\
environment:
  class_path: AgentProgram
  init_args: {agent: own_agent.agent, arguments: {bonus: 0.5}, endpoint: {ignored: [top_p]}}
"""


@pytest.mark.processes
@pytest.mark.parametrize("engine", [pytest.param("transformers", marks=pytest.mark.slow), "vllm"])
def test_an_agent_program_is_trained_as_sampled(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    (tmp_path / "own_agent.py").write_text(AGENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    environment, witness = AgentProgram("own_agent.agent"), Witness()
    if engine == "vllm":
        engine_arguments = {"kv_cache_memory_bytes": 1 << 28}
        rollout: Any = VLLMRollout(
            environment=environment, verify_trajectories=True, max_new_tokens=8, seed=0, engine=engine_arguments
        )
    else:
        rollout = make_rollout(environment, verify_trajectories=True)
    make_trainer(tmp_path, 2, rollout, witness).fit(make_module(folder, rewards=[]), make_data(tmp_path))
    for batch, metrics in zip(witness.batches, witness.steps, strict=True):
        for gap in ("policy/rollout_gap_max", "environment/verify_gap"):
            assert metrics[gap] < (1e-4 if engine == "vllm" else 1e-5)
        assert metrics["environment/branches/sampled_again"] == 0.25
        assert batch.num_trajectories == 8 and batch.reasons.count("start") == 8
        for one in batch.trajectories:
            assert one.metrics["branches"] == (2 if one.prompt.index % 4 == 1 else 1)
            assert one.metrics["turns"] == len(one.samples) == one.metrics["branches"] + 1
        assert int(batch.is_sampled.sum()) == sum(one.num_sampled for one in batch.trajectories)


@pytest.mark.processes
def test_an_agent_program_is_a_section(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sums(project)
    (project / "own_agent.py").write_text(AGENT)
    (project / "agent.yaml").write_text(CONFIG.replace(SECTION, AGENT_SECTION).replace("16}", "16, shuffle: false}"))
    code, errors = fit_here(capsys, "--config", "agent.yaml")
    assert code == 0, errors
    (row,) = read_csv(project / "run" / "metrics" / "version_0" / "metrics.csv")
    assert float(row["environment/branches/sampled_again"]) == 0.25
    workers = {"environment": "rlightning.environments.AgentProgram", "arguments": {"agent": "own_agent.agent"}}
    environment = WorkerEnvironment(**workers)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"AgentProgram serves the policy from the trainer's process"):
        asyncio.run(environment.check())


class Misspelt(Environment):
    async def runs(self, prompt: Prompt, policy: Policy) -> Outcome:
        return Outcome(reward=1.0)


def test_environment_without_run_is_refused(model_folder: str) -> None:
    runner = EnvironmentRunner(SimpleNamespace(), load_tokenizer(model_folder), Misspelt(), max_length=64)
    try:
        with pytest.raises(ConfigError, match=r"^environment: Misspelt defines neither run\(prompt, policy\) nor "):
            runner.check()
    finally:
        runner.close()
