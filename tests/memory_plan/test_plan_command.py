"""``rlightning plan`` as a user types it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_project import environment
from planned import QWEN3
from programs import run_python
from tiny import change_config

from rlightning.cli.plan import count_devices, parse_work, plan
from rlightning.errors import ConfigError
from rlightning.memory_plan.devices import DEVICES, read_device_memory, split_device_memory
from rlightning.parallel.device import GIB


@pytest.mark.parametrize(
    ("text", "gib"), [("80GB", 74.506), ("79.1 GiB", 79.1), ("h100", 79.1), ("A100-40GB", 39.4), ("1024MiB", 1.0)]
)
def test_device_sizes_are_read_in_gib(text: str, gib: float) -> None:
    assert read_device_memory(text) / GIB == pytest.approx(gib, abs=1e-3)


@pytest.mark.parametrize("text", ["80", "0GB", "big", "-3GB", ""])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"give a size, such as 80GB or 79.1GiB, or one of A10, "):
        read_device_memory(text)


@pytest.mark.parametrize(
    ("devices", "count"), [(4, 4), ("4", 4), ("auto", 1), ([0, 1], 2), ("0,1", 2), ("3,", 1), ("[0, 2, 3]", 3)]
)
def test_devices_are_counted(devices: Any, count: int) -> None:
    assert count_devices(devices) == count


def test_all_devices_are_not_a_number() -> None:
    with pytest.raises(ConfigError, match=r"trainer.devices=-1 does not say how many there are. Use a number"):
        count_devices(-1)


def test_the_device_memory_is_taken_out_of_the_options() -> None:
    options = ["--config", "a.yaml", "--device-memory", "80GB", "--model.lr", "1"]
    assert split_device_memory(options) == ("80GB", ["--config", "a.yaml", "--model.lr", "1"])
    assert split_device_memory(["--device-memory=H100"]) == ("H100", [])
    with pytest.raises(ConfigError, match="its value is missing"):
        split_device_memory(["--device-memory"])


RUN = """\
model:
  class_path: rlightning.algorithms.GRPO
  init_args: {model: model, rewards: [rlightning.rewards.exact_match], prompts_per_step: 16, kl_coef: 0.0}
