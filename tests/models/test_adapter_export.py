"""Adapters on disk: what SaveHF writes is what PEFT, a further run and transformers read."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file
from sharded_net import run_ranks
from test_adapter import load_adapted, logprobs, resolve, save_peft
from tiny import bare_trainer, make_data, make_grpo, make_trainer, save_model, write_sums
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from rlightning.callbacks import SaveHF, TransformersRollout
from rlightning.data import PromptDataModule, ValidationSet
from rlightning.errors import ConfigError
from rlightning.models import Adapter, load_policy, load_tokenizer, save_adapter, save_policy
from rlightning.models.adapter_layers import adapter_parameters
from rlightning.models.sharded_policy import load_sharded_policy
from rlightning.parallel.sharding import Sharding


def save_both(policy: Any, lora: Any, model: str, folder: Path) -> None:
    tokenizer = load_tokenizer(model)
    save_policy(policy, tokenizer, folder / "merged", dtype=torch.float32, max_file_bytes=20_000)
    save_adapter(policy, lora, model, tokenizer, folder / "adapter")


def save_from_shards(folder: Path, model: str) -> None:
    lora = resolve(model, path=folder / "peft")
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("replicate", "shard", "tensor_parallel"))
    policy = load_sharded_policy(model, Sharding(mesh, torch.device("cpu")), adapter=lora)
    save_both(policy, lora, model, folder / "sharded")
    assert dist.get_world_size() == 2


@pytest.mark.processes
def test_an_adapter_comes_back_from_its_folders(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    theirs = save_peft(model, tmp_path / "peft", target_modules="all-linear", use_rslora=True)
    lora = resolve(model, path=tmp_path / "peft")
    policy = load_adapted(model, lora)
    save_both(policy, lora, model, tmp_path / "whole")
    run_ranks(save_from_shards, 2, tmp_path, model)
    expected = logprobs(policy)
    for name in ("whole", "sharded"):
        torch.testing.assert_close(logprobs(load_policy(str(tmp_path / name / "merged"))), expected, atol=1e-4, rtol=0)
        again = load_adapted(model, resolve(model, path=tmp_path / name / "adapter"))
        assert all(
            torch.equal(weight, dict(adapter_parameters(policy))[key]) for key, weight in adapter_parameters(again)
        )
        loaded = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(model), str(tmp_path / name / "adapter")
        )
        ids = torch.tensor([[1, 2, 5, 4, 3]])
        with torch.no_grad():
            torch.testing.assert_close(loaded(ids).logits, theirs(ids).logits)
    assert load_file(tmp_path / "whole" / "adapter" / "adapter_model.safetensors").keys() == dict(lora.shapes).keys()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "merged")
    assert merged.num_parameters() == load_policy(model).num_parameters()


def test_adapter_of_base_with_other_values_is_refused(tmp_path: Path) -> None:
    model, other = save_model(tmp_path / "one" / "model"), save_model(tmp_path / "two" / "model", seed=1)
    lora = resolve(model)
    save_adapter(load_adapted(model, lora), lora, model, load_tokenizer(model), tmp_path / "adapter")
    assert resolve(model, path=tmp_path / "adapter").rank == 32
    with pytest.raises(ConfigError, match="was trained on a base with other weights than model="):
        resolve(other, path=tmp_path / "adapter")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["both", "adapter", "merged"])
def test_save_hf_saves_base_and_adapter(kind: Any, model_folder: str, tmp_path: Path) -> None:
    module = make_grpo(model_folder, adapter=Adapter(rank=4), lr=0.1, validate_first=False)
    saver = SaveHF(str(tmp_path / "hf"), adapter=kind)
    trainer = make_trainer(tmp_path, 2, saver)
    trainer.fit(module, make_data(tmp_path))
    assert saver.output(trainer, "fit") == tmp_path / ("hf_adapter" if kind == "adapter" else "hf")
    expected = logprobs(module.loaded_actor)
    assert (tmp_path / "hf").is_dir() is (kind != "adapter")
    assert (tmp_path / "hf_adapter").is_dir() is (kind != "merged")
    if kind != "adapter":
        torch.testing.assert_close(logprobs(load_policy(str(tmp_path / "hf"))), expected, atol=1e-4, rtol=0)
    if kind != "merged":
        again = make_grpo(model_folder, adapter=Adapter(path=tmp_path / "hf_adapter"))
        again.configure_model()
        assert torch.equal(logprobs(again.loaded_actor), expected)


@pytest.mark.long
def test_validation_and_prediction_with_an_adapter_are_those_of_the_merged_model(tmp_path: Path) -> None:
    base = save_model(tmp_path / "model", initializer_range=0.1)
    save_peft(base, tmp_path / "peft", target_modules="all-linear")
    lora = resolve(base, path=tmp_path / "peft")
    save_both(load_adapted(base, lora), lora, base, tmp_path)

    def evaluate(model: str, adapter: Adapter | None) -> tuple[Any, Any]:
        rollout = TransformersRollout(max_new_tokens=8, seed=0)
        module, sums = make_grpo(model, adapter=adapter), write_sums(tmp_path)
        data = PromptDataModule(validation=ValidationSet(sums, samples_per_prompt=2, temperature=1.0), predict=sums)
        predictions: Any = bare_trainer(tmp_path, 1, rollout).predict(module, data)
        texts = [one.completion.text for batch in predictions for _, group in batch for one in group]
        return bare_trainer(tmp_path, 1, rollout).validate(module, data, verbose=False)[0], texts

    metrics, texts = evaluate(base, Adapter(path=tmp_path / "adapter"))
    assert (metrics, texts) == evaluate(str(tmp_path / "merged"), None)
    assert texts != evaluate(base, None)[1]
