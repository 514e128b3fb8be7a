"""YAML files: nothing that they say is lost or becomes something else."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_project import resolve_config

from rlightning.cli.config_keys import ConfigKeys
from rlightning.config.files import dump_yaml, load_yaml, merge_mappings, nest_names, read_config
from rlightning.data import ValidationSet
from rlightning.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no: x.jsonl", {"no": "x.jsonl"}),
        ("{on: 1, off: 2, yes: 3, Y: 4}", {"on": 1, "off": 2, "yes": 3, "Y": 4}),
        ("{true: 1, null: 2, ~: 3}", {"true": 1, "null": 2, "~": 3}),
        ("a: no", {"a": "no"}),
        ("a: [true, False, null, 'true']", {"a": [True, False, None, "true"]}),
        ("{1: a, 1e-5: b}", {"1": "a", "1e-5": "b"}),
        ("{1: a, 1.0: b, 0x1: c, 01: d}", {"1": "a", "1.0": "b", "0x1": "c", "01": "d"}),
        ("{010: x.jsonl, 1:30: y.jsonl, =: z}", {"010": "x.jsonl", "1:30": "y.jsonl", "=": "z"}),
        ("a: {<<: {010: b}, 1: c}", {"a": {"010": "b", "1": "c"}}),
        ("a: &x {b: 1}\nc: &y {<<: *x, b: 2}\nd: {<<: [*y, *x]}", {"a": {"b": 1}, "c": {"b": 2}, "d": {"b": 2}}),
        ("a: &x {b: 1, c: 2}\nd: {<<: *x, b: 3}", {"a": {"b": 1, "c": 2}, "d": {"b": 3, "c": 2}}),
    ],
)
def test_load_yaml_keeps_what_is_written(text: str, value: Any) -> None:
    assert load_yaml(text) == value


SCALARS = {
    **{"10": 10, "010": 10, "-010": -10, "+7": 7, "0x1F": 31, "0o17": 15},
    **{"1e-5": 1e-5, "1E5": 1e5, "5e3": 5e3, ".5": 0.5, "-1.": -1.0, "1.5e+2": 150.0, ".inf": math.inf},
    **{"-.INF": -math.inf, "true": True, "FALSE": False, "Null": None, "~": None, "''": ""},
}
PLAIN_TEXTS = ["1:30", "12:30:00", "1:30.5", "0b11", "1_000", "-0x1", "0o8", ".e1", "1e", "inf", "nan", "=", "<<"]
PLAIN_TEXTS += ["no", "Yes", "on", "OFF", "y", "2026-01-02", "2026-01-02T03:04:05Z"]


@pytest.mark.parametrize(("text", "value"), [*SCALARS.items(), *((text, text) for text in PLAIN_TEXTS)])
def test_load_yaml_reads_scalars_as_version_1_2(text: str, value: Any) -> None:
    read = load_yaml(text)
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "line", "key", "first"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "a", 1),
        ("a:\n  b: {c: 1}\n  b: 1", 3, "b", 2),
        ("a: {no: 1, no: 2}", 1, "no", 1),
        ("a: &x {b: 1}\nc: &y {d: 2}\ne:\n  <<: *x\n  <<: *y\n", 5, "<<", 4),
        ("a:\n  <<:\n    b: 1\n    b: 2\n", 4, "b", 3),
    ],
)
def test_a_key_twice_in_a_file_names_both_lines(tmp_path: Path, text: str, line: int, key: str, first: int) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"run\.yaml, line {line}: .*the key '{key}' is in line {first} already"):
        read_config(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: 1\nb: 2\nc: x\x07y\n", r"line 3: not valid YAML \(U\+0007 is a control character"),
        (b"a: 1\nb: x\x00\n", r"line 2: not valid YAML \(U\+0000 is a control character"),
        (b"a: 1\nb: [1\n", r"line 3: not valid YAML \("),
        (b"a: 1\nb: *x\n", r"line 2: not valid YAML \("),
        (b"a: !own x\n", r"line 1: not valid YAML \("),
        (b"a: " + b"[" * 5000 + b"]" * 5000, r"line \?: not valid YAML \(lists or mappings are nested too deeply"),
        (b"a: 1\nb: !!int 1:30\n", "line 2: not valid YAML"),
        (b"a: 1\nb: !!float x\n", "line 2: not valid YAML"),
        (b"a: 1\nb: " + b"9" * 5000 + b"\n", "line 2: not valid YAML"),
        (rb'{"a": {"b": "Hi \ud83d"}}', r"line 1: not valid YAML \(found invalid Unicode character"),
    ],
)
def test_file_that_is_no_yaml_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"run\.yaml, {message}"):
        read_config(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": {"b": 1, "c": 2, "b": 3}}', "run.json: the key 'b' is there twice"),
        ('{"a": {"b": "Hi \\ud83d"}}', "run.json: 'Hi \\ud83d' holds U+D83D, half of a character"),
        (
            '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
            "run.json, line ?: not valid JSON (lists or mappings are nested too deeply",
        ),
    ],
)
def test_file_that_is_no_json_is_one_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_config(str(tmp_path / "run.json"))


@pytest.mark.parametrize("content", [b"a: 1\nb: caf\xe9\n", "a: 1\nb: é\n".encode("utf-16")])
def test_file_that_is_not_utf_8_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^--config {path}: the file is not in UTF-8\. Name a YAML file\.$"):
        read_config(str(path))


def test_folder_in_place_of_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^--config {tmp_path} is a folder\. Name a YAML file\.$"):
        read_config(str(tmp_path))


def test_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_config(str(tmp_path / "run.yaml")) == {"a": 1}


def test_merge_mappings_nests_but_not_into_other_classes() -> None:
    earlier = {"a": {"x": 1, "y": 2}, "b": 1, "c": {"class_path": "A", "init_args": {"x": 1}}}
    later = {"a": {"y": 3}, "c": {"class_path": "B"}, "d": 4}
    assert merge_mappings(earlier, later) == {"a": {"x": 1, "y": 3}, "b": 1, "c": {"class_path": "B"}, "d": 4}


def test_merged_contents_stand_in_place_of_their_files(tmp_path: Path) -> None:
    first, second, third = (str(tmp_path / name) for name in ("a.yaml", "b.yaml", "c.yaml"))
    Path(first).write_text("engine: {a: '1e-5', b: 1}\n")
    Path(second).write_text("engine: {b: '5e3', d: 1e-5}\n")
    Path(third).write_text("lr: 1\n")
    options = ["--config", first, "--lr", "1", f"--config={second}", "-c", third, "--sets.easy.limit=2", "--help"]
    keys = ConfigKeys({"engine": dict[str, Any], "lr": float, "sets": dict[str, ValidationSet]}, {})
    checked = keys.check_options(options)
    assert checked[:4] == options[:4] and checked[5:] == ["-c", third, "--sets={}", "--sets.easy.limit=2", "--help"]
    assert load_yaml(checked[4].removeprefix("--config=")) == {"engine": {"a": "1e-5", "b": "5e3", "d": 1e-5}}


TEXTS = ["1e-5", "1e5", "5e3", "1E+5", "010", "0o17", "0x1F", "1:30", "12:30:00", "1_000", "no", "yes", "On", "true"]
TEXTS += ["null", "~", "", ".5", "1.", ".inf", ".NaN", "<<", "=", "2026-01-02", "0b1", "- a", "a: b", "# c", "x\ty"]


@pytest.mark.parametrize("load", [load_yaml, yaml.safe_load])
def test_dump_yaml_keeps_texts_and_numbers_for_both_versions(load: Any) -> None:
    numbers = [1, -7, 0.1, 1e-5, 1e5, 1e300, -math.inf, True, None]
    content = {"texts": TEXTS, "keys": dict.fromkeys(TEXTS, 1), "numbers": numbers}
    assert load(dump_yaml(content)) == content


@pytest.mark.long
def test_types_of_files_reach_the_configuration(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "a.yaml").write_text("rollout: {engine: {a: 010, b: 1:30}, stop: '1e-5'}\n")
    (project / "b.yaml").write_text("rollout: {engine: {c: 5e3}}\ndata: {validation: {010: rows.jsonl}}\n")
    (project / "c.yaml").write_text("rollout: {engine: {d: '010', e: [{f: 'null', g: '# h'}, 'a: b']}}\n")
    (project / "d.json").write_text('{"data": {"chat_template_arguments": {"a": "010", "b": ["null", 1, "1"]}}}')
    files = [option for name in ("a.yaml", "b.yaml", "c.yaml", "d.json") for option in ("--config", name)]
    option = ["--rollout.engine.i", '"7"', "--rollout.engine.j", "7", "--rollout.engine.k", '{l: "7", m: 7}']
    config = resolve_config(capsys, *files, "--trainer.max_time", "00:12:30:00", *option)
    engine = {"a": 10, "b": "1:30", "c": 5000.0, "d": "010", "e": [{"f": "null", "g": "# h"}, "a: b"]}
    engine |= {"i": "7", "j": 7, "k": {"l": "7", "m": 7}}
    assert config["data"]["init_args"]["chat_template_arguments"] == {"a": "010", "b": ["null", 1, "1"]}
    assert config["rollout"]["init_args"]["engine"] == engine
    assert config["data"]["init_args"]["validation"] == {"010": "rows.jsonl"}
    assert config["rollout"]["init_args"]["stop"] == "1e-5"
    assert config["trainer"]["max_time"] == "00:12:30:00"


@pytest.mark.long
@pytest.mark.parametrize("name", ["#h.jsonl", "a: b.jsonl", "a:", "[a]", "{a}", "-", "- a", "a:b"])
def test_file_name_that_looks_like_yaml_is_a_path(name: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / name).write_text('{"prompt": "1+1="}\n')
    (project / "quoted.yaml").write_text(yaml.safe_dump({"data": {"validation": name, "train": name}}))
    for options in (["--data.validation", name, f"--data.train={name}"], ["--config", "quoted.yaml"]):
        data = resolve_config(capsys, *options)["data"]["init_args"]
        assert (data["validation"], data["train"]) == (name, name)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--data.validation.easy.path", "r", "--data.validation.easy.limit=2"], {"easy"}),
        (["--data.init_args.validation.easy.path=r", "--data.validation.easy.limit", "2"], {"easy"}),
        (
            ["--config", "hard.yaml", "--data.validation.easy.path=r", "--data.validation.easy.limit", "2"],
            {"easy", "hard"},
        ),
        (["--config", "hard.yaml", "--config", "easy.yaml"], {"easy", "hard"}),
        (["--config", "easy.yaml"], {"easy"}),
        (
            ["--config", "easy.yaml", "--data.validation", "null", "--data.validation", "{easy: {path: r, limit: 2}}"],
            {"easy"},
        ),
    ],
)
def test_key_of_a_set_is_no_name_of_another(
    options: list[str], names: set[str], project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "hard.yaml").write_text("data: {validation: {hard: h}}\n")
    (project / "easy.yaml").write_text("data: {validation: {easy.path: r, easy.limit: 2}}\n")
    sets = resolve_config(capsys, *options)["data"]["init_args"]["validation"]
    assert sets.keys() == names
    assert (sets["easy"]["path"], sets["easy"]["limit"]) == ("r", 2)


def test_set_that_a_file_names_twice_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^data\.validation\.easy: the file sets this key twice\. Remove one of them\.$"
    ):
        nest_names({"easy": "a.jsonl", "easy.limit": 2}, "data.validation")
