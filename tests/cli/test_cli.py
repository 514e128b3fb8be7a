"""The command line as a user meets it: processes, files, exit codes."""

import json
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from cli_project import environment, fit, make_project, rlightning
from fork_server import START_BY_EXEC
from programs import logged_steps

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    make_project(folder)
    return folder


@dataclass(frozen=True)
class PlainRun:
    """A run without options but for its learning rate.

    Attributes:
        folder: its own, in which a test may go on.
        left: a copy, as the run has left it.
        shown: what it wrote to both streams.
    """

    folder: Path
    left: Path
    stderr: str
    shown: str


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> PlainRun:
    project = tmp_path_factory.mktemp("plain")
    make_project(project)
    done = fit(project, "--model.lr", "2e-3")
    [folder] = (project / "runs").iterdir()
    left = tmp_path_factory.mktemp("left") / folder.name
    shutil.copytree(folder, left, symlinks=True)
    return PlainRun(folder, left, done.stderr, done.stderr + done.stdout)


def test_a_run_leaves_its_configuration_metrics_and_checkpoints(plain_run: PlainRun) -> None:
    run = plain_run.left
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["init_args"]["lr"] == 2e-3
    assert config["trainer"]["default_root_dir"] == f"runs/{run.name}"
    assert config["seed_everything"] == 0
    assert len(logged_steps(run / "metrics" / "version_0")) == 3
    hyperparameters = yaml.safe_load((run / "metrics" / "version_0" / "hparams.yaml").read_text())
    assert hyperparameters["trainer"]["max_steps"] == 3
    last, kept = run / "checkpoints" / "last.ckpt", run / "checkpoints" / "epoch=0-step=3.ckpt"
    assert last.is_symlink() and last.resolve() == kept.resolve()  # nothing is written twice
    assert sorted(path.name for path in kept.parent.iterdir()) == sorted([kept.name, last.name])


def test_a_run_shows_nothing_but_itself(plain_run: PlainRun) -> None:
    for noise in ("Tip", "Warning", "warn", "litlogger", "Deprecat"):
        assert noise not in plain_run.shown


def test_start_of_a_run_is_one_block(plain_run: PlainRun) -> None:
    lines = plain_run.stderr.splitlines()
    rows = [line.split()[0] for line in lines if re.match(r"\w+ +\S", line)]
    assert [row for row in rows if row in ("model", "layout", "batch", "engine", "writes")] == [
        *("model", "layout", "batch", "writes")
    ]
    assert len(lines) < 20, plain_run.stderr
    for noise in ("GPU available", "Seed set to", "Trainable params", "stopped:", "checkpoint callback"):
        assert noise not in plain_run.shown


@pytest.mark.slow
def test_mistake_in_the_data_leaves_no_run_at_wandb(project: Path) -> None:
    logger = {"class_path": "WandbLogger", "init_args": {"save_dir": "unlogged", "offline": True}}
    options = ("--trainer.logger", json.dumps(logger), "--trainer.default_root_dir", "unlogged")
    (project / "unlogged").mkdir()
    done = fit(project, *options, "--data.prompt_column", "promt", exit_code=2)
    assert done.stderr.splitlines()[-1].startswith("error: 'rows.jsonl' has no column 'promt'")
    fit(project, "--trainer.default_root_dir", "mistaken", "--data.prompt_column", "promt", exit_code=2)
    assert not list((project / "mistaken").rglob("*"))  # of its own loggers neither
    (project / "scored.py").write_text("async def one(completion):\n    return 1.0\n")
    engine = ("--rollout.engine", '{"kv_cache_dtype": "nonsense", "kv_cache_memory_bytes": 268435456}')
    refused = ("--model", "GRPO", "--model.rewards", "[scored.one]", "--rollout.max_new_tokens", "4")
    done = fit(project, *options, *refused, *engine, exit_code=2)
    assert done.stderr.splitlines()[-1].startswith("error: vLLM refuses the engine's arguments")
    assert not (project / "unlogged" / "wandb").exists()


def test_a_folder_holds_one_run_unless_it_is_continued(plain_run: PlainRun) -> None:
    folder = plain_run.folder
    project = folder.parent.parent
    second = fit(project, "--trainer.default_root_dir", f"runs/{folder.name}", exit_code=2)
    assert "--ckpt_path last" in second.stderr.strip().splitlines()[-1]
    saved = ["fit", "--config", f"runs/{folder.name}/config.yaml"]
    continued = rlightning(project, *saved, "--ckpt_path", "last", "--trainer.max_steps", "5")
    assert continued.returncode == 0, continued.stderr
    assert yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["max_steps"] == 3
    assert yaml.safe_load((folder / "config-2.yaml").read_text())["trainer"]["max_steps"] == 5
    last = logged_steps(folder / "metrics/version_0")[-1]
    assert logged_steps(folder / "metrics/version_1") == [last + 1, last + 2]


