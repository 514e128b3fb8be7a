"""``rlightning plan``: computes the memory of a run from its configuration and the model's, on any machine."""

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from transformers import PreTrainedConfig

from rlightning.cli.lightning_cli import RLCLI, as_list
from rlightning.cli.named_classes import find_class
from rlightning.controller.ray_controller import RayController
from rlightning.data.prompt_limit import default_prompt_limit
from rlightning.errors import ConfigError
from rlightning.memory_plan.devices import DEVICES, OPTION, read_device_memory, split_device_memory
from rlightning.memory_plan.phases import MemoryPlan
from rlightning.memory_plan.report import format_plan
from rlightning.memory_plan.work import Parallelism, PlannedRollout, RoleMemory, Work, read_precision
from rlightning.models import Adapter, describe_length_limit, load_config, max_model_length
from rlightning.models.adapter import LoRA, check_adapter_precision, check_parallel, resolve_adapter
from rlightning.models.layers import is_compiled_by_setting
from rlightning.models.tensor_parallel import check_tensor_parallel
from rlightning.module.evaluation import no_trajectory_sampler
from rlightning.module.trainer_options import check_options, check_precision
from rlightning.parallel.fsdp import FSDP
from rlightning.parallel.strategy_names import WORKERS_KEY, spell_out
from rlightning.protocols import generates, has
from rlightning.rollout import TrajectorySampler
from rlightning.types.batch_plan import BatchPlan

Arguments = dict[str, Any]
"""Arguments of a class in a parsed configuration, by name."""

HELP = f"""\
usage: rlightning plan {OPTION} SIZE [--config FILE]... [--KEY VALUE]...

Bytes a rank in each phase of a step, the engine's share of the device, and what fits: from the configuration and the
model's config.json alone, without a GPU and without weights. Keys are those of `rlightning fit --help`.

  {OPTION} SIZE   of each rank's GPU: 80GB, 79.1GiB, or one of {", ".join(DEVICES)}

example:
  rlightning plan --config configs/grpo_gsm8k.yaml {OPTION} H200
"""


class PlanCLI(RLCLI):
    """Parses the options of ``fit``, with the same errors, but constructs no objects and starts no run."""

    def _set_seed(self) -> None:
        """Do nothing: a plan is deterministic."""

    def before_instantiate_classes(self) -> None:
        """Raise a ConfigError for unsupported Trainer options."""
        check_options(self.config[self.subcommand]["trainer"])

    def instantiate_classes(self) -> None:
        """Do nothing: a plan is computed from the parsed configuration, without a module or a Trainer."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Do nothing: a plan starts no run."""


def print_plan(options: list[str]) -> None:
    """Print :func:`plan`."""
    sys.stdout.write(plan(options))


def plan(options: list[str]) -> str:
    """Return the memory that a run with these command-line options would need, phase by phase, as text; start nothing.

    Raises:
        ConfigError: the user's configuration has a mistake.
    """
    if any(option in ("-h", "--help") for option in options):
        return HELP
    size, rest = split_device_memory(options)
    if size is None:
        raise ConfigError(
            f"How much memory has each rank's GPU? Add {OPTION} 80GB, say, or one of {', '.join(DEVICES)}."
        )
    device_memory = read_device_memory(size)
    return format_plan(MemoryPlan(parse_work(["fit", *rest]), device_memory))


def parse_work(args: list[str]) -> Work:
    """Return what determines the memory of the run that ``fit`` would start: models, batch sizes, and devices.

    Raises:
        ConfigError: as for ``fit``, if it can be detected without constructing objects.
    """
    config: Namespace = PlanCLI(args=args).config["fit"]
    trainer, model = config["trainer"], arguments(config["model"])
    trusts = bool(model.get("trust_remote_code"))
    model_config = load_config(model["model"], trust_remote_code=trusts)
    parallelism = read_parallelism(trainer)
    check_tensor_parallel(model["model"], model_config, parallelism.tensor_parallel_size)
    batch = read_batch(model)
    batch.check_world_size(parallelism.ranks)
    check_precision(str(trainer["precision"]))
    kind = find_class(config["model"]["class_path"], [], "model.class_path")
    positions = max_model_length(model_config)
    adapter = read_adapter(model, model_config)
    if adapter is not None:
        check_adapter_precision(str(trainer["precision"]))
        size = parallelism.tensor_parallel_size
        check_parallel(adapter, is_sharded=parallelism.kind == "fsdp", tensor_parallel_size=size)
    is_own_reference = adapter is not None and bool(model.get("kl_coef")) and names_own_base(model)
    roles = [role for role in read_roles(kind, model) if not (is_own_reference and role.name == "reference")]
    work = Work(
        config=model_config,
        adapter=adapter,
        is_own_reference=is_own_reference,
        others=tuple(roles),
        batch=batch,
        longest=min(batch.max_tokens_per_microbatch, positions),
        precision=read_precision(trainer["precision"]),
        gradient_checkpointing=model.get("gradient_checkpointing", "auto"),
        is_compiled=is_compiled_by_setting(model.get("compile"), "cuda"),
        optimizer_states=model.get("optimizer_states", "float32"),
        parallelism=parallelism,
    )
    if not generates(kind):
        return work
    callback_classes = find_callbacks(config)
    if not any(has(one, TrajectorySampler) for one, _ in callback_classes):
        raise no_trajectory_sampler(kind)
    callbacks = make_callbacks(callback_classes)
    new_tokens = next((one.sampling.max_new_tokens for one in callbacks if isinstance(one, PlannedRollout)), None)
    prompt_tokens = arguments(config["data"]).get("max_prompt_tokens") or default_prompt_limit(positions, new_tokens)
    if new_tokens is not None:
        batch.check_sequence_length(prompt_tokens, new_tokens, positions, describe_length_limit(model_config))
    return work.with_callbacks(callbacks, prompt_tokens)


