"""A weight that is NaN or infinite is saved nowhere: what was saved before stays, and the run ends in a line."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from sharded_net import make_net, run_ranks, shard_net
from tiny import make_data, make_grpo, make_trainer
from torch.distributed.tensor import DTensor

from rlightning.checksums import verify_manifest
from rlightning.errors import ConfigError, WeightError
from rlightning.models.finite import check_finite, find_not_finite
from rlightning.parallel.checkpoint_io import last_checkpoint, read_state


class Spoil(Callback):
    """Sets a weight after step 2."""

    def __init__(self, value: float) -> None:
        self.value = value

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        if trainer.global_step == 2:
            pl_module.actor.get_parameter("model.norm.weight").data[-1] = self.value


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_not_saved(value: float, model_folder: str, tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path / "ck", every_n_train_steps=1, save_last="link", enable_version_counter=False)
    trainer = make_trainer(tmp_path, 4, Spoil(value), keep, enable_checkpointing=True)
    message = r"^No checkpoint is saved: the weight 'actor\.model\.norm\.weight' is NaN or infinite"
    with pytest.raises(WeightError, match=message):
        trainer.fit(make_grpo(model_folder), make_data(tmp_path))
    last = last_checkpoint(tmp_path / "ck")
    assert last is not None
    state = read_state(last)
    assert state is not None and state.step == 1


def test_export_of_non_finite_weights_keeps_the_last(model_folder: str, tmp_path: Path) -> None:
    module = make_grpo(model_folder)
    module.configure_model()
    module.save_hf(tmp_path / "hf")
    before = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    module.loaded_actor.get_parameter("model.norm.weight").data[0] = float("inf")
    with pytest.raises(WeightError, match=r"^The model is not saved to .*/hf: the weight 'model\.norm\.weight' is NaN"):
        module.save_hf(tmp_path / "hf")
    assert {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()} == before


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_damaged_export_is_refused_as_a_model(name: str, model_folder: str, tmp_path: Path) -> None:
    module = make_grpo(model_folder)
    module.configure_model()
    module.save_hf(tmp_path / "hf")
    verify_manifest(tmp_path / "hf")
    make_grpo(tmp_path / "hf")
    content = bytearray((tmp_path / "hf" / name).read_bytes())
    content[-3] ^= 1
    (tmp_path / "hf" / name).write_bytes(content)
    for damaged in ({"model": tmp_path / "hf"}, {"model": model_folder, "reference_model": str(tmp_path / "hf")}):
        with pytest.raises(ConfigError, match=rf"^model='.*/hf' is damaged: '{name}' is not what was written"):
            make_grpo(damaged.pop("model"), kl_coef=0.1, **damaged)


def test_not_finite_weights_are_all_named() -> None:
    weights = {
        "one": torch.ones(3),
        "nan": torch.tensor([1.0, float("nan")]),
        "infinite": torch.tensor([1.0, -float("inf")]).bfloat16(),
        "empty": torch.empty(0),
        "counts": torch.ones(2, dtype=torch.int64),
        "largest": torch.tensor([torch.finfo(torch.float32).max]),
    }
    assert sorted(find_not_finite(weights.items())) == ["infinite", "nan"]


def spoil_one_shard(folder: Path) -> None:
    net = shard_net(make_net(), 0, 2, 0)
    check_finite(net.named_parameters(), "Nothing is saved")
    if dist.get_rank() == 1:
        with torch.no_grad():
            assert isinstance(net.up.weight, DTensor)
            net.up.weight.to_local()[0, 0] = float("nan")
    with pytest.raises(WeightError, match=r"^Nothing is saved: the weight 'up\.weight' is NaN or infinite"):
        check_finite(net.named_parameters(), "Nothing is saved")


@pytest.mark.processes
def test_one_bad_shard_is_refused_by_all_ranks(tmp_path: Path) -> None:
    run_ranks(spoil_one_shard, 2, tmp_path)
