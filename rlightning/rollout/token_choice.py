"""Choosing the next token of each sequence from its logits, by its own settings and its own random number.

Letters: ``N`` sequences, ``V`` vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlightning.rollout.sampler import Sampling


def choose_tokens(logits: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Choose a token for each sequence.

    The order is vLLM's: the temperature, ``min_p``, ``top_k``, ``top_p``. A sequence's token depends on its own row and
    number alone.

    Args:
        logits: [N, V] float32.
        samplings: N.
        uniforms: N random numbers in [0, 1), by which a token is taken from the cumulated probabilities; greedy
            sequences (``temperature=0``) need none.

    Returns:
        [N] tokens, and [N] their log-probabilities under the distribution that they were drawn from; of greedy ones, at
        temperature 1. Both on the CPU.
    """
    device = logits.device
    temperatures = torch.tensor([one.temperature or 1.0 for one in samplings], device=device)
    logprobs = cut_distribution(logits / temperatures[:, None], samplings).log_softmax(-1)
    # MPS has no float64.
    mass = logprobs.to(torch.float32 if device.type == "mps" else torch.float64).exp().cumsum(-1)
    drawn = torch.tensor(uniforms, dtype=torch.float64).to(mass) * mass[:, -1]
    tokens = torch.searchsorted(mass, drawn[:, None], right=True)[:, 0].clamp_max(logits.shape[1] - 1)
    is_greedy = torch.tensor([one.temperature == 0 for one in samplings], device=device)
    tokens = torch.where(is_greedy, logits.argmax(-1), tokens)
    return tokens.cpu(), logprobs.gather(1, tokens[:, None])[:, 0].cpu()


def cut_distribution(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return logits [N, V], -inf where ``min_p``, ``top_k`` or ``top_p`` of a sequence leave a token out."""
    device = logits.device
    if any(one.min_p for one in samplings):
        share = torch.tensor([one.min_p for one in samplings], device=device)
        chances = logits.softmax(-1)
        logits = logits.masked_fill(chances < share[:, None] * chances.amax(-1, keepdim=True), -torch.inf)
    if not any(one.top_k or one.top_p < 1 for one in samplings):
        return logits
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    size = logits.shape[1]
    most = torch.tensor([min(one.top_k or size, size) for one in samplings], device=device)
    ordered = ordered.masked_fill(torch.arange(size, device=device) >= most[:, None], -torch.inf)
    chances = ordered.softmax(-1)
    limits = torch.tensor([one.top_p for one in samplings], device=device)
    # A token stays if those before it do not have the mass yet.
    ordered = ordered.masked_fill((chances.cumsum(-1) - chances >= limits[:, None]) & (limits < 1)[:, None], -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, ordered)
