"""``rlightning rollout``: its help, and the options that only it has, without slow imports."""

from dataclasses import dataclass

from rlightning.cli.own_options import split_own_options
from rlightning.errors import ConfigError

DEFAULTS = {"--num": "8", "--samples": "1", "--endpoint": "", "--endpoint-model": "", "--endpoint-key-variable": ""}
FLAGS = ("--json",)
HELP = f"""\
usage: rlightning rollout [--num N] [--samples K] [--json] [--endpoint URL] [--config FILE]... [--KEY VALUE]...

Attempts a few prompts of a configuration in its environment, and prints each trajectory turn by turn: messages,
rewards, branches, status, error, seconds. Nothing is trained. The prompts are the first rows of data.predict, or else
of data.train; the policy is sampled by what `rollout` says, on one device, or by any OpenAI-compatible server.

Keys are those of `rlightning predict --help`. The exit code is 1 if a trajectory would not be trained on because
something failed, or has no reward because a reward function failed.

  --num N                        trajectories; {DEFAULTS["--num"]} unless given
  --samples K                    of each prompt; {DEFAULTS["--samples"]} unless given
  --json                         print a JSON object a line, one a trajectory
  --endpoint URL                 sample from a server that has /v1/completions, such as http://127.0.0.1:8000/v1;
                                 no engine is started, and of the model only the tokenizer is read
  --endpoint-model NAME          the model's name there; its only one unless given
  --endpoint-key-variable NAME   the environment variable with the server's key

example:
  rlightning rollout --config run.yaml --num 2 --rollout.temperature 0.7
"""


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
