"""Reward functions whose files are edited while a run goes on."""

import importlib
import logging
import sys
from pathlib import Path

import pytest
import tiny
from scoring import MakeRunner, score, values

from rlightning.algorithms import GRPO
from rlightning.config.run_settings import describe_changes
from rlightning.errors import RewardError
from rlightning.rewards.sources import KeptFinder, KeptSources

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
    # an object whose class and method come from two other modules, and is named by a third
    "edited_class.py": (
        "import os\n"
        "class Judge:\n"
        "    def __init__(self, score):\n"
        "        self.score = score\n"
        "    def __call__(self, completion):\n"
        "        if completion == 'die':\n"
        "            os._exit(1)\n"
        "        return self.score(completion)\n"
    ),
    "edited_score.py": "def score(completion):\n    return 2.0\n",
    "edited_judge.py": "from edited_class import Judge\nfrom edited_score import score\njudge = Judge(score)\n",
    # imports that are found by more than an import statement at the top
    "edited_async.py": (
        "import importlib\n"
        "async def grade(completion):\n"
        "    from edited_folder.nested import table\n"
        "    named = importlib.import_module('edited_named')\n"
        "    return table.VALUE * named.VALUE\n"
    ),
    "edited_folder/nested/table.py": "VALUE = 3.0\n",
    "edited_named.py": "VALUE = 7.0\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a package with a reward, and of two modules that it imports: one of them when it is called."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
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
    make_runner: MakeRunner,
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
def test_workers_keep_all_modules_of_an_object(
    folder: Path,
    make_runner: MakeRunner,
) -> None:
    named = make_runner("edited_judge.judge", num_workers=1)
    given = make_runner(importlib.import_module("edited_judge").judge, num_workers=1)
    assert named.sources.modules.keys() == {"edited_judge", "edited_class", "edited_score"}
    assert given.sources.modules.keys() == {"edited_class", "edited_score"}, "what its pickle names"
    (folder / "edited_score.py").write_text("def score(completion):\n    return 100.0\n")
    for runner in (named, given):
        assert values(score(runner, ["", "die", "", ""]).rewards) == [2.0, None, 2.0, 2.0]


@pytest.mark.processes
@pytest.mark.parametrize("is_sent", [True, False])
def test_async_reward_imports_the_source_of_the_runs_beginning(
    folder: Path,
    make_runner: MakeRunner,
    caplog: pytest.LogCaptureFixture,
    is_sent: bool,
) -> None:
    others = [finder for finder in sys.meta_path if isinstance(finder, KeptFinder)]  # of runners that are not closed
    grade = importlib.import_module("edited_async").grade
    runner = make_runner("edited_async.grade" if is_sent else tiny.in_this_process(grade))
    assert runner.functions[0].pickled is None or is_sent
    caplog.clear()
    (folder / "edited_named.py").write_text("VALUE = 100.0\n")
    (folder / "edited_folder" / "nested" / "table.py").write_text("VALUE = 100.0\n")
    with caplog.at_level(logging.WARNING):
        assert values(score(runner, ["", ""]).rewards) == [21.0, 21.0]  # 3 x 7
    said = [record.getMessage().partition(" has changed")[0] for record in caplog.records]
    assert sorted(said) == [f"{folder}/edited_folder/nested/table.py", f"{folder}/edited_named.py"]
    runner.close()
    assert [finder for finder in sys.meta_path if isinstance(finder, KeptFinder)] == others


@pytest.mark.processes
def test_traceback_shows_the_source_that_ran(folder: Path, make_runner: MakeRunner) -> None:
    runner = make_runner("edited_rewards.grade.grade", max_failed_share=0.0)
    edit(folder)
    with pytest.raises(RewardError, match=r"(?s)    raise ValueError\('first version'\)\nValueError: first version$"):
        score(runner, ["raise"])


@pytest.mark.processes
def test_runs_write_no_bytecode_of_what_they_keep(folder: Path, make_runner: MakeRunner) -> None:
    runner = make_runner("edited_rewards.grade.grade")
    for path in folder.rglob("*.pyc"):
        path.unlink()
    score(runner, [""])
    assert not list(folder.rglob("*.pyc"))


def test_sources_are_the_users_own_modules_and_their_imports(folder: Path) -> None:
    sources = KeptSources(["edited_rewards.grade"])
    own = ["edited_helper", "edited_late", "edited_rewards", "edited_rewards.grade", "edited_rewards.tables"]
    assert sorted(sources.modules) == own
    own = ["edited_async", "edited_folder.nested.table", "edited_named"]
    assert sorted(KeptSources(["edited_async"]).modules) == own
    assert KeptSources(["rlightning.rewards.functions", "numpy", "json", "builtins", "no_such_module"]).modules == {}
    assert not {"edited_late", "edited_named", "edited_folder"} & sys.modules.keys(), "nothing is imported for it"


def test_digest_differs_where_any_source_does(folder: Path) -> None:
    first = KeptSources(["edited_rewards.grade"]).digest
    assert len(first) == 64 and KeptSources(["edited_rewards.grade"]).digest == first
    (folder / "edited_late.py").write_text("FACTOR = 6.0\n")
    assert KeptSources(["edited_rewards.grade"]).digest != first
    assert KeptSources([]).digest == ""


@pytest.mark.parametrize(
    ("path", "edited"),
    [
        ("edited_rewards.grade.grade", "edited_helper.py"),
        ("edited_async.grade", "edited_named.py"),
        ("edited_judge.judge", "edited_score.py"),
    ],
)
def test_resumed_run_says_that_rewards_are_others(path: str, edited: str, folder: Path) -> None:
    def make_settings() -> dict[str, object]:
        module = GRPO(model, rewards=[path])
        module.trainer = tiny.bare_trainer(folder, 1)
        return module.settings

    model = tiny.save_model(folder / "model")
    first = make_settings()
    assert describe_changes(first, make_settings()) is None
    (folder / edited).write_text(f"{FILES[edited]}# edited\n")
    said = describe_changes(first, make_settings())
    assert said is not None and said.splitlines()[-1].split()[0] == "model.rewards.source"
