"""Steps without a learning signal in any completion: the update may be skipped, and too many in a row end the run."""

import logging

from rlightning.errors import ConfigError

log = logging.getLogger(__name__)


class StepsWithoutSignal:
    """Counts consecutive steps without a learning signal.

    Args:
        limit: so many in a row end the run.

    Attributes:
        number: in a row, up to the last step.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ConfigError(
                f"max_steps_without_signal={limit} must be at least 1, which ends the run at the first such step."
            )
        self.limit, self.number = limit, 0

    def count(self, step: int, num_sampled: int, num_kept: int, *, is_told: bool) -> None:
        """Count a step, and end the run after too many without a signal.

        Args:
            step: counted from 1.
            num_sampled: completions of it, refills included, over all ranks.
            num_kept: of these, those that can be learned from.
            is_told: whether this rank says that the step is skipped.

        Raises:
            ConfigError: it is one too many.
        """
        self.number = 0 if num_kept else self.number + 1
        line = (
            f"Step {step}: none of its {num_sampled} completions, refills included, can be learned from: the rewards "
            "of each group are all equal, or have failed"
        )
        if self.number >= self.limit:
            raise ConfigError(
                f"{line}; model.max_steps_without_signal={self.limit} such steps in a row end the run. The prompts may "
                "be too easy or too hard for the model: take others, more model.samples_per_prompt, or raise the limit."
            )
        if self.number and is_told:
            rule = f"; {self.number} such steps in a row, and model.max_steps_without_signal={self.limit} end the run."
            log.warning("%s. Its update is skipped%s", line, rule)
