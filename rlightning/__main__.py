"""``rlightning`` and ``python -m rlightning``: handles what needs no imports, then runs the command line.

No large package may be imported at the top of this module: ``rlightning --help`` must be fast, and a rollout engine's
child process imports this module again.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from rlightning.error_report import INTERRUPTED, exit_code, is_other_rank, show_error, yield_to_rank_0
from rlightning.errors import ConfigError, did_you_mean, find_run_error

if TYPE_CHECKING:
    from rlightning.parallel.failure_watch import FailureWatch

COMMANDS = {
    "fit": "train a model",
    "validate": "measure a model on the validation sets",
    "test": "the same, on the test sets",
    "predict": "write completions of a prompt file to JSON Lines or Parquet",
    "rollout": "a few trajectories, turn by turn: how to debug an environment",
    "serve": "an engine for trainers on other hosts",
    "plan": "what a run takes of a GPU's memory, without one",
}

OWN_OPTIONS = {
    "plan": ("fit", "memory_plan.devices:split_device_memory", "cli.plan:print_plan"),
    "rollout": ("predict", "cli.rollout_options:read_options", "cli.rollout_cli:rollout"),
    "serve": ("fit", "cli.serve_options:read_options", "cli.serve_cli:serve"),
}
"""For each command with options of its own: the command of Lightning whose keys it takes, the function that returns its
own options and the others, and the function that runs it."""

HELP = f"""\
usage: rlightning COMMAND [--config FILE]... [--KEY VALUE]... [--print_config]

RL post-training for language models, the Lightning way.

commands:
{chr(10).join(f"  {name:<10}{text}" for name, text in COMMANDS.items())}

options of every command:
  --config FILE        a YAML file; of several, the later win
  --KEY VALUE          any key of the YAML, such as --trainer.max_steps 100 or --rollout.temperature 0.8
  --KEY+=VALUE         append to a list, such as --trainer.callbacks+=EarlyStopping
  --print_config       show the resolved configuration and stop
  --help               every key (`--model.help CLASS`: those of an algorithm)

example:
  rlightning fit --config configs/grpo_gsm8k.yaml --model.lr 2e-6

rlightning --version shows the version.
"""

TERMINATED = 128 + signal.SIGTERM


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``rlightning`` command line, and return its exit code.

    Args:
        argv: the arguments after the program's name; None for ``sys.argv[1:]``.

    Returns:
        The exit code: 0; after a foreseen error, which is one line on stderr, 2 for a mistake of the user and else 1;
        130 after Ctrl-C. Other exceptions are raised, also that of SIGTERM, which ends the process with 143.
        Of several ranks, only the first to fail shows its error, and all return the same code.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        if not args or args[0] in ("-h", "--help"):
            sys.stdout.write(HELP)
            return 0
        if args[0] == "--version":
            from importlib.metadata import version

            sys.stdout.write(f"rlightning {version('rlightning')}\n")
            return 0
        if args[0] not in COMMANDS:
            raise ConfigError(f"'{args[0]}' is not a command of rlightning. {did_you_mean(args[0], COMMANDS)}")
        run(args)
    except KeyboardInterrupt as stop:
        return end(stop)
    except SystemExit as stop:
        endings = {TERMINATED: "ended by SIGTERM", INTERRUPTED: "interrupted"}
        if stop.code in endings and not is_of_peer(stop) and not is_other_rank():
            sys.stderr.write(f"{endings[stop.code]}\n")
        raise
    except Exception as error:
        if find_run_error(error) is not None:
            return end(error)
        if active_watch() is None:
            yield_to_rank_0()
        raise
    return 0


def run(args: list[str]) -> None:
    """Check the options of the command ``args[0]``, import its module, and run it until it ends."""
    if args[0] in ("rollout", "serve") and not {"-h", "--help"}.isdisjoint(args):
        sys.stdout.write(import_module(f"rlightning.cli.{args[0]}_options").HELP)
        return
    with ending_at_once():
        check_options(args)
        from rlightning.cli.hidden_packages import check_folder

        check_folder(Path.cwd())
        from rlightning.console import quieten

        quieten()
        # The working directory, which contains the user's classes, is not on the path of an installed script.
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.insert(0, os.getcwd())
        command = load(args)
    command()


def check_options(args: list[str]) -> None:
    """Raise a ConfigError for a wrong key or value in a command's options, before slow imports."""
    from rlightning.cli.config_precheck import check_early

    command, options = args[0], args[1:]
    if command in OWN_OPTIONS:
        command, read, _ = OWN_OPTIONS[command]
        _, options = resolve_name(f"rlightning.{read}")(options)
    check_early(command, options)


def load(args: list[str]) -> Callable[[], object]:
    """Return a function that runs the command ``args[0]`` with the other ``args``, after importing its module."""
    if args[0] in OWN_OPTIONS:
        *_, function = OWN_OPTIONS[args[0]]
        return partial(resolve_name(f"rlightning.{function}"), args[1:])
    from rlightning.cli.lightning_cli import RLCLI

    if not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
    return lambda: RLCLI(args=args)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Context manager in which Ctrl-C ends the process immediately: an interrupted import could raise any error."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_ours or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: object) -> None:
        if not is_other_rank():
            os.write(sys.stderr.fileno(), b"interrupted\n")
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end(error: BaseException) -> int:
    """Show the error that ended the run, on the rank that failed first, and return the exit code."""
    watch = active_watch()
    if watch is not None:
        first = watch.give_up(error)
        if not watch.is_first(first):
            return int(first.exit_code)
    else:
        yield_to_rank_0()
    show_error(error)
    return exit_code(error)


def active_watch() -> "FailureWatch | None":
    """Return this rank's FailureWatch, which ends all ranks if one fails; None before the ranks have connected."""
    failure = sys.modules.get("rlightning.parallel.failure_watch")
    return failure.active_watch() if failure is not None else None


def is_of_peer(error: BaseException) -> bool:
    """Return whether ``error`` is the consequence of another rank's error, which that rank shows itself."""
    failure = sys.modules.get("rlightning.parallel.failure_watch")
    return failure is not None and isinstance(error, failure.PeerFailure)


if __name__ == "__main__":
    sys.exit(main())
