"""Counts consecutive steps in which no completion gives a learning signal; too many end the run."""

import logging

from rlightning.errors import ConfigError

log = logging.getLogger(__name__)

TIME_LIMITS = " Environments that need longer need larger limits, such as rollout.trajectory_timeout."


class StepsWithoutSignal:
    """Counts consecutive steps without a learning signal.

    Args:
        limit: number of consecutive steps that ends the run.

    Attributes:
        number: number of consecutive steps so far.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ConfigError(
                f"max_steps_without_signal={limit} must be at least 1, which ends the run at the first such step."
            )
        self.limit, self.number = limit, 0

    def count(self, step: int, num_sampled: int, num_kept: int, num_lost: int = 0, *, is_logging: bool) -> None:
        """Count a step; raise a ConfigError, which ends the run, after too many consecutive steps without a signal.

        Args:
            step: counted from 1.
            num_sampled: number of the step's completions, with refills, over all ranks.
            num_kept: number of completions with a learning signal.
            num_lost: number of trajectories that have failed or timed out, so that they are not in ``num_sampled``.
            is_logging: whether this rank logs that the update is skipped.
        """
        self.number = 0 if num_kept else self.number + 1
        line = (
            f"Step {step}: none of its {num_sampled} completions, refills included, can be learned from: the rewards "
            "of each group are all equal, or have failed"
        )
        if num_lost:
            line += f"; {num_lost} more trajectories failed or timed out in their environment (trajectory/not_sampled)"
        if self.number >= self.limit:
            raise ConfigError(
                f"{line}; model.max_steps_without_signal={self.limit} such steps in a row end the run. The prompts may "
                "be too easy or too hard for the model: take others, more model.samples_per_prompt, or raise the limit."
                f"{TIME_LIMITS if num_lost else ''}"
            )
        if self.number and is_logging:
            rule = f"; {self.number} such steps in a row, and model.max_steps_without_signal={self.limit} end the run."
            log.warning("%s. Its update is skipped%s", line, rule)
