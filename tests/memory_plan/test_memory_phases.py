"""Plans against what was measured on GPUs, and what follows from them."""

from dataclasses import replace
from typing import Any

import pytest
from planned import COLOCATED, FSDP_ALONE, H200, LARGE, MIDDLE, SMALL, TWO_PROMPTS, allocated, plan_of, small

from rlightning.memory_plan.advice import advise
from rlightning.memory_plan.devices import GIB, read_device_memory
from rlightning.memory_plan.phases import ENGINE_CONTEXT_BYTES, FRESH_FRAGMENTATION, MemoryPlan, total, transient
from rlightning.memory_plan.report import format_plan
from rlightning.memory_plan.trainer_memory import TrainerMemory
from rlightning.memory_plan.work import Engine, Parallelism, Work

REFERENCE = {name: 2 * number / GIB for name, number in (("0.6B", 596_049_920), ("1.7B", 1_720_574_976))}
"""GiB that a reference model takes less than when this was measured: it was held in float32."""
MEASURED = [
    # docs/measurements.md, "Memory of a GPU that actor and engine share": allocated after the update.
    ("0.6B, between updates", 10.1 - REFERENCE["0.6B"], lambda: allocated(plan_of(COLOCATED, H200).generate())),
    # The same table, reserved by steps of which each began with an empty cache, the largest: tensors and slack.
    (
        "0.6B, without checkpointing",
        56.5 - REFERENCE["0.6B"],
        lambda: (
            allocated(plan_of(COLOCATED, H200).update()) + plan_of(COLOCATED, H200).update()["allocator's slack"] / GIB
        ),
    ),
    # Reserved after steps 1 and 2 of the run without the callback, whose micro-batches were not quite full.
    ("0.6B, first step", 48.0 - REFERENCE["0.6B"], lambda: allocated(plan_of(COLOCATED, H200).update())),
    ("0.6B, second step", 52.2 - REFERENCE["0.6B"], lambda: allocated(plan_of(COLOCATED, H200).update())),
    # The same, of the whole device: "free while generating", with the callback.
    ("0.6B, free while generating", 85.5 + REFERENCE["0.6B"], lambda: (H200 - total(filling().generate())) / GIB),
    # docs/measurements.md, "Offloading during rollouts", 1.7B: allocated while generating.
    ("1.7B, nothing offloaded", 27.7 - REFERENCE["1.7B"], lambda: allocated(offloading().generate())),
    (
        "1.7B, optimizer offloaded",
        14.9 - REFERENCE["1.7B"],
        lambda: allocated(offloading(offloads_optimizer=True).generate()),
    ),
    (
        "1.7B, parameters offloaded",
        2.06,
        lambda: allocated(offloading(offloads_optimizer=True, offloads_parameters=True).generate()),
    ),
    (
        "1.7B, free while generating",
        64.1 + REFERENCE["1.7B"],
        lambda: (H200 - total(filling(config=MIDDLE).generate())) / GIB,
    ),
    # One H200, FSDP2 with bfloat16 compute, no engine, 16,384 packed tokens: a study that came before this package,
    # with the same attention and the same log-probabilities.
    ("0.6B, FSDP", 45.0, lambda: allocated(plan_of(FSDP_ALONE, H200).update())),
    (
        "0.6B, FSDP, checkpointing",
        13.0,
        lambda: allocated(plan_of(replace(FSDP_ALONE, gradient_checkpointing=True), H200).update()),
    ),
]


def filling(**settings: Any) -> MemoryPlan:
    """An engine that fills its share with its KV cache, as all did when this was measured."""
    engine = Engine(utilization=0.3, max_sequences=1024)
    return plan_of(replace(COLOCATED, engine=engine, reference=settings.get("config", SMALL), **settings), H200)


def offloading(**settings: bool) -> MemoryPlan:
    return plan_of(replace(COLOCATED, config=MIDDLE, reference=MIDDLE, **settings), H200)  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize(("measured", "planned"), [row[1:] for row in MEASURED], ids=[row[0] for row in MEASURED])
def test_planned_memory_is_within_15_percent_of_measured(measured: float, planned: Any) -> None:
    assert planned() == pytest.approx(measured, rel=0.15)


def trainer(**settings: Any) -> TrainerMemory:
    return TrainerMemory(replace(FSDP_ALONE, parallelism=Parallelism(**settings)), small().trainer)


