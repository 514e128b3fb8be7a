"""``rlightning rollout``: options and errors, without slow imports."""

from rlightning.cli.rollout_options import DEFAULTS, read_options

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


def rollout(options: list[str]) -> None:
    """Make trajectories of a few prompts, and print them turn by turn.

    Raises:
        ConfigError: the user's configuration has a mistake.
        EnvironmentFailedError: a trajectory or its reward failed.
    """
    from rlightning.cli.rollout_cli import RolloutCLI

    own, rest = read_options(options)
    RolloutCLI(own, rest).finish()
