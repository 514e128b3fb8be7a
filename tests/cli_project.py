"""A folder as a user of the command line has it: a tiny model, rows, a configuration, classes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import heed_ctrl_c, save_model

from rlightning.__main__ import main

heed_ctrl_c()

RUN_YAML = """\
model:
  class_path: rlightning.algorithms.SFT
  init_args:
    model: model
    prompts_per_step: 4
    lr: 0.01
data:
  train: rows.jsonl
  max_prompt_tokens: 16
rollout:
  temperature: 0.8
trainer:
  accelerator: cpu
  max_steps: 3
  enable_model_summary: false
"""

OWN_CLASSES = """\
from lightning.pytorch import Callback

from rlightning.algorithms import SFT
from rlightning.errors import ConfigError


class Quick(SFT):
    def __init__(self, model: str, *, pace: float = 1.0, **kwargs):
        if pace < 0:
            raise ConfigError(f"pace={pace} must not be negative. Use 0 or more.")
        super().__init__(model, **kwargs)


class WrongInSetup(SFT):
    def setup(self, stage):
        raise ConfigError("width=3 cannot be\\nhalved. Use 4.")


class Broken(SFT):
    def setup(self, stage):
        raise RuntimeError("not the user's mistake")


class Announce(Callback):
    def __init__(self, word: str = "hello", times: int = 1):
        self.word = word * times

    def on_fit_start(self, trainer, module):
        print(self.word, flush=True)
"""


def make_project(folder: Path) -> None:
    """Write all of it into ``folder``."""
    save_model(folder / "model", num_hidden_layers=1)
    rows = [{"prompt": f"{a}+1=", "completion": str(a + 1)} for a in range(16)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(RUN_YAML)
    (folder / "own_classes.py").write_text(OWN_CLASSES)


def environment() -> dict[str, str]:
    """A user's environment: one thread, no path to this repository's tests, no W&B service of another test's."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("WANDB")}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def rlightning(folder: Path, *args: str, as_module: bool = False) -> "subprocess.CompletedProcess[str]":
    """Run the command in ``folder``, as the installed script or by ``python -m``."""
    script = [str(Path(sys.executable).with_name("rlightning"))]
    command = [sys.executable, "-m", "rlightning"] if as_module else script
    return subprocess.run(
        [*command, *args], cwd=folder, env=environment(), capture_output=True, text=True, timeout=500, check=False
    )


def fit(folder: Path, *options: str, exit_code: int = 0) -> "subprocess.CompletedProcess[str]":
    """Run ``rlightning fit --config run.yaml`` in ``folder``, which has to end with this exit code."""
    done = rlightning(folder, "fit", "--config", "run.yaml", *options)
    assert done.returncode == exit_code, done.stdout + done.stderr
    return done


def fit_here(capsys: pytest.CaptureFixture[str], *options: str, command: str = "fit") -> tuple[int, str]:
    """Run a command, ``fit`` unless given, in this process and folder; the exit code and what stderr says."""
    try:
        code = main([command, *options])
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, capsys.readouterr().err


def resolve_config(capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    """The configuration that ``fit --config run.yaml`` shows for these options, in this process and folder."""
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", "run.yaml", *options, "--print_config"])
    shown = capsys.readouterr()
    assert stop.value.code == 0, shown.err
    return yaml.safe_load(shown.out)
