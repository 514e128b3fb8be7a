"""The Hugging Face policy: loading it, packed attention, log-probabilities without [T, V] logits, exporting it."""

from rlightning.models.export import save_policy
from rlightning.models.logprobs import packed_logprobs
from rlightning.models.policy import hold_as_computed, load_config, load_policy, load_tokenizer
from rlightning.models.rotary import describe_length_limit, max_model_length

__all__ = [
    "describe_length_limit",
    "hold_as_computed",
    "load_config",
    "load_policy",
    "load_tokenizer",
    "max_model_length",
    "packed_logprobs",
    "save_policy",
]
