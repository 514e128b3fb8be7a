"""Runs with an adapter through the real Trainer and a real engine."""

import logging
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_models import engine_config
from engine_run import (
    Origins,
    Witness,
    check_staleness,
    find_core,
    make_data,
    make_module,
    make_rollout,
    make_trainer,
    versions,
)
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from rank_processes import finish, start_calls
from tiny import full_weights
from transformers import GPTBigCodeConfig, Olmo2Config, PreTrainedConfig

from rlightning.callbacks import TransformersRollout
from rlightning.callbacks.rollout import RolloutCallback
from rlightning.errors import ConfigError, EngineError
from rlightning.hooks import RLCallback
from rlightning.models import Adapter
from rlightning.models.adapter import linear_layers
from rlightning.parallel.fsdp import FSDP
from rlightning.rollout import engine_options
from rlightning.rollout.vllm.adapter_support import find_model_class, find_obstacle, supported_rank, supports_adapters

ADAPTER = Adapter(rank=4)


def fit(
    folder: Path,
    model: str,
    rollout: RolloutCallback,
    *callbacks: Callback,
    ckpt_path: Path | None = None,
    **kwargs: Any,
) -> tuple[Any, Witness]:
    """A run whose learning rate changes the adapter by far more than the canary tolerates, in each step."""
    torch.manual_seed(0)
    witness = Witness()
    module = make_module(model, adapter=ADAPTER, kl_coef=0.1, lr=0.1, validate_first=False)
    trainer = make_trainer(folder, 3, rollout, witness, *callbacks, **kwargs)
    trainer.fit(module, make_data(folder), ckpt_path=ckpt_path)
    return module, witness


@pytest.fixture(scope="module")
def saved(engine_model: str, tmp_path_factory: pytest.TempPathFactory, starts_processes: None) -> tuple[Any, ...]:
    """A run with an engine that is sent the adapter; its module, its witness and its checkpoint after two steps."""
    folder = tmp_path_factory.mktemp("saved")
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    return *fit(folder, engine_model, make_rollout(), saves, enable_checkpointing=True), folder / "step=2.ckpt"


