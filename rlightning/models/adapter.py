"""Adapters (LoRA): the user's settings, and the shapes that follow from them and a model's configuration."""

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import get_args

from torch import nn
from transformers import PreTrainedConfig

from rlightning.errors import ConfigError, check_rules, did_you_mean
from rlightning.foreign_text import cut_line
from rlightning.models.adapter_files import CONFIG_FILE, check_files, find_folder, stored_name
from rlightning.models.counts import build_empty, num_experts
from rlightning.models.layers import decoder_layers
from rlightning.models.quantized import QuantizedBase, import_torchao

log = logging.getLogger(__name__)

ALL_LINEAR = "all-linear"
"""The target of every linear layer of the model's blocks."""
DEFAULT_RANK = 32
PATTERN = re.compile(r"[][()*+?^$|\\{}]")
"""Characters of regular expressions that no module's name has."""
MAX_NAMES = 8
"""Most layers that an error lists."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Prefixes of PEFT's ``init_lora_weights`` for adapters that need a modified base."""
READ = {
    "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "lora_dropout", "init_lora_weights", "base_model_name_or_path", "revision", "task_type", "inference_mode",
    "auto_mapping", "peft_type", "peft_version",
}  # fmt: skip
"""Keys of an adapter's configuration that are supported, or do not affect its computation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The user's settings of a LoRA adapter (arXiv:2106.09685), which trains low-rank additions to frozen matrices.

    Attributes:
        rank: rank of the low-rank additions; None for that of the folder ``path``, or 32.
        alpha: the additions are scaled by ``alpha / rank``; None for that of the folder, or twice the rank.
        target_modules: names of linear layers, or endings of names such as ``q_proj``; None for those of the folder, or
            "all-linear", which is all linear layers in the model's blocks.
        use_rslora: scale by ``alpha / sqrt(rank)`` (arXiv:2312.03732); None for the value of the folder, or False.
        path: a folder in PEFT's format with initial values, or its name on the hub; None for additions of zero.
        quantize_base: store the frozen matrices of the model's blocks in 8 bits ("int8") or 4 ("nf4"), by torchao; None
            for the dtype of the computation.
    """

    rank: int | None = None
    alpha: float | None = None
    target_modules: str | Sequence[str] | None = None
    use_rslora: bool | None = None
    path: str | Path | None = None
    quantize_base: QuantizedBase | None = None

    def __post_init__(self) -> None:
        """Raise a ConfigError for settings of another type, or with which nothing could be learned."""
        rank, alpha, targets, base = self.rank, self.alpha, self.target_modules, self.quantize_base
        is_listed = isinstance(targets, Sequence) and all(isinstance(name, str) for name in targets)
        check_rules(
            {
                f"adapter.rank={rank!r} must be a whole number": rank is None or type(rank) is int,
                f"adapter.alpha={alpha!r} must be a number": alpha is None
                or (isinstance(alpha, (int, float)) and not isinstance(alpha, bool)),
                f"adapter.target_modules={targets!r} must be a name or a list of names": targets is None or is_listed,
                f"adapter.use_rslora={self.use_rslora!r} must be true or false": self.use_rslora in (None, True, False),
                f"adapter.path={self.path!r} must be a folder or a name on the hub": self.path is None
                or isinstance(self.path, (str, Path)),
            }
        )
        if base is not None and base not in (kinds := get_args(QuantizedBase)):
            raise ConfigError(f"adapter.quantize_base='{base}' is unknown. {did_you_mean(str(base), kinds)}")
        names_some = targets is None or bool(targets)
        is_scale = alpha is None or 0 < alpha < math.inf
        check_rules(
            {
                f"adapter.rank={rank} must be at least 1. Leave model.adapter out to train all weights": (
                    rank is None or rank >= 1
                ),
                f"adapter.alpha={alpha} must be above 0 and finite. Try twice the rank": is_scale,
                f"adapter.target_modules names no layers. Leave it out for {ALL_LINEAR}": names_some,
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRA:
    """An adapter resolved for a model: the user's settings, with all defaults and the adapted layers filled in.

    Attributes:
        rank: see :class:`Adapter`.
        alpha: see :class:`Adapter`.
        use_rslora: see :class:`Adapter`.
        modules: numbers of outputs and inputs of each adapted linear layer, by name.
        targets: shortened names of these layers, for PEFT's configuration.
        start: a folder in PEFT's format with initial values; None without one.
        quantize_base: see :class:`Adapter`.
        quantized: numbers of outputs and inputs of each quantised linear layer, by name.
    """

    rank: int
    alpha: float
    use_rslora: bool
    modules: Mapping[str, tuple[int, int]]
    targets: tuple[str, ...]
    start: Path | None = None
    quantize_base: QuantizedBase | None = None
    quantized: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def scaling(self) -> float:
        """The factor that multiplies the low-rank additions."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @property
    def num_parameters(self) -> int:
        """The number of trained parameters."""
        return self.rank * sum(outputs + inputs for outputs, inputs in self.modules.values())

    @property
    def shapes(self) -> list[tuple[str, tuple[int, int]]]:
        """The name in PEFT's files and the shape of each of the adapter's weights."""
        found: list[tuple[str, tuple[int, int]]] = []
        for name, (outputs, inputs) in self.modules.items():
            found.append((stored_name(name, "A"), (self.rank, inputs)))
            found.append((stored_name(name, "B"), (outputs, self.rank)))
        return found

    def describe(self) -> str:
        """Return a short description of what is trained, for the log."""
        kind = "rsLoRA" if self.use_rslora else "LoRA"
        start = f" from {self.start}" if self.start is not None else ""
        base = f", the base in {self.quantize_base}" if self.quantize_base is not None else ""
        return f"{kind} of rank {self.rank}, alpha {self.alpha:g}, on {len(self.modules)} linear layers{start}{base}"

    def peft_settings(self) -> dict[str, object]:
        """Return the arguments of PEFT's LoraConfig."""
        return {
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": self.use_rslora,
            "target_modules": list(self.targets),
            "lora_dropout": 0.0,
            "bias": "none",
            "task_type": "CAUSAL_LM",
        }


def import_peft() -> ModuleType:
    """Return the peft package, or raise a ConfigError if it is missing."""
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"model.adapter needs the package peft ({cut_line(error)}). Install it by: pip install 'rlightning[peft]'"
        ) from error
    return peft


def resolve_adapter(adapter: Adapter, model: str, config: PreTrainedConfig) -> LoRA:
    """Return the user's settings of an adapter, resolved for a model: rank, scaling and adapted layers. The model
    itself is not loaded.

    Raises:
        ConfigError: a layer does not exist in the model or cannot be adapted, or the folder's adapter has another base
            model or is of an unsupported kind.
    """
    if adapter.quantize_base is not None:
        import_torchao(adapter.quantize_base)
    import_peft()
    if experts := num_experts(config):
        raise ConfigError(
            f"model='{model}' has {experts} experts, for which there are no adapters. Leave model.adapter out."
        )
    layers = linear_layers(config)
    if not layers:
        raise ConfigError(
            f"model='{model}' has no linear layers (nn.Linear) in its blocks that an adapter could be added to. Leave "
            "model.adapter out."
        )
    is_new = adapter.path is None
    lora = _read_keys(adapter, layers, config) if is_new else _read_folder(adapter, model, layers, config)
    return (
        lora if adapter.quantize_base is None else replace(lora, quantize_base=adapter.quantize_base, quantized=layers)
    )


def _read_keys(adapter: Adapter, layers: Mapping[str, tuple[int, int]], config: PreTrainedConfig) -> LoRA:
    """Return the adapter that the user's configuration keys describe."""
    modules = _find_targets(adapter.target_modules or ALL_LINEAR, layers, config)
    rank = adapter.rank or DEFAULT_RANK
    if adapter.rank is not None and rank > (most := max(map(min, modules.values()))):
        raise ConfigError(f"adapter.rank={rank} is more than the matrices themselves have, at most {most}. Try 32.")
    return LoRA(
        rank=rank,
        alpha=adapter.alpha or 2.0 * rank,
        use_rslora=bool(adapter.use_rslora),
        modules=modules,
        targets=shorten(modules, layers),
    )


def _find_targets(
    targets: str | Sequence[str], layers: Mapping[str, tuple[int, int]], config: PreTrainedConfig
) -> Mapping[str, tuple[int, int]]:
    """Return the linear layers that the user's ``target_modules`` name: all of them for "all-linear", else those that
    match a target, which is a layer's full name or the end of one.
    """
    wanted = [targets] if isinstance(targets, str) else list(targets)
    if ALL_LINEAR in wanted:
        return layers
    for target in wanted:
        if "," in target:
            names = [name.strip() for name in target.strip("[]() ").split(",") if name.strip()]
            raise ConfigError(
                f"adapter.target_modules: '{target}' is one text. Write a list of names: [{', '.join(names)}]."
            )
        if not any(is_match(name, target) for name in layers):
            if PATTERN.search(target):
                raise ConfigError(f"adapter.target_modules: '{target}' is a pattern. {_list_matches(target, layers)}")
            others = build_empty(config).named_modules()
            kind = next((type(module).__name__ for name, module in others if name and is_match(name, target)), None)
            found = (
                "is no module of the model" if kind is None else f"is a {kind}, no linear layer of the model's blocks"
            )
            hint = did_you_mean(target, _comparable_names(target, layers))
            raise ConfigError(f"adapter.target_modules: '{target}' {found}. {hint}")
    return {name: sizes for name, sizes in layers.items() if any(is_match(name, target) for target in wanted)}


def check_adapter_precision(precision: object) -> None:
    """Raise a ConfigError for the precision of Lightning's that would hold the adapter itself in bfloat16."""
    if precision == "bf16-true":
        raise ConfigError(
            f"trainer.precision={precision} would keep an adapter in bfloat16, which rounds its steps off. Use "
            "bf16-mixed, which holds the base's matrices in bfloat16 and the adapter in float32."
        )


def check_parallel(lora: LoRA, *, is_sharded: bool, tensor_parallel_size: int = 1) -> None:
    """Raise a ConfigError if the adapter cannot be trained in a sharded model, or under tensor parallelism."""
    if tensor_parallel_size > 1:
        raise ConfigError(
            f"model.adapter cannot be trained with tensor_parallel_size={tensor_parallel_size}. Use 1, which "
            "shards the frozen base over all ranks."
        )
    if lora.quantize_base is not None and is_sharded:
        raise ConfigError(
            f"model.adapter.quantize_base={lora.quantize_base} holds the whole base on each rank, and FSDP shards it. "
            "Use trainer.strategy=ddp, or leave quantize_base out."
        )


def linear_layers(config: PreTrainedConfig) -> dict[str, tuple[int, int]]:
    """Return the linear layers in a model's blocks, each with its numbers of outputs and inputs."""
    policy = build_empty(config)
    prefix = next(name for name, module in policy.named_modules() if module is decoder_layers(policy))
    return {
        name: (module.out_features, module.in_features)
        for name, module in policy.named_modules()
        if type(module) is nn.Linear and name.startswith(f"{prefix}.")
    }


def _comparable_names(target: str, layers: Iterable[str]) -> list[str]:
    """Return the ends of the layers' names with as many parts as ``target``, such as ``self_attn.q_proj`` for two."""
    num_parts = target.count(".") + 1
    ends = sorted({".".join(name.split(".")[-num_parts:]) for name in layers})
    return ends if num_parts > 1 else [*ends, ALL_LINEAR]


def _list_matches(pattern: str, layers: Mapping[str, object]) -> str:
    """Return the way out for a regular expression, which PEFT takes: the list of the layers that it matches."""
    try:
        matches = [name for name in layers if re.fullmatch(pattern, name)]
    except re.error:
        matches = []
    names = shorten(dict.fromkeys(matches or layers), layers)
    more = ", ..." if len(names) > MAX_NAMES else ""
    return f"Write a list of names: [{', '.join(names[:MAX_NAMES])}{more}]."


def is_match(name: str, target: str) -> bool:
    """Return whether a module's name is a target or ends with ``.`` and the target, as in PEFT's lists of targets."""
    return name == target or name.endswith(f".{target}")


def shorten(modules: Mapping[str, object], layers: Mapping[str, object]) -> tuple[str, ...]:
    """Return the last parts of the modules' names, such as ``q_proj``, if no other layer's name ends with them;
    otherwise the full names.
    """
    ends = sorted({name.rpartition(".")[2] for name in modules})
    meant = {name for name in layers if name.rpartition(".")[2] in ends}
    return tuple(ends if meant == modules.keys() else modules)


def _read_folder(adapter: Adapter, model: str, layers: Mapping[str, tuple[int, int]], config: PreTrainedConfig) -> LoRA:
    """Read the saved LoRA in ``adapter.path``; raise a ConfigError if the settings in ``adapter`` contradict it.

    Args:
        adapter: the user's settings.
        model: path or name of the base model.
        layers: rows and columns of the weight of each linear layer, by the layer's name.
        config: configuration of the base model.
    """
    peft, folder = import_peft(), find_folder(str(adapter.path))
    where = f"adapter.path='{folder}'"
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"{where} has no {CONFIG_FILE}. Name a folder that PEFT or SaveHF has written.")
    try:
        found = peft.PeftConfig.from_pretrained(str(folder))
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise ConfigError(f"{where} has no readable {CONFIG_FILE}: {cut_line(error)}") from error
    if not isinstance(found, peft.LoraConfig):
        raise ConfigError(f"{where} is an adapter of the type {found.peft_type}, and only LoRA is trained here.")
    _check_kind(where, found.to_dict(), peft.LoraConfig().to_dict())
    _check_base_name(where, found.base_model_name_or_path, model)
    matches = peft.tuners.tuners_utils.check_target_module_exists
    if found.target_modules == ALL_LINEAR:
        modules = dict(layers)
    else:
        modules = {name: sizes for name, sizes in layers.items() if matches(found, name)}
    given = {"rank": adapter.rank, "alpha": adapter.alpha, "use_rslora": adapter.use_rslora}
    own = {"rank": found.r, "alpha": found.lora_alpha, "use_rslora": found.use_rslora}
    for name, value in given.items():
        if value is not None and value != own[name]:
            raise ConfigError(f"adapter.{name}={value}, but {where} has {own[name]}. Leave adapter.{name} out.")
    if adapter.target_modules is not None:
        _check_same_layers(where, modules, _find_targets(adapter.target_modules, layers, config), layers)
    if found.lora_dropout:
        log.warning(
            "%s has lora_dropout=%g. It is trained without: policies have no dropout.", where, found.lora_dropout
        )
    lora = LoRA(
        rank=found.r,
        alpha=float(found.lora_alpha),
        use_rslora=found.use_rslora,
        modules=modules,
        targets=shorten(modules, layers),
        start=folder,
    )
    check_files(dict(lora.shapes), folder, model)
    return lora


