"""Plans against what was measured on GPUs, and what follows from them."""

from dataclasses import replace
from typing import Any

import pytest
from planned import (
    COLOCATED,
    FSDP_ALONE,
    H200,
    LARGE,
    MIDDLE,
    SMALL,
    TWO_PROMPTS,
    colocated,
    engine_of,
    with_engine,
)
from transformers import Qwen3Config

from rlightning.memory_plan.advice import advise, advise_engine
from rlightning.memory_plan.devices import read_device_memory
from rlightning.memory_plan.phases import (
    CONTEXT_BYTES,
    ENGINE_CONTEXT_BYTES,
    FRESH_FRAGMENTATION,
    MemoryPlan,
    PhaseBytes,
)
from rlightning.memory_plan.report import describe, describe_engine, describe_phases, format_plan
from rlightning.memory_plan.trainer import TrainerMemory
from rlightning.memory_plan.work import Parallelism, RoleMemory, RolloutMemory, Work
from rlightning.models.layers import Checkpointing
from rlightning.parallel.device import GIB

REFERENCE = {name: 2 * number / GIB for name, number in (("0.6B", 596_049_920), ("1.7B", 1_720_574_976))}
"""GiB that a reference model takes less than when this was measured: it was held in float32."""
MEASURED = [
    # docs/measurements.md, "Memory of a GPU that actor and engine share": allocated after the update.
    ("0.6B, between updates", 10.1 - REFERENCE["0.6B"], lambda: MemoryPlan(COLOCATED, H200).generate().tensors / GIB),
    # The same table, reserved by steps of which each began with an empty cache, the largest: tensors and slack.
    (
        "0.6B, without checkpointing",
        56.5 - REFERENCE["0.6B"],
        lambda: (
            MemoryPlan(COLOCATED, H200).update().tensors / GIB
            + MemoryPlan(COLOCATED, H200).update().allocator_slack / GIB
        ),
    ),
    # Reserved after steps 1 and 2 of the run without the callback, whose micro-batches were not quite full.
    ("0.6B, first step", 48.0 - REFERENCE["0.6B"], lambda: MemoryPlan(COLOCATED, H200).update().tensors / GIB),
    ("0.6B, second step", 52.2 - REFERENCE["0.6B"], lambda: MemoryPlan(COLOCATED, H200).update().tensors / GIB),
    # The same, of the whole device: "free while generating", with the callback.
    ("0.6B, free while generating", 85.5 + REFERENCE["0.6B"], lambda: (H200 - filling().generate().total) / GIB),
    # docs/measurements.md, "Offloading during rollouts", 1.7B: allocated while generating.
    ("1.7B, nothing offloaded", 27.7 - REFERENCE["1.7B"], lambda: offloading().generate().tensors / GIB),
    (
        "1.7B, optimizer offloaded",
        14.9 - REFERENCE["1.7B"],
        lambda: offloading("optimizer_state").generate().tensors / GIB,
    ),
    (
        "1.7B, parameters offloaded",
        2.06,
        lambda: offloading("optimizer_state", "parameters", "frozen_models").generate().tensors / GIB,
    ),
    (
        "1.7B, free while generating",
        64.1 + REFERENCE["1.7B"],
        lambda: (H200 - filling(MIDDLE).generate().total) / GIB,
    ),
    # One H200, FSDP2 with bfloat16 compute, no engine, 16,384 packed tokens: a study that came before this package,
    # with the same attention and the same log-probabilities.
    ("0.6B, FSDP", 45.0, lambda: MemoryPlan(FSDP_ALONE, H200).update().tensors / GIB),
    (
        "0.6B, FSDP, checkpointing",
        13.0,
        lambda: MemoryPlan(replace(FSDP_ALONE, gradient_checkpointing=True), H200).update().tensors / GIB,
    ),
    # docs/plan.md.
    (
        "0.6B, FSDP, compiled",
        30.3,
        lambda: MemoryPlan(replace(FSDP_ALONE, is_compiled=True), H200).update().tensors / GIB,
    ),
]


