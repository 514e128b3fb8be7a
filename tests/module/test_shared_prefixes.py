"""What sequences share is computed once, and loss and gradient are those of each sequence alone."""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from random_trajectories import random_groups, random_sample, two_branches
from rank_processes import each_run, finish, start_calls
from tiny import ActorSampler, UseSampler, full_weights, make_algorithm, make_data, make_trainer
from tiny_models import save_tiny
from transformers import AutoConfig
from varlen_on_cpu import run_kernels_on_cpu

from rlightning.algorithms import GRPO
from rlightning.models import architecture, load_policy, packed_logprobs
from rlightning.models.architecture import can_share_prefixes
from rlightning.module import packing
from rlightning.module.batching import find_long_prefixes, join_families
from rlightning.module.metrics import RunningMeans
from rlightning.objectives import Aggregation
from rlightning.parallel import DDP
from rlightning.types import Prompt, RolloutBatch, Trajectory
from rlightning.types.shared_prefixes import Prefixes, find_prefixes, share_prefixes

RANDOM = st.integers(0, 2**32).map(random.Random)


def random_tree(draw: random.Random) -> list[list[int]]:
    """Sequences that begin like an earlier one, up to any of its tokens, in any order; some are the same."""
    sequences = [[draw.randrange(3, 13) for _ in range(draw.randint(2, 9))]]
    for _ in range(draw.randint(0, 7)):
        start = draw.choice(sequences)
        kept = start[: draw.randint(0, len(start))]
        sequences.append((kept + [draw.randrange(3, 13) for _ in range(draw.randint(0, 6))]) or [3, 4])
    return draw.sample([one if len(one) > 1 else [*one, 5] for one in sequences], len(sequences))


def test_own_tokens_of_a_tree_are_computed_once() -> None:
    batch = RolloutBatch.of_sequences([[3, 4, 5, 6, 7], [3, 4, 8, 9], [5, 6], [3, 4, 5, 10], [5, 6]])
    prefixes = find_prefixes(batch.token_ids, batch.cu_seqlens)
    assert prefixes.order == [0, 3, 1, 2, 4]
    assert prefixes.lengths.tolist() == [0, 2, 0, 3, 1]  # the last token of a copy is its own
    shared = share_prefixes(batch.cu_seqlens, prefixes)
    assert batch.token_ids[shared.unique].tolist() == [3, 4, 5, 6, 7, 10, 8, 9, 5, 6, 6]
    assert shared.cu_seqlens.tolist() == [0, 5, 6, 8, 10, 11] and shared.max_length == 5
    assert shared.places.tolist() == [0, 1, 2, 3, 4, 0, 1, 6, 7, 8, 9, 0, 1, 2, 5, 8, 10]
    assert shared.paths.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 0, 1, 6, 7, 8, 9, 8, 10]
    assert shared.path_cu_seqlens.tolist() == [0, 5, 9, 13, 15, 17] and shared.max_path == 5


def test_segments_of_a_tree() -> None:
    """10, 8 and 9 attend to 3 and 4, 10 alone to 5 as well, and the last 6 to the 5 of its copy."""
    batch = RolloutBatch.of_sequences([[3, 4, 5, 6, 7], [3, 4, 8, 9], [5, 6], [3, 4, 5, 10], [5, 6]])
    shared = share_prefixes(batch.cu_seqlens, find_prefixes(batch.token_ids, batch.cu_seqlens))
    first = [[0, 5, 5, 8, 10, 10, 11, 11, 11], [0, 0, 0, 2, 2, 8, 9, 9, 11]]
    second = [[0, 5, 5, 6, 11, 11, 11, 11, 11], [0, 0, 2, 3, 3, 11, 11, 11, 11]]
    assert shared.segments.tolist() == first + second and shared.max_segment == (5, 8)


