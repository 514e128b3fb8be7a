"""Fused log-probabilities against torch's own functions on all logits at once, mostly in float64."""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlightning.models import output_layer
from rlightning.models.output_layer import chunked_logprobs, merge_parts, summarize_logits

VOCABULARY = 30


class RecordTensors(TorchDispatchMode):
    """Notes the sizes of all tensors that are made, what was cast, and what was computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []
        self.casts: list[torch.Size] = []
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        self.calls[str(func)] += 1
        self.sizes += [t.numel() for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, Tensor)]
        if func is torch.ops.aten._to_copy.default:
            self.casts.append(result.shape)
        return result


def gradient(tensor: Tensor) -> Tensor:
    """Return the gradient that a backward pass has accumulated."""
    assert tensor.grad is not None
    return tensor.grad


def full_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """The same with all logits at once, from torch's own functions."""
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    table = (logits / temperature).log_softmax(-1)
    return table[torch.arange(len(targets)), targets], -(table.exp() * table).sum(-1)


def set_chunk(patch: pytest.MonkeyPatch, num_tokens: int, itemsize: int, vocabulary: int = VOCABULARY) -> None:
    """Let chunks have so many tokens at most."""
    patch.setattr(output_layer, "CHUNK_BYTES", num_tokens * vocabulary * itemsize)


def make_inputs(num_tokens: int, dtype: torch.dtype = torch.float64, size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and targets."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, size, generator=generator, dtype=dtype) for n in (num_tokens, VOCABULARY))
    return (
        hidden.requires_grad_(),
        weight.requires_grad_(),
        torch.randint(VOCABULARY, (num_tokens,), generator=generator),
    )


def assert_alike(
    got: Sequence[Tensor], expected: Sequence[Tensor], inputs: Sequence[Tensor], num_terms: int = 2
) -> None:
    """Values, and the gradient of a random sum of the first terms."""
    torch.testing.assert_close(got, expected)
    factors = torch.randn(2, len(expected[0]), dtype=torch.float64)
    sums = [torch.stack([factors[i] @ terms[i] for i in range(num_terms)]).sum() for terms in (got, expected)]
    gradients = [torch.autograd.grad(total, inputs) for total in sums]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.5, None), (2.0, 1.5)])
