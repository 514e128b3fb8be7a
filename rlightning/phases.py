"""Measures the seconds of each phase of a step, by hooks."""

from time import perf_counter

import torch

from rlightning.hooks import RunCallback
from rlightning.protocols import Loop, SumsOverRanks, has
from rlightning.types import Prompt, RolloutBatch

PHASES = ("generate", "reward", "update", "sync", "engine_start")


class PhaseTimer(RunCallback):
    """Base of callbacks that need the duration of each phase of a step, such as rollout, reward, update or weight sync.

    A step lasts from ``on_train_batch_start`` to ``on_train_batch_end``; in a loop without these hooks from the first
    ``on_rollout_start`` to ``on_update_end``. At its end :meth:`on_step_timed` is called.

    The seconds of a phase that occurs twice in a step (because of a refill) are added. A weight sync within a rollout
    or an update counts only as sync, and the wait for an engine's start only as wait. Times are measured on the host,
    without synchronizing the device.

    In a loop without batches a rollout restarts the step if it has the same prompts, or begins before a phase has
    ended, since the earlier step was interrupted. A loop that accumulates gradients over several rollouts calls
    ``on_update_end`` after each.

    Attributes:
        step_seconds: duration of the last step.
        phase_seconds: duration of each phase of the last step, by name; phases that did not occur are left out.
        num_tokens: prompt and completion tokens of the last step, over all ranks if the module has a ``world_sum``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.step_seconds = 0.0
        self.phase_seconds: dict[str, float] = {}
        self.num_tokens = 0
        self._opened: float | None = None
        self._is_batch_open = False
        self._begun: dict[str, float] = {}
        self._sums: dict[str, float] = {}
        self._num_rollout_tokens = 0
        self._num_update_tokens = 0
        self._prompt_indices: list[int] = []

    @property
    def timings(self) -> dict[str, float]:
        """The last step's seconds and tokens per second, by the names in docs/metrics.md."""
        timings = {"time/step": self.step_seconds} | {f"time/{phase}": s for phase, s in self.phase_seconds.items()}
        if self.num_tokens:
            timings["throughput/tokens_per_second"] = self.num_tokens / max(self.step_seconds, 1e-9)
        return timings

    def on_step_timed(self, trainer: Loop, module: object) -> None:
        """Called when a step has ended and its times are available."""

    def on_train_batch_start(self, trainer: Loop, module: object, batch: object, batch_idx: int) -> None:
        """Start timing the step on this batch; the times of an unfinished step are discarded."""
        self.open_step()
        self._is_batch_open = True

    def on_train_batch_end(self, trainer: Loop, module: object, outputs: object, batch: object, batch_idx: int) -> None:
        """Stop timing the step, store its durations and token count, and call :meth:`on_step_timed`."""
        self._close_step(trainer, module)
        self._is_batch_open = False

    def on_rollout_start(self, trainer: Loop, module: object, prompts: list[Prompt]) -> None:
        """Start timing the rollout, and in a loop without batches also the step, if it begins with this rollout."""
        indices = [p.index for p in prompts if isinstance(p, Prompt)] if isinstance(prompts, list) else []
        is_again = bool(self._begun) or (bool(indices) and indices == self._prompt_indices)
        if self._is_batch_open:
            self._end_update()
        elif self._opened is None or is_again:
            self.open_step()
        self._prompt_indices = indices
        self._begin("generate")

    def on_rollout_end(self, trainer: Loop, module: object, batch: RolloutBatch) -> None:
        """Add the seconds since :meth:`on_rollout_start`, and the batch's tokens, to the step's."""
        self._end("generate")
        self._num_rollout_tokens += batch.num_tokens

    def on_reward_start(self, trainer: Loop, module: object, batch: RolloutBatch) -> None:
        """Start timing the computation of a batch's rewards."""
        self._begin("reward")

    def on_reward_end(self, trainer: Loop, module: object, batch: RolloutBatch) -> None:
        """Add the seconds since :meth:`on_reward_start` to the step's reward time."""
        self._end("reward")

    def on_update_start(self, trainer: Loop, module: object, batch: RolloutBatch) -> None:
        """Start timing the update on a rollout's batch, which may take several optimizer steps."""
        is_again = "update" in self._begun and not self._is_batch_open and "generate" not in self._sums
        if self._opened is None or is_again:
            self.open_step()
        self._end_update()
        self._begin("update")
        self._num_update_tokens += batch.num_tokens

    def on_update_end(self, trainer: Loop, module: object, batch: RolloutBatch) -> None:
        """Add the seconds since :meth:`on_update_start` to the step's; in a loop without batches, also end the step."""
        self._end("update")
        if not self._is_batch_open:
            self._close_step(trainer, module)

    def on_engine_start(self, trainer: Loop, module: object) -> None:
        """Start timing the trainer's wait for an engine that is starting."""
        self._begin("engine_start")

    def on_engine_ready(self, trainer: Loop, module: object) -> None:
        """Add the seconds of this wait for an engine to the step's, and exclude them from a surrounding phase."""
        self._end_within("engine_start")

    def on_weight_sync_start(self, trainer: Loop, module: object, weight_version: int) -> None:
        """Start timing the transfer of the actor's weights to the engines."""
        self._begin("sync")

    def on_weight_sync_end(self, trainer: Loop, module: object, weight_version: int) -> None:
        """Add the weight sync's seconds to the step's, and exclude them from a surrounding rollout or update."""
        self._end_within("sync")

    def begin_run(self) -> None:
        """Reset the durations and the token count of the last step, which belong to an earlier run."""
        self.step_seconds, self.phase_seconds, self.num_tokens = 0.0, {}, 0

    def open_step(self) -> None:
        """Discard the times of an unfinished step, and start timing a new step now."""
        self.drop_step()
        self._opened = perf_counter()

    def drop_step(self) -> None:
        """Discard the times measured so far of the current step, such as an interrupted one, and stop timing it."""
        self._opened = None
        self._is_batch_open = False
        self._begun.clear()
        self._sums.clear()
        self._prompt_indices = []
        self._num_rollout_tokens = self._num_update_tokens = 0

    def _close_step(self, trainer: Loop, module: object) -> None:
        if self._opened is None:
            return
        self.step_seconds = perf_counter() - self._opened
        self._opened = None
        self.phase_seconds = {phase: self._sums[phase] for phase in PHASES if phase in self._sums}
        # A step without a rollout (supervised fine-tuning) is measured by what it updated on.
        self.num_tokens = self._num_rollout_tokens or self._num_update_tokens
        if has(module, SumsOverRanks):
            self.num_tokens = int(module.world_sum(torch.tensor(self.num_tokens)))
        self.on_step_timed(trainer, module)

    def _begin(self, phase: str) -> None:
        self._begun[phase] = perf_counter()

    def _end_update(self) -> None:
        """End the update of the previous micro-batch, in a loop that reports only the last micro-batch's end."""
        if "update" in self._begun:
            self._end("update")

    def _end_within(self, phase: str) -> None:
        """End a phase, and exclude its seconds from the rollout or update that contains it."""
        seconds = self._end(phase)
        for outer in self._begun:
            self._begun[outer] += seconds

    def _end(self, phase: str) -> float:
        """End a phase, add its seconds to the step's, and return them; 0 if its beginning was not observed."""
        begun = self._begun.pop(phase, None)
        seconds = 0.0 if begun is None else perf_counter() - begun
        self._sums[phase] = self._sums.get(phase, 0.0) + seconds
        return seconds
