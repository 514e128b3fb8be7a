"""The file of a prediction: what JSON lacks, and what a kill leaves of it."""

import json
import random
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from random_trajectories import random_groups
from tiny import make_completion

from rlightning.errors import ConfigError
from rlightning.report.prediction_file import PredictionFile, to_json
from rlightning.report.trajectories import read_trajectories, schema
from rlightning.types import Prompt, Trajectory

NAN, INFINITY = float("nan"), float("inf")
NAMES = ["out.jsonl", "out.parquet"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (NAN, "null"),
        ([1.5, INFINITY, {"a": -INFINITY}], '[1.5, null, {"a": null}]'),
        ({"half": "a\ud83db", "whole": "😀", "bar": "a|b"}, '{"half": "a\\ud83db", "whole": "😀", "bar": "a|b"}'),
        ({"\udc80": 1}, '{"\\udc80": 1}'),
        ("a\u2028b\x85c\nd\x00", '"a\\u2028b\\u0085c\\nd\\u0000"'),
        ({1: (True, None), ("a", 2): date(2026, 1, 2)}, '{"1": [true, null], "(\'a\', 2)": "2026-01-02"}'),
        (np.array([0.5, NAN], np.float32), "[0.5, null]"),
        ({"a": np.float32(0.25), "b": np.int64(7), "c": Decimal("0.10")}, '{"a": 0.25, "b": 7, "c": "0.10"}'),
        (2**70, "1180591620717411303424"),
    ],
)
def test_to_json_is_json_in_utf8_on_one_line(value: Any, text: str) -> None:
    assert to_json(value) == text
    text.encode()
    assert len(text.splitlines()) == 1
    json.loads(text, parse_constant=pytest.fail)


def write(path: Path, *indices: int, **settings: Any) -> PredictionFile:
    """A file of an earlier run that a kill left."""
    file = PredictionFile(path, settings)
    file.read()
    file.open()
    for index in indices:
        prompt = Prompt(index, f"{index}=", [1], {})
        file.write(prompt, [Trajectory.single_turn(prompt, make_completion([1, 0]))])
    file.close()
    return file


def indices_in(path: Path) -> list[int]:
    """The prompts of a finished file, in its order."""
    if path.suffix == ".parquet":
        return [record.trajectory.prompt.index for record in read_trajectories(path)]
    return [json.loads(line)["index"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", NAMES)
def test_lines_are_in_the_prompts_order_in_the_end(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write(path, 10, 2)
    file = PredictionFile(path, {})
    assert file.read() == {10: hash("10="), 2: hash("2=")}
    file.open()
    prompt = Prompt(9, "9=", [1], {})
    file.write(prompt, [Trajectory.single_turn(prompt, make_completion([1, 0]))] * 2)
    file.finish()
    assert list(dict.fromkeys(indices_in(path))) == [2, 9, 10]
    assert (file.num_prompts, file.num_completions) == (3, 4)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_bytes", [1, 9, 40, -1])
def test_a_line_that_a_kill_cut_is_written_anew(name: str, tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / name
    partial = write(path, 0, 1).partial
    lines = partial.read_bytes().splitlines(keepends=True)
    partial.write_bytes(lines[0] + lines[1][:num_bytes])
    assert list(write(path, 1).read()) == [0, 1]
    assert partial.read_bytes() == b"".join(lines)


@pytest.mark.parametrize("content", ["precious\n", "precious", "[1]\n", '{"index": 0}\n', "null\n", "\n"])
def test_a_partial_file_of_something_else_is_kept(tmp_path: Path, content: str) -> None:
    file = PredictionFile(tmp_path / "out.jsonl", {})
    file.partial.write_text(content)
    with pytest.raises(
        ConfigError, match=r"out\.jsonl\.partial' holds no prediction in line 1\. It is not overwritten"
    ):
        file.read()
    assert file.partial.read_text() == content


def test_other_settings_are_refused_by_their_key(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, 0, **{"rollout.temperature": 1.0, "rollout.stop": ("a",)})
    assert list(PredictionFile(path, {"rollout.temperature": 1.0, "rollout.stop": ["a"]}).read()) == [0]
    with pytest.raises(
        ConfigError, match=r"was begun with rollout\.temperature=1\.0, and now it is 0\.5\. It is not over"
    ):
        PredictionFile(path, {"rollout.temperature": 0.5, "rollout.stop": ("a",)}).read()


def test_a_partial_file_without_its_settings_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "out.jsonl", 0)
    (tmp_path / "out.jsonl.partial.settings").unlink()
    content = file.partial.read_bytes()
    rule = r"out\.jsonl\.partial' has no 'out\.jsonl\.partial\.settings' beside it, which says what it was sampled with"
    with pytest.raises(ConfigError, match=rf"{rule}\. It is not overwritten: move it away"):
        PredictionFile(tmp_path / "out.jsonl", {}).read()
    assert file.partial.read_bytes() == content


def test_a_file_that_is_written_is_refused_to_others(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first, second = PredictionFile(path, {}), PredictionFile(path, {})
    first.lock()
    first.lock()
    with pytest.raises(ConfigError, match=r"out\.jsonl\.partial' is being written by another process\. It is not over"):
        second.lock()
    first.close()
    assert list(tmp_path.iterdir()) == []
    second.lock()
    second.open()
    second.write(Prompt(0, "0=", [1], {}), [])
    with pytest.raises(ConfigError, match="is being written by another process"):
        first.lock()
    second.finish()
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_file_and_a_partial_one_are_merged(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write(path, 5, 1)
    file = PredictionFile(path, {})
    file.read()
    file.open()
    file.finish()
    write(path, 3, 5)
    file = PredictionFile(path, {})
    assert file.read() == {1: hash("1="), 5: hash("5="), 3: hash("3=")}
    assert (file.num_prompts, file.num_completions) == (3, 3)
    file.open()
    file.finish()
    assert indices_in(path) == [1, 3, 5]
    again = PredictionFile(path, {})
    again.lock()
    assert list(again.read()) == [1, 3, 5]
    again.finish()  # the same command once more, which finds no prompt left
    assert indices_in(path) == [1, 3, 5]


def test_parquet_has_the_trajectories_of_each_prompt(tmp_path: Path) -> None:
    path, groups = tmp_path / "out.parquet", [group for group in random_groups(random.Random(7)) if group]
    assert sum(len(group) for group in groups) > len(groups) > 1
    file = PredictionFile(path, {})
    file.open()
    for group in reversed(groups):
        file.write(group[0].prompt, group)
    file.finish()
    records = read_trajectories(path)
    assert [record.trajectory for record in records] == [one for group in groups for one in group]
    assert [record.group for record in records] == [g for g, group in enumerate(groups) for _ in group]
    assert {(record.step, record.reward, record.advantage) for record in records} == {(0, None, None)}
    assert pyarrow.parquet.read_schema(path).equals(schema(()))
