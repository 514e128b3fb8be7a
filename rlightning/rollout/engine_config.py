"""The configuration of one engine: how to start it, or the requirements on an engine served elsewhere."""

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
    """How to start an engine, or the requirements on an engine served elsewhere.

    Attributes:
        engine_args: vLLM's arguments.
        device: the rank's device; the engine runs on it, or on other devices of its type.
        visible_devices: value of ``CUDA_VISIBLE_DEVICES``, one device for each tensor-parallel worker; empty for all
            devices that are visible to this process.
        dtype: dtype in which weights are sent.
        log_file: file to which the engine's output is appended.
        url: URL of an engine served elsewhere; "" if the trainer starts the engine.
        weight_folder: folder for weights that are sent as files, if no faster transport connects trainer and engine.
        can_sleep: whether the engine shares its device with an actor, and sleeps during updates.
        bucket_bytes: see :func:`~rlightning.rollout.weights.plan_chunks`.
        start_timeout: maximum seconds until the engine is up.
        hang_timeout: seconds without a heartbeat after which the engine counts as dead; at most
            ``intervals.ENGINE_PROGRESS_TIMEOUT`` while it samples, except for its first samples.
        may_merge: whether an engine that cannot start with room for the adapter is started again for merged weights.
        environment: additional environment variables of the engine's process.
        files: the model's files, as the trainer has read them; None in ``rlightning serve``.
        copies: contents, by name, of the model folder's files other than weights, with which an engine can be restarted
            after the folder was deleted.
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
    may_merge: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    files: "ModelFiles | None" = None
    copies: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    @property
    def has_adapter(self) -> bool:
        """Whether the engine applies an adapter to frozen base weights, and receives both separately."""
        return bool(self.engine_args.get("enable_lora"))

    @property
    def worker_devices(self) -> Sequence[str]:
        """The name of each worker's device, unique over all hosts (:attr:`UpdatableEngine.worker_devices`)."""
        return self.visible_devices or ("",) * int(self.engine_args.get("tensor_parallel_size") or 1)
