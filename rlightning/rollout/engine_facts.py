"""Facts about a running engine, such as versions and model files, and the check that they match the trainer's."""

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, TypedDict, Unpack

from rlightning.errors import EngineStartError

if TYPE_CHECKING:
    from rlightning.rollout.engine_config import EngineConfig

SHOWN = 5
"""Maximum number of differences in an error's message."""
MISSING = "nothing"
CHANGES_NUMBERS = re.compile(r"(^|\.)(quantization_config|compression_config|rope_\w+|\w*attention\w*)")
"""Keys of a model's configuration that are compared even if only trainer or engine has them."""


class EngineFacts(TypedDict, total=False):
    """Facts about an engine: the files of the model that it has read, package versions, and settings.

    ``adapter_targets`` are the names of the layers that it can adapt; None for all that vLLM can.
    """

    rlightning: str
    transformers: str
    files: Mapping[str, object]
    pid: int
    device: str
    dtype: str
    max_model_len: int
    tensor_parallel_size: int
    adapter_rank: int
    adapter_targets: Sequence[str] | None


def make_facts(**facts: Unpack[EngineFacts]) -> EngineFacts:
    """Return an engine's facts together with this process's versions of rlightning and transformers."""
    return {"rlightning": _own_version(), "transformers": version("transformers"), **facts}


def check_facts(config: "EngineConfig", engine: EngineFacts) -> None:
    """Raise an EngineStartError if an engine's settings or model files differ from those that the run needs.

    Raises:
        EngineStartError: names each difference, with the engine's value and the required one.
    """
    if config.files is None:  # the engine serves only other trainers
        return
    arguments = config.engine_args
    size = int(arguments.get("tensor_parallel_size") or 1)
    wanted = make_facts(dtype=str(config.dtype), tensor_parallel_size=size)
    is_same_reader = wanted.pop("transformers") == engine.get("transformers")
    if config.weight_folder is None:
        wanted["device"] = config.device.type  # NCCL connects CUDA devices, and gloo CPUs
    pairs = [(name, engine.get(name, MISSING), value) for name, value in wanted.items()]
    read, facts = engine.get("files", {}), config.files.facts
    # Another version of transformers may have further keys, each with a value that has no effect.
    names = [
        name
        for name in (*facts, *sorted(read.keys() - facts.keys()))
        if is_same_reader or (name in facts and name in read) or CHANGES_NUMBERS.search(name)
    ]
    pairs += [(name, read.get(name), facts.get(name)) for name in names]
    differences = [f"{name} {got}, not {value}" for name, got, value in pairs if got != value]
    length = arguments["max_model_len"]
    if engine.get("max_model_len", 0) < length:
        differences.append(f"max_model_len {engine.get('max_model_len')}, not {length} or more")
    # An engine with an adapter receives base and adapter separately, any other engine the merged weights.
    room, needed = engine.get("adapter_rank", 0), arguments["max_lora_rank"] if config.has_adapter else 0
    if room < needed or (room and not needed):
        differences.append(f"room for adapters of rank {room}, not {needed}")
    elif needed and (targets := engine.get("adapter_targets")) is not None:
        missing = sorted(set(arguments["lora_target_modules"]) - set(targets))
        if missing:
            differences.append(f"room for adapters of {', '.join(sorted(targets))}, not of {', '.join(missing)}")
    if differences:
        more = len(differences) - SHOWN
        listed = "; ".join(differences[:SHOWN]) + (f"; and {more} more" if more > 0 else "")
        place, way_out = "", f"The files of {arguments['model']} must stay as they were when the run began."
        if config.url:
            place = f" at {config.url}"
            way_out = "Start `rlightning serve` with the run's configuration and the same files of its model."
        raise EngineStartError(f"The engine{place} is not for this run. It has {listed}. {way_out}")


def _own_version() -> str:
    """Return the version of the installed package; "not installed" if it is imported from a source tree."""
    try:
        return version("rlightning")
    except PackageNotFoundError:
        return "not installed"
