"""Finds what a rank executes: the current line of its own code, and whether it waits for other ranks there."""

import os
import sys
import sysconfig
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_stack
from types import FrameType


def _folder_of(package: str) -> str:
    """Return a package's folder, without importing the package."""
    spec = find_spec(package)
    return "" if spec is None or spec.origin is None else f"{Path(spec.origin).parent}{os.sep}"


LIBRARIES = tuple(filter(None, map(_folder_of, ("torch", "lightning"))))
"""Folders of libraries whose frames are skipped in stacks; Python's own library is skipped too."""
PYTHON, PACKAGES = (f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib"))
COLLECTIVES = f"{_folder_of('torch')}distributed{os.sep}"
OWN = tuple(
    str(Path(__file__).with_name(f"{name}.py"))
    for name in ("barrier", "collectives", "cpu_group", "failure_watch", "hang_watch", "last_seen", "rank_store")
)
NUM_INNERMOST = 8
"""A thread waits in a collective if one of this many innermost frames is in torch.distributed."""
NUM_SHOWN = 12


@dataclass(frozen=True)
class Position:
    """What a thread executes: the innermost line of the user's or this package's code, and its stack.

    Attributes:
        where: text such as "in training_step (rlightning/module/rl_module.py, line 310)".
        is_in_collective: whether the thread is in a call of torch.distributed.
        stack: lines of the calls outside of torch, Lightning and Python's library; the last is the innermost.
        key: a number that differs between two calls if the thread has made progress in between.
    """

    where: str
    is_in_collective: bool
    stack: str
    key: int


def find_position(thread: int) -> Position:
    """Return what a thread of this process executes; ``thread`` is its ``threading.get_ident()``."""
    innermost = sys._current_frames().get(thread)
    frames = [] if innermost is None else [frame for frame, _ in walk_stack(innermost)]
    shown = [frame for frame in frames if not _is_library(frame)] or frames[:1]
    if not shown:
        return Position("at its end", False, "", 0)
    outer = frames[frames.index(shown[0]) :]
    return Position(
        where=f"in {shown[0].f_code.co_qualname} ({_place(shown[0])})",
        is_in_collective=any(frame.f_code.co_filename.startswith(COLLECTIVES) for frame in frames[:NUM_INNERMOST]),
        stack="\n".join(f"  {_place(frame)} in {frame.f_code.co_qualname}" for frame in reversed(shown[:NUM_SHOWN])),
        key=hash(tuple((frame.f_code, frame.f_lasti) for frame in outer)),
    )


def _is_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    is_python = name.startswith((PYTHON, "<frozen")) and not name.startswith(PACKAGES)
    return is_python or name.startswith(LIBRARIES) or name in OWN


def _place(frame: FrameType) -> str:
    file = Path(frame.f_code.co_filename)
    return f"{'/'.join(file.parts[-2:])}, line {frame.f_lineno}"
