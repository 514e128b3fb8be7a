"""PolicyModule: a Lightning module with a Hugging Face language model, its optimizer and the export of its weights."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from transformers import PreTrainedModel

from rlightning.errors import ConfigError
from rlightning.models import (
    Adapter,
    load_config,
    load_tokenizer,
    max_model_length,
    packed_logprobs,
    save_adapter,
    save_policy,
)
from rlightning.models.adapter import LoRA, check_adapter_precision, check_parallel, resolve_adapter
from rlightning.models.adapter_layers import (
    adapter_off,
    adapter_parameters,
    loaded_digest,
    merged_forward,
    merged_weights,
    perturbed_adapter,
)
from rlightning.models.files import check_export, check_folder, find_weights, stored_dtype
from rlightning.models.finite import check_finite
from rlightning.models.layers import Checkpointing, compile_layers, should_compile
from rlightning.models.rotary import use_exact_angles
from rlightning.models.whole_policy import load_whole_policy
from rlightning.module import adapter_checkpoints
from rlightning.module.former_methods import warn_of_former_methods
from rlightning.module.optimizers import METHOD, checked, prepare_optimizers
from rlightning.module.overrides import is_own
from rlightning.module.packing import Packing
from rlightning.module.roles import ACTOR, ModelRole, check_roles, make_optimizers
from rlightning.module.saved_module import SavedModule
from rlightning.optim import OptimizerStates
from rlightning.optim.optimizer import AdamWSettings, LRSchedule
from rlightning.parallel.device import limit_host_threads, use_expandable_segments, use_tensor_cores
from rlightning.parallel.fsdp import FSDP
from rlightning.parallel.saved_weights import check_saved_weights
from rlightning.parallel.sharding import named_weights, rounded_vectors
from rlightning.protocols import StateDict
from rlightning.python_values import to_python
from rlightning.types import RolloutBatch

log = logging.getLogger(__name__)

OPTIMIZER_KEYS = tuple(field.name for field in fields(AdamWSettings))
"""The arguments of a module that configure the actor's optimizer."""


