"""Whether a rollout's shared prefixes are computed once is decided by what that saves, alike on all ranks."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import finish, start_calls
from test_shared_prefixes import InFloat64, LongPrompts, check_close
from tiny import (
    ActorSampler,
    UseSampler,
    full_weights,
    make_algorithm,
    make_batch,
    make_completion,
    make_data,
    make_trainer,
)
from torch import Tensor
from transformers import Qwen3Config

from rlightning.algorithms import GRPO
from rlightning.module import packing
from rlightning.module.batching import find_long_prefixes, least_saved_share
from rlightning.parallel import DDP
from rlightning.parallel.collectives import all_reduce
from rlightning.rollout import OnCompleted, Sampling, TrajectorySampler
from rlightning.types import Prompt, RolloutBatch, Trajectory, single_turns


def groups_after(num_prompt: int, num_groups: int = 2) -> RolloutBatch:
    """Groups of four completions of 10 tokens, after a prompt of so many."""
    completions = [[[n] * 10 for n in range(4 * group, 4 * group + 4)] for group in range(num_groups)]
    return make_batch(completions, prompt=[13] * num_prompt)


@pytest.fixture
def module(model_folder: str, monkeypatch: pytest.MonkeyPatch) -> GRPO:
    monkeypatch.setattr(packing, "varlen_obstacle", lambda *_: None)  # a kernel that copies no keys
    return make_algorithm(GRPO, model_folder)


def test_saved_share_counts_prefixes_within_groups(module: GRPO) -> None:
    batch = groups_after(30)
    assert module.saved_share(batch, 4096) == 2 * 3 * 30 / 320
    assert module.saved_share(batch, 60) == 2 * 2 * 30 / 320  # the fourth does not fit beside three
    assert module.saved_share(batch, 40) == 0
    batch.group_ids = torch.arange(8)  # all have the same prompt, but are of different groups
    assert module.saved_share(batch, 4096) == 0
    assert module.saved_share(batch.select([]), 4096) == 0


def test_groups_share_nothing_with_others() -> None:
    batch = RolloutBatch.of_sequences([[3, 4, 5], [3, 4, 6], [3, 4, 7]])
    assert find_long_prefixes(batch).lengths.tolist() == [0, 2, 2]
    order, lengths = find_long_prefixes(batch, [1, 0, 1])
    assert order == [1, 0, 2] and lengths.tolist() == [0, 0, 2]


@pytest.mark.parametrize(
    ("hidden_size", "inner_size", "num_layers", "num_heads", "expected"),
    [(1024, 3072, 28, 16, 0.4), (2560, 9728, 36, 32, 0.25), (1024, 4608, 28, 16, 0.308)],
)
def test_least_saved_share_falls_with_the_weights_of_a_layer(
    hidden_size: int, inner_size: int, num_layers: int, num_heads: int, expected: float
) -> None:
    """Qwen3-0.6B's shape, 4B's, and 0.6B's with a feed-forward of 1.5 times the size."""
    config = Qwen3Config(
        hidden_size=hidden_size,
        intermediate_size=inner_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=8,
        head_dim=128,
    )
    assert least_saved_share(config) == pytest.approx(expected, abs=0.002)


@pytest.mark.parametrize("num_prompt", [2, 6, 7, 8, 30])
def test_auto_shares_from_the_least_saved_share(num_prompt: int, module: GRPO) -> None:
    batch = groups_after(num_prompt)
    is_shared = 3 * num_prompt / (4 * num_prompt + 40) >= least_saved_share(module.model_config)
    assert is_shared or num_prompt < 30
    assert not is_shared or num_prompt > 2
    batch.shares_prefixes = module.decide_sharing(batch, 4096)
    assert batch.shares_prefixes == is_shared
    # What is cut out of the batch is computed as the batch is.
    part = batch.select([1, 2, 3, 5])
    microbatch = module.to_microbatch(part, range(4))
    assert (microbatch.shared is not None) == is_shared
    whole = module.costs(groups_after(num_prompt).select([1, 2, 3, 5]))  # undecided
    assert bool((module.costs(part) < whole).any()) == is_shared


@pytest.mark.parametrize("is_shared", [True, False])
def test_settings_other_than_auto_share_always_or_never(is_shared: bool, model_folder: str) -> None:
    module = make_algorithm(GRPO, model_folder, share_prefixes=is_shared)
    for num_prompt in (2, 30):
        batch = groups_after(num_prompt)
        batch.shares_prefixes = module.decide_sharing(batch, 4096)
        assert batch.shares_prefixes == is_shared
        shared = module.to_microbatch(batch, range(8)).shared
        assert (shared is not None) == (is_shared and num_prompt == 30)


def test_auto_does_not_share_where_results_would_differ(
    module: GRPO, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="rlightning")
    monkeypatch.setattr(packing, "can_share_prefixes", lambda *_: False)
    assert not module.decide_sharing(groups_after(2), 4096) and not caplog.messages
    assert not module.decide_sharing(groups_after(30), 4096)
    assert not module.decide_sharing(groups_after(30), 4096)
    (line,) = caplog.messages
    assert line.startswith("Shared prefixes are computed for each sequence: to compute them once would save 56% of the")


def test_auto_tries_the_architecture_only_for_long_prompts(module: GRPO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "can_share_prefixes", None)
    assert not module.decide_sharing(groups_after(2), 4096)


class FixedCompletions(TrajectorySampler):
    """Gives each group a prompt of 30 tokens of its own, and completions of 10 that differ from the first token on."""

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling, on_completed: OnCompleted | None = None
    ) -> list[list[Trajectory]]:
        longer = [prompt._replace(token_ids=[5 + prompt.index] * 30) for prompt in prompts]
        return single_turns(longer, [[make_completion([n + 1] * 10) for n in range(num_samples)] for _ in prompts])


