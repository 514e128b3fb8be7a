"""Chooses the next token of each sequence from its logits, sampling settings and a random number.

Letters: ``N`` sequences, ``V`` vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlightning.rollout.sampler import Sampling


class Choice(NamedTuple):
    """The sampled token of each of ``N`` sequences, with its log-probability and the tokens it was drawn from.

    Attributes:
        tokens: [N].
        logprobs: [N], under the distribution from which the token was drawn; at temperature 1 for greedy sampling.
        supports: N lists: the token ids of a distribution that is truncated to at most ``max_support`` tokens, else
            empty.
    """

    tokens: Tensor
    logprobs: Tensor
    supports: list[list[int]]


def choose_tokens(logits: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> Choice:
    """Sample a token of each sequence from its logits; return the tokens, their log-probabilities and supports.

    Settings apply in vLLM's order: temperature, ``min_p``, ``top_k``, ``top_p``. A token depends only on the logits and
    the random number of its sequence.

    Args:
        logits: [N, V] float32.
        samplings: the settings of the N sequences.
        uniforms: N random numbers in [0, 1), for inverse transform sampling; unused by greedy sequences
            (``temperature=0``).

    Returns:
        The tokens and log-probabilities on the CPU, and the supports.
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
    supports = find_supports(logprobs, samplings)
    return Choice(tokens.cpu(), logprobs.gather(1, tokens[:, None])[:, 0].cpu(), supports)


def find_supports(logprobs: Tensor, samplings: Sequence[Sampling]) -> list[list[int]]:
    """Return the ids of the finite entries in each row of ``logprobs`` [N, V]; none for more than ``max_support``."""
    supports: list[list[int]] = [[] for _ in samplings]
    if any(one.max_support for one in samplings):
        limits = torch.tensor([one.max_support for one in samplings], device=logprobs.device)
        is_left = logprobs.isfinite()
        for row, token in (is_left & (is_left.sum(-1) <= limits)[:, None]).nonzero().tolist():
            supports[row].append(token)
    return supports


def cut_distribution(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return logits [N, V] with -inf for the tokens that a sequence's ``min_p``, ``top_k`` or ``top_p`` exclude."""
    device = logits.device
    if any(one.min_p for one in samplings):
        share = torch.tensor([one.min_p for one in samplings], device=device)
        chances = logits.softmax(-1)
        logits = logits.masked_fill(chances < share[:, None] * chances.amax(-1, keepdim=True), -torch.inf)
    if not any(one.effective_top_k or one.top_p < 1 for one in samplings):
        return logits
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    size = logits.shape[1]
    most = torch.tensor([min(one.effective_top_k or size, size) for one in samplings], device=device)
    ordered = ordered.masked_fill(torch.arange(size, device=device) >= most[:, None], -torch.inf)
    chances = ordered.softmax(-1)
    limits = torch.tensor([one.top_p for one in samplings], device=device)
    # A token is kept if the tokens before it do not yet have the mass.
    ordered = ordered.masked_fill((chances.cumsum(-1) - chances >= limits[:, None]) & (limits < 1)[:, None], -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, ordered)
