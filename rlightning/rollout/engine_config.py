"""How an engine is started, or what one that is served elsewhere has to be like."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rlightning.rollout.model_files import ModelFiles


EngineArguments = dict[str, Any]
"""Arguments of vLLM's AsyncEngineArgs, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How to start an engine, or what one that others have started has to be like.

    Attributes:
        engine_args: that it is started with.
        device: this rank's, as the trainer names it; the engine runs on it, or on others of its type.
        visible_devices: what CUDA calls the devices that the engine runs on, one a tensor-parallel worker; none: those
            that this process sees.
        dtype: what weights are sent in.
        log_file: the engine's output, appended.
        url: where an engine that others have started listens; "" is one of the trainer's own.
        weight_folder: where weights pass through, if nothing faster connects trainer and engine.
        can_sleep: whether it shares its device with an actor, so that sleeping pays.
        bucket_bytes: see :func:`~rlightning.rollout.weights.plan_chunks`.
        start_timeout: seconds until the engine must be up.
        hang_timeout: seconds without a heartbeat until it counts as dead; while it only samples, and has before,
            ``intervals.ENGINE_PROGRESS_TIMEOUT`` if that is less.
        environment: further variables of its process.
        files: of the model, as the trainer has read them; None for who only starts an engine for others.
        copies: the contents of the model folder's files but the weights, by name: what an engine needs to start again
            where the folder is gone.
    """

    engine_args: EngineArguments
    device: torch.device
    dtype: torch.dtype
    log_file: Path
    visible_devices: tuple[str, ...] = ()
    url: str = ""
    weight_folder: Path | None = None
    can_sleep: bool = False
    bucket_bytes: int = 2 << 30
    start_timeout: float = 600.0
    hang_timeout: float = 120.0
    environment: dict[str, str] = field(default_factory=dict)
    files: "ModelFiles | None" = None
    copies: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    @property
    def has_adapter(self) -> bool:
        """Whether the engine adds an adapter to the weights of a frozen base, which are sent apart."""
        return bool(self.engine_args.get("enable_lora"))

    @property
    def worker_devices(self) -> Sequence[str]:
        """See :class:`~rlightning.rollout.weights.driver.UpdatableEngine`."""
        return self.visible_devices or ("",) * int(self.engine_args.get("tensor_parallel_size") or 1)
