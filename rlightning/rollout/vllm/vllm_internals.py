"""Private names of vLLM that have no public equivalent; tests/test_library_internals.py checks each."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.worker_manager import WorkerLoRAManager


def keep_linears_unpacked() -> None:
    """Have vLLM keep the unpacked weights of linear layers on a CPU.

    vLLM packs each weight for oneDNN, or on a CPU with AMX a small one of half precision for its own kernel, and drops
    the original, so that no further weights could be loaded.
    """
    from vllm import _custom_ops  # loads the kernels
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False


def adapters_of(manager: "WorkerLoRAManager") -> "LoRAModelManager":
    """Return the object that stores, adds and activates the adapters of a worker's model."""
    return manager._adapter_manager


def forget_last_mapping(adapters: "LoRAModelManager") -> None:
    """Have vLLM set up adapters again for the next batch, even if the last one used the same.

    Before vLLM 0.28 ``remove_all_adapters()`` does not clear the record of the last batch's adapters.
    """
    adapters._last_mapping = None
