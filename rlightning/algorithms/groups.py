"""What algorithms that compare the completions of one prompt have in common."""

from lightning.pytorch import Callback
from torch import Tensor

from rlightning.errors import ConfigError
from rlightning.module import RLModule
from rlightning.objectives import group_advantages
from rlightning.types import RolloutBatch


class GroupModule(RLModule):
    """An RLModule whose advantages are taken against other completions of the same prompt, GRPO's unless overridden."""

    def configure_callbacks(self) -> list[Callback]:
        """Refuse to train on groups of one, whose advantages are all 0; prediction may well sample once a prompt."""
        if self.trainer.state.fn == "fit" and self.samples_per_prompt < 2:
            raise ConfigError(
                f"samples_per_prompt={self.samples_per_prompt}: {type(self).__name__} compares completions of one "
                "prompt with each other, and one alone teaches nothing. Use at least 2, such as 8."
            )
        return super().configure_callbacks()

    def compute_advantages(self, batch: RolloutBatch) -> Tensor:
        """Rewards less their group's mean, over its standard deviation: [T]."""
        assert batch.rewards is not None
        return batch.to_tokens(group_advantages(batch.rewards, batch.group_ids))
