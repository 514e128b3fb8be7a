"""Training steps: the same update for any cut into micro-batches, the reference model, and refused arguments."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_steps import REWARDS, SMALL, ComputesAll, Weights, assert_close, train
from tiny import UseSampler, copy_weights, make_batch, make_data, make_trainer, save_model
from torch import Tensor, nn

from rlightning.algorithms import DAPO, GRPO
from rlightning.data import ValidationSet
from rlightning.errors import ConfigError
from rlightning.models import load_policy, packed_logprobs
from rlightning.module import RLModule, policy_module, update
from rlightning.objectives import ForwardPass, LossComponent, cross_entropy
from rlightning.objectives.kl import estimate_kl
from rlightning.rollout import Sampling
from rlightning.types import Prompt, RolloutBatch, Trajectory

# However it is cut


class Imitating(GRPO):
    """Adds the cross-entropy of what is sampled to the loss, with a denominator of its own."""

    def loss_components(self) -> list[LossComponent]:
        other: Any = "sequence_mean" if self.loss_aggregation == "token_mean" else "token_mean"
        return [*super().loss_components(), LossComponent("imitation", self.imitate, weight=0.1, denominator=other)]

    def imitate(self, forward: ForwardPass, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return cross_entropy(forward.logprobs, batch)


@pytest.mark.long
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "trajectory_mean", "constant"])
def test_the_cut_into_microbatches_changes_nothing(aggregation: Any, model_folder: str, tmp_path: Path) -> None:
    arguments = SMALL | {"loss_aggregation": aggregation, "updates_per_rollout": 2, "entropy_coef": 0.01}
    start: Weights = {}
    results: list[Weights] = []
    passes: list[int] = []
    for limit in (40, 10_000):
        module = Imitating(model_folder, rewards=REWARDS, max_tokens_per_microbatch=limit, **arguments)
        module.configure_model()
        start = copy_weights(module)
        counter = Counter(module)
        # In float32 Adam takes a whole step where a gradient is nothing but rounding.
        results.append(train(module, tmp_path, 3, counter, precision="64-true"))
        passes.append(counter.num_losses)
    assert passes[1] == 3 * 2 < passes[0]
    assert max((results[0][name] - start[name]).abs().max().item() for name in start) > 1e-3
    assert_close(results[0], results[1], 1e-9)


class Counter(UseSampler):
    """Counts forward passes with and without gradient."""

    def __init__(self, module: RLModule) -> None:
        super().__init__()
        self.num_losses = self.num_evaluations = 0
        loss, evaluate = module.loss, module.evaluate_logprobs

        def counted_loss(*args: Any) -> Tensor:
            self.num_losses += 1
            return loss(*args)

        def counted_evaluate(*args: Any, **kwargs: Any) -> Tensor:
            self.num_evaluations += 1
            return evaluate(*args, **kwargs)

        module.loss = counted_loss  # type: ignore[assignment,method-assign]
        module.evaluate_logprobs = counted_evaluate  # type: ignore[method-assign]


@pytest.mark.parametrize(("updates", "epochs", "evaluations"), [(1, 1, 0), (2, 1, 1), (1, 2, 1)])
def test_old_logprobs_cost_a_pass_with_several_updates(
    updates: int, epochs: int, evaluations: int, model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[int] = []

    def counted(model: Any, batch: RolloutBatch, **kwargs: Any) -> Any:
        tokens.append(batch.num_sequences)
        return packed_logprobs(model, batch, **kwargs)

    for file in (update, policy_module):
        monkeypatch.setattr(file, "packed_logprobs", counted)
    module = ComputesAll(
        model_folder, rewards=REWARDS, kl_coef=0.0, updates_per_rollout=updates, epochs_per_rollout=epochs, **SMALL
    )
    train(module, tmp_path, 1)
    assert sum(tokens) == 16 * (epochs + evaluations)


@pytest.mark.long
def test_updates_that_keep_logits_train_alike(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit; only passes with a gradient keep them."""
    asked: list[tuple[bool, bool]] = []

    def counted(model: Any, batch: RolloutBatch, **kwargs: Any) -> Any:
        asked.append((kwargs.get("keeps_logits", False), torch.is_grad_enabled()))
        return packed_logprobs(model, batch, **kwargs)

    for file in (update, policy_module):
        monkeypatch.setattr(file, "packed_logprobs", counted)
    trained: list[Weights] = []
    for is_kept in (False, True):
        monkeypatch.setattr(GRPO, "should_keep_logits", lambda _, is_kept=is_kept: is_kept)
        asked.clear()
        module = GRPO(model_folder, rewards=REWARDS, updates_per_rollout=2, entropy_coef=0.01, **SMALL)
        trained.append(train(module, tmp_path, 2))
        assert set(asked) == {(is_kept, True), (False, False)}
    assert all(torch.equal(trained[0][name], weight) for name, weight in trained[1].items())


