"""Which weights sampled which token, for requests that outlast a change of the weights."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class TokenVersions:
    """The version of the weights now, and where in each unfinished sample it has changed.

    Attributes:
        current: what tokens are sampled from; None before the first weights.
    """

    def __init__(self) -> None:
        self.current: int | None = None
        self._starts: dict[str, list[list[tuple[int, int]]]] = {}

    def begin(self, request_id: str, num_samples: int) -> None:
        """Note a request that is about to be sampled from."""
        if self.current is None:
            raise RuntimeError("The engine has not been sent any weights yet: its own are random. Load some.")
        self._starts[request_id] = [[(0, self.current)] for _ in range(num_samples)]

    def activate(self, weight_version: int, num_tokens: Iterable[tuple[str, int, int]]) -> None:
        """Count tokens from here on as those of other weights.

        Args:
            weight_version: of these.
            num_tokens: request, sample and the number of its tokens so far, for all samples that are unfinished. What
                has not begun (with :meth:`begin`) is ignored.
        """
        self.current = weight_version
        for request_id, sample, count in num_tokens:
            if request_id in self._starts:
                self._starts[request_id][sample].append((count, weight_version))

    def end(self, request_id: str, lengths: Sequence[int]) -> list[NDArray[np.int32]]:
        """Remove a request, if it has begun, and return its tokens' versions.

        Returns:
            For each sample the version of each of its tokens.
        """
        all_starts = self._starts.pop(request_id, [])
        versions = []
        for length, starts in zip(lengths, all_starts, strict=False):
            versions.append(np.empty(length, np.int32))
            for start, version in starts:
                versions[-1][start:] = version
        return versions
