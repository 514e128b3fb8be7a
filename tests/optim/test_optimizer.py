import logging
import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM, CohereConfig, GPT2Config, GptOssConfig, PreTrainedConfig, Qwen2Config

from rlightning.errors import ConfigError
from rlightning.optim.optimizer import (
    AdamWSettings,
    clip_gradients,
    global_norm,
    make_lr_schedule,
    make_optimizer,
    split_by_decay,
)
from rlightning.torch_internals import TorchDispatchMode


def optimize(*parameters: nn.Parameter, **settings: Any) -> torch.optim.AdamW:
    """AdamW of some parameters."""
    return make_optimizer(AdamWSettings(**settings), split_by_decay(nn.ParameterList(parameters)))


def make_parameters() -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(torch.full((2, 2), 2.0)), nn.Parameter(torch.full((2,), 2.0))


def test_only_matrices_decay() -> None:
    matrix, bias = make_parameters()
    optimizer = optimize(matrix, bias, lr=0.1, weight_decay=0.5)
    matrix.grad, bias.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    assert matrix.tolist() == [[pytest.approx(2.0 * (1 - 0.1 * 0.5))] * 2] * 2
    assert bias.tolist() == [2.0, 2.0]


SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
ROLES: dict[str, tuple[PreTrainedConfig, set[str]]] = {
    "gpt-oss": (
        GptOssConfig(**SIZES, num_local_experts=2, layer_types=["full_attention"]),
        {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.router"}
        | {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"},
    ),
    "cohere": (
        CohereConfig(**SIZES, use_qk_norm=True),
        {f"self_attn.{name}_proj" for name in "qkvo"} | {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"},
    ),
    "qwen2": (
        Qwen2Config(**SIZES),
        {f"self_attn.{name}_proj" for name in "qkvo"} | {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"},
    ),
    "gpt2": (
        GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2, tie_word_embeddings=False),
        {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"},
    ),
}
"""By model: a layer's parameters that decay, which are matrices that activations are multiplied by."""
EMBEDDINGS = {"model.embed_tokens", "transformer.wte", "transformer.wpe", "lm_head"}


@pytest.mark.parametrize("model", ROLES)
def test_decay_goes_by_role(model: str) -> None:
    """Biases of experts and norms of heads are matrices too."""
    config, expected = ROLES[model]
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    names = {parameter: name for name, parameter in network.named_parameters()}
    decayed, others = split_by_decay(network)
    found = {names[parameter].removesuffix(".weight") for parameter in decayed}
    assert {re.sub(r".*\.(layers|h)\.0\.", "", name) for name in found - EMBEDDINGS} == expected
    assert found & EMBEDDINGS == {"lm_head", *(name for name in EMBEDDINGS if f"{name}.weight" in names.values())}
    assert len(decayed) + len(others) == len(names)
    if model in ("gpt-oss", "cohere"):
        assert any(parameter.ndim > 1 for parameter in others), "or the test shows nothing"


def test_tied_weights_decay_once() -> None:
    config = Qwen2Config(**SIZES | {"tie_word_embeddings": True})
    decayed, others = split_by_decay(AutoModelForCausalLM.from_config(config))
    assert len({id(parameter) for parameter in decayed + others}) == len(decayed + others)


def test_frozen_parameters_are_left_out() -> None:
    matrix, bias = make_parameters()
    bias.requires_grad_(False)
    optimizer = optimize(matrix, bias, lr=0.1)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 0]


@pytest.mark.parametrize(
    ("schedule", "warmup", "max_steps", "factors"),
    [
        ("constant", 0, -1, [1, 1, 1, 1]),
        ("constant", 3, -1, [1 / 3, 2 / 3, 1, 1]),
        ("linear", 0, 4, [1, 3 / 4, 2 / 4, 1 / 4, 0, 0]),
        ("linear", 2, 4, [1 / 2, 1, 1, 1 / 2, 0]),
        ("cosine", 0, 4, [1, (1 + 0.5**0.5) / 2, 1 / 2, (1 - 0.5**0.5) / 2, 0, 0]),
    ],
)
def test_lr_schedule_scales_by_expected_factors(
    schedule: Any, warmup: int, max_steps: int, factors: list[float]
) -> None:
    settings = AdamWSettings(lr=0.5, lr_schedule=schedule, warmup_steps=warmup)
    optimizer = optimize(*make_parameters(), lr=0.5)
    scheduler = make_lr_schedule(optimizer, settings, max_steps=max_steps)
    seen = []
    for _ in factors:
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert seen == pytest.approx([0.5 * factor for factor in factors])


def test_added_groups_lr_schedule_starts_at_own_peak() -> None:
    """Warm-up of two steps: a half, then all of it, in each group."""
    matrix, added = make_parameters()
    settings = AdamWSettings(lr=0.5, warmup_steps=2)
    optimizer = optimize(matrix, lr=0.5)
    scheduler = make_lr_schedule(optimizer, settings, max_steps=-1)
    optimizer.add_param_group({"params": [added], "lr": 0.2})
    scheduler.add_groups()
    rates = []
    for _ in range(2):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    assert rates == [[0.25, 0.25, 0.1], [0.5, 0.5, 0.2]]
    again = optimize(matrix, lr=0.5)
    resumed = make_lr_schedule(again, settings, max_steps=-1)
    again.add_param_group({"params": [added], "lr": 0.2})
    resumed.add_groups()
    resumed.load_state_dict(scheduler.state_dict())
    assert [group["lr"] for group in again.param_groups] == [0.5, 0.5, 0.2]


@pytest.mark.parametrize("states", ["float32", "8bit"])
def test_optimizer_state_of_other_parameters_is_refused(states: Any) -> None:
    matrix, bias = make_parameters()
    saved = optimize(matrix, lr=0.1, optimizer_states=states)
    matrix.grad = torch.ones(2, 2)
    saved.step()
    with pytest.raises(ConfigError, match=r"has groups of \[1, 0\] parameters, and this run's has groups of \[1, 1\]:"):
        optimize(matrix, bias, lr=0.1, optimizer_states=states).load_state_dict(saved.state_dict())


@pytest.mark.parametrize(("schedule", "max_steps"), [("linear", -1), ("cosine", 5)])
def test_a_schedule_needs_an_end(schedule: Any, max_steps: int) -> None:
    settings = AdamWSettings(lr=0.5, lr_schedule=schedule, warmup_steps=5)
    with pytest.raises(
        ConfigError, match=rf"lr_schedule='{schedule}' .* warmup_steps=5, .* trainer\.max_steps={max_steps}"
    ):
        make_lr_schedule(optimize(*make_parameters()), settings, max_steps=max_steps)


def test_gradients_are_scaled_to_the_norm() -> None:
    matrix, bias = make_parameters()
    matrix.grad = torch.tensor([[3.0, 0.0], [0.0, 0.0]])
    bias.grad = torch.tensor([0.0, 4.0])
    norm, is_finite = clip_gradients([matrix, bias], 1.0)
    assert norm.item() == 5.0 and is_finite
    assert matrix.grad[0, 0].item() == pytest.approx(0.6) and bias.grad[1].item() == pytest.approx(0.8)


def test_small_gradients_stay() -> None:
    matrix, bias = make_parameters()
    matrix.grad = torch.full((2, 2), 0.1)
    norm, is_finite = clip_gradients([matrix, bias], 1.0)
    assert norm.item() == pytest.approx(0.2) and is_finite
    assert torch.equal(matrix.grad, torch.full((2, 2), 0.1))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(value: float, caplog: pytest.LogCaptureFixture) -> None:
    matrix, bias = make_parameters()
    optimizer = optimize(matrix, bias, lr=0.1, weight_decay=0.5)
    matrix.grad, bias.grad = torch.ones(2, 2), torch.tensor([1.0, value])
    with caplog.at_level(logging.WARNING):
        norm, is_finite = clip_gradients([matrix, bias], 1.0)
    assert not is_finite and not norm.isfinite()
    assert "this optimizer step is skipped" in caplog.text
    optimizer.step()
    assert (matrix == 2.0).all() and (bias == 2.0).all()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"lr": -1.0}, r"lr=-1\.0 must be at least 0\. Try 1e-6\."),
        ({"lr": math.nan}, "lr=nan must be at least 0"),
        ({"lr": math.inf}, r"lr=inf must be finite\. Try 1e-6\."),
        ({"weight_decay": math.inf}, r"weight_decay=inf must be finite\."),
        ({"weight_decay": -0.1}, r"weight_decay=-0\.1 must be at least 0"),
        ({"betas": (0.9, 1.5)}, r"betas=\[0\.9, 1\.5\] must be in \[0, 1\)"),
        ({"warmup_steps": -3}, "warmup_steps=-3 must be at least 0"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm=0\.0 must be above 0\. Use \.inf for no limit\."),
    ],
)
def test_numbers_with_which_nothing_is_learned(setting: dict[str, Any], message: str) -> None:
    AdamWSettings(max_grad_norm=math.inf)
    with pytest.raises(ConfigError, match=message):
        AdamWSettings(**setting)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("quantised", "Choose from: float32, bfloat16, 8bit"), ("bf16", "Did you mean 'bfloat16'?")],
)
def test_unknown_optimizer_states_are_refused_with_a_hint(name: Any, hint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"optimizer_states='{name}' is unknown. {hint}")):
        AdamWSettings(optimizer_states=name)


