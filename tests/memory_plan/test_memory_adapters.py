"""The memory of runs with an adapter: a frozen base in bfloat16, and masters, moments and gradients of the adapter."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planned import COLOCATED, FSDP_ALONE, LARGE, SMALL, TWO_PROMPTS, colocated
from tiny import save_model
from transformers import Qwen3Config

from rlightning.callbacks import VLLMRollout
from rlightning.cli.plan import parse_work, plan
from rlightning.memory_plan.devices import read_device_memory
from rlightning.memory_plan.phases import MemoryPlan
from rlightning.memory_plan.trainer import TrainerMemory
from rlightning.memory_plan.work import Parallelism, Work
from rlightning.models.adapter import Adapter, LoRA, resolve_adapter
from rlightning.models.counts import count_weights

RUN = """\
model:
  class_path: rlightning.algorithms.GRPO
  init_args: {model: model, rewards: [rlightning.rewards.exact_match], kl_coef: 0.1, adapter: {rank: 4}}
data: {train: rows.jsonl, max_prompt_tokens: 16}
rollout: {max_new_tokens: 16}
trainer: {precision: bf16-mixed, max_steps: 3}
"""


def adapter_of(config: object, **kwargs: int) -> LoRA:
    return resolve_adapter(Adapter(**kwargs), "model", config)  # type: ignore[arg-type]


def test_base_has_bfloat16_alone_adapter_the_rest() -> None:
    lora = adapter_of(SMALL)
    # a layer: q 1024 + 2048, k and v 1024 + 1024, o 2048 + 1024, gate and up 1024 + 3072, down 3072 + 1024
    assert lora.num_parameters == 28 * 32 * (3072 + 2 * 2048 + 3072 + 3 * 4096)
    memory = TrainerMemory(Work(config=SMALL, adapter=lora, batch=TWO_PROMPTS, longest=1280))
    assert memory.frozen_models() == 2 * count_weights(SMALL).total
    assert memory.parameters() == memory.gradients() == 4 * lora.num_parameters
    assert memory.optimizer_state() == 8 * lora.num_parameters


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("nf4", 4.25)])
def test_a_quantised_base_has_codes_in_its_blocks(kind: Any, bits: float) -> None:
    plain = adapter_of(SMALL)
    layers = {"model.layers.0.mlp.up_proj": (3072, 1024)}
    lora = replace(plain, quantize_base=kind, quantized=layers)
    whole, coded = (
        TrainerMemory(Work(config=SMALL, adapter=one, batch=TWO_PROMPTS, longest=1280)) for one in (plain, lora)
    )
    saved = whole.frozen_models() - coded.frozen_models()
    assert saved == 3072 * 1024 * (16 - bits) / 8 - (4 * 3072 if kind == "int8" else 0)
    assert coded.gathering_window() == 8 * 3072 * 1024  # that computes one, where nothing travels


def test_shards_of_two_ranks_hold_half() -> None:
    sharded = replace(FSDP_ALONE, parallelism=Parallelism(kind="fsdp", ranks=2, shard_size=2))
    one, two = (TrainerMemory(replace(work, adapter=adapter_of(SMALL))) for work in (FSDP_ALONE, sharded))
    assert two.frozen_models() == pytest.approx(one.frozen_models() / 2, rel=0.01)
    assert two.optimizer_state() == pytest.approx(one.optimizer_state() / 2, rel=0.01)
    assert two.gathered_parameters() == pytest.approx(one.gathered_parameters(), rel=0.01)


@pytest.mark.slow
def test_an_update_with_an_adapter_takes_less() -> None:
    work = replace(COLOCATED, others=(), config=LARGE)
    device = read_device_memory("H200")
    full, adapted = MemoryPlan(work, device), MemoryPlan(replace(work, adapter=adapter_of(LARGE)), device)
    with_all = replace(work, gradient_checkpointing=True)
    total = count_weights(LARGE).total
    saved = MemoryPlan(with_all, device).update().total - adapted.with_work(gradient_checkpointing=True).update().total
    assert saved > 13 * total  # of 16 bytes a parameter, 2 and the adapter's are left
    assert adapted.count_checkpointed_layers() <= full.count_checkpointed_layers()


def test_the_adapter_is_its_own_reference() -> None:
    work = replace(colocated(SMALL), others=(), adapter=adapter_of(SMALL))
    assert not work.is_scored
    assert replace(work, is_own_reference=True).is_scored


@pytest.mark.long
def of_class(name: str) -> Qwen3Config:
    """The configuration of a model that vLLM runs by its class of this name."""
    return Qwen3Config(**SMALL.to_dict() | {"architectures": [name]})


def test_an_engine_has_room_for_the_adapter() -> None:
    rollout = VLLMRollout()
    bare = Work(config=of_class("Qwen3ForCausalLM"), batch=TWO_PROMPTS, longest=1280)
    every = adapter_of(SMALL, rank=16)
    one = resolve_adapter(Adapter(rank=16, target_modules=["q_proj"]), "model", SMALL)
    engines = [rollout.plan_memory(replace(bare, adapter=lora), 256).engine for lora in (None, every, one)]
    assert engines[0] is not None and engines[1] is not None and engines[2] is not None
    # vLLM makes room in the layers that are adapted, in bfloat16
    rooms = [2 * every.num_parameters, 2 * one.num_parameters]
    assert [engine.weights - engines[0].weights for engine in engines[1:] if engine is not None] == rooms
    assert [engine.asleep - engines[0].asleep for engine in engines[1:] if engine is not None] == rooms
    # merged, it takes none: for want of support, or as the user says
    other = replace(bare, config=of_class("BloomForCausalLM"), adapter=every)
    assert rollout.plan_memory(other, 256).engine == rollout.plan_memory(replace(other, adapter=None), 256).engine
    merged = VLLMRollout(send_adapter=False).plan_memory(replace(bare, adapter=every), 256)
    assert merged.engine == engines[0]
    memory = MemoryPlan(COLOCATED, read_device_memory("H200"))
    assert memory.with_engine(asleep=1000).update().contexts - memory.update().contexts == 1000


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    """What the plan of a run with an adapter reads, in the run's folder."""
    save_model(tmp_path / "model", hidden_size=256, num_hidden_layers=4)
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return parse_work(["fit", "--config", "run.yaml"])