@pytest.mark.slow
def test_a_listed_checkpoint_callback_saves_into_the_runs_folder(project: Path) -> None:
    folder = ("--trainer.default_root_dir", "listed")
    fit(project, *folder, "--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps", "2")
    assert [path.name for path in (project / "listed/checkpoints").iterdir()] == ["epoch=0-step=3.ckpt"]
    continued = fit(project, *folder, "--ckpt_path", "last", "--trainer.max_steps", "4")
    assert "ckpt_path=last is listed/checkpoints/epoch=0-step=3.ckpt, saved after step 3." in continued.stderr
    assert logged_steps(project / "listed/metrics/version_1") == [4]


def test_configs_and_overrides_merge_and_run_as_printed(project: Path) -> None:
    (project / "more.yaml").write_text("trainer: {max_steps: 7}\ndata: {shuffle: false}\nrollout: {top_p: 0.9}\n")
    shown = rlightning(
        project,
        *("fit", "--config", "run.yaml", "--config", "more.yaml", "--model.lr=0.5", "--rollout.temperature", "0.3"),
        *("--trainer.callbacks+=own_classes.Announce", "--trainer.callbacks.word", "bye"),
        *("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor", "policy/loss", "--print_config"),
        as_module=True,
    )
    assert shown.returncode == 0, shown.stderr
    config = yaml.safe_load(shown.stdout)
    assert config["trainer"]["max_steps"] == 7
    assert config["model"]["init_args"]["lr"] == 0.5
    assert config["data"]["init_args"]["train"] == "rows.jsonl"
    assert config["data"]["init_args"]["shuffle"] is False
    assert (config["rollout"]["init_args"]["temperature"], config["rollout"]["init_args"]["top_p"]) == (0.3, 0.9)
    first, second = config["trainer"]["callbacks"]
    assert (first["class_path"], first["init_args"]) == ("own_classes.Announce", {"word": "bye", "times": 1})
    assert second["init_args"]["monitor"] == "policy/loss"

    (project / "printed.yaml").write_text(shown.stdout)
    done = rlightning(project, "fit", "--config", "printed.yaml", "--trainer.default_root_dir", "printed")
    assert done.returncode == 0, done.stderr
    assert "bye" in done.stdout


@pytest.mark.parametrize("as_module", [False, True])
def test_a_mistake_is_one_line_and_exit_code_2(project: Path, as_module: bool) -> None:
    done = rlightning(project, "fit", "--config", "run.yaml", "--trainer.max_step", "3", as_module=as_module)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: trainer.max_step: there is no such key. Did you mean 'max_steps'?\n"


def test_file_that_hides_a_package_is_one_line(project: Path, tmp_path: Path) -> None:
    for name in ("vllm.py", "test.py"):
        (tmp_path / name).touch()
    (tmp_path / "run.yaml").write_text((project / "run.yaml").read_text())
    done = rlightning(tmp_path, "fit", "--config", "run.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"error: \./vllm\.py hides the module 'vllm' \(.*/vllm\), which a run imports\. Rename it\.\n", done.stderr
    )


def test_a_mistake_found_in_setup_is_one_line(project: Path) -> None:
    done = fit(project, "--model", "own_classes.WrongInSetup", exit_code=2)
    assert done.stderr.splitlines()[-1] == "error: width=3 cannot be halved. Use 4."
    assert "Traceback" not in done.stderr


def test_callback_listed_twice_is_one_line(project: Path) -> None:
    done = fit(project, *["--trainer.callbacks+=ModelCheckpoint"] * 2, exit_code=2)
    line = "error: trainer.callbacks lists ModelCheckpoint twice, to do the same work. Keep one of them."
    assert done.stderr.splitlines()[-1] == line
    assert "Traceback" not in done.stderr


def test_a_programming_error_keeps_its_traceback(project: Path) -> None:
    done = fit(project, "--model", "own_classes.Broken", exit_code=1)
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1] == "RuntimeError: not the user's mistake"


HELD_IMPORT = """\
import sys, time

class Hold:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print("amid the imports", flush=True)
            try:
                time.sleep(600)
            except KeyboardInterrupt:
                raise RuntimeError("as a library whose import is broken may raise") from None

sys.meta_path.insert(0, Hold())
"""
"""Python runs it, as its sitecustomize, before anything else."""


