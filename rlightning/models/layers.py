"""A policy's decoder layers: finding them, compiling them, and recomputing their activations to save memory.

    hooks of FSDP (gather, cast) -> checkpoint -> compiled forward

One compilation serves all layers of a kind, all numbers of tokens and all numbers of sequences: the forward of the
layers' class is traced, with parameters as inputs. Checkpointing wraps the compiled forward, so that checkpointed and
other layers share the code; FSDP's hooks wrap both, so that a layer's weights are gathered only once in the backward.
"""

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rlightning.errors import ConfigError, RunError

BACKEND = "inductor"
"""Backend of ``torch.compile``."""
OPTIONS: dict[str, Any] = {"triton.mix_order_reduction_non_strict_mode": True}
"""Inductor's options, if its version has them. Without this one the fusion of a norm's backward depends on the number
of tokens, and different code is compiled for several ranges."""

Checkpointing = bool | Literal["auto"]
"""Whether layers recompute activations in the backward pass: all, none, or "auto" for as few as leave room."""

T = TypeVar("T")


def decoder_layers(policy: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder layers of a policy; raise a ConfigError if it has no list of them."""
    num_layers = policy.config.get_text_config().num_hidden_layers
    for module in policy.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise ConfigError(
        f"{type(policy).__name__} has no list of its {num_layers} layers, so it can be neither sharded, compiled nor "
        "checkpointed. Use trainer.strategy=ddp, model.compile=false and model.gradient_checkpointing=false."
    )


def is_compiled_by_setting(wanted: bool | None, device_type: str) -> bool:
    """Return whether layers are compiled on a host that has a compiler.

    ``wanted`` is the user's setting; None compiles only on CUDA.
    """
    return device_type == "cuda" if wanted is None else wanted


def should_compile(wanted: bool | None, device: torch.device) -> tuple[bool, str]:
    """Return whether layers should be compiled (:func:`is_compiled_by_setting`), and the reason for the log.

    Raises a ConfigError if ``wanted`` is True and the host has no compiler.
    """
    obstacle = compiler_obstacle(device)
    if wanted and obstacle:
        raise ConfigError(f"compile=true cannot be: {obstacle}. Leave model.compile out, or set it to false.")
    if not is_compiled_by_setting(wanted, device.type):
        return False, "layers are not compiled"
    if obstacle:
        return False, f"layers are not compiled, because {obstacle}"
    return True, f"layers are compiled when they run first (cache: {cache_folder()})"


def compiler_obstacle(device: torch.device) -> str | None:
    """Return why code cannot be compiled for a device; None if it can."""
    variable, names = ("CXX", ("g++", "clang++")) if device.type == "cpu" else ("CC", ("gcc", "clang"))
    if any(shutil.which(name) for name in (os.environ.get(variable, ""), *names)):
        return None
    return f"torch.compile needs {' or '.join(names)}, which are not on PATH"


def cache_folder() -> str:
    """Return the folder for compiled code, and set ``TORCHINDUCTOR_CACHE_DIR`` to it unless the user has: torch's
    default is in TMPDIR, which may be deleted with the job.
    """
    name = "TORCHINDUCTOR_CACHE_DIR"
    if os.environ.get(name) in (None, default_cache_dir()):  # torch may have set it to its default
        user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        os.environ[name] = str(Path(user_cache) / "rlightning/torchinductor")
    return os.environ[name]


def compile_layers(policy: PreTrainedModel) -> None:
    """Wrap each decoder layer's forward in ``torch.compile``, which compiles on the first call. Call this before
    :func:`checkpoint_layers`.

    The policy must have packed attention. It may be whole or sharded, on any device, including meta.
    """
    cache_folder()
    # It would split a layer's graph at the bounds of DDP's buckets. Gradients are already reduced between layers.
    torch._dynamo.config.optimize_ddp = False
    for module in policy.modules():
        # FSDP's mark makes torch.compile treat a module's integers, such as the head size, as variables.
        module._is_fsdp_managed_module = False  # type: ignore[assignment]
    for layer in decoder_layers(policy):
        layer.forward = _compile(layer.forward)


def checkpoint_layers(policy: PreTrainedModel, count: int) -> None:
    """Have the first ``count`` layers save only their inputs, and recompute their activations in the backward pass.

    The backward pass frees the last layers' activations first, so that checkpointing the first layers saves the most.
    """
    for layer in list(decoder_layers(policy))[:count]:
        # There is no dropout that would need the same random numbers again.
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def _compile(forward: Callable[..., T]) -> Callable[..., T]:
    options = {name: value for name, value in OPTIONS.items() if name in torch._inductor.list_options()}
    compiled = torch.compile(forward, dynamic=True, backend=BACKEND, options=options if BACKEND == "inductor" else None)

    @functools.wraps(forward)
    def run(hidden_states: Tensor, *args: object, **kwargs: object) -> T:
        if hidden_states.shape[1] == 1:  # the padding batch, for which torch.compile would make another graph
            return forward(hidden_states, *args, **kwargs)
        try:
            # A layer's own numbers, such as attention's scale, are constants: torch would trace again to detect it.
            with torch._dynamo.config.patch(specialize_float=True):
                return compiled(hidden_states, *args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = " ".join(str(error).strip().partition("\n\n")[0].split())[:300]
            raise RunError(
                f"torch.compile cannot compile the model's layers: {type(error).__name__}: {reason}. "
                "model.compile=false trains without it.",
                str(error),
            ) from error

    return run
