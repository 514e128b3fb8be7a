"""The options that only ``rlightning rollout`` has."""

from dataclasses import dataclass

from rlightning.cli.own_options import split_own_options
from rlightning.errors import ConfigError

DEFAULTS = {"--num": "8", "--samples": "1", "--endpoint": "", "--endpoint-model": "", "--endpoint-key-variable": ""}
FLAGS = ("--json",)


@dataclass(frozen=True)
class RolloutOptions:
    """The parsed options of ``rlightning rollout`` that are not keys of the configuration.

    Attributes:
        num_trajectories: total number of trajectories.
        num_samples: trajectories of each prompt.
        is_json: whether output is JSON, for programs.
        endpoint: URL of a server; None for the configuration's sampler.
        endpoint_model: the model's name at the server; None for the server's only model.
        endpoint_key_variable: environment variable with the API key; None without a key.
    """

    num_trajectories: int
    num_samples: int
    is_json: bool
    endpoint: str | None
    endpoint_model: str | None
    endpoint_key_variable: str | None


def read_options(options: list[str]) -> tuple[RolloutOptions, list[str]]:
    """Return the options that only ``rlightning rollout`` has, parsed, and the list of all other options.

    Raises:
        ConfigError: an option of this command has an invalid value.
    """
    own, rest = split_own_options(options, DEFAULTS, FLAGS)
    numbers = {}
    for name in ("--num", "--samples"):
        if not own[name].isdecimal() or int(own[name]) < 1:
            raise ConfigError(f"{name} {own[name]} must be a number from 1 on. Use {DEFAULTS[name]}.")
        numbers[name] = int(own[name])
    if numbers["--num"] % numbers["--samples"]:
        raise ConfigError(f"--num {own['--num']} must be a multiple of --samples {own['--samples']}.")
    if not own["--endpoint"] and (own["--endpoint-model"] or own["--endpoint-key-variable"]):
        raise ConfigError("--endpoint-model and --endpoint-key-variable are of a server. Name it by --endpoint URL.")
    return RolloutOptions(
        numbers["--num"],
        numbers["--samples"],
        bool(own["--json"]),
        own["--endpoint"] or None,
        own["--endpoint-model"] or None,
        own["--endpoint-key-variable"] or None,
    ), rest
