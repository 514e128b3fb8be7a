"""Counts of the prompt tokens that an engine found in its prefix cache."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlightning.rollout.engine_output import EngineOutput


@dataclass(slots=True)
class PrefixCacheUse:
    """Counts of the prompt tokens sent to an engine, and of those that it found in its prefix cache.

    Attributes:
        num_tokens: tokens of all prompts.
        num_cached: tokens whose keys and values the engine had cached.
    """

    num_tokens: int = 0
    num_cached: int = 0

    def count(self, token_ids: Sequence[int], outputs: Sequence[EngineOutput]) -> None:
        """Add the counts of a request.

        Args:
            token_ids: [P], the prompt.
            outputs: outputs of the request's samples.
        """
        self.num_tokens += len(token_ids)
        self.num_cached += outputs[0].get("num_cached_tokens", 0)

    def add(self, other: "PrefixCacheUse") -> None:
        """Add the counts of ``other``, such as another engine's, to these."""
        self.num_tokens += other.num_tokens
        self.num_cached += other.num_cached

    def take(self) -> "PrefixCacheUse":
        """Return the counts since the last call, and reset them."""
        taken = PrefixCacheUse(self.num_tokens, self.num_cached)
        self.num_tokens = self.num_cached = 0
        return taken
