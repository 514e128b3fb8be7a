"""Routers that cast to float32 compute in it under autocast."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from tiny_models import make_sequences, packed_inputs, save_tiny, tiny_config
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.overrides import TorchFunctionMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from rlightning.errors import ConfigError
from rlightning.models import load_policy
from rlightning.models.architecture import BUILD_ERRORS, check_config
from rlightning.models.counts import num_experts
from rlightning.models.layers import compile_layers
from rlightning.models.routers import FLOAT32_ROUTERS, keep_routers_float32

KINDS = ["axk1", "deepseek_v2", "deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite", "hy_v3"]
KINDS += ["longcat_flash", "solar_open"]
PROTECTED = {"Ernie4_5_MoeTopKRouter"}
"""Disables autocast itself."""


def make_router(kind: str) -> tuple[Any, tuple[Tensor, ...]]:
    """A random router, and what it is called with: hidden states, and biases for one whose layer keeps them."""
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_config(tiny_config(kind))
    router = next(module for module in policy.modules() if type(module).__name__ in FLOAT32_ROUTERS)
    for weight in router.parameters():
        nn.init.normal_(weight, 0.0, 0.2)
    biases = (torch.randn(4),) if kind == "hy_v3" else ()
    return router, (torch.randn(64, 32), *biases)


@pytest.mark.parametrize("kind", KINDS)
def test_router_under_autocast_is_that_of_float32(kind: str) -> None:
    router, (hidden, *biases) = make_router(kind)
    rounded = copy.deepcopy(router)
    for weight in rounded.parameters():
        weight.data = weight.data.bfloat16().float()
    exact = rounded(hidden.bfloat16().float(), *biases)
    with torch.autocast("cpu", torch.bfloat16):
        before = router(hidden, *biases)
        keep_routers_float32(router)
        found = copy.deepcopy(router)(hidden, *biases)
    assert found[0].dtype == torch.float32
    assert all(torch.equal(one, other) for one, other in zip(found, exact, strict=True))
    assert not torch.equal(before[0].float(), exact[0])
    sum(part.sum() for part in found if part.is_floating_point()).backward()


class Float32Products(TorchFunctionMode):
    """Records the classes of modules, without linear layers, that multiply in float32.

    Args:
        model: in bfloat16.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.running: list[str] = []
        self.found: set[str] = set()
        for module in model.modules():
            if type(module) is not nn.Linear:
                module.register_forward_pre_hook(lambda module, _: self.running.append(type(module).__name__))
                module.register_forward_hook(lambda *_: self.running.pop() and None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear and args[0].dtype == torch.float32:
            self.found.add(self.running[-1])
        return func(*args, **kwargs or {})


@pytest.mark.slow
def test_all_routers_that_cast_are_known() -> None:
    """Of the mixtures of experts that transformers has, are not refused, and can be built in these sizes."""
    casting: set[str] = set()
    for config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        try:
            config = tiny_config(config_class.model_type, num_key_value_heads=4)
            if not num_experts(config):
                continue
            check_config(config.model_type, config)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            products = Float32Products(model)
            with torch.no_grad(), products:
                model(torch.arange(3, 9)[None], use_cache=False)
        except (ConfigError, StrictDataclassError, *BUILD_ERRORS):
            continue
        casting |= products.found
    assert casting and casting - PROTECTED <= FLOAT32_ROUTERS


@pytest.mark.slow
def test_layers_with_float32_routers_compile_in_one_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlightning.models.layers.BACKEND", "eager")
    eager = load_policy(save_tiny("glm4_moe", tmp_path, head_dim=8, first_k_dense_replace=0))
    compiled = copy.deepcopy(eager)
    compile_layers(compiled)
    scores: list[Tensor] = []
    eager.model.layers[1].mlp.gate.register_forward_hook(lambda router, given, result: scores.append(result[0]))
    torch._dynamo.reset()
    counters.clear()
    inputs = packed_inputs(make_sequences())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(**inputs).logits, eager(**inputs).logits)
    assert scores[0].dtype == torch.float32
    assert counters["stats"]["unique_graphs"] and not counters["graph_break"]
