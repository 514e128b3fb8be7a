"""Each callback for colocated training can be deleted from a YAML, and the run is the same."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cli_project import fit, make_project
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningArgumentParser
from observed_run import ObservedModule, loader, make_trainer
from tiny import in_this_process, make_data, save_model
from tiny import make_trainer as make_tiny_trainer

from rlightning.algorithms import GRPO
from rlightning.callbacks import OffloadDuringRollout
from rlightning.parallel import device as platform
from rlightning.parallel import host_memory
from rlightning.parallel.device import MemoryUse
from rlightning.rewards import RewardFunction

FIXES: dict[str, dict[str, Any]] = {
    "ControllerMode": {"mode": "spmd"},
    "DeviceSyncBeforeBarrier": {},
    "EmptyCacheAfterUpdate": {"every_n_updates": 2, "max_reserved_ratio": 1.1},
    "OffloadDuringRollout": {"parameters": True},
}
SUBSETS = [subset for size in range(len(FIXES) + 1) for subset in combinations(FIXES, size)]


pytestmark = pytest.mark.usefixtures("fresh_process")


def as_yaml(subset: tuple[str, ...], **changes: dict[str, Any]) -> str:
    """The ``callbacks`` of a run's YAML."""
    return yaml.safe_dump(
        {
            "callbacks": [
                {"class_path": f"rlightning.callbacks.{name}", "init_args": FIXES[name] | changes.get(name, {})}
                for name in subset
            ]
        }
    )


def read(text: str) -> list[Callback]:
    """Return the value that the command line's parser reads."""
    parser = LightningArgumentParser()
    parser.add_argument("--callbacks", type=list[Callback])
    callbacks: list[Callback] = parser.instantiate_classes(parser.parse_string(text)).callbacks
    return callbacks


@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
def test_every_subset_trains_to_the_same_weights(
    subset: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On something that they take for a device."""
    waited: list[Any] = []
    for module_with_it in (platform, host_memory):
        monkeypatch.setattr(module_with_it, "synchronize", waited.append)
    monkeypatch.setattr(platform, "empty_cache", lambda device: None)
    monkeypatch.setattr(platform, "memory_use", lambda device: MemoryUse(1, 2, 2, 3, 4))
    monkeypatch.setattr(OffloadDuringRollout, "device_type", "cpu")
    callbacks = read(as_yaml(subset)) if subset else []
    assert [type(callback).__name__ for callback in callbacks] == list(subset)
    module = ObservedModule()
    make_trainer(tmp_path, *callbacks).fit(module, loader())
    assert all(getattr(callback, "last", True) for callback in callbacks), "one of them had nothing to do"
    assert len(waited) > 0 or not subset or subset == ("ControllerMode",)
    # Three steps of two updates each, towards 1 from 0: each update takes a fifth of what is left.
    assert module.weight.item() == pytest.approx(1 - 0.8**6, rel=1e-6)


@pytest.mark.parametrize("without", FIXES)
def test_controller_with_callbacks_touches_no_device(
    without: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_initialized():
        pytest.skip("another test of this process has used CUDA")
    for name in ("synchronize", "mem_get_info", "memory_allocated", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, None)
    subset = tuple(name for name in FIXES if name != without)
    callbacks = read(as_yaml(subset, ControllerMode={"mode": "controller"}))
    make_trainer(tmp_path, *callbacks).fit(ObservedModule(), loader())
    assert not torch.cuda.is_initialized()


@in_this_process
async def length(completion: str) -> float:
    """A reward that differs between completions."""
    return float(len(completion))


@pytest.mark.long
def test_all_of_them_around_a_real_algorithm(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    weights = []
    for subset in ((), tuple(FIXES)):
        callbacks = read(as_yaml(subset)) if subset else []
        module = GRPO(model, rewards=[RewardFunction(length)], prompts_per_step=4, samples_per_prompt=4, lr=1e-3)
        make_tiny_trainer(tmp_path, 2, *callbacks).fit(module, make_data(tmp_path))
        weights.append([weight.detach().clone() for _, weight in module.named_weights()])
    assert all(torch.equal(plain, fixed) for plain, fixed in zip(*weights, strict=True))


@pytest.mark.processes
@pytest.mark.slow
def test_all_of_them_from_the_command_line(tmp_path: Path) -> None:
    make_project(tmp_path)
    (tmp_path / "callbacks.yaml").write_text(yaml.safe_dump({"trainer": yaml.safe_load(as_yaml(tuple(FIXES)))}))
    done = fit(tmp_path, "--config", "callbacks.yaml")
    assert "execution mode: spmd" in done.stdout + done.stderr
