"""A sharded policy is saved as a whole one is, by one rank, without any rank gathering the model."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from sharded_net import run_ranks
from tiny import save_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from rlightning.models import export, load_config, load_policy, load_tokenizer, save_policy
from rlightning.models.sharded_policy import load_sharded_policy
from rlightning.parallel.gathering import gather_into
from rlightning.parallel.sharding import Sharding

pytestmark = pytest.mark.processes

WINDOW = 4096
MESHES = {"data parallel": (1, 2, 1), "tensor parallel": (1, 1, 2), "replicated": (2, 1, 1)}


def read(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def save_from_shards(folder: Path, model: str, max_file_bytes: int) -> None:
    """Save from each mesh; note what a rank other than the writer allocates."""
    allocated: list[int] = []
    empty: Any = torch.empty

    def note(*shape: int, **kwargs: Any) -> Tensor:
        made: Tensor = empty(*shape, **kwargs)
        allocated.append(0 if made.is_meta else made.nbytes)
        return made

    for name, sizes in MESHES.items():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard", "tensor_parallel"))
        policy = load_sharded_policy(model, Sharding(mesh, torch.device("cpu")))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(export, "gather_into", functools.partial(gather_into, gather_bytes=WINDOW))
            patch.setattr(torch, "empty", note)
            save_policy(
                policy, load_tokenizer(model), folder / name, dtype=torch.bfloat16, max_file_bytes=max_file_bytes
            )
        assert (folder / name / "config.json").is_file()  # on every rank, once the call is over
    largest = max(weight.numel() for weight in policy.parameters()) * 2
    if dist.get_rank() == 1:
        assert allocated and max(allocated) <= max(WINDOW, largest)
        (folder / "allocated.json").write_text(json.dumps(allocated))


def test_what_shards_give_is_what_a_whole_policy_gives(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", num_key_value_heads=2)
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [0, 3], "temperature": 0.6}')
    tokenizer = load_tokenizer(model)
    policy = load_policy(model)
    save_policy(policy, tokenizer, tmp_path / "one file", dtype=torch.bfloat16)
    save_policy(policy, tokenizer, tmp_path / "plain", dtype=torch.bfloat16, max_file_bytes=20_000)
    run_ranks(save_from_shards, 2, tmp_path, model, 20_000)

    expected = read(tmp_path / "one file")
    total = sum(tensor.nbytes for tensor in expected.values())
    assert "lm_head.weight" not in expected  # tied
    for name in ("plain", *MESHES):
        folder = tmp_path / name
        saved = read(folder)
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[key], value) and value.dtype == torch.bfloat16 for key, value in expected.items())
        files = sorted(folder.glob("*.safetensors"))
        assert len(files) > 2
        assert all(file.stat().st_size < 20_000 + 4_000 for file in files)  # the header is 4 kB at most
        assert {file.name: file.read_bytes() for file in files} == {
            file.name: file.read_bytes() for file in sorted((tmp_path / "plain").glob("*.safetensors"))
        }
        for other in ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"):
            assert (folder / other).read_text() == (tmp_path / "plain" / other).read_text()
        loaded: Any
        info: dict[str, Any]
        loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)  # type: ignore[misc]
        assert not any(info.values()) and loaded.dtype == torch.bfloat16
        assert load_config(str(folder)).architectures == ["Qwen3ForCausalLM"]
    assert sum(json.loads((tmp_path / "allocated.json").read_text())) < len(MESHES) * total
    assert not list(tmp_path.glob("*.partial"))
