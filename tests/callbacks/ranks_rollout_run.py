"""One rank of a run with real engines; writes what it saw to ``rank<n>.json``.

Arguments: folder, ranks an engine, and arguments of VLLMRollout as JSON.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from engine_run import find_core, make_data, make_module, make_rollout, make_trainer

from rlightning.hooks import RLCallback
from rlightning.parallel.fsdp import FSDP


class Witness(RLCallback):
    """Notes each step's prompts, tokens and gap; kills one rank's engine as the second rollout begins."""

    def __init__(self, victim: int) -> None:
        self.victim = victim
        self.steps: list[dict[str, Any]] = []
        self.engines: set[int] = set()

    def on_rollout_start(self, trainer: Any, module: Any, prompts: Any) -> None:
        engine = module.generator.engine
        if engine is not None and engine.process is not None:
            self.engines.add(engine.process.pid)
            if trainer.global_rank == self.victim and trainer.global_step == 1:
                engine.ready.result()  # standalone, another may have been up before it
                os.kill(find_core(engine.process.pid), signal.SIGKILL)

    def on_rollout_end(self, trainer: Any, module: Any, batch: Any) -> None:
        versions = set(batch.weight_versions[batch.is_sampled].tolist())
        self.steps.append({"sampled": [p.index for p in batch.prompts], "versions": sorted(versions)})

    def on_update_start(self, trainer: Any, module: Any, batch: Any) -> None:
        self.steps[-1] |= {"tokens": batch.num_tokens, "updated": [prompt.index for prompt in batch.prompts]}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        names = ("policy/rollout_gap_max", "reward/mean", "completion/length_max")
        self.steps[-1] |= {name: float(trainer.callback_metrics[name]) for name in names}
        self.steps[-1] |= {"stopped": module.generator.last.get("rollout/stopped")}
        engine = module.generator.engine
        if engine is not None:
            self.engines.add(engine.process.pid)


def main(folder: Path, ranks_per_engine: int, arguments: dict[str, Any]) -> None:
    engine = {"tensor_parallel_size": ranks_per_engine} if ranks_per_engine > 1 else {}
    rollout = make_rollout(engine=engine, verify_every=1, **arguments)
    witness = Witness(victim=1 if ranks_per_engine == 1 and "placement" not in arguments else 0)
    strategy = FSDP(tensor_parallel_size=ranks_per_engine)
    trainer = make_trainer(folder, 3, rollout, witness, strategy=strategy, devices=2)
    module = make_module(str(folder / "model"), prompts_per_step=4, samples_per_prompt=3)
    trainer.fit(module, make_data(folder))
    in_flight = [group["prompt"]["index"] for group in rollout.in_flight.state_dict()["groups"]]
    result = {"steps": witness.steps, "num_engines": len(witness.engines), "in_flight": in_flight}
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
