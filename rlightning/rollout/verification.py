"""Which weight syncs are verified by the canary, and what comes of it."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from rlightning.errors import ConfigError, EngineError
from rlightning.parallel.collectives import any_rank
from rlightning.rollout.canary import MAX_DISTANCE, Canary


class VerifiedSampler(Protocol):
    """What is verified of a sampler.

    Attributes:
        weight_version: of the weights that it holds; None where it has none.
        is_verified: whether it has been found to hold the actor's weights, since its start.
    """

    weight_version: int | None
    is_verified: bool

    @property
    def is_alive(self) -> bool:
        """Whether it can score, as far as is known."""

    def score_all(self, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the log-probabilities at temperature 1 of some sequences [N, L]: [N, L], 0 for their first tokens."""


class Verification:
    """Verifies each engine's first weights, and all engines at every so many syncs.

    Args:
        every: syncs between two verifications; 0 verifies nothing.
        tolerance: see :class:`~rlightning.rollout.canary.Canary`.
    """

    def __init__(self, every: int, tolerance: float) -> None:
        if every < 0:
            raise ConfigError(f"rollout.verify_every={every} must be at least 0, where 0 verifies nothing.")
        if not tolerance > 1:
            raise ConfigError(
                f"rollout.verify_tolerance={tolerance} must be above 1: it is a multiple of the actor's own rounding "
                f"errors. Leave it out for {MAX_DISTANCE}."
            )
        self.every, self.tolerance = every, tolerance
        self.num_syncs = 0
        self._canary: Canary | None = None

    def begin_run(self, module: Any, max_length: int, dtype: torch.dtype, device: torch.device) -> None:
        """Count syncs anew.

        Args:
            module: has ``tokenizer``, ``weight_version`` and ``score(batch, dtype)``.
            max_length: tokens of the longest sequence that the samplers take.
            dtype: of the samplers.
            device: of the samplers.
        """
        self.num_syncs = 0
        self._canary = Canary(module.tokenizer, max_length, dtype, device, self.tolerance) if self.every else None

    def evaluate(self, module: Any, engines: Sequence[VerifiedSampler]) -> bool:
        """Have the actor score the canary, if this sync or the next is verified on any rank; all ranks call it.

        Args:
            module: as of :meth:`begin_run`, with the weights that are about to be sent.
            engines: of this rank.

        Returns:
            Whether this rank's engines are to be verified once they have the weights.
        """
        if self._canary is None:
            return False
        is_new = any(engine.is_alive and not engine.is_verified for engine in engines)
        is_due = is_new or self.num_syncs % self.every == 0
        self.num_syncs += 1  # here, where all ranks are: an engine that dies in the sync is one rank's
        if any_rank(is_due or self.num_syncs % self.every == 0, name="canary"):
            self._canary.evaluate(module.score, module.weight_version)
        return is_due

    def verify(self, module: Any, engine: VerifiedSampler) -> None:
        """Refuse to sample from an engine that has other weights than the actor had at :meth:`evaluate`.

        Raises:
            EngineError: if it has.
        """
        assert self._canary is not None, "begin_run and evaluate come first"
        try:
            self._canary.check(engine.score_all(self._canary.token_ids), getattr(module, "model_config", None))
        except EngineError:
            engine.weight_version = None  # its weights are taken for none
            raise
        engine.is_verified = True
