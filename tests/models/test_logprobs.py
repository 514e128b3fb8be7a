import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import load_eager, make_sequences, save_tiny
from torch import Tensor

from rlightning.models import load_policy, logprobs
from rlightning.models.logprobs import chunked_logprobs, packed_logprobs
from rlightning.types import Completion, Prompt, RolloutBatch


def full_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The same with all logits at once, from torch's own functions."""
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    table = (logits / temperature).log_softmax(-1)
    return table[torch.arange(len(targets)), targets], -(table.exp() * table).sum(-1)


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.5, None), (2.0, 1.5)])
@pytest.mark.parametrize("needs_entropy_grad", [False, True])
def test_value_and_gradient(
    chunk: int, temperature: float, softcap: float | None, needs_entropy_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_TOKENS", chunk)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator, requires_grad=True) for n in (11, 30))
    targets = torch.randint(30, (11,), generator=generator)
    factors = torch.randn(2, 11, generator=generator)
    got = chunked_logprobs(
        hidden, weight, targets, temperature=temperature, softcap=softcap, needs_entropy_grad=needs_entropy_grad
    )
    expected = full_logprobs(hidden, weight, targets, temperature, softcap)
    torch.testing.assert_close(got, expected)
    assert got[1].requires_grad == needs_entropy_grad
    terms = 2 if needs_entropy_grad else 1
    gradients, others = (
        torch.autograd.grad(sum(f @ r for f, r in zip(factors[:terms], results[:terms], strict=True)), [hidden, weight])
        for results in (got, expected)
    )
    torch.testing.assert_close(gradients, others, atol=1e-5, rtol=1e-4)


def test_two_tokens_by_hand() -> None:
    # logits 0 and log 3, at temperature 1: chances 1/4 and 3/4
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3)]])
    picked, entropy = chunked_logprobs(hidden, weight, torch.tensor([1]))
    assert picked.item() == pytest.approx(math.log(0.75))
    assert entropy.item() == pytest.approx(0.25 * math.log(4) + 0.75 * math.log(4 / 3))


def test_no_token_asked_for() -> None:
    weight = torch.randn(5, 3, requires_grad=True)
    picked, entropy = chunked_logprobs(torch.randn(0, 3), weight, torch.zeros(0, dtype=torch.int64))
    assert picked.shape == entropy.shape == (0,)
    torch.autograd.backward(picked.sum() + entropy.sum())


def test_no_logits_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_TOKENS", 16)
    sizes: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        picked, entropy = chunked_logprobs(hidden, weight, torch.zeros(64, dtype=torch.int64), needs_entropy_grad=True)
    # One chunk's logits would be 16,000 numbers; the weight is 4,000.
    assert sizes and max(sizes) <= weight.numel()
    torch.autograd.backward(picked.sum() + entropy.sum())
    assert weight.grad is not None


def make_batch(sequences: list[Tensor], prompt_length: int = 1) -> RolloutBatch:
    """Each sequence's first tokens are its prompt."""
    prompts = [Prompt(i, "", s[:prompt_length].tolist(), {}) for i, s in enumerate(sequences)]
    rests = [s[prompt_length:].numpy() for s in sequences]
    zeros = [np.zeros(len(rest), np.float32) for rest in rests]
    completions = [[Completion("", r, z, z.astype(np.int32), "stop")] for r, z in zip(rests, zeros, strict=True)]
    return RolloutBatch.pack(prompts, completions)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False}),
        ("gemma3_text", {"head_dim": 8, "final_logit_softcapping": 2.0}),
    ],
)
def test_packed_logprobs_are_those_of_each_sequence_alone(kind: str, config: dict[str, Any], tmp_path: Path) -> None:
    folder = save_tiny(kind, tmp_path, **config)
    sequences = make_sequences()
    got, entropy = packed_logprobs(load_policy(folder), make_batch(sequences), temperature=0.7)
    alone = load_eager(folder)
    start = 0
    for sequence in sequences:
        table = (alone(sequence[None], use_cache=False).logits[0, :-1] / 0.7).log_softmax(-1)
        end = start + len(sequence)
        # The first token is the prompt: nothing is asked about it.
        expected = torch.cat([torch.zeros(1), table.gather(1, sequence[1:, None])[:, 0]])
        torch.testing.assert_close(got[start:end], expected, atol=1e-5, rtol=1e-5)
        expected = torch.cat([torch.zeros(1), -(table.exp() * table).sum(-1)])
        torch.testing.assert_close(entropy[start:end], expected, atol=1e-5, rtol=1e-5)
        start = end


def test_longer_prompts_change_no_logprob(tmp_path: Path) -> None:
    policy = load_policy(save_tiny("qwen3", tmp_path, head_dim=8))
    sequences = [s for s in make_sequences() if len(s) > 3]
    whole, _ = packed_logprobs(policy, make_batch(sequences, 1))
    batch = make_batch(sequences, 3)
    part, _ = packed_logprobs(policy, batch)
    torch.testing.assert_close(part, torch.where(batch.completion_mask, whole, 0))
    assert (part[~batch.completion_mask] == 0).all()
