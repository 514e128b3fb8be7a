"""Several stages of one Trainer under a controller, and mistakes that are found before anything starts."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_project import fit, make_project
from controller_run import RAY_OPTIONS
from lightning.pytorch import Callback, LightningModule
from rank_processes import finish, start_controller
from tiny import GenerateInWorkers, bare_trainer, make_algorithm, save_model

from rlightning.algorithms import GRPO
from rlightning.callbacks import JSONLPredictions
from rlightning.controller import RayController
from rlightning.controller.cluster import join_cluster
from rlightning.controller.driver import DriverContext
from rlightning.controller.tensor_store import tensor_store
from rlightning.controller.worker_group import WorkerGroup
from rlightning.controller.worker_trainer import settings_of
from rlightning.data import PromptDataModule
from rlightning.errors import ConfigError
from rlightning.hooks import RLCallback
from rlightning.parallel import FSDP
from rlightning.rollout.engine_options import EngineOptions
from rlightning.rollout.ray_engines import EngineActor

pytestmark = pytest.mark.usefixtures("fresh_process")

MAX_STORE_BYTES = 1 << 24
SETTINGS: dict[str, Any] = {
    "deterministic": "warn",
    "benchmark": True,
    "detect_anomaly": True,
    "inference_mode": False,
}


class InWorkers(GenerateInWorkers):
    """A callback of the user's that needs the actor and ends training.

    What a worker stores is capped there, and its Trainer has the settings of the controller's.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        assert tensor_store().max_bytes == MAX_STORE_BYTES
        assert SETTINGS.items() <= settings_of(trainer).items()
        assert trainer.datamodule.max_prompt_tokens == 58  # 64 positions, less 6 of a completion

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.should_stop = trainer.global_step == 2


class Staying(list[Any]):
    """Rows of the controller's, which no other process gets as they are."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AssertionError("the rows are sent")


class Taken(RLCallback):
    """Counts the prompts of all rollouts: a step that refills its batch asks for more than the loader gave.

    It also asks something of the workers, in a hook in which it may not, and in one in which it may.
    """

    def __init__(self) -> None:
        self.indices: list[int] = []
        self.refused: set[str] = set()
        self.versions: list[int] = []

    def on_rollout_start(self, trainer: Any, module: Any, prompts: Any) -> None:
        self.indices += [prompt.index for prompt in prompts]
        if trainer.training:
            try:
                trainer.strategy.call("version")
            except ConfigError as error:
                self.refused.add(str(error))

    def on_update_end(self, trainer: Any, module: Any, batch: Any) -> None:
        self.versions.append(trainer.strategy.call("version"))


class Refilling(GRPO):
    """Drops every group of the first rollout of a step."""

    max_refills = 1
    num_calls = 0

    def version(self) -> int:
        return self.weight_version

    def keep_sequences(self, batch: Any) -> torch.Tensor:
        self.num_calls += 1
        return torch.full((batch.num_sequences,), self.num_calls % 2 == 0)


def send_twice(send: Any) -> Any:
    """As if nobody knew whether it had arrived."""

    def call(self: WorkerGroup, actor: Any, method: str, *arguments: Any, **options: Any) -> Any:
        first = send(self, actor, method, *arguments, **options)
        if method in ("run", "execute", "supply"):
            send(self, actor, method, *arguments, **options)
        return first

    return call


def run_fast(folder: Path, lr_schedule: str) -> float:
    """A fast development run, which is shorter than the schedule's warm-up; the learning rate of its one step."""
    module = make_algorithm(GRPO, folder / "model", lr=0.3, warmup_steps=3, lr_schedule=lr_schedule)
    strategy = RayController(num_workers=1, accelerator="cpu", ray_options=RAY_OPTIONS)
    trainer = bare_trainer(folder, 4, GenerateInWorkers(), strategy=strategy, fast_dev_run=True)
    trainer.fit(module, PromptDataModule([{"prompt": "1+1="}] * 8, shuffle=False))
    strategy.close()
    return float(trainer.callback_metrics["optim/lr"])