def test_ctrl_c_before_training_ends_with_130(project: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HELD_IMPORT)
    # With `python -m`, Python may end by the signal itself, which a shell shows as 130 too: it does where the signal
    # came within an `exec`, though `main` caught it, and imports are full of them (each dataclass has one).
    command = [str(Path(sys.executable).with_name("rlightning")), "fit", "--config", "run.yaml"]
    process = subprocess.Popen(
        command,
        cwd=project,
        env=environment() | {"PYTHONPATH": str(tmp_path), START_BY_EXEC: "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "amid the imports\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert errors == "interrupted\n"


def test_help_and_version_answer_before_anything_heavy_is_imported(project: Path) -> None:
    code = "import sys; from rlightning.__main__ import main; main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=project, stdout=subprocess.PIPE).returncode == 0
    shown = rlightning(project, "--help")
    assert shown.returncode == 0
    assert all(command in shown.stdout for command in ("fit", "validate", "test", "predict"))
    assert rlightning(project, "--version").stdout == "rlightning 0.1.0\n"
    wrong = rlightning(project, "fitt")
    assert (wrong.returncode, wrong.stderr) == (
        2,
        "error: 'fitt' is not a command of rlightning. Did you mean 'fit'?\n",
    )


def test_help_of_a_command_names_its_keys(project: Path) -> None:
    shown = rlightning(project, "fit", "--help")
    assert shown.returncode == 0
    assert "--trainer.max_steps" in shown.stdout
    of_class = rlightning(project, "fit", "--model.help", "GRPO")
    assert "--model.clip_high" in of_class.stdout


@pytest.mark.slow
def test_two_processes_share_one_run_folder(project: Path) -> None:
    earlier = set(project.glob("runs/*"))
    short = ("--trainer.max_steps", "1", "--trainer.enable_checkpointing", "false")
    fit(project, "--trainer.devices", "2", "--trainer.strategy", "ddp", *short)
    [folder] = set(project.glob("runs/*")) - earlier
    assert len(list(folder.glob("config*.yaml"))) == 1
    assert [path.name for path in (folder / "metrics").iterdir()] == ["version_0"]


def test_validate_measures_without_training(project: Path) -> None:
    options = ["--data.validation", "rows.jsonl", "--trainer.default_root_dir", "measured"]
    done = rlightning(project, "validate", "--config", "run.yaml", *options)
    assert done.returncode == 0, done.stderr
    assert "val/rows/loss" in done.stdout
    assert not (project / "measured/checkpoints").exists()


def test_the_last_checkpoint_is_the_one_that_is_measured(project: Path) -> None:
    options = ["--data.validation", "rows.jsonl", "--trainer.default_root_dir", "trained"]
    fitted = fit(project, "--trainer.val_check_interval", "3", *options)
    losses = re.findall(r"validation at step (\d) \| rows \| loss ([\d.]+)", fitted.stderr + fitted.stdout)
    assert [step for step, _ in losses] == ["0", "3"]
    assert losses[0][1] != losses[1][1]
    done = rlightning(project, "test", "--config", "run.yaml", *options, "--ckpt_path", "last")
    assert done.returncode == 0, done.stderr
    [measured] = re.findall(r"test/rows/loss\W+([\d.]+)", done.stdout)
    assert f"{float(measured):.3f}" == losses[1][1]


@pytest.mark.slow
def test_predict_writes_completions_of_the_real_engine(project: Path) -> None:
    done = rlightning(
        project,
        *("predict", "--config", "run.yaml", "--model", "GRPO", "--model.samples_per_prompt", "2"),
        *("--data.predict", "rows.jsonl", "--output", "out.jsonl", "--rollout.max_new_tokens", "4"),
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (project / "out.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [f"{a}+1=" for a in range(16)]
    assert {len(row["completions"]) for row in rows} == {2}


@pytest.mark.slow
def test_three_loggers_and_a_callback_by_its_bare_name(project: Path) -> None:
    loggers = {
        "CSVLogger": {"save_dir": "runs/logged", "name": "csv"},
        "TensorBoardLogger": {"save_dir": "runs/logged", "name": "tensorboard"},
        "WandbLogger": {"save_dir": "runs/logged", "offline": True},
    }
    config = {"trainer": {"logger": [{"class_path": name, "init_args": args} for name, args in loggers.items()]}}
    (project / "loggers.yaml").write_text(yaml.safe_dump(config))
    options = ("--config", "loggers.yaml", "--trainer.callbacks+=SaveHF")
    fit(project, *options, "--trainer.default_root_dir", "runs/logged")
    folder = project / "runs" / "logged"
    assert logged_steps(folder / "csv" / "version_0") == [1, 2, 3]
    assert list((folder / "tensorboard" / "version_0").glob("events.out.tfevents.*"))
    assert list((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    assert (folder / "hf" / "model.safetensors").is_file()
