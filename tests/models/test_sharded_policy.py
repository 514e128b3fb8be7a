"""Models in shards, on real processes, against the same models whole."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import finish, run_script, start_calls
from safetensors.torch import load_file, save_file
from sharded_run import compare_all
from tiny_models import save_tiny
from transformers import AutoConfig, AutoModelForCausalLM

from rlightning.errors import ConfigError
from rlightning.models import load_config
from rlightning.models.architecture import build_small, check_policy
from rlightning.models.policy import remove_dropout
from rlightning.models.tensor_parallel import check_tensor_parallel, plan_styles

FSDP, TENSOR = [1, 2, 1], [1, 1, 2]
COMPILED = {"gradient_checkpointing": True, "compiles_layers": True}
"""Takes a rank 6 to 10 seconds."""
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True, "vocab_size": 41},
    "llama": {"tie_word_embeddings": False, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "qwen2": {"tie_word_embeddings": True},
    "phi3": {},
    "gemma3_text": {"head_dim": 8, "final_logit_softcapping": 2.0},
}
"""A vocabulary of 41 is cut into 21 and 20 rows; qwen2 has biases; phi3's heads are in one matrix; gemma3 scales what
its tied embedding gives, and caps logits."""


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory, starts_processes: None) -> dict[str, Any]:
    """Return the results of each of two ranks, by case."""
    folder = tmp_path_factory.mktemp("sharded")
    cases: dict[str, Any] = {}
    for kind, config in MODELS.items():
        model = save_tiny(kind, folder / kind, **config)
        cases[kind] = [model, FSDP, {}]
        cases[f"{kind} tensor"] = [model, TENSOR, {"gradient_checkpointing": kind == "llama"}]
    moe: dict[str, Any] = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    cases["converted"] = [save_tiny("qwen3_moe", folder / "moe", **moe), FSDP, {}]
    cases["compiled"] = [cases["qwen3"][0], FSDP, COMPILED]
    cases["in parts"] = [save_in_parts(folder / "parts"), FSDP, {}]
    cases["missing"] = [save_changed(folder / "missing", "model.norm.weight", None), FSDP, {}]
    cases["own head"] = [
        save_changed(folder / "head", "lm_head.weight", torch.ones(40, 32), tie_word_embeddings=True),
        FSDP,
        {},
    ]
    cases["other shape"] = [save_changed(folder / "shape", "model.norm.weight", torch.ones(31)), FSDP, {}]
    one_nan = torch.ones(32).index_fill(0, torch.tensor([31]), torch.nan)  # in the second rank's shard
    cases["not finite"] = [save_changed(folder / "nan", "model.norm.weight", one_nan), FSDP, {}]
    routed = save_tiny("glm4_moe", folder / "routed", head_dim=8)
    by_rank = finish(start_calls(compare_all, 2, folder, list(cases.values()), routed))
    found = {name: [rank["results"][i] for rank in by_rank] for i, name in enumerate(cases)}
    return found | {name: [rank[name] for rank in by_rank] for name in ("clip", "route")}


def save_in_parts(folder: Path) -> str:
    """A model whose weights are in bfloat16 and in several files with an index."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", hidden_size=32, num_hidden_layers=2, vocab_size=40, intermediate_size=64)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return str(folder)


def save_changed(folder: Path, name: str, weight: torch.Tensor | None, **config: Any) -> str:
    """A model one of whose weights is another, or left out."""
    save_tiny("qwen3", folder, head_dim=8, **config)
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights.pop(name, None)
    save_file(weights | ({} if weight is None else {name: weight}), path, metadata={"format": "pt"})
    return str(folder)


CASES = [*MODELS, *[f"{kind} tensor" for kind in MODELS], "converted", "in parts", "compiled"]


@pytest.mark.parametrize("name", CASES)
def test_shards_are_the_whole_model(name: str, compared: dict[str, Any]) -> None:
    check_whole(compared[name])


@pytest.mark.slow
@pytest.mark.processes
def test_compiled_tensor_parallel_shards_are_the_whole_model(tmp_path: Path) -> None:
    routed = save_tiny("glm4_moe", tmp_path / "routed", head_dim=8)
    kinds = ("qwen3", "phi3")  # whose matrices are fused
    cases = [[save_tiny(kind, tmp_path / kind, **MODELS[kind]), TENSOR, COMPILED] for kind in kinds]
    for rank in finish(start_calls(compare_all, 2, tmp_path, cases, routed)):
        check_whole(rank["results"])


def check_whole(compared: list[dict[str, Any]]) -> None:
    for found in compared:
        assert found["names"] and found["weights"] and found["buffers"] and found["shards after no_grad"]
        assert found["logits"] < 1e-5
        assert found["logprobs"] < 1e-5
        assert found["gradients"] < 1e-5


def test_sharded_layers_share_one_graph_per_gradient_mode(compared: dict[str, Any]) -> None:
    assert [found["graphs"] for found in compared["compiled"]] == [2, 2]


def test_sharded_router_computes_in_float32(compared: dict[str, Any]) -> None:
    assert compared["route"] == [["torch.bfloat16", "torch.float32"]] * 2


def test_a_rank_holds_its_share(compared: dict[str, Any]) -> None:
    """Uneven dimensions apart that is a half: of what tensor parallelism leaves whole there are norms alone."""
    for name in ("qwen3", "qwen3 tensor", "llama", "llama tensor", "converted", "in parts"):
        assert [found["share"] for found in compared[name]] == pytest.approx([0.5, 0.5], abs=0.01)


