import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from prompt_files import make_metaspace_tokenizer
from tiny import bare_trainer, save_weights

from rlightning.algorithms import SFT
from rlightning.data import PromptDataModule, ValidationSet
from rlightning.data.formatting import PromptFormat, build_prompts
from rlightning.data.sources import read_rows
from rlightning.errors import ConfigError
from rlightning.types import Prompt

SFT_FORMAT = PromptFormat(completion_column="completion")
PROBLEMS = [(f"{a}+{b}=", str(a + b)) for a in range(4) for b in range(4)]


def make_prompts(module: SFT, folder: Path, problems: list[tuple[str, str]] = PROBLEMS) -> list[Prompt]:
    return list(build_prompts(read_rows(write_problems(folder, problems)), module.tokenizer, SFT_FORMAT))


def write_problems(folder: Path, problems: list[tuple[str, Any]] = PROBLEMS) -> str:
    path = folder / "sums.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt, "completion": text}) for prompt, text in problems))
    return str(path)


def test_rows_become_a_batch(model_folder: str, tmp_path: Path) -> None:
    module = SFT(model_folder)
    batch = module._pack(make_prompts(module, tmp_path, [("1+2=", "3"), ("9+3=", "12")]))
    # Digits are tokens 1 to 10, + is 11, = is 12, and 0 ends a sequence.
    assert batch.token_ids.tolist() == [2, 11, 3, 12, 4, 0, 10, 11, 4, 12, 2, 3, 0]
    assert batch.is_sampled.tolist() == [False] * 4 + [True] * 2 + [False] * 4 + [True] * 3
    assert [c.text for c in batch.completions] == ["3", "12"]


def test_loss_is_the_negative_log_likelihood(model_folder: str, tmp_path: Path) -> None:
    module = SFT(model_folder)
    batch = module._pack(make_prompts(module, tmp_path))
    logprobs = torch.randn(batch.num_tokens).bfloat16()
    loss, metrics = module.policy_loss(logprobs, batch)
    assert torch.equal(loss, -logprobs.float())
    assert metrics == {}
    assert module.compute_advantages(batch).eq(1).all()


def make_data(folder: Path, validation_batch_size: int) -> PromptDataModule:
    path = write_problems(folder)
    sets: Any = {"sums": ValidationSet(path)}
    return PromptDataModule(path, validation=sets, max_prompt_tokens=16, validation_batch_size=validation_batch_size)


@pytest.mark.long
def test_training_learns_and_validation_reports_loss(model_folder: str, tmp_path: Path) -> None:
    module = SFT(model_folder, prompts_per_step=16, lr=2e-2, max_tokens_per_microbatch=100)
    trainer = bare_trainer(tmp_path, 25, check_val_every_n_epoch=25)
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
    batch = module._pack(make_prompts(module, tmp_path))
    with torch.no_grad():
        logprobs, _ = module.compute_logprobs(batch)
    assert again == pytest.approx(-logprobs[batch.is_sampled].mean().item(), rel=1e-4)


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        (None, "line 15: completion_column='completion' holds None. It must be text"),
        (7, "line 15: completion_column='completion' holds 7. It must be text"),
        ("1" * 60, "line 15: prompt and completion have more tokens than the model's 64 positions"),
    ],
)
@pytest.mark.parametrize("is_validation", [False, True])
def test_sft_unusable_completion_raises_before_training(
    completion: Any, message: str, is_validation: bool, model_folder: str, tmp_path: Path
) -> None:
    module = SFT(model_folder, prompts_per_step=4)
    (tmp_path / "bad").mkdir()
    bad = write_problems(tmp_path / "bad", [*PROBLEMS[:14], ("1+1=", completion), PROBLEMS[0]])
    train = write_problems(tmp_path) if is_validation else bad
    data = PromptDataModule(train, validation=bad if is_validation else None, max_prompt_tokens=16)
    with pytest.raises(ConfigError, match=message) as caught:
        bare_trainer(tmp_path, 10).fit(module, data)
    assert str(caught.value).startswith(bad)
    assert module.actor is None


def test_a_row_without_its_completion_is_named(model_folder: str, tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text('{"prompt": "1", "completion": "1"}\n{"prompt": "1", "complete": "1"}\n')
    with pytest.raises(ConfigError, match=r"sums\.jsonl, line 2 has no column 'completion', which other rows have"):
        bare_trainer(tmp_path, 1).fit(
            SFT(model_folder, prompts_per_step=1), PromptDataModule(str(path), max_prompt_tokens=9)
        )


def test_prompts_without_completions_are_refused(model_folder: str) -> None:
    with pytest.raises(ConfigError, match=r"Prompt 3 has no completion_ids\. Build it with"):
        SFT(model_folder)._pack([Prompt(3, "1", [2], {"completion": "1"})])


def test_a_completion_is_split_from_the_whole_text(tmp_path: Path) -> None:
    tokenizer = make_metaspace_tokenizer(adds_eos=True)
    tokenizer.save_pretrained(tmp_path)
    save_weights(tmp_path, len(tokenizer), 0, eos_token_id=1)
    module = SFT(str(tmp_path))
    batch = module._pack(make_prompts(module, tmp_path, [("A:", "T"), ("A: ", "T")]))
    # <s> 0, </s> 1, : 4, T 5, with a space before it A is 6 and T 7
    assert batch.token_ids.tolist() == [0, 6, 4, 5, 1, 0, 6, 4, 7, 1]
    assert batch.is_sampled.tolist() == [False, False, False, True, True] * 2


def test_a_missing_column_names_the_nearest(model_folder: str) -> None:
    with pytest.raises(
        ConfigError, match=r"train.jsonl: completion_column='answr' does not exist. Did you mean 'answer'"
    ):
        SFT(model_folder, completion_column="answr").check_columns(["prompt", "answer"], "train.jsonl")


def test_resume_with_a_changed_completion_is_refused(model_folder: str, tmp_path: Path) -> None:
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in PROBLEMS]
    checkpoints = ModelCheckpoint(tmp_path, filename="last")
    trainer = bare_trainer(tmp_path, 1, checkpoints, enable_checkpointing=True)
    trainer.fit(SFT(model_folder, prompts_per_step=4), PromptDataModule(rows))
    rows[3] = {**rows[3], "completion": "7"}
    with pytest.raises(ConfigError, match="The column 'completion' of the training prompts"):
        bare_trainer(tmp_path, 2).fit(
            SFT(model_folder, prompts_per_step=4),
            PromptDataModule(rows),
            ckpt_path=str(tmp_path / "last.ckpt"),
            weights_only=False,
        )