@settings(max_examples=100, deadline=None)
@given(RANDOM)
def test_each_token_attends_to_its_history_once(draw: random.Random) -> None:
    batch = RolloutBatch.of_sequences(random_tree(draw))
    shared = share_prefixes(batch.cu_seqlens, find_prefixes(batch.token_ids, batch.cu_seqlens))
    num_tokens = shared.unique.numel()
    expected, got = (torch.zeros(num_tokens, num_tokens, dtype=torch.int64) for _ in range(2))
    for start, end in pairwise(shared.path_cu_seqlens.tolist()):
        path = shared.paths[start:end]
        for step in range(end - start):
            expected[path[step], path[: step + 1]] = 1
    for start, end in pairwise(shared.cu_seqlens.tolist()):
        got[start:end, start:end] += torch.ones(end - start, end - start, dtype=torch.int64).tril()
    for queries, keys in shared.segments.unflatten(0, (-1, 2)):
        assert queries[0] == keys[0] == 0 and queries[-1] == keys[-1] == num_tokens
        for query, key in zip(pairwise(queries.tolist()), pairwise(keys.tolist()), strict=True):
            got[slice(*query), slice(*key)] += 1
    assert torch.equal(got, expected)


@settings(max_examples=100, deadline=None)
@given(RANDOM)
def test_places_stand_for_one_token_and_history(draw: random.Random) -> None:
    batch = RolloutBatch.of_sequences(random_tree(draw))
    shared = share_prefixes(batch.cu_seqlens, find_prefixes(batch.token_ids, batch.cu_seqlens))
    histories: dict[int, list[int]] = {}
    bounds = batch.cu_seqlens.tolist()
    for start, end in pairwise(bounds):
        tokens = batch.token_ids[start:end].tolist()
        for place in range(start, end):
            key = int(shared.places[place])
            assert histories.setdefault(key, tokens[: place - start + 1]) == tokens[: place - start + 1]
    assert set(histories) == set(range(shared.unique.numel()))
    # No history twice, but for the last tokens of sequences.
    ends = {int(shared.places[end - 1]) for end in bounds[1:]}
    inner = [tuple(history) for key, history in histories.items() if key not in ends]
    assert len(inner) == len(set(inner))


def test_families_are_cut_at_the_limit() -> None:
    prefixes = Prefixes([0, 1, 2, 3], torch.tensor([0, 8, 8, 0]).numpy())
    assert join_families(prefixes, [10, 10, 10, 10], 100, 0.0) == ([[0, 1, 2], [3]], [14, 10])
    assert join_families(prefixes, [10, 10, 10, 10], 13, 0.0) == ([[0, 1], [2], [3]], [12, 10, 10])
    assert join_families(prefixes, [10, 10, 10, 10], 14, 0.25) == ([[0, 1], [2], [3]], [14, 10, 10])


KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8},
    "llama": {"num_key_value_heads": 1},
    "mistral": {"sliding_window": 3},
    "gemma3_text": {"head_dim": 8, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {},
}


def normalize_in_float64(policy: Any) -> None:
    """Have norms compute in the dtype of what they are given: transformers' do in float32, which rounds gradients."""

    def normalize(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
        is_gemma = "Gemma" in type(norm).__name__
        eps = norm.eps if is_gemma else norm.variance_epsilon
        scaled: torch.Tensor = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps)
        weight: torch.Tensor = norm.weight + is_gemma
        return scaled * weight

    for module in policy.modules():
        if "RMSNorm" in type(module).__name__:
            module.forward = partial(normalize, module)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    made = {}
    for kind, config in KINDS.items():
        folder = save_tiny(kind, tmp_path_factory.mktemp(kind), **config)
        made[kind] = load_policy(folder, torch.float64)
        normalize_in_float64(made[kind])
    return made


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None, phases=[Phase.generate])
@given(draw=RANDOM)
def test_loss_and_gradient_are_of_sequences_alone(kind: str, draw: random.Random, policies: dict[str, Any]) -> None:
    policy, batch = policies[kind], RolloutBatch.of_sequences(random_tree(draw))
    assert can_share_prefixes(policy.config)
    weights = torch.rand(2, batch.num_tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    results = []
    for way in ("alone", "by copies", "by segments", "by segments with FlashAttention 4"):
        if way != "alone":
            batch.shared = share_prefixes(batch.cu_seqlens, find_prefixes(batch.token_ids, batch.cu_seqlens))
        policy.zero_grad()
        with pytest.MonkeyPatch.context() as patch:
            if way.startswith("by segments"):
                run_kernels_on_cpu(patch, has_flash_attention=way.endswith("4"))
            logprobs, entropy = packed_logprobs(policy, batch, temperature=0.7, needs_entropy_grad=True)
            ((logprobs * weights[0]).sum() + (entropy * weights[1]).sum()).backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in policy.parameters()]
        results.append([logprobs.detach(), entropy.detach(), *gradients])
    for alone, *others in zip(*results, strict=True):
        for once in others:
            torch.testing.assert_close(once, alone, rtol=1e-9, atol=1e-11)


