"""Sequences that cannot move the gradient are not computed, and nothing else changes, on one rank and on two."""

import logging
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence_run import RandomSampler
from lightning.pytorch import Callback
from rank_processes import each_run, finish, start_calls
from small_steps import StepMetrics
from tiny import UseSampler, full_weights, make_algorithm, make_data, make_trainer, save_model
from torch import Tensor

from rlightning.algorithms import GRPO
from rlightning.hooks import RLCallback
from rlightning.models import packed_logprobs
from rlightning.module import update
from rlightning.module.metrics import RunningMeans
from rlightning.objectives import RolloutCorrection
from rlightning.parallel import DDP, FSDP
from rlightning.parallel.collectives import global_rank
from rlightning.types import RolloutBatch

STEPS = 3
ALL_ALIKE = 1
"""The step all of whose groups have equal rewards."""


class HalfAlike(GRPO):
    """Of every second prompt all completions have the same reward, and in one step those of all prompts.

    Each sequence is a micro-batch, so that one more or less does not change the bits of a product over tokens.
    """

    is_cut = True

    def compute_rewards(self, batch: RolloutBatch) -> Tensor:
        is_alike = torch.tensor([prompt.index % 2 == 0 for prompt in batch.prompts])
        rewards = (torch.arange(batch.num_trajectories) % 4).double().square()
        return torch.where(is_alike | (self.weight_version == ALL_ALIKE), 1.0, rewards)

    def split_microbatches(self, batch: RolloutBatch, max_tokens: int) -> list[list[int]]:
        return super().split_microbatches(batch, 1 if self.is_cut else max_tokens)


class InLargeMicrobatches(HalfAlike):
    is_cut = False


class ComputesAll(HalfAlike):
    """Computes sequences without advantage, too."""

    def skippable_sequences(self, batch: RolloutBatch) -> Tensor:
        return torch.zeros(batch.num_sequences, dtype=torch.bool)


class OfFirstRank(GRPO):
    """Only what balance gives the first rank has advantages."""

    def compute_rewards(self, batch: RolloutBatch) -> Tensor:
        return (torch.arange(batch.num_trajectories) % 4).double()

    def compute_advantages(self, batch: RolloutBatch) -> Tensor:
        return super().compute_advantages(batch) * (global_rank() == 0)

    def split_microbatches(self, batch: RolloutBatch, max_tokens: int) -> list[list[int]]:
        return super().split_microbatches(batch, 1)


