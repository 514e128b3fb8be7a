"""Keeps the routers of mixtures of experts in float32 under autocast, if their own code asks for it.

Some models cast both factors of a router's product to float32, to distinguish experts with close scores. Autocast would
cast the factors back and round the product. Here it rounds only the factors, as an engine's weights and inputs are.
"""

from types import MethodType

import torch
from torch import Tensor, nn
from torch.func import functional_call

FLOAT32_ROUTERS = {
    "AXK1TopkRouter",
    "DeepseekV2TopkRouter",
    "DeepseekV3TopkRouter",
    "Dots1TopkRouter",
    "ExaoneMoeTopkRouter",
    "Glm4MoeLiteTopkRouter",
    "Glm4MoeTopkRouter",
    "HYV3TopKRouter",
    "LongcatFlashTopkRouter",
    "SolarOpenTopkRouter",
}
"""Classes of transformers that cast to float32 and do not disable autocast, of models that can be trained."""


def keep_routers_float32(policy: nn.Module) -> None:
    """Have the routers in :data:`FLOAT32_ROUTERS` compute in float32 under autocast, from inputs and weights that are
    first rounded to autocast's dtype.
    """
    for module in policy.modules():
        if type(module).__name__ in FLOAT32_ROUTERS:
            module.forward = MethodType(_route, _OwnForward(module))


class _OwnForward(nn.Module):
    """Calls a router's original forward without its hooks, which the router's call runs itself."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router

    def forward(self, *args: Tensor) -> object:
        return type(self.router).forward(self.router, *args)


def _route(own: _OwnForward, hidden_states: Tensor, *args: Tensor) -> object:
    """Compute a router's result in float32; replaces the forward, and passes on further arguments, such as biases."""
    kind = hidden_states.device.type
    if not torch.is_autocast_enabled(kind):
        return own(hidden_states, *args)
    dtype = torch.get_autocast_dtype(kind)
    matrices = {name: weight.to(dtype) for name, weight in own.named_parameters() if name.endswith("weight")}
    with torch.autocast(kind, enabled=False):
        return functional_call(own, matrices, (hidden_states.to(dtype), *args))
