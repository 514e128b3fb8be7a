"""A wrong key or value is found before torch is imported, in the words of the whole parser."""

import json
import shlex
import subprocess
import sys
from argparse import ArgumentError
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from cli_project import environment, make_project
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry

import rlightning.algorithms
from rlightning.callbacks import VLLMRollout
from rlightning.cli.config_keys import parse_value
from rlightning.cli.config_precheck import (
    BASES,
    Given,
    SourceKeys,
    check_by_parser,
    check_early,
    check_strategy_name,
    keys_of,
)
from rlightning.cli.lightning_cli import RLCLI, RLArgumentParser
from rlightning.cli.named_classes import subclasses
from rlightning.cli.parser_messages import summarise
from rlightning.cli.source_parameters import parameters_of_source, subclass_names
from rlightning.config.argument_checks import parameters_of
from rlightning.config.files import use_strict_yaml
from rlightning.data import PromptDataModule
from rlightning.errors import ConfigError, find_run_error
from rlightning.module import RLModule
from rlightning.module.policy_module import PolicyModule

CLASSES = [
    *(getattr(rlightning.algorithms, name) for name in rlightning.algorithms.__all__),
    *(RLModule, PolicyModule, PromptDataModule, VLLMRollout),
]
VALUES = ["", "x", "auto", "null", "nan", "1", "1.0", "1e-5", "1e3", ".inf", "010", "1_000", "true", "yes", '"3"']
VALUES += ["[]", "[1, 2]", "[1, x]", "[a]", "{}", "{a: 1}", "{a: b}", "bf16", "1:30", "${LR}", "- 1", "!!int 3", " 3 "]
FILES = {
    "section.yaml": "modell: {class_path: rlightning.algorithms.SFT}\n",
    "trainer.yaml": "trainer: {max_stepz: 3}\n",
    "dotted.yaml": "trainer.max_stepz: 3\n",
    "model.yaml": "model: {class_path: rlightning.algorithms.GRPO, init_args: {clip_hihg: 0.2}}\n",
    "beside.yaml": "model: {class_path: rlightning.algorithms.GRPO, lr: 0.1}\n",
    "data.yaml": "data: {trian: rows.jsonl}\n",
    "rollout.yaml": "rollout: {class_path: VLLMRollout, init_args: {temprature: 1}}\n",
    "sibling.yaml": "rollout: {class_path: TransformersRollout, init_args: {engine: {max_num_seqs: 4}}}\n",
    "twice.yaml": "trainer.max_steps: 3\ntrainer: {max_steps: 4}\n",
    "same.yaml": "trainer:\n  max_steps: 3\n  max_steps: 4\n",
    "broken.yaml": "trainer: [\n",
    "empty.yaml": "",
    "value.yaml": "model: {class_path: rlightning.algorithms.GRPO, init_args: {model: x, lr: fast}}\n",
    "steps.yaml": "trainer: {max_steps: many}\n",
    "tokens.yaml": "rollout: {max_new_tokens: 1.5}\n",
    "stop.yaml": "rollout: {class_path: VLLMRollout, init_args: {stop: [a, 3]}}\n",
    "class.yaml": "model: {class_path: rlightning.algorithms.GRPPO, init_args: {model: x}}\n",
    "callback.yaml": "trainer: {callbacks: [{class_path: rlightning.callbacks.SafeHF}]}\n",
    "rewards.yaml": "model: {class_path: GRPO, init_args: {model: model, rewards: [{function: "
    "{class_path: rlightning.rewards.judge.Juge}}]}}\n",
}
MISTAKES = {
    "--config section.yaml": "modell: there is no such key. Did you mean 'model'?",
    "--config trainer.yaml": "trainer.max_stepz: there is no such key. Did you mean 'max_steps'?",
    "--config dotted.yaml": "trainer.max_stepz: there is no such key. Did you mean 'max_steps'?",
    "--config model.yaml": "model.init_args.clip_hihg: there is no such key. Did you mean 'clip_high'?",
    "--config beside.yaml": "model.lr: beside class_path, keys stand under init_args. Move it there.",
    "--config data.yaml": "data.trian: there is no such key. Did you mean 'train'?",
    "--config sibling.yaml": "rollout.init_args.engine: TransformersRollout has no such key; VLLMRollout has. ",
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
    "--config value.yaml": "model.lr: expected float, got 'fast'",
    "--config run.yaml --config steps.yaml": "trainer.max_steps: expected int, got 'many'",
    "--config run.yaml --config tokens.yaml": "rollout.max_new_tokens: expected int, got '1.5'",
    "--config run.yaml --config stop.yaml": "rollout.stop: expected str, got '3'",
    "--config run.yaml --model.lr=fast": "model.lr: expected float, got 'fast'",
    "--config run.yaml --model.lr=null": "model.lr: null is no value for it.",
    "--config run.yaml --model.prompts_per_step 4.0": "model.prompts_per_step: expected int, got '4.0'. Write 4.",
    "--config run.yaml --model.gradient_checkpointing atuo": "model.gradient_checkpointing: expected bool or 'auto', "
    "got 'atuo'. Did you mean 'auto'?",
    "--config run.yaml --trainer.precision bf17": "trainer.precision: expected int or 'transformer-engine' or ",
    "--config run.yaml --seed_everything many": "seed_everything: expected bool or int, got 'many'",
    "--config class.yaml": "model.class_path: there is no 'GRPPO' in 'rlightning.algorithms'. Did you mean",
    "--config run.yaml --model GRPPO": "model: there is no class 'GRPPO'. Did you mean 'GRPO'?",
    "--config run.yaml --model rlightnin.algorithms.GRPO": "model: there is no module 'rlightnin'. Did you mean",
    "--config run.yaml --model rlightning.algorithm.GRPO": "model: there is no module 'rlightning.algorithm'. Did you",
    "--config run.yaml --data GRPO": "data: there is no class 'GRPO'. Give the dotted path of a class",
    "--config run.yaml --rollout VLMRollout": "rollout: there is no class 'VLMRollout'. Did you mean 'VLLMRollout'?",
    "--config run.yaml --environment SingelTurn": "environment: there is no class 'SingelTurn'. Did you mean",
    "--config run.yaml --trainer.callbacks+=SavHF": "trainer.callbacks: there is no class 'SavHF'. Did you mean",
    "--config run.yaml --config callback.yaml": "trainer.callbacks[0].class_path: there is no 'SafeHF' in "
    "'rlightning.callbacks'. Did you mean 'rlightning.callbacks.SaveHF'?",
    "--config run.yaml --trainer.strategy fdsp2": "trainer.strategy: there is no strategy 'fdsp2'. Did you mean",
    "--config run.yaml --trainer.strategy rlightning.parallel.FSDP3": "trainer.strategy.class_path: there is no 'FSD",
    "--config run.yaml --config rewards.yaml": "model.init_args.rewards[0].function.class_path: there is no 'Juge' in "
    "'rlightning.rewards.judge'. Did you mean 'rlightning.rewards.judge.Judge'?",
    "--model GRPO --model.model model --model.rewards rlightning.rewards.exact_matc": "The reward "
    "'rlightning.rewards.exact_matc': 'rlightning.rewards' has no class or function 'exact_matc'. Did you mean "
    "'exact_match'?",
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
    found, real = parameters_of_source(kind_path(kind)), parameters_of(kind)
    assert list(found) == list(real)
    assert {name: hint for name, hint in found.items() if hint is not None}.items() <= real.items()
    assert sum(hint is None for hint in found.values()) <= 6  # those of classes, and of any object


def test_parameters_of_source_of_another_library_needs_its_file() -> None:
    with pytest.raises(LookupError, match=r"there is no source of 'lightning\.gone'"):
        parameters_of_source("lightning.gone.Trainer")
    with pytest.raises(LookupError, match=r"no class 'Gone' in the source of 'rlightning\.errors'"):
        parameters_of_source("rlightning.errors.Gone")


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
@pytest.mark.long
def test_keys_of_a_command_are_the_parsers(command: str) -> None:
    found: dict[str, Any] = {}

    class Parser(RLCLI):
        def parse_arguments(self, parser: Any, args: Any) -> None:
            found.update(parameters_of(self._subcommand_parsers[command]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Parser([command])
    keys: dict[str, Any] = keys_of(command)
    for given, real in ((keys, found), (keys["trainer"], found["trainer"])):
        assert given.keys() == real.keys()
        hints = {name: hint for name, hint in given.items() if hint is not None and name != "trainer"}
        assert hints.items() <= real.items()
    assert keys["trainer"]["max_steps"] is int and keys["seed_everything"] == bool | int


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "is_option"),
    [
        *((kind, True) for kind in (rlightning.algorithms.DAPO, PromptDataModule, VLLMRollout, Trainer)),
        *((kind, False) for kind in (PromptDataModule, VLLMRollout)),
        *(pytest.param(kind, False, marks=pytest.mark.slow) for kind in (rlightning.algorithms.DAPO, Trainer)),
    ],
)
def test_values_are_refused_where_the_parser_refuses_them(kind: Any, is_option: bool) -> None:
    found = parameters_of_source(kind_path(kind))
    names = {repr(hint): name for name, hint in found.items() if hint is not None}.values()  # one for each type
    use_strict_yaml()
    parser = RLArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, fail_untyped=False, sub_configs=True, skip=found.keys() - names)
    num_refused = 0
    for name in names:
        for text in VALUES:
            value = text if is_option else parse_value(text)
            early = refusal(check_by_parser, name, Given(value, found[name], is_option))
            late = refusal(parse, name, value, parser, is_option)
            assert early == late, (name, value)
            num_refused += early is not None
    assert num_refused > 3 * len(names)


