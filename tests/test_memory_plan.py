"""The plan against hand-counted formulas, against what torch really keeps, and against what was measured on GPUs."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_project import environment
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, Qwen3Config

from rlightning.batch_plan import BatchPlan
from rlightning.errors import ConfigError
from rlightning.memory_plan.advice import advise
from rlightning.memory_plan.command import plan, split_device_memory
from rlightning.memory_plan.devices import DEVICES, GIB, read_device_memory
from rlightning.memory_plan.phases import MemoryPlan, total, transient
from rlightning.memory_plan.report import format_plan
from rlightning.memory_plan.settings import count_devices
from rlightning.memory_plan.trace import Decoder, measure_activations
from rlightning.memory_plan.trainer_memory import TrainerMemory
from rlightning.memory_plan.weights import count_weights
from rlightning.memory_plan.work import Engine, Parallelism, Work
from rlightning.models.attention import PACKED_ATTENTION

QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
SMALL = Qwen3Config(**QWEN3, hidden_size=1024, intermediate_size=3072)
MIDDLE = Qwen3Config(**QWEN3, hidden_size=2048, intermediate_size=6144)
H200 = read_device_memory("H200")
TWO_PROMPTS = BatchPlan(
    prompts_per_step=16,
    samples_per_prompt=8,
    updates_per_rollout=1,
    epochs_per_rollout=1,
    max_tokens_per_microbatch=16384,
)
COLOCATED = Work(
    config=SMALL,
    reference=SMALL,
    batch=TWO_PROMPTS,
    longest=1280,
    engine=Engine(utilization=0.3, max_sequences=128),
    empties_cache=True,
)
FSDP_ALONE = Work(config=SMALL, batch=TWO_PROMPTS, longest=1280, parallelism=Parallelism(kind="fsdp"))


@cache
def small() -> MemoryPlan:
    return MemoryPlan(COLOCATED, H200)


@cache
def middle() -> MemoryPlan:
    return MemoryPlan(replace(COLOCATED, config=MIDDLE, reference=MIDDLE), H200)


def plan_of(work: Work, device_memory: int) -> MemoryPlan:
    """A plan that shares what was traced for the same model."""
    same = small() if work.config is SMALL else middle()
    return MemoryPlan(work, device_memory, like=same.trainer)


def allocated(parts: dict[str, int]) -> float:
    """GiB that PyTorch's tensors take in a phase, without what other processes, the driver and its cache hold."""
    foreign = ("CUDA contexts", "allocator's slack", "engine's weights", "engine's activations", "KV cache")
    return sum(size for name, size in parts.items() if name not in foreign) / GIB


# Weights


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "mistral", "phi3"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_every_weight_is_counted_once(kind: str, is_tied: bool) -> None:
    config = AutoConfig.for_model(kind, **SIZES, tie_word_embeddings=is_tied)
    model = AutoModelForCausalLM.from_config(config)
    weights = count_weights(config)
    assert weights.total == weights.held == sum(parameter.numel() for parameter in model.parameters())
    assert weights.is_tied == is_tied
    assert weights.layers + weights.root == weights.total
    assert weights.layer == sum(parameter.numel() for parameter in model.model.layers[0].parameters())


def test_the_published_sizes() -> None:
    assert count_weights(SMALL).total == 596_049_920
    assert count_weights(MIDDLE).total == 1_720_574_976


def test_a_rank_holds_its_part() -> None:
    config = Qwen3Config(**SIZES | {"head_dim": 8}, tie_word_embeddings=True)
    # E=32, 4 heads and 2 key/value heads of 8, feed-forward 64, vocabulary 40
    matrices = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 64 * 32
    norms, head_norms = 2 * 32, 2 * 8
    root = 40 * 32 + 32
    assert count_weights(config).total == 2 * (matrices + norms + head_norms) + root
    halves = count_weights(config, tensor_parallel_size=2)
    assert halves.layer == matrices // 2 + norms + head_norms
    assert halves.held == 2 * halves.layer + root
    shards = count_weights(config, tensor_parallel_size=2, shard_size=3)
    # rows of each tensor, thirds rounded up: queries 16 of 32, keys and values 8 of 16, output 32 of 32 by 16 columns
    rows = 6 * 32 + 2 * 3 * 32 + 11 * 16 + 2 * 11 * 32 + 11 * 32
    assert shards.held == 2 * (rows + 2 * 11 + 2 * 3) + 14 * 32 + 11


