"""A worker that gets adapters wrong, in a way that a file says."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

from torch import Tensor

from rlightning.rollout.vllm.weight_receiver import WorkerExtension


class WrongAdapter(WorkerExtension):
    """Does with an adapter what the file of the variable FAULT says; "" is nothing wrong."""

    def rl_install_adapter(self, settings: Mapping[str, object], weights: Mapping[str, Tensor]) -> Sequence[str]:
        fault = Path(os.environ["FAULT"]).read_text()
        settings, weights = dict(settings), dict(weights)
        if fault == "older":
            return []
        if fault == "not applied":
            weights = {name: weight.zero_() for name, weight in weights.items()}
        if fault == "applied twice":
            weights = {name: weight * 2 if "lora_B" in name else weight for name, weight in weights.items()}
        if fault == "alpha":
            settings["lora_alpha"] = settings["r"]
        if fault == "rslora":
            settings["use_rslora"] = True
        if fault == "one module missing":
            weights = {name: weight for name, weight in weights.items() if "layers.1.self_attn.k_proj" not in name}
        if fault == "no installation":
            with patch("rlightning.rollout.vllm.adapters.LoRAModel"):  # whose layers are none
                return super().rl_install_adapter(settings, weights)
        return super().rl_install_adapter(settings, weights)
