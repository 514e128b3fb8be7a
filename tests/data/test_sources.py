"""Every source gives the same rows, and every mistake names its place."""

import csv
import json
import pickle
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from rlightning.data.sources import read_rows
from rlightning.errors import ConfigError

ROWS: list[dict[str, Any]] = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2,\n2=", "answer": "4"}]


def nest(depth: int) -> str:
    """A list within a list and so on, as JSON."""
    return "[" * depth + "]" * depth


def write(path: Path) -> str:
    """Write ROWS in the format that the path's suffix names."""
    if path.suffix == ".jsonl":
        path.write_text("\n\n".join(json.dumps(row) for row in ROWS))
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["prompt", "answer"])
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        datasets.Dataset.from_list(ROWS).save_to_disk(str(path))
    return str(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "folder"])
def test_every_source_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    assert read_rows(path).rows == ROWS
    assert read_rows(path, limit=1).rows == ROWS[:1]
    assert read_rows(path).columns == {"prompt", "answer"}


def test_splits_of_a_folder(tmp_path: Path) -> None:
    one = datasets.Dataset.from_list(ROWS)
    folder = str(tmp_path / "sets")
    datasets.DatasetDict(train=one, test=one.select([0])).save_to_disk(folder)
    assert read_rows(f"{folder}:test").rows == ROWS[:1]
    with pytest.raises(ConfigError, match=r"has the splits train, test\. Name one: '.*sets:train'"):
        read_rows(folder)
    with pytest.raises(ConfigError, match=r"has no split 'tests'\. Did you mean 'test'\?"):
        read_rows(f"{folder}:tests")


def test_lines_are_those_of_the_file(tmp_path: Path) -> None:
    lines = read_rows(write(tmp_path / "a.jsonl"))
    assert lines.where(1) == f"{tmp_path}/a.jsonl, line 3"  # an empty line stands between
    cells = read_rows(write(tmp_path / "a.csv"))
    assert cells.where(1) == f"{tmp_path}/a.csv, line 3"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": \n', r"a\.jsonl, line 2 is not JSON"),
        ("a.jsonl", '{"prompt": "x"}\n\n[1]\n', r"a\.jsonl, line 3 is a JSON list"),
        ("a.json", '{"prompt": "x"}', "holds a JSON dict"),
        ("a.json", "[{}, 3]", r"a\.json, row 2 is a JSON int"),
        ("a.csv", "prompt,answer\nx,1\ny\n", r"a\.csv, line 3 has 1 cells where the header has 2"),
        ("a.csv", 'prompt\n"x\ny"\n"z\nw\n', r"a\.csv, line 4 is not CSV: unexpected end of data"),
        ("a.csv", "prompt,answer,prompt\nx,1,y\n", r"a\.csv, line 1 names 'prompt' twice"),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": "x", "prompt": "y"}\n', r"a\.jsonl, line 2 names 'prompt' twice"),
        ("a.json", '[{"a": {"b": 1, "b": 2}}]', r"a\.json names 'b' twice"),
        ("a.jsonl", "[" * 100_000, r"a\.jsonl, line 1 is not JSON that can be read: lists or .* more than 100 deep"),
        (
            "a.jsonl",
            '{"prompt": "x"}\n{"prompt": ' + nest(101) + "}",
            r"a\.jsonl, line 2: lists or .* more than 100 deep",
        ),
        ("a.json", f'[{{"prompt": {nest(101)}}}]', r"a\.json: lists or objects are nested more than 100 deep"),
        ("a.parquet", "no", "is not Parquet"),
        ("a.jsonl", "\n", "is empty"),
        ("a.csv", "prompt\n", "is empty"),
        ("a.txt", "x", "ends in none of .jsonl, .json, .csv, .parquet"),
    ],
)
def test_a_malformed_set_names_its_place(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_rows(str(path))
    assert "\n" not in str(caught.value)


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "x"}\n{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"line 2 is not JSON.*utf-8"):
        read_rows(str(path))


@pytest.mark.parametrize("num_before", [1, 5000])  # within what is decoded at once, and beyond
def test_a_csv_line_that_is_not_utf8_is_named(tmp_path: Path, num_before: int) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"prompt\n" + b"x\n" * num_before + b"\xff\n" + b"x\n" * 5000)
    with pytest.raises(ConfigError, match=rf"a\.csv, line {num_before + 2} is not UTF-8"):
        read_rows(str(path))


def test_a_csv_cell_may_be_long(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt\n" + "x" * 140_000 + "\n")
    assert read_rows(str(path)).rows == [{"prompt": "x" * 140_000}]


def test_parquet_with_a_column_twice_is_refused(tmp_path: Path) -> None:
    table = pyarrow.table([["a"], ["b"]], names=["prompt", "prompt"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet names 'prompt' twice"):
        read_rows(str(tmp_path / "a.parquet"))


def test_a_missing_file_names_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").touch()
    with pytest.raises(ConfigError, match=r"There is no file '.*trian\.jsonl'\. Did you mean '.*/data/train\.jsonl'\?"):
        read_rows(str(tmp_path / "data" / "trian.jsonl"))
    with pytest.raises(ConfigError, match=r"Did you mean '.*/data'\?"):
        read_rows(str(tmp_path / "dta" / "train.jsonl"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"There is no file 'data/train'\. Did you mean 'data/train\.jsonl'\?"):
        read_rows("data/train")  # looks like a hub name, but its folder is here


def test_a_folder_that_datasets_did_not_save(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(ConfigError, match=r"was not saved by datasets' save_to_disk.*holds: train\.jsonl"):
        read_rows(str(tmp_path))


def test_unavailable_hub_dataset_raises_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="'nobody/nothing:main:train' is no file, and the hub's set") as caught:
        read_rows("nobody/nothing:main:train")
    assert "\n" not in str(caught.value)


def test_row_nested_as_deep_as_allowed_is_read(tmp_path: Path) -> None:
    """An object of 100 levels in all; brackets in a text count for nothing."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "[" * 500, "tree": json.loads(nest(99))}) + "\n")
    (row,) = read_rows(str(tmp_path / "a.jsonl")).rows
    assert row["prompt"] == "[" * 500
    pickle.dumps(row)  # as reward functions get it
