"""The environment of rows that name none: one of the data module's, or one for each set."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningModule
from prompt_files import make_tokenizer, write_rows
from tiny import bare_trainer

from rlightning.data import PromptDataModule, ValidationSet, sources
from rlightning.data.in_memory import Environments, read_source
from rlightning.errors import ConfigError
from rlightning.types import Prompt


class Notes(LightningModule):
    """Writes down the environments of the prompts that it is given."""

    max_model_length = 64

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = make_tokenizer()
        self.seen: list[object] = []

    def validation_step(self, prompts: list[Prompt], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen += [prompt.columns["environment"] for prompt in prompts]


def write(path: Path, *environments: str | None) -> str:
    """A row for each, without the column where it is empty."""
    rows = [{"prompt": "1+1=", "environment": environment} for environment in environments]
    return write_rows(path, [{key: value for key, value in row.items() if value != ""} for row in rows])


@pytest.mark.parametrize("num_rows_in_memory", [0, 100])
def test_rows_keep_their_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_rows_in_memory: int
) -> None:
    monkeypatch.setattr(sources, "MAX_ROWS_IN_MEMORY", num_rows_in_memory)
    paths = [write(tmp_path / "a.jsonl", "own", None, ""), write(tmp_path / "b.jsonl", None)]
    paths.append(write(tmp_path / "c.jsonl", "own"))

    def named(environment: Environments) -> list[str | None]:
        rows = read_source(paths, None, "data.train", environment).rows
        return [row.get("environment") for row in rows]

    assert named("all") == ["own", "all", "all", "all", "own"]
    assert named({paths[0]: "one", paths[1]: "other"}) == ["own", "one", "one", "other", "own"]
    assert named(None) == ["own", None, None, None, "own"]


def test_rows_in_memory_are_not_changed() -> None:
    rows = [{"prompt": "1+1="}]
    assert read_source(rows, None, "data.train", "all").rows == [{"prompt": "1+1=", "environment": "all"}]
    assert rows == [{"prompt": "1+1="}]


def test_validation_set_names_its_environment(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "")
    sets: dict[str, Any] = {"first": ValidationSet(path), "second": {"path": path, "environment": "the set's"}}
    module = Notes()
    bare_trainer(tmp_path, -1).validate(module, PromptDataModule(validation=sets, environment="the data's"))
    assert module.seen == ["the data's", "the set's"]


def test_environment_of_no_set_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "maths.jsonl", "")
    wrong = path.replace("maths", "math")
    with pytest.raises(ConfigError, match=r"math.jsonl: no set is read from there. Did you mean '.*/maths.jsonl'\?"):
        PromptDataModule(path, environment={wrong: "maths"})
    with pytest.raises(ConfigError, match=r"Rows in memory name theirs in a column 'environment'"):
        PromptDataModule([{"prompt": "1+1="}], environment={path: "maths"})


def test_names_are_those_of_the_configuration(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "")
    sets = {"first": ValidationSet(path, environment="one"), "second": ValidationSet(path)}
    assert PromptDataModule(path, validation=sets, environment={path: "two"}).environment_names == {
        "data.validation.first.environment": "one",
        f"data.environment.{path}": "two",
    }
    assert PromptDataModule(path, environment="two").environment_names == {"data.environment": "two"}
