"""Finds out from vLLM's source whether it supports adapters for a model."""

import ast
import inspect
import re
import textwrap
from functools import cache

from transformers import PreTrainedConfig

from rlightning.models.counts import build_empty
from rlightning.protocols import AdapterSettings
from rlightning.rollout.engine_config import EngineArguments
from rlightning.rollout.vllm.vllm_source import source_of
from rlightning.syntax_tree import parse_source

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters for which vLLM can allocate memory."""
ADAPTER_ARGUMENTS = ("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_target_modules")
"""Engine arguments that reserve memory for an adapter."""
SUPPORTS = "SupportsLoRA"
MODELS = "vllm.model_executor.models"
TRANSFORMERS = f"{MODELS}.transformers"
"""Package of vLLM's classes that run a model's code of transformers."""


def supported_rank(rank: int) -> int:
    """Return the smallest maximum rank that vLLM supports and that is at least ``rank``."""
    return next((size for size in RANKS if size >= rank), rank)


def place_bytes(adapter: AdapterSettings, itemsize: int) -> int:
    """Return the bytes of vLLM's buffers for an adapter, whose rank is rounded up as in :func:`supported_rank`."""
    return (
        itemsize * supported_rank(adapter.rank) * sum(outputs + inputs for outputs, inputs in adapter.modules.values())
    )


def engine_arguments(adapter: AdapterSettings) -> EngineArguments:
    """Return engine arguments that reserve memory for one adapter, only in the layers that it adapts."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": supported_rank(adapter.rank),
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in adapter.modules}),
    }


def without_adapter(arguments: EngineArguments) -> EngineArguments:
    """Return engine arguments without those of :func:`engine_arguments`, for merged weights."""
    return {name: value for name, value in arguments.items() if name not in ADAPTER_ARGUMENTS}


def find_obstacle(adapter: AdapterSettings, config: PreTrainedConfig) -> str | None:
    """Return why vLLM cannot apply an adapter to a model; None if it can, as far as its source shows.

    Others show later: a layer that vLLM cannot wrap when the engine starts (AdapterRefusedError), a layer without a
    counterpart in the engine at the first sync.
    """
    if adapter.rank > RANKS[-1]:
        return f"vLLM takes ranks of up to {RANKS[-1]}, not {adapter.rank}"
    names = config.architectures or []
    found = next((place for name in names if (place := find_model_class(name)) is not None), None)
    if found is None:
        return f"vLLM has no model class of its own for {' or '.join(names) or config.model_type}"
    if not supports_adapters(*found):
        return f"vLLM's {found[1]} takes no adapters"
    packed = find_packed_projection(adapter, config) if found[0] == TRANSFORMERS else None
    if packed is not None:
        return f"vLLM's {found[1]} takes no adapter of {packed}, one layer for queries, keys and values"
    return None


def find_packed_projection(adapter: AdapterSettings, config: PreTrainedConfig) -> str | None:
    """Return the first adapted layer whose outputs the model's code splits into queries, keys and values; None without.

    vLLM's Transformers backend (its PackedQKVFuser) replaces such a layer by a QKVParallelLinear, which it cannot wrap.
    A split in a branch that the model does not take counts, too: then the adapter is merged without need.
    """
    policy = build_empty(config)
    first: dict[tuple[type, str], str] = {}  # names by the class of the module above and the layer's name in it
    for name in adapter.modules:
        parent, _, attribute = name.rpartition(".")
        first.setdefault((type(policy.get_submodule(parent)), attribute), name)
    return next((name for (module, attribute), name in first.items() if _is_split_in_three(module, attribute)), None)


@cache
def find_model_class(architecture: str) -> tuple[str, str] | None:
    """Return the module and the name of vLLM's class for an architecture; None if vLLM has no such class."""
    registry = source_of(f"{MODELS}.registry")
    entry = re.search(rf'"{re.escape(architecture)}":\s*\(\s*"([\w.]+)",\s*"(\w+)"', registry)
    if entry is None:
        return None
    module = entry[1] if entry[1].startswith("vllm.") else f"{MODELS}.{entry[1]}"
    return module, entry[2]


@cache
def supports_adapters(module: str, name: str) -> bool:
    """Return whether a class, or one of its bases, supports adapters."""
    tree = parse_source(source_of(module))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        return False
    origins = {
        alias.asname or alias.name: (_absolute(node, module), alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name)]
    return any(
        base == SUPPORTS
        or (base in classes and supports_adapters(module, base))
        or (base in origins and origins[base][0].startswith(f"{MODELS}.") and supports_adapters(*origins[base]))
        for base in bases
    )


def _is_split_in_three(module: type, attribute: str) -> bool:
    """Return whether a module's ``forward`` has a call such as ``self.c_attn(x).split((q, k, v))`` of a submodule."""
    try:
        tree = parse_source(
            textwrap.dedent(inspect.getsource(module.forward if hasattr(module, "forward") else module))
        )
    except (OSError, TypeError, SyntaxError):  # no file, or not a function's own lines
        return False
    calls = [(node, node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return any(
        isinstance(function, ast.Attribute)
        and function.attr == "split"
        and bool(call.args)
        and isinstance(call.args[0], ast.Tuple | ast.List)
        and len(call.args[0].elts) == 3
        and any(isinstance(node, ast.Attribute) and node.attr == attribute for node in ast.walk(function))
        for call, function in calls
    )


def _absolute(node: ast.ImportFrom, module: str) -> str:
    """Return the absolute name of the module that an import statement names."""
    if not node.level:
        return node.module or ""
    package = module.rsplit(".", node.level)[0]
    return f"{package}.{node.module}" if node.module else package
