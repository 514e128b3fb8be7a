"""YAML files: nothing that they say is lost or becomes something else."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlightning.config_files import load_yaml, merge_mappings, read_yaml, replace_files
from rlightning.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no: x.jsonl", {"no": "x.jsonl"}),
        ("{on: 1, off: 2, yes: 3, Y: 4}", {"on": 1, "off": 2, "yes": 3, "Y": 4}),
        ("{true: 1, null: 2, ~: 3}", {"true": 1, "null": 2, "~": 3}),
        ("a: no", {"a": "no"}),
        ("a: [true, False, null, 'true']", {"a": [True, False, None, "true"]}),
        ("{1: a, 1e-5: b}", {1: "a", 1e-5: "b"}),
        ("a: 2026-01-02", {"a": "2026-01-02"}),
        ("a: &x {b: 1, c: 2}\nd: {<<: *x, b: 3}", {"a": {"b": 1, "c": 2}, "d": {"b": 3, "c": 2}}),
    ],
)
def test_load_yaml_keeps_what_is_written(text: str, value: Any) -> None:
    assert load_yaml(text) == value


@pytest.mark.parametrize(
    ("text", "line", "key", "first"),
    [("a: 1\nb: 2\na: 3\n", 3, "a", 1), ("a:\n  b: {c: 1}\n  b: 1", 3, "b", 2), ("a: {no: 1, no: 2}", 1, "no", 1)],
)
def test_a_key_twice_in_a_file_names_both_lines(tmp_path: Path, text: str, line: int, key: str, first: int) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"run\.yaml, line {line}: .*the key '{key}' is in line {first} already"):
        read_yaml(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: 1\nb: caf\xe9\n", r"line 2: not valid YAML \(byte 0xE9 is not UTF-8\)"),
        ("a: 1\nb: é\n".encode("utf-16"), r"line 1: not valid YAML \(byte 0xFF is not UTF-8\)"),
        (b"a: 1\nb: 2\nc: x\x07y\n", r"line 3: not valid YAML \(U\+0007 is a control character"),
        (b"a: 1\nb: x\x00\n", r"line 2: not valid YAML \(U\+0000 is a control character"),
        (b"a: 1\nb: [1\n", r"line 3: not valid YAML \("),
        (b"a: 1\nb: *x\n", r"line 2: not valid YAML \("),
        (b"a: !own x\n", r"line 1: not valid YAML \("),
    ],
)
def test_file_that_is_no_yaml_is_refused_in_a_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"run\.yaml, {message}"):
        read_yaml(str(path))


def test_folder_in_place_of_a_file_is_refused_as_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^--config {tmp_path} is a folder\. Name a YAML file\.$"):
        read_yaml(str(tmp_path))


def test_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_yaml(str(tmp_path / "run.yaml")) == {"a": 1}


def test_merge_mappings_nests_but_not_into_other_classes() -> None:
    earlier = {"a": {"x": 1, "y": 2}, "b": 1, "c": {"class_path": "A", "init_args": {"x": 1}}}
    later = {"a": {"y": 3}, "c": {"class_path": "B"}, "d": 4}
    assert merge_mappings(earlier, later) == {"a": {"x": 1, "y": 3}, "b": 1, "c": {"class_path": "B"}, "d": 4}


def test_replace_files_puts_contents_in_place_of_their_files() -> None:
    options = ["--config", "a.yaml", "--model.lr", "1", "--config=b.yaml", "-c", "c.yaml"]
    replaced = replace_files(options, [None, {"no": 1}, {"a": ["x"]}])
    assert replaced[:4] == options[:4] and replaced[5] == "-c"
    assert yaml.safe_load(replaced[4].removeprefix("--config=")) == {"no": 1}
    assert yaml.safe_load(replaced[6]) == {"a": ["x"]}
