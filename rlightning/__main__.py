"""``rlightning`` and ``python -m rlightning``: answers what needs no imports, then hands over to the command line.

Nothing heavy may be imported here at the top: ``rlightning --help`` answers in a moment, and a rollout engine's child
process imports this module again.
"""

import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlightning import intervals
from rlightning.errors import ConfigError, did_you_mean, find_mistake
from rlightning.plain_text import visible_on_one_line

COMMANDS = {
    "fit": "train a model",
    "validate": "measure a model on the validation sets",
    "test": "the same, on the test sets",
    "predict": "write completions of a prompt file to JSONL",
    "serve": "an engine for trainers on other hosts",
    "plan": "what a run takes of a GPU's memory, without one",
}

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

INTERRUPTED = 130
"""What a shell expects of a process that Ctrl-C ended: 128 and the signal's number."""
TERMINATED = 128 + signal.SIGTERM


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments after the program's name; ``sys.argv[1:]`` unless given.

    Returns:
        0, or 2 after a mistake of the user's (one line on stderr), or 130 after Ctrl-C. Any other exception is raised,
        also that of SIGTERM, which ends the process with 143.
        Of several ranks, the one that failed first says so, and all return the same.
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
        return end(stop, "interrupted", INTERRUPTED)
    except SystemExit as stop:
        if stop.code == TERMINATED and not is_other_rank():
            sys.stderr.write("ended by SIGTERM\n")
        raise
    except Exception as error:
        mistake = find_mistake(error)
        if mistake is not None:
            return end(error, f"error: {visible_on_one_line(str(mistake))}", 2)
        if active_watch() is None:
            yield_to_rank_0()
        raise
    return 0


def run(args: list[str]) -> None:
    """Parse ``args`` and run their command."""
    if args[0] == "serve" and not {"-h", "--help"}.isdisjoint(args):
        from rlightning.serve_command import HELP

        sys.stdout.write(HELP)
        return
    with ending_at_once():
        check_options(args)
        quieten()
        # An installed script does not have the folder it is called from on its path, and a user's classes are there.
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.insert(0, os.getcwd())
        command = load(args)
    command()


def check_options(args: list[str]) -> None:
    """Raise a ConfigError for a misspelled key before anything heavy is imported."""
    from rlightning.config_precheck import check_early

    command, options = args[0], args[1:]
    if command == "plan":
        from rlightning.memory_plan.devices import split_device_memory

        command, options = "fit", split_device_memory(options)[1]
    elif command == "serve":
        from rlightning.serve_command import split_options

        command, options = "fit", split_options(options)[1]
    check_early(command, options)


def load(args: list[str]) -> Callable[[], Any]:
    """Import what runs the command of ``args``."""
    if args[0] == "plan":
        from rlightning.memory_plan.command import plan

        return lambda: sys.stdout.write(plan(args[1:]))
    if args[0] == "serve":
        from rlightning.serve_command import serve

        return lambda: serve(args[1:])
    from rlightning.cli import RLCLI

    if not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
    return lambda: RLCLI(args=args)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Within, Ctrl-C ends the process then and there: a library whose import it breaks may raise anything else."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_ours or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: Any) -> None:
        if not is_other_rank():
            os.write(sys.stderr.fileno(), b"interrupted\n")
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end(error: BaseException, line: str, code: int) -> int:
    """Say how the run ended, on the rank that failed first; the exit code."""
    watch = active_watch()
    if watch is not None:
        first = watch.give_up(error)
        if not watch.is_first(first):
            return int(first.exit_code)
    else:
        yield_to_rank_0()
    sys.stderr.write(f"{line}\n")
    return code


def active_watch() -> Any:
    """The failure watch that the ranks keep, once they have met."""
    failure = sys.modules.get("rlightning.distributed.failure")
    return failure.active_watch() if failure is not None else None


def yield_to_rank_0() -> None:
    """Let rank 0 say first what is probably wrong on all ranks: its end is the end of the others, too."""
    if is_other_rank():
        time.sleep(intervals.RANK_0_GRACE)


def is_other_rank() -> bool:
    """Whether this is a rank but rank 0, as far as the launcher's variables tell."""
    return any(os.environ.get(name, "0") != "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))


class NotATip(logging.Filter):
    """Drops Lightning's advertisements; its messages about the run stay."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether ``record`` is shown."""
        return "Tip: " not in record.getMessage()


def quieten() -> None:
    """Show the run's own log, without the warnings that are known to be about nothing the user can change."""
    from rlightning.console import show_log_lines

    show_log_lines()
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(NotATip())
    for message in (
        ".*does not have many workers.*",
        ".*Total length of `.*` across ranks is zero.*",
        # Without dropout the actor and the engine compute the same; evaluation mode is on purpose.
        ".*module\\(s\\) in eval mode at the start of training.*",
        ".*LeafSpec.*is deprecated.*",
        "(?s).*Using ModelCheckpoint with manual optimization.*",
        # All ranks log the same step.
        ".*It is recommended to use `self.log\\('step', .*, sync_dist=True\\)`.*",
        ".*Checkpoint directory .* exists and is not empty.*",
        "(?s).*JsonargparseDeprecationWarning.*",
        "(?s).*``instantiate_classes`` was deprecated.*",
    ):
        warnings.filterwarnings("ignore", message=message)
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(pydantic|torch)\b.*")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\b.*")


if __name__ == "__main__":
    sys.exit(main())
