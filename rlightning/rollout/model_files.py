"""A model's files other than its weights, of which trainer and engines must have read the same content."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from rlightning.config.run_settings import flatten
from rlightning.models.remote_code import load_generation_config, read_config, read_tokenizer
from rlightning.protocols import HasBackend, has

IRRELEVANT = {"transformers_version", "dtype", "torch_dtype", "use_cache", "initializer_range"}
"""Keys of a model's configurations that do not affect sampled tokens."""
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
LARGEST_COPY = 64 << 20
"""Maximum bytes of a file that is copied; tokenizers take up to 35 MB."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's files as they were read when the run began.

    Attributes:
        tokenizer: decodes completions.
        end_token_ids: tokens that end a completion, according to tokenizer and generation configuration.
        facts: plain values, by name, that must be equal in trainer and engines.
    """

    tokenizer: Tokenizer
    end_token_ids: tuple[int, ...]
    facts: Mapping[str, Any]

    @classmethod
    def read(cls, model: str, *, trust_remote_code: bool = False) -> "ModelFiles":
        """Read a model's files with transformers alone, since an engine's process does not import the actor's code.

        Args:
            model: a folder, or a name on the Hugging Face hub.
            trust_remote_code: whether the model's own Python code may run.

        Raises:
            ConfigError: the model needs code that is not trusted.
            OSError, ValueError: the configuration or the tokenizer cannot be read.
        """
        config = read_config(model, trust_remote_code=trust_remote_code)
        tokenizer = read_tokenizer(model, trust_remote_code=trust_remote_code)
        generation = load_generation_config(model, config)
        ends = generation.eos_token_id if generation.eos_token_id is not None else []
        end_token_ids = {ends} if isinstance(ends, int) else set(ends)
        if tokenizer.eos_token_id is not None:
            end_token_ids.add(int(tokenizer.eos_token_id))
        facts = {
            **_relevant(flatten(config.to_dict())),
            **_relevant(flatten(generation.to_dict(), "generation_config")),
            **{name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            "special_token_ids": sorted(tokenizer.all_special_ids),
            "end_token_ids": sorted(end_token_ids),
            "tokenizer": digest_tokenizer(tokenizer),
        }
        # As JSON, in which an engine reports its facts.
        facts = json.loads(json.dumps(facts, default=str))
        return cls(tokenizer, tuple(sorted(end_token_ids)), facts)


def read_copies(model: str) -> dict[str, bytes]:
    """Return a local folder's files other than weights, each at most ``LARGEST_COPY`` bytes; empty for a hub name."""
    folder = Path(model)
    if not folder.is_dir():
        return {}
    files = (file for file in folder.iterdir() if file.suffix not in WEIGHT_SUFFIXES and file.is_file())
    return {file.name: file.read_bytes() for file in files if file.stat().st_size <= LARGEST_COPY}


def digest_tokenizer(tokenizer: Tokenizer) -> str:
    """Return a digest of everything that affects how a tokenizer encodes and decodes."""
    is_fast = has(tokenizer, HasBackend)
    content = tokenizer.backend_tokenizer.to_str() if is_fast else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.blake2b(content.encode(), digest_size=6).hexdigest()


def _relevant(values: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that may affect sampled tokens, by their names in JSON."""
    names = {name: name.rpartition(".")[2] for name in values}
    return {
        name: values[name]
        for name, last in names.items()
        if last not in IRRELEVANT and not last.startswith("_") and not last.endswith(("dropout", "pdrop"))
    }