def run(folder: Path) -> dict[str, Any]:
    """Fast development runs; then all stages in turn, the workers keeping the weights. All is sent to them twice."""
    of_fast_runs = [run_fast(folder, lr_schedule) for lr_schedule in ("linear", "cosine")]
    WorkerGroup._call = send_twice(WorkerGroup._call)  # type: ignore[method-assign]
    rows = Staying({"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4))
    data = PromptDataModule(rows, validation={"sums": rows}, predict=rows, shuffle=False)
    module = make_algorithm(Refilling, folder / "model", lr=1e-1, validate_first=False)
    taken = Taken()
    strategy = RayController(
        num_workers=2,
        worker_strategy="ddp",
        accelerator="cpu",
        max_store_bytes=MAX_STORE_BYTES,
        ray_options=RAY_OPTIONS,
    )
    trainer = bare_trainer(
        folder,
        4,
        InWorkers(),
        taken,
        JSONLPredictions(),
        strategy=strategy,
        val_check_interval=4,
        check_val_every_n_epoch=None,
        **SETTINGS,
    )
    trainer.fit(module, data)
    fitted = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    position = data.stream.position if data.stream is not None else None
    pids = strategy.group.process_ids() if strategy.group is not None else []
    num_steps = trainer.global_step
    [tested] = trainer.test(module, data, verbose=False)
    [validated] = trainer.validate(module, data, verbose=False)
    trainer.predict(module, data, return_predictions=False)
    same = strategy.group is not None and pids == strategy.group.process_ids()
    return {
        "fitted": fitted,
        "num_steps": num_steps,
        "tested": tested,
        "validated": validated,
        "taken": taken.indices,
        "position": position,
        "same": same,
        "refused": list(taken.refused),
        "versions": taken.versions,
        "of_fast_runs": of_fast_runs,
    }


@pytest.mark.processes
@pytest.mark.slow
def test_workers_keep_the_weights_for_the_next_stage(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    (found,) = finish([start_controller(run, tmp_path)])
    assert found["of_fast_runs"] == pytest.approx([0.1, 0.1])
    assert found["same"]
    # a worker's callback stops after two steps of four, which validates first, as it does without a controller
    assert found["num_steps"] == 2 and found["fitted"]
    for stage in ("tested", "validated"):
        values = {name.partition("/")[2]: value for name, value in found[stage].items() if name != "step"}
        assert values == {name.partition("/")[2]: value for name, value in found["fitted"].items()}
    assert found["tested"]["step"] == 2.0
    predicted = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert [one["index"] for one in predicted] == list(range(16))  # of both workers, in the prompts' order
    # two steps of four prompts and of as many again, each prompt once
    assert found["taken"] == list(range(16)) and found["position"] == 16
    [refused] = found["refused"]
    assert refused.startswith("trainer.strategy.call('version') came in on_rollout_start, but until its update")
    assert found["versions"] == [1, 2]


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "workers": ({"num_workers": 0}, "num_workers=0 must be at least 1"),
    "restarts": ({"max_restarts": -1}, "max_restarts=-1 must be at least 0"),
    "store": ({"max_store_bytes": 0}, "max_store_bytes=0 must be positive"),
    "nested": ({"worker_strategy": "ray"}, "worker_strategy is a RayController itself"),
    "unknown": ({"worker_strategy": "fsdp3"}, "there is no strategy 'fsdp3'"),
    "cpus": ({"cpus_per_worker": -1}, "cpus_per_worker=-1 must be at least 0"),
    "placement": ({"placement": "TIGHT"}, "placement=TIGHT is unknown"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_found_with_trainer(name: str, tmp_path: Path) -> None:
    arguments, message = MISTAKES[name]
    with pytest.raises(ConfigError, match=message):
        bare_trainer(tmp_path, 1, strategy=RayController(**arguments))


def test_a_controller_is_not_started_by_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in (("TORCHELASTIC_RUN_ID", "none"), ("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(key, value)
    with pytest.raises(ConfigError, match="torchrun started 2"):
        bare_trainer(tmp_path, 1, strategy=RayController())


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", r"no Ray cluster answers at address=127\.0\.0\.1:1"),
        ("ray://127.0.0.1:1", r"address=ray://127\.0\.0\.1:1 is that of a Ray client"),
    ],
)
def test_unusable_ray_address_from_environment_raises_at_once(
    address: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself would look for it for minutes."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=message):
        join_cluster(None, {})


def test_an_engines_actor_starts_its_engine_once() -> None:
    actor = EngineActor(DriverContext.here([]))
    arguments: Any = (EngineOptions(gpu_memory_utilization=0.5), None, None, None, None, "token")
    with pytest.raises(AttributeError):  # of a module that is none, which the first call comes to
        actor.run(*arguments)
    actor.run(*arguments)


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'rlightning\[ray\]'"):
        bare_trainer(tmp_path, 1, strategy=RayController())


def test_a_configurations_devices_are_the_workers() -> None:
    strategy = RayController(worker_strategy=FSDP())
    strategy.take_devices("gpu", "4", 2)
    assert (strategy.num_workers, strategy.worker_accelerator) == (8, "gpu")
    strategy.take_devices("cpu", [0, 1], 1)  # settled before
    assert strategy.num_workers == 8
    by_itself = RayController()
    by_itself.take_devices("auto", "auto", 1)
    assert by_itself.num_workers is None


class NormOfGradients(Callback):
    """Looks at what only a worker has."""

    def on_before_optimizer_step(self, *args: Any) -> None: ...


class NormInWorkers(NormOfGradients):
    runs_in = "workers"


def test_hooks_that_the_controller_never_fires_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RayController, "count_workers", lambda self: 1)  # which would start a cluster
    strategy = RayController(num_workers=1, accelerator="cpu")
    trainer = bare_trainer(tmp_path, 1, NormOfGradients(), NormInWorkers(), strategy=strategy)
    module = LightningModule()
    module.trainer = trainer
    strategy.connect(module)
    [line] = [record.getMessage() for record in caplog.records if "is never called" in record.getMessage()]
    assert line.startswith("NormOfGradients.on_before_optimizer_step is never called")
    assert line.endswith('runs_in = "workers".')


@pytest.mark.processes
def test_cli_ray_strategy_works_with_one_line_errors(tmp_path: Path) -> None:
    make_project(tmp_path)
    under_ray = ("--trainer.strategy", "ray")
    fit(tmp_path, *under_ray, "--trainer.devices", "2", "--trainer.default_root_dir", "two")
    last = tmp_path / "two" / "checkpoints" / "last.ckpt"
    assert (last / "meta.pt").is_file()
    assert {path.name for path in last.glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}  # of two ranks
    options = ("--trainer.strategy.address", "127.0.0.1:1", "--trainer.default_root_dir", "wrong")
    wrong = fit(tmp_path, *under_ray, *options, exit_code=2)
    [line] = [line for line in wrong.stderr.splitlines() if line.startswith("error:")]
    assert "no Ray cluster answers at address=127.0.0.1:1" in line