class OwnLoss(HalfAlike):
    """Its loss has a part that no advantage multiplies."""

    def policy_loss(self, logprobs: Tensor, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.advantages is not None
        return -(batch.advantages + 0.1) * logprobs, {}


class LossWithTerm(HalfAlike):
    """Overrides the loss itself, to add a term on all sampled tokens."""

    def loss(self, batch: RolloutBatch, means: RunningMeans) -> Tensor:
        logprobs, _ = self.compute_logprobs(batch)
        return super().loss(batch, means) + 0.01 * logprobs.square().sum()


class LossWithTermComputesAll(LossWithTerm, ComputesAll):
    """The same, without skipping whatever is overridden."""


class OwnLogprobs(HalfAlike):
    def compute_logprobs(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        return super().compute_logprobs(batch)


class OwnGradients(HalfAlike):
    """Moves the advantages of each minibatch, so that none is 0."""

    def accumulate_gradients(self, minibatch: RolloutBatch, means: RunningMeans) -> None:
        assert minibatch.advantages is not None
        minibatch.advantages = minibatch.advantages + 0.1
        super().accumulate_gradients(minibatch, means)


class OwnUpdate(HalfAlike):
    def update(self, batch: RolloutBatch) -> dict[str, float]:
        return super().update(batch)


class Record(StepMetrics):
    """Notes the sequences that are computed, too."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[int] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.computed.append(0)


class ChangeAdvantages(RLCallback):
    """Changes the advantages when the update begins."""

    def __init__(self, scale: float, shift: float) -> None:
        self.scale, self.shift = scale, shift

    def on_update_start(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        assert batch.advantages is not None
        batch.advantages = batch.advantages * self.scale + self.shift


class EntropyInUpdate(RLCallback):
    """Gives the loss an entropy term from the beginning to the end of each update."""

    def on_update_start(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        module.entropy_coef = 0.5

    def on_update_end(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        module.entropy_coef = 0.0


def train(
    folder: Path, model: str, algorithm: str, kind: str | None = None, *callbacks: Callback, **arguments: Any
) -> dict[str, Any]:
    """Weights, metrics and counts of computed sequences after some steps, in float64 but for FSDP."""
    folder.mkdir(exist_ok=True)
    record = Record()

    def counted(model: Any, batch: RolloutBatch, **kwargs: Any) -> Any:
        record.computed[-1] += int(batch.is_sampled.any())
        return packed_logprobs(model, batch, **kwargs)

    usual = {
        "samples_per_prompt": 4,
        "max_tokens_per_microbatch": 46,
        "share_prefixes": False,  # what sequences share would depend on the cut, and norms round to float32
        "validate_first": False,
        "weight_decay": 0.1,
    }
    module: Any = make_algorithm(globals()[algorithm], model, **usual | arguments)
    # A sum over ranks after each micro-batch would add up others, in another order.
    strategy = FSDP(reduce_every_microbatch=False) if kind == "fsdp" else DDP()
    ranks: dict[str, Any] = {"devices": 2, "strategy": strategy} if kind else {}
    precision = "32-true" if kind == "fsdp" else "64-true"  # which it does not have
    trainer = make_trainer(folder, STEPS, UseSampler(RandomSampler), record, *callbacks, precision=precision, **ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "packed_logprobs", counted)
        trainer.fit(module, make_data(folder))
    weights = {name: weight.tolist() for name, weight in full_weights(module.loaded_actor).items()}
    return {"weights": weights, "metrics": record.metrics, "computed": record.computed}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def distance(first: dict[str, Any], second: dict[str, Any]) -> float:
    pairs = zip(first["weights"].values(), second["weights"].values(), strict=True)
    return max((torch.tensor(a).double() - torch.tensor(b).double()).abs().max().item() for a, b in pairs)


def check_skipped(skipped: dict[str, Any], whole: dict[str, Any]) -> None:
    """The same bits, of fewer sequences."""
    assert skipped["weights"] == whole["weights"]
    for name in ("optim/grad_norm", "optim/skipped"):
        assert [step[name] for step in skipped["metrics"]] == [step[name] for step in whole["metrics"]]
    shares = [step["policy/skipped_share"] for step in skipped["metrics"]]
    assert shares[ALL_ALIKE] == 1 and all(0 < shares[step] < 1 for step in (0, 2))
    assert [step["policy/skipped_share"] for step in whole["metrics"]] == [0] * STEPS
    # A skipped token has no loss: the mean over the others is larger.
    for step in range(STEPS):
        few, all_ = skipped["metrics"][step], whole["metrics"][step]
        if step == ALL_ALIKE:
            assert math.isnan(few["policy/loss"]) and math.isnan(few["policy/entropy"])
            assert few["optim/grad_norm"] == 0
        else:
            assert few["policy/loss"] * (1 - shares[step]) == pytest.approx(all_["policy/loss"], abs=1e-7)


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"updates_per_rollout": 2, "epochs_per_rollout": 2, "loss_aggregation": "group_mean"},
        {"loss_aggregation": "token_mean", "rollout_correction": RolloutCorrection("icepop", "sequence_mean")},
    ],
)
def test_skipping_gives_the_same_bits(arguments: dict[str, Any], model: str, tmp_path: Path) -> None:
    skipped, whole = (train(tmp_path, model, name, **arguments) for name in ("HalfAlike", "ComputesAll"))
    check_skipped(skipped, whole)
    passes = arguments.get("epochs_per_rollout", 1)
    assert whole["computed"] == [16 * passes] * STEPS
    assert skipped["computed"] == [8 * passes, 0, 8 * passes]


@pytest.mark.long
def test_skipping_in_large_microbatches_is_close(model: str, tmp_path: Path) -> None:
    skipped, whole = (train(tmp_path, model, name) for name in ("InLargeMicrobatches", "ComputesAll"))
    assert distance(skipped, whole) < 1e-9
    assert sum(skipped["computed"]) < 8


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "arguments"),
    [("HalfAlike", {"kl_coef": 0.1}), ("HalfAlike", {"entropy_coef": 0.01}), ("OwnLoss", {})],
)
def test_sequences_that_a_term_reads_are_computed(
    algorithm: str, arguments: dict[str, Any], model: str, tmp_path: Path
) -> None:
    run = train(tmp_path, model, algorithm, **arguments)
    assert run["computed"] == [16] * STEPS
    assert [step["policy/skipped_share"] for step in run["metrics"]] == [0] * STEPS


def test_override_of_loss_gets_the_gradient_of_all_sequences(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    own, whole = (train(tmp_path, model, name) for name in ("LossWithTerm", "LossWithTermComputesAll"))
    assert own["computed"] == [2 * 16] * STEPS  # log-probabilities are computed twice
    assert own["weights"] == whole["weights"]
    assert own["metrics"][ALL_ALIKE]["optim/grad_norm"] > 0
    lines = [record.getMessage() for record in caplog.records if "without advantage are computed" in record.message]
    assert len(lines) == 1 and "LossWithTerm overrides loss()" in lines[0]


def test_what_is_skipped_is_decided_after_on_update_start(model: str, tmp_path: Path) -> None:
    moved = train(tmp_path, model, "HalfAlike", None, ChangeAdvantages(1.0, 0.1))
    assert moved["computed"] == [16] * STEPS
    assert moved["weights"] == train(tmp_path, model, "OwnGradients")["weights"]  # which adds as much
    assert train(tmp_path, model, "HalfAlike", None, ChangeAdvantages(0.0, 0.0))["computed"] == [0] * STEPS


def test_loss_term_set_on_update_start_reads_all_sequences(model: str, tmp_path: Path) -> None:
    own, whole = (train(tmp_path, model, name, None, EntropyInUpdate()) for name in ("HalfAlike", "ComputesAll"))
    assert own["computed"] == [16] * STEPS
    assert own["weights"] == whole["weights"]


@pytest.mark.parametrize(
    ("algorithm", "skipped"),
    [
        (HalfAlike, True),
        (OwnLoss, False),
        (LossWithTerm, False),
        (OwnLogprobs, False),
        (OwnGradients, False),
        (OwnUpdate, False),
    ],
)
def test_sequences_are_skipped_only_by_methods_of_the_package(algorithm: type[GRPO], skipped: bool, model: str) -> None:
    module = make_algorithm(algorithm, model)
    batch = RolloutBatch.of_sequences([[1, 2, 3], [1, 2, 3]])
    batch.advantages = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    assert module.skippable_sequences(batch).tolist() == [False, skipped]


def test_masked_sequences_are_skipped(model: str, tmp_path: Path) -> None:
    """Of a module that trains no truncated completion: those of the generator all end by themselves."""
    module = make_algorithm(HalfAlike, model)
    batch = RolloutBatch.of_sequences([[1, 2, 3], [1, 2, 3]])
    batch.advantages = torch.ones(6)
    batch.is_sampled[3:] = False
    assert module.skippable_sequences(batch).tolist() == [False, True]
    batch.advantages = None
    assert module.skippable_sequences(batch).tolist() == [False, False]


def train_rank(folder: Path, model: str, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    names = ("HalfAlike", "ComputesAll", "InLargeMicrobatches", "OfFirstRank")
    for name, _ in each_run({name: {} for name in names}):
        arguments = {"updates_per_rollout": 2} if name == "InLargeMicrobatches" else {}
        found[name] = train(folder / f"{name} {os.environ['RANK']}", model, name, kind, **arguments)
    return found


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_skipping_on_two_ranks_gives_the_same_bits(kind: str, model: str, tmp_path: Path) -> None:
    first, second = finish(start_calls(train_rank, 2, tmp_path, model, kind))
    for rank in (first, second):
        check_skipped(rank["HalfAlike"], rank["ComputesAll"])
        assert rank["HalfAlike"]["computed"] == [4, 0, 4]
        assert rank["OfFirstRank"]["computed"] == [4] * STEPS  # not 8 and 0: groups are moved once more
    for name in first:
        assert first[name]["weights"] == second[name]["weights"]
    if kind == "ddp":
        assert distance(first["HalfAlike"], train(tmp_path, model, "HalfAlike")) < 1e-9
