"""What `save_hf` writes is what others load."""

from pathlib import Path

import pytest
import torch
from engine_models import save_model
from lightning.pytorch import Trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlightning.algorithms import SFT
from rlightning.callbacks import SaveHF
from rlightning.data import PromptDataModule
from rlightning.rollout.engine_link import VLLMConfig
from rlightning.rollout.vllm_engine import VLLMEngine

pytestmark = pytest.mark.processes

TEXT = "12+34=46"


def test_transformers_and_vllm_load_what_a_run_saved(tmp_path: Path) -> None:
    source = save_model(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+2=", "completion": "3"}\n' * 8)
    module = SFT(source, prompts_per_step=4, lr=1e-2, warmup_steps=0)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=3,
        max_epochs=-1,
        default_root_dir=tmp_path / "run",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[SaveHF()],
    )
    trainer.fit(module, PromptDataModule(str(rows), max_prompt_tokens=16))
    saved = tmp_path / "run" / "hf"

    token_ids = AutoTokenizer.from_pretrained(saved)(TEXT).input_ids
    expected = logprobs_of(saved, token_ids)
    assert (expected - logprobs_of(Path(source), token_ids)).abs().max() > 0.01  # it was trained
    assert torch.allclose(module.score(token_ids), expected, atol=1e-5)

    engine_args = {
        "model": str(saved),  # with its own weights: nothing is sent
        "dtype": "float32",
        "max_model_len": 64,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 28,
        "distributed_executor_backend": "uni",
    }
    engine = VLLMEngine(
        VLLMConfig(
            engine_args=engine_args,
            device=torch.device("cpu"),
            dtype=torch.float32,
            log_file=tmp_path / "engine.log",
        )
    )
    engine.start()
    try:
        assert torch.allclose(torch.from_numpy(engine.score(token_ids)), expected, atol=1e-4)
    finally:
        engine.close()


@torch.no_grad()
def logprobs_of(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """[P], as transformers computes them; the first one 0."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    logits = model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
    picked = logits.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
    return torch.cat([torch.zeros(1), picked])