@pytest.mark.processes
@pytest.mark.parametrize("sends", [None, pytest.param(False, marks=pytest.mark.slow)])
def test_what_is_sampled_is_the_adapted_actors(
    sends: bool | None, saved: tuple[Any, ...], engine_model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    module, witness, _ = (
        saved if sends is None else (*fit(tmp_path, engine_model, make_rollout(send_adapter=sends)), None)
    )
    assert module.sends_adapter is (sends is None)
    assert len(witness.steps) == 3
    for number, step in enumerate(witness.steps):
        assert step["policy/rollout_gap_max"] < 1e-4
        assert versions(witness.batches[number]) == [number]
    assert witness.steps[-1]["policy/kl"] > 0.01
    # an engine that is sent the adapter proves once that it uses it
    assert witness.events.count("sync 0") == 2
    assert ("sent base and adapter merged, rounded to their dtype: rollout.send_adapter=false" in caplog.text) is (
        sends is False
    )


@pytest.mark.parametrize("can_sleep", [True, False])
def test_start_says_that_an_engine_that_sleeps_is_sent_the_base_again(
    can_sleep: bool, engine_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    module = make_module(engine_model, adapter=ADAPTER)
    config = replace(engine_config(engine_model, Path("engine.log")), can_sleep=can_sleep)
    make_rollout().options.choose_adapter(module, config)
    assert module.sends_adapter
    assert ("each weight sync sends it with the adapter. rollout.sleep: false" in caplog.text) is can_sleep


@pytest.mark.slow
@pytest.mark.processes
def test_resumed_run_sends_and_proves_the_restored_adapter(
    saved: tuple[Any, ...], engine_model: str, tmp_path: Path
) -> None:
    module, witness = fit(tmp_path, engine_model, make_rollout(), ckpt_path=saved[2])
    assert module.sends_adapter and module.weight_version == 3
    assert [event for event in witness.events if event.startswith("sync")] == ["sync 2", "sync 2"]
    assert versions(witness.batches[0]) == [2] and witness.steps[0]["policy/rollout_gap_max"] < 1e-4
    assert witness.steps[0]["policy/kl"] > 0.01  # it is not a new one


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("placement", ["colocated", "standalone"])
def test_engine_that_cannot_wrap_a_layer_starts_again_for_merged_weights(
    placement: Any, engine_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Which only vLLM's start shows."""
    norms = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["norm"]}  # no linear layers
    monkeypatch.setattr(engine_options, "engine_arguments", lambda adapter: norms)
    module, witness = fit(tmp_path, engine_model, make_rollout(placement=placement))
    assert module.sends_adapter is False and len(witness.steps) == 3
    assert all(step["policy/rollout_gap_max"] < 1e-4 for step in witness.steps)
    (line,) = [record.getMessage() for record in caplog.records if "sent base and adapter merged" in record.message]
    assert "LoRA target module model." in line and "rollout.send_adapter: false spares the attempt" in line


def cpu_ticks(process: int) -> int:
    """User time of a process, in hundredths of a second."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11])


class HoldEngine(RLCallback):
    """Stops the engine while a step is trained on: what is under way then is under way at the next sync."""

    core: int | None = None

    def on_rollout_end(self, trainer: Any, module: Any, batch: Any) -> None:
        (engine,) = module.sampler._engines.samplers
        self.core = find_core(engine.process.pid)
        # Completions of one length end together, and the next have no tokens yet: until it has computed some.
        begun, deadline = cpu_ticks(self.core), time.monotonic() + 2
        while cpu_ticks(self.core) < begun + 5 and time.monotonic() < deadline:
            time.sleep(0.005)
        os.kill(self.core, signal.SIGSTOP)

    def on_weight_sync_start(self, trainer: Any, module: Any, weight_version: int) -> None:
        self.release()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.release()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.release()

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self.release()

    def release(self) -> None:
        core, self.core = self.core, None
        if core is not None:
            with suppress(ProcessLookupError):  # after an error the rollout callback may have ended the engine
                os.kill(core, signal.SIGCONT)


@pytest.mark.processes
@pytest.mark.slow
def test_tokens_in_flight_have_their_adapters_version(engine_model: str, tmp_path: Path) -> None:
    """Several adapters sample one completion, each none of whose tokens is older than allowed."""
    torch.manual_seed(0)
    witness, origins = Witness(), Origins()
    rollout = make_rollout(
        placement="standalone",
        max_staleness=2,
        max_new_tokens=96,
        cache_after_sync="recompute",
        send_adapter=True,
        verify_every=10,  # requests for verification would wait for all that is in flight
        verify_trajectories=False,
        engine={"max_num_seqs": 2},  # of 24 in flight: at each sync some have begun and not ended
    )
    module = make_module(engine_model, adapter=ADAPTER, lr=0.1, validate_first=False)
    make_trainer(tmp_path, 3, rollout, origins, witness, HoldEngine()).fit(module, make_data(tmp_path))
    assert len(witness.batches) == 3
    check_staleness(witness.batches, 2)
    assert max(origins.gaps) < 1e-4
    sampled_by = [sample.weight_versions for batch in witness.batches for sample in batch.completions]
    assert all(list(versions) == sorted(versions) for versions in sampled_by)
    assert any(len(set(versions)) > 1 for versions in sampled_by), "no sync came amid a completion"
    batch, first, last = witness.batches[-1], origins.actors[0], origins.actors[-1]
    logprobs = [module.evaluate_logprobs(batch, actor, temperature=1.0, max_tokens=10_000) for actor in (first, last)]
    assert (logprobs[0] - logprobs[1])[batch.is_sampled].abs().max() > 0.1, "adapters cannot be told apart"


@pytest.mark.long
def test_sampler_in_the_trainers_process_proves_the_adapter(
    engine_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As engines do; one that is sent the base alone is found, though a new adapter changes nothing yet."""
    rollout: dict[str, Any] = {"max_new_tokens": 8, "seed": 0, "verify_every": 1}
    module, witness = fit(tmp_path, engine_model, TransformersRollout(**rollout))
    assert [event for event in witness.events if event.startswith("sync")] == ["sync 0", "sync 0", "sync 1", "sync 2"]
    assert all(step["policy/rollout_gap_max"] < 1e-5 for step in witness.steps) and len(witness.steps) == 3

    monkeypatch.setattr(type(module), "named_weights", type(module).base_weights)
    with pytest.raises(EngineError, match="it does not apply the adapter"):
        fit(tmp_path, engine_model, TransformersRollout(**rollout))


def on_two_ranks(folder: Path, model: str) -> list[float]:
    rank = int(os.environ["RANK"])
    module, witness = fit(folder / f"rank{rank}", model, make_rollout(), devices=2, strategy=FSDP())
    weights = full_weights(module.loaded_actor)
    if rank == 0:
        torch.save(weights, folder / "weights.pt")
    return [step["policy/rollout_gap_max"] for step in witness.steps]


@pytest.mark.slow
@pytest.mark.processes
def test_two_ranks_gather_the_adapter_for_their_engines(engine_model: str, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank{rank}").mkdir()
    gaps = finish(start_calls(on_two_ranks, 2, tmp_path, engine_model))
    assert all(gap < 1e-4 for rank in gaps for gap in rank) and len(gaps[0]) == 3
    weights = torch.load(tmp_path / "weights.pt")
    assert any(weight.abs().max() > 0.1 for name, weight in weights.items() if "lora_B" in name)


def test_adapter_support_is_read_in_vllms_source() -> None:
    found = {name: find_model_class(name) for name in ("Qwen3ForCausalLM", "MistralForCausalLM", "NoneForCausalLM")}
    assert found["NoneForCausalLM"] is None
    for name in ("Qwen3ForCausalLM", "MistralForCausalLM"):  # one by itself, one by what it derives from
        place = found[name]
        assert place is not None and supports_adapters(*place)
    assert not supports_adapters("vllm.model_executor.models.interfaces", "SupportsPP")
    assert find_model_class("DeepseekV4ForCausalLM") == ("vllm.models.deepseek_v4", "DeepseekV4ForCausalLM")
    assert [supported_rank(rank) for rank in (1, 3, 8, 33, 512)] == [1, 8, 8, 64, 512]


@pytest.mark.parametrize(
    ("config", "obstacle"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, None),
        ({"architectures": ["NoneForCausalLM", "Qwen3ForCausalLM"]}, None),
        ({"architectures": ["NoneForCausalLM"]}, "vLLM has no model class of its own for NoneForCausalLM"),
        ({"architectures": None, "model_type": "my_model"}, "vLLM has no model class of its own for my_model"),
        ({"architectures": ["BloomForCausalLM"]}, "vLLM's BloomForCausalLM takes no adapters"),
    ],
)
def test_model_to_which_vllm_applies_no_adapter_is_named(
    config: dict[str, Any], obstacle: str | None, engine_model: str
) -> None:
    module = make_module(engine_model, adapter=ADAPTER)
    assert module.adapter is not None
    vars(module.model_config).update(config)
    assert find_obstacle(module.adapter, module.model_config) == obstacle


@pytest.mark.parametrize(
    ("config", "targets", "layer"),
    [
        (GPTBigCodeConfig(n_embd=32, n_head=2, n_layer=1), ("c_attn", "c_fc"), "transformer.h.0.attn.c_attn"),
        (GPTBigCodeConfig(n_embd=32, n_head=2, n_layer=1), ("c_fc", "c_proj"), None),
        (Olmo2Config(hidden_size=32, num_attention_heads=2, num_hidden_layers=1), ("q_proj", "o_proj"), None),
    ],
)
def test_packed_projection_of_transformers_backend_is_merged(
    config: PreTrainedConfig, targets: tuple[str, ...], layer: str | None
) -> None:
    config.architectures = [{"gpt_bigcode": "GPTBigCodeForCausalLM"}.get(config.model_type, "Olmo2ForCausalLM")]
    modules = {name: shape for name, shape in linear_layers(config).items() if name.endswith(targets)}
    adapter: Any = SimpleNamespace(rank=4, modules=modules)
    obstacle = find_obstacle(adapter, config)
    if layer is None:
        assert obstacle is None
    else:
        assert obstacle is not None and f"TransformersForCausalLM takes no adapter of {layer}, one layer" in obstacle


def test_engine_without_room_gets_merged_weights(engine_model: str) -> None:
    module, device = make_module(engine_model, adapter=ADAPTER), torch.device("cpu")
    assert module.adapter is not None
    module.adapter = replace(module.adapter, rank=1000)  # more than such a model could use
    assert make_rollout().options.adapter_obstacle(module, device) == "vLLM takes ranks of up to 512, not 1000"
    with pytest.raises(ConfigError, match=r"rollout\.send_adapter=true cannot be: vLLM takes ranks of up to 512"):
        make_rollout(send_adapter=True).options.adapter_obstacle(module, device)
    assert make_rollout().options.adapter_obstacle(make_module(engine_model, adapter=ADAPTER), device) is None
    assert make_rollout().options.adapter_obstacle(make_module(engine_model), device) is None


def test_float32_engines_on_gpus_get_merged_weights(engine_model: str) -> None:
    """vLLM's kernels for adapters assert half precision as the engine starts."""
    module, cuda = make_module(engine_model, adapter=ADAPTER), torch.device("cuda", 0)
    options = make_rollout(dtype="float32").options
    assert options.adapter_obstacle(module, torch.device("cpu")) is None
    expected = "vLLM's kernels for adapters on GPUs take half precision, not float32"
    assert options.adapter_obstacle(module, cuda) == expected
    assert make_rollout(dtype="bfloat16").options.adapter_obstacle(module, cuda) is None
