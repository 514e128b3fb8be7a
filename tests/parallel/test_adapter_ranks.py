"""Adapters on several ranks: the steps of one process, however sharded, and runs that go on on other ranks."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equivalence_run import ACCUMULATED, LR, run_each, train
from sft_run import SIZES, pose_as_launched, write_rows
from sft_run import train as train_sft
from sharded_net import run_ranks
from tiny import full_weights, make_grpo, make_trainer, save_model

from rlightning.errors import ConfigError
from rlightning.models import Adapter
from rlightning.parallel.checkpoint_folder import stored_tensors
from rlightning.parallel.fsdp import FSDP

pytestmark = pytest.mark.processes

ADAPTER = Adapter(rank=3)  # which two ranks cannot share out evenly
RUNS: dict[str, dict[str, Any]] = {
    "data": {},
    "accumulated": {"max_tokens_per_microbatch": ACCUMULATED, "gradient_checkpointing": True},
    "copies": {"strategy": {"shard_size": 1}},
    "offloaded": {"strategy": {"cpu_offload": "parameters"}},
    "moved": {"offload": {"parameters": True}},
    "bf16": {"precision": "bf16-mixed"},
    "ddp": {"strategy": "ddp"},
}
NF4 = replace(ADAPTER, quantize_base="nf4")
HAS_TORCHAO = find_spec("torchao") is not None
FOUR_RANKS: dict[str, dict[str, Any]] = {
    "hybrid": {"strategy": {"shard_size": 2}},
    "hybrid-accumulated": {"strategy": {"shard_size": 2}, "max_tokens_per_microbatch": ACCUMULATED},
    "compiled": {"compile": True, "gradient_checkpointing": True},
    "ddp-nf4": {"strategy": "ddp", "adapter": NF4},
}
"""The hybrid ones are two copies of the model, each in two shards."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("adapters")
    model = save_model(folder / "model", num_key_value_heads=2)
    one = train(folder, model, "auto", adapter=ADAPTER)
    arguments = {name: {"adapter": ADAPTER} | run for name, run in RUNS.items()}
    return {"one": one} | run_each(folder, 2, model, arguments)


@pytest.fixture(scope="module")
def runs_on_four(runs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("four")
    model = save_model(folder / "model", num_key_value_heads=2)  # the same as that of the other runs
    arguments = {name: {"adapter": ADAPTER} | run for name, run in FOUR_RANKS.items()}
    ones = {"one": runs["one"]}
    if HAS_TORCHAO:
        ones["one-nf4"] = train(folder, model, "auto", adapter=NF4)
    else:
        del arguments["ddp-nf4"]
    return ones | run_each(folder, 4, model, arguments)


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_take_the_steps_of_one_process(name: str, runs: dict[str, Any]) -> None:
    check_steps(name, runs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.skipif("nf4" in name and not HAS_TORCHAO, reason="torchao is missing"))
        for name in FOUR_RANKS
    ],
)
def test_four_ranks_take_the_steps_of_one_process(name: str, runs_on_four: dict[str, Any]) -> None:
    check_steps(name, runs_on_four)
    assert runs_on_four[name]["num_sequences"][0] == 4  # of 16: each rank has its own


def check_steps(name: str, runs: dict[str, Any]) -> None:
    alone = runs["one-nf4" if name.endswith("nf4") else "one"]
    one, other = alone["actor"], runs[name]["actor"]
    assert one.keys() == other.keys() and any("lora_B" in key for key in one)
    assert "reference" not in alone  # it is the actor without its adapter
    moved = max(float(weight.abs().max()) for key, weight in one.items() if "lora_B" in key)
    assert moved > 2 * LR, "the test trains nothing"
    for key, weight in one.items():
        is_adapter = "lora_" in key
        held = torch.bfloat16 if name == "bf16" and not is_adapter else weight.dtype
        assert other[key].dtype == held
        if name != "bf16":
            torch.testing.assert_close(other[key], weight, atol=0.01 * LR if is_adapter else 0.0, rtol=0.0)
        elif not is_adapter:
            assert torch.equal(other[key], weight.to(torch.bfloat16))
    expected, logged = alone["logged"], runs[name]["logged"]
    tolerance = 0.02 if name == "bf16" else 1e-4
    for step, found in zip(expected, logged, strict=True):
        shared = {key: value for key, value in found.items() if key in step}
        assert shared == pytest.approx({key: step[key] for key in shared}, abs=tolerance)


def on_two_ranks(folder: Path, port: int) -> None:
    pose_as_launched(dist.get_rank(), 2, port)
    _, trainer = train_sft(folder, 4, devices=2, strategy=FSDP(), ckpt_path=folder / "one.ckpt", adapter=ADAPTER)
    trainer.save_checkpoint(folder / "two.ckpt")
    assert all("lora_" in name for name in stored_tensors(folder / "two.ckpt"))


@pytest.mark.slow
def test_a_run_goes_on_on_other_ranks(tmp_path: Path) -> None:
    save_model(tmp_path / "model", **SIZES)
    write_rows(tmp_path)
    in_one_go, _ = train_sft(tmp_path, 6, adapter=ADAPTER)
    _, trainer = train_sft(tmp_path, 2, adapter=ADAPTER)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    run_ranks(on_two_ranks, 2, tmp_path, 0)
    module, _ = train_sft(tmp_path, 6, ckpt_path=tmp_path / "two.ckpt", adapter=ADAPTER)
    expected = full_weights(in_one_go)
    for name, weight in full_weights(module).items():
        torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=0)


def test_tensor_parallelism_is_refused_in_a_line(tmp_path: Path) -> None:
    module = make_grpo(save_model(tmp_path / "model"), adapter=ADAPTER)
    trainer = make_trainer(tmp_path, 1, devices=2, strategy=FSDP(tensor_parallel_size=2))
    module.trainer = trainer
    with pytest.raises(ConfigError, match=r"model\.adapter cannot be trained with tensor_parallel_size=2"):
        module.configure_callbacks()
