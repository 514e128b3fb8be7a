"""Folders that ``save_hf`` writes are loaded by transformers and vLLM."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import save_model
from programs import run_python
from tiny import bare_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlightning.algorithms import SFT
from rlightning.callbacks import SaveHF
from rlightning.data import PromptDataModule
from rlightning.models import Adapter
from rlightning.types import RolloutBatch

pytestmark = pytest.mark.processes

TEXT = "12+34=46"


def test_transformers_loads_what_a_run_saved(tmp_path: Path) -> None:
    source = save_model(tmp_path / "model")
    module = train(tmp_path, source, lr=1e-2)
    saved = tmp_path / "run" / "hf"

    token_ids = AutoTokenizer.from_pretrained(saved)(TEXT).input_ids
    expected = logprobs_of(saved, token_ids)
    assert (expected - logprobs_of(Path(source), token_ids)).abs().max() > 0.01  # it was trained
    assert torch.allclose(module.score(RolloutBatch.of_sequences([token_ids]), torch.float32), expected, atol=1e-5)


@pytest.mark.slow
def test_vllm_loads_the_adapters_that_runs_saved(tmp_path: Path) -> None:
    """vLLM loads saved adapters beside their base model; merged models give the same log-probabilities."""
    source = save_model(tmp_path / "model")
    adapters = [Adapter(rank=4, alpha=12), Adapter(rank=3, use_rslora=True, target_modules=["q_proj", "down_proj"])]
    token_ids = AutoTokenizer.from_pretrained(source)(TEXT).input_ids
    expected, folders = [], []
    for number, adapter in enumerate(adapters):
        (folder := tmp_path / f"run{number}").mkdir()
        module = train(folder, source, lr=0.1, adapter=adapter)
        expected.append(module.score(RolloutBatch.of_sequences([token_ids]), torch.float32)[1:])
        folders.append(folder / "run")

    result = tmp_path / "logprobs.json"
    program = Path(__file__).with_name("adapter_of_vllm.py")
    run_python(program, source, json.dumps(token_ids), result, *(folder / "hf_adapter" for folder in folders))
    base, *adapted = torch.tensor(json.loads(result.read_text()))
    for logprobs, own, folder in zip(adapted, expected, folders, strict=True):
        torch.testing.assert_close(logprobs, own, atol=1e-4, rtol=0)
        torch.testing.assert_close(logprobs_of(folder / "hf", token_ids)[1:], own, atol=1e-4, rtol=0)
        assert (own - base).abs().max() > 0.1  # it was trained
    torch.testing.assert_close(base, logprobs_of(Path(source), token_ids)[1:], atol=1e-4, rtol=0)


def train(folder: Path, model: str, **arguments: Any) -> SFT:
    """Three steps, of which ``FOLDER/run`` gets the models."""
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": "1+2=", "completion": "3"}\n' * 8)
    module = SFT(model, prompts_per_step=4, warmup_steps=0, **arguments)
    bare_trainer(folder / "run", 3, SaveHF()).fit(module, PromptDataModule(str(rows), max_prompt_tokens=16))
    return module


@torch.no_grad()
def logprobs_of(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """[P], as transformers computes them; the first one 0."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    logits = model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
    picked = logits.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
    return torch.cat([torch.zeros(1), picked])
