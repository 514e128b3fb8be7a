import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import rlightning.callbacks
from rlightning.hooks import RLCallback, call_hook
from rlightning.types import Prompt, RolloutBatch, Sample, Trajectory, single_turns

PAGE = (Path(__file__).parents[1] / "docs" / "callbacks.md").read_text(encoding="utf-8")

COMPLETION = Sample([7], [0.0], [0], "2", "stop")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


class Policy:
    def generate(self, prompts: list[Prompt]) -> list[list[Trajectory]]:
        return single_turns(prompts, [[COMPLETION] for _ in prompts])

    def reward(self, batch: RolloutBatch) -> torch.Tensor:
        return torch.ones(batch.num_trajectories)

    def update(self, batch: RolloutBatch) -> None:
        assert batch.rewards is not None


def run_block(containing: str) -> dict[str, Any]:
    scope: dict[str, Any] = {"__name__": "page"}
    exec(next(block for block in blocks("python") if containing in block), scope)
    return scope


def test_the_loop_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loop = run_block("class Loop")["Loop"](Policy())
    start = time.perf_counter()
    assert 0 < loop.step([Prompt(0, "1+1=", [5], {})]) < time.perf_counter() - start
    assert (tmp_path / "runs" / "mine" / "completions" / "step_000001.parquet").exists()


def test_the_callback_of_ones_own() -> None:
    callback = run_block("class StopWhenSolved")["StopWhenSolved"]()
    assert isinstance(callback, RLCallback)

    class Loop:
        callbacks = (callback,)
        should_stop = False

    batch = RolloutBatch.pack(single_turns([Prompt(0, "1+1=", [5], {})], [[COMPLETION]]))
    batch.rewards = torch.ones(1)
    call_hook(loop := Loop(), Policy(), "on_update_end", batch)
    assert loop.should_stop


def test_the_yaml_names_classes_that_exist() -> None:
    for block in blocks("yaml"):
        for entry in next(iter(yaml.safe_load(block)["trainer"].values())):
            module, _, name = entry["class_path"].rpartition(".")
            kind = getattr(__import__(module, fromlist=[name]), name)
            if module == "rlightning.callbacks":
                kind(**entry.get("init_args", {}))


def test_each_callback_has_a_row_of_what_it_needs() -> None:
    (table,) = re.findall(r"What each one needs there:\n\n(.*?)\n\n", PAGE, flags=re.DOTALL)
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert {row[0].strip("`") for row in rows} == set(rlightning.callbacks.__all__)
    assert {len(row) for row in rows} == {4}


def test_the_tables_name_callbacks_that_exist() -> None:
    named = set(re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.MULTILINE))
    assert named and named <= set(rlightning.callbacks.__all__)
