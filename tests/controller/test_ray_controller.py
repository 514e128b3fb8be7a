"""A controller with two Ray workers comes to what two ranks come to, and to the same files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from controller_run import train_alone, train_each
from rank_processes import finish, start_calls, start_controller
from safetensors.torch import load_file
from sft_run import SIZES, write_rows
from tiny import save_model

from rlightning.models import Adapter
from rlightning.parallel.checkpoint_folder import read_whole

pytestmark = pytest.mark.processes

LATER = ("workers-after-step", "ranks-after-step", "workers-after-epoch", "ranks-after-epoch")
"""Runs that go on from a checkpoint of the other's."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of six steps, four an epoch; then more that go on from the other's second step, and from its first epoch.

    One half under FSDP on two ranks, the other under a controller with two workers, at the same time. Each has a run
    with an adapter, too.
    """
    folder = tmp_path_factory.mktemp("controller")
    save_model(folder / "model", **SIZES)
    write_rows(folder)
    runs: dict[str, dict[str, Any]] = {name: {name: {"max_steps": 6}} for name in ("ranks", "workers")}
    for name, other in (("ranks", "workers"), ("workers", "ranks")):
        for point, file in (("step", "step=2.ckpt"), ("epoch", "epoch=0.ckpt")):
            path = folder / other / "checkpoints" / file
            runs[name][f"{name}-after-{point}"] = {"max_steps": 6, "ckpt_path": str(path)}
        runs[name][f"{name}-with-adapter"] = {"max_steps": 2, "adapter": Adapter(rank=3)}
    ranks = start_calls(train_each, 2, folder, runs["ranks"])
    finish([*ranks, start_controller(train_each, folder, runs["workers"])])
    return folder


def seen(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name / "seen.json").read_text())
    return found


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("name", ["workers", *LATER])
def test_weights_equal_those_of_ranks_bitwise(name: str, folder: Path) -> None:
    final = [read_whole(folder / run / "checkpoints" / "step=6.ckpt") for run in ("ranks", name)]
    start = read_whole(folder / "ranks" / "checkpoints" / "step=1.ckpt")["state_dict"]
    assert any(not torch.equal(weight, final[0]["state_dict"][key]) for key, weight in start.items())
    assert_equal(final[0]["state_dict"], final[1]["state_dict"])
    moments = [checkpoint["optimizer_states"][0]["state"] for checkpoint in final]
    for number, state in moments[0].items():
        assert_equal(state, moments[1][number])


def test_adapter_equals_that_of_ranks_bitwise(folder: Path) -> None:
    """At each step; so do the folders of adapter and merged model."""
    runs = [folder / f"{name}-with-adapter" for name in ("ranks", "workers")]
    for step in (1, 2):
        states = [read_whole(run / "checkpoints" / f"step={step}.ckpt") for run in runs]
        adapters = [state["state_dict"] for state in states]
        assert adapters[0] and all(".lora_" in name for name in adapters[0])
        assert any("lora_B" in name and weight.abs().max() > 0 for name, weight in adapters[0].items())
        assert_equal(*adapters)
        for number, state in states[0]["optimizer_states"][0]["state"].items():
            assert_equal(state, states[1]["optimizer_states"][0]["state"][number])
    for file in ("hf/model.safetensors", "hf_adapter/adapter_model.safetensors"):
        assert_equal(*(load_file(run / file) for run in runs))


def test_the_hugging_face_folders_are_the_same(folder: Path) -> None:
    for name in ("hf", "hf_step_000002"):
        assert_equal(*(load_file(folder / run / name / "model.safetensors") for run in ("ranks", "workers")))


@pytest.mark.parametrize("when", ["", "-after-step", "-after-epoch"])
def test_the_controller_logs_what_rank_0_does(when: str, folder: Path) -> None:
    """Among it the loss, the norm of the gradients, the learning rate, and the validation sets' losses."""
    whole, expected, got = (seen(folder, name) for name in ("ranks", f"ranks{when}", f"workers{when}"))
    assert got["global_step"] == 6
    shown = {"steps": ("policy/loss", "optim/grad_norm", "optim/lr", "step"), "validations": ("val/rows/loss", "at")}
    for kind, names in shown.items():
        assert got[kind] == expected[kind]
        for one, other in zip(whole[kind][-len(got[kind]) :], got[kind], strict=True):
            assert [one[name] for name in names] == [other[name] for name in names]


