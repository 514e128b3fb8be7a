"""Every mistake in a configuration: one line, the key, the nearest valid name."""

import json
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from cli_project import fit_here, resolve_config
from programs import logged_steps

from rlightning.callbacks import VLLMRollout
from rlightning.cli.named_classes import find_class
from rlightning.config.type_hints import takes_text
from rlightning.rewards import RewardFunction


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--trainer.max_step=3", "trainer.max_step: there is no such key. Did you mean 'max_steps'?"),
        ("--model.adapter.lora_alpha=8", "model.adapter.lora_alpha: there is no such key. Did you mean 'alpha'?"),
        ("--model.adapter.r=8", "model.adapter.r: there is no such key. Did you mean 'rank'?"),
        (
            "--model.adapter=hf_adapter",
            "model.adapter: 'hf_adapter' is not a class. For a folder, write model.adapter.",
        ),
        ("--model.l=3", "model.l: there is no such key. Did you mean 'lr'?"),
        ("--model.init_args.learning_rat=3", "model.init_args.learning_rat: there is no such key. "),
        ("--model.completion_col=x", "model.completion_col: there is no such key. Did you mean 'completion_column'?"),
        (
            "--model.kl_placement=los",
            "model.kl_placement: expected Literal['loss', 'reward'], got 'los'. Did you mean 'loss'?",
        ),
        ("--model=torch.nn.Linear", "model: 'torch.nn.Linear' is not a subclass of RLModule. Name one that is."),
        (
            "--model.rewards={class_path: rlightning.rewards.exact_match}",
            "model.rewards.class_path: 'rlightning.rewards.exact_match' is not a class. A function is named without",
        ),
        ("--data.train_limit=0", "train_limit=0 must be at least 1."),
        ("--data.overlong=drob", "data.overlong: expected Literal['drop', 'truncate'], got 'drob'"),
        ("--trainer.callbacks+=EarlyStoping", "trainer.callbacks: there is no class 'EarlyStoping'. Did you mean"),
        ("--ckpt_path=gone.ckpt", "ckpt_path=gone.ckpt: there is no such file."),
        ("--trainer.gradient_clip_val=1", "trainer.gradient_clip_val=1 has no effect here"),
        ("--trainer.accumulate_grad_batches=2", "trainer.accumulate_grad_batches=2 has no effect here"),
        ("--trainer.precision=16-mixed", "trainer.precision=16-mixed needs a scaled loss"),
        ("--trainer.default_root_dir=rows.jsonl", "trainer.default_root_dir=rows.jsonl is a file. Name a folder"),
        ("--model.kl_coef=.inf", "kl_coef=inf must be finite and at least 0"),
        ("--model.entropy_coef=.nan", "entropy_coef=nan must be finite."),
        ("--data.prompt_column=null", "data.prompt_column: null is no value for it."),
        ("--trainer=[]", "trainer=[]: here stand keys, not a value. Write 'trainer:', and below it lines such as"),
        ("--data=[1]", "data=[1]: here stand keys"),
        ("--rollout=[]", "rollout=[]: here stand keys"),
        ("--model.lr=-1", "lr=-1.0 must be at least 0."),
        ("--model.kl_coef=-1", "kl_coef=-1.0 must be finite and at least 0: it is a penalty."),
        ("--trainer.accelerator=gpuu", "trainer: You selected an invalid accelerator name"),
    ],
)
def test_wrong_option_is_one_line(
    project: Path, capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    code, errors = fit_here(capsys, "--config", "run.yaml", options)
    assert code == 2
    assert errors.splitlines()[-1].startswith(f"error: {message}")
    assert "Traceback" not in errors
    assert "usage" not in errors


@pytest.mark.long
@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("lr: 0.01", "lr:", "model.init_args.lr: null is no value for it. Leave the key out for its default"),
        ("trainer:\n", "trainer: []\nunused:\n", "trainer=[]: here stand keys, not a value."),
        ("lr: 0.01", "lr: [1]", "model.lr: expected float, got '[1]'"),
        ("rollout:", "rolout:", "rolout: there is no such key. Did you mean 'rollout'?"),
        ("    model: model\n", "", "model: it needs a value for 'model'"),
        (
            "rollout:",
            "data: {seed: 1}\nrollout:",
            "run.yaml, line 10: not valid YAML (the key 'data' is in line 7 already",
        ),
        ("train: rows.jsonl", "shuffle: no", "data.shuffle: expected bool, got 'no'"),
        (
            "max_steps: 3",
            "callbacks: [{class_path: own_classes.Announce, init_args: {wort: x}}]",
            "trainer.callbacks[0].init_args.wort: there is no such key. Did you mean 'word'?",
        ),
        (
            "max_steps: 3",
            "callbacks: [{class_path: own_classes.Anounce}]",
            "trainer.callbacks[0].class_path: there is no 'Anounce' in 'own_classes'. Did you mean 'own_classes.Anno",
        ),
        (
            "train: rows.jsonl",
            "validation: {held_out: {path: rows.jsonl, limmit: 3}}",
            "data.validation.held_out.limmit: there is no such key. Did you mean 'limit'?",
        ),
        ("train: rows.jsonl", "train: {a: 1}", "data.train: expected str or list, got '{'a': 1}'"),
        (
            "train: rows.jsonl",
            "train: [rows.jsonl, row.jsonl]",
            "There is no file 'row.jsonl'. Did you mean 'rows.jsonl'",
        ),
        (
            "lr: 0.01",
            "rewards: [{function: a.b, wieght: 2}]",
            "model.init_args.rewards[0].wieght: there is no such key. Did you mean 'weight'?",
        ),
        (
            "max_steps: 3",
            "callbacks: [rlightning.callbacks.VLLMRollout]",
            "rollout: this section and a VLLMRollout under trainer.callbacks are both there.",
        ),
    ],
)
def test_wrong_file_is_one_line(
    project: Path, capsys: pytest.CaptureFixture[str], right: str, wrong: str, message: str
) -> None:
    path = project / "run.yaml"
    assert right in path.read_text()
    path.write_text(path.read_text().replace(right, wrong))
    code, errors = fit_here(capsys, "--config", "run.yaml")
    assert code == 2
    assert errors.splitlines()[-1].startswith(f"error: {message}")
    assert "Traceback" not in errors


