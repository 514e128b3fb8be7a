"""Sampling parameters of individual rows, from columns of the prompt set: temperature and maximum tokens."""

import math
from collections.abc import Sequence

from rlightning.data.mapped import MappedPrompts
from rlightning.data.rows import Row
from rlightning.errors import ConfigError
from rlightning.foreign_text import cut_value
from rlightning.python_values import to_number
from rlightning.types import Prompt
from rlightning.types.trajectory import TEMPERATURES


def read_temperature(row: Row, column: str | None, where: str) -> float | None:
    """Return a row's own temperature; None if its cell is empty, or no column is configured.

    Raises:
        ConfigError: the value is not a number above 0. A prompt's greedy completions are all equal: greedy sampling can
            only be set for a whole set, by ``rollout.temperature=0``.
    """
    value = _read_number(row, column)
    lowest, highest = TEMPERATURES
    if value is not None and not lowest <= value <= highest:
        raise ConfigError(
            f"{where}: temperature_column='{column}' holds {cut_value(row[str(column)])}. A temperature is from "
            f"{lowest} to {highest:g}; an empty cell stands for rollout.temperature."
        )
    return value


def read_limit(row: Row, column: str | None, where: str) -> int | None:
    """Return a row's own limit on completion tokens; None if its cell is empty, or no column is configured."""
    value = _read_number(row, column)
    if value is not None and not (value >= 1 and value.is_integer()):
        raise ConfigError(
            f"{where}: max_new_tokens_column='{column}' holds {cut_value(row[str(column)])}. A limit is a whole number "
            "of at least 1; an empty cell stands for rollout.max_new_tokens."
        )
    return None if value is None else int(value)


def longest_limit(prompts: Sequence[Prompt]) -> int:
    """Return the largest of the prompts' own limits on completion tokens; 0 if no prompt has one."""
    if isinstance(prompts, MappedPrompts):
        return prompts.longest_limit
    return max((prompt.max_new_tokens or 0 for prompt in prompts), default=0)


def _read_number(row: Row, column: str | None) -> float | None:
    """Convert a cell to a number, from a NumPy or torch number or a CSV file's text; NaN if that is impossible."""
    value = None if column is None else to_number(row[column])
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return math.nan
    try:
        return float(value)
    except ValueError:
        return math.nan
