"""Compares the Triton kernels, run by Triton's interpreter (TRITON_INTERPRET=1), with the same in torch.

Raises where they differ. Triton 3.6's interpreter needs a NumPy before 2.4.
"""

import itertools

import torch

from rlightning.models import logit_kernels, output_layer


def compare(num_logits: int, softcap: float | None, needs_entropy_grad: bool, temperatures: list[float]) -> None:
    """Summaries and gradients of six rows."""
    generator = torch.Generator().manual_seed(num_logits)
    logits = torch.randn(6, num_logits, generator=generator) * 20
    targets = torch.tensor([0, num_logits - 1, num_logits // 2, -1, num_logits, 0])  # two are another rank's
    temperature = torch.tensor(temperatures)[:, None]
    expected = output_layer.summarize_logits(logits, targets, temperature, softcap)
    got = logit_kernels.summarize_logits(logits, targets, temperature, softcap)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)
    gradients = torch.randn(2, 6, generator=generator)
    normalizer, _, entropy = expected
    entropy_gradient = gradients[1] if needs_entropy_grad else None
    given = (targets, normalizer, entropy, gradients[0], entropy_gradient, temperature, softcap)
    ours, other = logits.clone(), logits.clone()
    logit_kernels.differentiate_logits(ours, *given)
    output_layer.differentiate_logits(other, *given)
    torch.testing.assert_close(ours, other, atol=1e-4, rtol=1e-4)


if __name__ == "__main__":
    logit_kernels.BLOCK = 16  # rows of less, of one, and of some blocks
    for case in itertools.product((1, 16, 37), (None, 5.0), (False, True), ([0.7] * 6, [0.5, 0.7, 1.0, 1.3, 2.0, 0.9])):
        compare(*case)
