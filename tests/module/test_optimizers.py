"""What ``configure_optimizers`` may return: each of Lightning's forms trains, or is refused in a line at the start."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from programs import read_csv
from sharded_net import OddNet, make_net, run_ranks, shard_net
from small_steps import matrices_and_vectors
from tiny import copy_weights, make_data, make_trainer, share_of_ones
from torch.optim import LBFGS, SGD, AdamW, Muon, SparseAdam
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

from rlightning.algorithms import GRPO
from rlightning.errors import ConfigError
from rlightning.module.optimizers import check_form, checked
from rlightning.rewards import RewardFunction


class Own(GRPO):
    """A GRPO whose optimizers a test gives."""

    make: ClassVar[Callable[["Own"], Any]]

    def configure_optimizers(self) -> Any:
        return type(self).make(self)


def usual(module: Own) -> Any:
    """Return the optimizers of the module without an override."""
    return GRPO.configure_optimizers(module)


def run(
    folder: Path, model: str, make: Callable[[Own], Any], *callbacks: Callback, steps: int = 3, **kwargs: Any
) -> Own:
    kind = type("Own", (Own,), {"make": make})
    rewards = [RewardFunction(share_of_ones)]
    module: Own = kind(model, rewards=rewards, prompts_per_step=4, samples_per_prompt=4, updates_per_rollout=2, lr=1e-3)
    folder.mkdir(exist_ok=True)
    logger = CSVLogger(folder, name="", version="")
    trainer = make_trainer(folder, steps, *callbacks, logger=logger)
    trainer.fit(module, make_data(folder), **kwargs)
    return module


def column(folder: Path, name: str) -> list[float]:
    return [float(row[name]) for row in read_csv(folder / "metrics.csv") if row.get(name)]


def adamw(module: Own, lr: float = 0.01) -> AdamW:
    return AdamW(module.parameters(), lr=lr)


def scheduled(make_schedule: Callable[[AdamW], Any], **settings: Any) -> Callable[[Own], Any]:
    """AdamW and a schedule, as a dictionary with these settings of it."""

    def make(module: Own) -> Any:
        optimizer = adamw(module)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make_schedule(optimizer), **settings}}

    return make


def pair(module: Own) -> Any:
    optimizer = adamw(module)
    return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]


def muon_and_adamw(module: Own) -> Any:
    matrices, vectors = matrices_and_vectors(module)
    muon, adamw = Muon(matrices, lr=0.02), AdamW(vectors, lr=0.01)
    return [muon, adamw], [StepLR(muon, 1, gamma=0.5), {"scheduler": StepLR(adamw, 1, gamma=0.1)}]


def two_dictionaries(module: Own) -> Any:
    matrices, vectors = matrices_and_vectors(module)
    first, second = SGD(matrices, lr=0.01), AdamW(vectors, lr=0.01)
    return {"optimizer": first, "lr_scheduler": StepLR(first, 1, gamma=0.5)}, {"optimizer": second}


def added_group(module: Own) -> Any:
    (optimizer,), schedules = usual(module)
    last = optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [last], "lr": 0.05, "name": "last"})
    return [optimizer], schedules


def same_names(module: Own) -> Any:
    matrices, vectors = matrices_and_vectors(module)
    first = SGD([{"params": matrices, "name": "x", "lr": 0.01}])
    return [first, AdamW([{"params": vectors, "name": "x", "lr": 0.02}])]


one_cycle = scheduled(
    lambda optimizer: OneCycleLR(optimizer, max_lr=0.01, total_steps=3, anneal_strategy="linear", pct_start=0.5),
    interval="step",
)
FORMS: dict[str, tuple[Callable[[Own], Any], dict[str, list[float]]]] = {
    "usual": (usual, {"optim/lr": [1e-3] * 3}),
    "single": (adamw, {"optim/lr": [0.01] * 3}),
    "pair": (pair, {"optim/lr": [0.01, 0.005, 0.0025]}),
    "dictionary": (
        scheduled(lambda optimizer: StepLR(optimizer, 1, gamma=0.5), interval="step", frequency=2),
        {"optim/lr": [0.01, 0.01, 0.005]},
    ),
    "muon_and_adamw": (
        muon_and_adamw,
        {
            "optim/lr": [0.02, 0.01, 0.005],
            "optim/lr/0": [0.02, 0.01, 0.005],
            "optim/lr/1": [0.01, 0.001, 0.0001],
        },
    ),
    "two_dictionaries": (two_dictionaries, {"optim/lr/0": [0.01, 0.005, 0.0025], "optim/lr/1": [0.01] * 3}),
    "same_names": (same_names, {"optim/lr": [0.01] * 3, "optim/lr/x_0": [0.01] * 3, "optim/lr/x_1": [0.02] * 3}),
    # up to step 0.5, then down to step 2
    "one_cycle": (one_cycle, {"optim/lr": [0.01 / 25, 0.01 - (0.01 - 4e-8) / 3, 4e-8]}),
    "added_group": (
        added_group,
        {"optim/lr": [1e-3] * 3, "optim/lr/1": [1e-3] * 3, "optim/lr/last": [0.05] * 3},
    ),
}
"""What returns each, and the learning rates of its three steps."""


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_each_form_trains_all_parameters(form: str, model_folder: str, tmp_path: Path) -> None:
    make, rates = FORMS[form]
    before: dict[str, torch.Tensor] = {}

    class Keep(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            before.update(copy_weights(module))

    module = run(tmp_path, model_folder, make, Keep())
    assert module.trainer.global_step == module.weight_version == 3  # two optimizer steps each
    after = copy_weights(module)
    assert [name for name in after if torch.equal(after[name], before[name])] == []
    for name, expected in rates.items():
        assert column(tmp_path, name) == pytest.approx(expected)
    if not any(name.startswith("optim/lr/") for name in rates):
        assert "optim/lr/" not in (tmp_path / "metrics.csv").read_text()


@pytest.mark.long
def test_several_optimizers_resume(model_folder: str, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", model_folder, muon_and_adamw, steps=3)
    run(tmp_path / "first", model_folder, muon_and_adamw, steps=2).trainer.save_checkpoint(tmp_path / "2.ckpt")
    resumed = run(tmp_path / "second", model_folder, muon_and_adamw, steps=3, ckpt_path=tmp_path / "2.ckpt")
    for name, weight in copy_weights(resumed).items():
        assert torch.equal(weight, copy_weights(whole)[name]), name
    assert column(tmp_path / "second", "optim/lr/1") == pytest.approx([0.0001])


class ByMetric(StepLR):
    def step(self, metric: float) -> None:  # type: ignore[override]
        super().step()


def by_metric(optimizer: AdamW) -> StepLR:
    schedule = StepLR(optimizer, 1)
    schedule.__class__ = ByMetric  # torch calls step() once when it is made
    return schedule


def bare_plateau(module: Own) -> Any:
    optimizer = adamw(module)
    return [optimizer], [ReduceLROnPlateau(optimizer)]


REFUSED: dict[str, tuple[Callable[[Own], Any], str]] = {
    "plateau": (scheduled(ReduceLROnPlateau, monitor="reward/mean"), "ReduceLROnPlateau steps by a metric"),
    "bare_plateau": (bare_plateau, "ReduceLROnPlateau steps by a metric"),
    "by_metric": (scheduled(by_metric, interval="step"), "ByMetric steps by a metric"),
    "no_frequency": (
        scheduled(lambda optimizer: StepLR(optimizer, 1), frequency=0),
        "frequency=0 of StepLR must be at least 1",
    ),
    "short_cycle": (
        scheduled(lambda optimizer: OneCycleLR(optimizer, max_lr=0.01, total_steps=2)),
        "OneCycleLR ends after total_steps=2, and the run steps it 3 times",
    ),
    "nothing": (lambda module: None, r"no optimizer of the model's parameters: it returns None\. Return an"),
    "of_something_else": (
        lambda module: AdamW([torch.nn.Parameter(torch.ones(1))]),
        "no optimizer of the model's parameters: nothing would be trained",
    ),
    "needs_closure": (lambda module: LBFGS(module.parameters()), "LBFGS computes the loss again within a step"),
    "sparse": (lambda module: SparseAdam(list(module.parameters())), "SparseAdam takes sparse gradients alone"),
    "overlapping": (
        lambda module: [adamw(module), SGD(matrices_and_vectors(module)[1], lr=0.1)],
        r"\d+ parameters, such as actor\.model\..*, are in two optimizers",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("form", REFUSED)
def test_forms_that_cannot_work_are_refused_at_start(form: str, model_folder: str, tmp_path: Path) -> None:
    make, message = REFUSED[form]
    with pytest.raises(ConfigError, match=rf"^configure_optimizers.*{message}"):
        run(tmp_path, model_folder, make)
    assert not (tmp_path / "metrics.csv").exists()


def test_form_that_is_none_of_lightnings_is_refused() -> None:
    optimizer, other = SGD([torch.nn.Parameter(torch.ones(1))]), SGD([torch.nn.Parameter(torch.ones(1))])
    schedule, foreign = StepLR(optimizer, 1), StepLR(other, 1)
    refused: list[tuple[Any, str]] = [
        ({"lr_scheduler": schedule}, "returns a dictionary without the key 'optimizer'. Return an optimizer, a list"),
        ([{"optimizer": optimizer}, {}], "returns a dictionary without the key 'optimizer'"),
        (
            {"optimizer": optimizer, "lr_schedulers": schedule},
            "'lr_schedulers' is unknown. Did you mean 'lr_scheduler'?",
        ),
        (
            {"optimizer": optimizer, "lr_scheduler": {"interval": "step"}},
            "dictionary of a schedule without the key 'scheduler'",
        ),
        (
            {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "freq": 2}},
            "the key 'freq' of a schedule is unknown. Did you mean 'frequency'?",
        ),
        ((optimizer, schedule), "where an optimizer has to be. Return"),
        ([[optimizer], [foreign]], "StepLR is no schedule of an optimizer that is returned with it"),
        ([{"optimizer": optimizer}, other], "beside a dictionary"),
        ("adamw", "configure_optimizers returns 'adamw' where an optimizer has to be. Return an"),
    ]
    for found, message in refused:
        with pytest.raises(ConfigError, match=re.escape(message)):
            check_form(found)
    for found in (None, optimizer, [optimizer, other], [[optimizer], [schedule]], ([optimizer], schedule)):
        check_form(found)
    check_form({"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "name": "a"}, "monitor": "x"})
    check_form(({"optimizer": optimizer, "lr_scheduler": schedule}, {"optimizer": other}))
    without = {"optimizer": optimizer, "lr_scheduler": None}
    assert checked(lambda: without)() == {"optimizer": optimizer}
    assert checked(lambda: (without, {"optimizer": other}))() == ({"optimizer": optimizer}, {"optimizer": other})


def matrices_only(module: Own) -> Any:
    return SGD(matrices_and_vectors(module)[0], lr=0.1)


@pytest.mark.long
def test_parameters_without_optimizer_are_named_once(
    model_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "rlightning"):
        run(tmp_path, model_folder, matrices_only, steps=1)
    (line,) = [record.getMessage() for record in caplog.records if "no optimizer" in record.getMessage()]
    # two norms and those of queries and keys in each of two layers, and the last one
    assert line.startswith(
        "9 parameters have a gradient and no optimizer, and stay as they are, such as actor.model.layers.0."
    )


def train_with_muon(net: OddNet) -> None:
    """Eight steps, the same on every rank."""
    matrices = [parameter for parameter in net.parameters() if parameter.ndim == 2]
    muon = Muon(matrices, lr=1e-2)
    for _ in range(8):
        net(torch.arange(11)).square().mean().backward()
        muon.step()
        muon.zero_grad()


def train_shards(folder: Path) -> None:
    net = shard_net(make_net(), 0, 2, 0)
    train_with_muon(net)
    weights = {name: parameter.full_tensor() for name, parameter in net.named_parameters()}  # type: ignore[attr-defined]
    if dist.get_rank() == 0:
        torch.save(weights, folder / "sharded.pt")


@pytest.mark.processes
def test_muon_steps_whole_matrices_on_two_ranks(tmp_path: Path) -> None:
    net = make_net()
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    train_with_muon(net)
    run_ranks(train_shards, 2, tmp_path)
    sharded = torch.load(tmp_path / "sharded.pt")
    for name, parameter in net.named_parameters():
        # It orthogonalises in bfloat16; orthogonalised shards would be as far away as the weights have moved.
        torch.testing.assert_close(sharded[name], parameter.detach(), atol=0.01, rtol=0)
        assert parameter.ndim == 1 or (parameter - before[name]).abs().max() > 0.03, name