# Activations


@pytest.mark.parametrize("is_autocast", [False, True])
def test_activations_of_qwen3_are_those_of_the_formula(is_autocast: bool) -> None:
    tokens, hidden, queries, keys, inner, heads = 4096, 1024, 16 * 128, 8 * 128, 3072, 16
    decoder = Decoder(
        dtype=torch.float32 if is_autocast else torch.bfloat16, is_autocast=is_autocast, gradient_checkpointing=False
    )
    kept = measure_activations(SMALL, decoder, tokens, 512).kept
    layer = (26 if is_autocast else 16) * hidden + 14 * queries + 6 * keys + 8 * inner
    layer += 4 * heads + 4 * (2 + heads + 8)  # log-sum-exps, and the norms' reciprocals
    copies = 2 * (2 * hidden * queries + 2 * hidden * keys + 3 * hidden * inner) if is_autocast else 0
    assert kept == pytest.approx(28 * (tokens * layer + copies), rel=0.01)


def test_checkpointing_keeps_a_layers_input() -> None:
    decoder = Decoder(dtype=torch.bfloat16, is_autocast=False, gradient_checkpointing=True)
    more, fewer = (
        measure_activations(Qwen3Config(**QWEN3 | {"num_hidden_layers": n}, hidden_size=1024), decoder, 4096, 512)
        for n in (28, 8)
    )
    assert more.kept - fewer.kept == pytest.approx(20 * 4096 * 1024 * 2)


def test_tensor_parallelism_halves_what_layers_compute() -> None:
    whole, half = (
        measure_activations(
            SMALL,
            Decoder(dtype=torch.bfloat16, is_autocast=False, gradient_checkpointing=False, tensor_parallel_size=size),
            4096,
            512,
        ).kept
        for size in (1, 2)
    )
    inner = 14 * 2048 + 6 * 1024 + 8 * 3072 + 4 * 16 + 4 * 24
    assert whole - half == pytest.approx(28 * 4096 * inner / 2, rel=0.01)


def kept_bytes(run: Callable[[], Tensor], others: Iterable[Tensor]) -> int:
    """What a forward pass really keeps for its backward, and its result, without the tensors that were there before."""
    own = {tensor.untyped_storage().data_ptr() for tensor in others}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    found[result.untyped_storage().data_ptr()] = result.untyped_storage().nbytes()
    return sum(size for pointer, size in found.items() if pointer not in own)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
def test_activations_are_what_the_packed_forward_keeps(kind: str, gradient_checkpointing: bool) -> None:
    config: PreTrainedConfig = AutoConfig.for_model(kind, **SIZES | {"hidden_size": 64, "num_hidden_layers": 4})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=PACKED_ATTENTION)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    length, number = 48, 8
    tokens = torch.randint(3, 40, (1, length * number))
    positions = torch.arange(length).repeat(number)[None]
    bounds = torch.arange(number + 1, dtype=torch.int32) * length

    def run() -> Tensor:
        hidden: Tensor = model.base_model(
            input_ids=tokens,
            position_ids=positions,
            use_cache=False,
            cu_seq_lens_q=bounds,
            cu_seq_lens_k=bounds,
            max_length_q=length,
            max_length_k=length,
        ).last_hidden_state
        return hidden

    decoder = Decoder(dtype=torch.float32, is_autocast=False, gradient_checkpointing=gradient_checkpointing)
    planned = measure_activations(config, decoder, length * number, length)
    kept = kept_bytes(run, (*model.parameters(), *model.buffers(), tokens, positions, bounds))
    if gradient_checkpointing:  # the rotary tables: checkpoint() holds on to keyword arguments without saving them
        kept += 2 * 4 * tokens.numel() * model.model.rotary_emb.inv_freq.numel() * 2
    assert planned.kept == pytest.approx(kept, rel=0.03)


