"""The sampler of docs/samplers.md: a whole run with it, weights verified."""

import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_run import Witness, make_module, make_trainer, save_model
from rank_processes import finish, start_calls
from tiny import make_data

from rlightning.errors import EngineError
from rlightning.parallel.fsdp import FSDP
from rlightning.rollout.in_process import InProcessSampler, InProcessSamplers


class Recording:
    """A sampler that writes down what it is told."""

    def __init__(self) -> None:
        self.weight_version: int | None = None
        self.calls: list[str] = []

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        name, weight = next(iter(weights))  # what it leaves, the driver takes
        self.calls.append(f"update_weights {version} {name} {weight.dtype}")

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake(self) -> None:
        self.calls.append("wake")


def test_sampler_is_awake_when_weights_come() -> None:
    sampler: Any = Recording()
    loop: Any = None  # it does not score
    own, device = [InProcessSampler(sampler, loop)], torch.device("cpu")
    samplers = InProcessSamplers(own, device, torch.bfloat16, can_sleep=True)
    weights = {name: torch.nn.Parameter(torch.ones(2)) for name in ("a", "b")}
    source: Any = SimpleNamespace(named_weights=lambda: iter(weights.items()))
    samplers.update_weights(source, 0, lambda: None, among=samplers.samplers)
    samplers.sleep_before_sync()
    samplers.update_weights(source, 1, lambda: None, among=samplers.samplers)
    updates = [f"update_weights {version} a torch.bfloat16" for version in (0, 1)]
    assert sampler.calls == ["wake", updates[0], "sleep", "wake", updates[1]]


def load_rollout_class() -> type:
    page = (Path(__file__).parents[2] / "docs" / "samplers.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code, names)
    rollout_class: type = names["GenerateRollout"]
    return rollout_class


@pytest.mark.long
def test_sampler_of_the_page_runs_a_fit(tmp_path: Path) -> None:
    witness = Witness()
    rollout = load_rollout_class()(max_new_tokens=8, seed=0, verify_every=1)
    module = make_module(save_model(tmp_path / "model"), lr=1e-3)
    make_trainer(tmp_path, 3, rollout, witness).fit(module, make_data(tmp_path))
    assert [event for event in witness.events if event.startswith("sync")] == ["sync 0", "sync 1", "sync 2"]
    assert all(step["policy/rollout_gap_max"] < 1e-4 for step in witness.steps) and len(witness.steps) == 3


def fit_sharded(folder: Path, model: str) -> list[float]:
    """The gaps of two steps on a rank of two; the weights, which the actor's ranks share, are verified."""
    witness = Witness()
    rollout = load_rollout_class()(max_new_tokens=8, seed=0, verify_every=1)
    trainer = make_trainer(folder, 2, rollout, witness, devices=2, strategy=FSDP())
    trainer.fit(make_module(model, lr=1e-3), make_data(folder))
    return [step["policy/rollout_gap_max"] for step in witness.steps]


@pytest.mark.processes
def test_sampler_of_the_page_takes_sharded_weights(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    for gaps in finish(start_calls(fit_sharded, 2, tmp_path, model)):
        assert len(gaps) == 2 and max(gaps) < 1e-4


@pytest.mark.long
def test_sampler_that_keeps_old_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = load_rollout_class()(max_new_tokens=8, seed=0, verify_every=1)
    make_sampler = rollout.make_sampler

    def make_stale(*arguments: Any) -> Any:
        sampler = make_sampler(*arguments)
        update = sampler.update_weights

        def update_once(weights: Any, version: int) -> None:
            if version == 0:
                update(weights, version)
            sampler.weight_version = version

        sampler.update_weights = update_once
        return sampler

    monkeypatch.setattr(rollout, "make_sampler", make_stale)
    module = make_module(save_model(tmp_path / "model"), lr=1e-2)
    with pytest.raises(EngineError, match="weights"):
        make_trainer(tmp_path, 3, rollout).fit(module, make_data(tmp_path))