def random_minibatch(draw: random.Random) -> RolloutBatch:
    """Trajectories of several branches, two groups of which each share a prompt, with all that a loss reads."""
    groups = [[], *random_groups(draw, 2)]
    for index in range(1, 3):
        prompt = Prompt(index, "", [draw.randrange(3, 13) for _ in range(draw.randint(2, 12))], {})
        for _ in range(draw.randint(2, 4)):
            first, second = (random_sample(draw) for _ in range(2))
            groups[0 if index == 1 else index].append(
                two_branches(prompt, first, [*prompt.token_ids, *first.token_ids, 3], second)
            )
    batch = RolloutBatch.pack(groups)
    generator = torch.Generator().manual_seed(draw.randrange(2**32))
    batch.advantages, *others = torch.randn(3, batch.num_tokens, generator=generator)
    batch.old_logprobs, batch.ref_logprobs = (batch.rollout_logprobs + 0.1 * one for one in others)
    return batch


@pytest.mark.long
def test_loss_gradient_and_metrics_of_any_cut_and_aggregation_are_those_of_sequences_alone(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = make_algorithm(GRPO, model_folder)
    module.trainer = make_trainer(tmp_path, 1)
    module.configure_model()
    normalize_in_float64(module.loaded_actor.double())
    monkeypatch.setattr(module, "manual_backward", torch.Tensor.backward)
    saved: list[float] = []

    @settings(max_examples=3, deadline=None, phases=[Phase.generate])
    @given(draw=RANDOM, cut=st.integers(8, 300), estimator=st.sampled_from(["k1", "k2", "k3"]))
    def check(aggregation: Aggregation, draw: random.Random, cut: int, estimator: Any) -> None:
        batch, results = random_minibatch(draw), []
        module.plan = replace(module.plan, max_tokens_per_microbatch=cut)
        module.loss_aggregation, module.kl_estimator = aggregation, estimator
        module.kl_coef, module.entropy_coef = draw.choice((0.0, 0.3)), draw.choice((0.0, 0.1))
        for is_shared in (False, True):
            batch.shares_prefixes, means = is_shared, RunningMeans()
            module.zero_grad()
            module.accumulate_gradients(batch, means)
            gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
            results.append((gradients, means.compute(module.all_sum, module.all_max)))
        (alone, expected), (once, got) = results
        assert expected.pop("attention/shared_share") == 0
        saved.append(got.pop("attention/shared_share"))
        assert got == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert alone.keys() == once.keys()
        for name, gradient in alone.items():
            torch.testing.assert_close(once[name], gradient, rtol=1e-9, atol=1e-11)

    for aggregation in get_args(Aggregation):
        check(aggregation)
    assert sum(saved) / len(saved) > 0.1


class LongPrompts(ActorSampler):
    """Makes every other trajectory of two branches, the second of which goes on with the first one's history."""

    def generate(self, prompts: Sequence[Prompt], num_samples: int, *others: Any) -> list[list[Trajectory]]:
        starts = [(prompt, number, others[0]) for prompt in prompts for number in range(num_samples)]
        firsts = self.complete(starts)
        longer = [
            (p._replace(index=p.index + 50, token_ids=[*p.token_ids, *first.token_ids]), number, sampling)
            for (p, number, sampling), first in zip(starts, firsts, strict=True)
        ]
        made = [
            Trajectory.single_turn(prompt, first)
            if number % 2
            else two_branches(prompt, first, again.token_ids, second)
            for (prompt, number, _), first, (again, *_), second in zip(
                starts, firsts, longer, self.complete(longer), strict=True
            )
        ]
        return [made[n : n + num_samples] for n in range(0, len(made), num_samples)]


class InFloat64(GRPO):
    """Rounds no gradient to float32, which may be nothing but rounding, and of which Adam takes a whole step."""

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        policy = super().load_model(*args, **kwargs)
        normalize_in_float64(policy)
        return policy


def train(folder: Path, model: str, is_shared: bool, num_ranks: int = 1, **arguments: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    usual = {"samples_per_prompt": 4, "max_tokens_per_microbatch": 46, "validate_first": False}
    module = make_algorithm(InFloat64, model, share_prefixes=is_shared, **usual | arguments)
    ranks: dict[str, Any] = {"devices": num_ranks, "strategy": DDP()} if num_ranks > 1 else {}
    trainer = make_trainer(folder, 2, UseSampler(LongPrompts), precision="64-true", **ranks)
    trainer.fit(module, make_data(folder))
    weights = {name: weight.tolist() for name, weight in full_weights(module.loaded_actor).items()}
    metrics = {name: trainer.callback_metrics[name].item() for name in ("policy/loss", "optim/grad_norm")}
    return {"weights": weights, "share": trainer.callback_metrics["attention/shared_share"].item(), "metrics": metrics}


def check_close(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-7)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(torch.tensor(got["weights"][name]), torch.tensor(weight), rtol=0, atol=1e-6)


ARGUMENTS: list[dict[str, Any]] = [
    {"loss_aggregation": "token_mean"},
    {"loss_aggregation": "group_mean", "kl_coef": 0.1, "updates_per_rollout": 2, "max_tokens_per_microbatch": 4096},
    {"loss_aggregation": "sequence_mean", "entropy_coef": 0.01, "max_tokens_per_microbatch": 30},
]
"""Of the Trainer; other aggregations, cuts and estimates of the KL are compared by single mini-batches."""


@pytest.mark.long
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_a_run_takes_the_same_steps(arguments: dict[str, Any], model_folder: str, tmp_path: Path) -> None:
    once, alone = (train(tmp_path, model_folder, is_shared, **arguments) for is_shared in (True, False))
    assert once["share"] > 0.25 and alone["share"] == 0
    check_close(once, alone)


def test_mixed_precision_does_not_round_the_trial(model_folder: str) -> None:
    config = AutoConfig.from_pretrained(model_folder)
    config.initializer_range *= 2  # no trial of an earlier test is of this configuration
    with torch.autocast("cpu", torch.bfloat16):
        assert can_share_prefixes(config)


def train_rank(folder: Path, model: str) -> list[dict[str, Any]]:
    folder = folder / os.environ["RANK"]
    folder.mkdir(exist_ok=True)
    runs: dict[str, dict[str, Any]] = {"0": {"arguments": ARGUMENTS[0]}, "1": {"arguments": ARGUMENTS[1]}}
    return [train(folder / name, model, True, 2, **run["arguments"]) for name, run in each_run(runs)]


@pytest.mark.processes
def test_two_ranks_take_the_same_steps(model_folder: str, tmp_path: Path) -> None:
    first, second = finish(start_calls(train_rank, 2, tmp_path, model_folder))
    for arguments, one, other in zip(ARGUMENTS, first, second, strict=False):
        assert one["weights"] == other["weights"] and one["share"] > 0.2
        check_close(one, train(tmp_path / "alone", model_folder, False, **arguments))


def test_microbatches_compute_no_more_than_their_limit(model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With prefixes that are less than a fifth of a micro-batch, too."""
    run_kernels_on_cpu(monkeypatch)  # nothing is copied
    monkeypatch.setattr(packing, "varlen_obstacle", lambda *_: None)
    module = make_algorithm(GRPO, model_folder)
    module.configure_model()
    starts = [[group, *[3] * 29] for group in range(4, 12)]
    batch = RolloutBatch.of_sequences([[*start, *[number] * 70] for start in starts for number in (4, 5)])
    batch.shares_prefixes = True
    for sequences in module.split_microbatches(batch, 170):
        microbatch = module.to_microbatch(batch, sequences)
        assert len(sequences) == 2 and microbatch.shared is not None and microbatch.shared.unique.numel() == 170


@settings(max_examples=50, deadline=None)
@given(RANDOM)
def test_microbatches_have_each_branch_once(draw: random.Random) -> None:
    batch = RolloutBatch.pack(random_groups(draw))
    prefixes = find_long_prefixes(batch)
    families, tokens = join_families(prefixes, batch.lengths.tolist(), 30, 0.1)
    assert sorted(n for family in families for n in family) == list(range(batch.num_sequences))
    for family, count in zip(families, tokens, strict=True):
        own = batch.select(family, "N")
        unique = share_prefixes(own.cu_seqlens, find_prefixes(own.token_ids, own.cu_seqlens)).unique.numel()
        assert unique <= count + 1e-9 and (count <= 30 or len(family) == 1)


def mix_neighbours(hidden: torch.Tensor) -> torch.Tensor:
    return hidden + hidden.roll(1, 1)


def mix_gradients(hidden: torch.Tensor) -> torch.Tensor:
    """The result is that of attention alone."""
    mixed = hidden.roll(1, 1)
    return hidden + mixed - mixed.detach()


def refuse(hidden: torch.Tensor) -> torch.Tensor:
    raise TypeError("got an unexpected keyword argument 'segments'")


@pytest.mark.parametrize("layer", [mix_neighbours, mix_gradients, refuse])
def test_layers_that_mix_tokens_share_no_prefixes(
    layer: Callable[[torch.Tensor], torch.Tensor], model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = architecture.build_small

    def build_other(config: Any) -> Any:
        policy: Any = build(config)
        policy.model.layers[0].mlp.register_forward_pre_hook(lambda _, inputs: (layer(inputs[0]),))
        return policy

    monkeypatch.setattr(architecture, "build_small", build_other)
    config = AutoConfig.from_pretrained(model_folder)
    config.untried = layer.__name__  # results are kept by configuration
    assert not can_share_prefixes(config)


def test_prefixes_below_a_fifth_are_computed_each_time() -> None:
    starts = [[3, 4, *[5] * 8], [3, 4, *[6] * 8], [3, 4, *[7] * 9], [3, 4, 8]]
    batch = RolloutBatch.of_sequences(starts)
    assert find_prefixes(batch.token_ids, batch.cu_seqlens).lengths.tolist() == [0, 2, 2, 2]
    assert find_long_prefixes(batch).lengths.tolist() == [0, 2, 0, 2]


def test_room_is_left_for_keys_that_are_copied(model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a kernel for the dtype, as in float32 on a GPU, micro-batches leave room for copied keys."""
    monkeypatch.setattr(packing, "varlen_obstacle", lambda _, dtype, __: "copies" if dtype.itemsize > 2 else None)
    module = make_algorithm(GRPO, model_folder)
    module.configure_model()
    batch = RolloutBatch.of_sequences([[4, *[3] * 49, *[number] * 50] for number in (4, 5)])
    batch.shares_prefixes = True
    assert module.split_microbatches(batch, 150) == [[0], [1]]  # its keys and values on top of 150 tokens
    with torch.autocast("cpu", torch.bfloat16):
        assert module.split_microbatches(batch, 150) == [[0, 1]]
    module.loaded_actor.bfloat16()
    assert module.split_microbatches(batch, 150) == [[0, 1]]


def test_a_shared_prefix_costs_its_operations_once(model_folder: str) -> None:
    start, ends = [4, *[3] * 49], [[5] * 50, [6] * 50]
    batch = RolloutBatch.of_sequences([[*start, *end] for end in ends] + [[*start[::-1], *ends[0]]])
    module = make_algorithm(GRPO, model_folder)
    whole = module.costs(batch).tolist()
    batch.shares_prefixes = True
    first, second, third = module.costs(batch).tolist()
    assert first == third == whole[0] == whole[1] and 0.4 * first < second < 0.8 * first
    # In different micro-batches each computes it.
    assert module.costs(batch.select([1], "N")).tolist() == whole[:1]


@pytest.mark.parametrize("others", [1, 3, 9])
def test_ranks_have_the_same_number_of_microbatches(
    others: int, model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which some may be empty: a sharded model gathers its weights in each."""
    monkeypatch.setattr(packing, "all_reduce", lambda own, _: torch.maximum(own, torch.tensor(others)))
    module = make_algorithm(GRPO, model_folder)
    module.configure_model()
    batch = RolloutBatch.of_sequences([[4] * 10 for _ in range(4)])
    found = module.split_microbatches(batch, 20)
    assert len(found) == max(others, 2) and sorted(n for part in found for n in part) == [0, 1, 2, 3]
