import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_attention import MODELS
from tiny import copy_weights, make_data, make_trainer, save_model, share_of_ones
from tiny_models import save_tiny
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from transformers import PreTrainedModel
from varlen_on_cpu import run_kernels_on_cpu

from rlightning.algorithms import GRPO
from rlightning.errors import ConfigError, RunError
from rlightning.models import layers, load_policy, packed_logprobs
from rlightning.models.layers import checkpoint_layers, compile_layers, decoder_layers, should_compile
from rlightning.types import RolloutBatch
from rlightning.types.shared_prefixes import find_prefixes, share_prefixes

SHAPES = [[7, 2, 5, 12], [9], [3, 3, 3], [2, 2], [1], [2, 13]]
"""Lengths of micro-batches in which T, N and the longest change, and are as small as they get."""
LATER_SHAPES = [[30, 8, 8], [2], [1]]


@pytest.fixture(autouse=True)
def without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of torch.compile but for the code it writes."""
    torch.compiler.reset()
    counters.clear()
    monkeypatch.setattr(layers, "BACKEND", "aot_eager")
    monkeypatch.setenv("CXX", "true")  # there is no code to compile


def make_batch(lengths: Sequence[int]) -> RolloutBatch:
    generator = np.random.default_rng(sum(lengths))
    return RolloutBatch.concatenate(
        [RolloutBatch.of_sequences([generator.integers(3, 40, length).tolist()]) for length in lengths]
    )


def train(policy: PreTrainedModel, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """An optimizer step over micro-batches, and the log-probabilities of each before it."""
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    found = []
    for lengths in shapes:
        logprobs, _ = packed_logprobs(policy, make_batch(lengths))
        logprobs.mean().backward()
        found.append(logprobs.detach())
    optimizer.step()
    optimizer.zero_grad()
    return found


@torch.no_grad()
def evaluate(policy: PreTrainedModel, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    return [packed_logprobs(policy, make_batch(lengths))[0] for lengths in shapes]


def count_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kinds"), [("gemma3", 2), ("gpt2", 1)])
def test_layer_kind_compiles_once_per_gradient_mode(name: str, kinds: int, tmp_path: Path) -> None:
    architecture, config = MODELS[name]
    types = {"layer_types": [*config["layer_types"], "sliding_attention"]} if "layer_types" in config else {}
    folder = save_tiny(architecture, tmp_path, **config | types | {"num_hidden_layers": 3})
    eager = load_policy(folder, torch.float64)  # what is fused is rounded in another order
    compiled = copy.deepcopy(eager)
    compile_layers(compiled)
    checkpoint_layers(compiled, 1)
    for run, shapes, graphs in (
        (train, SHAPES, kinds),
        (evaluate, SHAPES, 2 * kinds),
        (train, LATER_SHAPES, 2 * kinds),
        (evaluate, LATER_SHAPES, 2 * kinds),
    ):
        torch.testing.assert_close(run(compiled, shapes), run(eager, shapes), atol=1e-6, rtol=1e-6)
        assert count_graphs() == graphs
    assert not counters["graph_break"]
    torch.testing.assert_close(list(compiled.parameters()), list(eager.parameters()))


@pytest.mark.long
@pytest.mark.parametrize("has_flash_attention", [pytest.param(False, marks=pytest.mark.slow), True])
def test_packed_kernels_are_compiled_once(
    has_flash_attention: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny("qwen3", tmp_path, head_dim=8)
    policies = [load_policy(folder) for _ in range(2)]
    rounds = [(train, SHAPES), (evaluate, SHAPES), (train, LATER_SHAPES), (evaluate, LATER_SHAPES)]
    expected = [run(policies[0], shapes) for run, shapes in rounds]
    run_kernels_on_cpu(monkeypatch, has_flash_attention=has_flash_attention)
    compile_layers(policies[1])
    if has_flash_attention:
        checkpoint_layers(policies[1], 1)
    got = [run(policies[1], shapes) for run, shapes in rounds]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert count_graphs() == 2 and not counters["graph_break"]


@pytest.mark.slow
def test_layers_compile_once_with_and_once_without_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the segments' depths."""
    folder = save_tiny("qwen3", tmp_path, head_dim=8)
    alone, once = (load_policy(folder) for _ in range(2))
    run_kernels_on_cpu(monkeypatch)
    compile_layers(once)
    for shapes in ([(8, 3), (2, 4)], [(7, 2), (5, 9), (3, 3), (3, 6)], [(4, 3)] * 7, [(20, 2), (9, 2), (15, 2)]):
        # Each sequence is the start of the same tokens, and tokens of its own.
        sequences = [[*range(3, 3 + kept), *[30 + n] * new] for n, (kept, new) in enumerate(shapes)]
        batch = RolloutBatch.of_sequences(sequences)
        expected = packed_logprobs(alone, batch)[0]
        batch.shared = share_prefixes(batch.cu_seqlens, find_prefixes(batch.token_ids, batch.cu_seqlens))
        got = packed_logprobs(once, batch)[0]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        gradients = [
            torch.autograd.grad(logprobs.sum(), list(decoder_layers(policy).parameters()))
            for policy, logprobs in ((once, got), (alone, expected))
        ]
        for one, other in zip(*gradients, strict=True):  # as a whole: some numbers are small sums of large ones
            assert (one - other).norm() <= 1e-5 * other.norm()
    assert count_graphs() == 1 and not counters["graph_break"]
    for length, is_shared in enumerate([False, True, False, True, True, False], start=5):  # updates may alternate
        batch = RolloutBatch.of_sequences([[*range(3, length), *[30 + n] * length] for n in range(3)])
        if is_shared:
            batch.shared = share_prefixes(batch.cu_seqlens, find_prefixes(batch.token_ids, batch.cu_seqlens))
        packed_logprobs(once, batch)[0].sum().backward()
    assert count_graphs() == 2 and not counters["graph_break"]


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.long
def test_checkpointed_layers_compute_twice_to_the_same_gradient(count: int, tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path, head_dim=8, num_hidden_layers=3)
    policies = [load_policy(folder) for _ in range(2)]
    runs = [0] * 3
    for i, layer in enumerate(decoder_layers(policies[0])):
        layer.mlp.register_forward_pre_hook(counting(runs, i))  # type: ignore[union-attr]
    checkpoint_layers(policies[0], count)
    for policy in policies:
        packed_logprobs(policy, make_batch([7, 5]))[0].sum().backward()
    assert runs == [2] * count + [1] * (3 - count)
    torch.testing.assert_close(*[[parameter.grad for parameter in policy.parameters()] for policy in policies])


