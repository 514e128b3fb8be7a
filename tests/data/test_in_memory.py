"""Prompt sets that a program has in memory, and several files as one set: all that holds for a file holds for them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from prompt_files import make_tokenizer, write_rows
from torch.utils.data import DataLoader

from rlightning.data import PromptDataModule, PromptStream, ValidationSet, mapped, sources
from rlightning.data.formatting import PromptFormat, build_prompts
from rlightning.data.in_memory import check_source, hold_rows, read_source
from rlightning.data.mapped import MappedPrompts
from rlightning.errors import ConfigError
from rlightning.types import Prompt

ROWS: list[dict[str, Any]] = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(11)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache" / "rlightning"


def is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every set count as large."""
    monkeypatch.setattr(sources, "MAX_BYTES_IN_MEMORY", 0)
    monkeypatch.setattr(sources, "MAX_ROWS_IN_MEMORY", 0)


def read(source: Any, limit: int | None = None) -> Any:
    held = hold_rows(source, limit, "data.train", "data.train_limit")
    return read_source(held, limit, "data.train")


def build(source: Any, **options: Any) -> Any:
    return build_prompts(read(source), make_tokenizer(), PromptFormat(**options))


class Sized:
    """Yields rows, and knows how many."""

    def __len__(self) -> int:
        return len(ROWS)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from ROWS