def test_a_sliding_window_is_one_kind_of_layer_among_others() -> None:
    kinds = ["sliding_attention", "full_attention"] * 3
    config = AutoConfig.for_model(
        "qwen3", **SIZES | {"num_hidden_layers": 6}, layer_types=kinds, sliding_window=8, use_sliding_window=True
    )
    decoder = Decoder(dtype=torch.bfloat16, is_autocast=False, gradient_checkpointing=False)
    mixed = measure_activations(config, decoder, 256, 64).kept
    config.layer_types = ["full_attention"] * 6
    assert mixed > measure_activations(config, decoder, 256, 64).kept > 0


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gemma3_text", {"sliding_window": 16}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    ],
)
def test_other_architectures_run_without_values(kind: str, settings: dict[str, Any]) -> None:
    config = AutoConfig.for_model(kind, **SIZES | {"num_hidden_layers": 4}, **settings)
    kept, input_kept = (
        measure_activations(
            config, Decoder(dtype=torch.bfloat16, is_autocast=False, gradient_checkpointing=is_checkpointed), 256, 64
        ).kept
        for is_checkpointed in (False, True)
    )
    assert kept > 2 * input_kept > 4 * 256 * 32 * 2


# What was measured

MEASURED = [
    # docs/measurements.md, "Memory of a GPU that actor and engine share": allocated after the update.
    ("0.6B, between updates", 10.1, lambda: allocated(plan_of(COLOCATED, H200).generate())),
    # The same table, reserved by steps of which each began with an empty cache, the largest: tensors and slack.
    (
        "0.6B, without checkpointing",
        56.5,
        lambda: (
            allocated(plan_of(COLOCATED, H200).update()) + plan_of(COLOCATED, H200).update()["allocator's slack"] / GIB
        ),
    ),
    # Reserved after steps 1 and 2 of the run without the callback, whose micro-batches were not quite full.
    ("0.6B, first step", 48.0, lambda: allocated(plan_of(COLOCATED, H200).update())),
    ("0.6B, second step", 52.2, lambda: allocated(plan_of(COLOCATED, H200).update())),
    # The same, after 17 steps of many lengths.
    (
        "0.6B, cache never emptied",
        63.9,
        lambda: (
            allocated(plan_of(replace(COLOCATED, empties_cache=False), H200).generate())
            + plan_of(replace(COLOCATED, empties_cache=False), H200).generate()["allocator's slack"] / GIB
        ),
    ),
    # The same, of the whole device: "free while generating", with the callback.
    ("0.6B, free while generating", 85.5, lambda: (H200 - total(plan_of(COLOCATED, H200).generate())) / GIB),
    # docs/architecture.md, "Measured on one H200": the trainer's peak allocation, without a reference model.
    (
        "0.6B, with checkpointing",
        16.35,
        lambda: allocated(plan_of(replace(COLOCATED, reference=None, gradient_checkpointing=True), H200).update()),
    ),
    # docs/measurements.md, "Offloading during rollouts", 1.7B: allocated while generating.
    ("1.7B, nothing offloaded", 27.7, lambda: allocated(offloading().generate())),
    ("1.7B, optimizer offloaded", 14.9, lambda: allocated(offloading(offloads_optimizer=True).generate())),
    (
        "1.7B, parameters offloaded",
        2.06,
        lambda: allocated(offloading(offloads_optimizer=True, offloads_parameters=True).generate()),
    ),
    ("1.7B, free while generating", 64.1, lambda: (H200 - total(offloading().generate())) / GIB),
    # One H200, FSDP2 with bfloat16 compute, no engine, 16,384 packed tokens: a study that came before this package,
    # with the same attention and the same log-probabilities.
    ("0.6B, FSDP", 45.0, lambda: allocated(plan_of(FSDP_ALONE, H200).update())),
    (
        "0.6B, FSDP, checkpointing",
        13.0,
        lambda: allocated(plan_of(replace(FSDP_ALONE, gradient_checkpointing=True), H200).update()),
    ),
]


