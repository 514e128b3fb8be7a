"""The Parquet files of trajectories: one schema, its writer and its reader. docs/trajectories.md has the columns."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

from rlightning.atomic_save import written_aside
from rlightning.types import Branch, Prompt, RolloutBatch, Sample, Trajectory, Turn
from rlightning.types.batch import TOKEN_FIELDS
from rlightning.types.supports import Supports
from rlightning.types.trajectory import read_traces

if TYPE_CHECKING:
    import pyarrow

TableRow: TypeAlias = dict[str, Any]
"""A row of an Arrow table in Python's types, by column."""

_STEP_FILE = re.compile(r"step_(\d+)(\.rank\d+)?\.parquet")


class Record(NamedTuple):
    """A trajectory as read from a trajectory file, with its step, group, reward and advantage.

    Attributes:
        step: the rollout step, counted from 1; 0 in a prediction.
        group: equal for the trajectories of one prompt, within the step and the file.
        reward: the total reward with which the trajectory was trained; None if it counts as not sampled.
        advantage: advantage of the first sampled token; None if advantages were not computed.
        trajectory: the whole trajectory.
    """

    step: int
    group: int
    reward: float | None
    advantage: float | None
    trajectory: Trajectory


class Completion(NamedTuple):
    """The main columns of a recorded trajectory, which the console, loggers and the report show."""

    step: int
    prompt: str
    completion: str
    reward: float
    length: int
    finish_reason: str


def trajectory_table(batch: RolloutBatch, step: int) -> "pyarrow.Table":
    """Return a table with one row for each trajectory, in the batch's order.

    Args:
        batch: a batch with all branches of its trajectories, and with rewards and advantages if computed.
        step: the rollout step, counted from 1.
    """
    import pyarrow  # importing it takes half a second, which only writing a table should cost

    num = batch.num_trajectories
    of_batch: dict[str, Sequence[float | None]] = {
        "step": [step] * num,
        "group": batch.group_ids.tolist(),
        "reward": [None] * num if batch.rewards is None else batch.rewards.tolist(),
        **{f"reward/{name}": values.tolist() for name, values in batch.scores.items()},
        "advantage": [None] * num if batch.advantages is None else _first_advantages(batch),
        "length": batch.completion_lengths.tolist(),
    }
    rows = [
        _row(one) | {name: values[m] for name, values in of_batch.items()} for m, one in enumerate(batch.trajectories)
    ]
    columns = schema(list(batch.scores))
    table = pyarrow.Table.from_pylist(rows, schema=columns.remove(len(columns) - 1))
    return table.append_column(columns.field("branches"), _branches(batch, columns.field("branches").type))


def _row(one: Trajectory) -> dict[str, object]:
    """Return the columns of a single trajectory, except its branches."""
    return {
        "prompt_index": one.prompt.index,
        "prompt": one.prompt.text,
        "completion": one.final_text,
        "status": one.status,
        "finish_reason": one.finish_reason,
        "prompt_token_ids": one.prompt.token_ids,
        "prompt_columns": json.dumps(one.prompt.columns, default=str),
        "temperature": one.prompt.temperature,
        "max_new_tokens": one.prompt.max_new_tokens,
        "turns": [
            {
                "message": json.dumps(turn.message, default=str),
                "text": turn.sample and turn.sample.text,
                "finish_reason": turn.sample and turn.sample.finish_reason,
                "supports": turn.sample and turn.sample.supports and turn.sample.supports.attributes(),
            }
            for turn in one.turns
        ],
        "scores": list(one.scores.items()),
        "environment_reward": one.reward,
        "turn_rewards": one.turn_rewards,
        "traces": None if one.traces is None else [trace._asdict() for trace in one.traces],
        "metrics": list(one.metrics.items()),
        "timings": list(one.timings.items()),
        "error": one.error,
    }


