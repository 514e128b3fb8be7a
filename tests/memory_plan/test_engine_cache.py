"""What an engine is told to take for its KV cache, and that the plan says the same."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planned import TWO_PROMPTS
from tiny import save_model

from rlightning.callbacks import VLLMRollout
from rlightning.errors import ConfigError
from rlightning.models import load_config
from rlightning.parallel.device import MemoryUse
from rlightning.rollout.engine_memory import read_engine
from rlightning.rollout.vllm import memory
from rlightning.rollout.vllm.memory import kv_cache_setting

GPU = torch.device("cuda")
ARGUMENTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 40,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 2048,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two layers, two heads for keys and values."""
    return save_model(tmp_path_factory.mktemp("model"), hidden_size=64)


@pytest.fixture
def device_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Say how many bytes the GPU has."""

    def say(total: int) -> None:
        use = MemoryUse(allocated=0, reserved=0, peak=0, free=total, total=total)
        monkeypatch.setattr(memory, "memory_use", lambda device: use)

    return say


def cache_of(folder: str, arguments: dict[str, Any], device: torch.device = GPU, **sharing: bool) -> dict[str, int]:
    return kv_cache_setting(arguments, load_config(folder), device, **sharing)


def token_bytes(folder: str, itemsize: int) -> int:
    config = load_config(folder)
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize)


def test_gpu_kv_cache_never_exceeds_what_sequences_need(folder: str, device_of: Any) -> None:
    device_of(1 << 34)
    arguments = ARGUMENTS | {"gpu_memory_utilization": 0.5}
    # 40 tokens are three blocks of 16, and there is one more for each of 8 sequences.
    assert cache_of(folder, arguments) == {"kv_cache_memory_bytes": 8 * 64 * token_bytes(folder, 2)}
    larger = arguments | {"block_size": 64, "kv_cache_dtype": "fp8"}
    assert cache_of(folder, larger) == {"kv_cache_memory_bytes": 8 * 128 * token_bytes(folder, 1)}
    device_of(1 << 20)  # whatever is left of it
    assert cache_of(folder, arguments) == {}


def test_engines_starting_together_get_explicit_cache_sizes(folder: str, device_of: Any) -> None:
    """Each would take what the other has taken for its own."""
    arguments = ARGUMENTS | {"gpu_memory_utilization": 0.5}
    engine = read_engine(load_config(folder), arguments)
    for total in range(1 << 20, 1 << 23, 1 << 19):
        device_of(total)
        available = engine.available(1 << 21) + (total - (1 << 21)) // 2
        if available < engine.sequence:
            with pytest.raises(ConfigError, match=r"^An engine's part of .*, 0\.5, has no room for a sequence of 40 "):
                cache_of(folder, arguments, is_alone=False)
            continue
        told = cache_of(folder, arguments, is_alone=False)["kv_cache_memory_bytes"]
        assert told == min(available - available // 10, engine.wanted)


def test_engine_beside_actor_gets_explicit_cache_size(folder: str, tmp_path: Path, device_of: Any) -> None:
    """vLLM would take the actor, which is loaded while it measures, for its own."""
    total = 30 << 30
    device_of(total)
    config, batch = load_config(folder), replace(TWO_PROMPTS, prompts_per_step=1 << 20, samples_per_prompt=8)
    module = SimpleNamespace(model_path=folder, max_model_length=config.max_position_embeddings, plan=batch)
    rollout = VLLMRollout(max_new_tokens=24, engine={"max_num_seqs": 1 << 20})
    [engine] = rollout.options.configure(module, GPU, rollout.sampling, 16, tmp_path)
    arguments = dict(engine.engine_args)
    told = arguments.pop("kv_cache_memory_bytes")
    assert told == read_engine(config, arguments).available(total) - (1 << 30)
    assert cache_of(folder, arguments, is_alone=True) == {}


def test_on_a_cpu_up_to_a_limit(folder: str) -> None:
    arguments = ARGUMENTS | {"dtype": "float32"}
    told = cache_of(folder, arguments, torch.device("cpu"))
    assert told == {"kv_cache_memory_bytes": 8 * 256 * token_bytes(folder, 4)}  # blocks of 128 tokens
    many = arguments | {"max_num_seqs": 1 << 20}
    assert cache_of(folder, many, torch.device("cpu")) == {"kv_cache_memory_bytes": 1 << 30}


@pytest.mark.parametrize(("number", "oversample"), [(1, 0.0), (3, 0.0), (3, 0.5)])
@pytest.mark.parametrize("engine", [{}, {"max_num_seqs": 24}, {"kv_cache_memory_bytes": 1 << 24}])
def test_the_plan_is_about_the_engines_that_fit_starts(
    folder: str, tmp_path: Path, device_of: Any, engine: dict[str, Any], number: int, oversample: float
) -> None:
    device_of(1 << 34)
    batch = replace(TWO_PROMPTS, prompts_per_step=10, samples_per_prompt=4, max_tokens_per_microbatch=4096)
    config = load_config(folder)
    module = SimpleNamespace(model_path=folder, max_model_length=config.max_position_embeddings, plan=batch)
    rollout = VLLMRollout(max_new_tokens=24, engine=engine, num_engines=number, oversample=oversample)
    started = [one.engine_args for one in rollout.options.configure(module, GPU, rollout.sampling, 16, tmp_path)]
    assert len({arguments["seed"] for arguments in started}) == len(started) == number
    planned = rollout.options.plan_memory(config, batch, max_prompt_tokens=16, longest=40, num_ranks=1)
    assert planned is not None and planned.num_engines == number
    completions = 4 * {(1, 0.0): 10, (3, 0.0): 4, (3, 0.5): 5}[number, oversample]  # of the prompts one may get
    assert planned.utilization == pytest.approx(0.45)
    for arguments in started:
        assert number * arguments["gpu_memory_utilization"] == pytest.approx(0.45)
        assert arguments["max_num_seqs"] == planned.max_sequences / number == engine.get("max_num_seqs", completions)
        assert arguments["max_num_batched_tokens"] == 2048
        assert arguments["max_num_seqs"] in arguments["cudagraph_capture_sizes"]
        largest = arguments["cudagraph_capture_sizes"][-1]  # with 32 sums in float32 a token, head and number of a head
        heads = config.num_attention_heads * config.head_dim
        assert planned.asleep == number * 32 * 4 * largest * heads
        assert arguments["kv_cache_memory_bytes"] == planned.kv_cache(1 << 34) / number
