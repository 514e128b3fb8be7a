"""What an engine says of itself when it is up, and whether that is what a trainer needs."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rlightning.errors import EngineError
from rlightning.rollout.engine_link import VLLMConfig

DIMENSIONS = ("vocab_size", "hidden_size", "num_hidden_layers")
"""Of a model's configuration, that actor and engine must have in common."""


def make_hello(model_config: Any, **facts: Any) -> dict[str, Any]:
    """Versions, the model's Hugging Face configuration and further ``facts``."""
    return {"rlightning": _own_version(), **_describe_model(model_config), **facts}


def check_hello(config: VLLMConfig, model_config: Any, hello: dict[str, Any]) -> None:
    """Refuse an engine that was started for another run.

    Args:
        config: what the trainer would have started.
        model_config: the actor's Hugging Face configuration.
        hello: of the engine, from :func:`make_hello`.
    """
    arguments = config.engine_args
    size = int(arguments.get("tensor_parallel_size") or 1)
    wanted = make_hello(model_config, dtype=str(config.dtype), tensor_parallel_size=size)
    if config.weight_folder is None:
        wanted["device"] = config.device.type  # NCCL connects CUDA devices, and gloo CPUs
    got = {name: hello.get(name) for name in wanted}
    differences = [f"{name} {got[name]}, not {value}" for name, value in wanted.items() if got[name] != value]
    length = arguments["max_model_len"]
    if hello.get("max_model_len", 0) < length:
        differences.append(f"max_model_len {hello.get('max_model_len')}, not {length} or more")
    if differences:
        raise EngineError(
            f"The engine at {config.url} is not for this run. It has {'; '.join(differences)}. "
            "Start `rlightning serve` with the run's configuration."
        )


def _describe_model(model_config: Any) -> dict[str, Any]:
    text = model_config.get_text_config()
    sizes = {name: getattr(text, name, None) for name in DIMENSIONS}
    return {"architectures": list(model_config.architectures or ()), **sizes}


def _own_version() -> str:
    """Of the installed package; a source tree that is only on the path has none."""
    try:
        return version("rlightning")
    except PackageNotFoundError:
        return "not installed"