class MapStyle:
    """A data set of PyTorch's: it does not say where it ends but by its length."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return ROWS[index % len(ROWS)]


FORMS: dict[str, Callable[[], Any]] = {
    "list": lambda: ROWS,
    "tuple": lambda: tuple(ROWS),
    "Dataset": lambda: datasets.Dataset.from_list(ROWS),
    "pandas": lambda: pandas.DataFrame(ROWS, index=range(50, 61)),
    "polars": lambda: pytest.importorskip("polars").DataFrame(ROWS),
    "pyarrow": lambda: pyarrow.Table.from_pylist(ROWS),
    "sized": Sized,
    "map_style": MapStyle,
}


@pytest.mark.parametrize("is_set_large", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_rows_in_memory_give_the_prompts_of_a_file(
    form: str, is_set_large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", ROWS)
    expected = PromptStream(build(file), seed=3, columns=["answer", "prompt"])
    if is_set_large:
        is_large(monkeypatch)
    prompts = build(FORMS[form]())
    assert isinstance(prompts, MappedPrompts) == is_set_large
    assert [prompt.columns for prompt in prompts] == ROWS
    stream = PromptStream(prompts, seed=3, columns=["answer", "prompt"])
    assert stream.state_dict() == expected.state_dict()
    assert stream.take(30) == expected.take(30)
    assert list(read(FORMS[form](), 4).rows) == ROWS[:4]
    assert read(FORMS[form]()).where(3) == "data.train, row 4"


@pytest.mark.parametrize("is_set_large", [False, True])
def test_rows_of_a_list_are_not_copied(is_set_large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_set_large:
        is_large(monkeypatch)
    # A second process would get a copy of the list.
    monkeypatch.setattr(mapped, "ROWS_A_PROCESS", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    prompts = build(ROWS)
    assert all(prompt.columns is row for prompt, row in zip(prompts, ROWS, strict=True))


def test_large_set_keeps_rows_beyond_json(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    is_large(monkeypatch)
    rows = [{"prompt": "1", "check": {3, 5}, "run": print, "thing": object()} for _ in range(2)]
    assert build(rows)[1].columns is rows[1]
    folders = sorted(cache.iterdir())
    again = [{**row, "thing": object()} for row in rows]  # at another address, and otherwise the same
    build(again)
    assert sorted(cache.iterdir()) == folders


def test_values_of_dataframes_are_pythons() -> None:
    chat = [{"role": "user", "content": "1"}]
    frame = pandas.DataFrame({"prompt": [chat, chat], "answer": ["1", None], "level": [1, 2]})
    (first, second) = read(frame).rows
    assert first == {"prompt": chat, "answer": "1", "level": 1} and type(first["level"]) is int
    assert second["answer"] is None
    mixed = pandas.DataFrame({"prompt": ["1", "2", "3"], "answer": [1, "2", None]})
    assert [row["answer"] for row in read(mixed).rows] == [1, "2", None]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "The prompt set 'data.train' is empty"),
        (pandas.DataFrame({"prompt": []}), "The prompt set 'data.train' is empty"),
        ([*ROWS, {"prompt": None}], r"data\.train, row 12: column 'prompt' holds None"),
        ([*ROWS, {"promt": "1"}], r"data\.train, row 12 has no column 'prompt', which other rows have"),
        ([*ROWS, {"prompt": ""}], r"data\.train, row 12: the prompt is empty"),
        ([*ROWS, "1+1="], r"data\.train, row 12 is a str\. Give a dict with a column for the prompt"),
        ([*ROWS, {3: "1"}], r"data\.train, row 12 has the column 3\. A column's name must be text"),
        (pandas.DataFrame({"text": ["1"]}), r"'data\.train' has no column 'prompt'"),
        (pandas.DataFrame({0: ["1"]}), r"data\.train has the column 0\. A column's name must be text"),
        (pandas.DataFrame([["1", "2"]], columns=["a", "a"]), r"data\.train names 'a' twice"),
        (datasets.Dataset.from_list(ROWS).with_transform(dict), r"data\.train has a transform, which is not applied"),
    ],
)
def test_wrong_rows_in_memory_are_named(rows: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build(rows)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (7, r"data\.train=7 is no prompt set\. Give a path, a list of paths, a datasets\.Dataset"),
        (ROWS[0], r"data\.train is a dict\. Give rows: a list of dicts"),
        (
            datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS)),
            r"data\.train has the splits train, test\. Give one of them: data\['train'\]",
        ),
        (DataLoader(ROWS, batch_size=4), r"data\.train is a DataLoader.*Give its rows: train=loader\.dataset"),  # type: ignore[arg-type]
        (make_tokenizer, r"data\.train is a function\. Give what it returns"),
    ],
)
def test_what_is_no_prompt_set_is_refused(source: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        PromptDataModule(source)
    assert "\n" not in str(caught.value)


def test_lazy_frame_is_refused() -> None:
    frame = pytest.importorskip("polars").LazyFrame(ROWS)
    with pytest.raises(ConfigError, match=r"data\.predict is a LazyFrame\. Give its rows: frame\.collect\(\)"):
        PromptDataModule(predict=frame)


def test_a_generator_needs_a_number_of_rows() -> None:
    def endless() -> Iterator[dict[str, Any]]:
        while True:
            yield from ROWS

    with pytest.raises(ConfigError, match=r"data\.train is a generator, whose number of rows is not known\. Say how"):
        hold_rows(endless(), None, "data.train", "data.train_limit")
    assert hold_rows(endless(), 15, "data.train", "data.train_limit") == [*ROWS, *ROWS[:4]]
    streamed = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    assert hold_rows(streamed, 5, "data.train", "data.train_limit") == ROWS[:5]
    assert hold_rows((row for row in ROWS), 50, "data.train", "data.train_limit") == ROWS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_limit": 0}, "train_limit=0 must be at least 1"),
        ({"predict_limit": 0}, "predict_limit=0 must be at least 1"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"validation_batch_size": 0}, "validation_batch_size=0 must be at least 1"),
        ({"validation": ValidationSet("v.jsonl", samples_per_prompt=0)}, "samples_per_prompt=0 must be at least 1"),
        ({"validation": ValidationSet("v.jsonl", limit=0)}, "limit=0 must be at least 1"),
        (
            {"validation": ValidationSet("v.jsonl", samples_per_prompt=4, temperature=0.0)},
            "samples_per_prompt=4 at temperature=0 are all alike",
        ),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PromptDataModule(**{"train": ROWS, "predict": ROWS, **options})


def write_parts(folder: Path) -> list[str]:
    """Rows 0 to 3, 4 to 8, 9 and 10, in three formats."""
    first = write_rows(folder / "a.jsonl", ROWS[:4])
    (folder / "b.csv").write_text("prompt,answer\n" + "".join(f"{r['prompt']},{r['answer']}\n" for r in ROWS[4:9]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[9:]), folder / "c.parquet")
    return [first, str(folder / "b.csv"), str(folder / "c.parquet")]


@pytest.mark.parametrize("is_set_large", [False, True])
def test_several_files_are_one_set(is_set_large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = PromptStream(build(ROWS), seed=3, columns=["answer"])
    paths = write_parts(tmp_path)
    if is_set_large:
        is_large(monkeypatch)
    prompts = build([Path(paths[0]), *paths[1:]])
    assert isinstance(prompts, MappedPrompts) == is_set_large
    assert [prompt.index for prompt in prompts] == list(range(11))
    stream = PromptStream(prompts, seed=3, columns=["answer"])
    assert stream.state_dict() == expected.state_dict() and stream.take(30) == expected.take(30)
    table = read(paths)
    assert [table.where(row) for row in (0, 3, 4, 8, 9, 10)] == [
        f"{paths[0]}, line 1",
        f"{paths[0]}, line 4",
        f"{paths[1]}, line 2",
        f"{paths[1]}, line 6",
        f"{paths[2]}, row 1",
        f"{paths[2]}, row 2",
    ]
    assert table.rows[2:10:3] == [ROWS[2], ROWS[5], ROWS[8]] and table.rows[-1] == ROWS[10]
    assert list(read(paths, 6).rows) == ROWS[:6] and list(read(paths, 2).rows) == ROWS[:2]


@pytest.mark.parametrize("is_set_large", [False, True])
def test_a_wrong_row_of_several_files_is_named(
    is_set_large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_set_large:
        is_large(monkeypatch)
    good, bad = write_rows(tmp_path / "a.jsonl", ROWS), write_rows(tmp_path / "b.jsonl", [ROWS[0], {"prompt": 3}])
    with pytest.raises(ConfigError, match=r"b\.jsonl, line 2: column 'prompt' holds 3"):
        build([good, bad])
    other = write_rows(tmp_path / "c.jsonl", [{"question": "1"}])
    with pytest.raises(ConfigError, match=r"c\.jsonl, line 1 has no column 'prompt', which other rows have"):
        build([good, other])
    with pytest.raises(ConfigError, match=r"There is no file '.*d\.jsonl'"):
        build([good, str(tmp_path / "d.jsonl")])


@pytest.mark.parametrize(
    "prompt",
    [
        *("1+1=", "1.5+2=", "What is 1.5 plus 2?", "What is in a.json", "~bob is who?", "1+1\n=\n", "1/2 + 1/2 ="),
        *("How many? " * 26, "How many? " * 1000, "1/" + "2 + " * 100),
    ],
)
def test_prompts_in_place_of_paths_are_refused(prompt: str) -> None:
    with pytest.raises(ConfigError, match=r"no file.* given as \[\{'prompt': \.\.\.\}\]: texts are names") as caught:
        build([prompt, "2+2="])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_overlong_prompts_in_memory_are_dropped_and_said(caplog: pytest.LogCaptureFixture) -> None:
    prompts = build(ROWS, max_tokens=4)  # "10+10=" has six
    assert [prompt.index for prompt in prompts] == list(range(10))
    assert "1 of 11 prompts of 'data.train' have more than max_prompt_tokens=4 tokens and are dropped" in caplog.text
    assert "the longest, data.train, row 11, has 6" in caplog.text


VALIDATION: list[tuple[Any, list[tuple[str, int | None]]]] = [
    (ROWS, [("validation", None)]),
    (datasets.Dataset.from_list(ROWS), [("validation", None)]),
    (ValidationSet(ROWS, limit=3), [("validation", 3)]),
    (Path("data/test.jsonl"), [("test", None)]),
    ("other.jsonl", [("other", None)]),
    ("openai/gsm8k:main:test", [("gsm8k", None)]),
    (["a/x.jsonl", "a/y.jsonl"], [("x", None), ("y", None)]),
    ({"own": ROWS, "file": "x.jsonl"}, [("own", None), ("file", None)]),
    ({"own": {"path": ROWS, "limit": 2}, "both": ["x.jsonl", "y.jsonl"]}, [("own", 2), ("both", None)]),
    (datasets.DatasetDict(easy=datasets.Dataset.from_list(ROWS)), [("easy", None)]),
]


@pytest.mark.parametrize(("given", "expected"), VALIDATION)
def test_validation_sets_take_every_form(given: Any, expected: list[tuple[str, int | None]]) -> None:
    found = PromptDataModule(validation=given).validation_sets
    assert [(chosen.name, chosen.limit) for chosen in found] == expected
    assert all(chosen.temperature == 0 for chosen in found)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"v": {"path": ROWS, "limt": 2}}, r"data\.validation\.v\.limt: there is no such key\. Did you mean 'limit'\?"),
        ({"v": {"limit": 2}}, r"data\.validation\.v: its path is missing"),
        ({"path": "x.jsonl", "limit": 2}, r"data\.validation has the keys of one set: path, limit\. Write them below"),
        ({"v": 5}, r"data\.validation\.v=5 is no prompt set"),
        (["a/x.jsonl", "b/x.jsonl"], r"data\.validation has two sets of the name 'x'\. Give each a name"),
    ],
)
def test_wrong_validation_sets_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        PromptDataModule(validation=given)
    assert "\n" not in str(caught.value)


def test_a_source_is_checked_without_being_read() -> None:
    def explode() -> Iterator[dict[str, Any]]:
        raise AssertionError("it is read")
        yield {}

    check_source(explode(), "data.train")
    PromptDataModule(explode(), train_limit=3)


def test_joined_prompts_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_large(monkeypatch)
    prompts: list[Prompt] = list(build(write_parts(tmp_path), max_tokens=4))
    assert prompts[4] == Prompt(4, "4+4=", [20, 11, 20, 29], {"prompt": "4+4=", "answer": "8"})
    assert len(prompts) == 10
    assert json.dumps(prompts[9].columns) == '{"prompt": "9+9=", "answer": "18"}'