@pytest.mark.parametrize("spare", [0, -1])
def test_logits_of_more_tokens_than_planned_are_recomputed(
    spare: int, model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of sequences that share sampled tokens, of which a micro-batch has more than it computes."""
    asked: list[bool] = []
    monkeypatch.setattr(update, "packed_logprobs", lambda *_, **kwargs: asked.append(kwargs["keeps_logits"]))
    batch, module = RolloutBatch.of_sequences([[3, 4, 5], [3, 4]]), GRPO(model_folder, rewards=REWARDS, **SMALL)
    module.actor, module.keeps_logits, module.sampling = nn.Module(), True, Sampling()  # type: ignore[assignment]
    plan: Any = SimpleNamespace(max_tokens_per_microbatch=len(batch.sampled_index) + spare)
    module.plan = plan
    module.compute_logprobs(batch)
    assert asked == [spare == 0]


@pytest.mark.long
def test_importance_ratio_is_one_until_second_update(model_folder: str, tmp_path: Path) -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    class Watched(ComputesAll):
        def policy_loss(self, logprobs: Tensor, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
            assert batch.old_logprobs is not None and not batch.old_logprobs.requires_grad
            seen.append((logprobs.detach(), batch.old_logprobs))
            return super().policy_loss(logprobs, batch)

    train(Watched(model_folder, rewards=REWARDS, **SMALL), tmp_path, 1)
    assert all(torch.equal(new, old) for new, old in seen)
    seen.clear()
    train(Watched(model_folder, rewards=REWARDS, updates_per_rollout=2, **SMALL), tmp_path, 1)
    torch.testing.assert_close(seen[0][0], seen[0][1], atol=1e-5, rtol=0)
    assert not torch.allclose(seen[1][0], seen[1][1], atol=1e-4)  # the second update is off its rollout's policy


@pytest.mark.long
def test_approximated_proximal_policy_without_staleness_matches_recomputed(model_folder: str, tmp_path: Path) -> None:
    def trained(proximal_policy: Any) -> dict[str, Tensor]:
        module = GRPO(model_folder, rewards=REWARDS, proximal_policy=proximal_policy, updates_per_rollout=2, **SMALL)
        return train(module, tmp_path, 2)

    recomputed, approximated = trained("recomputed"), trained("approximated")
    for name, weight in recomputed.items():
        torch.testing.assert_close(approximated[name], weight, atol=1e-5, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_every_precision_keeps_float32_values(precision: Any, model_folder: str, tmp_path: Path) -> None:
    class Watched(ComputesAll):
        def update(self, batch: RolloutBatch) -> dict[str, float]:
            values = (batch.rewards, batch.advantages, batch.old_logprobs, batch.ref_logprobs)
            dtypes = [None if value is None else value.dtype for value in values]
            assert dtypes == [torch.float64] + [torch.float32] * 3
            return super().update(batch)

    module = Watched(model_folder, rewards=REWARDS, updates_per_rollout=2, kl_coef=0.1, **SMALL)
    weights = train(module, tmp_path, 2, precision=precision)
    dtype = {"bf16-mixed": torch.float32, "bf16-true": torch.bfloat16, "64-true": torch.float64}[precision]
    assert all(weight.dtype == dtype and weight.isfinite().all() for weight in weights.values())


# The reference


@pytest.mark.long
def test_kl_in_loss_starts_at_zero_and_grows(model_folder: str, tmp_path: Path) -> None:
    seen: list[float] = []

    class Watched(ComputesAll):
        def update(self, batch: RolloutBatch) -> dict[str, float]:
            assert batch.ref_logprobs is not None
            metrics = super().update(batch)
            seen.append(metrics["policy/kl"])
            return metrics

    without = GRPO(model_folder, rewards=REWARDS, kl_coef=0.0, **SMALL)
    free = train(without, tmp_path, 3)
    assert list(without.roles) == ["actor"]
    held = train(Watched(model_folder, rewards=REWARDS, kl_coef=1.0, **SMALL), tmp_path, 3)
    assert seen[0] == pytest.approx(0.0, abs=1e-6) and seen[1] > 1e-6
    assert any(not torch.allclose(free[name], held[name], atol=1e-5) for name in free)


def test_kl_in_the_reward_is_taken_off_it(model_folder: str, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", seed=1)
    batches: list[RolloutBatch] = []
    judged: list[Tensor] = []

    class Watched(ComputesAll):
        def compute_advantages(self, batch: RolloutBatch) -> Tensor:
            assert batch.rewards is not None
            judged.append(batch.rewards)
            return super().compute_advantages(batch)

        def update(self, batch: RolloutBatch) -> dict[str, float]:
            batches.append(batch)
            return super().update(batch)

    arguments = SMALL | {"kl_coef": 0.5, "kl_estimator": "k1", "kl_placement": "reward"}
    module = Watched(model_folder, rewards=REWARDS, reference_model=other, **arguments)
    train(module, tmp_path, 1, UseSampler(temperature=0.7))
    batch = batches[0]
    with torch.no_grad():
        actor, reference = (
            packed_logprobs(load_policy(folder), batch, temperature=0.7)[0] for folder in (model_folder, other)
        )
    divergence = batch.sum_tokens(torch.where(batch.is_sampled, actor - reference, 0))
    assert batch.rewards is not None
    # advantages go by the penalised rewards; what was rewarded stays for everybody else to see
    torch.testing.assert_close(judged[0], batch.rewards - 0.5 * divergence, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(batch.rewards, module.rewarder.score(batch.trajectories).rewards)
    assert estimate_kl(actor, reference, "k1").shape == (batch.num_tokens,)
    assert module.trainer.callback_metrics["policy/kl"] == pytest.approx(
        (divergence.sum() / batch.is_sampled.sum()).item(), abs=1e-4
    )


# What cannot work is said before any model is loaded


@pytest.mark.parametrize(
    ("algorithm", "arguments", "message"),
    [
        (GRPO, {"rewards": ()}, "GRPO has no reward function"),
        (DAPO, {"rewards": ()}, r"DAPO has no reward function. Name at least one in model\.rewards"),
        (GRPO, {"samples_per_prompt": 1}, "samples_per_prompt=1: GRPO compares completions of one prompt"),
    ],
)
def test_refused_before_the_model_loads(
    algorithm: type[RLModule], arguments: dict[str, Any], message: str, model_folder: str, tmp_path: Path
) -> None:
    module = algorithm(model_folder, **{"rewards": REWARDS} | SMALL | arguments)
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, 1).fit(module, make_data(tmp_path))
    assert module.actor is None
    assert module.sampler is None  # no callback has been set up: no engine would have been started


def test_override_of_rewards_needs_no_function(model_folder: str, tmp_path: Path) -> None:
    seen: list[tuple[Any, Tensor]] = []

    class Own(DAPO):
        def compute_rewards(self, batch: RolloutBatch) -> Tensor:
            return batch.completion_lengths.float()

        def compute_advantages(self, batch: RolloutBatch) -> Tensor:
            seen.append((batch.rewards, batch.completion_lengths.float()))
            return super().compute_advantages(batch)

    train(Own(model_folder, **SMALL), tmp_path, 1)
    assert seen and all(len(lengths) and torch.equal(rewards, lengths) for rewards, lengths in seen)


def test_module_without_engine_is_refused(model_folder: str, tmp_path: Path) -> None:
    module = GRPO(model_folder, rewards=REWARDS, **SMALL)
    trainer = make_trainer(tmp_path, 1, UseSampler(lambda module: None))
    message = (
        r"GRPO has nothing to generate with\. Fill the section rollout, or add VLLMRollout to trainer\.callbacks\."
    )
    with pytest.raises(ConfigError, match=message):
        trainer.fit(module, make_data(tmp_path))
    assert module.actor is None


def test_what_a_subclass_must_define(model_folder: str) -> None:
    module = RLModule(model_folder)
    batch = make_batch([[[0]]])
    with pytest.raises(NotImplementedError, match=r"RLModule does not define compute_advantages\(batch\)"):
        module.compute_advantages(batch)
    with pytest.raises(NotImplementedError, match=r"RLModule does not define policy_loss\(logprobs, batch\)"):
        module.policy_loss(torch.zeros(3), batch)


# Validation and prediction by themselves


@pytest.mark.long
def test_validate_and_predict_load_the_actor_alone(model_folder: str, tmp_path: Path) -> None:
    module = GRPO(model_folder, rewards=REWARDS, **SMALL)
    path = str(tmp_path / "sums.jsonl")
    data = make_data(tmp_path, validation={"sums": ValidationSet(path, samples_per_prompt=2)}, predict=path)
    (metrics,) = make_trainer(tmp_path, 1).validate(module, data, verbose=False)
    assert {"val/sums/reward", "val/sums/pass@1", "val/sums/pass@2", "val/sums/length"} <= set(metrics)
    (metrics,) = make_trainer(tmp_path, 1).test(module, data, verbose=False)
    assert "test/sums/reward" in metrics
    assert list(module.roles) == ["actor"]
    predicted: Any = make_trainer(tmp_path, 1).predict(module, data)
    pairs: list[tuple[Prompt, list[Trajectory]]] = [pair for batch in predicted for pair in batch]
    assert len(pairs) == 16 and all(len(completions) == 4 for _, completions in pairs)
    assert pairs[5][0].text == "1+1="