class PolicyModule(Packing, SavedModule):
    """Loads and optimizes the actor, exports its weights, and computes its log-probabilities.

    The configuration and the tokenizer are read immediately, which finds mistakes early; the weights are loaded in
    :meth:`configure_model`, after Lightning has set up its devices.

    Args:
        model: a Hugging Face model with its tokenizer, a folder or a name on the hub.
        lr: AdamW's learning rate.
        weight_decay: AdamW's weight decay, which excludes norms and biases.
        betas: AdamW's betas.
        warmup_steps: rollout steps over which the learning rate rises from 0.
        lr_schedule: the schedule after the warm-up; except for "constant" it falls to 0 at ``max_steps``.
        max_grad_norm: global norm to which gradients are clipped.
        optimizer_states: format of AdamW's moments between steps: 8, 4 or 2 bytes a parameter (docs/optimizer.md).
        gradient_checkpointing: recompute activations in the backward pass, in all layers or in none; "auto" for the
            fewest layers that leave room for a micro-batch (none if that is unknown, as on the CPU).
        compile: whether torch.compile compiles the layers, which makes the first step slow; None for only on CUDA.
        share_prefixes: compute a common prefix of a micro-batch's sequences once, if it is at least a fifth of one of
            them, see docs/performance.md. Results are the same up to rounding. "auto" for the rollouts of which that
            saves at least :func:`~rlightning.module.batching.least_saved_share` of the tokens.
        adapter: train a low-rank adapter (LoRA) in place of the weights, see :class:`~rlightning.models.Adapter` and
            docs/adapters.md; needs the package peft.
        trust_remote_code: whether a model's own Python code (``auto_map`` in its config.json) may run, in trainer and
            engine. Otherwise a model that needs such code is refused.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Wrap a subclass's ``configure_optimizers``, to check its return value, and warn of former methods."""
        super().__init_subclass__(**kwargs)
        warn_of_former_methods(cls)
        if METHOD in vars(cls):
            setattr(cls, METHOD, checked(vars(cls)[METHOD]))

    def __init__(
        self,
        model: str | Path,
        *,
        lr: float = 1e-6,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        warmup_steps: int = 0,
        lr_schedule: LRSchedule = "constant",
        max_grad_norm: float = 1.0,
        optimizer_states: OptimizerStates = "float32",
        gradient_checkpointing: Checkpointing = "auto",
        compile: bool | None = None,
        share_prefixes: bool | Literal["auto"] = "auto",
        adapter: Adapter | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        # Checkpoints contain them as the optimizer's settings.
        self.lr, self.weight_decay, self.betas = to_python((lr, weight_decay, betas))
        self.warmup_steps, self.lr_schedule, self.max_grad_norm = warmup_steps, lr_schedule, max_grad_norm
        self.optimizer_states: OptimizerStates = optimizer_states
        self.actor_optimizer()  # raises if the optimizer's settings contradict each other
        self.automatic_optimization = False
        self.model_path = model = os.path.expanduser(model)
        check_export(model)
        self.trust_remote_code = trust_remote_code
        self.model_config = load_config(model, trust_remote_code=trust_remote_code)
        self.tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
        self._is_folder = Path(model).is_dir()
        if self._is_folder:
            check_folder(model, self.model_config)
        self.adapter = None if adapter is None else resolve_adapter(adapter, model, self.model_config)
        self.stored_dtype: torch.dtype | str | None = self.model_config.dtype  # set after construction, from a file
        self.gradient_checkpointing, self.compiles_layers = gradient_checkpointing, compile
        self.share_prefixes = share_prefixes
        self.sends_adapter = self.keeps_logits = False
        self.roles: dict[str, ModelRole] = {}
        self.actor = None

    def configure_roles(self) -> dict[str, ModelRole]:
        """Return the run's models by role name; an override extends the result of ``super()``.

        Each trained network becomes an attribute of the module, under its role's name.
        """
        actor = ModelRole(
            load=self.load_actor,
            optimizer=self.actor_optimizer(),
            config=self.model_config,
            gradient_checkpointing=self.gradient_checkpointing,
        )
        return {ACTOR: actor}

    def actor_optimizer(self) -> AdamWSettings:
        """Return the settings of the actor's optimizer, from the module's arguments of the same names."""
        return AdamWSettings(**{name: vars(self)[name] for name in OPTIMIZER_KEYS})

    def configure_model(self) -> None:
        """Load the networks of roles that are not loaded yet. Lightning calls this at the start of fit, validate, test
        and predict.
        """
        loaded = {name: role.network for name, role in self.roles.items()}
        self.roles = self.configure_roles()
        check_roles(self.roles, self)
        is_fitting = self._trainer is None or self.trainer.state.fn == "fit"
        for name, role in self.roles.items():
            role.network = loaded.get(name)
        missing = {name: role for name, role in self.roles.items() if role.network is None}
        if self._trainer is not None and isinstance(self.trainer.strategy, FSDP):
            from rlightning.memory_plan.decisions import decide_gathering

            decide_gathering(self.trainer, self)
        share = self.checkpointed_share() if any(role.is_trained for role in missing.values()) else Fraction(0)
        self.keeps_logits = is_fitting and self.should_keep_logits()
        for name, role in missing.items():
            if role.is_trained:
                role.network = role.load()
                role.apply_checkpointing(share)
                setattr(self, name, role.network)
            elif is_fitting:
                role.network = role.load().requires_grad_(False)

    def load_actor(self) -> PreTrainedModel:
        """Load the actor for training, with its adapter if it has one, and return it."""
        use_expandable_segments()
        if self._trainer is not None:
            use_tensor_cores(self.trainer.strategy.root_device, self.trainer.precision)
        actor = self.load_model(self.model_path, is_trained=self.adapter is None, adapter=self.adapter)
        self.stored_dtype = stored_dtype(find_weights(self.model_path)) or self.stored_dtype
        if next(actor.parameters()).is_cuda:
            # Before any backward pass: autograd's threads keep the number of host threads with which they start, and
            # torch.compile would compile what they recompute again for another number.
            limit_host_threads()
        return actor

    def load_model(self, model: str, *, is_trained: bool = True, adapter: LoRA | None = None) -> PreTrainedModel:
        """Load and return a policy on the strategy's device: whole, or this rank's shards if the strategy shards.

        Args:
            model: a folder, or a name on the Hugging Face hub.
            is_trained: whether its parameters are trained and kept in the optimizer's dtype; otherwise they are kept in
                the dtype of the forward pass.
            adapter: adapter that is trained on a frozen model.
        """
        if model == self.model_path and self._is_folder and not Path(model).is_dir():
            raise ConfigError(f"model='{model}' is gone: it was a folder when the run began. Put it back.")
        load_config(model, trust_remote_code=self.trust_remote_code)
        strategy = None if self._trainer is None else self.trainer.strategy
        # Not self.device, which Lightning sets after configure_model().
        device = torch.device("cpu") if strategy is None else strategy.root_device
        is_compiled, _ = should_compile(self.compiles_layers, device)
        dtype = computes_in = torch.get_default_dtype()
        if adapter is not None and dtype.itemsize < 4:
            check_adapter_precision("bf16-true")
        if strategy is not None and self.trainer.precision.startswith("bf16"):
            computes_in = torch.bfloat16
        frozen_dtype = None if is_trained else computes_in
        if isinstance(strategy, FSDP):
            from rlightning.models.sharded_policy import load_sharded_policy

            if adapter is not None:
                check_parallel(adapter, is_sharded=True, tensor_parallel_size=self.tensor_parallel_size)
            policy = load_sharded_policy(model, strategy.sharding, dtype=frozen_dtype or dtype, adapter=adapter)
        else:
            policy = load_whole_policy(model, device, dtype=dtype, frozen_dtype=frozen_dtype, adapter=adapter)
        use_exact_angles(policy)
        if is_compiled:
            compile_layers(policy)
        return policy

    def checkpointed_share(self) -> Fraction:
        """Return the share of the actor's layers that recompute activations in the backward pass."""
        wanted = self.roles[ACTOR].gradient_checkpointing
        if wanted != "auto":
            return Fraction(wanted)
        if self._trainer is None or self.trainer.strategy.root_device.type != "cuda":
            return Fraction(0)
        from rlightning.memory_plan.decisions import decide_checkpointing

        num_layers: int = self.model_config.get_text_config().num_hidden_layers
        count, reason = decide_checkpointing(self.trainer, self)
        if self.trainer.is_global_zero:
            log.info("Gradient checkpointing of %d of %d layers: %s", count, num_layers, reason)
        return Fraction(count, num_layers)

    def should_keep_logits(self) -> bool:
        """Return whether updates keep logits from the forward to the backward pass, which otherwise recomputes them."""
        if self._trainer is None or self.trainer.strategy.root_device.type != "cuda":
            return False
        from rlightning.memory_plan.decisions import decide_kept_logits

        return decide_kept_logits(self.trainer, self)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return AdamW and a schedule for each trained role; an override may return any form that Lightning accepts."""
        return make_optimizers(self, self.roles, self.trainer)

    @property
    def has_usual_optimizers(self) -> bool:
        """Whether ``configure_optimizers`` is not overridden, so that its result needs no check."""
        return is_own(self, "configure_optimizers")

    def on_fit_start(self) -> None:
        """Raise a ConfigError for optimizers and schedules that this module cannot step."""
        prepare_optimizers(
            self, self.trainer.optimizers, self.trainer.lr_scheduler_configs, max_steps=self.trainer.max_steps
        )

    def on_save_checkpoint(self, checkpoint: StateDict) -> None:
        """Add the module's settings; raise a WeightError, so that nothing is saved, if weights are not finite."""
        check_finite(self.named_parameters(), "No checkpoint is saved")
        super().on_save_checkpoint(checkpoint)
        if self.adapter is not None:
            digest = loaded_digest(self.loaded_actor, self.model_path)
            checkpoint[adapter_checkpoints.KEY] = adapter_checkpoints.describe_base(self.adapter, digest)

    def on_load_checkpoint(self, checkpoint: StateDict) -> None:
        """Raise a ConfigError for a checkpoint with another adapter or another base model."""
        saved, model = checkpoint.get(adapter_checkpoints.KEY), self.model_path
        digest = "" if self.adapter is None else loaded_digest(self.loaded_actor, model)
        adapter_checkpoints.check_resumed(saved, self.adapter, model, digest)
        super().on_load_checkpoint(checkpoint)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the module's state, without the frozen base of an adapter, which is in the model's folder."""
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        return state if self.adapter is None else adapter_checkpoints.without_base(state)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state, which lacks an adapter's base; if ``strict``, other names or shapes raise a ConfigError."""
        own = super().state_dict()
        if self.adapter is not None:
            state_dict = adapter_checkpoints.with_base(state_dict, own)
        if strict:
            check_saved_weights(state_dict, own, self)
        return super().load_state_dict(state_dict, strict, assign)

    @property
    def settings(self) -> dict[str, object]:
        """The settings that a checkpoint stores, by configuration key: the optimizer's, ``trainer.max_steps``, and
        those of the configuration files, if the command line has constructed the module.
        """
        values = {f"model.{name}": vars(self)[name] for name in OPTIMIZER_KEYS}
        values |= {"model.betas": list(self.betas), "trainer.max_steps": self.trainer.max_steps}
        return values | super().settings

    @property
    def max_model_length(self) -> int:
        """The longest sequence, in tokens, that the model's position encoding allows."""
        return max_model_length(self.model_config)

    @property
    def vocab_size(self) -> int:
        """The number of rows of the model's embedding; every token id is below it."""
        size: int = self.model_config.get_text_config().vocab_size
        return size

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights for engines: the actor's parameters and saved buffers, by Hugging Face names. Every rank
        must iterate. An adapter is merged into its base.
        """
        yield from merged_weights(self.loaded_actor)

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapter's weights by their names in PEFT's files."""
        yield from adapter_parameters(self.loaded_actor)

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the actor's frozen base weights, without its adapter, by the names of :meth:`named_weights`."""
        yield from named_weights(self.loaded_actor)

    def adapter_off(self) -> AbstractContextManager[None]:
        """Context manager in which the actor computes without its adapter and without gradients."""
        return adapter_off(self.loaded_actor)

    def perturbed_adapter(self) -> AbstractContextManager[None]:
        """Context manager that adds noise to the adapter, with which an engine that lacks the adapter is detected.
        Every rank must enter it.
        """
        return perturbed_adapter(self.loaded_actor)

    def save_hf(self, path: str | Path) -> None:
        """Write the actor and its tokenizer as a Hugging Face folder, in the dtype of most of the original weights.
        Every rank must call it.

        An adapter is merged into its base. An existing folder is replaced once the new one is complete.
        """
        save_policy(self.loaded_actor, self.tokenizer, Path(path), dtype=self.stored_dtype)

    def save_adapter(self, path: str | Path) -> None:
        """Write the adapter and the tokenizer as a folder that PEFT, vLLM and ``model.adapter.path`` can load. Every
        rank must call it.

        An existing folder is replaced when the new one is complete.
        """
        assert self.adapter is not None, "there is no adapter"
        save_adapter(self.loaded_actor, self.adapter, self.model_path, self.tokenizer, Path(path))

    @torch.no_grad()
    def score(self, batch: RolloutBatch, dtype: torch.dtype) -> Tensor:
        """Return the actor's log-probabilities of the sampled tokens at temperature 1, to verify an engine's.

        Args:
            batch: a batch on the CPU.
            dtype: the engine's dtype, in which the actor computes if it is bfloat16 or float16; else it uses the run's.

        Returns:
            [T] float32, on the actor's device; 0 where not sampled.
        """
        is_half = dtype.itemsize == 2
        plugin = self.trainer.precision_plugin
        # Autocast may be enabled already, and its cache of weights would not have the values that they have here.
        precision = (
            torch.autocast(self.device.type, dtype, cache_enabled=False) if is_half else plugin.forward_context()
        )
        # A few sequences now and then are not worth separate compiled graphs for a forward without gradient.
        is_merged = self.adapter is not None and not self.sends_adapter
        merged = merged_forward(self.loaded_actor) if is_merged else nullcontext()
        with torch.compiler.set_stance("force_eager"), rounded_vectors(self.loaded_actor, dtype), precision, merged:
            return packed_logprobs(self.loaded_actor, batch.to(self.device))[0]

    @torch.no_grad()
    def evaluate_logprobs(
        self, batch: RolloutBatch, model: PreTrainedModel, *, temperature: float, max_tokens: int
    ) -> Tensor:
        """Return log-probabilities of the sampled tokens, computed in micro-batches without gradients; every rank must
        call it.

        Args:
            batch: a batch on the CPU.
            model: the actor, or a reference.
            temperature: divides the logits; replaced by a prompt's own temperature, if it has one.
            max_tokens: maximum tokens of a micro-batch.

        Returns:
            [T] float32, on the CPU; 0 where not sampled.
        """
        computed = [torch.zeros(0, device=self.device)]
        order: list[int] = []
        for sequences in self.split_microbatches(batch, max_tokens):
            logprobs, _ = packed_logprobs(model, self.to_microbatch(batch, sequences), temperature=temperature)
            if sequences:
                computed.append(logprobs)
                order += sequences
        parts = torch.split(torch.cat(computed).float().cpu(), batch.lengths[order].tolist())
        by_sequence = dict(zip(order, parts, strict=True))
        return torch.cat([torch.zeros(0, dtype=torch.float32), *(by_sequence[n] for n in range(batch.num_sequences))])

    @property
    def loaded_actor(self) -> PreTrainedModel:
        """The actor's network; available after :meth:`configure_model`."""
        assert self.actor is not None, "configure_model() loads the actor"
        return self.actor
