"""A run of SFT on a tiny model, for the tests of checkpoints."""

import json
import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from tiny import bare_trainer

from rlightning.algorithms import SFT
from rlightning.data import PromptDataModule
from rlightning.models import Adapter
from rlightning.optim import OptimizerStates
from rlightning.parallel.checkpoint_io import AtomicCheckpointIO

SIZES = {"num_key_value_heads": 2, "hidden_size": 31, "tie_word_embeddings": False}
"""An odd number of rows, which two ranks cannot share out evenly, and an output layer of its own."""


class CountSteps(Callback):
    """A callback with a state."""

    def __init__(self) -> None:
        self.num_steps = 0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.num_steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_steps = state_dict["num_steps"]


def write_rows(folder: Path) -> None:
    """Sixteen sums with their results."""
    rows = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(4) for b in range(4)]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))


def train(
    folder: Path,
    max_steps: int,
    *callbacks: Callback,
    ckpt_path: Path | None = None,
    optimizer_states: OptimizerStates = "float32",
    adapter: Adapter | None = None,
    **trainer: Any,
) -> tuple[SFT, Any]:
    """Train up to ``max_steps``; the module and its trainer."""
    module = SFT(
        str(folder / "model"),
        prompts_per_step=4,
        lr=1e-2,
        warmup_steps=6,
        weight_decay=0.1,
        optimizer_states=optimizer_states,
        adapter=adapter,
    )
    data = PromptDataModule(str(folder / "rows.jsonl"), max_prompt_tokens=16)
    if "strategy" not in trainer:
        trainer["plugins"] = [AtomicCheckpointIO()]
    made = bare_trainer(folder, max_steps, *callbacks, **trainer)
    made.fit(module, data, ckpt_path=ckpt_path)
    return module, made


def pose_as_launched(rank: int, num_ranks: int, port: int) -> None:
    """Set the variables by which Lightning sees that it need not start the ranks itself."""
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK")
    os.environ.update(zip(names, ("127.0.0.1", str(port), str(num_ranks), "0", str(rank)), strict=True))
