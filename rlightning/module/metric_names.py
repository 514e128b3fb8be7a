"""The names of the metrics that a run can log; docs/metrics.md explains them."""

import re
from typing import TYPE_CHECKING

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback

from rlightning.data import PromptDataModule
from rlightning.protocols import callbacks_of

if TYPE_CHECKING:
    from rlightning.module.evaluation import EvaluationSteps

OF_SECTIONS = {
    "reward": "mean std no_signal failed <function>",
    "completion": "length length_max truncated",
    "trajectory": "not_sampled",
    "environment": "tool_calls tool_failures turns tokens_per_turn time_in_engine time_in_environment engine_share "
    "prefix_cache_hits branches/<reason> requeues verify_gap",
    "policy": "loss entropy kl clip_low clip_high gate rollout_gap_mean rollout_gap_max skipped_share "
    "correction_weight correction_out_of_bounds",
    "attention": "shared_share",
    "optim": "grad_norm grad_norm/<role> skipped skipped/<role> lr lr/<group>",
    "throughput": "tokens_per_second update_mfu",
    "time": "step generate reward update sync engine_start offload restore",
    "memory": "rss_gib allocated_gib reserved_gib peak_gib <moment>/reserved_before_gib <moment>/reserved_after_gib "
    "<moment>/allocated_before_gib <moment>/allocated_after_gib <moment>/empty_cache_ms offloaded_gib",
    "rollout": "stopped",
    "async": "staleness_mean staleness_max staleness_<n> version_trained version_sampled_mean version_sampled_min "
    "requeued trainer_waited engines_idle swap_pause running scoring finished",
    "val": "<set>/reward <set>/pass@<k> <set>/length <set>/truncated <set>/loss",
}
"""Names of metrics by section (the part before the first slash); ``<placeholders>`` as in docs/metrics.md."""


def find_names(trainer: Trainer, module: "EvaluationSteps") -> list[str] | None:
    """Return the names of all metrics that a run can log, before the run starts.

    Returns:
        Names, with a ``<placeholder>`` for numbers and names that vary; None if a user's class may log others.
    """
    data: object = trainer.datamodule  # type: ignore[attr-defined]
    sources = [module, data, *callbacks_of(trainer)]
    is_own = any(not type(source).__module__.startswith(("lightning.", "rlightning.")) for source in sources)
    if is_own or any(isinstance(source, LambdaCallback) for source in sources):
        return None
    if not isinstance(data, PromptDataModule):
        return None
    replacements = {
        "<function>": [function.name for function in module.rewarder.functions],
        "<set>": [chosen.name for chosen in data.validation_sets],
    }
    names = [f"{section}/{name}" for section, written in OF_SECTIONS.items() for name in written.split()]
    for placeholder, given in replacements.items():
        open_names = [name for name in names if placeholder in name]
        names = [name for name in names if placeholder not in name]
        names += [name.replace(placeholder, one) for name in open_names for one in given]
    return names


def is_among(name: str, names: list[str]) -> bool:
    """Return whether a metric's name matches one of the ``names`` from :func:`find_names`, with or without the suffix
    "_step" or "_epoch".
    """
    patterns = (re.sub(r"<\w+>", "[^/]+", re.escape(known)) for known in names)
    return any(re.fullmatch(rf"{pattern}(_step|_epoch)?", name) for pattern in patterns)