@pytest.mark.parametrize("needs_entropy_grad", [False, True])
def test_chunked_logprobs_equal_torchs_value_and_gradient(
    chunk: int, temperature: float, softcap: float | None, needs_entropy_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eleven tokens: in chunks of four at most, that is three of 4, 4 and 3."""
    set_chunk(monkeypatch, chunk, 8)
    hidden, weight, targets = make_inputs(11)
    got = chunked_logprobs(
        hidden, weight, targets, temperature=temperature, softcap=softcap, needs_entropy_grad=needs_entropy_grad
    )
    expected = full_logprobs(hidden, weight, targets, temperature, softcap)
    assert got[1].requires_grad == needs_entropy_grad
    assert_alike(got, expected, (hidden, weight), num_terms=2 if needs_entropy_grad else 1)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_temperature_of_each_token_is_as_tokens_alone(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    set_chunk(monkeypatch, 4, 8)
    hidden, weight, targets = make_inputs(11)
    temperatures = torch.linspace(0.5, 2.0, 11, dtype=torch.float64)
    got = chunked_logprobs(hidden, weight, targets, temperature=temperatures, softcap=softcap, needs_entropy_grad=True)
    alone = [
        full_logprobs(hidden[i : i + 1], weight, targets[i : i + 1], float(temperatures[i]), softcap) for i in range(11)
    ]
    expected = tuple(torch.cat(values) for values in zip(*alone, strict=True))
    assert_alike(got, expected, (hidden, weight))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients_are_differences_of_values(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    set_chunk(monkeypatch, 3, 8)
    hidden, weight, targets = make_inputs(7, size=3)
    compute = functools.partial(
        chunked_logprobs, targets=targets, temperature=0.7, softcap=softcap, needs_entropy_grad=True
    )
    assert torch.autograd.gradcheck(compute, (hidden, weight))


def test_two_tokens_by_hand() -> None:
    # logits 0 and log 3, at temperature 1: chances 1/4 and 3/4
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3)]])
    picked, entropy = chunked_logprobs(hidden, weight, torch.tensor([1]))
    assert picked.item() == pytest.approx(math.log(0.75))
    assert entropy.item() == pytest.approx(0.25 * math.log(4) + 0.75 * math.log(4 / 3))


def test_a_sure_token_has_a_small_entropy() -> None:
    """Chances of about 1 and exp(-30) make 31 exp(-30), which no difference of logits of 1,000 could show."""
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[1000.0], [970.0]])
    _, entropy = chunked_logprobs(hidden, weight, torch.tensor([0]))
    assert entropy.item() == pytest.approx(31 * math.exp(-30), rel=0.05)


def test_no_token_asked_for() -> None:
    weight = torch.randn(5, 3, requires_grad=True)
    picked, entropy = chunked_logprobs(torch.randn(0, 3), weight, torch.zeros(0, dtype=torch.int64))
    assert picked.shape == entropy.shape == (0,)
    torch.autograd.backward(picked.sum() + entropy.sum())
    assert torch.equal(gradient(weight), torch.zeros(5, 3))


@pytest.mark.parametrize("needs_entropy_grad", [False, True])
def test_no_more_than_a_chunk_is_ever_made(needs_entropy_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    set_chunk(monkeypatch, 16, 4, vocabulary=1000)
    hidden, weight = torch.randn(63, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    targets = torch.zeros(63, dtype=torch.int64)
    with RecordTensors() as made:
        picked, entropy = chunked_logprobs(hidden, weight, targets, needs_entropy_grad=needs_entropy_grad)
        num_made = len(made.sizes)
        torch.autograd.backward(picked.sum() + (entropy.sum() if needs_entropy_grad else 0))
    assert max(made.sizes[:num_made]) == max(made.sizes[num_made:]) == 16 * 1000
    assert hidden.grad is not None and weight.grad is not None


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_only_gradients_that_are_needed_are_computed(trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chunks: the logits once more, and one product beside them."""
    set_chunk(monkeypatch, 4, 8)
    hidden, weight, targets = make_inputs(11)
    expected = torch.autograd.grad(full_logprobs(hidden, weight, targets)[0].sum(), [hidden, weight])
    is_hidden = trained == "hidden"
    hidden.requires_grad_(is_hidden)
    weight.requires_grad_(not is_hidden)
    picked, _ = chunked_logprobs(hidden, weight, targets)
    with RecordTensors() as made:
        picked.sum().backward()
    products = {"aten.mm.out": 6} if is_hidden else {"aten.mm.out": 3, "aten.addmm_.default": 3}
    assert {name: count for name, count in made.calls.items() if "mm" in name} == products
    torch.testing.assert_close(hidden.grad if is_hidden else weight.grad, expected[0 if is_hidden else 1])
    assert (weight if is_hidden else hidden).grad is None


def test_no_logits_are_kept_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    set_chunk(monkeypatch, 4, 8)
    hidden, weight, targets = make_inputs(11)
    kept: list[Tensor] = []

    def keep(one: Tensor) -> Tensor:
        kept.append(one)
        return one

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        chunked_logprobs(hidden, weight, targets)
    assert [one.data_ptr() for one in kept[:3]] == [one.data_ptr() for one in (hidden, weight, targets)]
    assert [one.shape for one in kept[3:]] == [(11,), (11,)]  # a normalizer and an entropy a token


@pytest.mark.parametrize(("softcap", "has_supports"), [(None, False), (1.5, True)])
def test_kept_logits_are_computed_once_bit_equally(
    softcap: float | None, has_supports: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three chunks; a second backward pass, for which they are gone, recomputes them."""
    set_chunk(monkeypatch, 4, 8)
    hidden, weight, targets = make_inputs(11)
    supports = torch.stack([targets, (targets + 1) % VOCABULARY], 1) if has_supports else None
    compute = functools.partial(
        chunked_logprobs, hidden, weight, targets, temperature=0.7, softcap=softcap, supports=supports
    )
    found, products = [], []
    for is_kept in (False, True):
        with RecordTensors() as made:
            picked, entropy = compute(needs_entropy_grad=True, keeps_logits=is_kept)
            total = picked @ torch.arange(11.0, dtype=picked.dtype) - entropy.sum()
            first = torch.autograd.grad(total, [hidden, weight], retain_graph=True)
        products.append(sum(count for name, count in made.calls.items() if "mm" in name and "dot" not in name))
        found.append((picked, entropy, *first, *torch.autograd.grad(total, [hidden, weight])))
    assert all(torch.equal(kept, made_again) for made_again, kept in zip(*found, strict=True))
    assert products == [12, 9]  # three a chunk, and one more that makes its logits again


def test_scoring_keeps_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    set_chunk(monkeypatch, 16, 4, vocabulary=1000)
    hidden, weight = torch.randn(63, 4), torch.randn(1000, 4, requires_grad=True)
    targets, empty = torch.zeros(63, dtype=torch.int64), "aten.new_empty.default"
    with torch.no_grad(), RecordTensors() as made:
        chunked_logprobs(hidden, weight, targets, keeps_logits=True)
    scoring = made.calls[empty]
    with RecordTensors() as made:
        chunked_logprobs(hidden, weight, targets, keeps_logits=True)
    assert made.calls[empty] - scoring == 4  # of as many chunks


def test_a_tied_weight_gets_both_gradients() -> None:
    _, weight, targets = make_inputs(11)
    gradients: list[Tensor] = []
    for compute in (chunked_logprobs, full_logprobs):
        hidden = torch.nn.functional.embedding(targets.roll(1), weight).tanh()
        gradients += torch.autograd.grad(compute(hidden, weight, targets)[0].sum(), weight)
    torch.testing.assert_close(*gradients)


def test_the_weights_gradient_is_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty-four chunks of bfloat16: autograd, which sums their gradients in bfloat16, is much further off."""
    set_chunk(monkeypatch, 8, 2)
    hidden, weight, targets = make_inputs(512, torch.bfloat16)
    exact_weight = weight.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(full_logprobs(hidden.double(), exact_weight, targets)[0].sum(), exact_weight)
    (at_once,) = torch.autograd.grad(chunked_logprobs(hidden, weight, targets)[0].sum(), weight)
    one_by_one = [chunked_logprobs(h, weight, t)[0] for h, t in zip(hidden.split(8), targets.split(8), strict=True)]
    (by_autograd,) = torch.autograd.grad(torch.cat(one_by_one).sum(), weight)
    error, other = (((got - exact).norm() / exact.norm()).item() for got in (at_once, by_autograd))
    assert at_once.dtype == torch.bfloat16
    assert error < 2**-8 < 2 * error < other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_a_master_weight_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in the forward, once in the backward, for three chunks; its gradient is not rounded to bfloat16."""
    set_chunk(monkeypatch, 4, 2)
    hidden, weight, targets = make_inputs(11, torch.float32)
    hidden = hidden.detach().to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16), RecordTensors() as made:
        picked, entropy = chunked_logprobs(hidden, weight, targets)
        assert made.casts.count(weight.shape) == 1
        picked.sum().backward()
    assert made.casts.count(weight.shape) == 2
    got = gradient(weight)
    assert picked.dtype == entropy.dtype == got.dtype == torch.float32
    assert gradient(hidden).dtype == dtype
    rounded = weight.detach().bfloat16().double().requires_grad_()
    expected, _ = full_logprobs(hidden.detach().bfloat16().double(), rounded, targets)
    expected.sum().backward()
    # logits of some 10 are rounded to 8 bits
    torch.testing.assert_close(picked.double(), expected, atol=0.05, rtol=0.0)
    assert (got - gradient(rounded)).norm() < 0.02 * gradient(rounded).norm()
    assert not torch.equal(got, got.bfloat16().float())


@pytest.mark.parametrize("parts", [[30], [15, 15], [16, 14], [1, 9, 20]])
def test_parts_of_the_vocabulary_are_merged(parts: list[int]) -> None:
    logits, targets = torch.randn(11, 30, dtype=torch.float64) * 5, torch.randint(30, (11,))
    table = logits.log_softmax(-1)
    starts = [sum(parts[:i]) for i in range(len(parts))]
    found = [
        torch.stack(summarize_logits(part, targets - start, torch.ones(len(part), 1), None))
        for part, start in zip(logits.split(parts, dim=1), starts, strict=True)
    ]
    normalizer, picked, entropy = merge_parts(torch.stack(found))
    torch.testing.assert_close(normalizer, logits.logsumexp(-1))
    torch.testing.assert_close(picked - normalizer, table[torch.arange(11), targets])
    torch.testing.assert_close(entropy, -(table.exp() * table).sum(-1))