def test_shared_share_counts_tokens_that_are_not_computed(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four groups of four sequences of 40 tokens, three of which fit into 60 tokens: a group saves 2 of 4 prompts.

    Empty micro-batches do not count: another rank has 10, and this one 8.
    """
    monkeypatch.setattr(packing, "varlen_obstacle", lambda *_: None)
    monkeypatch.setattr(packing, "all_reduce", lambda own, _: torch.maximum(own, torch.tensor(10)))
    sizes = {"samples_per_prompt": 4, "max_tokens_per_microbatch": 60}
    module = make_algorithm(GRPO, model_folder, share_prefixes=True, validate_first=False, **sizes)
    trainer = make_trainer(tmp_path, 1, UseSampler(lambda _: FixedCompletions()))
    trainer.fit(module, make_data(tmp_path))
    assert trainer.callback_metrics["attention/shared_share"].item() == 4 * 2 * 30 / (16 * 40)


class Recorded(InFloat64):
    """Keeps each update's decision."""

    def update(self, batch: RolloutBatch) -> dict[str, float]:
        self.decisions = [*getattr(self, "decisions", []), batch.shares_prefixes]
        return super().update(batch)


def train(
    folder: Path, model: str, generator: UseSampler, num_ranks: int = 1, *, least: float = 0.3, **how: Any
) -> dict[str, Any]:
    """Two steps; with decisions, the saved shares of this rank and of all, and ``attention/shared_share``."""
    folder.mkdir(exist_ok=True)
    shares: list[list[float]] = []

    def record(own: Tensor, *args: Any, name: str = "reduce") -> Tensor:
        total = all_reduce(own, *args, name=name)
        if name == "lengths of shared prefixes":
            shares.append([float(counts[0] / counts[1]) for counts in (own, total)])
        return total

    usual = {"samples_per_prompt": 4, "validate_first": False, "updates_per_rollout": 2, "kl_coef": 0.1}
    module = make_algorithm(Recorded, model, **usual | how)
    ranks: dict[str, Any] = {"devices": num_ranks, "strategy": DDP()} if num_ranks > 1 else {}
    trainer = make_trainer(folder, 2, generator, precision="64-true", **ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "all_reduce", record)
        patch.setattr(packing, "least_saved_share", lambda _: least)
        trainer.fit(module, make_data(folder))
    return {
        "weights": {name: weight.tolist() for name, weight in full_weights(module.loaded_actor).items()},
        "decisions": module.decisions,
        "shares": shares,
        "logged": trainer.callback_metrics["attention/shared_share"].item(),
        "metrics": {name: trainer.callback_metrics[name].item() for name in ("policy/loss", "optim/grad_norm")},
    }


@pytest.mark.long
def test_auto_takes_the_steps_of_sequences_alone(model_folder: str, tmp_path: Path) -> None:
    runs = [train(tmp_path, model_folder, UseSampler(LongPrompts), **how) for how in ({}, {"share_prefixes": False})]
    auto, alone = runs
    assert auto["decisions"] == [True, True] and auto["logged"] > 0.25
    assert alone["decisions"] == [False, False] and alone["logged"] == 0 and alone["shares"] == []
    check_close(auto, alone)
    short = train(tmp_path, model_folder, UseSampler(LongPrompts), least=0.9)
    assert short["decisions"] == [False, False] and short["weights"] == alone["weights"]


def test_resumed_run_decides_alike_and_has_the_same_bits(model_folder: str, tmp_path: Path) -> None:
    def fit(steps: int, ckpt_path: Path | None = None) -> tuple[Recorded, Any]:
        module = make_algorithm(Recorded, model_folder, samples_per_prompt=4, validate_first=False)
        trainer = make_trainer(tmp_path, steps, UseSampler(LongPrompts), precision="64-true")
        trainer.fit(module, make_data(tmp_path), ckpt_path=ckpt_path)
        return module, trainer

    whole, _ = fit(2)
    _, trainer = fit(1)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    resumed, _ = fit(2, tmp_path / "first.ckpt")
    assert resumed.decisions == whole.decisions[1:] == [True]
    expected = full_weights(whole.loaded_actor)
    assert all(torch.equal(weight, expected[name]) for name, weight in full_weights(resumed.loaded_actor).items())


def train_rank(folder: Path, model: str, thresholds: Sequence[float]) -> list[dict[str, Any]]:
    """A run in which rank 0 alone has much to share for each threshold, then one in which both have."""
    rank = os.environ["RANK"]
    folder = folder / rank
    folder.mkdir()
    uneven = [
        UseSampler(LongPrompts) if rank == "0" else UseSampler(ActorSampler, max_new_tokens=40) for _ in thresholds
    ]
    runs = [
        train(folder / str(least), model, generator, 2, least=least)
        for least, generator in zip(thresholds, uneven, strict=True)
    ]
    return [*runs, train(folder / "even", model, UseSampler(LongPrompts), 2)]


@pytest.mark.processes
def test_ranks_decide_alike(model_folder: str, tmp_path: Path) -> None:
    thresholds = (0.25, 0.4)
    first, second = finish(start_calls(train_rank, 2, tmp_path, model_folder, thresholds))
    for least, decision, one, other in zip(thresholds, (True, False), first, second, strict=False):
        assert one["decisions"] == other["decisions"] == [decision] * 2
        assert one["weights"] == other["weights"]
        for (own, total), (others, same) in zip(one["shares"], other["shares"], strict=True):
            assert own > least > others and total == same
    alone = train(tmp_path / "alone", model_folder, UseSampler(LongPrompts))
    assert [total for _, total in first[-1]["shares"]] == [total for _, total in alone["shares"]]
    check_close(first[-1], alone)
