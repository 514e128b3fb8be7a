"""A worker that gets adapters wrong, in a way that a file says."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

from torch import Tensor

from rlightning.rollout.vllm.weight_receiver import WorkerExtension


class WrongAdapter(WorkerExtension):
    """Does with an adapter what the file of the variable FAULT says; "" is nothing wrong."""

    def rl_receive_weights(self, chunk: int) -> tuple[list[str], list[str]]:
        if chunk == 1 and Path(os.environ["FAULT"]).read_text() == "no second chunk":
            raise RuntimeError("no second chunk")
        return super().rl_receive_weights(chunk)

    def rl_install_adapter(self, settings: Mapping[str, object], weights: Mapping[str, Tensor]) -> Sequence[str]:
        fault = Path(os.environ["FAULT"]).read_text()
        if fault == "older":
            return []
        if not fault:
            return super().rl_install_adapter(settings, weights)
        if fault == "no installation":
            with patch("rlightning.rollout.vllm.adapters.LoRAModel"):  # whose layers are none
                return super().rl_install_adapter(settings, weights)
        if fault == "no repetition":
            with patch("rlightning.rollout.vllm.adapters.RecordedWrites.repeat", side_effect=RuntimeError(fault)):
                return super().rl_install_adapter(settings, weights)
        settings, weights = dict(settings), dict(weights)
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
        self._rl_installed = None  # this one and the next have other settings or tensors than the ones before them
        try:
            return super().rl_install_adapter(settings, weights)
        finally:
            self._rl_installed = None
