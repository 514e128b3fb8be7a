"""``rlightning plan``: the memory of a run, from its configuration and the model's, on any machine."""

from typing import Any

from rlightning.cli.lightning_cli import RLCLI
from rlightning.errors import ConfigError
from rlightning.memory_plan.devices import DEVICES, OPTION, read_device_memory, split_device_memory
from rlightning.memory_plan.phases import MemoryPlan
from rlightning.memory_plan.report import format_plan
from rlightning.memory_plan.settings import read_work
from rlightning.module.trainer_options import check_options

HELP = f"""\
usage: rlightning plan {OPTION} SIZE [--config FILE]... [--KEY VALUE]...

Bytes a rank in each phase of a step, the engine's share of the device, and what fits: from the configuration and the
model's config.json alone, without a GPU and without weights. Keys are those of `rlightning fit --help`.

  {OPTION} SIZE   of each rank's GPU: 80GB, 79.1GiB, or one of {", ".join(DEVICES)}

example:
  rlightning plan --config configs/grpo_gsm8k.yaml {OPTION} H200
"""


class PlanCLI(RLCLI):
    """Parses what ``fit`` would be given, with the same errors, and builds nothing."""

    def _set_seed(self) -> None:
        """Nothing is random."""

    def before_instantiate_classes(self) -> None:
        """Settle what a plan has to know."""
        check_options(self.config[self.subcommand]["trainer"])

    def instantiate_classes(self) -> None:
        """Nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing."""


def plan(options: list[str]) -> str:
    """The plan as text.

    Args:
        options: what follows the command.

    Raises:
        ConfigError: for a mistake of the user's.
    """
    if any(option in ("-h", "--help") for option in options):
        return HELP
    size, rest = split_device_memory(options)
    if size is None:
        raise ConfigError(
            f"How much memory has each rank's GPU? Add {OPTION} 80GB, say, or one of {', '.join(DEVICES)}."
        )
    device_memory = read_device_memory(size)
    config: Any = PlanCLI(args=["fit", *rest]).config["fit"]
    return format_plan(MemoryPlan(read_work(config), device_memory))
