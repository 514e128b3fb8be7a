"""From a parsed configuration to the work that a plan is about, without building anything of it."""

import math
from typing import Any, Literal

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from rlightning.cli.config_keys import find_class
from rlightning.controller.ray_controller import RayController
from rlightning.data.prompt_limit import default_prompt_limit
from rlightning.errors import ConfigError
from rlightning.memory_plan.engine_memory import read_engine
from rlightning.memory_plan.work import Engine, Parallelism, Work
from rlightning.models import describe_length_limit, load_config, max_model_length
from rlightning.models.tensor_parallel import check_tensor_parallel
from rlightning.module.trainer_options import check_precision
from rlightning.parallel.fsdp import FSDP
from rlightning.parallel.strategy_names import WORKERS_KEY, spell_out
from rlightning.rollout.engine_options import MEMORY_SHARE
from rlightning.rollout.engine_settings import RolloutWork, derive_settings
from rlightning.types.batch_plan import BatchPlan

# The package never imports a concrete callback: they are found by these names, when a plan is made.
CALLBACKS = "rlightning.callbacks"
Precision = Literal["32-true", "bf16-mixed", "bf16-true"]
PRECISIONS: dict[str, Precision] = {
    "32": "32-true",
    "32-true": "32-true",
    "None": "32-true",
    "bf16": "bf16-mixed",
    "bf16-mixed": "bf16-mixed",
    "bf16-true": "bf16-true",
}


def read_work(config: Any) -> Work:
    """What a run would do.

    Args:
        config: of ``fit``, parsed and complete, with its sections ``model``, ``data``, ``rollout`` and ``trainer``.

    Raises:
        ConfigError: as ``fit`` would, where it shows without building anything.
    """
    trainer, model, data = config["trainer"], arguments(config["model"]), arguments(config["data"])
    trust = bool(model.get("trust_remote_code"))
    model_config = load_config(model["model"], trust_remote_code=trust)
    parallelism = read_parallelism(trainer)
    check_tensor_parallel(model["model"], model_config, parallelism.tensor_parallel_size)
    batch = BatchPlan(
        prompts_per_step=model.get("prompts_per_step", 32),
        samples_per_prompt=model.get("samples_per_prompt", 1),
        updates_per_rollout=model.get("updates_per_rollout", 1),
        epochs_per_rollout=model.get("epochs_per_rollout", 1),
        max_tokens_per_microbatch=model.get("max_tokens_per_microbatch", 16384),
    )
    batch.check_world_size(parallelism.ranks)
    generates = getattr(find_class(config["model"]["class_path"], [], "model.class_path"), "generates", True)
    rollout = find_rollout(config) if generates else None
    positions = max_model_length(model_config)
    new_tokens: Any = None if rollout is None else rollout["max_new_tokens"]
    max_prompt_tokens = data.get("max_prompt_tokens") or default_prompt_limit(positions, new_tokens)
    longest = min(batch.max_tokens_per_microbatch, positions)
    if rollout is not None:
        batch.check_sequence_length(max_prompt_tokens, new_tokens, positions, describe_length_limit(model_config))
        longest = max_prompt_tokens + new_tokens
    reference = model.get("reference_model") or model["model"]
    offload = find_callback(trainer, "OffloadDuringRollout")
    return Work(
        config=model_config,
        reference=load_config(reference, trust_remote_code=trust) if model.get("kl_coef") else None,
        batch=batch,
        longest=longest,
        precision=read_precision(trainer),
        gradient_checkpointing=model.get("gradient_checkpointing", "auto"),
        is_compiled=model.get("compile") is not False and parallelism.tensor_parallel_size == 1,
        optimizer_states=model.get("optimizer_states", "float32"),
        parallelism=parallelism,
        engine=None if rollout is None else plan_rollout(rollout, batch, parallelism.ranks, max_prompt_tokens),
        offloads_optimizer=offload is not None and bool(offload.get("optimizer", True)),
        offloads_parameters=offload is not None and bool(offload.get("parameters", False)),
    )


def arguments(section: Any) -> dict[str, Any]:
    """The arguments of a class that a section names."""
    return {} if section is None else dict((section.get("init_args") or {}).items())


def read_precision(trainer: Any) -> Precision:
    """Lightning's name for the precision, as far as a plan knows it."""
    name = str(trainer["precision"])
    check_precision(name)
    if name not in PRECISIONS:
        raise ConfigError(f"trainer.precision={name} cannot be planned. Use bf16-mixed, bf16-true or 32-true.")
    return PRECISIONS[name]


def count_devices(devices: Any) -> int:
    """How many devices ``trainer.devices`` asks for on each host; one for "auto", which no other machine can know."""
    text = str(devices).strip("[]() ")
    if text == "auto":
        return 1
    parts = [part for part in text.split(",") if part.strip()]
    is_list = "," in text or isinstance(devices, list | tuple)
    count = len(parts) if is_list else int(text) if text.isdigit() else 0
    if count < 1:
        raise ConfigError(f"trainer.devices={devices} does not say how many there are. Use a number, such as 8.")
    return count