@pytest.mark.parametrize("key", ["model.adapter", "model.init_args.adapter"])
def test_a_null_inside_an_objects_object(project: Path, capsys: pytest.CaptureFixture[str], key: str) -> None:
    options = ("--model.adapter", "{rank: 4, path: a}", f"--{key}.rank", "null", f"--{key}.path=null")
    adapter = resolve_config(capsys, "--config", "run.yaml", *options)["model"]["init_args"]["adapter"]
    given = adapter.get("init_args", adapter)
    assert given["rank"] is None and given["path"] is None


@pytest.mark.long
def test_error_raised_during_construction_is_not_wrapped(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, errors = fit_here(capsys, "--config", "run.yaml", "--model", "own_classes.Quick", "--model.pace", "-1")
    assert (code, errors.splitlines()[-1]) == (2, "error: pace=-1.0 must not be negative. Use 0 or more.")


@pytest.mark.long
def test_option_keys_belong_to_last_named_class(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = fit_here(capsys, "--config", "run.yaml", "--model", "GRPO", "--model.clip_high", "0.3", "--print_config")
    assert code == 0
    code, errors = fit_here(capsys, "--config", "run.yaml", "--model.clip_high", "0.3")
    assert code == 2
    assert "model.clip_high: there is no such key" in errors


def test_the_missing_dependency_of_a_users_module_is_named(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "needs_more.py").write_text("import a_package_nobody_has\n")
    code, errors = fit_here(capsys, "--config", "run.yaml", "--model", "needs_more.Mine")
    assert code == 2
    assert "importing 'needs_more' failed: No module named 'a_package_nobody_has'" in errors


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (".needs_more.Mine", "'.needs_more.Mine' is no dotted path. Write module.Class, such as needs_more.Mine."),
        ("cut_off.Mine", "importing 'cut_off' failed: SyntaxError: "),
        ("of_old.Mine", "importing 'of_old' failed: ImportError: cannot import name 'gone' from 'math'"),
        ("misspelt.Mine", "importing 'misspelt' failed: NameError: name 'Clas' is not defined (misspelt.py, line 2)."),
    ],
)
def test_users_module_that_cannot_be_imported_is_one_line(
    path: str, message: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "cut_off.py").write_text("class Mine(\n")
    (project / "of_old.py").write_text("from math import gone\n")
    (project / "misspelt.py").write_text("import math\nMine = Clas\n")
    code, errors = fit_here(capsys, "--config", "run.yaml", "--model", path)
    line = errors.splitlines()[-1].replace(f"{project}/", "")
    assert code == 2 and message in line and "Traceback" not in errors


@pytest.mark.long
def test_a_key_inside_a_named_set_can_be_overridden(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "sets.yaml").write_text("data: {validation: {easy: {path: rows.jsonl}}}\n")
    files = ("--config", "run.yaml", "--config", "sets.yaml")
    assert fit_here(capsys, *files, "--data.validation.easy.path", "rows.jsonl", "--print_config")[0] == 0
    code, errors = fit_here(capsys, *files, "--data.validation.easy.limt", "3")
    assert (code, errors) == (2, "error: data.validation.easy.limt: there is no such key. Did you mean 'limit'?\n")