def read_roles(kind: type, model: Arguments) -> Iterator[RoleMemory]:
    """Yield the memory of the reference model, if any, and one of unknown size for a user's ``configure_roles``."""
    if model.get("kl_coef"):
        reference = model.get("reference_model") or model["model"]
        config = load_config(reference, trust_remote_code=bool(model.get("trust_remote_code")))
        yield RoleMemory(name="reference", config=config)
    # A user's module may have none.
    if hasattr(kind, "configure_roles") and kind.configure_roles.__module__.partition(".")[0] != "rlightning":
        name = f"what {kind.__name__}.configure_roles() adds"
        yield RoleMemory(name=name, config=None, optimizer_states="float32")


def names_own_base(model: Arguments) -> bool:
    """Return whether the reference model is the actor's own base: named by the same path, or not at all."""
    reference = model.get("reference_model") or model["model"]
    return bool(os.path.expanduser(reference) == os.path.expanduser(model["model"]))


def read_adapter(model: Arguments, config: PreTrainedConfig) -> LoRA | None:
    """Return the actor's LoRA adapter, as configured; None if the actor's own weights are trained."""
    prefix = "adapter."
    given = {name.removeprefix(prefix): value for name, value in model.items() if name.startswith(prefix)}
    return resolve_adapter(Adapter(**given), model["model"], config) if given else None


def read_batch(model: Arguments) -> BatchPlan:
    """Return the batch sizes of a step; the default for keys that the algorithm lacks."""
    return BatchPlan(
        prompts_per_step=model.get("prompts_per_step", 32),
        samples_per_prompt=model.get("samples_per_prompt", 1),
        updates_per_rollout=model.get("updates_per_rollout", 1),
        epochs_per_rollout=model.get("epochs_per_rollout", 1),
        max_tokens_per_microbatch=model.get("max_tokens_per_microbatch", 16384),
    )


def arguments(section: Namespace | None) -> Arguments:
    """Return a section's ``init_args``, the arguments of its class, by name; {} without a section."""
    return {} if section is None else dict((section.get("init_args") or {}).items())


def find_callbacks(config: Namespace) -> list[tuple[type, Arguments]]:
    """Return the class and the arguments of each configured callback, the rollout callback included."""
    sections = [*as_list(config["trainer"]["callbacks"]), *as_list(config["rollout"])]
    return [(find_class(one["class_path"], [], "trainer.callbacks"), arguments(one)) for one in sections]


def make_callbacks(found: Iterable[tuple[type, Arguments]]) -> list[object]:
    """Construct the callbacks that affect the plan: the rollout callback, and callbacks that offload memory."""
    return [kind(**given) for kind, given in found if hasattr(kind, "plan_memory") or hasattr(kind, "moved_each_step")]


def count_devices(devices: object) -> int:
    """Return the number of devices of a host in ``trainer.devices``; 1 for "auto", which depends on the machine."""
    text = str(devices).strip("[]() ")
    if text == "auto":
        return 1
    parts = [part for part in text.split(",") if part.strip()]
    is_list = "," in text or isinstance(devices, list | tuple)
    count = len(parts) if is_list else int(text) if text.isdigit() else 0
    if count < 1:
        raise ConfigError(f"trainer.devices={devices} does not say how many there are. Use a number, such as 8.")
    return count


def read_parallelism(trainer: Namespace) -> Parallelism:
    """Return how models are distributed over ranks; with a controller, over its workers."""
    devices, nodes = count_devices(trainer["devices"]), int(trainer["num_nodes"])
    kind, given = find_strategy(trainer["strategy"], devices * nodes)
    if issubclass(kind, RayController):
        devices, nodes = given.get("num_workers") or devices * nodes, 1
        workers = spell_out(given.get("worker_strategy") or "fsdp2", WORKERS_KEY)
        kind, given = find_strategy(workers, devices)
    strategy = kind(**given)
    if isinstance(strategy, FSDP):
        strategy.num_nodes, strategy.parallel_devices = nodes, [torch.device("cpu")] * devices
        strategy.check_world_size()
    return Parallelism.of(strategy, devices * nodes)


def find_strategy(strategy: str | Namespace, ranks: int) -> tuple[type[Strategy], Arguments]:
    """Return the class and the arguments of a strategy, after its short name has been replaced by its class."""
    given: Arguments = {}
    if not isinstance(strategy, str):
        found = find_class(strategy["class_path"], [Strategy], "trainer.strategy")
        given = arguments(strategy) | dict(strategy.get("dict_kwargs") or {})
    elif strategy == "auto":
        found = SingleDeviceStrategy if ranks == 1 else DDPStrategy
    else:
        found = DDPStrategy if strategy.startswith("ddp") else Strategy
    if not issubclass(found, FSDP | DDPStrategy | SingleDeviceStrategy | RayController):
        name = strategy if isinstance(strategy, str) else strategy["class_path"]
        raise ConfigError(f"trainer.strategy={name} cannot be planned. Use fsdp2 or ddp.")
    return found, given
