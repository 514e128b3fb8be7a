"""The RL hooks of callbacks, and the function that calls them.

A training step calls them in the order below. Brackets: ``on_weight_sync_start`` to ``on_weight_sync_end`` are called
if weights are sent, ``on_engine_start`` and ``on_engine_ready`` if the run waits for an engine to start, and
``on_engine_sleep`` if the engine sleeps. The hooks of rollout and reward are repeated whenever more prompts are sampled
in the same step, in place of groups that were dropped. Standalone engines (on devices of their own) are awaited before
the first ``on_weight_sync_start``::

    on_rollout_start
    [on_weight_sync_start  [on_engine_start  on_engine_ready]  on_engine_wake  on_weight_sync_end]
    [on_engine_sleep]  on_rollout_end
    on_reward_start  on_reward_end
    on_update_start  on_update_end

If engines continue to sample during updates (``rollout.max_staleness``), ``VLLMRollout`` sends the weights in its own
``on_update_end``, which is called before that of other callbacks. Engines that start later get the weights in the next
rollout.
``VLLMRollout`` is the first callback, and its engine goes to sleep in its own ``on_rollout_end``: other callbacks get
``on_engine_sleep`` before ``on_rollout_end``.

In a step without a learning signal the update is skipped, and so are the hooks of the last line.

Lightning calls ``on_train_batch_start`` before all of these hooks, and ``on_train_batch_end`` after them.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lightning.pytorch import Callback

from rlightning.config.argument_checks import CheckedArguments
from rlightning.console import show_log_lines
from rlightning.errors import ConfigError
from rlightning.protocols import CallsHooks, CountsSteps, Loop, callbacks_of, has

if TYPE_CHECKING:
    from rlightning.types import Prompt, RolloutBatch, Trajectory


class RLCallback(CheckedArguments, Callback):
    """Base class of Lightning callbacks with hooks for rollout, rewards, update, engine and weight sync.

    ``trainer`` is the training loop: a Lightning ``Trainer``, a ``Fabric``, or a user's object; ``module`` is the
    policy. A loop that is not Lightning's calls :func:`call_hook` with an object that has ``callbacks``.

    Attributes:
        runs_in: where the callback runs with a controller (docs/controller.md): in the controller, which has the
            loggers and the run's folder, or in each worker, which has a device and the actor. Callbacks without this
            attribute run in the controller.
        only_one: a kind of callback, such as "rollout callback", of which a run can have only one; "" otherwise.
    """

    runs_in: Literal["controller", "workers"] = "controller"
    only_one: ClassVar[str] = ""

    def output(self, trainer: Loop, stage: str) -> Path | None:
        """Return the file or folder that only this callback writes in a stage; None if it writes nothing."""
        return None

    def on_rollout_start(self, trainer: Loop, module: object, prompts: "list[Prompt]") -> None:
        """Called before completions are generated for ``prompts``."""

    def on_rollout_end(self, trainer: Loop, module: object, batch: "RolloutBatch") -> None:
        """Called when all completions have been sampled; ``batch`` has no rewards yet."""

    def on_reward_start(self, trainer: Loop, module: object, batch: "RolloutBatch") -> None:
        """Called before the rewards are computed."""

    def on_reward_end(self, trainer: Loop, module: object, batch: "RolloutBatch") -> None:
        """Called when ``batch.rewards`` is set. Trajectories with NaN, which is a failed reward, are dropped
        afterwards.
        """

    def on_update_start(self, trainer: Loop, module: object, batch: "RolloutBatch") -> None:
        """Called before the first optimizer step of a rollout; ``batch.advantages`` is set.

        A callback may change the advantages: to equal ones on the ranks of a tensor-parallel group, and under a
        controller in the workers (``runs_in = "workers"``).
        """

    def on_update_end(self, trainer: Loop, module: object, batch: "RolloutBatch") -> None:
        """Called after the last optimizer step of a rollout."""

    def on_engine_start(self, trainer: Loop, module: object) -> None:
        """Called before the run waits for an engine that was started but is not ready."""

    def on_engine_ready(self, trainer: Loop, module: object) -> None:
        """Called when the wait for an engine's start ends: the engine is ready, or has failed."""

    def on_weight_sync_start(self, trainer: Loop, module: object, weight_version: int) -> None:
        """Called before the actor's weights of ``weight_version`` are sent to the engine."""

    def on_engine_wake(self, trainer: Loop, module: object) -> None:
        """Called within a weight sync when a sleeping engine has the weights, before it allocates its KV cache."""

    def on_engine_sleep(self, trainer: Loop, module: object) -> None:
        """Called when the engine has released its memory: after a rollout, a validation, a test, a prediction."""

    def on_predict_prompt_end(
        self, trainer: Loop, module: object, prompt: "Prompt", trajectories: "list[Trajectory]"
    ) -> None:
        """Called in a prediction when all of a prompt's trajectories are complete; its batch may not be complete yet.

        Not called for every prompt: ranks may get the completions of a whole batch at once.
        """

    def on_weight_sync_end(self, trainer: Loop, module: object, weight_version: int) -> None:
        """Called when the engine has the weights, after their verification if one was due."""