def _check_same_layers(
    where: str, own: Mapping[str, object], wanted: Mapping[str, object], layers: Mapping[str, object]
) -> None:
    """Raise a ConfigError that names the difference if ``target_modules`` name other layers than the folder adapts.

    Args:
        where: the folder, for the message.
        own: layers that the folder's adapter has.
        wanted: layers that the user's ``target_modules`` name.
        layers: all linear layers of the model's blocks.
    """
    parts = {
        "names {}, which it does not adapt": [name for name in wanted if name not in own],
        "lacks {}, which it adapts": [name for name in own if name not in wanted],
    }
    differences = []
    for text, names in parts.items():
        ends = shorten(dict.fromkeys(names), layers)
        more = f" and {len(ends) - 4} more" if len(ends) > 4 else ""
        differences += [text.format(", ".join(ends[:4]) + more)] if ends else []
    if differences:
        raise ConfigError(
            f"adapter.target_modules is not that of {where}: it {' and '.join(differences)}. Leave "
            "adapter.target_modules out."
        )


def _check_kind(where: str, settings: Mapping[str, object], usual: Mapping[str, object]) -> None:
    """Raise a ConfigError for a variant of LoRA: a setting with another than its ``usual`` value, which is named."""
    for name, value in settings.items():
        if name not in READ and value != usual.get(name) and value not in (None, [], {}, False):
            raise ConfigError(f"{where} has {name}={cut_line(value)}, which is not trained here: plain LoRA alone is.")
    init = str(settings.get("init_lora_weights")).lower()
    if init.startswith(CHANGES_BASE):
        raise ConfigError(
            f"{where} has init_lora_weights='{init}', by which its base has other values than the model's files. "
            "Convert it to plain LoRA by PEFT's path_initial_model_for_weight_conversion."
        )


def _check_base_name(where: str, base: str | None, model: str) -> None:
    """Raise a ConfigError if the base model's name differs; only its last part is compared, since folders may move."""
    if base and Path(base).name != Path(model).name:
        raise ConfigError(
            f"{where} is an adapter of '{base}', and model='{model}' is another base. Name its own base in model, or "
            f"write that into base_model_name_or_path of {CONFIG_FILE} if it is the same."
        )