def counting(runs: list[int], index: int) -> Callable[..., None]:
    def count(*_: Any) -> None:
        runs[index] += 1

    return count


@pytest.mark.slow
@pytest.mark.long
def test_a_compiled_run_is_the_eager_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rlightning")
    model = save_model(tmp_path / "model")
    weights = []
    for settings in ({}, {"compile": True, "gradient_checkpointing": True}):
        module = GRPO(
            model,
            rewards=[share_of_ones],
            prompts_per_step=2,
            samples_per_prompt=2,
            updates_per_rollout=2,
            max_tokens_per_microbatch=24,
            kl_coef=0.1,
            lr=1e-3,
            validate_first=False,
            **settings,  # type: ignore[arg-type]
        )
        make_trainer(tmp_path, 2).fit(module, datamodule=make_data(tmp_path))
        weights.append(copy_weights(module))
    torch.testing.assert_close(*weights, atol=1e-5, rtol=0)
    assert not counters["graph_break"]
    told = [message for message in caplog.messages if "attention is" in message]
    padded = (
        "padded to the longest sequence, because it runs on the CPU; "
        "shared prefixes are computed once where that saves 40% of the tokens; "
    )
    ways = [" ".join(message.split()).partition("; attention is ")[2] for message in told]
    assert [way.partition(" layout")[0].partition(" (")[0] for way in ways] == [
        f"{padded}layers are not compiled",
        f"{padded}layers are compiled when they run first",
    ]


def test_layers_are_compiled_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    monkeypatch.setenv("CC", "true")
    assert [should_compile(wanted, cuda)[0] for wanted in (None, True, False)] == [True, True, False]
    assert [should_compile(wanted, cpu)[0] for wanted in (None, True, False)] == [False, True, False]
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC")
    assert "needs gcc or clang" in should_compile(None, cuda)[1]
    monkeypatch.delenv("CXX")
    with pytest.raises(ConfigError, match=r"compile=true cannot be.*g\+\+ or clang\+\+.*set it to false"):
        should_compile(True, cpu)


def test_layers_that_cannot_be_compiled_end_the_run_with_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(graph: object, inputs: object) -> None:
        raise NotImplementedError("no kernel for this layer")

    monkeypatch.setattr(layers, "BACKEND", refuse)
    policy = load_policy(save_tiny("qwen3", tmp_path))
    compile_layers(policy)
    batch = RolloutBatch.of_sequences([[3, 4, 5, 6], [7, 8]])
    with pytest.raises(RunError, match=r"cannot compile the model's layers: .*no kernel.*model\.compile=false trains"):
        packed_logprobs(policy, batch)


def test_compiled_code_is_kept_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/me/cache")
    assert layers.cache_folder() == "/home/me/cache/rlightning/torchinductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    assert layers.cache_folder() == "/home/me/cache/rlightning/torchinductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert layers.cache_folder() == "/elsewhere"
