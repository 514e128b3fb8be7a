"""What a run finds out about its own memory, against the plan of its configuration."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planned import COLOCATED, H200
from tiny import bare_trainer, make_data, share_of_ones, write_sums

from rlightning.algorithms import GRPO
from rlightning.callbacks import MakeRoomForEngine, OffloadDuringRollout, TransformersRollout, VLLMRollout
from rlightning.cli.plan import parse_work, read_roles
from rlightning.errors import ConfigError
from rlightning.memory_plan.decisions import (
    check_engine,
    decide_checkpointing,
    decide_gathering,
    decide_kept_logits,
    plan_run,
    read_run,
)
from rlightning.memory_plan.phases import MemoryPlan, PhaseBytes
from rlightning.memory_plan.work import RoleMemory
from rlightning.models.counts import cached_numbers, count_weights
from rlightning.module.roles import ModelRole
from rlightning.module.start_block import describe_memory
from rlightning.optim.optimizer import AdamWSettings
from rlightning.parallel import FSDP

MODULE = {"prompts_per_step": 16, "samples_per_prompt": 4, "max_tokens_per_microbatch": 4096, "kl_coef": 0.1}
ROLLOUT = {"max_new_tokens": 40, "gpu_memory_utilization": 0.3, "sleep": False, "engine": {"max_num_seqs": 24}}


@pytest.fixture
def run(model_folder: str, tmp_path: Path) -> tuple[Any, Any]:
    """A trainer and a module that are about to load their models."""
    module = GRPO(model_folder, rewards=[share_of_ones], compile=False, **MODULE)  # type: ignore[arg-type]
    trainer = bare_trainer(tmp_path, 3, VLLMRollout(**ROLLOUT), precision="bf16-mixed")  # type: ignore[arg-type]
    trainer.datamodule = make_data(tmp_path)  # type: ignore[attr-defined]  # as fit() does
    return trainer, module


def test_a_run_plans_what_its_configuration_says(run: tuple[Any, Any], model_folder: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        f"model: {{class_path: GRPO, init_args: {{model: {model_folder}, "
        "rewards: [rlightning.rewards.exact_match], "
        + ", ".join(f"{name}: {value}" for name, value in MODULE.items())
        + f"}}}}\ndata: {{train: {write_sums(tmp_path)}, max_prompt_tokens: 16}}\n"
        "rollout: {max_new_tokens: 40, gpu_memory_utilization: 0.3, sleep: false, engine: {max_num_seqs: 24}}\n"
        "trainer: {precision: bf16-mixed, max_steps: 3, accelerator: cpu, devices: 1}\n"
    )
    expected, got = parse_work(["fit", "--config", str(tmp_path / "run.yaml")]), read_run(*run)
    assert expected.is_compiled and not got.is_compiled  # a plan is for CUDA
    (reference,), (planned,) = got.others, expected.others
    assert reference.config is not None and planned.config is not None
    assert got.config.to_dict() == expected.config.to_dict() == reference.config.to_dict() == planned.config.to_dict()
    assert reference == replace(planned, config=reference.config)
    same = {"config": expected.config, "others": expected.others, "is_compiled": True}
    assert replace(got, **same) == expected  # type: ignore[arg-type]


def test_parts_that_callbacks_move_each_step_are_planned_away(run: tuple[Any, Any]) -> None:
    trainer, module = run
    trainer.callbacks += [MakeRoomForEngine(), OffloadDuringRollout(parameters=True)]
    work = read_run(trainer, module)
    assert work.moved_each_step == {"optimizer_state", "parameters", "frozen_models"} <= set(PhaseBytes.__slots__)
    trainer.callbacks.pop()  # the other moves what an engine lacks, which the plan finds out by itself
    assert read_run(trainer, module).moved_each_step == set()


@pytest.mark.slow
def test_as_few_layers_are_checkpointed_as_leave_room(run: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    bare = MemoryPlan(replace(read_run(*run), rollout=None), 1 << 40)
    run[0].callbacks = []
    none, every = (bare.with_work(gradient_checkpointing=way).update().total for way in (False, True))
    half = (none + every) // 2
    counts = []
    for needed in (none, half, 0.9 * every):  # the last fits, though it leaves no tenth free
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda _, size=needed: SimpleNamespace(total_memory=int(size / 0.9) + 9),
        )
        count, reason = decide_checkpointing(*run)
        counts.append(count)
        assert "an update of 4,096 tokens a micro-batch is planned to take" in reason
        assert (", with these" in reason) == (count > 0)
    assert counts == [0, 1, 2]  # of two layers


def test_fsdp_keeps_what_the_plan_has_room_for(
    run: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, module = run
    needed = []
    caplog.set_level("INFO", logger="rlightning")

    def decide(size: int, device: str = "cuda", **settings: Any) -> tuple[FSDP, str | None]:
        strategy = FSDP(**settings)
        trainer = bare_trainer(tmp_path, 3, strategy=strategy, devices=2, precision="bf16-mixed")
        monkeypatch.setattr(FSDP, "root_device", torch.device(device))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=size))
        caplog.clear()
        decide_gathering(trainer, module)
        line = next((text for text in caplog.messages if text.startswith("FSDP keeps")), None)
        needed.append(plan_run(trainer, module).update().total)
        return strategy, line

    strategy, line = decide(80 << 30)
    assert (strategy.reshard_after_forward, strategy.reduce_every_microbatch) == (False, False)
    assert line is not None and line.startswith("FSDP keeps weights gathered and gradients whole until the optimizer")
    strategy, line = decide(int(needed[0] / 0.8) - 9)  # a fifth of the device would not stay free
    assert (strategy.reshard_after_forward, strategy.reduce_every_microbatch, line) == (True, True, None)
    assert needed[1] < needed[0]
    strategy, line = decide(80 << 30, reshard_after_forward=True)
    assert (strategy.reshard_after_forward, strategy.reduce_every_microbatch) == (True, False)
    assert line is not None and line.startswith("FSDP keeps gradients whole until the optimizer step: ")
    strategy, line = decide(80 << 30, device="cpu")
    assert (strategy.reshard_after_forward, strategy.reduce_every_microbatch, line) == (True, True, None)


@pytest.mark.slow
def test_an_update_without_room_is_refused_with_its_sum(run: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(total_memory=1 << 29)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    with pytest.raises(ConfigError, match=r"The update needs 2\.\d GiB of 0\.5 GiB: .* contexts 2\.1 .* = 2\.\d\."):
        decide_checkpointing(*run)


@pytest.mark.long
def test_an_engine_without_room_is_refused_with_its_sum(run: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, module = run
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1 << 31))
    check_engine(trainer, module)  # not on the CPU
    monkeypatch.setattr(type(trainer.strategy), "root_device", torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"rollout.gpu_memory_utilization=.* but the trainer leaves .* CUDA contexts"):
        check_engine(trainer, module)


def test_a_sampler_without_room_is_refused_with_its_sum(
    run: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, module = run
    rollout = TransformersRollout(max_new_tokens=40)
    trainer = bare_trainer(tmp_path, 3, rollout, precision="bf16-mixed")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1 << 29))
    monkeypatch.setattr(type(trainer.strategy), "root_device", torch.device("cuda"))
    with pytest.raises(
        ConfigError, match=r"Sampling needs 1\.\d GiB of 0\.5 GiB: lower .* GiB in generate: .* = 1\.\d\."
    ):
        rollout.setup(trainer, module, "fit")
    assert not rollout.is_set_up


def test_a_limit_of_pytorchs_makes_the_device_smaller(run: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, module = run
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 << 30))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 0.5)
    plan, share = plan_run(trainer, module), MemoryPlan(read_run(trainer, module), 80 << 30).engine.utilization
    assert plan.device_memory == 40 << 30
    assert plan.engine.utilization == 2 * share  # it is told in parts of the whole device


@pytest.mark.long
def test_run_start_logs_memory_of_each_phase(run: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, module = run
    assert describe_memory(trainer, module) == ""  # a CPU has no plan
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 << 30))
    monkeypatch.setattr(type(trainer.strategy), "root_device", torch.device("cuda"))
    plan = MemoryPlan(read_run(trainer, module), 80 << 30)
    sync, generate, score, update = (parts.total / 2**30 for parts in plan.phases().values())
    assert describe_memory(trainer, module) == (
        f"sync {sync:.1f}, generate {generate:.1f}, log-probs {score:.1f}, update {update:.1f} of 80.0 GiB "
        "on each rank (planned); gradient checkpointing auto (0 of 2 layers, logits kept)"
    )
    trainer.callbacks.append(OffloadDuringRollout())
    assert describe_memory(trainer, module).endswith(
        "; while the engine is awake, the host's memory holds optimizer state (0.0 GiB)"
    )


@pytest.mark.long
def test_logits_are_kept_where_a_tenth_stays_free() -> None:
    planned = MemoryPlan(replace(COLOCATED, gradient_checkpointing="auto"), H200)
    assert planned.keeps_logits
    chunk, kept = (planned.trainer.logits(16384, has_gradient=True, is_kept=is_kept) for is_kept in (False, True))
    assert kept - chunk == 2 * 151936 * (16384 - 4096)
    assert planned.update().logits == kept and planned.update().total > planned.update_of(16384, 0).total
    limit = int(planned.update().total / 0.9)
    assert MemoryPlan(planned.work, limit + (1 << 20)).keeps_logits
    small = MemoryPlan(planned.work, limit - (1 << 20))
    assert not small.keeps_logits and small.count_checkpointed_layers() == 0
    assert small.update() == small.update_of(small.tokens, 0)
    assert not planned.with_work(gradient_checkpointing=True).keeps_logits
    critic = RoleMemory(name="critic", config=COLOCATED.config, optimizer_states="float32")
    assert not planned.with_work(others=(critic,)).keeps_logits  # its backward pass may come before they are freed


@pytest.mark.long
def test_run_says_that_logits_are_kept(
    run: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="rlightning")
    for size, is_kept in ((80 << 30, True), (1 << 31, False)):
        device = SimpleNamespace(total_memory=size)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, device=device: device)
        caplog.clear()
        assert decide_kept_logits(*run) == is_kept
        said = [line for line in caplog.messages if line.startswith("Logits are kept until the backward pass")]
        assert len(said) == is_kept and all("of 80.0 GiB with them" in line for line in said)


def test_what_cannot_be_planned_is_checkpointed(run: tuple[Any, Any]) -> None:
    trainer, module = run
    module.model_config.model_type, module.plan = "unheard_of", None
    assert decide_checkpointing(trainer, module) == (
        2,
        "what they take is not known (GRPO has no plan of a step's batch)",
    )


class CriticGRPO(GRPO):
    """A critic of the actor's shape, which is counted, and one of its own, which is not."""

    def configure_roles(self) -> dict[str, ModelRole]:
        critic = ModelRole(
            load=self.load_actor,
            optimizer=AdamWSettings(optimizer_states="8bit"),
            config=self.model_config,
            gradient_checkpointing="auto",
        )
        return super().configure_roles() | {"critic": critic, "judge": ModelRole(load=self.load_actor)}


