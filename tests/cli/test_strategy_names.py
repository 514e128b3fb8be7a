"""The spellings of ``trainer.strategy``: in files and options, alone and with arguments."""

from pathlib import Path
from typing import Any

import pytest
from cli_project import fit_here, resolve_config

from rlightning.cli.option_texts import spell_out_options
from rlightning.errors import ConfigError
from rlightning.parallel.strategy_names import KEY, OLD_PACKAGE, check_strategy, spell_out

FSDP, DDP = "rlightning.parallel.fsdp.FSDP", "rlightning.parallel.strategy.DDP"


def resolved(capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    """Return ``trainer.strategy`` of the resolved configuration."""
    return resolve_config(capsys, *options)["trainer"]["strategy"]


def with_strategy(project: Path, text: str) -> None:
    """Append to the configuration's last section, which is the trainer's."""
    with (project / "run.yaml").open("a") as file:
        file.write(f"  strategy: {text}\n")


SPELLINGS = [
    ("fsdp2", FSDP),
    ("FSDP", FSDP),
    ("rlightning.parallel.FSDP", FSDP),
    (FSDP, FSDP),
    ("ddp", DDP),
    ("DDP", DDP),
    ("rlightning.parallel.DDP", DDP),
]


@pytest.mark.parametrize(("spelling", "path"), SPELLINGS)
def test_spelling_is_replaced_by_its_class(spelling: str, path: str) -> None:
    assert spell_out({"trainer": {"strategy": spelling}}) == {"trainer": {"strategy": {"class_path": path}}}
    assert spell_out_options([f"--trainer.strategy.class_path={spelling}"]) == [f"--trainer.strategy.class_path={path}"]


def test_value_like_a_key_is_no_option() -> None:
    options = ["--data.prompt_column", "trainer", "--model.lr", "1", "--trainer.strategy"]
    assert spell_out_options(options) == options


@pytest.mark.processes
@pytest.mark.parametrize(("spelling", "path"), [SPELLINGS[0], SPELLINGS[-1]])
def test_a_strategy_by_each_of_its_names(
    project: Path, capsys: pytest.CaptureFixture[str], spelling: str, path: str
) -> None:
    alone = resolved(capsys, "--trainer.strategy", spelling)
    assert alone["class_path"] == path
    assert alone["init_args"]["barrier_timeout"] == 1800.0
    for options in (
        ("--trainer.strategy", spelling),
        (f"--trainer.strategy={spelling}",),
        ("--trainer.strategy.class_path", spelling),
    ):
        extended = resolved(capsys, *options, "--trainer.strategy.barrier_timeout", "20")
        assert extended["class_path"] == path
        assert extended["init_args"]["barrier_timeout"] == 20.0
    with_strategy(project, spelling)
    extended = resolved(capsys, "--trainer.strategy.init_args.barrier_timeout", "20")
    assert (extended["class_path"], extended["init_args"]["barrier_timeout"]) == (path, 20.0)


@pytest.mark.long
@pytest.mark.processes
def test_later_files_and_options_win(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_strategy(project, "{class_path: fsdp2, init_args: {tensor_parallel_size: 2, barrier_timeout: 20}}")
    kept = resolved(capsys, "--trainer.strategy", "FSDP", "--trainer.strategy.barrier_timeout", "30")
    assert (kept["init_args"]["tensor_parallel_size"], kept["init_args"]["barrier_timeout"]) == (2, 30.0)
    (project / "other.yaml").write_text("trainer.strategy: ddp\n")
    other = resolved(capsys, "--config", "other.yaml", "--trainer.strategy.find_unused_parameters", "true")
    assert other["class_path"] == DDP
    assert other["init_args"]["barrier_timeout"] == 20.0  # of what both classes take
    assert resolved(capsys, "--trainer.strategy", "auto") == "auto"


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--trainer.strategy=fsdp",
            "trainer.strategy=fsdp is Lightning's FSDP1, which does not work here. Use fsdp2",
        ),
        (
            "--trainer.strategy=zero",
            "trainer.strategy: there is no strategy 'zero'. Choose from: auto, ddp, fsdp2, ray.",
        ),
        (
            "--trainer.strategy.tensor_parallel_size=2",
            "trainer.strategy: these keys are of no class yet. Name it before",
        ),
        (
            f"--trainer.strategy={OLD_PACKAGE}.FSDP",
            f"trainer.strategy: {OLD_PACKAGE}.FSDP is now rlightning.parallel.FSDP.",
        ),
        (
            f"--trainer.strategy.class_path={OLD_PACKAGE}.RayController",
            f"trainer.strategy.class_path: {OLD_PACKAGE}.RayController is now rlightning.controller.RayController.",
        ),
        (
            "--trainer.strategy=fsdp2 --trainer.strategy.tensor_paralel_size=2",
            "trainer.strategy.tensor_paralel_size: there is no such key. Did you mean 'tensor_parallel_size'?",
        ),
        (
            "--trainer.strategy=fsdp2 --trainer.strategy.cpu_offload=optimiser",
            "trainer.strategy.cpu_offload: expected Literal['none', 'optimizer', 'parameters'], got 'optimiser'",
        ),
        (
            "--trainer.strategy=fsdp2 --trainer.devices=2 --trainer.strategy.tensor_parallel_size=3",
            "tensor_parallel_size=3 does not divide 2 ranks",
        ),
        (
            "--trainer.callbacks+=ControllerMode --trainer.callbacks.mode=controller --trainer.devices=2",
            "execution mode 'controller' is for one process, but trainer.devices and trainer.num_nodes are for 2.",
        ),
    ],
)
def test_wrong_strategy_is_one_line(
    project: Path, capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    code, errors = fit_here(capsys, "--config", "run.yaml", *options.split())
    assert code == 2
    assert errors.splitlines()[-1].startswith(f"error: {message}")
    assert "http" not in errors


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ((), "trainer.devices=1 x trainer.num_nodes=1 is 1 rank, but torchrun started 2. Set trainer.devices=2, or"),
        (
            ("--trainer.devices", "4"),
            "trainer.devices=4 x trainer.num_nodes=1 are 4 ranks, but torchrun started 2. Set trainer.devices=2, or "
            "--nproc-per-node 4.",
        ),
    ],
)
@pytest.mark.long
def test_torchrun_with_another_number_of_processes(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    devices: tuple[str, ...],
    message: str,
) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    code, errors = fit_here(capsys, "--config", "run.yaml", "--trainer.default_root_dir", "run", *devices)
    assert code == 2 and errors.splitlines()[-1].startswith(f"error: {message}")


@pytest.mark.parametrize("name", ["deepspeed_stage_2", "xla", "fsdp", "single_device"])
def test_lightnings_other_strategies_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{KEY}={name} is Lightning's .*, which does not work here. Use fsdp2"):
        check_strategy(name)


@pytest.mark.parametrize("name", ["auto", "ddp", "fsdp2", "ray", "ddp_find_unused_parameters_true"])
def test_right_strategies_pass_the_check(name: str) -> None:
    check_strategy(name)


@pytest.mark.parametrize("name", ["ddp_spawn", "ddp_spawn_find_unused_parameters_true"])
def test_spawned_ranks_are_refused(name: str) -> None:
    message = f"{KEY}={name} would train copies of the module in processes of its own.*Use strategy='ddp'"
    with pytest.raises(ConfigError, match=message):
        check_strategy(name)