def test_metrics_go_where_the_module_says(folder: Path) -> None:
    """To the progress bar and not to the logger, to neither, or to the logger alone."""
    expected, got = seen(folder, "ranks"), seen(folder, "workers")
    assert got["shown"] == expected["shown"] and got["logged"] == expected["logged"]
    assert [step["own/bar"] for step in got["shown"]] == [1, 2, 3, 4, 5, 6]
    for names in got["logged"]:
        assert "policy/loss" in names and not {"own/bar", "own/hidden"} & set(names)


def test_what_throughput_measures_in_a_worker_is_logged(folder: Path) -> None:
    expected, got = seen(folder, "ranks"), seen(folder, "workers")
    assert got["of_throughput"] == expected["of_throughput"]
    assert {"time/step", "throughput/tokens_per_second", "memory/rss_gib"} <= set(got["of_throughput"])
    assert "Throughput" in expected["device_callbacks"] and "Throughput" not in got["device_callbacks"]


def test_an_epochs_metrics_are_those_of_ranks(folder: Path) -> None:
    """Sixteen rows are four steps; what rank r logs in step s is (r + 1) s, with a weight of 2, 1, 2, 1."""
    assert seen(folder, "workers")["epochs"] == seen(folder, "ranks")["epochs"]
    expected, second = seen(folder, "workers")["epochs"]
    assert second["own/mean"] == pytest.approx(16 / 3) and second["all/sum"] == 33
    assert (expected["end/own"], expected["end/all"]) == (1, 1.5)
    assert expected["own/mean"] == expected["own/both"] == expected["own/both_epoch"] == pytest.approx(14 / 6)
    assert expected["all/mean"] == pytest.approx(14 / 6 * 1.5)
    assert (expected["all/sum"], expected["all/max"], expected["all/min"]) == (30, 8, 1)
    assert "own/both_step" in seen(folder, "workers")["steps"][0]


@pytest.mark.parametrize("when", ["", "-after-step", "-after-epoch"])
def test_worker_callback_receives_same_hooks_as_ranks(when: str, folder: Path) -> None:
    """In the same order, at the same epoch, step and batch, of a Trainer with the same limits."""
    expected, got = (json.loads((folder / f"{run}{when}" / "spied.json").read_text()) for run in ("ranks", "workers"))
    assert got == expected
    hooks = [hook for hook, *_ in got]
    assert hooks.count("on_train_epoch_end") == 2  # Lightning begins where the checkpoint was written
    assert hooks.count("on_train_epoch_start") == (1 if when else 2)
    assert ("on_sanity_check_end" in hooks) == (not when)


def test_controller_checkpoint_callback_and_loop_state_match_ranks(folder: Path) -> None:
    ours, theirs = (read_whole(folder / run / "checkpoints" / "step=3.ckpt") for run in ("workers", "ranks"))
    assert ours.keys() == theirs.keys()
    assert ours["callbacks"].keys() == theirs["callbacks"].keys()
    assert ours["callbacks"]["CountSteps"] == {"num_steps": 3}
    for name in ("PromptDataModule", "loops", "lr_schedulers", "weight_version", "global_step"):
        assert ours[name] == theirs[name], name


def test_controller_touches_no_device(folder: Path) -> None:
    """Training, validation, saving, logging, resuming, where torch finds a device."""
    for name in ("workers", "workers-after-step"):
        found = seen(folder, name)
        assert (found["touched"], found["is_initialized"]) == ([], False)
    assert (folder / "workers" / "checkpoints" / "last.ckpt").exists()
    assert list((folder / "workers").rglob("metrics.csv"))


def test_process_without_controller_touches_device(folder: Path) -> None:
    finish([start_controller(train_alone, folder)])
    assert any("isolate_rng" in stack for stack in seen(folder, "alone")["touched"])
