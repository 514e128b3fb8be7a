"""Packs a rank's sequences into micro-batches of about equal cost, in which common prefixes may be computed once."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from rlightning.models.adapter import LoRA
from rlightning.models.architecture import can_share_prefixes
from rlightning.models.attention import varlen_obstacle
from rlightning.models.counts import head_size, path_share, sequence_flops
from rlightning.module.batching import find_long_prefixes, join_families, least_saved_share, split_microbatches
from rlightning.module.ranks import Ranks
from rlightning.parallel.collectives import all_reduce, global_rank
from rlightning.types import RolloutBatch
from rlightning.types.shared_prefixes import Prefixes, share_prefixes

log = logging.getLogger(__name__)


class Packing(Ranks):
    """A Lightning module that splits its actor's sequences into micro-batches.

    Long common prefixes of a batch's sequences are computed once if ``batch.shares_prefixes`` is set, which
    :meth:`decide_sharing` decides for each rollout.
    """

    model_config: PreTrainedConfig
    actor: PreTrainedModel | None
    adapter: LoRA | None
    share_prefixes: bool | Literal["auto"]
    _has_logged_refusal = False

    def decide_sharing(self, batch: RolloutBatch, max_tokens: int) -> bool:
        """Return whether long common prefixes of a rollout's sequences are computed once. Every rank must call it, and
        gets the same result.

        Args:
            batch: this rank's whole groups, on the CPU.
            max_tokens: maximum tokens of a micro-batch.
        """
        if self.share_prefixes != "auto":
            return self.share_prefixes and can_share_prefixes(self.model_config, self.device.type)
        saved = self.saved_share(batch, max_tokens)
        if saved < least_saved_share(self.model_config):
            return False
        can_share = can_share_prefixes(self.model_config, self.device.type)
        if not can_share and not self._has_logged_refusal and global_rank() == 0:
            self._has_logged_refusal = True
            log.info(
                "Shared prefixes are computed for each sequence: to compute them once would save %.0f%% of the tokens, "
                "but is inexact for %s.",
                100 * saved,
                self.model_config.model_type,
            )
        return can_share

    def saved_share(self, batch: RolloutBatch, max_tokens: int) -> float:
        """Return the share of all ranks' tokens that shared prefixes save. Every rank must call it.

        Only prefixes that sequences of a group share are counted, up to the tokens of a micro-batch: which groups are
        on the same rank does not change the result.

        Args:
            batch: this rank's whole groups, on the CPU.
            max_tokens: maximum tokens of a micro-batch.
        """
        prefixes = find_long_prefixes(batch, batch.group_ids[batch.trajectory_ids].tolist())
        self._join(batch, prefixes, max_tokens)
        counts = torch.tensor([int(prefixes.lengths.sum()), batch.num_tokens])
        saved, total = all_reduce(counts, name="lengths of shared prefixes").tolist()
        return float(saved / max(total, 1))

    def costs(self, batch: RolloutBatch) -> Tensor:
        """Return the floating point operations of forward and backward over each sequence: [N].

        A long prefix that several sequences share is counted for only one of them.
        """
        return self._flops(batch, _shared_prefixes(batch))

    def split_microbatches(self, batch: RolloutBatch, max_tokens: int) -> list[list[int]]:
        """Split a batch into micro-batches of about equal cost, and return the sequence indices of each. Every rank
        must call it.

        Sequences with a long common prefix stay together. The number of micro-batches is the same on every rank, since
        a sharded model gathers its weights in each pass; some may be empty.
        """
        prefixes = _shared_prefixes(batch)
        families, tokens = self._join(batch, prefixes, max_tokens)
        flops = self._flops(batch, prefixes).tolist()
        split = partial(split_microbatches, tokens, max_tokens, costs=[sum(flops[n] for n in one) for one in families])
        parts = split()
        number = int(all_reduce(torch.tensor(len(parts)), "max"))
        if number > len(parts):
            spread = split(at_least=number)
            parts = spread if len(spread) <= number else parts
        joined = [sorted(n for family in part for n in families[family]) for part in parts]
        return joined + [[]] * (number - len(parts))

    def to_microbatch(self, batch: RolloutBatch, sequences: Sequence[int]) -> RolloutBatch:
        """Return the given sequences of a batch on this rank's device; if none are given, a padding batch that adds no
        loss.
        """
        if not sequences:
            return batch.padding().to(self.device)
        chosen = batch.select(sequences, "N")
        microbatch, prefixes = chosen.to(self.device), _shared_prefixes(chosen)
        if prefixes.lengths.any():
            microbatch.shared = share_prefixes(chosen.cu_seqlens, prefixes).to(self.device)
        return microbatch

    def _join(self, batch: RolloutBatch, prefixes: Prefixes, max_tokens: int) -> tuple[list[list[int]], list[float]]:
        """Return families and their effective tokens (:func:`join_families`), and set the prefix length of the first of
        each family, which computes the prefix, to 0.
        """
        share = path_share(self.model_config, copies_all=self._copies_keys())
        families, tokens = join_families(prefixes, batch.lengths.tolist(), max_tokens, share)
        prefixes.lengths[[family[0] for family in families]] = 0
        return families, tokens

    def _copies_keys(self) -> bool:
        """Return whether attention over shared prefixes copies keys and values, for want of a packed kernel."""
        kind = self.device.type
        dtype = torch.get_default_dtype() if self.actor is None else self.actor.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        return varlen_obstacle(self.device, dtype, head_size(self.model_config)) is not None

    def _flops(self, batch: RolloutBatch, prefixes: Prefixes) -> Tensor:
        adapter_weights = 0 if self.adapter is None else self.adapter.num_parameters
        count = partial(sequence_flops, self.model_config, adapter_weights=adapter_weights)
        shared = torch.from_numpy(prefixes.lengths)
        return count(batch.lengths, batch.sampled_lengths) - count(shared, torch.zeros_like(shared))


def _shared_prefixes(batch: RolloutBatch) -> Prefixes:
    """Return for each sequence of a batch on the CPU the length of the prefix that is computed only once for it and
    others; 0 if none is.
    """
    return find_long_prefixes(batch) if batch.shares_prefixes else Prefixes.none(batch.num_sequences)