def _branches(batch: RolloutBatch, kind: "pyarrow.ListType") -> "pyarrow.Array":
    """Return the column of branches, built from the packed tensors without copies in Python."""
    import pyarrow as pa

    bounds = pa.array(batch.cu_seqlens.cpu().numpy())
    columns: dict[str, pyarrow.Array] = {"reason": pa.array(batch.reasons, pa.string())}
    for source, values in batch.token_arrays().items():
        tokens = pa.array(values.view(np.int8) if values.dtype == np.bool_ else values)
        columns[source] = pa.ListArray.from_arrays(bounds, tokens.cast(kind.value_type.field(source).type.value_type))
    counts = batch.trajectory_ids.cpu().bincount(minlength=batch.num_trajectories)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int().numpy()
    branches = pa.StructArray.from_arrays(list(columns.values()), fields=list(kind.value_type))
    return pa.ListArray.from_arrays(pa.array(offsets), branches)


def schema(functions: Sequence[str]) -> "pyarrow.Schema":
    """Return the Arrow schema of the trajectory files: the names and types of their columns.

    Args:
        functions: names of the reward functions, each of which has a column.
    """
    import pyarrow as pa

    tokens = pa.list_(pa.int32())
    numbers = pa.map_(pa.string(), pa.float64())
    branch = {"reason": pa.string(), "token_ids": tokens, "is_sampled": pa.list_(pa.int8())}
    branch |= {"logprobs": pa.list_(pa.float32()), "weight_versions": tokens, "turns": tokens}
    turn = {"message": pa.string(), "text": pa.string(), "finish_reason": pa.string()}
    turn["supports"] = pa.struct({"token_ids": tokens, "sizes": tokens})
    return pa.schema(
        {
            "step": pa.int64(),
            "group": pa.int64(),
            "prompt_index": pa.int64(),
            "prompt": pa.string(),
            "completion": pa.string(),
            "status": pa.string(),
            "reward": pa.float64(),
            **{f"reward/{name}": pa.float64() for name in functions},
            "advantage": pa.float64(),
            "length": pa.int64(),
            "finish_reason": pa.string(),
            "prompt_token_ids": tokens,
            "prompt_columns": pa.string(),
            "temperature": pa.float64(),
            "max_new_tokens": pa.int64(),
            "turns": pa.list_(pa.struct(turn)),
            "scores": numbers,
            "environment_reward": pa.float64(),
            "turn_rewards": pa.list_(pa.float64()),
            "traces": pa.list_(pa.struct({"agent": pa.string(), "reward": pa.float64(), "turns": tokens})),
            "metrics": numbers,
            "timings": numbers,
            "error": pa.string(),
            "branches": pa.list_(pa.struct(branch)),
        }
    )


def merge_tables(earlier: "pyarrow.Table", table: "pyarrow.Table") -> "pyarrow.Table":
    """Concatenate the tables of two micro-batches of a step; groups in the second get new numbers."""
    import pyarrow
    import pyarrow.compute

    first = pyarrow.compute.max(earlier["group"]).as_py()
    place = table.schema.get_field_index("group")
    groups = table["group"] if first is None else pyarrow.compute.add(table["group"], first + 1)
    return pyarrow.concat_tables([earlier, table.set_column(place, "group", groups)], promote_options="default")


def trajectory_file(folder: Path, step: int, rank: int = 0) -> Path:
    """Return the path of a step's file; each rank writes its own."""
    return folder / f"step_{step:06d}{f'.rank{rank}' if rank else ''}.parquet"


def recorded_files(folder: Path) -> dict[int, list[Path]]:
    """Return the files of a folder by step: those of all ranks, in the order of steps."""
    files: dict[int, list[Path]] = {}
    for path in sorted(folder.glob("step_*.parquet")):
        if found := _STEP_FILE.fullmatch(path.name):
            files.setdefault(int(found[1]), []).append(path)
    return dict(sorted(files.items()))


def write_trajectories(table: "pyarrow.Table", path: Path) -> None:
    """Write a table atomically: readers find the complete file or none."""
    import pyarrow.parquet

    with written_aside(path) as aside:
        pyarrow.parquet.write_table(table, aside)


