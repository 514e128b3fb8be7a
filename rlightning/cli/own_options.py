"""Options of a single command, which are not keys of a configuration."""

from collections.abc import Collection, Mapping, Sequence

from rlightning.errors import ConfigError


def split_own_options(
    options: Sequence[str], defaults: Mapping[str, str], flags: Collection[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """Return the options in ``defaults`` and ``flags``, by name, and the list of all other options.

    Args:
        defaults: options with a value, with their defaults, such as ``{"--port": "8100"}``.
        flags: options without a value; in the result a given flag's value is its name, else "".

    Raises:
        ConfigError: a value is missing, or a flag has one.
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
