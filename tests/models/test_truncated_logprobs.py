"""Log-probabilities, entropies and gradients of truncated distributions, mostly in float64."""

import math
import random
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_output_layer import VOCABULARY, full_logprobs, make_inputs, set_chunk
from tiny import make_batch
from tiny_models import save_tiny
from torch import Tensor

from rlightning.models import load_policy, packed_logprobs
from rlightning.models.output_layer import chunked_logprobs
from rlightning.types.supports import Supports

TEMPERATURE = 0.7


def make_supports(targets: Tensor, width: int = 5) -> Tensor:
    """Of 1, 2, ... tokens in turn, the target among them; every third distribution is whole."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for place, target in enumerate(targets.tolist()):
        size = place % 3 and 1 + place % width
        others = [v for v in torch.randperm(VOCABULARY, generator=generator).tolist() if v != target][: size - 1]
        rows.append([*others, target][:size] + [-1] * (width - size))
    return torch.tensor(rows, dtype=torch.int32)


def masked_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, supports: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The same by torch's own functions: the logits of each token's support alone."""
    found = []
    for row, target, support in zip(hidden, targets.tolist(), supports.tolist(), strict=True):
        kept = [token for token in support if token >= 0] or list(range(VOCABULARY))
        place = torch.tensor([kept.index(target)])
        found.append(full_logprobs(row[None], weight[kept], place, TEMPERATURE, softcap))
    return torch.cat([one for one, _ in found]), torch.cat([entropy for _, entropy in found])


def test_truncated_token_by_hand() -> None:
    # logits 0, log 2, log 5; without the first token chances 2/7 and 5/7
    hidden = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(5)]], dtype=torch.float64, requires_grad=True)
    support = torch.tensor([[2, 1, -1]], dtype=torch.int32)
    picked, entropy = chunked_logprobs(hidden, weight, torch.tensor([1]), supports=support)
    assert picked.item() == pytest.approx(math.log(2 / 7))
    assert entropy.item() == pytest.approx(2 / 7 * math.log(7 / 2) + 5 / 7 * math.log(7 / 5))
    (gradient,) = torch.autograd.grad(picked.sum(), weight)
    torch.testing.assert_close(gradient[:, 0], torch.tensor([0.0, 5 / 7, -5 / 7], dtype=torch.float64))


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("needs_entropy_grad", [False, True])
def test_truncated_value_and_gradient(
    chunk: int, softcap: float | None, needs_entropy_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_chunk(monkeypatch, chunk, 8)
    hidden, weight, targets = make_inputs(11)
    supports = make_supports(targets)
    given = {"temperature": TEMPERATURE, "softcap": softcap, "needs_entropy_grad": needs_entropy_grad}
    got = chunked_logprobs(hidden, weight, targets, supports=supports, **given)  # type: ignore[arg-type]
    expected = masked_logprobs(hidden, weight, targets, supports, softcap)
    torch.testing.assert_close(got, expected)
    terms = 2 if needs_entropy_grad else 1
    factors = torch.randn(2, 11, dtype=torch.float64)
    gradients, others = (
        torch.autograd.grad(sum(f @ r for f, r in zip(factors[:terms], results[:terms], strict=True)), [hidden, weight])
        for results in (got, expected)
    )
    torch.testing.assert_close(gradients, others)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32).map(random.Random))