def test_a_run_plans_the_roles_of_its_module(model_folder: str, tmp_path: Path) -> None:
    module = CriticGRPO(model_folder, rewards=[share_of_ones], **MODULE)  # type: ignore[arg-type]
    rollout = TransformersRollout(max_new_tokens=40, max_sequences=24)
    work = read_run(bare_trainer(tmp_path, 3, rollout, precision="bf16-mixed"), module)
    config = module.model_config
    assert work.others == (
        RoleMemory(name="reference", config=config),
        RoleMemory(name="critic", config=config, optimizer_states="8bit", gradient_checkpointing="auto"),
        RoleMemory(name="judge", config=None),
    )
    engine = work.engine
    assert engine is not None and engine.num_engines == 0 and engine.max_sequences == 24
    numbers = cached_numbers(config) * config.get_text_config().num_hidden_layers
    length = -(-work.longest // 64) * 64
    # 8 prompts of 1,024 tokens begin with 4 samples each: all 24 sequences at once
    assert engine.kv_cache_bytes == 24 * length * 2 * numbers
    assert engine.weights == 2 * count_weights(config).total
    assert engine.weights <= MemoryPlan(work, 1 << 40).sync().weight_bucket < 1.1 * engine.weights  # each is aligned


def test_configurations_plan_names_roles_it_cannot_count() -> None:
    arguments = {"model": "m", "kl_coef": 0.0}
    assert list(read_roles(GRPO, arguments)) == []
    (role,) = read_roles(CriticGRPO, arguments)
    assert (role.name, role.config) == ("what CriticGRPO.configure_roles() adds", None)
