"""The user's arguments for vLLM's engine: which are passed through, and which only the run may set."""

import ast
import functools

from rlightning.errors import ConfigError, did_you_mean
from rlightning.rollout.engine_config import EngineArguments
from rlightning.rollout.vllm.vllm_source import source_of
from rlightning.syntax_tree import parse_source

OF_THE_RUN: dict[str, tuple[str, ...]] = {
    "the engine runs the actor's model, model.model": (
        "model", "model_weights", "model_class_overrides", "hf_config_path", "hf_overrides", "config_format",
        "revision", "code_revision", "runner", "convert", "pooler_config",
    ),
    "use model.trust_remote_code, which holds for the actor and its tokenizer too": ("trust_remote_code",),
    "completions are decoded by the tokenizer of model.model": (
        "tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init", "tokens_only",
    ),
    "use rollout.dtype, which the weights are sent in too": ("dtype",),
    "all weights come from the trainer, in rollout.dtype": (
        "load_format", "model_loader_extra_config", "quantization", "quantization_config",
        "allow_deprecated_quantization", "weight_transfer_config",
    ),
    "model.adapter says which adapter there is, and rollout.send_adapter whether engines are sent it": (
        "enable_lora", "max_loras", "max_lora_rank", "default_mm_loras", "fully_sharded_loras", "max_cpu_loras",
        "lora_dtype", "lora_target_modules", "enable_tower_connector_lora", "specialize_active_lora",
        "enable_mixed_moe_lora_format", "enable_moe_shared_loras", "max_lora_cls_labels", "lora_modules",
    ),
    "weights are received by it": ("worker_cls", "worker_extension_cls"),
    "use rollout.seed": ("seed",),
    "use rollout.gpu_memory_utilization": ("gpu_memory_utilization",),
    "use rollout.sleep": ("enable_sleep_mode", "enable_cumem_allocator"),
    "the trainer compares log-probabilities after the temperature": ("logprobs_mode", "max_logprobs"),
    "sampling values are keys of rollout, and the run's own ends of sequence end a completion": (
        "generation_config", "override_generation_config",
    ),
    "the engine would sample from another distribution than the trainer computes": (
        "logits_processors", "watermark_config", "diffusion_config", "return_sampling_mask",
    ),
    "weight versions and log-probabilities are counted by one token a step": (
        "speculative_config", "spec_method", "spec_model", "spec_tokens",
    ),
    "all prompts of a step wait in the engine at once": ("max_num_queued_reqs", "max_num_queued_tokens"),
    "an engine's devices are those that the run gives it": (
        "device_ids", "nnodes", "node_rank", "master_addr", "master_port", "data_parallel_rank",
        "data_parallel_start_rank", "data_parallel_size_local", "data_parallel_address", "data_parallel_rpc_port",
        "data_parallel_hybrid_lb", "data_parallel_external_lb", "data_parallel_multi_port_external_lb",
        "data_parallel_backend", "enable_elastic_ep", "elastic_ep_max_dp_size",
    ),
}  # fmt: skip
"""Engine arguments that are not passed through, by the reason and the alternative."""
OTHER_PARALLELISM = ("data_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
"""Engine arguments for parallelism over further devices, which are not reserved and would get no weights."""
COUNTS = (
    "tensor_parallel_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_num_scheduled_tokens",
    "max_num_active_seqs", "block_size", "kv_cache_memory_bytes", "num_gpu_blocks_override",
)  # fmt: skip
EXECUTORS = ("mp", "uni")
"""Values of ``distributed_executor_backend`` whose workers end with the engine's process."""


def check_given(given: EngineArguments) -> None:
    """Raise a ConfigError for keys of ``rollout.engine`` that the run itself sets, that cannot work, or are unknown."""
    reasons = {name: reason for reason, names in OF_THE_RUN.items() for name in names}
    known = argument_names()
    for name, value in given.items():
        key = f"rollout.engine.{name}"
        if name in reasons:
            raise ConfigError(f"{key} cannot be set: {reasons[name]}.")
        if name not in known:
            raise ConfigError(f"{key} is not an argument of vLLM's engine. {did_you_mean(name, known - set(reasons))}")
        if name in OTHER_PARALLELISM and value not in (None, 1):
            raise ConfigError(
                f"{key}={value} must be 1: an engine spans tensor_parallel_size devices. Use rollout.num_engines for "
                "more of them."
            )
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if name in COUNTS and value is not None and not is_count:
            raise ConfigError(f"{key}={value} must be a number, at least 1. Leave it out for what the run needs.")
        if name == "distributed_executor_backend" and value not in (None, *EXECUTORS):
            raise ConfigError(f"{key}={value} must be one of {', '.join(EXECUTORS)}. Leave it out.")


@functools.cache
def argument_names() -> frozenset[str]:
    """Return the fields of vLLM's AsyncEngineArgs, read from its source."""
    source = source_of("vllm.engine.arg_utils")
    if not source:
        raise ConfigError("This vLLM has no vllm/engine/arg_utils.py. Install a version that pyproject.toml allows.")
    return frozenset(
        field.target.id
        for node in parse_source(source).body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )
