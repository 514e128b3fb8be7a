"""Runs with an adapter: what is trained, what the reference is, what checkpoints hold and refuse."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence_run import RandomSampler
from lightning.pytorch import Callback
from safetensors import safe_open
from tiny import UseSampler, copy_weights, make_algorithm, make_data, make_grpo, make_trainer, save_model

from rlightning.algorithms import CISPO, DAPO, GRPO, GSPO, RLOO, SAPO, DrGRPO, REINFORCEPlusPlus
from rlightning.callbacks import TransformersRollout
from rlightning.errors import ConfigError
from rlightning.models import Adapter, layers
from rlightning.models.adapter_files import BASE_DIGEST, WEIGHTS_FILE, base_digest
from rlightning.module import RLModule
from rlightning.module.start_block import describe_model
from rlightning.types import RolloutBatch

ADAPTER = Adapter(rank=4)


def fit(
    folder: Path, module: RLModule, max_steps: int, *callbacks: Callback, precision: Any = "32-true", **kwargs: Any
) -> Any:
    trainer = make_trainer(folder, max_steps, *callbacks, precision=precision)
    trainer.fit(module, make_data(folder), **kwargs)
    return trainer


@pytest.mark.long
@pytest.mark.parametrize("algorithm", [GRPO, DrGRPO, DAPO, GSPO, CISPO, SAPO, RLOO, REINFORCEPlusPlus])
def test_every_algorithm_trains_the_adapter_alone(algorithm: type[RLModule], model_folder: str, tmp_path: Path) -> None:
    module = make_algorithm(algorithm, model_folder, adapter=ADAPTER, validate_first=False)
    fit(tmp_path, module, 2)
    states = module.trainer.optimizers[0].state
    assert {tuple(parameter.shape) for parameter in states} <= {shape for _, shape in module.adapter.shapes}  # type: ignore[union-attr]
    parameters = dict(module.named_parameters())
    assert all(("lora_" in name) == parameter.requires_grad for name, parameter in parameters.items())
    assert any(weight.abs().max() > 0 for name, weight in parameters.items() if "lora_B" in name)
    plain = make_algorithm(algorithm, model_folder)
    plain.configure_model()
    base = dict(plain.named_weights())
    held = {name.replace(".base_layer", ""): weight for name, weight in parameters.items() if "lora_" not in name}
    assert all(torch.equal(weight, held[f"actor.{name}"]) for name, weight in base.items())


@pytest.mark.long
def test_the_reference_is_the_actor_without_its_adapter(model_folder: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    own = make_grpo(model_folder, adapter=ADAPTER, kl_coef=0.1, lr=1e-2, validate_first=False)
    trainer = fit(tmp_path, own, 3)
    torch.manual_seed(0)
    copy = save_model(tmp_path / "copy")
    apart = make_grpo(model_folder, adapter=ADAPTER, kl_coef=0.1, lr=1e-2, reference_model=copy, validate_first=False)
    other = fit(tmp_path, apart, 3)
    assert set(own.roles) == {"actor"} and set(apart.roles) == {"actor", "reference"}
    assert trainer.callback_metrics["policy/kl"] > 1e-4
    assert float(trainer.callback_metrics["policy/kl"]) == pytest.approx(
        float(other.callback_metrics["policy/kl"]), rel=1e-5
    )


@pytest.mark.long
def test_resumed_run_ends_as_an_uninterrupted_one(model_folder: str, tmp_path: Path) -> None:
    ends = []
    for cut in (None, 2):
        torch.manual_seed(0)
        module = make_grpo(model_folder, adapter=ADAPTER, lr=1e-2, validate_first=False)
        if cut:
            trainer = fit(tmp_path, module, cut)
            trainer.save_checkpoint(tmp_path / "cut.ckpt")
            torch.manual_seed(1)  # what a new run would begin with does not matter
            module = make_grpo(model_folder, adapter=ADAPTER, lr=1e-2, validate_first=False)
        fit(tmp_path, module, 4, ckpt_path=tmp_path / "cut.ckpt" if cut else None)
        ends.append(copy_weights(module))
    assert all(torch.equal(weight, ends[1][name]) for name, weight in ends[0].items())
    stored = torch.load(tmp_path / "cut.ckpt", weights_only=False)
    assert all("lora_" in name for name in stored["state_dict"])
    again = GRPO.load_from_checkpoint(tmp_path / "cut.ckpt")
    assert again.adapter is not None and again.adapter.rank == 4


@pytest.fixture(scope="module")
def checkpoint(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    trainer = fit(folder, make_grpo(model_folder, adapter=ADAPTER, validate_first=False), 1)
    trainer.save_checkpoint(folder / "a.ckpt")
    return folder / "a.ckpt"


@pytest.mark.long
@pytest.mark.parametrize(
    ("seed", "change", "message"),
    [
        (0, {"adapter": None}, r"trains an adapter of rank 4\. Set model\.adapter"),
        (0, {"adapter": Adapter(rank=2)}, "has another rank: 4, not 2"),
        (0, {"adapter": Adapter(rank=4, alpha=16)}, "has another scaling: 2, not 4"),
        (0, {"adapter": Adapter(rank=4, target_modules=["q_proj"])}, "has another modules: others"),
        (1, {}, "was trained on a base with other weights"),
    ],
)
def test_checkpoint_of_another_adapter_or_base_is_refused(
    seed: int, change: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    module = make_grpo(save_model(tmp_path / "base", seed=seed), **{"adapter": ADAPTER} | change)
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path, module, 2, ckpt_path=checkpoint)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_digest_is_of_the_base_that_was_loaded(is_replaced: bool, tmp_path: Path) -> None:
    model = save_model(tmp_path / "base")
    digest = base_digest(model)
    module = make_grpo(model, adapter=ADAPTER, validate_first=False)
    trainer = fit(tmp_path, module, 1)
    shutil.rmtree(model)
    if is_replaced:
        save_model(tmp_path / "base", seed=1)
        assert base_digest(model) != digest
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    module.save_adapter(tmp_path / "adapter")
    assert torch.load(tmp_path / "a.ckpt", weights_only=False)["adapter"]["base"] == digest
    with safe_open(tmp_path / "adapter" / WEIGHTS_FILE, "pt") as file:
        assert file.metadata()[BASE_DIGEST] == digest


@pytest.mark.parametrize(
    "how", [{"gradient_checkpointing": True}, pytest.param({"compile": True}, marks=pytest.mark.slow)]
)
@pytest.mark.long
def test_checkpointed_and_compiled_layers_train_alike(
    how: dict[str, Any], model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "BACKEND", "aot_eager")  # inductor's code takes minutes to make
    ends = []
    for arguments in ({}, how):
        torch.manual_seed(0)
        module = make_grpo(model_folder, adapter=ADAPTER, kl_coef=0.1, lr=1e-2, validate_first=False, **arguments)
        fit(tmp_path, module, 2, UseSampler(RandomSampler))  # the layers' other passes need not be compiled
        ends.append(copy_weights(module))
    for name, weight in ends[0].items():
        torch.testing.assert_close(ends[1][name], weight, atol=1e-4, rtol=0)


def test_the_start_says_what_is_trained(model_folder: str, tmp_path: Path) -> None:
    module = make_grpo(model_folder, adapter=ADAPTER)
    text = describe_model(make_trainer(tmp_path, 1), module)
    assert "trained by LoRA of rank 4, alpha 8, on 14 linear layers (4,864 parameters)" in text


def test_autocast_halves_matrices_of_the_base_alone(model_folder: str, tmp_path: Path) -> None:
    module = make_grpo(model_folder, adapter=ADAPTER, validate_first=False)
    trainer = fit(tmp_path, module, 1, precision="bf16-mixed")
    for name, parameter in module.named_parameters():
        is_matrix = "lora_" not in name and parameter.ndim == 2
        assert parameter.dtype == (torch.bfloat16 if is_matrix else torch.float32), name
    moments = [value for state in trainer.optimizers[0].state.values() for value in state.values() if value.ndim]
    assert moments and all(value.dtype == torch.float32 for value in moments)


def test_frozen_weights_are_read_on_the_host(model_folder: str) -> None:
    """Lightning has the GPU as the default device while models are configured."""
    module = make_grpo(model_folder, adapter=ADAPTER)
    with torch.device("meta"):
        policy = module.load_model(module.model_path, is_trained=False, adapter=module.adapter)
    assert {parameter.device.type for parameter in policy.parameters()} == {"cpu"}


def test_an_adapter_in_half_precision_is_refused(model_folder: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="precision=bf16-true would keep an adapter in bfloat16"):
        fit(tmp_path, module := make_grpo(model_folder, adapter=ADAPTER), 1, precision="bf16-true")
    assert not module.roles  # nothing was loaded


@pytest.mark.parametrize("sends_adapter", [False, True])
def test_score_merges_the_adapter_where_engines_get_it_merged(
    sends_adapter: bool, model_folder: str, tmp_path: Path
) -> None:
    """A merged matrix is rounded to bfloat16 as a whole, and the products of base and adapter are each rounded."""
    module = make_grpo(model_folder, adapter=ADAPTER)
    module.trainer = make_trainer(tmp_path, 1)
    module.configure_model()
    generator = torch.Generator().manual_seed(0)
    for name, weight in module.adapter_weights():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1, generator=generator)
    plain = make_grpo(model_folder)
    plain.trainer = module.trainer
    plain.configure_model()
    plain.loaded_actor.load_state_dict(dict(module.named_weights()), strict=False)
    batch = RolloutBatch.of_sequences([[1, 2, 3, 4, 5, 6, 7]])
    module.sends_adapter = sends_adapter
    scored, merged = (one.score(batch, torch.bfloat16) for one in (module, plain))
    assert torch.equal(scored, merged) is not sends_adapter
    torch.testing.assert_close(scored, merged, rtol=0, atol=0.1)


def test_transformers_rollout_scores_the_merged_adapter(model_folder: str, tmp_path: Path) -> None:
    """The module's last run may have sent its adapter to vLLM's engines separately."""
    module = make_grpo(model_folder, adapter=ADAPTER, validate_first=False)
    module.sends_adapter = True
    trainer = make_trainer(tmp_path, 1, TransformersRollout(max_new_tokens=4, seed=0))
    trainer.fit(module, make_data(tmp_path))
    assert module.sends_adapter is False
