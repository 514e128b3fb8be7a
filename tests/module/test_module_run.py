"""A run of several steps: what its steps are counted by, what its checkpoints hold, and that it resumes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from programs import logged_steps
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import (
    ActorSampler,
    UseSampler,
    copy_weights,
    make_algorithm,
    make_batch,
    make_data,
    make_grpo,
    make_trainer,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlightning.algorithms import GRPO, SFT
from rlightning.data import PromptDataModule, ValidationSet
from rlightning.errors import ConfigError, EnvironmentFailedError
from rlightning.models import packed_logprobs
from rlightning.module import RLModule
from rlightning.module.metrics import RunningMeans
from rlightning.rewards import RewardFunction
from rlightning.torch_internals import AdamW
from rlightning.types import RolloutBatch, Trajectory


def fit_with_loggers(module: RLModule, folder: Path, max_steps: int, **kwargs: Any) -> Trainer:
    """Two loggers, checkpoints and validation each second step."""
    trainer = make_trainer(
        folder,
        max_steps,
        UseSampler(),
        ModelCheckpoint(folder / "checkpoints", every_n_train_steps=2, save_top_k=-1, filename="{step}"),
        logger=[CSVLogger(folder / "csv"), TensorBoardLogger(folder / "tensorboard")],
        enable_checkpointing=True,
        val_check_interval=2,
        check_val_every_n_epoch=None,
    )
    sets = {
        "sums": ValidationSet(str(folder / "sums.jsonl")),
        "few": ValidationSet(str(folder / "sums.jsonl"), limit=3),
    }
    trainer.fit(module, make_data(folder, validation=sets, validation_batch_size=5), **kwargs)
    return trainer


@pytest.mark.long
def test_everything_counts_rollout_steps(model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    take = AdamW.step

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        return take(*args, **kwargs)

    monkeypatch.setattr(AdamW, "step", counted)
    # Four steps an epoch: the fifth step begins the second.
    module = make_grpo(model_folder, updates_per_rollout=4, epochs_per_rollout=2)
    trainer = fit_with_loggers(module, tmp_path, 6)
    assert trainer.global_step == module.weight_version == 6
    assert steps == 6 * 4 * 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step=2.ckpt",
        "step=4.ckpt",
        "step=6.ckpt",
    ]
    for column in ("reward/mean", "policy/loss", "optim/lr", "completion/length"):
        assert logged_steps(tmp_path, column) == [1, 2, 3, 4, 5, 6]
    for column in ("val/sums/reward", "val/sums/pass@1", "val/few/length"):
        assert logged_steps(tmp_path, column) == [0, 2, 4, 6]
    (events,) = (tmp_path / "tensorboard").rglob("events*")
    scalars = EventAccumulator(str(events)).Reload()
    assert [event.step for event in scalars.Scalars("policy/loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in scalars.Scalars("val/sums/reward")] == [0, 2, 4, 6]


def test_supervised_validation_counts_alike(model_folder: str, tmp_path: Path) -> None:
    fit_with_loggers(SFT(model_folder, completion_column="answer", prompts_per_step=4, lr=1e-3), tmp_path, 6)
    assert logged_steps(tmp_path, "policy/loss") == [1, 2, 3, 4, 5, 6]
    assert logged_steps(tmp_path, "val/sums/loss") == logged_steps(tmp_path, "val/few/loss") == [0, 2, 4, 6]


@pytest.mark.long
def test_validation_before_training_can_be_left_out(model_folder: str, tmp_path: Path) -> None:
    fit_with_loggers(make_grpo(model_folder, validate_first=False), tmp_path, 2)
    assert logged_steps(tmp_path, "val/sums/reward") == [2]


@pytest.mark.long
def test_validation_changes_no_training(model_folder: str, tmp_path: Path) -> None:
    module, plain = make_grpo(model_folder), make_grpo(model_folder)
    fit_with_loggers(module, tmp_path, 3)
    make_trainer(tmp_path, 3).fit(plain, make_data(tmp_path))
    assert all(torch.equal(weight, dict(plain.named_weights())[name]) for name, weight in module.named_weights())
    assert module.loaded_actor.training


@pytest.mark.long
def test_a_resumed_run_is_the_run(model_folder: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "updates_per_rollout": 2,
        "lr_schedule": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "kl_coef": 0.1,
    }
    module = make_grpo(model_folder, **arguments)
    whole = fit_with_loggers(module, tmp_path, 6)
    checkpoint = tmp_path / "checkpoints" / "step=4.ckpt"
    content = torch.load(checkpoint, weights_only=False)
    assert content["weight_version"] == 4
    assert not any(name.startswith("reference") for name in content["state_dict"])
    again = make_grpo(model_folder, **arguments)
    folder = tmp_path / "again"
    folder.mkdir()
    resumed = fit_with_loggers(again, folder, 6, ckpt_path=str(checkpoint), weights_only=False)
    assert resumed.global_step == again.weight_version == 6
    # No validation before a first step that is not the run's
    assert logged_steps(folder, "policy/loss") == [5, 6] and logged_steps(folder, "val/sums/reward") == [6]
    expected = copy_weights(module)
    assert all(torch.equal(weight, expected[name]) for name, weight in again.named_weights())
    states = [trainer.optimizers[0].state_dict()["state"] for trainer in (whole, resumed)]
    assert all(torch.equal(states[0][i][name], value) for i, one in states[1].items() for name, value in one.items())
    assert again.trainer.callback_metrics["optim/lr"] == module.trainer.callback_metrics["optim/lr"]
    # The reference is the model that training started from, not the one that it goes on with.
    start = dict(AutoModelForCausalLM.from_pretrained(model_folder).named_parameters())
    reference = again.roles["reference"].network
    assert reference is not None
    assert all(torch.equal(weight, start[name]) for name, weight in reference.named_parameters())


@pytest.mark.long
def test_validation_of_a_checkpoint_loads_no_reference(model_folder: str, tmp_path: Path) -> None:
    module = make_grpo(model_folder, kl_coef=0.1)
    fit_with_loggers(module, tmp_path, 2)
    other = make_grpo(model_folder, kl_coef=0.1)
    data = make_data(tmp_path, validation=str(tmp_path / "sums.jsonl"))
    checkpoint = str(tmp_path / "checkpoints" / "step=2.ckpt")
    (metrics,) = make_trainer(tmp_path, 1).validate(
        other, data, ckpt_path=checkpoint, verbose=False, weights_only=False
    )
    assert other.roles["reference"].network is None
    assert metrics["val/sums/reward"] == module.trainer.callback_metrics["val/sums/reward"]


class FailingSampler(ActorSampler):
    """Samples trajectories that all fail."""

    def generate(self, *arguments: Any) -> list[list[Trajectory]]:
        groups = super().generate(*arguments)
        return [[replace(one, status="failed") for one in group] for group in groups]


def test_validation_without_any_sample_is_an_error(model_folder: str, tmp_path: Path) -> None:
    data = make_data(tmp_path, validation=str(tmp_path / "sums.jsonl"))
    trainer = make_trainer(tmp_path, 1, UseSampler(FailingSampler))
    with pytest.raises(EnvironmentFailedError, match=r"^No trajectory of the validation set 'sums' was sampled: "):
        trainer.validate(make_grpo(model_folder), data, verbose=False)


def test_a_second_fit_goes_on(model_folder: str, tmp_path: Path) -> None:
    module = make_grpo(model_folder)
    trainer = make_trainer(tmp_path, 2)
    data = make_data(tmp_path)
    trainer.fit(module, data)
    actor = module.actor
    trainer.fit_loop.epoch_loop.max_steps = 3
    trainer.fit(module, data)
    assert module.actor is actor and module.weight_version == trainer.global_step == 3


def test_save_hf_and_score(model_folder: str, tmp_path: Path) -> None:
    module = make_grpo(model_folder)
    make_trainer(tmp_path, 1).fit(module, make_data(tmp_path))
    module.save_hf(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    weights = dict(module.named_weights())
    assert "lm_head.weight" not in weights  # tied: an engine is sent it once
    assert all(torch.equal(weight, weights[name]) for name, weight in loaded.named_parameters())
    token_ids = AutoTokenizer.from_pretrained(tmp_path / "saved")("1+2=3").input_ids
    table = loaded(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
    expected = torch.cat([torch.zeros(1), table[torch.arange(len(token_ids) - 1), torch.tensor(token_ids[1:])]])
    batch = RolloutBatch.of_sequences([token_ids[:1], token_ids])
    scored = module.score(batch, torch.float32)
    assert scored[0] == 0
    torch.testing.assert_close(scored[1:], expected.detach(), atol=1e-5, rtol=1e-5)
    coarse = module.score(batch, torch.bfloat16)[1:]  # of 8 bits
    assert coarse.dtype == torch.float32 and 1e-5 < (coarse - expected).abs().max() < 0.1
    with torch.autocast("cpu", torch.bfloat16):  # which keeps the weights that it has rounded, until it ends
        for _ in range(2):
            nested = module.score(batch, torch.bfloat16)
            with torch.no_grad():
                module.loaded_actor.get_parameter("model.layers.0.mlp.down_proj.weight").neg_()
    assert not torch.equal(nested[1:], coarse)


def test_evaluate_logprobs_however_it_is_cut(model_folder: str) -> None:
    module = make_grpo(model_folder)
    module.configure_model()
    batch: RolloutBatch = make_batch([[[3, 4, 0], [5]], [[6, 7, 8, 9, 0]], [[0]]])
    expected = packed_logprobs(module.loaded_actor, batch, temperature=0.5)[0].detach()
    for limit in (1, 6, 100):
        got = module.evaluate_logprobs(batch, module.loaded_actor, temperature=0.5, max_tokens=limit)
        torch.testing.assert_close(got, expected)
        assert not got.requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_micro_batches_wait_for_no_device(precision: str, model_folder: str, tmp_path: Path) -> None:
    module = make_grpo(model_folder, max_tokens_per_microbatch=24, entropy_coef=0.01)
    accumulate, num_watched = module.accumulate_gradients, 0

    def watched(minibatch: RolloutBatch, means: RunningMeans) -> None:
        nonlocal num_watched
        if module.weight_version:  # the first step compiles
            torch.cuda.set_sync_debug_mode("error")
            num_watched += 1
        try:
            accumulate(minibatch, means)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    module.accumulate_gradients = watched  # type: ignore[method-assign]
    make_trainer(tmp_path, 3, accelerator="gpu", precision=precision).fit(module, make_data(tmp_path))
    assert num_watched == 2


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_two_steps_on_a_gpu(precision: str, model_folder: str, tmp_path: Path) -> None:
    module = make_grpo(model_folder, updates_per_rollout=2, kl_coef=0.1, entropy_coef=0.01)
    trainer = make_trainer(tmp_path, 2, accelerator="gpu", precision=precision)
    trainer.fit(module, make_data(tmp_path, validation=str(tmp_path / "sums.jsonl")))
    metrics = trainer.callback_metrics
    assert trainer.global_step == module.weight_version == 2
    assert metrics["optim/skipped"] == 0.0 and metrics["policy/rollout_gap_max"] < 0.1
    assert all(weight.isfinite().all() for _, weight in module.named_weights())


async def answers_first_digit(completion: str, answer: str) -> float:
    return float(completion[:1] == answer)


async def first_digit_is(completion: str, wanted: str = "") -> float:
    return float(completion[:1] == wanted)


async def reads_all(completion: str, **columns: Any) -> float:
    return float(completion[:1] == columns["answer"])


class OwnRewards(GRPO):
    def compute_rewards(self, batch: RolloutBatch) -> torch.Tensor:
        return torch.tensor([float(prompt.columns["answer"] == "1") for prompt in batch.prompts])


READERS: dict[str, tuple[type[RLModule], list[RewardFunction]]] = {
    "a parameter": (GRPO, [RewardFunction(answers_first_digit)]),
    "a renamed parameter": (GRPO, [RewardFunction(first_digit_is, columns={"wanted": "answer"})]),
    "all columns": (GRPO, [RewardFunction(reads_all)]),
    "an override": (OwnRewards, []),
}


def sum_rows(**changes: Any) -> list[dict[str, Any]]:
    """Sixteen sums, of which the third has other columns."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "source": "book"} for a in range(4) for b in range(4)]
    rows[2] |= changes
    return rows


@pytest.mark.long
@pytest.mark.parametrize("reader", READERS)
def test_resume_with_a_changed_answer_is_refused(reader: str, model_folder: str, tmp_path: Path) -> None:
    algorithm, rewards = READERS[reader]

    def run(max_steps: int, rows: list[dict[str, Any]], **options: Any) -> RLModule:
        module = make_algorithm(algorithm, model_folder, rewards=rewards)
        checkpoints = ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=1)
        trainer = make_trainer(tmp_path, max_steps, UseSampler(), checkpoints, enable_checkpointing=True)
        trainer.fit(module, PromptDataModule(rows), **options)
        return module

    run(1, sum_rows())
    resume: dict[str, Any] = {"ckpt_path": str(tmp_path / "last.ckpt"), "weights_only": False}
    with pytest.raises(ConfigError, match="The column 'answer' of the training prompts, which the rewards read") as no:
        run(2, sum_rows(answer="7"), **resume)
    assert "\n" not in str(no.value)
    if reader in ("a parameter", "a renamed parameter"):
        run(2, sum_rows(source="exam"), **resume)
    assert run(2, sum_rows(), **resume).weight_version == 2
