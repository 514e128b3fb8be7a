"""Trains the same model on the same completions under several strategies, each run in turn; run on every rank."""

import os
import random
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import Strategy
from rank_processes import each_run, finish, start_calls
from tiny import MAX_NEW_TOKENS, UseSampler, full_weights, make_completion, make_data, make_grpo, make_trainer
from torch._dynamo.utils import counters

from rlightning.callbacks import OffloadDuringRollout
from rlightning.hooks import call_hook
from rlightning.models import layers
from rlightning.module import RLModule
from rlightning.parallel import DDP
from rlightning.parallel.fsdp import FSDP
from rlightning.rollout import OnCompleted, Sampling, TrajectorySampler
from rlightning.types import Prompt, RolloutBatch, Sample, Trajectory, single_turns
from rlightning.types.supports import Supports

ACCUMULATED, WHOLE = 23, 4096
"""Tokens of a micro-batch: some micro-batches an optimizer step, and one."""
LR = 1e-3
BF16_DISTANCE = 0.15
"""Of :func:`distance`, from a run in float32 to one in bfloat16, which rounds to 8 bits: on the CPU 0.05 to 0.06.

AdamW's first steps are of a gradient's sign, and rounding turns that of a small one: a single weight may then be off by
twice LR a step, all of them together are not. An omitted reduction moves most weights by about LR, a distance near 1.
"""


class RandomSampler(TrajectorySampler):
    """Completions that depend on prompt and step alone, so that all runs train on the same."""

    def __init__(self, module: RLModule) -> None:
        self.module = module

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling, on_completed: OnCompleted | None = None
    ) -> list[list[Trajectory]]:
        """Random tokens, of random lengths."""
        completions = [[self._complete(prompt, sample) for sample in range(num_samples)] for prompt in prompts]
        call_hook(self.module.trainer, self.module, "on_engine_wake")  # as an engine on the same device does
        call_hook(self.module.trainer, self.module, "on_engine_sleep")
        return single_turns(prompts, completions)

    def _complete(self, prompt: Prompt, sample: int) -> Sample:
        version = self.module.weight_version
        draw = random.Random(f"{version} {prompt.index} {sample}")
        tokens = [draw.randrange(1, 5) for _ in range(draw.randint(1, MAX_NEW_TOKENS - 1))] + [0]
        completion = make_completion(tokens, [-1.0] * len(tokens), version)
        if sample == 1:  # of truncated distributions: each of its token and another one
            completion.supports = Supports(chain.from_iterable((token, 7) for token in tokens), [2] * len(tokens))
        return completion


class RecordUpdates(Callback):
    """Notes what each update logged, and how it was cut."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.shared_shares: list[float] = []  # which depend on how the batch was cut
        self.num_sequences: list[int] = []
        self.num_tokens: list[int] = []

    def on_update_end(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        self.num_sequences.append(batch.num_sequences)
        self.num_tokens.append(int(batch.is_sampled.sum()))

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.shared_shares.append(self.logged[-1].pop("attention/shared_share"))


def train(
    folder: Path,
    model: str,
    strategy: Strategy | str,
    num_ranks: int = 1,
    *,
    precision: Any = "32-true",
    accelerator: str = "cpu",
    offload: OffloadDuringRollout | None = None,
    **kwargs: Any,
) -> Any:
    """Three optimizer steps; the whole weights, the reference's too, and what was logged."""
    arguments: dict[str, Any] = {
        "max_grad_norm": 0.05,
        "kl_coef": 0.1,
        "max_tokens_per_microbatch": WHOLE,
        "loss_aggregation": "token_mean",  # ranks have different numbers of tokens, and as many sequences
        "share_prefixes": True,
    }
    torch.manual_seed(int(os.environ.get("RANK", 0)))  # an adapter's first values are of rank 0's
    module = make_grpo(model, samples_per_prompt=4, lr=LR, validate_first=False, **arguments | kwargs)
    record = RecordUpdates()
    trainer = make_trainer(
        folder,
        3,
        UseSampler(RandomSampler),
        record,
        *([offload] if offload else []),
        devices=num_ranks,
        strategy=strategy,
        accelerator=accelerator,
        precision=precision,
    )
    trainer.fit(module, make_data(folder))
    weights = {name: full_weights(role.network) for name, role in module.roles.items() if role.network is not None}
    counts: dict[str, Any] = {"num_sequences": record.num_sequences, "num_tokens": record.num_tokens}
    counts["shared_shares"] = record.shared_shares
    return weights | counts | {"logged": record.logged, "offloaded": offload.last if offload else {}}


def distance(one: Any, other: Any) -> float:
    """How far apart two runs ended, over how far the first has come, by the norm of all weights."""
    start, end, other_end = (
        torch.cat([weight.flatten() for _, weight in sorted(weights.items())])
        for weights in (one["reference"], one["actor"], other["actor"])
    )
    return float((other_end - end).norm() / (end - start).norm())


def adapter_distance(one: Any, other: Any) -> float:
    """As :func:`distance`, by an adapter's B, which starts at zero."""
    end, other_end = (
        torch.cat([weight.flatten() for name, weight in sorted(run["actor"].items()) if "lora_B" in name])
        for run in (one, other)
    )
    return float((other_end - end).norm() / end.norm())


def train_each(folder: Path, model: str, runs: dict[str, dict[str, Any]]) -> None:
    """Rank 0 writes the whole weights that each run came to, with what it logged, to ``FOLDER/NAME.pt``.

    Args:
        folder: gets the results.
        model: the model's folder.
        runs: by name, the arguments of :func:`train`, with ``strategy`` those of FSDP, or "ddp".
    """
    OffloadDuringRollout.device_type = "cpu"
    layers.BACKEND = "aot_eager"  # all of torch.compile but for the code it writes
    os.environ["CXX"] = "true"
    for name, arguments in each_run(runs):
        (folder / name).mkdir(exist_ok=True)
        wanted = arguments.pop("strategy", {})
        strategy = DDP() if wanted == "ddp" else FSDP(**wanted)
        compiles = arguments.get("compile", arguments.get("accelerator") == "gpu")
        if arguments.get("offload"):
            arguments["offload"] = OffloadDuringRollout(**arguments["offload"])
        rank, num_ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        result = train(folder / name, model, strategy, num_ranks, **arguments)
        assert not counters["graph_break"], counters["graph_break"]
        assert compiles == bool(counters["stats"]["unique_graphs"])
        torch._dynamo.reset()  # or the next run would take this one's code
        counters.clear()
        if rank == 0:
            torch.save(result, folder / f"{name}.pt")


def run_each(folder: Path, num_ranks: int, model: str, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the results of each run on so many ranks, by name."""
    finish(start_calls(train_each, num_ranks, folder, model, runs))
    return {name: torch.load(folder / f"{name}.pt") for name in runs}
