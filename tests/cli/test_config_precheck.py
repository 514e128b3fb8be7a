"""A misspelled key is found before torch is imported, in the words of the whole parser."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_project import environment, make_project

import rlightning.algorithms
from rlightning.argument_checks import parameters_of
from rlightning.callbacks import VLLMRollout
from rlightning.cli.config_precheck import SourceKeys, check_early, keys_of
from rlightning.cli.lightning_cli import RLCLI
from rlightning.cli.source_parameters import parameters_of_source
from rlightning.data import PromptDataModule
from rlightning.errors import ConfigError
from rlightning.module import RLModule
from rlightning.module.policy_module import PolicyModule

CLASSES = [
    *(getattr(rlightning.algorithms, name) for name in rlightning.algorithms.__all__),
    *(RLModule, PolicyModule, PromptDataModule, VLLMRollout),
]
FILES = {
    "section.yaml": "modell: {class_path: rlightning.algorithms.SFT}\n",
    "trainer.yaml": "trainer: {max_stepz: 3}\n",
    "dotted.yaml": "trainer.max_stepz: 3\n",
    "model.yaml": "model: {class_path: rlightning.algorithms.GRPO, init_args: {clip_hihg: 0.2}}\n",
    "beside.yaml": "model: {class_path: rlightning.algorithms.GRPO, lr: 0.1}\n",
    "data.yaml": "data: {trian: rows.jsonl}\n",
    "rollout.yaml": "rollout: {class_path: VLLMRollout, init_args: {temprature: 1}}\n",
    "twice.yaml": "trainer.max_steps: 3\ntrainer: {max_steps: 4}\n",
    "same.yaml": "trainer:\n  max_steps: 3\n  max_steps: 4\n",
    "broken.yaml": "trainer: [\n",
    "empty.yaml": "",
}
MISTAKES = {
    "--config section.yaml": "modell: there is no such key. Did you mean 'model'?",
    "--config trainer.yaml": "trainer.max_stepz: there is no such key. Did you mean 'max_steps'?",
    "--config dotted.yaml": "trainer.max_stepz: there is no such key. Did you mean 'max_steps'?",
    "--config model.yaml": "model.init_args.clip_hihg: there is no such key. Did you mean 'clip_high'?",
    "--config beside.yaml": "model.lr: beside class_path, keys stand under init_args. Move it there.",
    "--config data.yaml": "data.trian: there is no such key. Did you mean 'train'?",
    "--config rollout.yaml": "rollout.init_args.temprature: there is no such key. Did you mean 'temperature'?",
    "--config twice.yaml": "trainer.max_steps: the file sets this key twice. Remove one of them.",
    "--config same.yaml": "same.yaml, line 3: not valid YAML",
    "--config broken.yaml": "broken.yaml, line 2: not valid YAML",
    "--config empty.yaml": "--config empty.yaml: the file holds no keys.",
    "--config run.yml": "--config run.yml: there is no such file. Did you mean 'run.yaml'?",
    "--trainr.max_steps=3": "trainr: there is no such key. Did you mean 'trainer'?",
    "--ckpt_pth=last": "ckpt_pth: there is no such key. Did you mean 'ckpt_path'?",
    "--config run.yaml --model.lrr=1": "model.lrr: there is no such key. Did you mean 'lr'?",
    "--config run.yaml --model.clip_high=0.2": "model.clip_high: there is no such key. Choose from: ",
    "--config run.yaml --model GRPO --model.clip_l 1": "model.clip_l: there is no such key. Did you mean 'clip_low'?",
    "--config run.yaml --model.lr": "--model.lr: its value is missing. Write --model.lr VALUE.",
    "run.yaml": "'run.yaml' follows no option",
    "--trainer.strategy fsdp2 --trainer.devicez 2": "trainer.devicez: there is no such key. Did you mean 'devices'?",
    "--trainer.max_steps 3": "model.class_path: no algorithm is named.",
}
"""Options of ``fit``, and how the one line begins that they end with."""

ALL_WITHOUT_TORCH = """\
import contextlib, io, json, sys
from rlightning.__main__ import main
lines = []
for options in json.loads(sys.argv[1]):
    for command in (["fit"], ["plan", "--device-memory", "H100"], ["serve", "--port", "0"]):
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            code = main([*command, *options])
        lines.append([code, errors.getvalue(), "torch" in sys.modules])
print(json.dumps(lines))
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_project(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_parameters_of_source_are_those_of_the_class(kind: Any) -> None:
    assert parameters_of_source(f"{kind.__module__}.{kind.__name__}") == list(parameters_of(kind))


def test_parameters_of_source_of_another_library_needs_its_file() -> None:
    with pytest.raises(LookupError, match=r"there is no source of 'lightning\.gone'"):
        parameters_of_source("lightning.gone.Trainer")
    with pytest.raises(LookupError, match=r"no class 'Gone' in the source of 'rlightning\.errors'"):
        parameters_of_source("rlightning.errors.Gone")


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_keys_of_a_command_are_the_parsers(command: str) -> None:
    found: dict[str, Any] = {}

    class Parser(RLCLI):
        def parse_arguments(self, parser: Any, args: Any) -> None:
            found.update(parameters_of(self._subcommand_parsers[command]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Parser([command])
    keys = keys_of(command)
    assert keys.keys() == found.keys()
    assert keys["trainer"].keys() == found["trainer"].keys()


@pytest.mark.long
def test_precheck_and_parser_refuse_in_the_same_words(files: Path) -> None:
    for written, message in MISTAKES.items():
        options = shlex.split(written)
        with pytest.raises(ConfigError) as early:
            check_early("fit", options)
        with pytest.raises(ConfigError) as late:
            RLCLI(["fit", *options])
        assert str(early.value) == str(late.value)
        assert str(early.value).startswith(message)


@pytest.mark.processes
def test_a_mistake_is_answered_without_torch(files: Path) -> None:
    listed = json.dumps([shlex.split(written) for written in MISTAKES])
    done = subprocess.run(
        [sys.executable, "-c", ALL_WITHOUT_TORCH, listed],
        cwd=files,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    expected = [message for message in MISTAKES.values() for _ in range(3)]
    for (code, line, has_torch), message in zip(json.loads(done.stdout), expected, strict=True):
        assert (code, line.count("\n"), has_torch) == (2, 1, False)
        assert line.startswith(f"error: {message}")


@pytest.mark.parametrize(
    "options",
    [
        "--config run.yaml",
        "--model own_classes.Quick --model.lrr 1",
        "--model GRP0 --model.lrr 1",
        "--model run.yaml --model.lrr 1",
        "--model rlightning.errors.ConfigError --model.lrr 1",
        "--config run.yaml --trainer.callbacks+=EarlyStopping --trainer.callbacks.monitr loss",
        "--config run.yaml --data.train.sets 3 --rollout null",
        "--trainr.max_steps 3 --help",
    ],
)
def test_precheck_passes_what_it_cannot_judge(files: Path, options: str) -> None:
    check_early("fit", shlex.split(options))


def test_source_keys_take_bare_names_of_the_sections_package(files: Path) -> None:
    keys = SourceKeys(keys_of("fit"), {})
    keys.check_options(["--model=GRPO", "--rollout=VLLMRollout", "--data=GRPO"])
    assert keys.classes == {
        "model": "rlightning.algorithms.GRPO",
        "rollout": "rlightning.callbacks.VLLMRollout",
        "data": None,
    }