def reserved(update: PhaseBytes) -> int:
    return update.tensors + update.allocator_slack


def filling(config: Qwen3Config = SMALL) -> MemoryPlan:
    """An engine that fills its share with its KV cache, as all did when this was measured."""
    return MemoryPlan(colocated(config, max_sequences=1024), H200)


def offloading(*moved: str) -> MemoryPlan:
    return MemoryPlan(replace(colocated(MIDDLE), moved_each_step=frozenset(moved)), H200)


@pytest.mark.long
@pytest.mark.parametrize(("measured", "planned"), [row[1:] for row in MEASURED], ids=[row[0] for row in MEASURED])
def test_planned_memory_is_within_15_percent_of_measured(measured: float, planned: Any) -> None:
    assert planned() == pytest.approx(measured, rel=0.15)


def trainer(**settings: Any) -> TrainerMemory:
    return TrainerMemory(replace(FSDP_ALONE, parallelism=Parallelism(**settings)))


@pytest.mark.long
def test_what_each_strategy_keeps() -> None:
    size = 596_049_920
    single = trainer()
    assert (single.parameters(), single.gradients(), single.optimizer_state()) == (4 * size, 4 * size, 8 * size)
    assert single.gathered_parameters() == 0
    assert trainer(kind="ddp", ranks=2, has_gradient_buckets=True).gradients() == 8 * size
    layer, rest = 15_730_944, 155_583_488
    sharded = trainer(kind="fsdp", ranks=4, shard_size=4)
    assert sharded.parameters() == pytest.approx(size, rel=1e-3)  # 4 bytes of a quarter
    assert sharded.gathered_parameters() == 2 * (rest + 2 * layer)
    kept = trainer(kind="fsdp", ranks=4, shard_size=4, reshard_after_forward=False, reduce_every_microbatch=False)
    assert kept.gathered_parameters() == 2 * size
    assert kept.gradients() - sharded.gradients() == 4 * size
    hybrid = trainer(kind="fsdp", ranks=8, shard_size=4)
    assert hybrid.parameters() == sharded.parameters()
    offloaded = trainer(kind="fsdp", ranks=4, shard_size=4, cpu_offload="parameters")
    assert (offloaded.parameters(), offloaded.gradients(), offloaded.optimizer_state()) == (0, 0, 0)
    assert trainer(kind="fsdp", cpu_offload="optimizer").optimizer_state() == 0


@pytest.mark.parametrize(
    ("settings", "keeps"),
    [({}, True), ({"shard_size": 1}, False), ({"cpu_offload": "parameters"}, False), ({"kind": "ddp"}, False)],
)
def test_auto_keeps_what_saves_communication(settings: dict[str, Any], keeps: bool) -> None:
    automatic = {"reshard_after_forward": "auto", "reduce_every_microbatch": "auto"}
    parallelism = Parallelism(**{"kind": "fsdp", "ranks": 4, "shard_size": 4, **automatic, **settings})
    found = MemoryPlan(replace(FSDP_ALONE, parallelism=parallelism), H200).work.parallelism
    assert (found.reshard_after_forward, found.reduce_every_microbatch) == (not keeps, not keeps)


def test_precision_decides_bytes() -> None:
    full, half = (TrainerMemory(replace(FSDP_ALONE, precision=name)) for name in ("32-true", "bf16-true"))
    assert full.gathered_parameters() == 2 * half.gathered_parameters()
    assert full.parameters() == 2 * half.parameters()
    assert full.logits(64, has_gradient=False) == 2 * half.logits(64, has_gradient=False)


