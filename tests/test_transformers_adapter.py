"""TransformersAdapter in the real transformers Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_completion
from transformers import Qwen3ForCausalLM, Trainer, TrainingArguments

from rlightning.callbacks import CompletionsTable, SaveHF
from rlightning.errors import ConfigError
from rlightning.hooks import RLCallback, call_hook
from rlightning.transformers_adapter import TransformersAdapter
from rlightning.types import Prompt, RolloutBatch, single_turns

pytestmark = pytest.mark.usefixtures("fresh_process")


class Witness(RLCallback):
    """Notes the hooks, with the number of finished steps."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.seen.append((f"setup {stage}", trainer.global_step))

    def on_rollout_end(self, trainer: Any, module: Any, batch: Any) -> None:
        self.seen.append(("rollout", trainer.global_step))

    def on_update_end(self, trainer: Any, module: Any, batch: Any) -> None:
        self.seen.append(("update", trainer.global_step))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(("end", trainer.global_step))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.seen.append((f"teardown {stage}", trainer.global_step))


class Rewarding(Trainer):
    """Has completions, which are rewarded, in each of its micro-batches."""

    adapter: TransformersAdapter

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        batch = RolloutBatch.pack(
            single_turns([Prompt(0, "1+", [2, 11], {})], [[make_completion([3]), make_completion([4, 0])]])
        )
        call_hook(self.adapter, model, "on_rollout_end", batch)
        batch.rewards = torch.tensor([0.0, 1.0])
        call_hook(self.adapter, model, "on_reward_end", batch)
        call_hook(self.adapter, model, "on_update_start", batch)
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        return loss


def train(model_folder: str, folder: Path, *callbacks: Any, num_steps: int = 2) -> TransformersAdapter:
    """Train on a row or two a step, in two micro-batches."""
    model = Qwen3ForCausalLM.from_pretrained(model_folder)
    rows = [{"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([1, 2, 3])}] * 8
    arguments = TrainingArguments(
        str(folder),
        max_steps=num_steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Rewarding(model=model, args=arguments, train_dataset=rows)
    trainer.adapter = TransformersAdapter(trainer, callbacks)
    trainer.add_callback(trainer.adapter)
    trainer.train()
    return trainer.adapter


@pytest.mark.long
def test_hooks_come_as_in_a_loop_of_ones_own(model_folder: str, tmp_path: Path) -> None:
    witness = Witness()
    adapter = train(model_folder, tmp_path, witness)
    assert witness.seen == [
        ("setup fit", 0),
        ("rollout", 0),
        ("update", 0),  # the first micro-batch
        ("rollout", 0),
        ("update", 1),
        ("rollout", 1),
        ("update", 1),
        ("rollout", 1),
        ("update", 2),
        ("end", 2),
        ("teardown fit", 2),
    ]
    assert (adapter.global_rank, adapter.world_size, adapter.default_root_dir) == (0, 1, str(tmp_path))
    assert adapter.optimizer is adapter.trainer.optimizer
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = adapter.nothing_of_the_kind


def test_completions_of_a_step_are_in_one_file(model_folder: str, tmp_path: Path) -> None:
    import pyarrow.parquet

    train(model_folder, tmp_path, CompletionsTable(every_n_steps=1))
    files = sorted((tmp_path / "completions").iterdir())
    assert [file.name for file in files] == ["step_000001.parquet", "step_000002.parquet"]
    rows = pyarrow.parquet.read_table(files[0]).to_pylist()
    assert [(row["step"], row["group"], row["reward"]) for row in rows] == [(1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]


@pytest.mark.long
def test_model_is_saved_or_refused_at_start(model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^Qwen3ForCausalLM has no save_hf"):
        train(model_folder, tmp_path, SaveHF())
    monkeypatch.setattr(Qwen3ForCausalLM, "save_hf", Qwen3ForCausalLM.save_pretrained, raising=False)
    train(model_folder, tmp_path, SaveHF())
    assert (tmp_path / "hf" / "model.safetensors").is_file()
