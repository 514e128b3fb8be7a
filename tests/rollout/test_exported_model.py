"""What `save_hf` writes is what others load."""

from pathlib import Path

import pytest
import torch
from engine_models import save_model
from tiny import bare_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlightning.algorithms import SFT
from rlightning.callbacks import SaveHF
from rlightning.data import PromptDataModule
from rlightning.types import RolloutBatch

pytestmark = pytest.mark.processes

TEXT = "12+34=46"


def test_transformers_loads_what_a_run_saved(tmp_path: Path) -> None:
    source = save_model(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+2=", "completion": "3"}\n' * 8)
    module = SFT(source, prompts_per_step=4, lr=1e-2, warmup_steps=0)
    bare_trainer(tmp_path / "run", 3, SaveHF()).fit(module, PromptDataModule(str(rows), max_prompt_tokens=16))
    saved = tmp_path / "run" / "hf"

    token_ids = AutoTokenizer.from_pretrained(saved)(TEXT).input_ids
    expected = logprobs_of(saved, token_ids)
    assert (expected - logprobs_of(Path(source), token_ids)).abs().max() > 0.01  # it was trained
    assert torch.allclose(module.score(RolloutBatch.of_sequences([token_ids]), torch.float32), expected, atol=1e-5)


@torch.no_grad()
def logprobs_of(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """[P], as transformers computes them; the first one 0."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    logits = model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
    picked = logits.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
    return torch.cat([torch.zeros(1), picked])