class Operators(TorchDispatchMode):
    """Notes the types of the tensors that fused AdamW gets."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[type] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "fused_adamw" in str(operator):
            self.seen.update(type(tensor) for tensors in args for tensor in tensors)
        return operator(*args, **kwargs or {})


@pytest.mark.parametrize("states", ["float32", "bfloat16"])
def test_sharded_parameters_step_as_plain_tensors(states: Any) -> None:
    """In torch 2.11, each step of fused AdamW on DTensors takes memory for ever."""
    values = torch.arange(8.0).view(4, 2)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
        sharded = nn.Parameter(distribute_tensor(values, mesh, [Shard(0), Replicate()]))
        whole = nn.Parameter(values.clone())
        optimizers = [optimize(p, lr=0.1, weight_decay=0.5, optimizer_states=states) for p in (sharded, whole)]
        operators = Operators()
        for step in range(3):
            whole.grad = torch.full((4, 2), 0.5 + step)
            sharded.grad = DTensor.from_local(whole.grad.clone(), mesh, [Shard(0), Partial()], run_check=False)
            with operators:
                optimizers[0].step()
            optimizers[1].step()
        assert operators.seen == {torch.Tensor}
        assert isinstance(optimizers[0].state[sharded]["exp_avg"], DTensor)
        if states == "float32":  # others are rounded by chance
            result: Any = sharded.detach()
            torch.testing.assert_close(result.full_tensor(), whole.detach())
    finally:
        dist.destroy_process_group()


def test_global_norm_over_several_meshes_or_none() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        meshes = [init_device_mesh("cpu", (1,)), init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))]
        first = distribute_tensor(torch.tensor([2.0, 0.0]), meshes[0], [Shard(0)])
        second = distribute_tensor(torch.tensor([[3.0, 0.0]]), meshes[1], [Replicate(), Shard(1)])
        assert global_norm([torch.tensor([6.0]), first, second]).item() == 7
        assert global_norm([second, first, torch.tensor([6.0], dtype=torch.bfloat16)]).item() == 7
    finally:
        dist.destroy_process_group()
    assert clip_gradients([nn.Parameter(torch.ones(2))], 1.0) == (torch.zeros(()), torch.tensor(True))
