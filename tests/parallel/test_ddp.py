"""The strategies' own barrier, broadcast and reductions, asked by Lightning and a callback on two real ranks."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities import rank_zero_only
from tiny import bare_trainer
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.nn.parallel import DistributedDataParallel

from rlightning.errors import ConfigError
from rlightning.parallel import barrier as barriers
from rlightning.parallel.cpu_group import barrier_timeout, connection, cpu_group, set_barrier_timeout
from rlightning.parallel.failure_watch import active_watch
from rlightning.parallel.launcher import find_port
from rlightning.parallel.strategy import DDP, replace_lightning_ddp


class AskStrategy(Callback):
    """Writes what the strategy answers on each rank."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        hold = barriers._Barrier.wait

        def note(meeting: Any) -> None:
            self.names.append(meeting.name)
            hold(meeting)

        barriers._Barrier.wait = note  # type: ignore[method-assign, assignment]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        strategy, rank = trainer.strategy, trainer.global_rank
        value = torch.tensor([1.0, 2.0]) * (rank + 1)
        mean = strategy.reduce(value)
        answers = {
            "broadcast": [strategy.broadcast({"rank": rank}), strategy.broadcast(rank, src=1)],
            "mean": mean.tolist(),
            "in place": mean is value,
            "mean of integers": strategy.reduce(torch.tensor(rank + 1)).item(),
            "sum": strategy.reduce(torch.tensor(rank + 1), reduce_op="sum").item(),
            "sum of bfloat16": strategy.reduce(
                torch.tensor(0.5, dtype=torch.bfloat16), reduce_op=dist.ReduceOp.SUM
            ).item(),
            "max": strategy.reduce(torch.tensor(rank), reduce_op="max").item(),
            "no tensor": strategy.reduce("text"),
            "all": [strategy.reduce_boolean_decision(flag) for flag in (True, rank == 0, False)],
            "any": [strategy.reduce_boolean_decision(flag, all=False) for flag in (True, rank == 0, False)],
            "timeout": barrier_timeout(),
            "backend": dist.get_backend(cpu_group()),
            "is watched": active_watch() is not None,
        }
        strategy.barrier()
        strategy.barrier("own name")
        answers["names"] = self.names
        (Path(trainer.default_root_dir) / f"rank{rank}.json").write_text(json.dumps(answers))


class ObservedDDP(DDP):
    """Writes what is left of DDP, which this holds, when its time is over."""

    def teardown(self) -> None:
        wrapped, module = self.model, self.lightning_module
        assert isinstance(wrapped, DistributedDataParallel) and wrapped.reducer is not None and module is not None
        super().teardown()
        left = [wrapped.reducer, wrapped.logger]
        (Path(module.trainer.default_root_dir) / f"left{self.global_rank}.json").write_text(json.dumps(left))


@pytest.mark.processes
@pytest.mark.slow
def test_two_ranks_agree(tmp_path: Path) -> None:
    strategy = ObservedDDP(start_method="spawn", barrier_timeout=300)
    bare_trainer(tmp_path, 2, AskStrategy(), devices=2, strategy=strategy).fit(BoringModel())
    for rank in range(2):
        answers = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert json.loads((tmp_path / f"left{rank}.json").read_text()) == [None, None]  # of what holds gloo's threads
        names = answers.pop("names")
        assert answers == {
            "broadcast": [{"rank": 0}, 1],
            "mean": [1.5, 3.0],
            "in place": True,
            "mean of integers": 1.5,
            "sum": 3,
            "sum of bfloat16": 1.0,
            "max": 1,
            "no tensor": "text",
            "all": [True, False, False],
            "any": [True, True, False],
            "timeout": 300,
            "backend": "gloo",
            "is watched": True,
        }
        assert names[-2:] == ["AskStrategy.on_train_start", "own name"]
        # Lightning's own.
        assert {"post_setup", "run-stage", "train_dataloader()"} <= set(names)


class Impatient(DDP):
    """Once the ranks have met, nobody waits for another for more than 2 s."""

    def setup_environment(self) -> None:
        super().setup_environment()
        set_barrier_timeout(2)


class PreparesForLong(BoringModel):
    """Called on rank 0 only."""

    def prepare_data(self) -> None:
        time.sleep(3600)


@pytest.mark.processes
@pytest.mark.slow
def test_slow_prepare_data_raises_named_barrier_timeout(tmp_path: Path) -> None:
    trainer = bare_trainer(tmp_path, 1, devices=2, strategy=Impatient(start_method="spawn"))
    with pytest.raises(ProcessRaisedException, match="Barrier 'prepare_data' was not reached by rank 0 within 2 s"):
        trainer.fit(PreparesForLong())


class AskConnection(Callback):
    """Writes what there is to meet other ranks by."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        answers = [dist.get_world_size(), connection() is None, cpu_group() is None]
        (Path(trainer.default_root_dir) / "answers.json").write_text(json.dumps(answers))


@pytest.mark.processes
def test_one_rank_needs_no_group(tmp_path: Path) -> None:
    bare_trainer(tmp_path, 2, AskConnection(), devices=1, strategy=DDP(start_method="spawn")).fit(BoringModel())
    assert json.loads((tmp_path / "answers.json").read_text()) == [1, True, True]


@pytest.mark.long
@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (0, r"^The ranks have not all come: Timed out after .* raise trainer\.strategy\.barrier_timeout\.$"),
        (
            1,
            r"^The ranks cannot meet at MASTER_ADDR=127\.0\.0\.1, .*; if rank 0 takes so long to start, raise "
            r"trainer\.strategy\.barrier_timeout\.$",
        ),
    ],
)
def test_missing_ranks_are_told_in_a_line(
    rank: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_port()), "WORLD_SIZE": "2", "NODE_RANK": "0"}
    for name, value in {**variables, "LOCAL_RANK": str(rank)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else torch keeps the rank's share of threads
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # which the strategy changes
    with pytest.raises(ConfigError, match=message):
        bare_trainer(tmp_path, 1, devices=2, strategy=DDP(barrier_timeout=1)).fit(BoringModel())


@pytest.mark.parametrize("name", ["barrier_timeout", "failure_grace"])
def test_times_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=0 must be positive"):
        DDP(**{name: 0})


def test_the_short_names_are_replaced() -> None:
    usual = dict(StrategyRegistry)
    try:
        replace_lightning_ddp()
        names = [name for name, entry in usual.items() if entry["strategy"] in (DDPStrategy, DDP)]
        assert {"ddp", "ddp_spawn", "ddp_find_unused_parameters_true"} <= set(names)
        strategies = {name: StrategyRegistry.get(name) for name in names}
        assert {type(strategy) for strategy in strategies.values()} == {DDP}
        assert strategies["ddp_spawn"]._start_method == "spawn"
        assert strategies["ddp_find_unused_parameters_true"]._ddp_kwargs == {"find_unused_parameters": True}
    finally:
        StrategyRegistry.update(usual)
