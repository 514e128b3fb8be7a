"""The sizes of a training step: numbers of prompts, completions, minibatches and tokens."""

import math
from dataclasses import asdict, dataclass

from rlightning.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The numbers of prompts, completions and optimizer steps in a training step.

    Attributes:
        prompts_per_step: number of prompts, over all ranks.
        samples_per_prompt: completions of each prompt.
        updates_per_rollout: minibatches into which a rollout is split; each is one optimizer step.
        epochs_per_rollout: passes over a rollout.
        max_tokens_per_microbatch: maximum tokens of one forward pass, with prompts.
    """

    prompts_per_step: int
    samples_per_prompt: int
    updates_per_rollout: int
    epochs_per_rollout: int
    max_tokens_per_microbatch: int

    def __post_init__(self) -> None:
        for name, number in asdict(self).items():
            if number < 1:
                raise ConfigError(f"{name}={number} must be at least 1.")
        if self.prompts_per_step % self.updates_per_rollout:
            raise ConfigError(
                f"prompts_per_step={self.prompts_per_step} cannot be split into updates_per_rollout="
                f"{self.updates_per_rollout} minibatches. {_multiples(self.prompts_per_step, self.updates_per_rollout)}"
            )

    @property
    def optimizer_steps(self) -> int:
        """The number of optimizer steps of a rollout."""
        return self.updates_per_rollout * self.epochs_per_rollout

    def check_world_size(self, world_size: int) -> None:
        """Raise a ConfigError for a number of ranks that does not divide the prompts of a step."""
        if self.prompts_per_step % world_size:
            raise ConfigError(
                f"prompts_per_step={self.prompts_per_step} cannot be split over {world_size} ranks. "
                f"{_multiples(self.prompts_per_step, math.lcm(world_size, self.updates_per_rollout))}"
            )

    def check_sequence_length(
        self, max_prompt_tokens: int, max_new_tokens: int, max_model_length: int, reason: str = ""
    ) -> None:
        """Raise a ConfigError if sequences are too long for the model or for a micro-batch.

        Args:
            max_prompt_tokens: maximum tokens of a prompt.
            max_new_tokens: maximum tokens of a completion.
            max_model_length: maximum tokens of a sequence of the model.
            reason: explains ``max_model_length`` if it is not the model's number of positions.
        """
        longest = max_prompt_tokens + max_new_tokens
        total = f"max_prompt_tokens={max_prompt_tokens} + max_new_tokens={max_new_tokens} = {longest}"
        if longest > max_model_length:
            raise ConfigError(
                f"{total} tokens, but the model's positions end at {max_model_length}{reason and f': {reason}'}. "
                f"Lower data.max_prompt_tokens or rollout.max_new_tokens by {longest - max_model_length}."
            )
        if longest > self.max_tokens_per_microbatch:
            raise ConfigError(
                f"{total} tokens do not fit max_tokens_per_microbatch={self.max_tokens_per_microbatch}, and a sequence "
                f"is never cut. Use max_tokens_per_microbatch >= {longest}."
            )

    def describe(self, world_size: int) -> str:
        """Return a text that shows how the numbers of completions, minibatches and optimizer steps are derived."""
        completions = self.prompts_per_step * self.samples_per_prompt
        per_update = completions // self.updates_per_rollout
        share = f" ({completions // world_size} on each of {world_size} ranks)" if world_size > 1 else ""
        steps = "1 optimizer step"
        if self.optimizer_steps > 1:
            epochs = f" x {self.epochs_per_rollout} epochs" if self.epochs_per_rollout > 1 else ""
            steps = f"{self.updates_per_rollout} updates{epochs} = {self.optimizer_steps} optimizer steps"
        return (
            f"A step is {self.prompts_per_step} prompts x {self.samples_per_prompt} samples = {completions} completions"
            f"{share}, then {steps} of {per_update} completions, in micro-batches of at most "
            f"{self.max_tokens_per_microbatch:,} tokens."
        )


def _multiples(value: int, factor: int) -> str:
    below, above = value // factor * factor, -(-value // factor) * factor
    return f"Use a multiple of {factor}, such as {above if not below else f'{below} or {above}'}."
