"""Temperatures and limits of the rows' own: read by column, refused with their place."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prompt_files import make_tokenizer, write_rows

from rlightning.data import sources
from rlightning.data.formatting import PromptFormat, build_prompts
from rlightning.data.mapped import MappedPrompts
from rlightning.data.own_sampling import longest_limit, read_limit, read_temperature
from rlightning.data.sources import read_rows
from rlightning.errors import ConfigError

FORMAT = PromptFormat(temperature_column="heat", max_new_tokens_column="limit")


@pytest.mark.parametrize(
    "value", [0.5, "0.5", " 0.5 ", np.float32(0.5), np.float64(0.5), torch.tensor(0.5), np.array(0.5)]
)
def test_temperature_is_a_number_or_its_text(value: Any) -> None:
    assert read_temperature({"heat": value}, "heat", "a, line 1") == 0.5


@pytest.mark.parametrize("value", [8.0, "8", np.int64(8), torch.tensor(8), np.float32(8.0)])
def test_limit_is_a_whole_number_or_its_text(value: Any) -> None:
    limit = read_limit({"limit": value}, "limit", "")
    assert limit == 8 and type(limit) is int


@pytest.mark.parametrize("value", [None, "", float("nan")])
def test_empty_cell_stands_for_the_runs(value: Any) -> None:
    assert read_temperature({"heat": value}, "heat", "") is None
    assert read_limit({"limit": value}, "limit", "") is None
    assert read_temperature({}, None, "") is read_limit({}, None, "") is None


@pytest.mark.parametrize("value", [0, 0.001, 2.5, -1, "hot", True, [1.0], float("inf")])
def test_what_is_no_temperature_is_refused(value: Any) -> None:
    message = r"a, line 7: temperature_column='heat' holds .*\. A temperature is from 0\.01 to 2; an empty cell"
    with pytest.raises(ConfigError, match=message):
        read_temperature({"heat": value}, "heat", "a, line 7")


@pytest.mark.parametrize("value", [0, 1.5, -3, "long", False, float("inf"), np.bool_(True)])
def test_what_is_no_limit_is_refused(value: Any) -> None:
    message = r"a, line 7: max_new_tokens_column='limit' holds .*\. A limit is a whole number of at least 1"
    with pytest.raises(ConfigError, match=message):
        read_limit({"limit": value}, "limit", "a, line 7")


ROWS: list[dict[str, Any]] = [
    {"prompt": "p", "heat": 0.7, "limit": 3},
    {"prompt": "pp", "heat": None, "limit": None},
    {"prompt": "ppp", "heat": 1.5, "limit": 9},
]


@pytest.mark.parametrize("is_large", [False, True])
def test_prompts_have_their_rows_own_sampling(is_large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    if is_large:
        monkeypatch.setattr(sources, "MAX_BYTES_IN_MEMORY", 0)
    prompts = build_prompts(read_rows(write_rows(tmp_path / "a.jsonl", ROWS)), make_tokenizer(), FORMAT)
    assert isinstance(prompts, MappedPrompts) == is_large
    assert [(p.temperature, p.max_new_tokens) for p in prompts] == [(0.7, 3), (None, None), (1.5, 9)]
    assert [p.columns for p in prompts] == ROWS
    assert longest_limit(prompts) == 9 and longest_limit([prompts[1]]) == 0


def test_column_that_is_not_there_is_refused(tmp_path: Path) -> None:
    table = read_rows(write_rows(tmp_path / "a.jsonl", [{"prompt": "p", "heats": 1.0, "limit": 1}]))
    with pytest.raises(ConfigError, match=r"a\.jsonl' has no column 'heat'\. Did you mean 'heats'\?"):
        build_prompts(table, make_tokenizer(), FORMAT)
    others = FORMAT.without_absent_columns(table.columns)
    assert (others.temperature_column, others.max_new_tokens_column) == (None, "limit")
