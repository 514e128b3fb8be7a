"""``rlightning serve``: its help, and the options that only it has, without slow imports."""

from rlightning.cli.own_options import split_own_options
from rlightning.errors import ConfigError
from rlightning.rpc.run_key import check_key

DEFAULTS = {"--host": "127.0.0.1", "--port": "8100"}
HELP = f"""\
usage: rlightning serve [--host HOST] [--port PORT] [--config FILE]... [--KEY VALUE]...

Starts one vLLM engine on all devices that this process sees, with the settings that `rlightning fit` derives from the
same configuration, and serves one trainer after the other. The trainer names it:

  rollout: {{placement: standalone, engines: [tcp://HOST:PORT]}}

Keys are those of `rlightning fit --help`. Ctrl-C ends it.

  --host HOST          where it listens; {DEFAULTS["--host"]} unless given. On any other than a loopback address both
                       sides need the same secret in the environment variable RLIGHTNING_RUN_KEY
  --port PORT          {DEFAULTS["--port"]} unless given; 0 is any that is free

example:
  RLIGHTNING_RUN_KEY=... rlightning serve --config run.yaml --host 0.0.0.0
"""


def read_options(options: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options that only ``rlightning serve`` has, by name, and the list of all other options.

    Raises:
        ConfigError: an option of this command has an invalid value.
    """
    own, rest = split_own_options(options, DEFAULTS)
    port = own["--port"]
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--port {port} must be a number from 0 to 65535. Use {DEFAULTS['--port']}.")
    check_key(own["--host"], "--host")
    return own, rest