@pytest.mark.long
def test_what_each_strategy_keeps() -> None:
    size = 596_049_920
    single = trainer()
    assert (single.parameters(), single.gradients(), single.optimizer_state()) == (4 * size, 4 * size, 8 * size)
    assert single.gathered() == 0
    assert trainer(kind="ddp", ranks=2, has_gradient_buckets=True).gradients() == 8 * size
    layer, rest = 15_730_944, 155_583_488
    sharded = trainer(kind="fsdp", ranks=4, shard_size=4)
    assert sharded.parameters() == pytest.approx(size, rel=1e-3)  # 4 bytes of a quarter
    assert sharded.gathered() == 2 * (rest + 2 * layer)
    kept = trainer(kind="fsdp", ranks=4, shard_size=4, reshard_after_forward=False, reduce_every_microbatch=False)
    assert kept.gathered() == 2 * size
    assert kept.gradients() - sharded.gradients() == 4 * size
    hybrid = trainer(kind="fsdp", ranks=8, shard_size=4)
    assert hybrid.parameters() == sharded.parameters()
    offloaded = trainer(kind="fsdp", ranks=4, shard_size=4, cpu_offload="parameters")
    assert (offloaded.parameters(), offloaded.gradients(), offloaded.optimizer_state()) == (0, 0, 0)
    assert trainer(kind="fsdp", cpu_offload="optimizer").optimizer_state() == 0


def test_precision_decides_bytes() -> None:
    full, half = (TrainerMemory(replace(FSDP_ALONE, precision=name)) for name in ("32-true", "bf16-true"))
    assert full.gathered() == 2 * half.gathered()
    assert full.parameters() == 2 * half.parameters()
    assert full.logits_chunk(64, has_gradient=False) == 2 * half.logits_chunk(64, has_gradient=False)


