"""One rank of an asynchronous run that ends in its third update, or goes on from before; writes ``rank<n>.json``.

Arguments: folder, and "begin" or "resume".
"""

import json
import sys
from pathlib import Path
from typing import Any

from engine_run import make_data, make_module, make_rollout, make_trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks_rollout_run import Witness

from rlightning.hooks import RLCallback
from rlightning.parallel.fsdp import FSDP


class InterruptionError(Exception):
    """Ends a run in the middle of a step."""


class Interrupts(RLCallback):
    """Raises in the third update."""

    def on_update_start(self, trainer: Any, module: Any, batch: Any) -> None:
        if module.weight_version == 2:
            trainer.strategy.barrier("interrupted")  # the first to raise ends the others
            raise InterruptionError


def main(folder: Path, is_resumed: bool) -> None:
    rollout, witness = make_rollout(placement="standalone", max_staleness=1), Witness(victim=-1)
    saves = ModelCheckpoint(folder / "checkpoints", save_last=True, every_n_train_steps=1)
    callbacks = [rollout, witness, saves, *([] if is_resumed else [Interrupts()])]
    strategy = FSDP(failure_grace=500)
    trainer = make_trainer(folder, 3, *callbacks, strategy=strategy, devices=2, enable_checkpointing=True)
    module = make_module(str(folder / "model"), prompts_per_step=4, samples_per_prompt=3)
    checkpoint = folder / "checkpoints" / "last.ckpt" if is_resumed else None
    try:
        trainer.fit(module, make_data(folder), ckpt_path=checkpoint)
    finally:
        in_flight = [group["prompt"]["index"] for group in rollout.in_flight.state_dict()["groups"]]
        result = {"steps": witness.steps, "in_flight": in_flight, "updates": module.weight_version}
        (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "resume")
