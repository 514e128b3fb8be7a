"""What of ``rollout.engine`` is passed through, and what is refused in a line before anything starts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_models import configure_engine
from transformers import Qwen3Config

from rlightning.errors import ConfigError
from rlightning.rollout import Sampling
from rlightning.rollout.engine_options import EngineOptions
from rlightning.rollout.sampler import MAX_SUPPORT
from rlightning.rollout.vllm.arguments import COUNTS, OF_THE_RUN, argument_names, check_given
from rlightning.rpc.run_key import RUN_KEY_VARIABLE

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


CONFIG = Qwen3Config(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16, hidden_size=64)


def configure(device: torch.device, max_prompt_tokens: int | None = 16, model_config: Any = None, **given: Any) -> Any:
    """Arguments of a run's engine: prompts of 16 tokens and 40 more, of a model of 256 positions."""
    return configure_engine(
        str(device), given, model_config=model_config, max_prompt_tokens=max_prompt_tokens
    ).engine_args


def test_arguments_that_no_rule_names_pass() -> None:
    check_given({"max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 28, "tensor_parallel_size": 2})
    check_given({"data_parallel_size": 1, "kv_cache_dtype": "fp8", "attention_backend": "FLASHINFER", "block_size": 32})
    check_given({"max_model_len": 128, "enforce_eager": True, "scheduler_cls": None, "max_num_seqs": None})


def test_argument_name_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'max_num_seqs'\?"):
        check_given({"max_num_seq": 8})


@pytest.mark.parametrize("name", [name for names in OF_THE_RUN.values() for name in names])
def test_argument_of_the_run_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^rollout\.engine\.{name} cannot be set: [^\n]+\.$"):
        check_given({name: "x"})


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("seed", "use rollout.seed"),
        ("dtype", "use rollout.dtype"),
        ("quantization", "all weights come from the trainer, in rollout.dtype"),
        ("tokenizer", "the tokenizer of model.model"),
        ("override_generation_config", "sampling values are keys of rollout"),
        ("logprobs_mode", "after the temperature"),
        ("hf_overrides", "model.model"),
        ("gpu_memory_utilization", "use rollout.gpu_memory_utilization"),
    ],
)
def test_refused_argument_names_what_decides(name: str, way_out: str) -> None:
    with pytest.raises(ConfigError, match=way_out):
        EngineOptions(arguments={name: "x"}).check()


@pytest.mark.parametrize("name", ["data_parallel_size", "pipeline_parallel_size"])
def test_engines_are_parallel_by_tensor_alone(name: str) -> None:
    message = rf"^rollout\.engine\.{name}=2 must be 1: .*tensor_parallel_size.*rollout\.num_engines"
    with pytest.raises(ConfigError, match=message):
        EngineOptions(arguments={name: 2}).check()


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1, "8", 1.5, True])
def test_count_is_a_whole_number_from_1(name: str, value: Any) -> None:
    if name not in argument_names():
        pytest.skip(f"the installed vLLM has no {name}")
    with pytest.raises(ConfigError, match=rf"rollout\.engine\.{name}={value} must be a number, at least 1"):
        check_given({name: value})


def test_executor_must_end_with_the_engine() -> None:
    check_given({"distributed_executor_backend": "mp"})
    with pytest.raises(ConfigError, match=r"distributed_executor_backend=ray must be one of mp, uni"):
        check_given({"distributed_executor_backend": "ray"})


