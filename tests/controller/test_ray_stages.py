"""Several stages of one Trainer under a controller, and mistakes that are found before anything starts."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from cli_project import fit, make_project
from controller_stages_run import run
from lightning.pytorch import Callback, LightningModule
from rank_processes import finish, start_controller

from rlightning.callbacks import VLLMRollout
from rlightning.controller import RayController
from rlightning.controller.cluster import join_cluster
from rlightning.controller.driver import DriverContext
from rlightning.errors import ConfigError
from rlightning.parallel import FSDP
from rlightning.rollout.engine_options import EngineOptions
from rlightning.rollout.ray_engines import EngineActor

pytestmark = pytest.mark.usefixtures("fresh_process")


@pytest.mark.processes
@pytest.mark.slow
def test_workers_keep_the_weights_for_the_next_stage(tmp_path: Path) -> None:
    tiny.save_model(tmp_path / "model")
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
        tiny.bare_trainer(tmp_path, 1, strategy=RayController(**arguments))


def test_a_controller_is_not_started_by_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in (("TORCHELASTIC_RUN_ID", "none"), ("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(key, value)
    with pytest.raises(ConfigError, match="torchrun started 2"):
        tiny.bare_trainer(tmp_path, 1, strategy=RayController())


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


def test_closed_engines_can_be_started_again() -> None:
    engines = VLLMRollout(placement="standalone").ray_engines()
    assert engines is not None
    engines.runs = [object()]  # start() runs only actors without one
    engines.close()
    assert engines.runs == engines.actors == []


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'rlightning\[ray\]'"):
        tiny.bare_trainer(tmp_path, 1, strategy=RayController())


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
    trainer = tiny.bare_trainer(tmp_path, 1, NormOfGradients(), NormInWorkers(), strategy=strategy)
    module = LightningModule()
    module.trainer = trainer
    strategy.connect(module)
    [line] = [record.getMessage() for record in caplog.records if "is never called" in record.getMessage()]
    assert line.startswith("NormOfGradients.on_before_optimizer_step is never called")
    assert line.endswith('runs_in = "workers".')


@pytest.mark.slow
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
