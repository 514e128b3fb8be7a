import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from rlightning.algorithms import SFT
from rlightning.data import PromptDataModule, ValidationSet
from rlightning.errors import ConfigError
from rlightning.types import Prompt

PROBLEMS = [(f"{a}+{b}=", str(a + b)) for a in range(4) for b in range(4)]


def make_prompts(module: SFT, problems: list[tuple[str, str]] = PROBLEMS) -> list[Prompt]:
    def tokens(text: str) -> list[int]:
        ids: list[int] = module.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    return [
        Prompt(index=i, text=prompt, token_ids=tokens(prompt), columns={"prompt": prompt, "completion": completion})
        for i, (prompt, completion) in enumerate(problems)
    ]


def test_rows_become_a_batch(model_folder: str) -> None:
    module = SFT(model_folder)
    batch = module._pack(make_prompts(module, [("1+2=", "3"), ("9+3=", "12")]))
    # Digits are tokens 1 to 10, + is 11, = is 12, and 0 ends a sequence.
    assert batch.token_ids.tolist() == [2, 11, 3, 12, 4, 0, 10, 11, 4, 12, 2, 3, 0]
    assert batch.completion_mask.tolist() == [False] * 4 + [True] * 2 + [False] * 4 + [True] * 3
    assert [c.text for c in batch.completions] == ["3", "12"]


def test_loss_is_the_negative_log_likelihood(model_folder: str) -> None:
    module = SFT(model_folder)
    batch = module._pack(make_prompts(module))
    logprobs = torch.randn(batch.num_tokens).bfloat16()
    loss, metrics = module.policy_loss(logprobs, batch)
    assert torch.equal(loss, -logprobs.float())
    assert metrics == {}
    assert module.compute_advantages(batch).eq(1).all()


def make_data(folder: Path, validation_batch_size: int) -> PromptDataModule:
    rows = [json.dumps({"prompt": prompt, "completion": completion}) for prompt, completion in PROBLEMS]
    path = folder / "sums.jsonl"
    path.write_text("\n".join(rows))
    return PromptDataModule(
        str(path),
        validation={"sums": ValidationSet(str(path))},
        max_prompt_tokens=16,
        validation_batch_size=validation_batch_size,
    )


def test_training_learns_the_rows_and_validation_reports_the_loss(model_folder: str, tmp_path: Path) -> None:
    module = SFT(model_folder, prompts_per_step=16, lr=2e-2, max_tokens_per_microbatch=100)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=25,
        max_epochs=-1,
        check_val_every_n_epoch=25,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, make_data(tmp_path, validation_batch_size=16))
    assert trainer.global_step == 25
    loss = trainer.callback_metrics["val/sums/loss"].item()
    # Guessing among the 14 tokens is 2.6.
    assert loss < 1.6
    # Batches of unequal length average to the mean over all tokens.
    again = trainer.validate(module, make_data(tmp_path, validation_batch_size=5), verbose=False)[0]["val/sums/loss"]
    assert again == pytest.approx(loss, rel=1e-5)
    tested = trainer.test(module, make_data(tmp_path, validation_batch_size=5), verbose=False)[0]["test/sums/loss"]
    assert tested == pytest.approx(loss, rel=1e-5)
    batch = module._pack(make_prompts(module))
    with torch.no_grad():
        logprobs, _ = module.compute_logprobs(batch)
    assert again == pytest.approx(-logprobs[batch.completion_mask].mean().item(), rel=1e-4)


def set_column(prompt: Prompt, value: object) -> None:
    prompt.columns["completion"] = value


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda prompt: set_column(prompt, 7), "completion_column='completion' holds 7 in row 0. It must be text"),
        (lambda prompt: prompt.columns.clear(), "completion_column='completion' holds None in row 0"),
        (
            lambda prompt: set_column(prompt, "1" * 60),
            r"Row 0 has 4 prompt \+ 61 completion = 65 tokens, but the model's positions end at 64",
        ),
    ],
)
def test_rows_that_cannot_be_learned(spoil: Callable[[Prompt], Any], message: str, model_folder: str) -> None:
    module = SFT(model_folder)
    prompts = make_prompts(module)
    spoil(prompts[0])
    with pytest.raises(ConfigError, match=message):
        module._pack(prompts)


def test_a_missing_column_names_the_nearest(model_folder: str) -> None:
    with pytest.raises(
        ConfigError, match=r"train.jsonl: completion_column='answr' does not exist. Did you mean 'answer'"
    ):
        SFT(model_folder, completion_column="answr").check_columns(["prompt", "answer"], "train.jsonl")
