"""Loading a Hugging Face causal language model as a policy."""

import copy
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from rlightning.errors import ConfigError, did_you_mean
from rlightning.models.attention import PACKED_ATTENTION


def load_config(model: str) -> PreTrainedConfig:
    """Read a model's configuration, which is cheap, so that what is wrong with it shows before anything is loaded.

    Args:
        model: a folder, or a name on the Hugging Face hub.

    Raises:
        ConfigError: if there is none.
    """
    path = Path(model)
    if not path.is_dir() and (
        path.is_absolute() or model.startswith((".", "~")) or (path.parent.is_dir() and "/" in model)
    ):
        siblings = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        hint = f" {did_you_mean(path.name, siblings)}" if siblings else ""
        raise ConfigError(f"model='{model}' is not a folder, nor can it be a hub name.{hint}")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model='{model}' has no readable config.json: {reason}") from error
    return config


def load_tokenizer(model: str) -> Tokenizer:
    """Read a model's tokenizer.

    Raises:
        ConfigError: if there is none.
    """
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model='{model}' has no readable tokenizer: {str(error).splitlines()[0]}") from error
    return tokenizer


def max_model_length(config: PreTrainedConfig) -> int:
    """The longest sequence, in tokens, that the model's positions allow."""
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(length) if length else 1 << 30


def load_policy(
    model: str, dtype: torch.dtype = torch.float32, *, gradient_checkpointing: bool = False
) -> PreTrainedModel:
    """Load a causal language model whose attention understands packed sequences, without dropout.

    Args:
        model: a folder, or a name on the Hugging Face hub.
        dtype: of the parameters; float32 masters by default, whatever the folder holds.
        gradient_checkpointing: compute activations again in the backward pass instead of keeping them.

    Raises:
        ConfigError: if its architecture cannot attend over packed sequences.
    """
    config = load_config(model)
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if getattr(config, name, 0.0):
            setattr(config, name, 0.0)
    try:
        policy: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model, config=config, dtype=dtype, attn_implementation=PACKED_ATTENTION
        )
    except ValueError as error:
        if "attn_implementation" not in str(error) and "attention" not in str(error):
            raise
        raise ConfigError(
            f"model='{model}' ({config.model_type}) cannot run packed sequences: its transformers class takes no "
            "attention function. Choose a model whose class has _supports_attention_backend, such as Qwen3 or Llama."
        ) from error
    head = policy.get_output_embeddings()
    scaled = [name for name in ("logits_scaling", "logit_scale") if getattr(config, name, 1) not in (None, 1)]
    if scaled or head is None or getattr(head, "bias", None) is not None:
        reason = f"its config has {scaled[0]}" if scaled else "its output layer has a bias"
        raise ConfigError(
            f"model='{model}' ({config.model_type}) cannot be trained: {reason}, which the fused log-probabilities lack."
        )
    policy.train()  # there is no dropout left; gradient checkpointing asks for it
    if gradient_checkpointing:
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return policy


def save_policy(policy: PreTrainedModel, tokenizer: Tokenizer, path: Path, *, dtype: torch.dtype | str | None) -> None:
    """Write a Hugging Face folder, aside first, so that ``path`` never holds half of one.

    Args:
        policy: the model.
        tokenizer: goes into the same folder.
        path: the folder; replaced if it is there.
        dtype: of the weights in the folder; None is the policy's own.
    """
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    dtype = dtype or policy.dtype
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        aside = Path(scratch) / path.name
        weights = {name: tensor.detach().to("cpu", dtype) for name, tensor in policy.state_dict().items()}
        policy.save_pretrained(aside, state_dict=weights)
        config = copy.deepcopy(policy.config)  # save_pretrained has written the masters' dtype into it
        config.dtype = dtype
        config.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        if path.exists():
            path.rename(Path(scratch) / "replaced")
        aside.rename(path)
