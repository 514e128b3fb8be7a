"""A base in 8 or 4 bits: what layers compute, what files and engines are given, and what is refused."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_adapter import logprobs, resolve
from tiny import make_batch, make_data, make_grpo, make_trainer, refused, save_model
from torch import nn
from torch.nn.functional import linear

from rlightning.errors import ConfigError
from rlightning.models import Adapter, load_policy, packed_logprobs
from rlightning.models.adapter import check_parallel
from rlightning.models.adapter_layers import adapter_off, merged_forward, merged_weights, perturbed_adapter
from rlightning.models.quantized import QuantizedBase, QuantizedLinear, coded_bytes
from rlightning.module import RLModule
from rlightning.parallel.sharding import named_weights

KINDS: tuple[QuantizedBase, ...] = ("int8", "nf4")


def layers() -> list[tuple[QuantizedLinear, torch.Tensor]]:
    """One of each kind, with its matrix."""
    codes = torch.tensor([[1, -2], [127, 0]], dtype=torch.int8)
    of_8_bits = QuantizedLinear(
        codes, torch.tensor([[0.5], [2.0]]), None, shape=(2, 2), dtype=torch.float32, bias=nn.Parameter(torch.ones(2))
    )
    packed = torch.tensor([0x01, 0xF2], dtype=torch.uint8)  # 0, 1 and 15, 2
    of_4_bits = QuantizedLinear(
        packed, torch.tensor([[1.0], [10.0]]), torch.arange(16.0), shape=(2, 2), dtype=torch.float32
    )
    return [
        (of_8_bits, torch.tensor([[0.5, -1.0], [254.0, 0.0]])),
        (of_4_bits, torch.tensor([[0.0, 1.0], [150.0, 20.0]])),
    ]


@pytest.mark.parametrize("kind", [0, 1])
def test_a_layer_computes_with_the_matrix_of_its_codes(kind: int) -> None:
    layer, matrix = layers()[kind]
    assert torch.equal(layer.weight, matrix) and not any(p.requires_grad for p in (layer.codes, layer.scales))
    x = torch.tensor([[1.0, 3.0]], requires_grad=True)
    y = layer(x)
    assert torch.equal(y, linear(x, matrix, layer.bias))
    (gradient,) = torch.autograd.grad(y[0, 1], x)
    assert torch.equal(gradient, matrix[1:])
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_files_names_and_parts_are_a_matrixs() -> None:
    module = nn.Sequential(layers()[0][0], nn.Linear(2, 3))
    assert [(name, tuple(weight.shape)) for name, weight in named_weights(module)] == [
        ("0.weight", (2, 2)),
        ("0.bias", (2,)),
        ("1.weight", (3, 2)),
        ("1.bias", (3,)),
    ]


def test_coded_bytes_count_codes_and_scales() -> None:
    assert coded_bytes("int8", 128, 64, 2) == 128 * 64 + 4 * 128
    assert coded_bytes("nf4", 128, 64, 2) == 128 * 64 // 2 + 2 * 128


def test_without_torchao_a_line_says_what_to_install(model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with refused(r"quantize_base=nf4 needs .* pip install 'rlightning\[torchao\]'"):
        resolve(model_folder, quantize_base="nf4")


@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_a_quantised_base_are_refused(kind: QuantizedBase, model_folder: str) -> None:
    pytest.importorskip("torchao")
    lora = resolve(model_folder, quantize_base=kind)
    check_parallel(lora, is_sharded=False)
    with pytest.raises(ConfigError, match=f"quantize_base={kind} holds the whole base on each rank"):
        check_parallel(lora, is_sharded=True)


def load(model: str, kind: QuantizedBase | None) -> Any:
    pytest.importorskip("torchao")
    module = make_grpo(model, adapter=Adapter(rank=4, quantize_base=kind))
    module.configure_model()
    return module


@pytest.mark.parametrize(("kind", "error"), [("int8", 0.01), ("nf4", 0.15)])
def test_base_is_near_models_and_engines_weights(kind: QuantizedBase, error: float, model_folder: str) -> None:
    module = load(model_folder, kind)
    base, held = load_policy(model_folder), dict(module.base_weights())
    assert [*held] == [name for name, _ in named_weights(base)]
    for name, weight in named_weights(base):
        distance = (held[name] - weight).norm() / weight.norm()
        assert (0 < distance < error) if "proj" in name else torch.equal(held[name], weight)
    base.load_state_dict(held, strict=False)  # without the tied head
    with adapter_off(module.loaded_actor):
        assert torch.equal(logprobs(module.loaded_actor), logprobs(base))
    with perturbed_adapter(module.loaded_actor), merged_forward(module.loaded_actor):
        base.load_state_dict(dict(merged_weights(module.loaded_actor)), strict=False)
        torch.testing.assert_close(logprobs(module.loaded_actor), logprobs(base), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_is_torchaos(kind: QuantizedBase) -> None:
    ao = pytest.importorskip("torchao.quantization")
    from rlightning.models.quantized import quantize

    layer = nn.Linear(64, 512, bias=False, dtype=torch.bfloat16)
    coded = quantize(layer, kind, torch.device("cpu"))
    theirs = ao.Int8Tensor.from_hp(layer.weight.data, ao.PerRow()) if kind == "int8" else ao.to_nf4(layer.weight.data)
    matrix = theirs.dequantize() if kind == "int8" else theirs.get_original_weight()
    assert torch.equal(coded.weight, matrix) and coded.weight.dtype == torch.bfloat16
    assert coded.codes.nbytes + coded.scales.nbytes == coded_bytes(kind, 512, 64, 2)


def fit(folder: Path, module: RLModule, max_steps: int, **kwargs: Any) -> Any:
    trainer = make_trainer(folder, max_steps)
    trainer.fit(module, make_data(folder), **kwargs)
    return trainer


def adapted(model: str, kind: QuantizedBase | None, **kwargs: Any) -> RLModule:
    return make_grpo(
        model, adapter=Adapter(rank=4, quantize_base=kind), lr=1e-2, kl_coef=0.1, validate_first=False, **kwargs
    )


@pytest.mark.parametrize("kind", KINDS)
def test_run_on_quantised_base_resumes_and_exports(kind: QuantizedBase, model_folder: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    module = adapted(model_folder, kind)
    trainer = fit(tmp_path, module, 2)
    assert trainer.callback_metrics["policy/kl"] > 0
    trainer.save_checkpoint(tmp_path / "cut.ckpt")
    stored = torch.load(tmp_path / "cut.ckpt", weights_only=False)
    assert all("lora_" in name for name in stored["state_dict"])
    module.save_hf(tmp_path / "hf")
    batch = make_batch([[[1, 2, 3, 0]]])
    with torch.no_grad():
        expected = packed_logprobs(module.loaded_actor, batch)[0]
        torch.testing.assert_close(
            packed_logprobs(load_policy(str(tmp_path / "hf")), batch)[0], expected, atol=1e-4, rtol=0
        )
    again = adapted(model_folder, kind)
    fit(tmp_path, again, 3, ckpt_path=tmp_path / "cut.ckpt")
    with pytest.raises(ConfigError, match=f"was trained on a base in {kind}, not in full precision"):
        fit(tmp_path, adapted(model_folder, None), 3, ckpt_path=tmp_path / "cut.ckpt")


def test_checkpointed_layers_train_alike(model_folder: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    ends = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        module = adapted(model_folder, "nf4", gradient_checkpointing=is_checkpointed)
        fit(tmp_path, module, 2)
        ends.append(dict(module.adapter_weights()))
    for name, weight in ends[0].items():
        torch.testing.assert_close(ends[1][name], weight, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.long
def test_a_layer_is_one_graph_of_a_compiler(kind: int) -> None:
    layer, matrix = layers()[kind]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    x = torch.tensor([[1.0, 3.0], [2.0, -1.0]], requires_grad=True)
    y = compiled(x)
    torch.testing.assert_close(y, linear(x, matrix, layer.bias))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, matrix.sum(0).expand(2, 2))


def test_matrices_that_are_not_adapted_are_quantised_too(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    module = make_grpo(
        save_model(tmp_path / "model"), adapter=Adapter(rank=4, target_modules=["q_proj"], quantize_base="int8")
    )
    module.configure_model()
    kinds = {name.rpartition("layers.")[2]: type(one) for name, one in module.loaded_actor.named_modules()}
    assert kinds["0.mlp.down_proj"] is QuantizedLinear and kinds["0.self_attn.q_proj.base_layer"] is QuantizedLinear
    assert type(module.loaded_actor.lm_head) is nn.Linear
    module.save_hf(tmp_path / "hf")
    torch.testing.assert_close(
        logprobs(load_policy(str(tmp_path / "hf"))), logprobs(module.loaded_actor), atol=1e-5, rtol=0
    )
