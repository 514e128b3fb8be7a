"""FlashAttention 4 under FSDP and tensor parallelism: the steps that a single GPU takes in float32."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence_run import BF16_DISTANCE, distance, train
from rank_processes import each_run, finish, start_calls
from tiny import save_model

from rlightning.models import load_config
from rlightning.models.attention import describe_attention
from rlightning.models.flash_attention_4 import INTERFACE
from rlightning.models.flash_attention_trial import _find_obstacle
from rlightning.parallel.fsdp import FSDP

RUNS: dict[str, dict[str, Any]] = {
    f"{name}-{kernel}": {"strategy": strategy, "has_package": kernel == "fa4"}
    for name, strategy in {"fsdp": {}, "tensor": {"tensor_parallel_size": 2}}.items()
    for kernel in ("fa4", "varlen")
}


def is_installed() -> bool:
    return find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None


def train_each_kernel(folder: Path, model: str, runs: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The kernel of each run, by its name; rank 0 writes what it came to."""
    kernels = {}
    for name, arguments in each_run(runs):
        (folder / name).mkdir(exist_ok=True)
        _find_obstacle.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            if not arguments["has_package"]:
                patch.setitem(sys.modules, INTERFACE, None)
            strategy = FSDP(**arguments["strategy"])
            result = train(folder / name, model, strategy, 2, precision="bf16-mixed", accelerator="gpu")
            device = torch.device("cuda", torch.cuda.current_device())
            kernels[name] = describe_attention(load_config(model), device, torch.bfloat16)
        torch._dynamo.reset()
        torch.save(result, folder / f"{name}.{device.index}.pt")
    return kernels


@pytest.mark.timeout(400)
@pytest.mark.multigpu
@pytest.mark.skipif(not is_installed(), reason="flash-attn-4 is not installed")
def test_flash_attention_4_on_ranks_equals_varlen_attn(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", head_dim=64, num_attention_heads=4, num_key_value_heads=2)
    one = train(tmp_path, model, "auto", accelerator="gpu")
    kernels = finish(start_calls(train_each_kernel, 2, tmp_path, model, RUNS))
    for name, arguments in RUNS.items():
        for rank, found in enumerate(kernels):
            assert ("(FlashAttention 4)" in found[name]) is arguments["has_package"], (name, rank, found[name])
        assert distance(one, torch.load(tmp_path / f"{name}.0.pt")) <= BF16_DISTANCE, name