@pytest.mark.parametrize("device", [CPU, GPU])
def test_max_model_len_holds_prompt_and_completion(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert configure(device)["max_model_len"] == 56
    for length in (56, 100, 256):
        assert configure(device, max_model_len=length)["max_model_len"] == length
    assert configure(device, max_model_len=None)["max_model_len"] == 56
    # 55 would cut the longest completion of the longest prompt; the model has no position for token 257.
    for length in (1, 55, 257):
        message = (
            rf"^rollout\.engine\.max_model_len={length} must be from 56 \(16 of a prompt \+ "
            r"rollout\.max_new_tokens=40\) to 256, the model's positions\. Leave it out\.$"
        )
        with pytest.raises(ConfigError, match=message):
            configure(device, max_model_len=length)


@pytest.mark.parametrize(
    ("device", "engine", "least"),
    [
        (CPU, {"num_gpu_blocks_override": 1}, 2),  # 56 tokens are in one block of 128
        (CPU, {"num_gpu_blocks_override": 4, "block_size": 16}, 5),  # in four of 16
        (GPU, {"num_gpu_blocks_override": 1}, 2),
        # 4 layers x 2 heads x (keys and values of 16 numbers) = 256 numbers a token
        (CPU, {"kv_cache_memory_bytes": 4096}, 2 * 128 * 256 * 4),
        (CPU, {"kv_cache_memory_bytes": 81919, "block_size": 16}, 5 * 16 * 256 * 4),
        (GPU, {"kv_cache_memory_bytes": 40959}, 5 * 16 * 256 * 2),
        (GPU, {"kv_cache_memory_bytes": 20479, "kv_cache_dtype": "fp8"}, 5 * 16 * 256),
    ],
)
def test_kv_cache_holds_the_longest_sequence(
    device: torch.device, engine: dict[str, Any], least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    name, value = next(iter(engine.items()))
    with pytest.raises(
        ConfigError, match=rf"^rollout\.engine\.{name}={value} must be at least {least}: .* Leave it out"
    ):
        configure(device, model_config=CONFIG, **engine)
    assert configure(device, model_config=CONFIG, **engine | {name: least})[name] == least


def test_kv_cache_of_sliding_windows_is_vllms_matter() -> None:
    config = Qwen3Config(**CONFIG.to_dict() | {"layer_types": ["sliding_attention"] * 4, "sliding_window": 8})
    given = {"kv_cache_memory_bytes": 4096, "num_gpu_blocks_override": 1}
    assert given.items() <= configure(CPU, model_config=config, **given).items()


def test_max_model_len_of_unknown_prompts_holds_completion() -> None:
    assert configure(CPU, None)["max_model_len"] == 256
    assert configure(CPU, None, max_model_len=64)["max_model_len"] == 64
    with pytest.raises(ConfigError, match=r"max_model_len=40 must be from 41 \(1 of a prompt"):
        configure(CPU, None, max_model_len=40)


def test_prompts_are_read_whole_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "enable_chunked_prefill" not in configure(GPU)
    derived = configure(CPU, max_num_batched_tokens=100)
    assert (derived["enable_chunked_prefill"], derived["max_num_batched_tokens"]) == (False, 100)
    for wrong, message in (
        ({"enable_chunked_prefill": True}, r"enable_chunked_prefill=True cannot be set on a CPU"),
        ({"long_prefill_token_threshold": 8}, r"long_prefill_token_threshold=8 cannot be set on a CPU"),
        ({"max_num_batched_tokens": 55}, r"max_num_batched_tokens=55 must be at least max_model_len=56 on a CPU"),
    ):
        with pytest.raises(ConfigError, match=message):
            configure(CPU, **wrong)
        assert set(wrong) <= configure(GPU, **wrong).keys()


def test_engine_seeds_differ_by_engine_and_run() -> None:
    module = SimpleNamespace(model_path="unused", max_model_length=256)
    options = EngineOptions(num_engines=4, arguments={"kv_cache_memory_bytes": 1 << 28})
    seeds = [
        config.engine_args["seed"]
        for seed in (0, 1, 2, 3)
        for config in options.configure(module, CPU, Sampling(seed=seed), 16, Path("unused"))
    ]
    assert len(set(seeds)) == 16  # seed plus number would make 7
    assert all(0 <= seed < 1 << 31 for seed in seeds)  # what vLLM hands on to NumPy


def test_engines_by_url_are_standalone_and_different_ones() -> None:
    url = "tcp://127.0.0.1:8100"
    assert EngineOptions(placement="standalone", engines=(url,)).engines == (url,)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"engines": (url,)}, "needs placement: standalone"),
        ({"engines": (url, url), "placement": "standalone"}, "names one twice"),
        (
            {"engines": (url,), "num_engines": 2, "placement": "standalone"},
            r"num_engines=2 is not the number of .* 1\.",
        ),
        ({"engines": ("here",), "placement": "standalone"}, "'here' is no address"),
        ({"weight_folder": Path("w")}, "weight_folder=w needs placement: standalone"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ConfigError, match=message):
            EngineOptions(**arguments)


def test_engines_of_other_hosts_need_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    options = EngineOptions(placement="standalone", engines=("tcp://127.0.0.1:1", "tcp://192.0.2.1:8100"))
    monkeypatch.delenv(RUN_KEY_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=rf"rollout\.engines=192\.0\.2\.1 is no loopback address.*{RUN_KEY_VARIABLE}"):
        options.check()
    monkeypatch.setenv(RUN_KEY_VARIABLE, "secret")
    options.check()


def test_standalone_engines_share_the_memory_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    module = SimpleNamespace(model_path="unused", max_model_length=256)
    options = EngineOptions(placement="standalone", num_engines=3, arguments={"kv_cache_memory_bytes": 1 << 28})
    found = options.configure(module, GPU, Sampling(), 16, Path("unused"))
    assert [one.visible_devices for one in found] == [("1",), ("2",), ("1",)]
    assert [one.engine_args["gpu_memory_utilization"] for one in found] == [0.45, 0.9, 0.45]


def test_logprobs_are_of_the_distribution_sampled_from() -> None:
    """The first weights come by the first sync, and a sampled token comes on top of a support."""
    arguments = configure(CPU)
    expected = {"logprobs_mode": "processed_logprobs", "max_logprobs": MAX_SUPPORT + 1, "load_format": "dummy"}
    assert arguments.items() >= expected.items()


def test_engines_that_serve_other_hosts_draw_other_numbers() -> None:
    module = SimpleNamespace(model_path="unused", max_model_length=256)
    options = EngineOptions(arguments={"kv_cache_memory_bytes": 1 << 28})
    seeds = {
        options.configure_served(module, CPU, Sampling(), 16, Path("unused")).engine_args["seed"] for _ in range(4)
    }
    assert len(seeds) == 4
