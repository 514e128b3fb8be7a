"""Reward functions whose files are edited while a run goes on."""

import logging
import sys
from pathlib import Path

import pytest
import tiny
from test_runner import MakeRunner, make_runner, score, values  # noqa: F401 (a fixture)

from rlightning.algorithms import GRPO
from rlightning.errors import RewardError
from rlightning.rewards.sources import KeptSources
from rlightning.run_settings import describe_changes

FILES = {
    "edited_rewards/__init__.py": "",
    "edited_rewards/grade.py": (
        "import os\n"
        "from edited_helper import SCALE\n"
        "from . import tables\n"
        "def grade(completion):\n"
        "    import edited_late\n"
        "    if completion == 'die':\n"
        "        os._exit(1)\n"
        "    if completion == 'raise':\n"
        "        raise ValueError('first version')\n"
        "    return SCALE * tables.WEIGHT * edited_late.FACTOR\n"
        "def process_id(completion):\n"
        "    return os.getpid()\n"
    ),
    "edited_rewards/tables.py": "WEIGHT = 2.0\n",
    "edited_helper.py": "SCALE = 3.0\n",
    "edited_late.py": "FACTOR = 5.0\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a package with a reward, and of two modules that it imports: one of them when it is called."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in [name for name in sys.modules if name.startswith("edited_")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def edit(folder: Path) -> None:
    """Make each file say something else."""
    (folder / "edited_rewards" / "grade.py").write_text("\n\ndef grade(completion):\n    return 1e4\n")
    for name, text in {"edited_rewards/tables.py": "WEIGHT", "edited_helper.py": "SCALE"}.items():
        (folder / name).write_text(f"{text} = 1e3\n")
    (folder / "edited_late.py").unlink()


@pytest.mark.processes
def test_workers_run_the_source_of_the_runs_beginning(
    folder: Path,
    make_runner: MakeRunner,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = make_runner("edited_rewards.grade.grade", "edited_rewards.grade.process_id", num_workers=1)
    first = score(runner, ["", ""]).components
    edit(folder)
    with caplog.at_level(logging.WARNING):
        died = score(runner, ["", "die", "", ""]).components
        again = score(runner, ["die", ""]).components
    assert values(first["grade"]) == [30.0, 30.0]  # 3 x 2 x 5
    assert values(died["grade"]) == [30.0, None, 30.0, 30.0]
    assert values(again["grade"]) == [None, 30.0]
    assert len({*first["process_id"].tolist(), *again["process_id"].tolist()}) > 1, "others have taken over"
    said = [record.getMessage() for record in caplog.records if "has changed" in record.getMessage()]
    assert len(said) == 3, "each file once"
    assert said[0] == (
        f"{folder}/edited_rewards/grade.py has changed since the run began. This run goes on with the rewards that it "
        "began with; start another for the new ones."
    )


@pytest.mark.processes
def test_traceback_shows_the_source_that_ran(folder: Path, make_runner: MakeRunner) -> None:  # noqa: F811
    runner = make_runner("edited_rewards.grade.grade", max_failed_share=0.0)
    edit(folder)
    with pytest.raises(RewardError, match=r"(?s)    raise ValueError\('first version'\)\nValueError: first version$"):
        score(runner, ["raise"])


@pytest.mark.processes
def test_runs_write_no_bytecode_of_what_they_keep(folder: Path, make_runner: MakeRunner) -> None:  # noqa: F811
    runner = make_runner("edited_rewards.grade.grade")
    for path in folder.rglob("*.pyc"):
        path.unlink()
    score(runner, [""])
    assert not list(folder.rglob("*.pyc"))


def test_sources_are_the_users_own_modules_and_their_imports(folder: Path) -> None:
    sources = KeptSources(["edited_rewards.grade"])
    own = ["edited_helper", "edited_late", "edited_rewards", "edited_rewards.grade", "edited_rewards.tables"]
    assert sorted(sources.modules) == own
    assert KeptSources(["rlightning.rewards.functions", "numpy", "json", "builtins", "no_such_module"]).modules == {}
    assert "edited_late" not in sys.modules, "nothing is imported for it"


def test_digest_differs_where_any_source_does(folder: Path) -> None:
    first = KeptSources(["edited_rewards.grade"]).digest
    assert len(first) == 64 and KeptSources(["edited_rewards.grade"]).digest == first
    (folder / "edited_late.py").write_text("FACTOR = 6.0\n")
    assert KeptSources(["edited_rewards.grade"]).digest != first
    assert KeptSources([]).digest == ""


def test_resumed_run_says_that_rewards_are_others(folder: Path) -> None:
    def make_settings() -> dict[str, object]:
        module = GRPO(model, rewards=["edited_rewards.grade.grade"])
        module.trainer = tiny.bare_trainer(folder, 1)
        return module.settings

    model = tiny.save_model(folder / "model")
    first = make_settings()
    assert describe_changes(first, make_settings()) is None
    (folder / "edited_helper.py").write_text("SCALE = 4.0\n")
    said = describe_changes(first, make_settings())
    assert said is not None and said.splitlines()[-1].split()[0] == "model.rewards.source"
