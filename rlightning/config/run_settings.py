"""Compares the settings of a run with those in a checkpoint."""

from collections.abc import Mapping

MISSING = "-"
LONGEST = 60
"""Maximum number of characters of a shown value."""

OF_ONE_COMMAND = ("config", "ckpt_path")
"""Keys that do not affect training."""


def flatten(settings: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return nested settings as one mapping with dotted keys, without ``init_args``; list items get their index."""
    flat: dict[str, object] = {}
    for name, value in settings.items():
        key = prefix if name == "init_args" else f"{prefix}.{name}" if prefix else str(name)
        if key in OF_ONE_COMMAND:
            continue
        if isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
            value = {str(number): entry for number, entry in enumerate(value)}
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, key)
        else:
            flat[key] = value
    return flat


def describe_changes(old: Mapping[str, object], new: Mapping[str, object]) -> str | None:
    """Return a text block of the keys whose values differ, with both values; None if none differs.

    Args:
        old: the checkpoint's settings.
        new: the run's settings. A key that only one side has is reported only if both have a complete configuration.
    """
    is_complete = "model.class_path" in old.keys() & new.keys()
    keys = old.keys() | new.keys() if is_complete else old.keys() & new.keys()
    rows = [(key, _shown(old, key), _shown(new, key)) for key in sorted(keys) if old.get(key) != new.get(key)]
    if not rows:
        return None
    table = [("key", "checkpoint", "this run"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(2)]
    lines = (f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}" for row in table)
    return "\n".join(["Settings that differ from the checkpoint's; those of this run apply:", *lines])


def _shown(settings: Mapping[str, object], key: str) -> str:
    text = str(settings[key]) if key in settings else MISSING
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
