"""What the trainer takes of a rank's device.

Letters: ``T`` tokens of a micro-batch, ``C`` those of a chunk of logits, ``E`` hidden size, ``V`` vocabulary, or a
tensor-parallel rank's part of it.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from rlightning.memory_plan.activations import KEPT, UPDATE, ActivationBytes, Bytes, Decoder, fit_activations
from rlightning.memory_plan.work import Work
from rlightning.models.counts import Weights, count_weights, head_size
from rlightning.models.output_layer import chunk_tokens
from rlightning.optim import StoredMomentsAdamW
from rlightning.optim.moments import bytes_per_parameter
from rlightning.parallel.gathering import GATHER_BYTES
from rlightning.rollout.weights import plan_chunks


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes that the trainer takes of a device.

    Args:
        work: the run.
    """

    work: Work

    @cached_property
    def weights(self) -> Weights:
        """The actor's."""
        return self._count(self.work.config)

    def _count(self, config: Any) -> Weights:
        parallelism = self.work.parallelism
        return count_weights(
            config, tensor_parallel_size=parallelism.tensor_parallel_size, shard_size=parallelism.shard_size
        )

    @property
    def num_layers(self) -> int:
        """Of the actor."""
        count: int = self.work.config.get_text_config().num_hidden_layers
        return count

    @property
    def _is_on_host(self) -> bool:
        return self.work.parallelism.cpu_offload == "parameters"

    @property
    def _is_state_on_host(self) -> bool:
        return self.work.parallelism.cpu_offload != "none"

    # What stays

    def parameters(self) -> int:
        """The actor's, as they are kept: masters, or a rank's shard of them."""
        return 0 if self._is_on_host else self.work.master_itemsize * self.weights.held

    def reference_model(self) -> int:
        """The reference's parameters, held as they are computed with."""
        if self.work.reference is None or self._is_on_host:
            return 0
        return self.work.compute_itemsize * self._count(self.work.reference).held

    def optimizer_state(self) -> int:
        """AdamW's two moments, as they are kept between steps."""
        if self._is_state_on_host:
            return 0
        return int(bytes_per_parameter(self.work.optimizer_states, self.work.master_itemsize) * self.weights.held)

    def moments_at_a_time(self) -> int:
        """Those that a step has on the device as it computes with them, where it takes them out of another form."""
        if self._is_on_host or (self.work.optimizer_states == "float32" and not self._is_state_on_host):
            return 0
        most, largest = (2 * self.work.master_itemsize * size for size in (self.weights.held, self.weights.largest))
        return min(max(StoredMomentsAdamW.bytes_at_a_time, largest), most)

    def gradients(self) -> int:
        """As the optimizer reads them, and what strategies keep beside that."""
        work, parallelism = self.work, self.work.parallelism
        own = 0 if self._is_on_host else work.master_itemsize * self.weights.held
        if parallelism.has_gradient_buckets:
            own += work.master_itemsize * self.weights.held
        if parallelism.kind == "fsdp" and not parallelism.reduce_every_microbatch:
            own += 4 * (self.weights.layers + self.weights.root)
        return own

    # What comes and goes

    def gathered_parameters(self) -> int:
        """FSDP's whole weights in the forward's dtype: embedding and output layer, and two layers, or all of them."""
        parallelism, weights = self.work.parallelism, self.weights
        if parallelism.kind != "fsdp":
            return 0
        layers = min(2 * weights.layer, weights.layers) if parallelism.reshard_after_forward else weights.layers
        return self.work.compute_itemsize * (weights.root + layers)

    def weight_bucket(self) -> int:
        """That weights travel to the engine through; to a remote one, from rank 0."""
        rollout = self.work.rollout
        if rollout is None:
            return 0
        dtype = torch.bfloat16 if rollout.itemsize == 2 else torch.float32
        return plan_chunks(self.weights.shapes, dtype, rollout.bucket_bytes)[1]

    def gathering_window(self) -> int:
        """What gathers shards for the bucket, beyond it (parallel/gathering.py)."""
        rollout, parallelism = self.work.rollout, self.work.parallelism
        if rollout is None or parallelism.kind != "fsdp":
            return 0
        holders = parallelism.shard_size * parallelism.tensor_parallel_size
        window = max(GATHER_BYTES, rollout.itemsize * self.weights.largest)
        return window if holders == 1 else int((1 + 1 / holders) * window)

    def logits_chunk(self, tokens: int, *, has_gradient: bool) -> int:
        """Of models/output_layer.py on a GPU: logits [C, V] in the forward's dtype, whose gradient takes their place.

        Beside them the last hidden states [T, E] that were picked, with their gradient, the output layer's gradient
        [V, E] in float32, and under autocast its weights in bfloat16. At the end the gradient is cast where it has to
        be, when the logits are gone.
        """
        work, head = self.work, self.weights.head
        text_config: Any = work.config.get_text_config()
        row: int = work.compute_itemsize * -(-text_config.vocab_size // work.parallelism.tensor_parallel_size)
        states: int = work.compute_itemsize * tokens * text_config.hidden_size
        chunk = row * min(tokens, chunk_tokens(row)) + (work.compute_itemsize * head if work.is_autocast else 0)
        if not has_gradient:
            return chunk + states
        cast = 0 if self._head_itemsize == 4 else self._head_itemsize * head
        return 2 * states + 4 * head + max(chunk, cast)

    def layer_backward(self, activations: ActivationBytes) -> int:
        """What the backward of a layer takes beyond the activations that were kept, but for the attention kernel.

        A tied embedding's gradient of the output layer waits until the last of the backward. FSDP has a layer's
        gradients whole twice: as they were computed, and in float32 to be summed over the ranks.
        """
        waiting = self._head_itemsize * self.weights.head if self.weights.is_tied else 0
        is_sharded = self.work.parallelism.kind == "fsdp"
        whole = (self.work.compute_itemsize + 4) * self.weights.layer if is_sharded else 0
        return int(activations.backward - activations.kept) + waiting + whole

    def attention_workspace(self, tokens: int) -> int:
        """The queries' gradients [T, heads, head size], which the attention kernel sums in float32."""
        heads: int = self.work.config.get_text_config().num_attention_heads
        return 4 * tokens * head_size(self.work.config) * heads // self.work.parallelism.tensor_parallel_size

    @property
    def _head_itemsize(self) -> int:
        """Bytes of a number in the gradient of the output layer."""
        return 4 if self.work.is_autocast else self.work.compute_itemsize

    def activations(self, tokens: int, checkpointed_layers: int = 0) -> ActivationBytes:
        """Those of a micro-batch, where the first layers keep their inputs only and the others everything.

        The backward begins with the others, so its peak is theirs.
        """
        if checkpointed_layers == self.num_layers:
            return ActivationBytes(*self._traced(tokens, is_checkpointed=True).tolist())
        found = self._traced(tokens, is_checkpointed=False)
        if checkpointed_layers:
            saved = (found - self._traced(tokens, is_checkpointed=True)) @ KEPT
            found = found - saved * checkpointed_layers / self.num_layers * UPDATE
        return ActivationBytes(*found.tolist())

    def _traced(self, tokens: int, *, is_checkpointed: bool) -> Bytes:
        work = self.work
        decoder = Decoder(
            dtype=torch.float32 if work.precision == "32-true" or work.is_autocast else torch.bfloat16,
            is_autocast=work.is_autocast,
            gradient_checkpointing=is_checkpointed,
            is_compiled=work.is_compiled,
            tensor_parallel_size=work.parallelism.tensor_parallel_size,
        )
        fixed, slope = fit_activations(work.config, decoder, work.longest)
        return fixed + slope * tokens
