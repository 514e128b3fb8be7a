"""AdamW's moments in fewer bytes: what a plan counts for them, and when it suggests them."""

from dataclasses import replace
from typing import Any

import pytest
from planned import COLOCATED, FSDP_ALONE, H200, MIDDLE, SMALL, colocated

from rlightning.memory_plan.advice import advise
from rlightning.memory_plan.devices import read_device_memory
from rlightning.memory_plan.phases import MemoryPlan
from rlightning.memory_plan.trainer import TrainerMemory
from rlightning.memory_plan.work import Parallelism
from rlightning.models.adapter import Adapter, resolve_adapter
from rlightning.optim import OptimizerStates, StoredMomentsAdamW

SIZE = 596_049_920
EMBEDDING = 151936 * 1024
NORMS = 28 * (2 * 1024 + 2 * 128) + 1024


@pytest.mark.parametrize(
    ("states", "num_bytes"),
    [("float32", 8 * SIZE), ("bfloat16", 4 * SIZE), ("8bit", 2 * (1 + 4 / 128) * (SIZE - NORMS) + 8 * NORMS)],
)
def test_bytes_of_the_moments(states: Any, num_bytes: float) -> None:
    plan = MemoryPlan(replace(COLOCATED, optimizer_states=states), H200)
    assert plan.trainer.optimizer_state() == pytest.approx(num_bytes, abs=1)
    usual = MemoryPlan(COLOCATED, H200)
    assert usual.generate().total - plan.generate().total == pytest.approx(8 * SIZE - num_bytes, abs=1)


def test_bytes_of_an_adapters_moments_depend_on_its_rank() -> None:
    """A row of B has as many values as the rank, which share a scale."""
    lora = resolve_adapter(Adapter(rank=7), "model", SMALL)
    plan = TrainerMemory(replace(COLOCATED, config=SMALL, adapter=lora, others=(), optimizer_states="8bit"))
    inputs = 28 * 7 * (3 * 1024 + 2048 + 2 * 1024 + 3072)  # of A: q, k, v; o; gate, up; down
    outputs = 28 * 7 * (2048 + 2 * 1024 + 1024 + 2 * 3072 + 1024)
    assert lora.num_parameters == inputs + outputs
    expected = 2 * ((1 + 4 / 128) * inputs + (1 + 4 / 7) * outputs)
    assert plan.optimizer_state() == pytest.approx(expected, abs=1)


def test_step_memory_counts_one_portion_of_moments() -> None:
    """The largest parameter's two, in float32: more than a GiB. A step of float32 needs none besides its own."""
    trainer = TrainerMemory(replace(FSDP_ALONE, optimizer_states="bfloat16"))
    assert trainer.moments_at_a_time() == 8 * EMBEDDING > StoredMomentsAdamW.bytes_at_a_time
    assert TrainerMemory(FSDP_ALONE).moments_at_a_time() == 0
    on_host = Parallelism(kind="fsdp", cpu_offload="optimizer")
    assert TrainerMemory(replace(FSDP_ALONE, parallelism=on_host)).moments_at_a_time() == 8 * EMBEDDING


@pytest.mark.long
def test_they_are_suggested_before_further_devices() -> None:
    """1.7 billion parameters take 25.6, 19.2 or 16.1 GiB, by 16, 12 or 10 bytes each, and an update some 8 GiB more."""
    cases: list[tuple[str, OptimizerStates]] = [("30GB", "bfloat16"), ("26GB", "8bit")]
    for device, suggested in cases:
        memory = read_device_memory(device)
        work = replace(colocated(MIDDLE), others=())
        [sentence, _] = advise(MemoryPlan(work, memory))
        assert f"set model.optimizer_states: {suggested}, with model.gradient_checkpointing: auto" in sentence
        batch = replace(work.batch, max_tokens_per_microbatch=work.longest)
        followed = replace(work, optimizer_states=suggested, gradient_checkpointing=True, batch=batch)
        assert MemoryPlan(followed, memory).update().total <= memory