def offloading(**settings: bool) -> MemoryPlan:
    return plan_of(replace(COLOCATED, config=MIDDLE, reference=MIDDLE, **settings), H200)  # type: ignore[arg-type]


@pytest.mark.parametrize(("measured", "planned"), [row[1:] for row in MEASURED], ids=[row[0] for row in MEASURED])
def test_the_plan_is_within_15_percent_of_what_was_measured(measured: float, planned: Any) -> None:
    assert planned() == pytest.approx(measured, rel=0.15)


# Parallelism


def trainer(**settings: Any) -> TrainerMemory:
    return TrainerMemory(replace(FSDP_ALONE, parallelism=Parallelism(**settings)), small().trainer)


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
    assert full.logits_chunk(16384, has_gradient=False) == 2 * half.logits_chunk(16384, has_gradient=False)


def test_the_weight_bucket_and_the_window_beside_it() -> None:
    one = TrainerMemory(COLOCATED)
    assert one.bucket() == pytest.approx(2 * 596_049_920, rel=1e-3)
    assert one.gathering_window() == 0
    four = TrainerMemory(replace(COLOCATED, parallelism=Parallelism(kind="fsdp", ranks=4, shard_size=4)))
    assert four.gathering_window() == int(1.25 * 2 * 151936 * 1024)  # the embedding is larger than 256 MiB


# The engine


def test_vllms_arithmetic() -> None:
    engine = plan_of(COLOCATED, H200).engine()
    assert engine.token == 2 * 28 * 8 * 128 * 2
    assert engine.sequence == 1280 * engine.token
    assert engine.weights == 2 * 596_049_920
    assert engine.weights + engine.activations + engine.kv_cache == int(0.3 * H200)
    assert engine.num_sequences == engine.kv_cache // engine.sequence


def test_the_suggested_share_holds_all_sequences_or_all_that_fits() -> None:
    roomy = plan_of(COLOCATED, H200)
    share = roomy.suggested_utilization()
    assert share is not None
    assert roomy.engine(share).num_sequences >= 128 > roomy.engine(share - 0.02).num_sequences
    tight = plan_of(COLOCATED, read_device_memory("24GB"))
    share = tight.suggested_utilization()
    assert share == tight.available_utilization()
    suggested = tight.replace(engine=replace(COLOCATED.engine, utilization=share))  # type: ignore[type-var]
    assert total(suggested.generate()) <= tight.device_memory


def test_an_engine_that_does_not_sleep_is_there_during_the_update() -> None:
    awake = plan_of(replace(COLOCATED, engine=Engine(utilization=0.3, can_sleep=False)), H200)
    asleep = plan_of(replace(COLOCATED, engine=Engine(utilization=0.3)), H200)
    assert total(awake.update()) - total(asleep.update()) == pytest.approx(0.3 * H200, rel=1e-6)


# What follows


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_the_largest_microbatch_fits_and_a_larger_one_does_not(gradient_checkpointing: bool) -> None:
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


def advice(device: str, **settings: Any) -> str:
    return " ".join(advise(plan_of(replace(COLOCATED, **settings), read_device_memory(device))))


def test_the_key_to_change_is_named() -> None:
    engine = Engine(utilization=0.3, max_sequences=128)
    assert "model.gradient_checkpointing: true (" in advice("40GB")
    assert "model.max_tokens_per_microbatch to" in advice("40GB")
    assert "lower model.max_tokens_per_microbatch to" in advice("18GB", gradient_checkpointing=True)
    greedy = replace(engine, utilization=0.95)
    assert "gpu_memory_utilization=0.95 takes" in advice("80GB", engine=greedy)
    assert "lower it to" in advice("80GB", engine=greedy)
    half = replace(engine, utilization=0.5)
    assert "add EmptyCacheAfterUpdate to trainer.callbacks" in advice("80GB", engine=half, empties_cache=False)
    assert advice("80GB", engine=half) == ""
    small = replace(engine, utilization=0.01)
    assert "raise rollout.gpu_memory_utilization to" in advice("80GB", engine=small)
    awake = replace(engine, utilization=0.4, can_sleep=False)
    assert "set rollout.sleep: true" in advice("80GB", engine=awake)


