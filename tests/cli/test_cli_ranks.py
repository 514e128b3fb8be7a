"""The command on several ranks: they speak once, write once, and what a crash leaves is found."""

from pathlib import Path

import pytest
from cli_project import fit, make_project, rlightning
from programs import logged_steps
from safetensors.torch import load_file

pytestmark = pytest.mark.processes

TWO_RANKS = ("--trainer.devices", "2", "--trainer.strategy", "fsdp2")

DIE = """\
import os
import signal
from pathlib import Path

from lightning.pytorch import Callback


class DieInSave(Callback):
    \"\"\"Rank 0 is killed when the checkpoint of step 4 has been written, before it gets its name.\"\"\"

    def on_fit_start(self, trainer, module):
        replace = Path.replace

        def deadly(path, target):
            if trainer.is_global_zero and path.name == ".epoch=0-step=4.ckpt.partial":
                os.kill(os.getpid(), signal.SIGKILL)
            return replace(path, target)

        Path.replace = deadly
"""


def test_two_rank_run_killed_during_save_resumes(tmp_path: Path) -> None:
    make_project(tmp_path)
    (tmp_path / "die.py").write_text(DIE)
    two_ranks = (*TWO_RANKS, "--trainer.default_root_dir", "run")
    saves: tuple[str, ...] = ("--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps", "2")
    saves += ("--trainer.callbacks.save_last", "link", "--trainer.callbacks.enable_version_counter", "false")
    options: tuple[str, ...] = ("--trainer.max_steps", "6", *saves, "--trainer.callbacks+=die.DieInSave")
    killed = rlightning(tmp_path, "fit", "--config", "run.yaml", *two_ranks, *options)
    assert killed.returncode != 0
    checkpoints = tmp_path / "run" / "checkpoints"
    # Rank 1 removes what there is of step 4's unless it ends with rank 0; the next run removes it in any case.
    left = {path.name for path in checkpoints.iterdir()} - {".epoch=0-step=4.ckpt.partial"}
    assert left == {"epoch=0-step=2.ckpt", "last.ckpt"}
    assert (killed.stdout + killed.stderr).count("A step is ") == 1
    assert sorted(path.name for path in (tmp_path / "run").glob("config*")) == ["config.yaml"]
    assert [path.name for path in (tmp_path / "run" / "metrics").iterdir()] == ["version_0"]

    options = ("--ckpt_path", "last", "--trainer.max_steps", "5", *saves, "--trainer.callbacks+=SaveHF")
    continued = fit(tmp_path, *two_ranks, *options)
    assert logged_steps(tmp_path / "run" / "metrics" / "version_1") == [3, 4, 5]
    assert {path.name for path in checkpoints.iterdir()} == {"epoch=1-step=5.ckpt", "last.ckpt"}  # the run's last state
    assert (checkpoints / "last.ckpt").resolve() == checkpoints / "epoch=1-step=5.ckpt"
    assert continued.stderr.count("saved the model to") == 1
    assert load_file(tmp_path / "run" / "hf" / "model.safetensors")

    # one process goes on from the shards of two
    alone = rlightning(tmp_path, "validate", "--config", "run.yaml", "--trainer.default_root_dir", "run",
                       "--data.validation", "rows.jsonl", "--ckpt_path", "last")  # fmt: skip
    assert alone.returncode == 0, alone.stderr
