"""Roles: the models of a run, such as actor and reference, as a module's ``configure_roles`` returns them.

The network of a trained role is a child module with the role's name: strategies move it and average its gradients,
checkpoints contain it, and it has its own optimizer and gradient norm. The network of a frozen role is not a child
module, so that checkpoints and strategies ignore it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import PreTrainedConfig, PreTrainedModel

from rlightning.errors import ConfigError
from rlightning.models.layers import Checkpointing, checkpoint_layers, decoder_layers
from rlightning.optim.optimizer import (
    AdamWSettings,
    ConfiguredLR,
    clip_gradients,
    make_lr_schedule,
    make_optimizer,
    split_by_decay,
)
from rlightning.parallel.fsdp import FSDP

ACTOR = "actor"
"""The role that samples: engines get its weights, and its last optimizer step of a rollout counts as the Trainer's."""
REFERENCE = "reference"
"""The frozen role from which ``kl_coef`` penalizes the divergence."""


@dataclass(slots=True, kw_only=True)
class ModelRole:
    """The settings and the network of one model of a run, such as actor, reference or critic.

    Attributes:
        load: constructs the network on the module's device, on all ranks. ``module.load_model`` loads a Hugging Face
            model, sharded if the strategy shards; any other network must be whole on each rank.
        optimizer: settings of optimizer and schedule; None if the network is frozen.
        config: a Hugging Face model's; the memory plan counts the role if it is a causal language model.
        gradient_checkpointing: whether a trained Hugging Face model recomputes activations in the backward pass, in all
            layers or in none; "auto" for the actor's share of layers, which the memory plan chooses if the actor's
            setting is "auto" too.
        network: the result of ``load``; None before.
    """

    load: Callable[[], nn.Module]
    optimizer: AdamWSettings | None = None
    config: PreTrainedConfig | None = None
    gradient_checkpointing: Checkpointing = False
    network: nn.Module | None = None

    @property
    def is_trained(self) -> bool:
        """Whether the network is trained, and hence a child module and part of checkpoints."""
        return self.optimizer is not None

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the network's parameters; empty before it is loaded."""
        return iter(()) if self.network is None else self.network.parameters()

    def apply_checkpointing(self, actor_share: Fraction) -> None:
        """Enable gradient checkpointing in the loaded network: in all layers, none, or for "auto" in the share
        ``actor_share`` of them. Raise a ConfigError if a network with checkpointing is no Hugging Face model.
        """
        share = actor_share if self.gradient_checkpointing == "auto" else Fraction(self.gradient_checkpointing)
        if not share:
            return
        assert self.network is not None
        policy = next((module for module in self.network.modules() if isinstance(module, PreTrainedModel)), None)
        if policy is None:
            raise ConfigError(
                f"{type(self.network).__name__} is no Hugging Face model, so its layers cannot be checkpointed. Leave "
                "gradient_checkpointing of its ModelRole out."
            )
        checkpoint_layers(policy, math.ceil(share * len(decoder_layers(policy))))


def check_roles(roles: object, module: nn.Module) -> None:
    """Raise a ConfigError if what a module's ``configure_roles`` returns cannot be the models of a run."""
    kind = type(module)
    if not isinstance(roles, Mapping) or ACTOR not in roles:
        raise ConfigError(
            f"{kind.__name__}.configure_roles() returns no role '{ACTOR}', the model that samples. Extend and return "
            "the result of super().configure_roles()."
        )
    for name, role in roles.items():
        if not isinstance(role, ModelRole):
            raise ConfigError(
                f"{kind.__name__}.configure_roles() returns a {type(role).__name__} for '{name}', not a ModelRole. "
                "Return ModelRole(load=..., optimizer=...), whose load() makes the network."
            )
        if role.is_trained and (hasattr(kind, name) or vars(module).get(name) is not None):
            raise ConfigError(
                f"{kind.__name__} has an attribute '{name}', and the network of a trained role becomes the module's "
                f"attribute of the role's name. Give the role another name, such as {name}_model."
            )


def parameters_by_role(module: nn.Module, roles: Mapping[str, ModelRole]) -> dict[str, list[nn.Parameter]]:
    """Return a module's parameters by the trained role that owns them, in the order of ``parameters()``.

    A parameter of several roles belongs to the first of them; a parameter in no role belongs to the actor.
    """
    trained = {name: role for name, role in roles.items() if role.is_trained}
    owners: dict[nn.Parameter, str] = {}
    for name, role in trained.items():
        for parameter in role.parameters():
            owners.setdefault(parameter, name)
    found: dict[str, list[nn.Parameter]] = {name: [] for name in trained}
    for parameter in module.parameters():
        found[owners.get(parameter, ACTOR)].append(parameter)
    return found


def clip_by_role(module: nn.Module, roles: Mapping[str, ModelRole]) -> dict[str, Tensor]:
    """Clip each trained role's gradients in place to its ``max_grad_norm``, and return their norms; drop gradients that
    are not finite. Every rank must call it.

    Returns:
        The metrics ``optim/grad_norm`` (before clipping) and ``optim/skipped``, [1] each; for roles other than the
        actor with the role's name.
    """
    metrics: dict[str, Tensor] = {}
    for name, parameters in parameters_by_role(module, roles).items():
        settings = roles[name].optimizer
        assert settings is not None
        norm, is_finite = clip_gradients(parameters, settings.max_grad_norm)
        suffix = "" if name == ACTOR else f"/{name}"
        metrics[f"optim/grad_norm{suffix}"] = norm.reshape(1)
        metrics[f"optim/skipped{suffix}"] = (~is_finite).reshape(1)
    return metrics


def make_optimizers(
    module: nn.Module, roles: Mapping[str, ModelRole], trainer: Trainer
) -> tuple[list[AdamW], list[ConfiguredLR]]:
    """Return the optimizers and schedules of the trained roles, the actor's first.

    Parameters in no role have two separate groups after the actor's two.
    """
    is_on_host = isinstance(trainer.strategy, FSDP) and trainer.strategy.cpu_offload == "optimizer"
    in_roles = {parameter for role in roles.values() for parameter in role.parameters()}
    optimizers: list[AdamW] = []
    schedules: list[ConfiguredLR] = []
    held: set[nn.Parameter] = set()
    for name, role in sorted(roles.items(), key=lambda item: item[0] != ACTOR):
        if role.optimizer is None or role.network is None:
            continue
        splits = [split_by_decay(role.network, but=held)]
        held.update(role.parameters())
        own = split_by_decay(module, but=in_roles) if name == ACTOR else ([], [])
        if any(own):
            splits.append(own)
        label = "" if name == ACTOR else name
        optimizers.append(make_optimizer(role.optimizer, *splits, is_state_on_host=is_on_host, name=label))
        max_steps = trainer.max_steps
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # which sets it
            max_steps = max(max_steps, role.optimizer.warmup_steps + 1)
        schedules.append(make_lr_schedule(optimizers[-1], role.optimizer, max_steps=max_steps))
    return optimizers, schedules
