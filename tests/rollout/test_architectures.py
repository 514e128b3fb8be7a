"""Tiny models of the architectures that are not refused: through plan, export, engine and weight sync, and back."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import Actor, assert_sampled_from, engine_config, generate, make_prompt, send, started
from tiny import save_byte_model
from tiny_models import save_tiny
from transformers import PreTrainedConfig

from rlightning.callbacks import VLLMRollout
from rlightning.cli.plan import parse_work, plan
from rlightning.errors import EngineError
from rlightning.memory_plan.activations import Decoder, group_layers, measure_activations, shrink, trace_compiled
from rlightning.memory_plan.phases import MemoryPlan
from rlightning.memory_plan.work import Work
from rlightning.models import load_policy, load_tokenizer, packed_logprobs, save_policy
from rlightning.models.layers import checkpoint_layers
from rlightning.rollout import Sampling
from rlightning.types import RolloutBatch

SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 256}
"""Heads of 32, the smallest that vLLM's attention on a CPU takes."""
GROUPED: dict[str, Any] = {"num_key_value_heads": 1}
HEADS = GROUPED | {"head_dim": 32}
TOKENS = [3 + (7 * i) % 37 for i in range(24)]
RUN = """\
model:
  class_path: rlightning.algorithms.GRPO
  init_args: {{model: {model}, rewards: [rlightning.rewards.exact_match], prompts_per_step: 4}}
data: {{train: rows.jsonl, max_prompt_tokens: 64}}
rollout: {{max_new_tokens: 64}}
trainer: {{precision: bf16-mixed, max_steps: 3}}
"""
COMMON: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "phi3": GROUPED
    | {
        "rope_scaling": {"rope_type": "longrope", "short_factor": [1.5] * 16, "long_factor": [4.0] * 16},
        "original_max_position_embeddings": 192,
    },
    "qwen3_moe": HEADS,
    "mixtral": GROUPED,
    "glm4_moe": HEADS,
}
"""Learned positions, LongRoPE, experts, experts under other names in files, router biases."""
WITH_GROUPS = """arcee bitnet exaone4 exaone_moe flex_olmo granite granitemoe granitemoeshared hyperclovax jais2 mistral
    nanochat olmo olmo2 olmo3 olmoe qwen2 qwen2_moe smollm3 starcoder2"""
WITH_HEADS = """cwm dots1 ernie4_5 gemma gemma3_text glm glm4 helium hunyuan_v1_dense hunyuan_v1_moe mellum ministral
    ministral3 qwen3 seed_oss solar_open"""
OTHERS: dict[str, dict[str, Any]] = {
    "llama": GROUPED | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    **{kind: {} for kind in ["gpt_bigcode", "gpt_neox", "persimmon"]},
    **dict.fromkeys(WITH_GROUPS.split(), GROUPED),
    **dict.fromkeys(WITH_HEADS.split(), HEADS),
}
KINDS = [
    *(
        pytest.param(kind, config, id=kind, marks=[pytest.mark.slow] * (kind != "qwen3_moe"))
        for kind, config in COMMON.items()
    ),
    *(pytest.param(kind, config, id=kind, marks=pytest.mark.slow) for kind, config in OTHERS.items()),
]
TRAINER = Decoder(dtype=torch.float32, is_autocast=True, gradient_checkpointing=True, is_compiled=True)
TRACED_IN_ONE_WAY = ["--model.compile", "false", "--model.gradient_checkpointing", "false"]


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a run of a mixture of experts."""
    folder = tmp_path_factory.mktemp("run")
    model = save_tiny("qwen3_moe", folder / "model", **SIZES | COMMON["qwen3_moe"])
    (folder / "run.yaml").write_text(RUN.format(model=model))
    return str(folder / "run.yaml")


@pytest.fixture(scope="module")
def work(config_file: str) -> Work:
    return parse_work(["fit", "--config", config_file])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(save_byte_model(tmp_path_factory.mktemp("bytes")))


@torch.no_grad()
def score(model: Any) -> torch.Tensor:
    """Log-probabilities of ``TOKENS``: [P], the first one 0."""
    return packed_logprobs(model, RolloutBatch.of_sequences([TOKENS]))[0]


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Of the sum of these; experts that no token goes to have none."""
    packed_logprobs(model, RolloutBatch.of_sequences([TOKENS]))[0].sum().backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def check_plan(kind: str, config: PreTrainedConfig, work: Work) -> None:
    """Plan each part of a run that depends on the architecture; of one that is not common, layers as compiled alone."""
    planned = MemoryPlan(replace(work, config=config).with_callbacks([VLLMRollout(max_new_tokens=64)], 64), 80 << 30)
    assert planned.trainer.weights.held > 0 and planned.engine.num_sequences(80 << 30) > 0
    tokens = (2 * work.longest, work.longest)
    if kind in COMMON:
        assert measure_activations(config, TRAINER, *tokens).kept > 0
    else:
        layers = (shrink(config, [layer], 1) for layer in group_layers(config))
        assert all(trace_compiled(layer, TRAINER, *tokens) > 0 for layer in layers)


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [TRACED_IN_ONE_WAY, pytest.param([], marks=pytest.mark.slow)], ids=["one way", "all ways"]
)
def test_run_of_mixture_of_experts_is_planned(options: list[str], config_file: str) -> None:
    assert "GiB each" in plan(["--config", config_file, "--device-memory", "80GB", *options])


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "sizes"), KINDS)
def test_architecture_passes_plan_export_engine_and_sync(
    kind: str, sizes: dict[str, Any], work: Work, tokenizer: Any, tmp_path: Path
) -> None:
    actor = Actor(save_tiny(kind, tmp_path / "model", **SIZES | sizes))
    check_plan(kind, actor.model.config, work)

    actor.perturb(0)
    save_policy(actor.model, tokenizer, tmp_path / "saved", dtype=None)
    exported, expected = load_policy(str(tmp_path / "saved")), score(actor.model)
    torch.testing.assert_close(score(exported), expected, atol=1e-5, rtol=0)
    checkpoint_layers(exported, 1)
    torch.testing.assert_close(gradients(exported), gradients(actor.model), atol=1e-4, rtol=1e-4)

    config = engine_config(str(tmp_path / "saved"), tmp_path / "engine.log")
    config.engine_args.update(load_format="auto", max_model_len=192)
    with started(config) as engine:
        np.testing.assert_allclose(engine.score_all(np.array([TOKENS]))[0], expected, atol=1e-4)  # what was exported
        for version in (1, 2):
            actor.perturb(version)
            send(engine, actor, version)
            np.testing.assert_allclose(engine.score_all(np.array([TOKENS]))[0], score(actor.model), atol=1e-4)
        prompt = make_prompt("1+1=")
        ((completion,),) = generate(engine, [prompt], 1, Sampling(max_new_tokens=12))
        assert_sampled_from(actor, prompt, completion)


@pytest.mark.processes
def test_weight_without_place_in_vllm_is_named(tokenizer: Any, tmp_path: Path) -> None:
    model = save_tiny("qwen3", tmp_path / "model", **SIZES | HEADS | {"attention_bias": True})
    tokenizer.save_pretrained(model)
    with started(engine_config(model, tmp_path / "engine.log")) as engine:
        biases = (
            r"2 of the weights that the actor sent were not taken, such as model\.layers\.0\.self_attn\.o_proj\.bias"
        )
        with pytest.raises(EngineError, match=biases):
            send(engine, Actor(model), 0)
