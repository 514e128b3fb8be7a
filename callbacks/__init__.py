"""All callbacks, one in each file. Import them as ``rlightning.callbacks``."""

from typing import TYPE_CHECKING

from rlightning.lazy import lazy_import

if TYPE_CHECKING:
    from rlightning.callbacks.completions_table import CompletionsTable
    from rlightning.callbacks.controller_mode import ControllerMode
    from rlightning.callbacks.device_sync_before_barrier import DeviceSyncBeforeBarrier
    from rlightning.callbacks.empty_cache_after_update import EmptyCacheAfterUpdate
    from rlightning.callbacks.make_room_for_engine import MakeRoomForEngine
    from rlightning.callbacks.offload_during_rollout import OffloadDuringRollout
    from rlightning.callbacks.predictions import JSONLPredictions
    from rlightning.callbacks.progress_bar import RLProgressBar
    from rlightning.callbacks.remotize_on_head_only import RemotizeOnHeadOnly
    from rlightning.callbacks.run_report import RunReport
    from rlightning.callbacks.save_hf import SaveHF
    from rlightning.callbacks.throughput import Throughput
    from rlightning.callbacks.transformers_rollout import TransformersRollout
    from rlightning.callbacks.vllm_rollout import VLLMRollout

__all__ = [
    "CompletionsTable",
    "ControllerMode",
    "DeviceSyncBeforeBarrier",
    "EmptyCacheAfterUpdate",
    "JSONLPredictions",
    "MakeRoomForEngine",
    "OffloadDuringRollout",
    "RLProgressBar",
    "RemotizeOnHeadOnly",
    "RunReport",
    "SaveHF",
    "Throughput",
    "TransformersRollout",
    "VLLMRollout",
]

# Unused callbacks cost no import time.
__getattr__ = lazy_import(
    __name__,
    {
        "CompletionsTable": "completions_table",
        "ControllerMode": "controller_mode",
        "DeviceSyncBeforeBarrier": "device_sync_before_barrier",
        "EmptyCacheAfterUpdate": "empty_cache_after_update",
        "JSONLPredictions": "predictions",
        "MakeRoomForEngine": "make_room_for_engine",
        "OffloadDuringRollout": "offload_during_rollout",
        "RLProgressBar": "progress_bar",
        "RemotizeOnHeadOnly": "remotize_on_head_only",
        "RolloutCallback": "rollout",
        "RunReport": "run_report",
        "SaveHF": "save_hf",
        "Throughput": "throughput",
        "TransformersRollout": "transformers_rollout",
        "VLLMRollout": "vllm_rollout",
    },
)

if __name__ != "rlightning.callbacks":
    raise ImportError(f"imported as '{__name__}': two copies of a class break isinstance. Import rlightning.callbacks.")
