"""The file of a prediction, JSON Lines or Parquet, which a resumed run continues.

An unfinished file is ``<name>.partial``, with a line of JSON for each finished prompt, and ``<name>.partial.settings``
has the sampling settings. :meth:`PredictionFile.finish` sorts the lines in the order of the prompts, and converts them
to Parquet if the name ends in ``.parquet``.
"""

import fcntl
import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from numbers import Integral, Real
from pathlib import Path
from typing import BinaryIO

from rlightning.atomic_save import written_aside
from rlightning.disk import needed
from rlightning.errors import ConfigError
from rlightning.report.prediction_table import encode_trajectories, read_predictions, write_predictions
from rlightning.types import Prompt, Trajectory

log = logging.getLogger(__name__)

_BEGINNING = b'{"index": '
_INDEX = re.compile(rb'\{"index": (-?\d+),')
_UNSAFE = re.compile("[\ud800-\udfff\x85\u2028\u2029]")
"""Lone surrogates, which UTF-8 does not have, and characters that some readers take for the end of a line."""


class PredictionFile:
    """The file to which a rank appends prompts with their completions; an interrupted run can be continued.

    Args:
        path: the final name.
        settings: settings that affect completions, by configuration key, as JSON values.

    Attributes:
        num_prompts: number of prompts in the file.
        num_completions: number of completions in the file.
        is_open: whether the file is open for writing.
    """

    def __init__(self, path: Path, settings: Mapping[str, object]) -> None:
        self.path = path
        self.partial = path.with_name(f"{path.name}.partial")
        self.num_prompts = 0
        self.num_completions = 0
        self._is_parquet = path.suffix == ".parquet"
        self._settings_path = path.with_name(f"{path.name}.partial.settings")
        self._settings = json.loads(to_json(settings))
        self._num_bytes = 0  # size of the whole lines in the file
        self._file: BinaryIO | None = None  # the partial file, from the time when it is locked
        self.is_open = False

    @property
    def is_begun(self) -> bool:
        """Whether an earlier run has written a part of the file."""
        return self._settings_path.exists()

    def read(self) -> dict[int, int]:
        """Return the prompts that an earlier run has written: the hash of each text, by the prompt's index.

        Raises:
            ConfigError: the partial file is invalid, or was started with other settings.
        """
        self.num_prompts = self.num_completions = self._num_bytes = 0
        self._check_settings()
        found: dict[int, int] = {}
        for line in self._finished():
            row = json.loads(line)
            found[row["index"]] = hash(row["prompt"])
            self.num_completions += len(row["completions"])
        for number, line in enumerate(_lines(self.partial), 1):
            try:
                if not line.endswith(b"\n"):
                    if line[: len(_BEGINNING)] == _BEGINNING[: len(line)]:
                        break  # the process was killed while it wrote this line
                    raise ValueError
                row = json.loads(line)
                self.num_completions += len(row["completions"]) if row["index"] not in found else 0
                found[row["index"]] = hash(row["prompt"])
            except (ValueError, TypeError, KeyError) as error:
                raise self._refuse(f"holds no prediction in line {number}") from error
            self._num_bytes += len(line)
        self.num_prompts = len(found)
        if self._num_bytes and not self.is_begun:
            raise self._refuse(f"has no '{self._settings_path.name}' beside it, which says what it was sampled with")
        return found

    def lock(self) -> None:
        """Lock the file against other processes. May be called twice.

        Raises:
            ConfigError: another process holds the lock.
        """
        if self._file is not None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.partial.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise self._refuse("is being written by another process") from error
        except OSError:  # some network file systems have no locks
            log.warning("'%s' cannot be locked: do not write to it from two commands at once.", self.partial)
        self._file = file

    def open(self) -> None:
        """Open the file to append after the lines that :meth:`read` has found."""
        self.lock()
        with written_aside(self._settings_path) as aside:
            aside.write_text(to_json(self._settings), encoding="utf-8")
        assert self._file is not None
        self._file.truncate(self._num_bytes)
        self.is_open = True
        if self._is_parquet:
            self._append(self._finished())

    def write(self, prompt: Prompt, trajectories: list[Trajectory]) -> None:
        """Write a prompt and its trajectories, and flush them to the operating system.

        Raises:
            SaveError: writing failed; earlier prompts stay in the file.
        """
        self._append([self._line(prompt, trajectories)])
        self.num_prompts += 1
        self.num_completions += len(trajectories)

    def finish(self) -> None:
        """Sort the lines by the prompts' order, and rename the file to its final name.

        An existing file of that name, from a run that was killed before other ranks had finished, is merged.
        """
        if not self.is_open:
            self.open()
        places: dict[int, tuple[Path, int]] = {}
        for source in (self.partial,) if self._is_parquet else (self.path, self.partial):
            place = 0
            for line in _lines(source):
                index = _INDEX.match(line)
                assert index is not None
                places[int(index[1])] = source, place
                place += len(line)
        with written_aside(self.path) as aside, ExitStack() as stack:
            files = {source: stack.enter_context(source.open("rb")) for source, _ in places.values()}
            ordered = (_line_at(files[source], place) for _, (source, place) in sorted(places.items()))
            if self._is_parquet:
                write_predictions(aside, (json.loads(line)["trajectories"] for line in ordered))
            else:
                stack.enter_context(aside.open("wb")).writelines(ordered)
        self.partial.unlink()
        self._settings_path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Close the file; an unfinished file stays, an empty one is removed. May be called twice."""
        if self._file is not None:
            with suppress(OSError):  # the disk may be full again
                if not self.is_begun and not self._file.tell():
                    self.partial.unlink(missing_ok=True)
                self._file.close()
        self._file, self.is_open = None, False

    def _line(self, prompt: Prompt, trajectories: list[Trajectory]) -> bytes:
        row = prediction(prompt, trajectories)
        if self._is_parquet:
            row["trajectories"] = encode_trajectories(trajectories)
        return f"{to_json(row)}\n".encode()

    def _append(self, lines: Iterable[bytes]) -> None:
        assert self._file is not None and self.is_open, "open() comes before write()"
        with needed("The file", self.partial, "What was written before is kept. Make room, and run the command again."):
            self._file.writelines(lines)
            self._file.flush()

    def _finished(self) -> Iterator[bytes]:
        """Yield the lines of an existing final file, from a run that was killed before other ranks had finished."""
        if not self._is_parquet:
            yield from _lines(self.path)
        elif self.path.exists():
            yield from (f"{to_json(row)}\n".encode() for row in read_predictions(self.path))

    def _check_settings(self) -> None:
        if not (self.partial.exists() and self.is_begun):
            return
        earlier = json.loads(self._settings_path.read_bytes())
        for key in sorted(earlier.keys() | self._settings.keys()):
            before, now = earlier.get(key), self._settings.get(key)
            if before != now:
                raise self._refuse(f"was begun with {key}={before}, and now it is {now}")

    def _refuse(self, rule: str) -> ConfigError:
        return ConfigError(f"'{self.partial}' {rule}. It is not overwritten: move it away, or name another output.")


def prediction(prompt: Prompt, trajectories: list[Trajectory]) -> dict[str, object]:
    """Return a prompt and its completions as a JSON object, whose first key is ``index``."""
    return {
        "index": prompt.index,
        "prompt": prompt.text,
        "completions": [one.final_text for one in trajectories],
        "finish_reasons": [one.finish_reason for one in trajectories],
        "columns": prompt.columns,
    }


def to_json(value: object) -> str:
    """Return JSON on one line that every JSON reader accepts.

    Numbers that JSON does not have (NaN, infinities) become null, and values without a JSON type become text. Unpaired
    surrogates are escaped.
    """
    text = json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _plain(value: object) -> object:
    """Convert a value to JSON's types."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else str(value)  # NumPy's arrays


def _line_at(file: BinaryIO, place: int) -> bytes:
    file.seek(place)
    return file.readline()


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file; nothing if it does not exist."""
    if path.exists():
        with path.open("rb") as lines:
            yield from lines
