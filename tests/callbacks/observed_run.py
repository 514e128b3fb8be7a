"""A run with all that callbacks watch, without an engine: a tiny module calls the hooks with hand-made batches."""

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rich
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from programs import read_csv
from tiny import bare_trainer
from torch.utils.data import DataLoader

from rlightning.hooks import call_hook
from rlightning.types import Prompt, RolloutBatch, Sample, Trajectory, single_turns


def make_completion(text: str, finish_reason: Any = "stop") -> Sample:
    """A completion with a token a character."""
    num = len(text)
    return Sample(
        token_ids=[ord(character) for character in text],
        logprobs=[-0.5] * num,
        weight_versions=[0] * num,
        text=text,
        finish_reason=finish_reason,
    )


def make_prompt(index: int = 0, text: str = "2+2=") -> Prompt:
    """A prompt with a token a character."""
    return Prompt(index=index, text=text, token_ids=list(text.encode("ascii")), columns={"answer": "4"})


def make_batch() -> RolloutBatch:
    """Two prompts of 4 tokens with two completions each: 16 + 6 = 22 tokens."""
    prompts = [make_prompt(0, "2+2="), make_prompt(7, "3*3=")]
    completions = [
        [make_completion("4"), make_completion("55", "length")],
        [make_completion("9"), make_completion("99")],
    ]
    return RolloutBatch.pack(single_turns(prompts, completions))


def add_rewards(batch: RolloutBatch) -> None:
    """Set the four rewards and what they are made of."""
    batch.rewards = torch.tensor([1.0, 0.0, 0.5, 0.5])
    batch.scores = {
        "exact": torch.tensor([1.0, 0.0, 1.0, 0.0]),
        "format": torch.tensor([1.0, 0.0, 0.0, float("nan")]),
    }


class ObservedModule(LightningModule):
    """Calls the RL hooks in their order, two optimizer steps a rollout, of which Lightning counts one."""

    def __init__(self, learns: bool = True, fails_at: int | None = None, error: BaseException | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.learns = learns
        self.fails_at = fails_at
        self.error = error or RuntimeError("out of luck")
        self.saved: list[Path] = []

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch  # Lightning cannot walk through frozen dataclasses, and prompts have nothing to move

    def training_step(self, prompts: list[Prompt], batch_idx: int) -> None:
        trainer = self.trainer
        if trainer.global_step + 1 == self.fails_at:
            raise self.error
        batch = self.roll_out(trainer, prompts) if self.learns else make_batch()
        batch.advantages = batch.to_tokens(torch.tensor([1.0, -1.0, 0.0, 0.0]))
        call_hook(trainer, self, "on_update_start", batch)
        self.update()
        call_hook(trainer, self, "on_update_end", batch)
        step = float(trainer.global_step)
        metrics = {"step": step, "policy/loss": 1.0 / step, "optim/grad_norm": 0.25, "optim/lr": 1e-3}
        if self.learns:
            metrics |= {"reward/mean": 0.1 * step, "completion/length": 1.5, "policy/kl": 0.01 * step}
        self.log_dict(metrics, on_step=True)

    def roll_out(self, trainer: Any, prompts: list[Prompt]) -> RolloutBatch:
        call_hook(trainer, self, "on_rollout_start", prompts)
        call_hook(trainer, self, "on_weight_sync_start", 1)
        call_hook(trainer, self, "on_weight_sync_end", 1)
        batch = make_batch()
        call_hook(trainer, self, "on_rollout_end", batch)
        call_hook(trainer, self, "on_reward_start", batch)
        add_rewards(batch)
        call_hook(trainer, self, "on_reward_end", batch)
        return batch

    def update(self) -> None:
        optimizer: Any = self.optimizers()
        for step in (optimizer.optimizer.step, optimizer.step):
            optimizer.zero_grad()
            self.manual_backward((self.weight - 1.0).square().sum())
            step()

    def validation_step(self, prompts: list[Prompt], batch_idx: int) -> None:
        step = float(self.trainer.global_step)
        metrics = {
            "val/sums/reward": 0.25,
            "val/sums/pass@1": 0.25,
            "val/sums/length": 1.5,
            "val/sums/truncated": 0.125,
        }
        self.log_dict({"step": step, **metrics}, batch_size=len(prompts))

    def predict_step(self, prompts: list[Prompt], batch_idx: int) -> list[tuple[Prompt, list[Trajectory]]]:
        samples = [[make_completion("4"), make_completion("55", "length")] for _ in prompts]
        return list(zip(prompts, single_turns(prompts, samples), strict=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def save_hf(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.saved.append(path)


class PlainModule:
    """The policy of a loop that is not Lightning's: nothing but an object."""


class PlainLoop:
    """A loop that is not Lightning's: it has callbacks and calls hooks, nothing else."""

    def __init__(self, *callbacks: Callback) -> None:
        self.callbacks = list(callbacks)

    def step(self, module: Any) -> None:
        batch = make_batch()
        call_hook(self, module, "on_rollout_start", [make_prompt()])
        call_hook(self, module, "on_rollout_end", batch)
        call_hook(self, module, "on_reward_start", batch)
        add_rewards(batch)
        call_hook(self, module, "on_reward_end", batch)
        call_hook(self, module, "on_update_start", batch)
        call_hook(self, module, "on_update_end", batch)


def loader(num_batches: int = 4) -> DataLoader[Any]:
    """Batches of two prompts."""
    prompts: Any = [make_prompt(i) for i in range(2 * num_batches)]
    return DataLoader(prompts, batch_size=2, collate_fn=list)


def make_trainer(folder: Path, *callbacks: Callback, max_steps: int = 3, **kwargs: Any) -> Trainer:
    """A real trainer on the CPU whose run folder is ``folder``."""
    return bare_trainer(folder, max_steps, *callbacks, **{"enable_progress_bar": True} | kwargs)


def save_run(folder: Path, *callbacks: Callback, max_steps: int) -> Path:
    """The checkpoint of a run of so many steps."""
    trainer = make_trainer(folder, *callbacks, max_steps=max_steps)
    trainer.fit(ObservedModule(), loader())
    trainer.save_checkpoint(folder / "last.ckpt")
    return folder / "last.ckpt"


def logged_rows(folder: Path, module: LightningModule, *callbacks: Callback) -> list[dict[str, str]]:
    """The metrics of a run of three steps, a row a step."""
    make_trainer(folder, *callbacks, logger=CSVLogger(folder, name="", version="")).fit(module, loader())
    return read_csv(folder / "metrics.csv")


class Terminal(io.StringIO):
    """A standard output that is one."""

    def isatty(self) -> bool:
        return True


def shown_on_terminal(run: Callable[[], None]) -> str:
    """Return the text that a run writes to a terminal, without control sequences."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", terminal := Terminal())
        for name, value in {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}.items():
            patch.setenv(name, value)
        rich.reconfigure()
        run()
    rich.reconfigure()
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", terminal.getvalue())


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The package's own log lines."""
    return [record.getMessage() for record in caplog.records if record.name == "rlightning"]
