"""The trainer's memory on a rank's device.

Letters: ``T`` tokens of a micro-batch, ``C`` tokens of a chunk of logits, ``E`` hidden size, ``V`` vocabulary, or the
part of a tensor-parallel rank.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import PreTrainedConfig

from rlightning.memory_plan.activations import ActivationBytes, Decoder, fit_activations
from rlightning.memory_plan.work import Work
from rlightning.models.adapter import LoRA
from rlightning.models.counts import Weights, count_weights, head_size
from rlightning.models.output_layer import chunk_tokens
from rlightning.models.quantized import COMPUTING_BYTES, coded_bytes
from rlightning.optim import OptimizerStates, StoredMomentsAdamW
from rlightning.optim.moments import bytes_per_parameter
from rlightning.parallel.gathering import GATHER_BYTES
from rlightning.rollout.weights import plan_chunks

SUPPORT_BYTES = 4 * 5
"""Bytes of each token of a support in an update: its id, and four float32 values; on a CPU 3.3 values were measured."""


@dataclass(frozen=True)
class TrainerMemory:
    """Computes the bytes that the trainer takes on a device."""

    work: Work

    @cached_property
    def weights(self) -> Weights:
        """Parameter counts of the actor."""
        return self._count(self.work.config)

    @cached_property
    def adapter(self) -> Weights | None:
        """Parameter counts of the actor's adapter; None without one."""
        lora, shard_size = self.work.adapter, self.work.parallelism.shard_size
        if lora is None:
            return None
        shapes = [shape for _, shape in lora.shapes]
        return Weights(
            total=lora.num_parameters,
            held=sum(-(-rows // shard_size) * columns for rows, columns in shapes),
            layer=-(-lora.num_parameters // self.num_layers),
            layers=lora.num_parameters,
            root=0,
            head=0,
            largest=max(rows * columns for rows, columns in shapes),
            is_tied=False,
            shapes=tuple(lora.shapes),
        )

    @cached_property
    def _trained(self) -> list[tuple[Weights, OptimizerStates]]:
        """The trained models, the actor first: parameter counts, and format of the optimizer state."""
        others = (
            (self._count(role.config), role.optimizer_states)
            for role in self.work.others
            if role.config is not None and role.optimizer_states is not None
        )
        return [(self.adapter or self.weights, self.work.optimizer_states), *others]

    def _count(self, config: PreTrainedConfig) -> Weights:
        parallelism = self.work.parallelism
        return count_weights(
            config, tensor_parallel_size=parallelism.tensor_parallel_size, shard_size=parallelism.shard_size
        )

    @property
    def num_layers(self) -> int:
        """Number of the actor's layers."""
        count: int = self.work.config.get_text_config().num_hidden_layers
        return count

    @property
    def _held(self) -> int:
        """Bytes of the trained parameters that a rank stores: all, or its shards."""
        return self.work.master_itemsize * sum(weights.held for weights, _ in self._trained)

    @property
    def _forward_dtype(self) -> torch.dtype:
        """The dtype of trained weights in the forward pass, and of the gradients that the backward pass computes."""
        return torch.float32 if self.work.is_autocast or self.work.compute_itemsize == 4 else torch.bfloat16

    @property
    def _is_on_host(self) -> bool:
        return self.work.parallelism.cpu_offload == "parameters"

    @property
    def _is_state_on_host(self) -> bool:
        return self.work.parallelism.cpu_offload != "none"

    # Memory that is used in all phases

    def parameters(self) -> int:
        """Return the bytes of trained parameters on the device; 0 if they are offloaded to the host."""
        return 0 if self._is_on_host else self._held

    def frozen_models(self) -> int:
        """Return the bytes of frozen parameters on the device: those of other models, and of an adapter's base."""
        if self._is_on_host:
            return 0
        frozen = (role.config for role in self.work.others if role.optimizer_states is None)
        held = sum(self._count(config).held for config in frozen if config is not None)
        return self.work.compute_itemsize * held + self._base()

    def _base(self) -> int:
        """Return the bytes of an adapter's base model, which may be quantised; 0 without an adapter."""
        lora, itemsize = self.work.adapter, self.work.compute_itemsize
        if lora is None:
            return 0
        if lora.quantize_base is None:
            return itemsize * self.weights.held
        layers = lora.quantized.values()
        codes = sum(coded_bytes(lora.quantize_base, *sizes, itemsize) for sizes in layers)
        return codes + itemsize * (self.weights.held - sum(math.prod(sizes) for sizes in layers))

    def optimizer_state(self) -> int:
        """Return the bytes of AdamW's two moments on the device between steps; 0 if they are kept on the host."""
        if self._is_state_on_host:
            return 0
        total, itemsize = 0, self.work.master_itemsize
        for weights, states in self._trained:
            shapes = [shape for _, shape in weights.shapes]
            total += int(bytes_per_parameter(states, shapes, itemsize) * weights.held)
        return total

    def moments_at_a_time(self) -> int:
        """Return the peak bytes of the moments that an optimizer step unpacks on the device because they are stored in
        a compact format or on the host; 0 if there are none.
        """
        if self._is_on_host:
            return 0
        number = 2 * self.work.master_itemsize
        stored = (weights for weights, states in self._trained if states != "float32" or self._is_state_on_host)
        sizes = ((number * weights.held, number * weights.largest) for weights in stored)
        return max((min(max(StoredMomentsAdamW.bytes_at_a_time, largest), most) for most, largest in sizes), default=0)

    def gradients(self) -> int:
        """Return the bytes of gradients, and of the copies of them that a strategy keeps."""
        parallelism = self.work.parallelism
        total = self.parameters()
        if parallelism.has_gradient_buckets:
            total += self._held
        if parallelism.kind == "fsdp" and not parallelism.reduce_every_microbatch:
            total += 4 * sum(weights.layers + weights.root for weights, _ in self._trained)
        return total

    # Memory of single phases

    def gathered_parameters(self) -> int:
        """Return the peak bytes of parameters that FSDP holds gathered: those outside of layers, and two layers, or all
        layers without ``reshard_after_forward``; 0 without FSDP.
        """
        parallelism = self.work.parallelism
        if parallelism.kind != "fsdp":
            return 0
        gathered = [weights for weights, _ in self._trained] + ([self.weights] if self.adapter is not None else [])
        return self.work.compute_itemsize * sum(
            weights.root
            + (min(2 * weights.layer, weights.layers) if parallelism.reshard_after_forward else weights.layers)
            for weights in gathered
        )

    def weight_bucket(self) -> int:
        """Return the bytes of the bucket for weight syncs; for a remote engine, only on rank 0."""
        rollout = self.work.rollout
        if rollout is None or not rollout.bucket_bytes:
            return 0
        dtype = torch.bfloat16 if rollout.itemsize == 2 else torch.float32
        return plan_chunks(self.weights.shapes, dtype, rollout.bucket_bytes)[1]

    def gathering_window(self) -> int:
        """Return the bytes of the buffers in which a weight sync gathers FSDP's shards or dequantises matrices; 0 if it
        does neither.
        """
        rollout, parallelism = self.work.rollout, self.work.parallelism
        if self.work.adapter is not None and self.work.adapter.quantize_base is not None:
            return self.weight_bucket() + self._decoding()
        if rollout is None or parallelism.kind != "fsdp":
            return 0
        holders = parallelism.shard_size * parallelism.tensor_parallel_size
        window = max(GATHER_BYTES, rollout.itemsize * self.weights.largest)
        return window if holders == 1 else int((1 + 1 / holders) * window)

    def logits(self, tokens: int, *, has_gradient: bool, is_kept: bool = False) -> int:
        """Return the bytes needed to compute log-probabilities of ``tokens`` tokens in chunks of logits [C, V].

        These are one chunk, or all if they are kept for the backward pass, in the forward's dtype, which their gradient
        overwrites, and the selected hidden states [T, E] with their gradient, the output layer's gradient [V, E] in
        float32, and under autocast its weights in bfloat16. The gradient may be cast at the end, when the logits are
        freed. With truncated sampling, the logits of each token's support (the tokens that top-p and top-k leave) are
        added.
        """
        work, head, text_config = self.work, self.weights.head, self.work.config.get_text_config()
        row: int = work.compute_itemsize * -(-text_config.vocab_size // work.parallelism.tensor_parallel_size)
        states: int = work.compute_itemsize * tokens * text_config.hidden_size
        is_cast = work.is_autocast and self.adapter is None  # a frozen model is stored in the dtype of its computation
        rows = tokens if is_kept else min(tokens, chunk_tokens(row))
        chunk = row * rows + (work.compute_itemsize * head if is_cast else 0)
        if not has_gradient:
            return chunk + states
        supports = SUPPORT_BYTES * tokens * (0 if work.rollout is None else work.rollout.max_support)
        if self.adapter is not None:
            return 2 * states + chunk + supports
        cast = 0 if self._forward_dtype == torch.float32 else self._forward_dtype.itemsize * head
        return 2 * states + 4 * head + max(chunk, cast) + supports

    def layer_backward(self, activations: ActivationBytes) -> int:
        """Return the peak bytes that one layer's backward pass needs in addition to the activations kept from the
        forward pass. Attention's workspace is not included.

        With a tied embedding the output layer's gradient stays until the end of the backward. FSDP has a layer's full
        gradients twice: as they were computed, and in float32 for the reduction over the ranks.
        """
        trained = self.adapter or self.weights
        waiting = self._forward_dtype.itemsize * trained.head if trained.is_tied else 0
        is_sharded = self.work.parallelism.kind == "fsdp"
        whole = (self.work.compute_itemsize + 4) * trained.layer if is_sharded else 0
        return int(activations.backward - activations.kept) + waiting + whole + self._decoding()

    def _decoding(self) -> int:
        """Return the bytes of a quantised base model's matrix that is decoded for forward and backward."""
        layers = {} if self.work.adapter is None else self.work.adapter.quantized
        return COMPUTING_BYTES * max((math.prod(sizes) for sizes in layers.values()), default=0)

    def attention_workspace(self, tokens: int) -> int:
        """Return the bytes of the queries' gradients [T, heads, head size], which the kernel accumulates in float32."""
        heads: int = self.work.config.get_text_config().num_attention_heads
        return 4 * tokens * head_size(self.work.config) * heads // self.work.parallelism.tensor_parallel_size

    def activations(self, tokens: int, checkpointed_layers: int = 0) -> ActivationBytes:
        """Return the bytes of the actor's activations for a micro-batch of ``tokens`` tokens if its first
        ``checkpointed_layers`` layers are checkpointed.
        """
        share = checkpointed_layers / self.num_layers
        return self._activations(self.work.config, tokens, share, self.work.adapter)

    def others_activations(self, tokens: int, checkpointed_layers: int = 0) -> int:
        """Return the bytes of activations that trained models other than the actor keep until a micro-batch's backward
        pass, in which all models take part.

        With "auto" they checkpoint the same share of their layers as the actor.
        """
        kept = 0.0
        for role in self.work.others:
            if role.config is not None and role.optimizer_states is not None:
                wanted = role.gradient_checkpointing
                share = checkpointed_layers / self.num_layers if wanted == "auto" else float(wanted)
                kept += self._activations(role.config, tokens, share).kept
        return int(kept)

    def _activations(
        self, config: PreTrainedConfig, tokens: int, share: float, adapter: LoRA | None = None
    ) -> ActivationBytes:
        """Return the bytes of a model's activations if the first ``share`` of its layers is checkpointed.

        The backward pass begins with the other layers, which therefore determine its peak.
        """
        work = self.work
        decoder = Decoder(
            dtype=self._forward_dtype,
            is_autocast=work.is_autocast,
            gradient_checkpointing=share == 1,
            is_compiled=work.is_compiled,
            tensor_parallel_size=work.parallelism.tensor_parallel_size,
            adapter_rank=0 if adapter is None else adapter.rank,
            adapter_targets=() if adapter is None else tuple(sorted({n.rpartition(".")[2] for n in adapter.modules})),
        )
        offset, slope = fit_activations(config, decoder, work.longest)
        kept, forward, backward, scoring = (offset + slope * tokens).tolist()
        if 0 < share < 1:
            saved = share * (kept - self._activations(config, tokens, 1, adapter).kept)
            kept, forward, backward = kept - saved, forward - saved, backward - saved
        return ActivationBytes(kept, forward, backward, scoring)