def read_trajectories(path: Path) -> list[Record]:
    """Return the trajectories of a file, or of all files in a folder in the order of their names."""
    import pyarrow.parquet

    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    rows = [row for file in files for row in pyarrow.parquet.read_table(file).to_pylist()]
    return [Record(row["step"], row["group"], row["reward"], row["advantage"], _trajectory(row)) for row in rows]


def read_completions(path: Path) -> list[Completion]:
    """Return a Completion for each trajectory of a file that has a reward; other columns are not read."""
    import pyarrow.parquet

    return completions(pyarrow.parquet.read_table(path, columns=list(Completion._fields)))


def completions(table: "pyarrow.Table") -> list[Completion]:
    """Return a Completion for each row of a trajectory table that has a reward.

    Rows without a reward count as not sampled, and are left out.
    """
    rows = table.select(list(Completion._fields)).to_pylist()
    return [Completion(**row) for row in rows if row["reward"] is not None]


def spread_by_reward(rows: Sequence[Completion], num: int) -> list[Completion]:
    """Return ``num`` completions, evenly spaced from the highest to the lowest reward, both included; the highest alone
    if ``num`` is 1.
    """
    ranked = sorted(rows, key=lambda row: -math.inf if math.isnan(row.reward) else row.reward, reverse=True)
    if num >= len(ranked):
        return ranked
    last = max(num - 1, 1)
    return [ranked[i * (len(ranked) - 1) // last] for i in range(num)]


def _trajectory(row: TableRow) -> Trajectory:
    """Convert a row of :func:`trajectory_table` back to the trajectory."""
    prompt = Prompt(
        index=row["prompt_index"],
        text=row["prompt"],
        token_ids=row["prompt_token_ids"],
        columns=json.loads(row["prompt_columns"]),
        temperature=row["temperature"],
        max_new_tokens=row["max_new_tokens"],
    )
    branches = []
    for saved in row["branches"]:
        branch = Branch(saved["reason"])
        arrays = branch.arrays()
        for _, name, _ in TOKEN_FIELDS:
            arrays[name].extend(saved[name])
        branches.append(branch)
    turns = [
        Turn(json.loads(saved["message"]), None if saved["text"] is None else _sample(branches, place, saved))
        for place, saved in enumerate(row["turns"])
    ]
    return Trajectory(
        prompt=prompt,
        branches=tuple(branches),
        turns=tuple(turns),
        status=row["status"],
        scores=dict(row["scores"]),
        reward=row["environment_reward"],
        turn_rewards=row["turn_rewards"],
        traces=read_traces(saved.values() for saved in row["traces"]) if row.get("traces") is not None else None,
        metrics=dict(row["metrics"]),
        timings=dict(row["timings"]),
        error=row["error"],
    )


def _sample(branches: Sequence[Branch], turn: int, saved: TableRow) -> Sample:
    """Return the sample of a turn, built from its tokens in the branches."""
    places = [
        (branch, place)
        for branch in branches
        for place, owner in enumerate(branch.turns)
        if owner == turn and branch.is_sampled[place]
    ]
    return Sample(
        token_ids=[branch.token_ids[place] for branch, place in places],
        logprobs=[branch.logprobs[place] for branch, place in places],
        weight_versions=[branch.weight_versions[place] for branch, place in places],
        text=saved["text"],
        finish_reason=saved["finish_reason"],
        supports=None if saved.get("supports") is None else Supports(**saved["supports"]),
    )


def _first_advantages(batch: RolloutBatch) -> list[float]:
    """Return the advantage of each trajectory's first sampled token; 0 without one."""
    assert batch.advantages is not None
    index, num = batch.sampled_index, batch.num_trajectories
    owners = batch.to_tokens(torch.arange(num, device=index.device))[index]
    first = index.new_full((num,), batch.num_tokens).scatter_reduce(0, owners, index, "amin")
    padded = torch.cat([batch.advantages.float(), batch.advantages.new_zeros(1)])
    advantages: list[float] = padded[first].tolist()
    return advantages
