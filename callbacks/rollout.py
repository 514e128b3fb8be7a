"""The base of rollout callbacks: sampling arguments, random streams, weight versions, verified weight syncs."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedConfig

from rlightning.callbacks.throughput import log_metrics
from rlightning.data.formatting import USUAL, PromptFormat
from rlightning.environments import Environment, SingleTurn
from rlightning.environments.collector import Collector
from rlightning.environments.runner import EnvironmentRunner, HasEnvironmentNames, check_environment_names
from rlightning.environments.supports_report import SupportsReport
from rlightning.environments.turn_metrics import TurnTotals, turn_metrics
from rlightning.environments.verification import TrajectoryVerifier, check_verifiable
from rlightning.errors import ConfigError, EngineError, check_rules
from rlightning.hooks import RLCallback, check_repeated
from rlightning.models import describe_length_limit, load_config
from rlightning.parallel.collectives import any_rank, gather_objects
from rlightning.protocols import (
    Closes,
    CountsTimeouts,
    HasAdapter,
    HasConfig,
    HasData,
    HasLongestLimit,
    HasPlan,
    HasPromptFormat,
    HasPromptLimit,
    HasRootDevice,
    HasStrategy,
    HasValidationSets,
    Loop,
    SampledPolicy,
    adapter_of,
    callbacks_of,
    generates,
    has,
    members,
)
from rlightning.rollout import HasTrajectorySampler, OnCompleted, Sampling, TokenSampler, TrajectorySampler
from rlightning.rollout.canary import MAX_DISTANCE, Verification
from rlightning.rollout.placement import COLLECTOR_RANK
from rlightning.rollout.prefix_cache import PrefixCacheUse
from rlightning.rollout.requests import RandomStreams, check_own_limit, check_requests, check_stop_tokens
from rlightning.rollout.sampler import MAX_SUPPORT
from rlightning.rollout.weights.fingerprint import WeightFingerprint
from rlightning.seeds import run_seed
from rlightning.types import Prompt, RolloutBatch, Trajectory

log = logging.getLogger(__name__)


class RolloutCallback(RLCallback, TrajectorySampler):
    """Base of callbacks that sample trajectories of a module's prompts with the actor's current weights.

    A subclass starts its sampler in :meth:`start`, which also sets the collector that samples from it, and ends both in
    :meth:`close`.

    Args:
        temperature: temperature of training completions; :class:`~rlightning.rollout.Sampling` has details on this and
            the next seven arguments.
        top_p: probability mass of the tokens to sample from.
        top_k: number of most likely tokens to sample from.
        min_p: minimum probability of a token, relative to the most likely token's.
        max_new_tokens: maximum tokens of a completion.
        stop: strings that end a completion.
        stop_token_ids: tokens that end a completion.
        seed: seed of sampling.
        verify_every: number of weight syncs between two verifications; 0 for none.
        verify_tolerance: maximum distance of the sampler's log-probabilities from the actor's, as a multiple of the
            actor's rounding errors; set it higher for an engine with larger errors, such as with an FP8 KV cache.
        environment: makes trajectories of prompts (docs/environments.md); or several by name, which rows select by
            their column ``environment``; None to complete each prompt once. In YAML a section beside ``rollout``.
        trajectory_timeout: maximum seconds of a trajectory in an environment, after which it counts as not sampled;
            None for no limit. Completions without an environment have no such limit.
        turn_timeout: maximum seconds of a turn, including the environment's part: from the end of the policy's last
            turn, or the beginning, to the end of its next turn, or of the trajectory. The consequences are those of
            ``trajectory_timeout``; None for no limit.
        max_requeues: how often a trajectory whose worker process ended or hung is repeated at most, before it counts as
            not sampled.
        max_failed_share: maximum share of a step's trajectories, including refills, that may fail before the run ends.
        verify_trajectories: whether to end the run if a step's trajectories differ from what was sampled: the sampler
            scores each branch again, in one prefill, and the differences are compared with those of single-turn
            rollouts.
    """

    runs_in = "workers"
    only_one = "rollout callback"

    no_sampler = "There is no sampler: it has not been set up, or has been closed."
    """Message of the error of calls that need a sampler."""

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
        verify_every: int = 20,
        verify_tolerance: float = MAX_DISTANCE,
        environment: Environment | Mapping[str, Environment] | None = None,
        trajectory_timeout: float | None = 3600.0,
        turn_timeout: float | None = None,
        max_requeues: int = 2,
        max_failed_share: float = 0.5,
        verify_trajectories: bool = False,
    ) -> None:
        super().__init__()
        check_rules(
            {
                f"rollout.{name}={seconds} must be above 0 seconds": seconds is None or seconds > 0
                for name, seconds in (("trajectory_timeout", trajectory_timeout), ("turn_timeout", turn_timeout))
            }
            | {
                f"rollout.max_requeues={max_requeues} must be at least 0": max_requeues >= 0,
                f"rollout.max_failed_share={max_failed_share} must be from 0 to 1": 0 <= max_failed_share <= 1,
            }
        )
        self.environment = environment
        self.trajectory_timeout, self.turn_timeout = trajectory_timeout, turn_timeout
        self.max_requeues, self.max_failed_share = max_requeues, max_failed_share
        self.verify_trajectories = verify_trajectories
        self.sampling = Sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            max_new_tokens=max_new_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(stop_token_ids),
            seed=seed,
        )
        self.verification = Verification(verify_every, verify_tolerance)
        self._collector: Collector | None = None
        self._loop: Loop | None = None
        self._policy: SampledPolicy | None = None
        self._fingerprint, self._seen_version = WeightFingerprint(), -1
        self._streams = RandomStreams()
        self._turns = TurnTotals()
        self._supports = SupportsReport(self.sampling)
        self.take_prefix_cache: Callable[[], PrefixCacheUse] = PrefixCacheUse  # a subclass sets it, on rank 0

    # To be defined by subclasses

    @property
    @abstractmethod
    def max_sequence_length(self) -> int:
        """Maximum number of tokens of a sequence in the sampler.

        Raises:
            EngineError: there is no sampler.
        """

    @abstractmethod
    def start(self, stage: str, device: torch.device, sampling: Sampling, max_prompt_tokens: int | None) -> None:
        """Start the sampler for prompts of up to ``max_prompt_tokens``; None for the model's limit.

        May return before the sampler is ready.
        """

    def _ensure_started(self) -> None:
        """Start the sampler if :meth:`start` has left that to the first request."""

    @property
    def is_single_turn(self) -> bool:
        """Whether each trajectory consists of a prompt and one completion."""
        return self.environment is None or isinstance(self.environment, SingleTurn)

    @property
    def max_support(self) -> int:
        """Maximum number of tokens in a support, for the memory plan; 0 if no distribution is truncated."""
        environments = self.environment.values() if isinstance(self.environment, Mapping) else [self.environment]
        truncates = any(one is not None and one.truncates for one in environments)
        return MAX_SUPPORT if truncates else self.sampling.max_support

    def seeded_sampling(self, device: torch.device) -> Sampling:
        """Return the sampling parameters of training, with the run's seed unless they have their own."""
        return self.sampling if self.sampling.seed is not None else replace(self.sampling, seed=run_seed())

    @property
    def is_set_up(self) -> bool:
        """Whether a sampler has been started; it may not be ready yet."""
        return self._collector is not None

    @property
    def collector(self) -> Collector:
        """This rank's :class:`Collector`: rank 0 samples all ranks' prompts, and each rank gets its trajectories.

        Raises:
            EngineError: there is no sampler.
        """
        if self._collector is None:
            raise EngineError(self.no_sampler)
        return self._collector

    def make_runner(self, sampler: TokenSampler) -> EnvironmentRunner:
        """Return the runner of :attr:`environment`, whose turns ``sampler`` samples; called only on rank 0."""
        return EnvironmentRunner(
            sampler,
            self._module.tokenizer,
            self.environment,
            max_length=self.max_sequence_length,
            timeout=self.trajectory_timeout,
            turn_timeout=self.turn_timeout,
            prompt_format=self.prompt_format,
            max_requeues=self.max_requeues,
        )

    @property
    def time_limits(self) -> dict[str, float] | None:
        """Limits on a trajectory's seconds by configuration key; None if trajectories that have timed out are
        trained on.
        """
        if has(self._module, CountsTimeouts) and self._module.count_timeouts:
            return None
        limits = {"rollout.trajectory_timeout": self.trajectory_timeout, "rollout.turn_timeout": self.turn_timeout}
        return {key: seconds for key, seconds in limits.items() if seconds is not None}

    def make_verifier(self, sampler: TokenSampler, dtype: torch.dtype) -> TrajectoryVerifier | None:
        """Return the object that compares trajectories' log-probabilities with ``sampler``'s; None if turned off."""
        return TrajectoryVerifier(sampler, self.max_sequence_length, dtype) if self.verify_trajectories else None

    def sleep_sampler(self) -> None:
        """Free the sampler's memory if it shares the actor's device; called after a rollout or validation."""

    @abstractmethod
    def close(self) -> None:
        """End the sampler and everything that it has started. May be called twice."""

    # Start and end

    def setup(self, trainer: Loop, module: object, stage: str) -> None:
        """Check the configuration and start the sampler."""
        check_repeated(callbacks_of(trainer))
        is_needed = generates(module) or stage == "predict"
        if not is_needed or self.is_set_up:
            return
        if not has(module, SampledPolicy):
            missing = [name for name in members(SampledPolicy) if not hasattr(module, name)]
            raise ConfigError(
                f"{type(self).__name__} needs {', '.join(missing)} of the module, which {type(module).__name__} does "
                "not have. Derive it from PolicyModule, or add them: examples/plain_loop.py shows how."
            )
        self._loop, self._policy = trainer, module
        max_prompt_tokens = self._check(stage)
        device = module.device
        if has(trainer, HasStrategy) and has(trainer.strategy, HasRootDevice):
            device = trainer.strategy.root_device
        sampling = self.seeded_sampling(device)
        if has(module, HasTrajectorySampler):
            module.sampler, module.sampling = self, sampling
        self.start(stage, device, sampling, max_prompt_tokens)

    @property
    def _trainer(self) -> Loop:
        assert self._loop is not None, "setup comes first"
        return self._loop

    @property
    def _module(self) -> SampledPolicy:
        assert self._policy is not None, "setup comes first"
        return self._policy

    def teardown(self, trainer: Loop, module: object, stage: str) -> None:
        """End the sampler."""
        self.close()

    def on_exception(self, trainer: Loop, module: object, exception: BaseException) -> None:
        """End the sampler and the module's processes, since the module's teardown is not called either."""
        self.close()
        if has(module, Closes):
            module.close()

    # Random streams

    def begin_step(self) -> None:
        """Reset random streams and counts for a new step; called at the beginning and end of a step, in every loop."""
        self._streams.begin("training")
        self._turns = TurnTotals()
        if self._collector is not None:
            self._collector.begin_step()

    def on_train_batch_start(self, trainer: Loop, module: object, batch: object, batch_idx: int) -> None:
        """Begin a step."""
        self.begin_step()

    def on_update_end(self, trainer: Loop, module: object, batch: object) -> None:
        """Begin the next step: a loop without batches does not call ``on_train_batch_start``."""
        self.begin_step()

    def on_validation_start(self, trainer: Loop, pl_module: object) -> None:
        """Use random streams other than those of training, separately for each validation set."""
        self._streams.begin("evaluation")

    def on_validation_end(self, trainer: Loop, pl_module: object) -> None:
        """Use the random streams of training again, and free the sampler's memory."""
        self._streams.begin("training")
        if not self.is_single_turn:
            self.take_prefix_cache()  # these counts belong to no training step
        self.sleep_sampler()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    # Metrics of environments

    def on_rollout_end(self, trainer: Loop, module: object, batch: RolloutBatch) -> None:
        """Log the environments' metrics, and free the sampler's memory. Every rank must call it."""
        self._supports.report(batch)
        if not self.is_single_turn:
            self._turns.add(batch.trajectories)
            self._turns.prefix_cache.add(self.take_prefix_cache())
            log_metrics(module, turn_metrics(gather_objects(self._turns, name="turns")))
        self.sleep_sampler()

    # Sampling

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        on_completed: OnCompleted | None = None,
    ) -> list[list[Trajectory]]:
        """Return ``num_samples`` trajectories of each prompt, in the prompts' order. Every rank must call it.

        They are sampled with the actor's current weights, which are sent first if the sampler lacks them.

        Args:
            prompts: this rank's prompts.
            num_samples: trajectories of each prompt.
            sampling: settings of all requests.
            on_completed: called with each prompt when its last trajectory has ended; on ranks other than 0 within
                ``intervals.DELIVERY_INTERVAL`` seconds.

        Raises:
            EngineError: the sampler has failed.
        """
        self._ensure_started()
        collector = self.collector
        is_training = self._streams.purpose == "training"
        if not is_training:
            sampling = replace(sampling, returns_supports=False)
        check_requests(prompts, num_samples, sampling, self.max_sequence_length)
        self._count_change()
        try:
            requests = self._streams.assign(prompts, sampling, self._module.weight_version)
            collector.is_training = is_training
            groups = collector.generate(requests, num_samples, sampling, on_completed)
        except BaseException:
            self.begin_step()  # a loop may continue after Ctrl-C, and begin the step again
            raise
        if is_training:
            self._log_environments(collector)
        return groups

    def check_timeouts(self) -> None:
        """Raise an error if the time limits have left the training step no trajectory. Every rank must call it, after
        the step's last refill.

        Raises:
            EnvironmentFailedError: all have timed out, or some of them, and all others have failed.
        """
        self.collector.check_timeouts()

    def _log_environments(self, collector: Collector) -> None:
        """Log the environments' metrics of the step so far; a collective if there are environments."""
        if self.verify_trajectories or not self.is_single_turn:
            metrics = gather_objects(collector.environment_metrics(), name="metrics")[COLLECTOR_RANK]
            log_metrics(self._module, metrics)

    def _count_change(self) -> None:
        """Increase the weight version if weights have changed without it, such as by swapping in averages."""
        module = self._module
        # With an adapter, only the adapter's weights can have changed, not the base model's.
        has_adapter = adapter_of(module) is not None
        weights = module.adapter_weights() if has(module, HasAdapter) and has_adapter else module.named_weights()
        has_changed = self._fingerprint.has_changed(weights)
        is_counted, self._seen_version = module.weight_version != self._seen_version, module.weight_version
        if any_rank(has_changed and not is_counted, name="weights changed"):
            module.weight_version += 1
            self._seen_version = module.weight_version

    # Configuration

    @property
    def prompt_format(self) -> PromptFormat:
        """The data module's settings for converting a row to a prompt; the defaults if it has none."""
        found = self._datamodule.format if has(self._datamodule, HasPromptFormat) else None
        return found if isinstance(found, PromptFormat) else USUAL

    @property
    def _datamodule(self) -> object:
        return self._trainer.datamodule if has(self._trainer, HasData) else None

    def _check(self, stage: str) -> int | None:
        """Check the configuration; return the data module's limit on prompt tokens."""
        sampling, module = self.sampling, self._module
        if stage == "fit" and sampling.temperature == 0:
            raise ConfigError(
                "rollout.temperature=0 makes all samples of a prompt alike, and nothing can be learned. Use 1."
            )
        if stage == "fit" and self.verify_trajectories:
            check_verifiable(sampling)
        datamodule = self._datamodule
        if has(datamodule, HasEnvironmentNames):
            check_environment_names(self.environment, datamodule.environment_names)
        for chosen in datamodule.validation_sets if has(datamodule, HasValidationSets) else ():
            try:
                if chosen.temperature is not None:
                    replace(sampling, temperature=chosen.temperature)
            except ConfigError as error:
                raise ConfigError(f"Validation set '{chosen.name}': {error}") from error
        check_stop_tokens(sampling, load_config(module.model_path).get_text_config().vocab_size)
        check_own_limit(datamodule.longest_limit if has(datamodule, HasLongestLimit) else 0, sampling)
        max_prompt_tokens = datamodule.max_prompt_tokens if has(datamodule, HasPromptLimit) else None
        config = module.model_config if has(module, HasConfig) else None
        if max_prompt_tokens is not None and has(module, HasPlan) and isinstance(config, PreTrainedConfig):
            module.plan.check_sequence_length(
                max_prompt_tokens,
                sampling.max_new_tokens,
                module.max_model_length,
                describe_length_limit(config),
            )
        return max_prompt_tokens
