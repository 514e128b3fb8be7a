"""Private names of Ray that have no public equivalent; tests/test_library_internals.py checks each."""

from collections.abc import Callable
from typing import Any, TypeVar

import ray
from ray._private.worker import global_worker

T = TypeVar("T")

SESSION_FOLDER = "_temp_dir"
"""The argument of ``ray.init`` for the folder of a new cluster's sockets and logs."""
_worker: Any = global_worker  # Ray's client in this process, which has no types


def is_pickled_for_call() -> bool:
    """Return whether an object is being pickled as an argument or result of a Ray call, where Ray counts references."""
    return bool(_worker.get_serialization_context().is_in_band_serialization())


def call_when_unreferenced(ref: "ray.ObjectRef[T]", callback: Callable[[], object]) -> None:
    """Call ``callback()`` when no process has a reference to a stored object any more, as Ray Data does."""
    _worker.core_worker.add_object_out_of_scope_callback(ref, lambda _: callback())


def session_folder() -> str:
    """Return the folder of the Ray cluster's sockets and logs on this host."""
    return str(_worker.node.get_session_dir_path())
