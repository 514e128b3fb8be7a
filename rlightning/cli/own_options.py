"""Options of a single command that are no keys of a configuration."""

from collections.abc import Collection, Mapping, Sequence

from rlightning.errors import ConfigError


def split_own_options(
    options: Sequence[str], defaults: Mapping[str, str], flags: Collection[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """Split options into those that only this command has, and the others.

    Args:
        defaults: values by name of those that have one, such as ``{"--port": "8100"}``.
        flags: names of those that have none; if one is there its value is its name, and else "".

    Raises:
        ConfigError: a value is missing, or is there for a flag.
    """
    own, rest = {**defaults, **dict.fromkeys(flags, "")}, list[str]()
    words = iter(options)
    for word in words:
        name, equals, value = word.partition("=")
        if name in flags:
            if equals:
                raise ConfigError(f"{name} takes no value. Write {name} alone.")
            own[name] = name
        elif name in defaults:
            given = value if equals else next(words, None)
            if not given:
                raise ConfigError(f"{name}: its value is missing. Write {name} {defaults[name] or 'VALUE'}.")
            own[name] = given
        else:
            rest.append(word)
    return own, rest