def test_random_supports_and_chunks_match_masked_softmax(draw: random.Random) -> None:
    num_tokens, width, softcap = draw.randint(1, 9), draw.randint(1, VOCABULARY), draw.choice((None, 1.5))
    hidden, weight, targets = make_inputs(num_tokens)
    rows = [draw.sample(range(VOCABULARY), draw.randint(0, width)) for _ in range(num_tokens)]
    pairs = zip(rows, targets.tolist(), strict=True)
    rows = [row if not row or target in row else [target, *row[1:]] for row, target in pairs]
    supports = torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32)
    temperatures = torch.tensor([draw.choice((0.5, 1.0, 2.0)) for _ in rows], dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        set_chunk(patch, draw.randint(1, 9), 8)
        got = chunked_logprobs(
            hidden,
            weight,
            targets,
            temperature=temperatures,
            softcap=softcap,
            needs_entropy_grad=True,
            supports=supports,
        )
        factors = torch.tensor([[draw.gauss(0, 1) for _ in rows] for _ in range(2)], dtype=torch.float64)
        gradients = torch.autograd.grad((factors * torch.stack(got)).sum(), [hidden, weight])
    logits = hidden @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    is_left = torch.stack([torch.tensor([not row or v in row for v in range(VOCABULARY)]) for row in rows])
    table = (logits / temperatures[:, None]).masked_fill(~is_left, -1e9).log_softmax(-1)
    expected = table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)
    torch.testing.assert_close(got, expected)
    others = torch.autograd.grad((factors * torch.stack(expected)).sum(), [hidden, weight])
    torch.testing.assert_close(gradients, others)


def test_truncated_gradients_are_differences_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    set_chunk(monkeypatch, 3, 8)
    hidden, weight, targets = make_inputs(7, size=3)
    supports = make_supports(targets)

    def compute(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return chunked_logprobs(
            hidden, weight, targets, temperature=TEMPERATURE, needs_entropy_grad=True, supports=supports
        )

    assert torch.autograd.gradcheck(compute, (hidden, weight))


def test_far_likelier_token_outside_leaves_gradients_finite() -> None:
    """A later policy may give nearly all of its mass to what the sampler had cut off."""
    hidden = torch.ones(4, 1, requires_grad=True)
    weight = torch.tensor([[0.0], [0.0], [0.0], [1000.0]], requires_grad=True)
    supports = torch.tensor([[1, 2], [1, 2], [2, -1], [-1, -1]], dtype=torch.int32)
    picked, entropy = chunked_logprobs(
        hidden, weight, torch.tensor([1, 2, 2, 3]), supports=supports, needs_entropy_grad=True
    )
    torch.testing.assert_close(picked, torch.tensor([0.5, 0.5, 1.0, 1.0]).log())
    for gradient in torch.autograd.grad((picked + entropy).sum(), [hidden, weight]):
        assert gradient.isfinite().all()


def test_whole_distributions_are_as_without_supports() -> None:
    hidden, weight, targets = make_inputs(11)
    whole = chunked_logprobs(hidden, weight, targets, needs_entropy_grad=True)
    given = chunked_logprobs(
        hidden, weight, targets, needs_entropy_grad=True, supports=torch.full((11, 2), -1, dtype=torch.int32)
    )
    gradients = [torch.autograd.grad((p + e).sum(), [hidden, weight]) for p, e in (whole, given)]
    assert all(map(torch.equal, whole, given)) and all(map(torch.equal, *gradients))


def test_cut_of_batch_changes_no_truncated_gradient(tmp_path: Path) -> None:
    """Any cut into micro-batches: the same log-probabilities and, summed, the same gradient."""
    policy = load_policy(save_tiny("qwen3", tmp_path, head_dim=8), torch.float64)
    batch = make_batch([[[3, 4, 5], [6]], [[7, 8, 9, 10]]])
    rows = [[[3, 1], [4, 2], [5, 2, 1]], [[6, 2]], [[7, 2, 1], [], [9, 2, 1], [10]]]
    for one, supports in zip(batch.completions, rows, strict=True):
        one.supports = Supports(chain.from_iterable(supports), map(len, supports))
    found = []
    for cuts in ([[0, 1, 2]], [[0], [1, 2]], [[2], [1], [0]]):
        policy.zero_grad()
        logprobs: dict[int, Tensor] = {}
        for chosen in cuts:
            part = batch.select(chosen)
            values, entropy = packed_logprobs(policy, part, needs_entropy_grad=True)
            (values.exp().sum() + entropy.sum()).backward()
            logprobs |= dict(zip(chosen, values.detach().split(part.lengths.tolist()), strict=True))
        gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
        found.append(torch.cat([torch.cat([logprobs[m] for m in range(3)]), gradient]))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])
