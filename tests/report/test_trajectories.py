"""Trajectories in Parquet files: all of them come back, and the first columns are what people look at."""

import random
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trajectories import random_groups, split_by_agents

from rlightning.report.trajectories import merge_tables, read_trajectories, schema, trajectory_table, write_trajectories
from rlightning.types import Prompt, RolloutBatch, Sample, Trajectory, single_turns


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trajectories")


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
@pytest.mark.long
def test_reading_gives_the_trajectories_that_were_written(seed: int, folder: Path) -> None:
    draw = random.Random(seed)
    groups = [[draw.choice((one, split_by_agents(draw, one))) for one in group] for group in random_groups(draw)]
    trajectories = [one for group in groups for one in group]
    batch = RolloutBatch.pack(groups)
    batch.rewards = torch.arange(len(trajectories)) / 4
    batch.scores = {"exact": torch.zeros(len(trajectories))}
    write_trajectories(trajectory_table(batch, 3), folder / "step.parquet")
    records = read_trajectories(folder / "step.parquet")
    assert [record.trajectory for record in records] == trajectories
    assert [record.reward for record in records] == [m / 4 for m in range(len(trajectories))]
    assert [record.group for record in records] == [g for g, group in enumerate(groups) for _ in group]
    assert {(record.step, record.advantage) for record in records} <= {(3, None)}
    assert pyarrow.parquet.read_schema(folder / "step.parquet").equals(schema(["exact"]))


def make_batch(*texts: str) -> RolloutBatch:
    samples = [[Sample([1, 2], [-1, -2], [0, 0], text, "stop")] for text in texts]
    prompts = [Prompt(index, "?", [5], {"answer": "4"}, None, 0.5, 8) for index in range(len(texts))]
    batch = RolloutBatch.pack(single_turns(prompts, samples))
    batch.rewards = torch.ones(len(texts))
    return batch


def test_micro_batches_of_a_step_are_one_table(tmp_path: Path) -> None:
    first, second = make_batch("a", "b"), make_batch("c")
    first.scores = {"exact": torch.tensor([1.0, 0.0])}
    first.advantages = torch.tensor([9.0, 0.5, 7.0, 9.0, -0.5, 7.0])
    nothing = trajectory_table(first.select([]), 1)
    table = merge_tables(merge_tables(nothing, trajectory_table(first, 1)), trajectory_table(second, 1))
    assert table["group"].to_pylist() == [0, 1, 2]
    assert table["reward/exact"].to_pylist() == [1.0, 0.0, None]
    assert table["advantage"].to_pylist() == [0.5, -0.5, None]
    write_trajectories(table, tmp_path / "step_000001.parquet")
    write_trajectories(trajectory_table(second, 2), tmp_path / "step_000002.parquet")
    records = read_trajectories(tmp_path)
    assert [(record.step, record.trajectory.final_text) for record in records] == [
        (1, "a"),
        (1, "b"),
        (1, "c"),
        (2, "c"),
    ]


def test_trajectory_that_never_began_is_recorded(tmp_path: Path) -> None:
    lost = Trajectory(Prompt(0, "?", [5], {}), (), (), status="failed", error="no connection")
    batch = RolloutBatch.pack([[replace(lost)], [make_batch("a").unpack()[0]]])
    batch.rewards = torch.tensor([torch.nan, 1.0])
    batch.advantages = torch.tensor([0.0, 2.0, 2.0])
    write_trajectories(trajectory_table(batch, 1), tmp_path / "step.parquet")
    first, second = read_trajectories(tmp_path / "step.parquet")
    assert first.trajectory == lost and first.advantage == 0.0
    assert second.advantage == 2.0
