"""Engine settings that follow from the work, worked out by hand."""

from itertools import pairwise
from typing import Any

import pytest
from engine_models import configure_engine
from tiny_models import tiny_config
from transformers import Gemma3Config
from vllm.config import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs

from rlightning.errors import ConfigError
from rlightning.rollout.vllm.arguments import argument_names
from rlightning.rollout.vllm.settings import (
    RolloutWork,
    batched_tokens,
    capture_sizes,
    derive_settings,
    graph_settings,
)

LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu")
GSM8K = RolloutWork(num_prompts=64, samples_per_prompt=8, max_prompt_tokens=256)


def longrope(**factors: float) -> dict[str, Any]:
    """Return values of phi3's config.json for positions four times as many as originally."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    return {"rope_scaling": rope | factors, "original_max_position_embeddings": 16}


def test_the_reference_work_on_a_gpu() -> None:
    settings = derive_settings(GSM8K, {}, is_cuda=True)
    assert settings["max_num_seqs"] == 512
    # All prompts and a block for each other sample would be 64 x 256 + 448 x 16 = 23,552 tokens.
    assert settings["max_num_batched_tokens"] == 8192
    # As vLLM would, for 512: 3 and 31 sizes up to 248, and 17 up to 512. Then 14 for steps in which turns begin.
    sizes = settings["cudagraph_capture_sizes"]
    assert sizes == [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16), *range(544, 769, 32), *range(896, 1537, 128)]
    assert len(sizes) == 51 + 8 + 6
    assert set(settings) <= argument_names()


def test_steps_in_which_turns_begin_are_one_cuda_graph() -> None:
    config = tiny_config("qwen3")
    arguments: Any = {"model": "unread", **graph_settings(config, "bfloat16", {})}
    assert EngineArgs(**arguments).compilation_config.cudagraph_mode.mixed_mode() is CUDAGraphMode.FULL
    assert graph_settings(config, "float32", {}) == graph_settings(None, "bfloat16", {}) == {}
    assert graph_settings(Gemma3Config(), "bfloat16", {}) == {}  # with images
    for name in ("compilation_config", "enforce_eager", "optimization_level"):
        assert graph_settings(config, "bfloat16", {name: 1}) == {}
    assert graph_settings(config, "bfloat16", {"cudagraph_capture_sizes": [8]})


@pytest.mark.parametrize(
    ("work", "on_gpu", "on_cpu"),
    [((4, 2), 8, 8), ((1, 2), 8, 8), ((40, 5), 200, 200), ((300, 1), 300, 256), ((512, 8), 1024, 256)],
)
def test_all_completions_at_once_up_to_a_limit(work: tuple[int, int], on_gpu: int, on_cpu: int) -> None:
    rollout = RolloutWork(num_prompts=work[0], samples_per_prompt=work[1], max_prompt_tokens=16)
    assert derive_settings(rollout, {}, is_cuda=True)["max_num_seqs"] == on_gpu
    cpu = derive_settings(rollout, {}, is_cuda=False)
    assert cpu == {"max_num_seqs": on_cpu, "max_num_batched_tokens": 2048}


@pytest.mark.parametrize(
    ("work", "tokens"),
    [
        ((4, 2, 16), 2048),  # 4 x 16 + 4 x 16 would do
        ((16, 8, 256), 8192),  # 16 x 256 + 112 x 16 = 5,888
        ((8, 8, 300), 4096),  # 8 x 300 + 56 x 16 = 3,296
        ((8, 8, 184), 2048 << 1),  # 8 x 184 + 56 x 16 = 2,368
        ((8, 8, 144), 2048),  # 2,048 itself
        ((1024, 1, 4), 4096),
    ],
)
def test_a_batch_holds_all_prompts(work: tuple[int, int, int], tokens: int) -> None:
    rollout = RolloutWork(num_prompts=work[0], samples_per_prompt=work[1], max_prompt_tokens=work[2])
    assert batched_tokens(rollout) == tokens


def test_graphs_are_captured_for_what_can_come() -> None:
    assert capture_sizes(1, 1) == [1]
    assert capture_sizes(10, 10) == [1, 2, 4, 8, 10]
    assert capture_sizes(128, 128)[-3:] == [112, 120, 128]
    assert capture_sizes(300, 300)[-4:] == [256, 272, 288, 300]
    assert capture_sizes(10, 2048) == [1, 2, 4, 8, *range(10, 267, 32), *range(394, 1035, 128)]
    assert capture_sizes(256, 300)[-3:] == [248, 256, 288]
    largest = capture_sizes(1024, 1024)
    assert largest[-3:] == [960, 992, 1024] and len(largest) == 51 + 16
    assert all(above <= 1.125 * below or above - below <= 8 for below, above in pairwise(largest))


def test_given_settings_stay_and_others_fit_them() -> None:
    settings = derive_settings(GSM8K, {"max_num_seqs": 10_000, "block_size": 32}, is_cuda=True)
    assert settings["max_num_seqs"] == settings["max_num_batched_tokens"] == 10_000  # vLLM refuses fewer tokens
    assert settings["cudagraph_capture_sizes"][-1] == 10_000
    assert settings["block_size"] == 32
    assert derive_settings(GSM8K, {"max_num_batched_tokens": 2048}, is_cuda=True)["max_num_batched_tokens"] == 2048
    for tokens in (4, 100):
        settings = derive_settings(GSM8K, {"max_num_batched_tokens": tokens}, is_cuda=True)
        assert settings["max_num_seqs"] == settings["max_num_batched_tokens"] == tokens
    own = "max_cudagraph_capture_size", "cudagraph_capture_sizes"
    for name in (*own, "compilation_config", "enforce_eager", "optimization_level"):
        settings = derive_settings(GSM8K, {name: 1}, is_cuda=True)
        assert settings.get("cudagraph_capture_sizes", 1) == 1


@pytest.mark.parametrize(
    ("kind", "device", "given", "backend"),
    [
        ("qwen3_moe", "cuda:0", {}, "triton"),
        ("qwen3_moe", "cuda:0", {"moe_backend": "batched_triton"}, "batched_triton"),
        ("qwen3", "cuda:0", {}, None),
        ("qwen3", "cuda:0", {"moe_backend": "flashinfer_cutlass"}, "flashinfer_cutlass"),
        ("qwen3_moe", "cpu", {}, None),
    ],
)
def test_experts_are_computed_as_they_are_stored(
    kind: str, device: str, given: dict[str, str], backend: str | None
) -> None:
    config = configure_engine(device, given, model_config=tiny_config(kind))
    assert config.engine_args.get("moe_backend") == backend


@pytest.mark.parametrize(
    ("kind", "sizes", "given", "device", "message"),
    [
        *(
            (kind, {}, {}, "cpu", rf"vLLM on a CPU gives a {kind} other log-prob")
            for kind in ("ernie4_5_moe", "apertus")
        ),
        *((kind, {}, {}, "cpu", r"vLLM on a CPU gives latent attention \(kv_lora_rank\) other") for kind in LATENT),
        ("qwen3_moe", {}, {"moe_backend": "flashinfer_cutlass"}, "cuda:0", "moe_backend=flashinfer_cutlass may bring"),
        ("qwen3_moe", {}, {"moe_backend": "auto"}, "cuda:0", "moe_backend=auto may bring experts' weights into"),
        # 64 positions of 16 originally: sqrt(1 + ln 4 / ln 16) is 1.2247
        ("phi3", {"attention_factor": 1.3}, {}, "cpu", r"attention_factor=1\.3 make it 1\.3 .* and 1\.225 in vLLM"),
        ("phi3", {"attention_factor": 1.3}, {}, "cuda:0", r"attention_factor=1\.3 make it 1\.3 .* and 1\.225 in vLLM"),
        (
            "phi3",
            {"short_mscale": 1.1},
            {},
            "cpu",
            r"short_mscale=1\.1 make it 1\.225 in transformers and 1\.1 in vLLM",
        ),
        ("phi3", {"factor": 16.0}, {}, "cpu", r"factor=16\.0 make it 1\.414 in transformers"),  # sqrt(2)
    ],
)
def test_what_vllm_computes_otherwise_is_refused(
    kind: str, sizes: dict[str, Any], given: dict[str, Any], device: str, message: str
) -> None:
    config = tiny_config(kind, **(longrope(**sizes) if sizes else {}))
    with pytest.raises(ConfigError, match=message) as error:
        configure_engine(device, given, model_config=config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["ernie4_5_moe", "apertus", "deepseek_v3", "phi3"])
def test_models_that_vllm_computes_alike_are_taken(kind: str) -> None:
    # a factor of 1.2247 is what the lengths make it
    sizes = longrope(attention_factor=1.2247) if kind == "phi3" else {}
    configure_engine("cuda:0", {}, model_config=tiny_config(kind, **sizes))


@pytest.mark.parametrize(
    ("placement", "sleep", "can_sleep"),
    [("colocated", True, True), ("colocated", False, False), ("standalone", True, False)],
)
def test_engines_not_sharing_actor_device_never_sleep(
    placement: str, sleep: bool, can_sleep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    config = configure_engine("cuda:0", {}, placement=placement, sleep=sleep)
    assert config.can_sleep is can_sleep
    assert bool(config.engine_args.get("enable_sleep_mode")) is can_sleep