def test_rank_0_sends_only_weights_needing_conversion(compared: dict[str, Any]) -> None:
    assert "rank 0 loads and sends them" in compared["converted"][0]["log"][0]
    assert [found["log"] for name in ("qwen3", "in parts") for found in compared[name]] == [[]] * 4


def test_every_rank_says_what_is_wrong_with_the_weights(compared: dict[str, Any]) -> None:
    for found in compared["missing"]:
        assert "lacks 1 of its weights, such as 'model.norm.weight'" in found["error"]
    for found in compared["own head"]:
        assert "tie_word_embeddings=true in config.json, but its files hold 'lm_head.weight'" in found["error"]
    for found in compared["other shape"]:
        assert "stores 'model.norm.weight' with the shape [31], but its config.json makes it [32]" in found["error"]
    for found in compared["not finite"]:
        assert "has NaN or infinite values in 1 of its weights, such as 'model.norm.weight'" in found["error"]


def test_gradients_are_clipped_by_the_norm_over_all_shards(compared: dict[str, Any]) -> None:
    """12 x 1 and 4 x 1 and 2**2 on shards, 2 x 4**2 whole: the square root of 52, of which 1.3 is left."""
    for found in compared["clip"]:
        assert found["finite"]["is_finite"] and found["finite"]["norm"] == pytest.approx(52**0.5)
    one, two, four = (value * 1.3 / 52**0.5 for value in (1, 2, 4))
    first, second = (found["finite"]["left"] for found in compared["clip"])
    # rank 1 has the last of three rows, one of two, and nothing of one
    assert first == [pytest.approx(values) for values in ([one] * 8, [one] * 2, [two], [four] * 2)]
    assert second == [pytest.approx(values) for values in ([one] * 4, [one] * 2, [], [four] * 2)]


def test_non_finite_gradient_is_dropped_on_all_ranks(compared: dict[str, Any]) -> None:
    for found in compared["clip"]:
        assert not found["not finite"]["is_finite"]
        assert found["not finite"]["left"] == [None] * 4


@pytest.mark.processes
def test_loading_shards_takes_the_memory_of_the_shards(tmp_path: Path) -> None:
    """A model of 190 MB on two ranks; loading it whole is seen to take what it is by the same measure."""
    megabytes, _ = run_script(Path(__file__).parents[2] / "benchmarks" / "sharded_loading.py", 2)
    assert megabytes["whole_model"] > 180
    assert megabytes["shards"] == pytest.approx(megabytes["whole_model"] / 2, rel=0.01)
    assert megabytes["peak_of_loading_shards"] < 1.2 * megabytes["shards"]
    assert megabytes["peak_of_loading_the_whole"] > 0.9 * megabytes["whole_model"]


EXPERTS, ALONE = r"layers\.\*\.mlp\.experts", r"Use tensor_parallel_size=1\.$"


@pytest.mark.parametrize(
    ("kind", "config", "size", "message"),
    [
        ("qwen3", {}, 3, r"num_attention_heads=4 cannot be split over 3 ranks"),
        ("qwen3", {}, 4, r"num_key_value_heads=2 cannot be split over 4 ranks"),
        ("qwen3", {"intermediate_size": 63}, 2, r"intermediate_size=63 cannot be split over 2 ranks"),
        *[
            (kind, {}, 2, rf"its plan asks for 'moe_tp_experts' of '{EXPERTS}', which is not supported\. {ALONE}")
            for kind in ("qwen3_moe", "mixtral", "deepseek_v3")
        ],
        ("gpt2", {}, 2, rf"transformers ships no plan for it\. {ALONE}"),
    ],
)
def test_what_tensor_parallelism_cannot_cut(kind: str, config: dict[str, Any], size: int, message: str) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2} | config
    with pytest.raises(
        ConfigError, match=rf"tensor_parallel_size={size} does not fit model='m' \({kind}\): .*{message}"
    ):
        check_tensor_parallel("m", AutoConfig.for_model(kind, **sizes), size)


@pytest.mark.parametrize(
    ("kind", "left_out"), [("apertus", "layers.0.mlp.act_fn.alpha_p"), ("doge", "layers.0.self_attn.A")]
)
def test_tensor_parallel_plan_missing_parameter_is_refused(kind: str, left_out: str) -> None:
    """Its gradient would be a part of the sum, on each rank another: 70 to 260% off, with nothing to be seen."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    with pytest.raises(ConfigError, match=rf"its '{re.escape(left_out)}' works on parts of cut layers"):
        plan_styles(model)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "phi3"])
def test_plans_shard_attention_and_mlp(kind: str) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, pad_token_id=0))
    assert {"layers.0.self_attn.o_proj", "layers.0.mlp.down_proj"} <= plan_styles(model).keys()


def test_an_architecture_is_checked_without_its_weights(tmp_path: Path) -> None:
    """nemotron's class does not tell attention where a sequence ends."""
    with pytest.raises(ConfigError, match="does not tell attention where a sequence ends"):
        check_policy("m", build_small(load_config(save_tiny("nemotron", tmp_path))))


@pytest.mark.parametrize(
    "kind", ["qwen3", "llama", "qwen2", "mistral", "gemma3_text", "phi3", "gpt2", "gpt_neox", "olmo2"]
)
def test_real_sizes_are_checked_on_a_small_copy(kind: str) -> None:
    """Of the default sizes of each architecture, which are those of models with billions of parameters."""
    config = AutoConfig.for_model(kind)
    remove_dropout(config)
    before = config.to_dict()
    check_policy(kind, build_small(config))
    assert config.to_dict() == before