def test_a_validation_set_may_be_a_path_alone(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "sets.yaml").write_text("data: {validation: {easy: rows.jsonl, hard: {path: rows.jsonl, limit: 3}}}\n")
    sets = resolve_config(capsys, "--config", "sets.yaml")["data"]["init_args"]["validation"]
    assert sets["easy"] == "rows.jsonl" and sets["hard"]["limit"] == 3


@pytest.mark.long
def test_mappings_of_several_files_merge(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = "data:\n  validation: {no: rows.jsonl, easy: {path: rows.jsonl, limit: 3}}\n"
    first += "  chat_template_arguments: {mode: off, a: 1}\n"
    first += "model: {init_args: {rewards: [{function: a.b, arguments: {x: 1}}]}}\n"
    (project / "first.yaml").write_text(first)
    second = "data: {init_args: {validation: {easy: {limit: 5}, hard: rows.jsonl}, chat_template_arguments: {a: 2}}}\n"
    second += "model: {init_args: {rewards: [{function: c.d, arguments: {y: 2}}]}}\n"
    (project / "second.yaml").write_text(second)
    shown = resolve_config(capsys, "--config", "first.yaml", "--config=second.yaml")
    data = shown["data"]["init_args"]
    assert list(data["validation"]) == ["no", "easy", "hard"]
    assert (data["validation"]["easy"]["path"], data["validation"]["easy"]["limit"]) == ("rows.jsonl", 5)
    assert data["chat_template_arguments"] == {"mode": "off", "a": 2}
    # Lists replace each other, with all that is in them.
    assert [reward["arguments"] for reward in shown["model"]["init_args"]["rewards"]] == [{"y": 2}]
    (project / "third.yaml").write_text("data: {validation: null}\n")
    shown = resolve_config(capsys, "--config", "first.yaml", "--config", "third.yaml")
    assert shown["data"]["init_args"]["validation"] is None


@pytest.mark.parametrize(
    ("options", "validation"),
    [
        (["--data.validation", "one.jsonl"], "one.jsonl"),
        (["--data.validation=rows.csv"], "rows.csv"),
        (["--data.validation", "list.json"], "list.json"),
        (["--data.validation.easy", "one.jsonl"], {"easy": "one.jsonl"}),
        (["--data.validation", "{easy: one.jsonl}"], {"easy": "one.jsonl"}),
    ],
)
def test_a_path_is_no_configuration(
    project: Path, capsys: pytest.CaptureFixture[str], options: list[str], validation: Any
) -> None:
    (project / "one.jsonl").write_text('{"prompt": "1", "completion": "2"}\n')
    (project / "rows.csv").write_text("prompt,completion\n1,2\n")
    (project / "list.json").write_text('[{"prompt": "1", "completion": "2"}]')
    assert resolve_config(capsys, *options)["data"]["init_args"]["validation"] == validation


OWN_KEYS = """\
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from lightning.pytorch import Callback
from rlightning.algorithms import SFT


@dataclass
class Judge:
    url: str = "here"


class Judged(SFT):
    def __init__(
        self,
        model: str,
        *,
        judge: Judge | str | None = None,
        place: Judge | Path | None = None,
        choice: Judge | Literal["auto"] | None = None,
        marked: Judge | Annotated[str, "marked"] | None = None,
        several: list[Judge | str] | None = None,
        nested: dict[str, list[Judge | str]] | None = None,
        paths: list[Path] | None = None,
        plain: Judge | None = None,
        **kwargs,
    ):
        super().__init__(model, **kwargs)


class Watch(Callback):
    def __init__(self, judge: Judge | str = "", several: list[Judge | str] | None = None):
        pass
"""


@pytest.mark.long
def test_own_keys_that_take_text_keep_paths(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "own_keys.py").write_text(OWN_KEYS)
    (project / "rows.csv").write_text("prompt,completion\n1,2\n")
    (project / "auto").write_text("url: there\n")
    (project / "judge.yaml").write_text("url: there\n")
    values: dict[str, Any] = dict.fromkeys(("judge", "place", "marked"), "rows.csv")
    values |= {"choice": "auto", "several": ["rows.csv"], "nested": {"a": ["rows.csv"]}, "paths": ["rows.csv"]}
    watch = {"class_path": "own_keys.Watch", "init_args": {"judge": "judge.yaml", "several": ["rows.csv"]}}
    model = {"class_path": "own_keys.Judged", "init_args": {"model": "model", **values}}
    (project / "own.yaml").write_text(yaml.safe_dump({"model": model, "trainer": {"callbacks": [watch]}}))
    options = [
        f"--model.{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()
    ]
    by_file = resolve_config(capsys, "--config", "own.yaml", "--model.plain", "judge.yaml")
    by_options = resolve_config(capsys, "--model", "own_keys.Judged", "--model.model=model", *options)
    for shown in (by_file, by_options):
        init_args = shown["model"]["init_args"]
        assert {name: init_args[name] for name in values} == values
    assert by_file["trainer"]["callbacks"] == [watch]
    assert by_file["model"]["init_args"]["plain"] == {"url": "there"}  # where only a class's arguments can stand


@pytest.mark.parametrize(
    ("hint", "takes"),
    [
        (str | None, True),
        (dict[str, int | str] | None, True),
        (Sequence[RewardFunction | str], True),
        (dict[str, list[RewardFunction | str]], True),
        (RewardFunction | Literal["auto"], True),
        (RewardFunction | Annotated[Path, "where"], True),
        (dict[str, int], False),
        (list[RewardFunction] | None, False),
        (RewardFunction | Literal[1, 2], False),
        (Callable[[str], RewardFunction] | None, False),
    ],
)
def test_takes_text_looks_into_containers(hint: Any, takes: bool) -> None:
    assert takes_text(hint) is takes


@pytest.mark.parametrize("key", ["config", "data", "trainer", "trainer.callbacks"])
@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("rows.csv", "rows are no configuration. Name a prompt set by data.train, data.validation or data.predict."),
        (
            "rows.parquet",
            "rows are no configuration. Name a prompt set by data.train, data.validation or data.predict.",
        ),
        ("text.yaml", "the file holds no keys. It needs lines such as 'name: value'."),
        ("bytes.yaml", "the file is not in UTF-8. Name a YAML file."),
    ],
)
def test_a_file_without_keys_is_no_configuration(
    project: Path, capsys: pytest.CaptureFixture[str], key: str, file: str, message: str
) -> None:
    (project / file).write_bytes({"text.yaml": b"hello", "bytes.yaml": b"\xff\xfe\x00"}.get(file, b"prompt\n1\n"))
    assert fit_here(capsys, "--config", "run.yaml", f"--{key}", file) == (2, f"error: --{key} {file}: {message}\n")