def test_logits_take_a_chunk_and_no_more() -> None:
    work = replace(FSDP_ALONE, parallelism=Parallelism(kind="fsdp"))  # Qwen3-0.6B, gathered in bfloat16
    head = 151936 * 1024
    few, many = 1000, 100_000
    memory = TrainerMemory(work, small().trainer)
    assert memory.logits_chunk(few, has_gradient=False) == 2 * few * (151936 + 1024)
    assert memory.logits_chunk(many, has_gradient=False) == 2 * 4096 * 151936 + 2 * many * 1024
    # with the gradients of hidden states and output layer, this one in float32, then cast when the logits are gone
    assert memory.logits_chunk(few, has_gradient=True) == 2 * 2 * few * 1024 + 4 * head + 2 * head
    assert memory.logits_chunk(many, has_gradient=True) == 2 * 2 * many * 1024 + 4 * head + 2 * 4096 * 151936
    halves = replace(work, parallelism=Parallelism(kind="fsdp", ranks=2, tensor_parallel_size=2))
    assert TrainerMemory(halves).logits_chunk(few, has_gradient=False) == 2 * few * (151936 // 2 + 1024)


def test_the_weight_bucket_and_the_window_beside_it() -> None:
    one = TrainerMemory(COLOCATED)
    assert one.bucket() == pytest.approx(2 * 596_049_920, rel=1e-3)
    assert one.gathering_window() == 0
    four = TrainerMemory(replace(COLOCATED, parallelism=Parallelism(kind="fsdp", ranks=4, shard_size=4)))
    assert four.gathering_window() == int(1.25 * 2 * 151936 * 1024)  # the embedding is larger than 256 MiB


def test_vllms_arithmetic() -> None:
    engine = filling().engine()
    assert engine.token == 2 * 28 * 8 * 128 * 2
    assert engine.sequence == 1280 * engine.token
    assert engine.weights == 2 * 596_049_920
    assert engine.weights + engine.activations + engine.kv_cache == int(0.3 * H200)
    assert engine.num_sequences == engine.kv_cache // engine.sequence


def test_kv_cache_plan_never_exceeds_what_sequences_need() -> None:
    engine = plan_of(COLOCATED, H200).engine()
    assert engine.available == int(0.3 * H200) - engine.weights - engine.activations
    assert engine.kv_cache == 128 * (1280 + 16) * engine.token < engine.available / 2
    asked = replace(COLOCATED.engine, kv_cache_bytes=5 * GIB)  # type: ignore[type-var]
    assert plan_of(replace(COLOCATED, engine=asked), H200).engine().kv_cache == 5 * GIB
    # Nearly all that there is: vLLM, which knows better how much that is, takes it all.
    most = replace(COLOCATED.engine, max_sequences=128 * engine.available // engine.kv_cache - 1)  # type: ignore[type-var]
    plan = plan_of(replace(COLOCATED, engine=most), H200).engine()
    assert plan.kv_cache == plan.available


def test_suggested_utilization_fits_all_sequences_or_device_limit() -> None:
    roomy = plan_of(COLOCATED, H200)
    share = roomy.suggested_utilization()
    assert share is not None
    assert roomy.engine(share).num_sequences >= 128 > roomy.engine(share - 0.02).num_sequences
    tight = plan_of(COLOCATED, read_device_memory("24GB"))
    share = tight.suggested_utilization()
    assert share == tight.available_utilization()
    suggested = tight.replace(engine=replace(COLOCATED.engine, utilization=share))  # type: ignore[type-var]
    assert total(suggested.generate()) <= tight.device_memory


@pytest.mark.long
def test_engine_without_sleep_occupies_memory_during_update() -> None:
    awake = plan_of(replace(COLOCATED, engine=Engine(utilization=0.3, can_sleep=False, max_sequences=1024)), H200)
    asleep = plan_of(replace(COLOCATED, engine=Engine(utilization=0.3, max_sequences=1024)), H200)
    assert total(awake.update()) - total(asleep.update()) == pytest.approx(0.3 * H200, rel=1e-6)


@pytest.mark.long
def test_of_a_remote_engine_there_is_the_bucket() -> None:
    here, remote = plan_of(COLOCATED, H200), plan_of(replace(COLOCATED, engine=Engine(is_remote=True)), H200)
    sent = here.update()["weight bucket"]
    assert sent == 2 * small().trainer.weights.total
    assert remote.sync()["weight bucket"] == remote.update()["weight bucket"] == sent
    assert remote.generate() == {} and not {"engine's weights", "KV cache"} & remote.sync().keys()
    assert total(here.update()) - total(remote.update()) == ENGINE_CONTEXT_BYTES
    assert "gpu_memory_utilization" not in format_plan(remote)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "tokens", "is_checkpointed", "measured"),
    [
        (SMALL, 16384, True, 11.7),
        (SMALL, 32768, False, 50.4),
        (MIDDLE, 32768, False, 92.3),
    ],
)
def test_an_update_under_autocast_is_within_15_percent(
    config: Any, tokens: int, is_checkpointed: bool, measured: float
) -> None:
    """Of docs/performance.md, "The update", on a GPU without an engine."""
    alone = Work(
        config=config, batch=TWO_PROMPTS, longest=1152, is_compiled=True, gradient_checkpointing=is_checkpointed
    )
    assert allocated(plan_of(alone, H200).update(tokens)) == pytest.approx(measured, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "generating", "updating"), [(SMALL, 35.5, 35.3), (MIDDLE, 51.6, 66.4), (LARGE, 88.3, 125.8)]
)
def test_a_whole_device_is_within_15_percent(config: Any, generating: float, updating: float) -> None:
    """Of docs/plan.md: 64 x 8 completions of 256 tokens, beside an engine with the share that is suggested."""
    work = Work(
        config=config,
        batch=replace(TWO_PROMPTS, prompts_per_step=64),
        longest=384,
        is_compiled=True,
        gradient_checkpointing="auto",
        engine=Engine(utilization=0.5, max_sequences=512),
    )
    share = plan_of(work, H200).suggested_utilization()
    assert share is not None
    planned = plan_of(replace(work, engine=Engine(utilization=share, max_sequences=512)), H200)
    assert total(planned.generate()) / GIB == pytest.approx(generating, rel=0.15)
    assert total(planned.update()) / GIB == pytest.approx(updating, rel=0.15)


@pytest.mark.long
def test_a_long_contexts_update_is_within_15_percent() -> None:
    """Of the same page: two sequences, each a micro-batch, in a first step, whose peak is before the moments exist."""
    length = 181_248
    batch = replace(TWO_PROMPTS, prompts_per_step=64, max_tokens_per_microbatch=length)
    engine = Engine(utilization=0.92, max_sequences=512)
    work = Work(config=SMALL, batch=batch, longest=length, is_compiled=True, engine=engine, gradient_checkpointing=True)
    update = plan_of(work, H200).update(length)
    assert (total(update) - update["optimizer state"]) / GIB == pytest.approx(29.5, rel=0.15)


