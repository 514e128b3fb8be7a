"""Decoding by a Hugging Face model: prompts in one packed row, then one token of each sequence at a time, with a cache.

::

    prompts     [T]  all tokens in a row --> packed attention --> keys and values to the rows of each prompt's samples
    decoding    [N]  the last token of N sequences --> attention over the first N rows of the cache

A prompt is computed once for all of its samples; only attention computes padding.

Letters: ``T`` tokens of a forward pass, ``N`` sequences, ``H`` query heads, ``K`` key/value heads, ``D`` head size,
``L`` cached tokens of a sequence, ``V`` vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rlightning.models.attention import packed_attention
from rlightning.models.counts import read_setting
from rlightning.models.policy import remove_dropout

CACHED_ATTENTION = "rlightning_cached"
"""The attention's name for transformers' ``attn_implementation``. Without a cache it is packed attention."""
CACHE_STEP = 64
"""The length of the cache's rows grows in steps of this many tokens."""
MIN_ROWS = 4
"""Least number of rows of a matrix product. CPUs multiply fewer rows by other kernels, which round differently; with
these a sequence's numbers are the same in any batch.
"""
PADDING = [0] * MIN_ROWS
"""Token ids that pad a matrix product of too few rows; their results are dropped."""


@dataclass
class KeyValueCache:
    """Keys and values of the sequences being decoded: one row for each sequence in each attention layer.

    Attributes:
        num_rows: allocated rows.
        length: allocated tokens of each row.
    """

    num_rows: int = 0
    length: int = 0
    _layers: dict[nn.Module, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def reserve(self, num_rows: int, length: int) -> None:
        """Enlarge the cache to at least ``num_rows`` rows of ``length`` tokens; the contents are kept."""
        num_rows = max(num_rows, MIN_ROWS)
        if num_rows <= self.num_rows and length <= self.length:
            return
        self.num_rows = self.num_rows if num_rows <= self.num_rows else max(num_rows, 2 * self.num_rows)
        self.length = max(-(-length // CACHE_STEP) * CACHE_STEP, self.length)
        self._layers = {layer: (self._grow(keys), self._grow(values)) for layer, (keys, values) in self._layers.items()}

    def _grow(self, held: Tensor) -> Tensor:
        rows, heads, length, size = held.shape
        grown = held.new_zeros(self.num_rows, heads, self.length, size)
        grown[:rows, :, :length] = held
        return grown

    def write(self, layer: nn.Module, keys: Tensor, values: Tensor, rows: Tensor, positions: Tensor) -> None:
        """Set the keys and values [T, K, D] of tokens at ``positions`` [T] of ``rows`` [T]."""
        if layer not in self._layers:
            empty = [x.new_zeros(self.num_rows, x.shape[1], self.length, x.shape[2]) for x in (keys, values)]
            self._layers[layer] = (empty[0], empty[1])
        for held, given in zip(self._layers[layer], (keys, values), strict=True):
            held[rows, :, positions] = given

    def read(self, layer: nn.Module, num_rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Return views of the keys and values of the first rows and tokens: [N, K, L, D] each."""
        keys, values = self._layers[layer]
        return keys[:num_rows, :, :length], values[:num_rows, :, :length]

    def move(self, source: int, destination: int) -> None:
        """Copy one row's keys and values over another row's, in all layers."""
        for held in (tensor for pair in self._layers.values() for tensor in pair):
            held[destination] = held[source]


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Where a forward pass writes keys and values in the cache, and which cached tokens it attends to.

    ``C`` is the number of writes. A prompt's token is written once for each of the prompt's samples.

    Attributes:
        cache: the cache that is written and read.
        rows: [C], rows of the cache.
        positions: [C], positions in these rows.
        source: [C], indices of the written tokens in the forward pass.
        mask: [N, 1, 1, L], the cached tokens that each row attends to; None while prompts are computed.
    """

    cache: KeyValueCache
    rows: Tensor
    positions: Tensor
    source: Tensor
    mask: Tensor | None = None


def cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    use: CacheUse | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the output of an attention layer for packed sequences; with ``use``, write keys and values to its cache.

    With ``use.mask``, each token attends to the cached tokens of its row instead.

    Args:
        module: the attention layer.
        query: [1, H, T, D].
        key: [1, K, T, D].
        value: [1, K, T, D].
        attention_mask: None.
        use: where keys and values are written; with a mask, token i belongs to row i, and attends to that row's cached
            tokens.
        kwargs: arguments of :func:`~rlightning.models.attention.packed_attention`.

    Returns:
        [1, T, H, D], and no attention weights.
    """
    if use is not None:
        keys, values = (x.squeeze(0).transpose(0, 1)[use.source] for x in (key, value))
        use.cache.write(module, keys, values, use.rows, use.positions)
    if use is None or use.mask is None:
        return packed_attention(module, query, key, value, attention_mask, **kwargs)
    num_rows, _, _, length = use.mask.shape
    keys, values = use.cache.read(module, num_rows, length)
    mask, window = use.mask, kwargs.get("sliding_window")
    if window is not None:
        places = torch.arange(length, device=mask.device)
        mask = mask & (places > use.positions[:, None, None, None] - window)
    out = scaled_dot_product_attention(
        query.squeeze(0).transpose(0, 1).unsqueeze(2),  # [N, H, 1, D]
        keys,
        values,
        attn_mask=mask,
        scale=kwargs.get("scaling"),
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return out.squeeze(2).unsqueeze(0), None


AttentionInterface.register(CACHED_ATTENTION, cached_attention)


def build_model(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model that decodes with a cache; its parameters are uninitialised.

    Args:
        config: configuration of a policy that supports packed attention.
        device: device of the model.
        dtype: dtype of all parameters.
    """
    config = type(config).from_dict(config.to_dict())
    remove_dropout(config)
    # Random numbers are drawn on the device, where that is fast; the run's random state does not change.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=CACHED_ATTENTION
        )
    return model.requires_grad_(False)


def predict_after_prompts(
    model: PreTrainedModel, cache: KeyValueCache, prompts: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]
) -> Tensor:
    """Run a forward pass over prompts, fill their rows of the cache, and return the logits [N, V] after each prompt.

    Args:
        model: a model from :func:`build_model`.
        cache: the cache to which keys and values are written.
        prompts: N token sequences.
        rows: for each prompt the rows of the cache that begin with it, one for each sample.
    """
    device = model.device
    if sum(map(len, prompts)) < MIN_ROWS:
        return predict_after_prompts(model, cache, [*prompts, PADDING], [*rows, []])[:-1]
    lengths = [len(prompt) for prompt in prompts]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    bounds = torch.tensor([*starts, sum(lengths)], dtype=torch.int32, device=device)
    places = [torch.arange(length) for length in lengths]
    copies = [(i, row) for i in range(len(prompts)) for row in rows[i]]
    use = CacheUse(
        cache,
        rows=torch.cat([torch.full((lengths[i],), row) for i, row in copies]).to(device),
        positions=torch.cat([places[i] for i, _ in copies]).to(device),
        source=torch.cat([places[i] + starts[i] for i, _ in copies]).to(device),
    )
    hidden: Tensor = model.base_model(
        input_ids=torch.tensor([[token for prompt in prompts for token in prompt]], device=device),
        position_ids=torch.cat(places)[None].to(device),
        use_cache=False,
        cu_seq_lens_q=bounds,
        cu_seq_lens_k=bounds,
        max_length_q=max(lengths),
        max_length_k=max(lengths),
        use=use,
    ).last_hidden_state[0]
    return output_logits(model, hidden[bounds[1:].long() - 1])


def predict_next(model: PreTrainedModel, cache: KeyValueCache, tokens: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Run a forward pass of one token for each of the cache's first N rows; return the logits [N, V] of the next ones.

    Args:
        model: a model from :func:`build_model`.
        cache: contains the keys and values of the previous tokens.
        tokens: N token ids, one for each of the rows 0 to N - 1.
        lengths: N numbers of tokens, one for each row.
    """
    device = model.device
    if len(tokens) < MIN_ROWS:
        padding = PADDING[len(tokens) :]
        return predict_next(model, cache, [*tokens, *padding], [*lengths, *padding])[: len(tokens)]
    positions = torch.tensor(lengths, device=device)
    rows = torch.arange(len(tokens), device=device)
    longest = min(-(-(max(lengths) + 1) // CACHE_STEP) * CACHE_STEP, cache.length)
    mask = torch.arange(longest, device=device) <= positions[:, None, None, None]
    bounds = torch.arange(len(tokens) + 1, dtype=torch.int32, device=device)
    hidden: Tensor = model.base_model(
        input_ids=torch.tensor([list(tokens)], device=device),
        position_ids=positions[None],
        use_cache=False,
        cu_seq_lens_q=bounds,
        cu_seq_lens_k=bounds,
        max_length_q=1,
        max_length_k=1,
        use=CacheUse(cache, rows, positions, source=rows, mask=mask),
    ).last_hidden_state[0]
    return output_logits(model, hidden)


def output_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Return the logits [N, V], float32, of hidden states [N, E]."""
    if len(hidden) < MIN_ROWS:
        return output_logits(model, hidden[[*range(len(hidden)), *PADDING[len(hidden) :]]])[: len(hidden)]
    logits = linear(hidden, model.get_output_embeddings().weight).float()
    softcap = read_setting(model.config, "final_logit_softcapping")
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
