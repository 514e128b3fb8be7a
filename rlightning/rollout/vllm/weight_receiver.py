"""What rlightning adds to each of vLLM's workers: it receives weights. Loaded by vLLM as ``worker_extension_cls``."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from vllm import _custom_ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform

from rlightning.parallel.device import synchronize_stream
from rlightning.processes.process_group import die_with_parent
from rlightning.rollout.load_check import ReadWeights, unset_parameters
from rlightning.rollout.packed_weights import keep_experts_unpacked, pack_weights, unpack_weights
from rlightning.rollout.stored_form import StoredForm
from rlightning.rollout.weights import ReceivingEnd, open_end

die_with_parent()  # the workers must not outlive an engine process that is killed and can end nobody any more

if current_platform.is_cpu():
    # With oneDNN vLLM packs each linear's weight and drops the original, and nothing can be loaded into it again.
    _custom_ops._supports_onednn = False
    keep_experts_unpacked()


class WeightReceiver:
    """Mixed into vLLM's worker; its methods are called by ``AsyncLLM.collective_rpc``."""

    model_runner: Any
    vllm_config: VllmConfig
    device: torch.device
    rank: int
    _rl_end: ReceivingEnd | None = None
    _rl_stored_form: StoredForm | None = None
    _rl_loaded: set[str]
    _rl_unread: set[str]
    _rl_is_checked = False

    def rl_open_bucket(self, handles: list[bytes]) -> None:
        """Open this worker's end of the way that weights will come; an end that it had before is left."""
        if self._rl_end is not None:
            self._rl_end.close()
            self._rl_end = None
        self._rl_end = open_end(handles[self.rank], torch.device(self.device))
        if self._rl_stored_form is None:
            with set_current_vllm_config(self.vllm_config):  # vLLM's transformers backend has changed the classes
                self._rl_stored_form = StoredForm(
                    self.vllm_config.model_config.model,
                    trust_remote_code=self.vllm_config.model_config.trust_remote_code,
                )

    def rl_load_chunk(self, index: int) -> tuple[list[str], list[str]]:
        """Wait for a chunk, and load it.

        Returns:
            After the last chunk, the model's parameters that no chunk of this sync has set; after that of the first
            sync, also the weights that the model has not taken. Else nothing.
        """
        assert self._rl_end is not None and self._rl_stored_form is not None, "rl_open_bucket comes first"
        stored_form = self._rl_stored_form
        model = self.model_runner.model
        if index == 0:
            self._rl_loaded, self._rl_unread = set(), set()
            unpack_weights(model)
        received = self._rl_end.receive(index)
        latest: tuple[str, tuple[int, ...]] = ("", ())

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal latest
            for name, tensor in received:
                latest = (name, tuple(tensor.shape))
                yield from stored_form.convert(name, tensor)

        reads = ReadWeights()
        try:
            with nullcontext() if self._rl_is_checked else reads:
                self._rl_loaded |= set(model.load_weights(reads.watch(weights())) or ())
        except (AssertionError, KeyError, RuntimeError, ValueError) as error:
            name, shape = latest
            raise ValueError(
                f"the actor's {name} {shape} does not fit the engine's model: "
                f"{type(error).__name__} {error}. The engine must be of the actor's architecture."
            ) from error
        synchronize_stream(self.device)  # the sender refills the bucket after this returns
        if not self._rl_is_checked:
            self._rl_unread |= reads.unread()
        if index < self._rl_end.num_chunks - 1:
            return [], []
        pack_weights(model, self.vllm_config.model_config.dtype)  # type: ignore[arg-type]  # a torch.dtype by now
        self._rl_is_checked = True  # the names of later syncs are the same
        return sorted(unset_parameters(model, self._rl_loaded)), sorted(self._rl_unread)

    def rl_ping(self) -> None:
        """Answer, which a worker that hangs does not."""
