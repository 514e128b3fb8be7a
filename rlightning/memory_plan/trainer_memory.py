"""What the trainer takes of a rank's device.

Letters: ``T`` tokens of a micro-batch, ``C`` those of a chunk of logits, ``E`` hidden size, ``V`` vocabulary, or a
tensor-parallel rank's part of it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from rlightning.memory_plan.trace import ActivationBytes, Decoder, measure_activations
from rlightning.memory_plan.weights import Weights, count_weights
from rlightning.memory_plan.work import Work
from rlightning.models.output_layer import chunk_tokens
from rlightning.models.sizes import head_size
from rlightning.optim import StoredMomentsAdamW
from rlightning.optim.moments import bytes_per_parameter
from rlightning.parallel.gathering import GATHER_BYTES
from rlightning.rollout.weights import plan_chunks

TRANSIENT_PARTS = ("activations", "logits chunk", "a layer's backward", "attention workspace")
"""What an update or a forward pass gives back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearActivations:
    """Activations as a function of a micro-batch's tokens: ``fixed + slope * T``."""

    fixed: ActivationBytes
    slope: ActivationBytes

    def at(self, tokens: int) -> ActivationBytes:
        """Those of a micro-batch of so many tokens."""
        return self.fixed + self.slope * tokens


class TrainerMemory:
    """What the trainer takes of a device.

    Args:
        work: the run.
        like: of another setting of the same models, so that what is the same need not be found out again.

    Attributes:
        weights: the actor's.
        reference: the reference's, where there is one.
    """

    def __init__(self, work: Work, like: "TrainerMemory | None" = None) -> None:
        self.work = work
        self._decoders: dict[Decoder, LinearActivations] = {} if like is None else like._decoders
        counted = (like.weights, like.reference) if like is not None and like._sizes == self._sizes else None
        self.weights: Weights = counted[0] if counted else self._count(work.config)
        self.reference: Weights | None = None
        if work.reference is not None:
            self.reference = counted[1] if counted else self._count(work.reference)

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.work.parallelism.tensor_parallel_size, self.work.parallelism.shard_size

    def _count(self, config: PreTrainedConfig) -> Weights:
        return count_weights(config, tensor_parallel_size=self._sizes[0], shard_size=self._sizes[1])

    def activations(self, gradient_checkpointing: bool) -> LinearActivations:
        """Traced at two numbers of tokens, of sequences of equal length."""
        work = self.work
        is_bfloat16 = work.precision == "bf16-true" or (work.precision == "bf16-mixed" and not work.is_autocast)
        decoder = Decoder(
            dtype=torch.bfloat16 if is_bfloat16 else torch.float32,
            is_autocast=work.is_autocast,
            gradient_checkpointing=gradient_checkpointing,
            is_compiled=work.is_compiled,
            tensor_parallel_size=work.parallelism.tensor_parallel_size,
        )
        if decoder not in self._decoders:
            length = work.longest
            some, more = (measure_activations(work.config, decoder, length * n, length) for n in (2, 4))
            slope = (more - some) * (1 / (2 * length))
            self._decoders[decoder] = LinearActivations(fixed=some - slope * (2 * length), slope=slope)
        return self._decoders[decoder]

    # What stays

    def parameters(self) -> int:
        """The actor's, as they are kept: masters, or a rank's shard of them."""
        return 0 if self._is_on_host else self.work.master_itemsize * self.weights.held

    def optimizer_state(self) -> int:
        """AdamW's two moments, as they are kept between steps."""
        if self._is_on_host or self._is_state_on_host:
            return 0
        return int(bytes_per_parameter(self.work.optimizer_states, self.work.master_itemsize) * self.weights.held)

    def moments_at_a_time(self) -> int:
        """Those that a step has on the device as it computes with them, where it takes them out of another form."""
        if self._is_on_host or (self.work.optimizer_states == "float32" and not self._is_state_on_host):
            return 0
        most = 2 * self.work.master_itemsize * self.weights.held
        largest = 2 * self.work.master_itemsize * self.weights.largest
        return min(max(StoredMomentsAdamW.bytes_at_a_time, largest), most)

    def reference_parameters(self) -> int:
        """The reference model's, held as it is computed with."""
        if self.reference is None or self._is_on_host:
            return 0
        return self.work.compute_itemsize * self.reference.held

    def gradients(self) -> int:
        """As the optimizer reads them, and what strategies keep beside that."""
        work, parallelism = self.work, self.work.parallelism
        own = 0 if self._is_on_host else work.master_itemsize * self.weights.held
        if parallelism.kind == "ddp" and parallelism.has_gradient_buckets:
            own += work.master_itemsize * self.weights.held
        if parallelism.kind == "fsdp" and not parallelism.reduce_every_microbatch:
            own += 4 * (self.weights.layers + self.weights.root)
        return own

    @property
    def _is_on_host(self) -> bool:
        return self.work.parallelism.cpu_offload == "parameters"

    @property
    def _is_state_on_host(self) -> bool:
        return self.work.parallelism.cpu_offload == "optimizer"

    # What comes and goes

    def gathered(self) -> int:
        """FSDP's whole weights in the forward's dtype: embedding and output layer, and two layers, or all of them."""
        if self.work.parallelism.kind != "fsdp":
            return 0
        weights = self.weights
        layers = min(2 * weights.layer, weights.layers)
        if not self.work.parallelism.reshard_after_forward:
            layers = weights.layers
        return self.work.compute_itemsize * (weights.root + layers)

    def logits_chunk(self, tokens: int, *, has_gradient: bool) -> int:
        """Of models/output_layer.py on a GPU: logits [C, V] in the forward's dtype, whose gradient takes their place.

        Beside them the last hidden states [T, E] that were picked, with their gradient, the output layer's gradient
        [V, E] in float32, and under autocast its weights in bfloat16. At the end the gradient is cast where it has to
        be, when the logits are gone.
        """
        work = self.work
        text_config: Any = work.config.get_text_config()
        row: int = work.compute_itemsize * -(-text_config.vocab_size // work.parallelism.tensor_parallel_size)
        states: int = work.compute_itemsize * tokens * text_config.hidden_size
        chunk = row * min(tokens, chunk_tokens(row))
        chunk += work.compute_itemsize * self.weights.head if work.is_autocast else 0
        if not has_gradient:
            return chunk + states
        cast = 0 if self._state_itemsize == 4 else self._state_itemsize * self.weights.head
        return 2 * states + 4 * self.weights.head + max(chunk, cast)

    def layer_backward(self, tokens: int, activations: ActivationBytes) -> int:
        """What the backward of a layer takes beyond the activations that were kept, but for the attention kernel.

        A tied embedding's gradient of the output layer waits until the last of the backward. FSDP has a layer's
        gradients whole twice: as they were computed, and in float32 to be summed over the ranks.
        """
        waiting = self._state_itemsize * self.weights.head if self.weights.is_tied else 0
        is_sharded = self.work.parallelism.kind == "fsdp"
        whole = (self.work.compute_itemsize + 4) * self.weights.layer if is_sharded else 0
        return int(activations.backward - activations.kept) + waiting + whole

    def attention_workspace(self, tokens: int) -> int:
        """The queries' gradients [T, heads, head size], which the attention kernel sums in float32."""
        heads: int = self.work.config.get_text_config().num_attention_heads
        return 4 * tokens * head_size(self.work.config) * heads // self.work.parallelism.tensor_parallel_size

    @property
    def _state_itemsize(self) -> int:
        """Bytes of a number in the gradient of the output layer."""
        return 4 if self.work.is_autocast else self.work.compute_itemsize

    @property
    def num_layers(self) -> int:
        """Of the actor."""
        count: int = self.work.config.get_text_config().num_hidden_layers
        return count

    def mixed_activations(self, tokens: int, checkpointed_layers: int) -> ActivationBytes:
        """Those of a micro-batch, where the first layers keep their inputs only and the others everything.

        The backward begins with the others, so its peak is theirs.
        """
        if checkpointed_layers == self.num_layers:
            return self.activations(True).at(tokens)
        others = self.activations(False).at(tokens)
        if not checkpointed_layers:
            return others
        saved = (others.kept - self.activations(True).at(tokens).kept) * checkpointed_layers / self.num_layers
        return others - ActivationBytes(kept=saved, forward=saved, backward=saved, scoring=0)

    def update_parts(self, tokens: int, checkpointed_layers: int) -> dict[str, int]:
        """By name, at the worst moment of the update: after the forward or in a layer's backward."""
        activations = self.mixed_activations(tokens, checkpointed_layers)
        logits = self.logits_chunk(tokens, has_gradient=True)
        layer, workspace = self.layer_backward(tokens, activations), self.attention_workspace(tokens)
        is_in_layer = layer + workspace > logits
        transient = max(logits, layer + workspace)
        kept = max(int(activations.kept), int(activations.forward) - transient)
        parts = {
            "parameters": self.parameters(),
            "reference model": self.reference_parameters(),
            "optimizer state": self.optimizer_state(),
            "gradients": self.gradients(),
            "gathered parameters": self.gathered(),
            "activations": kept,
            "logits chunk": 0 if is_in_layer else logits,
            "a layer's backward": layer if is_in_layer else 0,
            "attention workspace": workspace if is_in_layer else 0,
        }
        # moments are taken out when activations are gone
        parts["optimizer state"] += max(0, self.moments_at_a_time() - kept - transient)
        return parts

    def score_parts(self, tokens: int) -> dict[str, int]:
        """By name, while log-probabilities are computed without gradient."""
        activations = self.activations(False).at(tokens)
        return {
            "parameters": self.parameters(),
            "reference model": self.reference_parameters(),
            "optimizer state": self.optimizer_state(),
            "gathered parameters": self.gathered(),
            "activations": int(activations.scoring),
            "logits chunk": self.logits_chunk(tokens, has_gradient=False),
        }

    def bucket(self) -> int:
        """That weights travel to the engine through; to a remote one, from rank 0."""
        engine = self.work.engine
        if engine is None:
            return 0
        dtype = torch.bfloat16 if engine.itemsize == 2 else torch.float32
        return plan_chunks(self.weights.shapes, dtype, engine.bucket_bytes)[1]

    def gathering_window(self) -> int:
        """Of parallel/gathering.py, beyond the bucket."""
        work = self.work
        if work.engine is None or work.parallelism.kind != "fsdp":
            return 0
        holders = work.parallelism.shard_size * work.parallelism.tensor_parallel_size
        window = max(GATHER_BYTES, work.engine.itemsize * self.weights.largest)
        return window if holders == 1 else int((1 + 1 / holders) * window)
