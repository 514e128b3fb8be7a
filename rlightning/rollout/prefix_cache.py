"""The share of requests' tokens that an engine finds in its prefix cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rlightning.rollout.engine_output import EngineOutput


@dataclass(slots=True)
class PrefixCacheUse:
    """Numbers of tokens in the prompts of requests.

    Attributes:
        num_tokens: all tokens.
        num_cached: the tokens whose keys and values the engine had cached.
    """

    num_tokens: int = 0
    num_cached: int = 0

    def count(self, token_ids: Sequence[int], outputs: Sequence[EngineOutput]) -> None:
        """Count a request.

        Args:
            token_ids: [P], that its samples follow.
            outputs: of its samples.
        """
        self.num_tokens += len(token_ids)
        self.num_cached += outputs[0].get("num_cached_tokens", 0)

    def add(self, other: "PrefixCacheUse") -> None:
        """Count what another one has counted."""
        self.num_tokens += other.num_tokens
        self.num_cached += other.num_cached

    def take(self) -> "PrefixCacheUse":
        """Return what has been counted since the last call."""
        taken = PrefixCacheUse(self.num_tokens, self.num_cached)
        self.num_tokens = self.num_cached = 0
        return taken


class CountsPrefixCache(Protocol):
    """An engine that counts its requests' tokens."""

    @property
    def prefix_cache(self) -> PrefixCacheUse:
        """The counts of tokens since they were taken last."""