def read_parallelism(trainer: Any) -> Parallelism:
    """The strategy's name or class and arguments, and the number of ranks; with a controller those of its workers."""
    devices, nodes = count_devices(trainer["devices"]), int(trainer["num_nodes"])
    kind, given = find_strategy(trainer["strategy"], devices * nodes)
    if issubclass(kind, RayController):
        devices, nodes = given.get("num_workers") or devices * nodes, 1
        workers = spell_out(given.get("worker_strategy") or "fsdp2", WORKERS_KEY)
        kind, given = find_strategy(workers, devices)
    ranks = devices * nodes
    if issubclass(kind, FSDP):
        strategy = kind(**given)
        strategy.num_nodes, strategy.parallel_devices = nodes, [torch.device("cpu")] * devices
        strategy.check_world_size()
        return parallelism_of_fsdp(strategy, ranks)
    if issubclass(kind, DDPStrategy):
        return parallelism_of_ddp(given.get("dict_kwargs") or given, ranks)
    return Parallelism(ranks=ranks)


def parallelism_of_fsdp(strategy: FSDP, ranks: int) -> Parallelism:
    """Shards, as a strategy has been asked for them."""
    return Parallelism(
        kind="fsdp",
        ranks=ranks,
        tensor_parallel_size=strategy.tensor_parallel_size,
        shard_size=strategy.shard_size or strategy.data_parallel_size,
        cpu_offload=strategy.cpu_offload,
        reshard_after_forward=strategy.reshard_after_forward,
        reduce_every_microbatch=strategy.reduce_every_microbatch,
    )


def parallelism_of_ddp(given: dict[str, Any], ranks: int) -> Parallelism:
    """A copy on each rank, by DDP's arguments."""
    has_views = bool(given.get("gradient_as_bucket_view", False))
    return Parallelism(kind="ddp", ranks=ranks, has_gradient_buckets=not has_views)


def find_strategy(strategy: Any, ranks: int) -> tuple[type[Strategy], dict[str, Any]]:
    """The class of a strategy, and its arguments; names of this package's classes have been replaced by these."""
    if not isinstance(strategy, str):
        found = find_class(strategy["class_path"], [Strategy], "trainer.strategy")
        given = arguments(strategy) | dict(strategy.get("dict_kwargs") or {})
    elif strategy == "auto":
        found, given = (SingleDeviceStrategy if ranks == 1 else DDPStrategy), {}
    else:
        found, given = (DDPStrategy if strategy.startswith("ddp") else Strategy), {}
    if not issubclass(found, FSDP | DDPStrategy | SingleDeviceStrategy | RayController):
        name = strategy if isinstance(strategy, str) else strategy["class_path"]
        raise ConfigError(f"trainer.strategy={name} cannot be planned. Use fsdp2 or ddp.")
    return found, given


def find_callback(trainer: Any, name: str) -> dict[str, Any] | None:
    """The arguments of the first listed callback that is one of the package's; None if it is not listed."""
    wanted = find_class(f"{CALLBACKS}.{name}", [], name)
    listed = trainer["callbacks"] or []
    for callback in listed if isinstance(listed, list) else [listed]:
        if issubclass(find_class(callback["class_path"], [], "trainer.callbacks"), wanted):
            return arguments(callback)
    return None


def find_rollout(config: Any) -> dict[str, Any] | None:
    """The arguments of the engine's callback, listed or in a section of its own."""
    listed = find_callback(config["trainer"], "VLLMRollout")
    if listed is not None or config["rollout"] is None:
        return listed
    section = find_class(config["rollout"]["class_path"], [], "rollout")
    is_engine = issubclass(section, find_class(f"{CALLBACKS}.VLLMRollout", [], "VLLMRollout"))
    return arguments(config["rollout"]) if is_engine else None


def plan_rollout(rollout: dict[str, Any], batch: BatchPlan, ranks: int, max_prompt_tokens: int) -> Engine:
    """The engine as ``VLLMRollout`` would start it."""
    itemsize, bucket_bytes = 4 if rollout.get("dtype") == "float32" else 2, int(rollout["bucket_bytes"])
    if rollout.get("placement") == "standalone":
        return Engine(is_remote=True, itemsize=itemsize, bucket_bytes=bucket_bytes)
    share = rollout["gpu_memory_utilization"] or MEMORY_SHARE["colocated"]
    number = int(rollout.get("num_engines") or 1)
    given = {"gpu_memory_utilization": share / number} | dict(rollout.get("engine") or {})
    size = int(given.get("tensor_parallel_size") or 1)
    if ranks % size:
        raise ConfigError(
            f"rollout.engine.tensor_parallel_size={size} runs one engine on the devices of {size} neighbouring ranks, "
            f"but there are {ranks} ranks. Set trainer.devices to a multiple of {size}."
        )
    prompts = batch.prompts_per_step + math.ceil(float(rollout.get("oversample") or 0) * batch.prompts_per_step)
    work = RolloutWork(
        num_prompts=-(-prompts * size // ranks // number),
        samples_per_prompt=batch.samples_per_prompt,
        max_prompt_tokens=max_prompt_tokens,
    )
    return read_engine(
        derive_settings(work, given, is_cuda=True),
        number=number,
        itemsize=itemsize,
        can_sleep=bool(rollout["sleep"]),
        bucket_bytes=bucket_bytes,
    )
