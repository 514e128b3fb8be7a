"""Loads a Hugging Face causal language model as a policy."""

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from rlightning.errors import ConfigError, did_you_mean
from rlightning.foreign_text import cut_line
from rlightning.models.architecture import BUILD_ERRORS, check_config, check_policy
from rlightning.models.attention import PACKED_ATTENTION
from rlightning.models.files import other_shape, untied_head
from rlightning.models.remote_code import read_config, read_tokenizer
from rlightning.models.routers import keep_routers_float32


def load_config(model: str, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Return a model's configuration, after a check that the architecture can be trained; no weights are loaded.

    Args:
        model: a folder, or a name on the Hugging Face hub.
        trust_remote_code: whether the model's own code may run; once trusted, later loads in this process use it.

    Raises:
        ConfigError: there is no configuration, it needs code that is not trusted, or the architecture cannot be
            trained.
    """
    path = Path(model)
    if not path.is_dir() and (
        path.is_absolute()
        or model.startswith((".", "~"))
        or model.count("/") > 1
        or (path.parent.is_dir() and "/" in model)
    ):
        siblings = sorted(p.name for p in path.parent.iterdir() if p.is_dir()) if path.parent.is_dir() else []
        hint = f" {did_you_mean(path.name, siblings)}" if siblings else ""
        raise ConfigError(f"model='{model}' is not a folder, nor can it be a hub name.{hint}")
    try:
        config = read_config(model, trust_remote_code=trust_remote_code)
    except ConfigError:
        raise
    except (OSError, StrictDataclassError, *BUILD_ERRORS) as error:
        near = get_close_matches(model, [folder.name for folder in Path().iterdir() if folder.is_dir()], n=1)
        if near and not path.is_dir():
            raise ConfigError(
                f"model='{model}' is not a folder, nor a name that the Hugging Face hub has given a model for. Did you "
                f"mean the folder '{near[0]}'?"
            ) from error
        raise ConfigError(f"model='{model}' has no readable config.json: {cut_line(error)}") from error
    check_config(model, config)
    return config


def load_tokenizer(model: str, *, trust_remote_code: bool = False) -> Tokenizer:
    """Return a model's tokenizer. ``trust_remote_code`` is whether the model's own code may run.

    Raises a ConfigError if there is no tokenizer, or it needs code that is not trusted.
    """
    try:
        tokenizer = read_tokenizer(model, trust_remote_code=trust_remote_code)
    except ConfigError:
        raise
    except (OSError, RecursionError, ValueError) as error:
        raise ConfigError(f"model='{model}' has no readable tokenizer: {cut_line(error)}") from error
    if tokenizer.get_vocab().keys() <= {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}:
        raise ConfigError(  # transformers then creates one that has no tokens for any text
            f"model='{model}' has no tokenizer: none of its files has tokens. Copy tokenizer.json and "
            "tokenizer_config.json there from the model that it comes from."
        )
    return tokenizer


def remove_dropout(config: PreTrainedConfig) -> None:
    """Set all dropout rates in a configuration to 0, since a policy's log-probabilities must be deterministic."""
    text_config = config.get_text_config()
    for name, value in vars(text_config).items():
        if name.endswith(("dropout", "pdrop", "layerdrop")) and isinstance(value, float):
            setattr(text_config, name, 0.0)


@contextmanager
def without_loading_bar() -> Iterator[None]:
    """Context manager in which transformers shows no progress bar for loading weights; downloads still have one."""
    if not is_progress_bar_enabled():
        yield
        return
    shows_downloads = not are_progress_bars_disabled()
    disable_progress_bar()  # disables the hub's progress bars, too
    if shows_downloads:
        enable_progress_bars()
    try:
        yield
    finally:
        if shows_downloads:  # shown again only if the user shows the hub's
            enable_progress_bar()


def load_policy(model: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a causal language model without dropout, whose attention supports packed sequences.

    Args:
        model: a folder, or a name on the Hugging Face hub.
        dtype: dtype of the parameters, independent of the files' dtype.

    Raises:
        ConfigError: if weights are missing, or attention over packed sequences is not supported.
    """
    config = load_config(model)
    remove_dropout(config)
    policy: PreTrainedModel
    loaded: dict[str, Any]
    try:
        with without_loading_bar():
            policy, loaded = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
                model,
                config=config,
                dtype=dtype,
                attn_implementation=PACKED_ATTENTION,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # rejected below, with the names of the weights
            )
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model='{model}' has no readable weights: {cut_line(error)}") from error
    for name, stored, shape in sorted(loaded["mismatched_keys"]):
        raise other_shape(model, name, stored, shape)
    if loaded["missing_keys"]:  # transformers has filled them with random numbers
        missing = sorted(loaded["missing_keys"])
        raise ConfigError(
            f"model='{model}' lacks {len(missing)} of its weights, such as '{missing[0]}'. Use a whole model's folder."
        )
    embedding, head = policy.get_input_embeddings(), policy.get_output_embeddings()
    if config.get_text_config().tie_word_embeddings and head is not None and head.weight is not embedding.weight:
        names = {id(weight): name for name, weight in policy.named_parameters(remove_duplicate=False)}
        raise untied_head(model, names[id(embedding.weight)], names[id(head.weight)])
    policy.train()  # there is no dropout left
    check_policy(model, policy)
    narrow_residuals(policy)
    keep_routers_float32(policy)
    return policy


def narrow_residuals(policy: PreTrainedModel) -> None:
    """Have the token embedding's output cast to autocast's dtype while autocast is enabled, so that the residual stream
    has that dtype, as with FSDP's mixed precision and in vLLM.

    Otherwise the residual stream is in the embeddings' float32, with twice the memory and memory traffic.
    """

    def cast(module: nn.Module, inputs: object, embedded: Tensor) -> Tensor:
        kind = embedded.device.type
        return embedded.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else embedded

    policy.get_input_embeddings().register_forward_hook(cast)