class RunCallback(RLCallback):
    """Base of callbacks that keep state between steps. The state is reset when a run begins, so that one object can be
    used in several runs.

    A run begins with ``setup``, unless ``trainer.global_step`` is above 0, or a state has been loaded.
    """

    _is_loaded = False

    def begin_run(self) -> None:
        """Called before a run's first step: reset the state of an earlier run."""

    def drop_step(self) -> None:
        """Called when the current step will not be finished, because it is repeated or the run ends."""

    def setup(self, trainer: Loop, pl_module: object, stage: str) -> None:
        """Raise a ConfigError if the callback is listed twice, reset its state, and show log lines by default."""
        show_log_lines()
        check_repeated(callbacks_of(trainer))
        check_outputs(trainer, stage)
        self.drop_step()
        if stage == "fit" and not self._is_loaded and not (has(trainer, CountsSteps) and trainer.global_step):
            self.begin_run()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Mark the state as loaded, so that ``setup`` does not reset it. Subclasses restore it, and call this."""
        self._is_loaded = True

    def on_exception(self, trainer: Loop, pl_module: object, exception: BaseException) -> None:
        """Drop the interrupted step. A loop other than Lightning's must call this if it continues after an error."""
        self._is_loaded = False
        self.drop_step()

    def teardown(self, trainer: Loop, pl_module: object, stage: str) -> None:
        """Called when the run is over."""
        self._is_loaded = False


def check_outputs(trainer: Loop, stage: str) -> None:
    """Raise a ConfigError if two callbacks write to the same path in a stage, in any spelling of it."""
    writers: dict[Path, object] = {}
    for callback in callbacks_of(trainer):
        output = callback.output(trainer, stage) if isinstance(callback, RLCallback) else None
        if output is None:
            continue
        other = writers.setdefault(output.resolve(), callback)
        if other is not callback:
            names = " and ".join(type(writer).__name__ for writer in (other, callback))
            raise ConfigError(f"{names} of trainer.callbacks both write '{output}'. Keep one, or name another path.")


def check_repeated(callbacks: Iterable[object]) -> None:
    """Raise a ConfigError if a callback is listed twice, or if there are two of a kind of which a run can have only
    one, such as rollout callbacks. Stateless callbacks of other packages may be repeated.

    Args:
        callbacks: all callbacks of a run, distinguished by their ``state_key``, as in Lightning.
    """
    seen: set[str] = set()
    single: dict[str, type] = {}
    for callback in callbacks:
        if not isinstance(callback, Callback):
            continue
        kind = type(callback)
        only_one = callback.only_one if isinstance(callback, RLCallback) else ""
        other = single.setdefault(only_one, kind)
        if only_one and other is not kind:
            raise ConfigError(
                f"A run has one {only_one}, and here are {other.__name__} and {kind.__name__}, in Trainer(rollout=...) "
                "or trainer.callbacks. Keep one of them."
            )
        is_own = kind.__module__.startswith("rlightning.")
        if not is_own and kind.state_dict is Callback.state_dict:
            continue
        if callback.state_key in seen:
            raise ConfigError(f"trainer.callbacks lists {kind.__name__} twice, to do the same work. Keep one of them.")
        seen.add(callback.state_key)


def call_hook(trainer: Loop, module: object, hook: str, *args: object) -> None:
    """Call the method ``hook`` of each of ``trainer.callbacks`` that has it, in their order, with the trainer, the
    module and ``args``.
    """
    assert has(trainer, CallsHooks), f"{type(trainer).__name__} has no callbacks"
    for callback in trainer.callbacks:
        method = getattr(callback, hook, None)  # by name: a callback defines only the hooks that it needs
        if method is not None:
            method(trainer, module, *args)
