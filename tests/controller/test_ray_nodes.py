"""A cluster that others have started, of several nodes: joining it, handles between nodes, a run from elsewhere."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from cli_project import make_project, rlightning
from ray.cluster_utils import Cluster
from ray.experimental import get_object_locations
from ray.util.placement_group import placement_group_table
from rtensor_worker import start_workers
from test_ray_store import become, ref_of

from rlightning import intervals
from rlightning.callbacks import VLLMRollout
from rlightning.controller.cluster import Resources, join_cluster
from rlightning.controller.driver import DriverContext
from rlightning.controller.object_store import RayStore
from rlightning.controller.worker_group import WorkerGroup
from rlightning.errors import ConfigError

MB = 1 << 20

JUDGED = """\
import json, os
from pathlib import Path

from rlightning.algorithms import SFT


class Judged(SFT):
    def training_step(self, prompts, batch_idx):
        super().training_step(prompts, batch_idx)
        variables = {name: os.environ.get(name) for name in ("JUDGE_KEY", "OTHER_KEY", "OF_CLUSTER")}
        Path("seen.json").write_text(json.dumps({"folder": os.getcwd(), **variables}))  # where the run was started
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three on this machine, started from another folder with other variables; the last two are called a and b."""
    ray.shutdown()
    cluster = Cluster()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("other"))
        patch.setenv("OF_CLUSTER", "1")
        for own in ({}, {"resources": {"a": 1}}, {"resources": {"b": 1}}):
            cluster.add_node(wait=False, num_cpus=1, object_store_memory=100 * MB, **own)
        cluster.wait_for_nodes(300)  # by itself Ray gives each 30 s to come up
    yield cluster
    ray.shutdown()
    cluster.shutdown()  # type: ignore[no-untyped-call]


@pytest.fixture
def joined(nodes: Cluster) -> Iterator[None]:
    """This process as a driver."""
    ray.init(address=nodes.address, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_process", "joined")
def test_what_finds_no_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"num_workers=512 x cpus_per_worker=1 is 512 CPUs, but the Ray cluster has"):
        Resources().settle(512, "cpu")
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0, "GPU": 1.0})
    with pytest.raises(ConfigError, match=r"num_workers=1 x gpus_per_worker=2 is 2 GPUs, but the Ray cluster has 1\."):
        Resources(gpus=2).settle(None, "cuda")
    monkeypatch.undo()
    monkeypatch.setattr(intervals, "PLACEMENT_TIMEOUT", 1.0)
    asked = r"num_workers=4 x 1 CPUs, 0 GPUs with placement=STRICT_SPREAD"
    with pytest.raises(ConfigError, match=asked + r".*free in the Ray cluster are 3 CPUs, 0 GPUs, on 3 nodes"):
        WorkerGroup(4, {"CPU": 1.0}, "STRICT_SPREAD", DriverContext.here([]))
    assert {place["state"] for place in placement_group_table().values()} == {"REMOVED"}
    monkeypatch.setattr(intervals, "ACTOR_START_TIMEOUT", 1.0)
    engines = VLLMRollout(placement="standalone", num_engines=4).ray_engines()
    assert engines is not None
    with pytest.raises(ConfigError, match=r"num_engines=4: their actors have not started in 1 s"):
        engines.start(None, None, tmp_path, DriverContext.here([]))
    engines.close()


@pytest.mark.processes
@pytest.mark.slow
def test_auto_joins_the_cluster_that_the_environment_names(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    for _ in range(2):  # leaving does not end it
        join_cluster("auto", {})
        assert ray.get_runtime_context().gcs_address == nodes.address
        assert sum(node["Alive"] for node in ray.nodes()) == 3  # type: ignore[no-untyped-call]
        ray.shutdown()


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.usefixtures("joined")
def test_tensor_bytes_move_between_nodes_without_controller() -> None:
    """One node is the controller's, and each worker has another."""
    workers = [start_workers(1, resources={name: 1})[0] for name in ("a", "b")]
    places = ray.get([worker.node.remote() for worker in workers])
    here = ray.get_runtime_context().get_node_id()
    assert len({here, *places}) == 3
    stored = ray.get(workers[0].store_zeros.remote(30 * MB))
    ray.get(workers[1].keep.remote([stored]))
    assert ray.get(workers[1].sum_kept.remote()) == [0.0]
    ref = ref_of(stored)
    assert become(set(places), lambda: set(get_object_locations([ref])[ref]["node_ids"])) == set(places)
    assert get_object_locations([ref])[ref]["object_size"] > 30 * MB


@pytest.mark.processes
@pytest.mark.slow
def test_workers_elsewhere_get_folder_and_named_variables(
    nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_project(tmp_path)
    (tmp_path / "judged.py").write_text(JUDGED)
    monkeypatch.setenv("JUDGE_KEY", "secret-value")
    monkeypatch.setenv("OTHER_KEY", "secret-too")
    own = ("--trainer.strategy.address", nodes.address, "--trainer.strategy.env", "[JUDGE_KEY]")
    done = rlightning(
        tmp_path, "fit", "--config", "run.yaml", "--trainer.strategy", "ray", *own, "--model.class_path",
        "judged.Judged", "--trainer.max_steps", "1", "--trainer.default_root_dir", "run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen == {"folder": str(tmp_path), "JUDGE_KEY": "secret-value", "OTHER_KEY": None, "OF_CLUSTER": "1"}
    [warning] = [line for line in done.stderr.splitlines() if "was not started with this process's environment" in line]
    assert "OTHER_KEY" in warning and "JUDGE_KEY" not in warning and "trainer.strategy.env" in warning
    assert (tmp_path / "run/checkpoints/last.ckpt").exists()
    config = (tmp_path / "run/config.yaml").read_text()
    assert "JUDGE_KEY" in config and "secret" not in done.stderr + config


def test_without_ray_it_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"Call ray.init\(\) first"):
        RayStore()
