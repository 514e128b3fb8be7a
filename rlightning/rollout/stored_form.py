"""Weights in the form in which a model's files hold them.

transformers runs some weights under other names than it stores them, and those of experts as one tensor a layer where
the files have one an expert. vLLM loads what files hold.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from rlightning.models.remote_code import read_config


class StoredForm:
    """Converts weights, one by one, from the form that a policy has them in.

    Args:
        model: a folder, or a name on the Hugging Face hub.
        trust_remote_code: whether code that the model brings may run.
    """

    def __init__(self, model: str, *, trust_remote_code: bool = False) -> None:
        config = read_config(model, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            policy: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        self._policy = policy if get_model_conversion_mapping(policy, add_legacy=False) else None

    def convert(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors that a file holds in a weight's place; most often the weight itself."""
        if self._policy is None:
            yield name, weight
        else:
            yield from revert_weight_conversion(self._policy, {name: weight}).items()
