"""Which weight syncs are verified by the canary, and what comes of it."""

from collections.abc import Sequence
from typing import Any

from rlightning.errors import ConfigError, EngineError
from rlightning.parallel.collectives import any_rank
from rlightning.rollout.canary import MAX_DISTANCE, Canary
from rlightning.rollout.engine_link import VLLMConfig
from rlightning.rollout.vllm_engine import VLLMEngine


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

    def begin_run(self, module: Any, config: VLLMConfig) -> None:
        """Count syncs anew.

        Args:
            module: has ``tokenizer``, ``weight_version`` and ``score(batch, dtype)``.
            config: of the engines.
        """
        self.num_syncs = 0
        self._canary = Canary(module.tokenizer, config, self.tolerance) if self.every else None

    def evaluate(self, module: Any, engines: Sequence[VLLMEngine]) -> bool:
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

    def verify(self, module: Any, engine: VLLMEngine) -> None:
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
