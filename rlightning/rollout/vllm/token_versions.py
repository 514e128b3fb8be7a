"""Records which weights sampled each token of requests that run during weight updates."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class TokenVersions:
    """The current version of the weights, and the positions in unfinished samples at which it changed.

    Attributes:
        current: version of the weights that sample new tokens; None before the first weights.
    """

    def __init__(self) -> None:
        self.current: int | None = None
        self._starts: dict[str, list[list[tuple[int, int]]]] = {}

    def begin(self, request_id: str, num_samples: int) -> None:
        """Record that a new request's tokens are sampled by the current weight version, until it changes."""
        if self.current is None:
            raise RuntimeError("The engine has not been sent any weights yet: its own are random. Load some.")
        self._starts[request_id] = [[(0, self.current)] for _ in range(num_samples)]

    def activate(self, weight_version: int, num_tokens: Iterable[tuple[str, int, int]]) -> None:
        """Set the weight version of all tokens that are sampled from now on.

        Args:
            weight_version: version of the new weights.
            num_tokens: request id, sample index and number of tokens so far of each unfinished sample. Requests without
                :meth:`begin` are ignored.
        """
        self.current = weight_version
        for request_id, sample, count in num_tokens:
            if request_id in self._starts:
                self._starts[request_id][sample].append((count, weight_version))

    def end(self, request_id: str, lengths: Sequence[int]) -> list[NDArray[np.int32]]:
        """Remove a finished request, and return the weight version that sampled each of its tokens.

        Returns:
            For each sample the version of each token; empty if :meth:`begin` was not called.
        """
        all_starts = self._starts.pop(request_id, [])
        versions = []
        for length, starts in zip(lengths, all_starts, strict=False):
            versions.append(np.empty(length, np.int32))
            for start, version in starts:
                versions[-1][start:] = version
        return versions
