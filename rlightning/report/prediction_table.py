"""Predictions as a Parquet file of trajectories: docs/trajectories.md has the columns.

In an unfinished file (:mod:`rlightning.report.prediction_file`) each prompt is a line, with its trajectories as an
Arrow stream in base64.
"""

import base64
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from rlightning.report.trajectories import schema, trajectory_table
from rlightning.types import RolloutBatch, Trajectory

if TYPE_CHECKING:
    import pyarrow

PROMPTS_PER_ROW_GROUP = 64


def encode_trajectories(trajectories: list[Trajectory]) -> str:
    """Return one prompt's trajectories as an Arrow table in base64, for :func:`write_predictions`; ``step`` is 0."""
    return _encode(trajectory_table(RolloutBatch.pack([trajectories]), step=0))


def write_predictions(path: Path, texts: Iterable[str]) -> None:
    """Write the trajectories of all prompts to a Parquet file, which :func:`read_predictions` can read.

    Args:
        path: the file.
        texts: results of :func:`encode_trajectories`, one for each prompt; read lazily.
    """
    import pyarrow
    import pyarrow.parquet

    columns = schema(())
    place, group = columns.get_field_index("group"), columns.field("group")
    numbered = enumerate(map(_decode, texts))
    with pyarrow.parquet.ParquetWriter(path, columns) as writer:
        while some := list(islice(numbered, PROMPTS_PER_ROW_GROUP)):
            tables = [
                table.set_column(place, group, pyarrow.array([number] * len(table), group.type))
                for number, table in some
            ]
            writer.write_table(pyarrow.concat_tables(tables))


def read_predictions(path: Path) -> Iterator[dict[str, object]]:
    """Yield the prompts of a file from :func:`write_predictions`: index, text, completions, encoded trajectories."""
    import pyarrow.compute
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    for number in range(file.num_row_groups):
        table = file.read_row_group(number)
        for group in table["group"].unique():
            rows = table.filter(pyarrow.compute.equal(table["group"], group))
            yield {
                "index": rows["prompt_index"][0].as_py(),
                "prompt": rows["prompt"][0].as_py(),
                "completions": rows["completion"].to_pylist(),
                "trajectories": _encode(rows),
            }


def _encode(table: "pyarrow.Table") -> str:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return base64.b64encode(sink.getvalue()).decode()


def _decode(text: str) -> "pyarrow.Table":
    import pyarrow

    return pyarrow.ipc.open_stream(base64.b64decode(text)).read_all()