def parse(name: str, value: object, parser: RLArgumentParser, is_option: bool) -> None:
    """Have the parser of a whole class read one value."""
    try:
        if is_option:
            parser.parse_args([f"--{name}={value}"], _skip_validation=True)
        else:
            parser.parse_object({name: value}, _skip_validation=True)
    except ArgumentError as error:
        raise ConfigError(summarise(str(error), None)) from error


def refusal(check: Callable[..., None], *args: object) -> str | None:
    """Return the error of a check."""
    try:
        check(*args)
    except ConfigError as error:
        return str(error)
    return None


def kind_path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[2].glob("configs/*.yaml")), ids=lambda path: path.stem)
def test_shipped_files_are_accepted(path: Path) -> None:
    check_early("fit", ["--config", str(path)])


@pytest.mark.long
def test_precheck_and_parser_refuse_in_the_same_words(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for written, message in MISTAKES.items():
        options = shlex.split(written)
        with pytest.raises(ConfigError) as early:
            check_early("fit", options)
        capsys.readouterr()
        with pytest.raises((ValueError, SystemExit)) as late:
            RLCLI(["fit", *options])
        error = find_run_error(late.value)
        line = str(error) if error else capsys.readouterr().err
        assert str(early.value) == line.removeprefix("error: ").rstrip("\n")
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
        "--trainer.callbacks+=own_classes.Announce --model Quick --model.lrr 1",
        "--model GroupModule --model.lrr 1",
        "--config run.yaml --trainer.callbacks+=rlightning.callbacks.RolloutCallback --trainer.callbacks+=PhaseTimer",
        "--config run.yaml --trainer.strategy fdsp2 --trainer.strategy ddp_spawn",
        "--config run.yaml --environment.easy SingelTurn --trainer.profiler simple --trainer.logger false",
        "--model run.yaml --model.lrr 1",
        "--model rlightning.errors.ConfigError --model.lrr 1",
        "--config run.yaml --trainer.callbacks+=EarlyStopping --trainer.callbacks.monitr loss",
        "--config run.yaml --data.train.sets 3 --rollout null",
        "--config run.yaml --model.lr run.yaml --rollout.stop_token_ids+=x --data.prompt_column 3",
        "--config value.yaml --model SFT",
        "--config value.yaml --model run.yaml",
        "--config value.yaml --model.lr 1e-5",
        "--trainr.max_steps 3 --help",
    ],
)
def test_precheck_passes_what_it_cannot_judge(files: Path, options: str) -> None:
    check_early("fit", shlex.split(options))


def test_source_keys_take_bare_names_of_the_sections_package(files: Path) -> None:
    keys = SourceKeys(keys_of("fit"), {})
    keys.check_options(["--model=GRPO", "--rollout=VLLMRollout", "--data=own_classes.Rows"])
    assert keys.classes == {
        "model": "rlightning.algorithms.GRPO",
        "rollout": "rlightning.callbacks.VLLMRollout",
        "data": None,
    }


@pytest.mark.parametrize("key", BASES)
def test_subclass_names_hold_all_imported_classes(key: str) -> None:
    """Of the package's and Lightning's: none of them is refused by its bare name."""
    base = resolve_name(BASES[key])
    imported = {kind.__name__ for kind in subclasses(base) if kind.__module__.startswith(("rlightning.", "lightning."))}
    assert imported <= subclass_names(base.__name__)


@pytest.mark.parametrize("name", [*StrategyRegistry, "auto", "fsdp2", "own.Strategy"])
def test_strategies_of_lightnings_registry_pass(name: str) -> None:
    check_strategy_name(name)


def test_class_defined_in_this_process_may_be_named_bare() -> None:
    class OwnAlgorithm(RLModule):
        pass

    check_early("fit", ["--model", "OwnAlgorithm"])
    del OwnAlgorithm