@pytest.mark.long
def test_prompt_sets_may_be_several_files_or_rows(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "more.jsonl").write_text((project / "rows.jsonl").read_text())
    (project / "sets.yaml").write_text(
        "data:\n  train: [rows.jsonl, more.jsonl]\n  max_prompt_tokens: null\n"
        "  validation: {inline: [{prompt: '1+1=', completion: '2'}], files: {path: [more.jsonl, rows.jsonl]}}\n"
    )
    options = ("--trainer.max_steps=-1", "--trainer.max_epochs=1", "--trainer.default_root_dir=run")
    assert fit_here(capsys, "--config", "run.yaml", "--config", "sets.yaml", *options)[0] == 0
    assert logged_steps(project / "run", "policy/loss") == [1, 2, 3, 4, 5, 6, 7, 8]  # of four prompts of 32
    for name in ("inline", "files"):
        assert logged_steps(project / "run", f"val/{name}/loss") == [0, 8]  # before the first step, after the epoch


@pytest.mark.long
def test_the_engine_may_be_listed_as_a_callback_instead(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = project / "run.yaml"
    text = path.read_text().replace("rollout:\n  temperature: 0.8\n", "")
    listed = "  callbacks: [{class_path: rlightning.callbacks.VLLMRollout, init_args: {temperature: 0.7}}]\n"
    path.write_text(text + listed)
    found: list[VLLMRollout] = []

    def note(self: VLLMRollout, trainer: Any, module: Any, stage: str) -> None:
        found.append(self)

    monkeypatch.setattr(VLLMRollout, "setup", note)
    assert fit_here(capsys, "--config", "run.yaml", "--trainer.max_steps", "1")[0] == 0
    assert [rollout.sampling.temperature for rollout in found] == [0.7]


def test_bare_name_finds_what_its_package_imports_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``AgentProgram`` and ``WorkerEnvironment`` of ``rlightning.environments`` in a new process."""
    package = tmp_path / "own_package"
    package.mkdir()
    exports = "def __getattr__(name):\n    from own_package.later import Later\n\n    return Later\n"
    (package / "__init__.py").write_text(f"__all__ = ['Later']\n\n\n{exports}")
    (package / "base.py").write_text("class Base: ...\n")
    (package / "later.py").write_text("from own_package.base import Base\n\n\nclass Later(Base): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    base = import_module("own_package.base").Base
    assert find_class("Later", [base], "environment") is import_module("own_package.later").Later