@pytest.mark.slow
def test_plan_describes_the_adapter(work: Work) -> None:
    assert work.adapter is not None
    text = plan(["--config", "run.yaml", "--device-memory", "80GB"])
    assert "frozen models" in text
    assert f"LoRA of rank 4, alpha 8, on 28 linear layers: {work.adapter.num_parameters:,} trained parameters, " in text


@pytest.mark.long
def test_plan_reads_the_adapter(work: Work) -> None:
    assert work.adapter is not None and work.adapter.rank == 4
    assert work.others == () and work.is_own_reference
    named = parse_work(["fit", "--config", "run.yaml", "--model.reference_model", "model"])
    assert named.others == () and named.is_own_reference
    apart = parse_work(["fit", "--config", "run.yaml", "--model.reference_model", "model", "--model.adapter", "null"])
    assert [role.name for role in apart.others] == ["reference"]


@pytest.mark.slow
def test_8b_adapter_fits_80_gb_unlike_full_training() -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}
    config = type(LARGE)(**LARGE.to_dict() | sizes)
    device = read_device_memory("80GB")
    work = replace(colocated(config, share=0.45), others=(), gradient_checkpointing="auto")
    full, adapted = MemoryPlan(work, device), MemoryPlan(replace(work, adapter=adapter_of(config)), device)
    assert full.update().total > device > adapted.update().total
    assert adapted.update().frozen_models == 2 * count_weights(config).total


@pytest.mark.slow
def test_norms_of_a_frozen_base_are_float32_under_autocast() -> None:
    """What they give is kept for the backward pass; FSDP computes them in bfloat16."""
    work = Work(config=SMALL, adapter=adapter_of(SMALL), batch=TWO_PROMPTS, longest=1280)
    alone, sharded = (
        TrainerMemory(replace(work, parallelism=parallelism)).activations(1280).kept
        for parallelism in (work.parallelism, FSDP_ALONE.parallelism)
    )
    # Before attention and feed-forward, [1280, 1024] each in 28 layers, of 4 bytes and not 2.
    assert alone - sharded > 28 * 2 * 1280 * 1024 * 2