@pytest.mark.long
def test_an_update_under_fsdp_is_within_15_percent() -> None:
    """Of the same page."""
    planned = plan_of(replace(FSDP_ALONE, is_compiled=True), H200)
    assert allocated(planned.update(16384)) == pytest.approx(30.3, rel=0.15)


@pytest.mark.long
@pytest.mark.parametrize("device", ["35GB", "45GB", "60GB"])
def test_auto_checkpointing_uses_fewest_layers_leaving_tenth_free(device: str) -> None:
    planned = plan_of(replace(COLOCATED, gradient_checkpointing="auto"), read_device_memory(device))
    count = planned.count_checkpointed_layers()
    assert 0 < count < 28 and total(planned.update()) <= 0.9 * planned.device_memory
    one_less = planned.trainer.update_parts(planned.tokens, count - 1)
    one_more = planned.trainer.update_parts(planned.tokens, count)
    saved = one_less["activations"] - one_more["activations"]
    assert total(planned.update()) + saved * (1 + FRESH_FRAGMENTATION) > 0.9 * planned.device_memory


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_largest_microbatch_fits_and_larger_exceeds_device(gradient_checkpointing: bool) -> None:
    planned = plan_of(COLOCATED, H200)
    most = planned.largest_microbatch(gradient_checkpointing)
    assert total(planned.update(most, gradient_checkpointing)) <= H200
    assert total(planned.update(most + 64, gradient_checkpointing)) > H200
    assert planned.longest_sequence(gradient_checkpointing) == min(most, 40960)


def test_a_plan_that_fits_says_so() -> None:
    planned = plan_of(COLOCATED, H200)
    assert advise(planned) == []
    text = format_plan(planned)
    assert text.endswith("Everything fits.\n")
    assert all(name in text for name in planned.update() if planned.update()[name])


@pytest.mark.long
def test_tight_plan_warns_and_suggests_smaller_microbatch() -> None:
    planned = plan_of(COLOCATED, H200)
    full = MemoryPlan(planned.work, int(total(planned.update()) * 1.02))
    assert advise(full) == []
    *_, heading, sentence = format_plan(full).splitlines()
    assert heading.startswith("It only just fits, and a plan may be 4% too low.")
    assert sentence.startswith("- The update needs") and "lower model.max_tokens_per_microbatch to" in sentence


def advice(device: str, **settings: Any) -> str:
    return " ".join(advise(plan_of(replace(COLOCATED, **settings), read_device_memory(device))))


def test_the_key_to_change_is_named() -> None:
    engine = Engine(utilization=0.3, max_sequences=128)
    assert "model.gradient_checkpointing: auto (" in advice("40GB")
    assert "model.max_tokens_per_microbatch to" in advice("40GB")
    assert "lower model.max_tokens_per_microbatch to" in advice("16.8GB", gradient_checkpointing=True)
    greedy = replace(engine, utilization=0.95)
    assert "gpu_memory_utilization=0.95 takes" in advice("80GB", engine=greedy)
    assert "lower it to" in advice("80GB", engine=greedy)
    half = replace(engine, utilization=0.5)
    assert advice("80GB", engine=half) == ""
    small = replace(engine, utilization=0.01)
    assert "raise rollout.gpu_memory_utilization to" in advice("80GB", engine=small)
    awake = replace(engine, utilization=0.4, can_sleep=False)
    assert "set rollout.sleep: true" in advice("70GB", engine=awake)


@pytest.mark.long
def test_what_one_device_cannot_hold_is_sharded() -> None:
    sentences = advice("20GB", config=MIDDLE, reference=MIDDLE)
    assert "shard it over 4 devices (trainer.strategy: fsdp2, trainer.devices)" in sentences
    assert "Then plan again" in sentences


def test_larger_microbatches_take_more_and_checkpointing_less() -> None:
    planned = plan_of(COLOCATED, H200)
    sizes = [transient(planned.update(tokens)) for tokens in (4096, 8192, 16384)]
    assert sizes == sorted(sizes)
    assert transient(planned.update(16384, True)) < sizes[0]
