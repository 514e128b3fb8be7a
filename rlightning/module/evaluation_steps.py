"""EvaluationSteps: what validation, test and prediction call on a module that samples."""

from functools import partial

from rlightning.errors import ConfigError
from rlightning.hooks import fire
from rlightning.module.evaluation import check_failed_share, log_validation
from rlightning.module.policy_module import PolicyModule
from rlightning.rewards import FailureCount
from rlightning.rollout import Generator, Sampling
from rlightning.types import Prompt, RolloutBatch, Trajectory
from rlightning.types.batch_plan import BatchPlan


class EvaluationSteps(PolicyModule):
    """A PolicyModule whose completions are rewarded in validation and test, and returned in prediction.

    Attributes:
        plan: of a step; prediction takes as many completions of each prompt.
        batch_type: the class of the batches.
        count_timeouts: whether trajectories that have run out of time count as sampled.
        generator: completes prompts; the callback that owns the engine sets it.
        sampling: how; the callback sets it, too.
        validation_failures: of the validation that runs, by the set's number.
    """

    plan: BatchPlan
    batch_type: type[RolloutBatch]
    count_timeouts: bool
    generator: Generator | None = None
    sampling: Sampling
    validation_failures: dict[int, FailureCount]

    def validation_step(self, prompts: list[Prompt], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Complete a validation set's prompts and log its rewards and pass@k."""
        log_validation(self, prompts, dataloader_idx, "val")

    def test_step(self, prompts: list[Prompt], batch_idx: int, dataloader_idx: int = 0) -> None:
        """As :meth:`validation_step`."""
        log_validation(self, prompts, dataloader_idx, "test")

    def on_validation_epoch_start(self) -> None:
        """Count failed rewards anew."""
        self.validation_failures = {}

    def on_test_epoch_start(self) -> None:
        """As :meth:`on_validation_epoch_start`."""
        self.on_validation_epoch_start()

    def on_validation_epoch_end(self) -> None:
        """Tell the loggers their x-axis, once for all sets: rollout steps. End the run if too many rewards failed."""
        check_failed_share(self.validation_failures)
        self.log("step", float(self.trainer.global_step))

    def on_test_epoch_end(self) -> None:
        """As :meth:`on_validation_epoch_end`."""
        self.on_validation_epoch_end()

    def predict_step(self, prompts: list[Prompt], batch_idx: int) -> list[tuple[Prompt, list[Trajectory]]]:
        """Complete each prompt ``samples_per_prompt`` times, as the ``rollout`` section says."""
        on_completed = partial(fire, self.trainer, self, "on_predict_prompt_end")
        groups = self._engine.generate(prompts, self.plan.samples_per_prompt, self.sampling, on_completed)
        return list(zip(prompts, groups, strict=True))

    def select_sampled(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the batch of the trajectories that count as sampled; the others reach no loss, baseline or mean."""
        counted = [m for m, one in enumerate(batch.trajectories) if self._is_sampled(one)]
        return batch if len(counted) == batch.num_trajectories else batch.select(counted)

    def _is_sampled(self, trajectory: Trajectory) -> bool:
        """Whether it ended by itself, by a limit, or, with ``count_timeouts``, by time."""
        return trajectory.status in ("finished", "truncated", *(("timeout",) if self.count_timeouts else ()))

    @property
    def _engine(self) -> Generator:
        """What completes prompts.

        Raises:
            ConfigError: there is nothing.
        """
        if self.generator is None:
            raise ConfigError(
                f"{type(self).__name__} has nothing to generate with. Add VLLMRollout or TransformersRollout to "
                "trainer.callbacks."
            )
        return self.generator