data: {train: rows.jsonl, max_prompt_tokens: 256}
rollout: {max_new_tokens: 1024}
trainer: {precision: bf16-mixed, max_steps: 3}
"""
NOT_COMPILED = ["--model.compile", "false"]
"""What a compiled layer keeps takes seconds to find out."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a configuration and a model's config.json: no weights, no tokenizer, no data."""
    (tmp_path / "model").mkdir()
    config = {**QWEN3, "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    yield tmp_path


@pytest.mark.long
def test_a_configuration_is_planned(project: Path) -> None:
    text = plan(["--config", "run.yaml", "--device-memory", "H200"])
    assert text.startswith("qwen3 of 596,049,920 parameters, bf16-mixed, 1 rank, 139.8 GiB each\n")
    assert (
        "micro-batches of 16,384 tokens, sequences of up to 1,280, gradient_checkpointing: "
        "auto (0 of 28 layers, logits kept)"
    ) in text
    assert "log-probs" not in text  # neither a reference nor a second optimizer step
    assert sorted(path.name for path in project.iterdir()) == ["model", "run.yaml"]


@pytest.mark.long
def test_options_are_those_of_fit(project: Path) -> None:
    (project / "fsdp.yaml").write_text(
        "trainer:\n  devices: 8\n  strategy:\n    class_path: rlightning.parallel.FSDP\n"
        "    init_args: {tensor_parallel_size: 2, shard_size: 2}\n"
        "  callbacks: [{class_path: OffloadDuringRollout, init_args: {parameters: true}}]\n"
    )
    options = ["--model.kl_coef", "0.1", "--trainer.callbacks+=EmptyCacheAfterUpdate", "--device-memory=80GB"]
    text = plan(["--config", "run.yaml", "--config", "fsdp.yaml", *options])
    assert "8 ranks, shards of 2, tensor-parallel over 2, 74.5 GiB each" in text
    rows = {line[:22].strip(): line[22:].split() for line in text.splitlines()}
    assert rows["GiB a rank"] == ["sync", "generate", "log-probs", "update"]
    assert rows["optimizer state"][:2] == ["-", "-"]
    assert rows["parameters"][1] == "-" != rows["parameters"][0]
    assert rows["allocator's slack"][0] == "0.60"
    assert rows["gradient_checkpointing"][0] == "reshard_after_forward"


@pytest.mark.slow
@pytest.mark.parametrize("nested", [[], ["--trainer.strategy.worker_strategy", "fsdp2"]])
def test_a_controllers_plan_is_that_of_its_workers(project: Path, nested: list[str]) -> None:
    options = ["--config", "run.yaml", *NOT_COMPILED, "--device-memory", "80GB", "--trainer.strategy"]
    workers = plan([*options, "fsdp2", "--trainer.devices", "4"])
    assert plan([*options, "ray", "--trainer.strategy.num_workers", "4", *nested]) == workers
    assert "4 ranks, shards of 4" in workers


@pytest.mark.long
def test_sft_has_no_engine(project: Path) -> None:
    options = ["--model", "SFT", "--model.model", "model", "--model.max_tokens_per_microbatch", "1280", *NOT_COMPILED]
    text = plan(["--config", "run.yaml", *options, "--device-memory", "80GB"])
    assert "engine" not in text and "sync" not in text


OWN_SAMPLER = """\
from lightning.pytorch import Callback

from rlightning.rollout import TrajectorySampler


class Recorded(Callback, TrajectorySampler):
    pass
"""


@pytest.mark.long
def test_a_run_without_sampler_is_refused_unless_a_callback_generates(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "run.yaml").write_text(RUN.replace("{max_new_tokens: 1024}", "null"))
    with pytest.raises(ConfigError, match=r"^GRPO has nothing to generate with\. Fill the section rollout, or add"):
        parse_work(["fit", "--config", "run.yaml"])
    monkeypatch.syspath_prepend(project)
    (project / "own_sampler.py").write_text(OWN_SAMPLER)
    own = ["--trainer.callbacks+=own_sampler.Recorded"]
    assert parse_work(["fit", "--config", "run.yaml", *own]).rollout is None


@pytest.mark.long
def test_unlimited_prompts_are_planned_by_models_positions(project: Path) -> None:
    change_config(project / "model", max_position_embeddings=1100)
    options = ["--config", "run.yaml", "--data.max_prompt_tokens", "null"]
    assert parse_work(["fit", *options]).longest == 1100  # 76 of a prompt, 1,024 of a completion
    with pytest.raises(ConfigError, match=r"max_new_tokens=1100 leaves a model of 1100 positions no room for a prompt"):
        parse_work(["fit", *options, "--rollout.max_new_tokens", "1100"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trainer.devices", "3"], r"prompts_per_step=16 cannot be split over 3 ranks"),
        (["--rollout.max_new_tokens", "20000"], r"do not fit max_tokens_per_microbatch=16384"),
        (["--trainer.precision", "16-mixed"], r"trainer.precision=16-mixed needs a scaled loss"),
        (["--trainer.precision", "64-true"], r"trainer.precision=64-true cannot be planned. Use bf16-mixed"),
        (["--trainer.strategy", "fsdp"], r"trainer.strategy=fsdp is Lightning's FSDP1"),
        (["--model.model", "./nowhere"], r"model='./nowhere' is not a folder"),
        (["--model.max_token_per_microbatch", "1"], r"Did you mean 'max_tokens_per_microbatch'"),
        (["--trainer.gradient_clip_val", "1"], r"trainer.gradient_clip_val=1 has no effect here"),
        (["--rollout.engine", "{tensor_parallel_size: 2}"], r"but there are 1 ranks. Set trainer.devices"),
    ],
)
def test_mistakes_are_those_of_fit(project: Path, options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(["--config", "run.yaml", "--device-memory", "80GB", *options])


def test_shard_size_not_dividing_ranks_is_refused(project: Path) -> None:
    (project / "fsdp.yaml").write_text(
        "trainer:\n  devices: 4\n  strategy:\n    class_path: rlightning.parallel.FSDP\n"
        "    init_args: {shard_size: 3}\n"
    )
    with pytest.raises(ConfigError, match="shard_size=3 does not divide 4 data-parallel ranks"):
        plan(["--config", "run.yaml", "--config", "fsdp.yaml", "--device-memory", "80GB"])


def test_the_size_of_the_device_is_asked_for(project: Path) -> None:
    with pytest.raises(ConfigError, match="Add --device-memory 80GB, say, or one of A10, "):
        plan(["--config", "run.yaml"])


def test_help_needs_nothing() -> None:
    assert all(name in plan(["--help"]) for name in ("--device-memory", "--config", *DEVICES))


@pytest.mark.processes
@pytest.mark.slow
def test_the_command_needs_no_vllm_and_no_gpu(project: Path) -> None:
    probe = (
        "import sys; from rlightning.__main__ import main\n"
        "code = main(['plan', '--config', 'run.yaml', '--device-memory', 'H200'])\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'vllm', 'ray'}), code)"
    )
    done = run_python("-c", probe, folder=project, environment=environment())
    assert done.stdout.splitlines()[-2:] == ["Everything fits.", "[] 0"]
    wrong = ("-m", "rlightning", "plan", "--config", "run.yaml", "--device-memory", "much")
    assert run_python(*wrong, folder=project, environment=environment(), exit_code=2).stderr.count("\n") == 1


@pytest.mark.long
def test_a_sampler_in_the_trainers_process_is_planned(project: Path) -> None:
    options = ["--config", "run.yaml", "--device-memory", "H200", "--rollout", "TransformersRollout"]
    text = plan([*options, "--rollout.max_new_tokens", "1024", "--rollout.max_sequences", "64"])
    rows = {line[:22].strip(): line[22:].split() for line in text.splitlines()}
    assert rows["GiB a rank"] == ["sync", "generate", "update"]
    assert rows["CUDA contexts"] == ["0.60"] * 3
    assert rows["weight bucket"] == ["0.29"] * 3  # of the embedding, 151,936 x 1,024 in bfloat16
    # 128 sequences at most; prompts of 256 tokens begin with 32 groups of 8, so 64 rows are there at once
    cache = 64 * 1280 * 2 * 28 * 8 * 128 * 2 / GIB
    assert f"KV cache of 64 sequences of 1,280 tokens {cache:.1f}." in text
    assert "gpu_memory_utilization" not in text