def test_logits_take_a_chunk_and_no_more() -> None:
    work = replace(FSDP_ALONE, parallelism=Parallelism(kind="fsdp"))  # Qwen3-0.6B, gathered in bfloat16
    head = 151936 * 1024
    few, many = 1000, 100_000
    memory = TrainerMemory(work)
    assert memory.logits(few, has_gradient=False) == 2 * few * (151936 + 1024)
    assert memory.logits(many, has_gradient=False) == 2 * 4096 * 151936 + 2 * many * 1024
    # with the gradients of hidden states and output layer, this one in float32, then cast when the logits are gone
    assert memory.logits(few, has_gradient=True) == 2 * 2 * few * 1024 + 4 * head + 2 * head
    assert memory.logits(many, has_gradient=True) == 2 * 2 * many * 1024 + 4 * head + 2 * 4096 * 151936
    truncated = TrainerMemory(replace(work, rollout=RolloutMemory(max_support=20)))
    more = truncated.logits(few, has_gradient=True) - memory.logits(few, has_gradient=True)
    assert more == 5 * 4 * 20 * few  # the supports, and four tables of their logits
    assert truncated.logits(few, has_gradient=False) == memory.logits(few, has_gradient=False)
    halves = replace(work, parallelism=Parallelism(kind="fsdp", ranks=2, tensor_parallel_size=2))
    assert TrainerMemory(halves).logits(few, has_gradient=False) == 2 * few * (151936 // 2 + 1024)


def test_the_weight_bucket_and_the_window_beside_it() -> None:
    one = TrainerMemory(COLOCATED)
    assert one.weight_bucket() == pytest.approx(2 * 596_049_920, rel=1e-3)
    assert one.gathering_window() == 0
    four = TrainerMemory(replace(COLOCATED, parallelism=Parallelism(kind="fsdp", ranks=4, shard_size=4)))
    assert four.gathering_window() == int(1.25 * 2 * 151936 * 1024)  # the embedding is larger than 256 MiB


def test_engine_memory_follows_vllms_arithmetic() -> None:
    engine = filling().engine
    assert engine.token == 2 * 28 * 8 * 128 * 2
    assert engine.sequence == 1280 * engine.token
    assert engine.weights == 2 * 596_049_920
    assert engine.weights + engine.activations + engine.kv_cache(H200) == int(0.3 * H200)
    assert engine.num_sequences(H200) == engine.kv_cache(H200) // engine.sequence


def test_kv_cache_plan_never_exceeds_what_sequences_need() -> None:
    engine = engine_of(SMALL)
    assert engine.available(H200) == int(0.3 * H200) - engine.weights - engine.activations
    assert engine.kv_cache(H200) == 128 * (1280 + 16) * engine.token < engine.available(H200) / 2
    assert replace(engine, kv_cache_bytes=5 * GIB).kv_cache(H200) == 5 * GIB
    # Nearly all that there is: vLLM, which knows better how much that is, takes it all.
    most = replace(engine, max_sequences=128 * engine.available(H200) // engine.kv_cache(H200) - 1)
    assert most.kv_cache(H200) == most.available(H200)


def test_suggested_utilization_fits_all_sequences_or_device_limit() -> None:
    roomy = MemoryPlan(COLOCATED, H200)
    share = roomy.suggested_utilization()
    assert share is not None
    held, fewer = (roomy.with_engine(utilization=u).engine.num_sequences(H200) for u in (share, share - 0.02))
    assert held >= 128 > fewer
    tight = MemoryPlan(COLOCATED, read_device_memory("24GB"))
    share = tight.suggested_utilization()
    assert share == tight.available_utilization()
    assert tight.with_engine(utilization=share).generate().total <= tight.device_memory


@pytest.mark.long
def test_engine_without_sleep_occupies_memory_during_update() -> None:
    asleep = filling()
    awake = asleep.with_engine(can_sleep=False)
    assert awake.update().total - asleep.update().total == pytest.approx(0.3 * H200, rel=1e-6)


@pytest.mark.long
def test_of_a_remote_engine_there_is_the_bucket() -> None:
    here, remote = MemoryPlan(COLOCATED, H200), MemoryPlan(replace(COLOCATED, rollout=RolloutMemory()), H200)
    sent = here.update().weight_bucket
    assert sent == 2 * here.trainer.weights.total
    assert remote.sync().weight_bucket == remote.update().weight_bucket == sent
    assert "generate" not in remote.phases() and remote.sync().engine == 0
    assert here.update().total - remote.update().total == ENGINE_CONTEXT_BYTES
    assert "gpu_memory_utilization" not in format_plan(remote)


@pytest.mark.slow
@pytest.mark.long
def test_readmes_run_on_an_h100_is_within_10_percent() -> None:
    """Of docs/measurements.md, "Real sizes with the README's keys": 1.7B, no layer checkpointed."""
    device = read_device_memory("H100")
    rollout = RolloutMemory(engine=engine_of(MIDDLE, longest=2048, share=0.45, max_sequences=512))
    work = Work(
        config=MIDDLE,
        batch=replace(TWO_PROMPTS, prompts_per_step=64),
        longest=2048,
        is_compiled=True,
        gradient_checkpointing="auto",
        rollout=rollout,
    )
    planned = MemoryPlan(work, device)
    assert planned.count_checkpointed_layers() == 0
    assert planned.sync().tensors / GIB == pytest.approx(21.3, rel=0.1)
    # A sync ends with an engine that is awake.
    assert planned.generate().total / GIB == pytest.approx(58.6, rel=0.1)
    assert planned.update().tensors / GIB == pytest.approx(64.1, rel=0.1)


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
    assert MemoryPlan(alone, H200).update_of(tokens, 28 * is_checkpointed).tensors / GIB == pytest.approx(
        measured, rel=0.15
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "generating", "updating"), [(SMALL, 35.5, 35.3), (MIDDLE, 51.6, 66.4), (LARGE, 88.3, 125.8)]
)
def test_a_whole_device_is_within_15_percent(config: Any, generating: float, updating: float) -> None:
    """Of docs/plan.md: 64 x 8 completions of 256 tokens, beside an engine with the share that is suggested."""
    rollout = RolloutMemory(engine=engine_of(config, longest=384, share=0.5, max_sequences=512))
    work = Work(
        config=config,
        batch=replace(TWO_PROMPTS, prompts_per_step=64),
        longest=384,
        is_compiled=True,
        gradient_checkpointing="auto",
        rollout=rollout,
    )
    share = MemoryPlan(work, H200).suggested_utilization()
    assert share is not None
    planned = MemoryPlan(work, H200).with_engine(utilization=share)
    assert planned.generate().total / GIB == pytest.approx(generating, rel=0.15)
    assert planned.update().total / GIB == pytest.approx(updating, rel=0.15)


@pytest.mark.slow
@pytest.mark.long
def test_a_long_contexts_update_is_within_15_percent() -> None:
    """Of the same page: two sequences, each a micro-batch, in a first step, whose peak is before the moments exist."""
    length = 181_248
    batch = replace(TWO_PROMPTS, prompts_per_step=64, max_tokens_per_microbatch=length)
    rollout = RolloutMemory(engine=engine_of(SMALL, longest=length, share=0.92, max_sequences=512))
    work = Work(
        config=SMALL, batch=batch, longest=length, is_compiled=True, rollout=rollout, gradient_checkpointing=True
    )
    update = MemoryPlan(work, H200).update()
    assert (update.total - update.optimizer_state) / GIB == pytest.approx(29.5, rel=0.15)


@pytest.mark.long
@pytest.mark.parametrize("device", ["35GB", "45GB", "60GB"])
def test_auto_checkpointing_uses_fewest_layers_leaving_tenth_free(device: str) -> None:
    planned = MemoryPlan(replace(COLOCATED, gradient_checkpointing="auto"), read_device_memory(device))
    count = planned.count_checkpointed_layers()
    assert 0 < count < 28 and planned.update().total <= 0.9 * planned.device_memory
    one_less, one_more = (planned.update_of(planned.tokens, number).activations for number in (count - 1, count))
    saved = one_less - one_more
    assert planned.update().total + saved * (1 + FRESH_FRAGMENTATION) > 0.9 * planned.device_memory


@pytest.mark.long
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_largest_microbatch_fits_and_larger_exceeds_device(gradient_checkpointing: bool) -> None:
    planned = MemoryPlan(replace(COLOCATED, gradient_checkpointing=gradient_checkpointing), H200)
    most, num_layers = planned.largest_microbatch(), 28 * gradient_checkpointing
    assert planned.update_of(most, num_layers).total <= H200 < planned.update_of(most + 64, num_layers).total
    assert planned.longest_sequence() == min(most, 40960)


@pytest.mark.long
def test_a_plan_that_fits_says_so() -> None:
    planned = MemoryPlan(COLOCATED, H200)
    assert advise(planned) == []
    text = format_plan(planned)
    assert text.endswith("Everything fits.\n")
    assert all(name in text for name in planned.update().by_name())


@pytest.mark.long
def test_tight_plan_warns_and_suggests_smaller_microbatch() -> None:
    planned = MemoryPlan(COLOCATED, H200)
    full = MemoryPlan(planned.work, int(planned.update_of(planned.tokens, 0).total * 1.02))
    assert advise(full) == []
    *_, heading, sentence = format_plan(full).splitlines()
    assert heading.startswith("It only just fits, and a plan may be 4% too low.")
    assert sentence.startswith("- The update needs") and "lower model.max_tokens_per_microbatch to" in sentence


def advice(device: str, work: Work = COLOCATED, **settings: Any) -> str:
    return " ".join(advise(MemoryPlan(replace(work, **settings), read_device_memory(device))))


@pytest.mark.long
def test_the_key_to_change_is_named() -> None:
    assert "model.gradient_checkpointing: auto (" in advice("40GB")
    assert "model.max_tokens_per_microbatch to" in advice("40GB")
    assert "lower model.max_tokens_per_microbatch to" in advice("16.8GB", gradient_checkpointing=True)
    greedy = with_engine(COLOCATED, utilization=0.95)
    assert "gpu_memory_utilization=0.95 takes" in advice("80GB", greedy)
    assert "lower it to" in advice("80GB", greedy)
    assert advice("80GB", with_engine(COLOCATED, utilization=0.5)) == ""
    small = with_engine(COLOCATED, utilization=0.01)
    assert "raise rollout.gpu_memory_utilization to" in advice("80GB", small)
    awake = with_engine(COLOCATED, utilization=0.4, can_sleep=False)
    assert "set rollout.sleep: true" in advice("70GB", awake)


@pytest.mark.long
def test_what_one_device_cannot_hold_is_sharded() -> None:
    sentences = advice("20GB", colocated(MIDDLE))
    assert "shard it over 4 devices (trainer.strategy: fsdp2, trainer.devices)" in sentences
    assert "Then plan again" in sentences


@pytest.mark.slow
def test_larger_microbatches_take_more_and_checkpointing_less() -> None:
    planned = MemoryPlan(COLOCATED, H200)
    sizes = [planned.update_of(tokens, 0).transient for tokens in (4096, 8192, 16384)]
    assert sizes == sorted(sizes)
    assert planned.update_of(16384, 28).transient < sizes[0]


@pytest.mark.long
def test_a_critic_counts_its_weights_moments_gradients_and_activations() -> None:
    critic = RoleMemory(name="critic", config=MIDDLE, optimizer_states="8bit")
    alone, beside = (
        MemoryPlan(COLOCATED, H200),
        MemoryPlan(replace(COLOCATED, others=(*COLOCATED.others, critic)), H200),
    )
    size, (before, after) = 1_720_574_976, (plan.update_of(16384, 0) for plan in (alone, beside))
    assert after.parameters - before.parameters == after.gradients - before.gradients == 4 * size
    norms = 28 * (2 * 2048 + 2 * 128) + 2048  # whose moments stay in float32
    moments = 2 * (1 + 4 / 128) * (size - norms) + 8 * norms
    assert after.optimizer_state - before.optimizer_state == pytest.approx(moments, abs=1)
    assert after.frozen_models == before.frozen_models
    own = TrainerMemory(replace(COLOCATED, config=MIDDLE))
    assert after.activations - before.activations == int(own.activations(16384).kept)
    added = after.total - before.total
    assert f"critic {added / GIB:.1f} GiB of the update" in describe_phases(beside)
    frozen = MemoryPlan(replace(COLOCATED, others=(replace(critic, optimizer_states=None),)), H200)
    assert frozen.update().frozen_models == 2 * size and frozen.update().parameters == before.parameters


@pytest.mark.long
def test_a_critic_checkpoints_its_own_layers_or_the_actors_share() -> None:
    own = TrainerMemory(replace(COLOCATED, config=MIDDLE))
    none, every = (own.activations(16384, layers).kept for layers in (0, 28))
    cases: list[tuple[Checkpointing, list[float]]] = [
        (True, [every, every, every]),
        ("auto", [none, 0.75 * none + 0.25 * every, every]),
    ]
    for setting, expected in cases:
        critic = RoleMemory(name="critic", config=MIDDLE, optimizer_states="8bit", gradient_checkpointing=setting)
        beside = TrainerMemory(replace(COLOCATED, others=(critic,)))
        kept = [beside.others_activations(16384, layers) for layers in (0, 7, 28)]  # of the actor's 28
        assert kept == pytest.approx(expected)


def test_role_without_config_is_named_as_uncounted() -> None:
    unknown = RoleMemory(name="critic", config=None, optimizer_states="float32")
    work = replace(FSDP_ALONE, others=(unknown,), gradient_checkpointing=True)
    assert TrainerMemory(work).parameters() == TrainerMemory(FSDP_ALONE).parameters()
    assert describe(MemoryPlan(work, H200)).endswith("gradient_checkpointing: true\nnot counted: critic")


def test_sampler_in_trainers_process_takes_what_it_needs() -> None:
    engine = replace(engine_of(SMALL, share=0.0), num_engines=0, kv_cache_bytes=20 * GIB)
    plan = MemoryPlan(replace(COLOCATED, rollout=RolloutMemory(engine=engine, bucket_bytes=0)), H200)
    assert plan.update().contexts == CONTEXT_BYTES and plan.update().weight_bucket == 0
    assert plan.generate().kv_cache == 20 * GIB and advise_engine(plan) == []
    small = replace(plan, device_memory=16 * GIB)
    assert advise_engine(small) == [
        f"Sampling needs {small.generate().total / GIB:.1f} GiB of 16.0 GiB: "
        "lower rollout.max_sequences or rollout.max_new_tokens."
    ]
    # Nothing is moved to the host for it, unless a callback does so.
    assert small.generate().optimizer_state == plan.update().optimizer_state > 0
    assert small.moved().total == 0 and "Meanwhile" not in describe_engine(small)
    tight = replace(plan, device_memory=plan.generate().total - 1)
    assert advise_engine(tight)[0].endswith("max_new_tokens, or add the callback OffloadDuringRollout.")
    offloading = tight.with_work(moved_each_step=frozenset({"optimizer_state"}))
    assert advise_engine(offloading) == [] and offloading.generate().optimizer_state == 0
    assert describe_engine(offloading).endswith("\nMeanwhile, the host's memory holds optimizer state (4.4 GiB).")
    assert "KV cache of 128 sequences of 1,280 tokens 20.0." in describe_engine(plan)