def test_what_one_device_cannot_hold_is_sharded() -> None:
    sentences = advice("24GB", config=MIDDLE, reference=MIDDLE)
    assert "shard it over 4 devices (trainer.strategy: fsdp2, trainer.devices)" in sentences
    assert "Then plan again" in sentences


def test_larger_microbatches_take_more_and_checkpointing_less() -> None:
    planned = plan_of(COLOCATED, H200)
    sizes = [transient(planned.update(tokens)) for tokens in (4096, 8192, 16384)]
    assert sizes == sorted(sizes)
    assert transient(planned.update(16384, True)) < sizes[0]


# The command


@pytest.mark.parametrize(
    ("text", "gib"), [("80GB", 74.506), ("79.1 GiB", 79.1), ("h100", 79.1), ("A100-40GB", 39.4), ("1024MiB", 1.0)]
)
def test_sizes_of_devices(text: str, gib: float) -> None:
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


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a configuration and a model's config.json: no weights, no tokenizer, no data."""
    (tmp_path / "model").mkdir()
    config = {**QWEN3, "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def test_a_configuration_is_planned(project: Path) -> None:
    text = plan(["--config", "run.yaml", "--device-memory", "H200"])
    assert text.startswith("qwen3 of 596,049,920 parameters, bf16-mixed, 1 rank, 139.8 GiB each\n")
    assert "micro-batches of 16,384 tokens, sequences of up to 1,280, gradient_checkpointing: false" in text
    assert "log-probs" not in text  # neither a reference nor a second optimizer step
    assert sorted(path.name for path in project.iterdir()) == ["model", "run.yaml"]


def test_options_are_those_of_fit(project: Path) -> None:
    (project / "fsdp.yaml").write_text(
        "trainer:\n  devices: 8\n  strategy:\n    class_path: rlightning.distributed.FSDP\n"
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


def test_sft_has_no_engine(project: Path) -> None:
    text = plan(["--config", "run.yaml", "--model", "SFT", "--model.model", "model", "--device-memory", "80GB"])
    assert "engine" not in text and "sync" not in text


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


def test_a_group_of_ranks_that_does_not_divide_is_refused(project: Path) -> None:
    (project / "fsdp.yaml").write_text(
        "trainer:\n  devices: 4\n  strategy:\n    class_path: rlightning.distributed.FSDP\n"
        "    init_args: {shard_size: 3}\n"
    )
    with pytest.raises(ConfigError, match="shard_size=3 does not divide 4 data-parallel ranks"):
        plan(["--config", "run.yaml", "--config", "fsdp.yaml", "--device-memory", "80GB"])


def test_the_size_of_the_device_is_asked_for(project: Path) -> None:
    with pytest.raises(ConfigError, match="Add --device-memory 80GB, say, or one of A10, "):
        plan(["--config", "run.yaml"])


def test_help_needs_nothing() -> None:
    assert all(name in plan(["--help"]) for name in ("--device-memory", "--config", *DEVICES))


@pytest.mark.slow
def test_the_command_needs_no_vllm_and_no_gpu(project: Path) -> None:
    probe = (
        "import sys; from rlightning.__main__ import main\n"
        "code = main(['plan', '--config', 'run.yaml', '--device-memory', 'H200'])\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'vllm', 'ray'}), code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=project, env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-2:] == ["Everything fits.", "[] 0"]
    wrong = [sys.executable, "-m", "rlightning", "plan", "--config", "run.yaml", "--device-memory", "much"]
    failed = subprocess.run(wrong, cwd=project, env=environment(), capture_output=True, text=True, check=False)
    assert (failed.returncode, failed.stderr.count("\n")) == (2, 1)
