"""Running trajectories in a checkpoint, as plain types, which each checkpoint format supports."""

from collections.abc import Mapping
from typing import TypedDict

from rlightning.environments.messages import Fields
from rlightning.foreign_text import cut_value
from rlightning.python_values import JsonObject


class SavedTrajectory(TypedDict, total=False):
    """A trajectory in a checkpoint: its branches and turns, and its tools, temperature and counts of requests.

    ``state`` is what its environment continues from; ``outcome`` is None while the trajectory is running.
    """

    trajectory: JsonObject
    settings: JsonObject
    state: object
    outcome: Fields | None
    timings: dict[str, float]


def copy_plain(value: object, place: str) -> object:
    """Return a copy of texts, numbers, bytes, lists and mappings for a checkpoint, with tuples as lists; raises a
    TypeError for other types.
    """
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, list | tuple):
        return [copy_plain(one, f"{place}[{number}]") for number, one in enumerate(value)]
    if isinstance(value, Mapping):
        odd = [name for name in value if not isinstance(name, str)]
        if odd:
            raise TypeError(f"{place} has the name {cut_value(odd[0])}, and names have to be texts.")
        return {str(name): copy_plain(one, f"{place}[{str(name)!r}]") for name, one in value.items()}
    raise TypeError(
        f"{place} is {cut_value(value)}, and has to be a text, a number, bytes (such as pickle.dumps() returns), or "
        "lists and mappings of these."
    )
