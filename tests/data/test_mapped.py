"""Sets that stay on disk give the prompts that they give in memory, and are tokenised once."""

import json
import multiprocessing
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from prompt_files import make_tokenizer, write_rows

from rlightning.data import mapped, sources
from rlightning.data.formatting import PromptEncoder, PromptFormat, build_prompts
from rlightning.data.mapped import MappedPrompts
from rlightning.data.sources import read_rows
from rlightning.data.stream import PromptStream
from rlightning.errors import ConfigError
from rlightning.types import Prompt

ROWS: list[dict[str, Any]] = [{"prompt": "p" * (1 + i % 7), "answer": i, "n": {"x": [i, None, 0.1]}} for i in range(30)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every set is large, and the cache is the test's own."""
    monkeypatch.setattr(sources, "MAX_BYTES_IN_MEMORY", 0)
    monkeypatch.setattr(sources, "MAX_ROWS_IN_MEMORY", 0)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache" / "rlightning"


def in_memory(path: str, prompt_format: PromptFormat, monkeypatch: pytest.MonkeyPatch) -> list[Prompt]:
    with monkeypatch.context() as patch:
        patch.setattr(sources, "MAX_BYTES_IN_MEMORY", 2**20)
        patch.setattr(sources, "MAX_ROWS_IN_MEMORY", 1000)
        prompts = build_prompts(read_rows(path), make_tokenizer(), prompt_format)
    assert isinstance(prompts, list)
    return prompts


def write(path: Path) -> str:
    """Write ROWS in the format that the path's suffix names."""
    if path.suffix == ".jsonl":
        return write_rows(path, ROWS)
    if path.suffix == ".json":
        path.write_text(json.dumps(ROWS))
    elif path.suffix == ".csv":
        path.write_text("prompt,answer\n" + "".join(f'"{row["prompt"]}\n",{row["answer"]}\n' for row in ROWS))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=7)
    else:
        datasets.Dataset.from_list(ROWS).save_to_disk(str(path))
    return str(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "folder"])
def test_mapped_prompts_equal_those_in_memory(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / name)
    expected = in_memory(path, PromptFormat(), monkeypatch)
    prompts = build_prompts(read_rows(path), make_tokenizer(), PromptFormat())
    assert isinstance(prompts, MappedPrompts)
    assert list(prompts) == expected
    assert prompts[3:20:5] == expected[3:20:5] and prompts[-1] == expected[-1]
    assert read_rows(path).where(4) == f"{path}, " + {"a.jsonl": "line 5", "a.csv": "line 10"}.get(name, "row 5")
    with pytest.raises(IndexError):
        prompts[len(prompts)]


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_mapped_order_and_fingerprint_equal_those_in_memory(
    tmp_path: Path, overlong: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.jsonl")
    prompt_format = PromptFormat(max_tokens=4, overlong=overlong)
    expected = PromptStream(in_memory(path, prompt_format, monkeypatch), seed=3, columns=["n", "answer"])
    said = [record.message for record in caplog.records if record.name.startswith("rlightning")]
    for _ in ("first start", "second start"):
        caplog.clear()
        prompts = build_prompts(read_rows(path), make_tokenizer(), prompt_format)
        stream = PromptStream(prompts, seed=3, columns=["answer", "n"])
        assert [record.message for record in caplog.records if record.name.startswith("rlightning")] == said
        assert stream.state_dict() == expected.state_dict()
        assert stream.take(40) == expected.take(40)
        expected.position = 0
    assert "max_prompt_tokens=4" in said[0]


def test_a_set_is_tokenised_again_only_if_something_changed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl")
    encoded: list[int] = []
    encode = PromptEncoder.encode

    def count(self: PromptEncoder, table: Any, start: int, stop: int) -> Any:
        encoded.append(stop - start)
        return encode(self, table, start, stop)

    monkeypatch.setattr(PromptEncoder, "encode", count)
    first = build_prompts(read_rows(path), make_tokenizer(), PromptFormat())
    Path(path).touch()
    assert list(build_prompts(read_rows(path), make_tokenizer(), PromptFormat())) == list(first)
    assert sum(encoded) == 30
    build_prompts(read_rows(path), make_tokenizer(), PromptFormat(system="Be."))
    assert sum(encoded) == 60
    templated = make_tokenizer()
    templated.chat_template = "{{ messages[0].content }}!"
    assert build_prompts(read_rows(path), templated, PromptFormat())[0].text == "p!"
    assert sum(encoded) == 90
    assert build_prompts(read_rows(path, 20), make_tokenizer(), PromptFormat())[19] == first[19]
    assert sum(encoded) == 110
    write_rows(Path(path), ROWS[1:])
    assert build_prompts(read_rows(path), make_tokenizer(), PromptFormat())[0] == first[1]._replace(index=0)
    assert sum(encoded) == 139
    assert not [entry for entry in cache.iterdir() if entry.is_dir() and len(entry.name) != 32]  # nothing unfinished


@pytest.mark.long
def test_several_processes_tokenise_and_any_may_find_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "ROWS_A_PROCESS", 15)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    rows: list[dict[str, Any]] = [*ROWS[:29], {"prompt": None, "answer": 0, "n": 1}]
    with pytest.raises(ConfigError, match=r"line 30: column 'prompt' holds None") as caught:
        build_prompts(read_rows(write_rows(tmp_path / "b.jsonl", rows)), make_tokenizer(), PromptFormat())
    assert "\n" not in str(caught.value)
    prompts = build_prompts(read_rows(write(tmp_path / "a.jsonl")), make_tokenizer(), PromptFormat())
    assert [len(prompt.token_ids) for prompt in prompts] == [len(row["prompt"]) for row in ROWS]
    assert list(pickle.loads(pickle.dumps(prompts))) == list(prompts)


@pytest.mark.processes
def test_processes_that_tokenise_end_on_sigterm_whatever_the_handler() -> None:
    """A pool ends them so when one has found a mistake, and would wait for ever for one that only takes a note."""

    def note(signum: int, frame: Any) -> None:
        pass

    before = signal.signal(signal.SIGTERM, note)
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    try:
        with mapped.plain_forks():
            process.start()
            process.terminate()
            process.join(300)
        assert signal.getsignal(signal.SIGTERM) is note
        assert process.exitcode == -signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
        process.kill()


def test_rows_of_mixed_types_are_kept_as_they_are(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "x": 1},
        {"prompt": "b", "x": "1", "y": None},
        {"prompt": "c", "x": [2**70, "\ud83d"]},
    ]
    table = read_rows(write_rows(tmp_path / "a.jsonl", rows))
    assert list(table.rows) == rows
    assert table.columns == {"prompt", "x"}


def test_mistakes_in_large_files_say_where(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x"}\n\n{"prompt": \n')
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 3 is not JSON"):
        read_rows(str(path))
    path.write_text('{"prompt": "x"}\n{"text": "x"}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2 has no column 'prompt', which other rows have"):
        build_prompts(read_rows(str(path)), make_tokenizer(), PromptFormat())
    path.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_rows(str(path))


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", path)  # a file
    with pytest.raises(ConfigError, match=r"cannot be cached in .* set HF_DATASETS_CACHE"):
        read_rows(path)
