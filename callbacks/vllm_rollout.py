"""Rollouts with vLLM: the callback that starts and ends the engine."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from rlightning.callbacks.make_room_for_engine import MakeRoomForEngine
from rlightning.callbacks.rollout import RolloutCallback
from rlightning.callbacks.throughput import log_metrics
from rlightning.environments.collector import Collector, StepPlan
from rlightning.environments.runner import ScoreGroup
from rlightning.errors import EngineError
from rlightning.hooks import call_hook
from rlightning.lightning_internals import is_amid_step
from rlightning.memory_plan.decisions import check_engine
from rlightning.memory_plan.work import RolloutMemory, Work
from rlightning.models.remote_code import trusts_remote_code
from rlightning.parallel.collectives import gather_objects, global_rank, world_size
from rlightning.protocols import HasFitLoop, HasLoggers, HasPlan, HasUsualOptimizers, Loop, ScoresGroups, has
from rlightning.report.loggers import is_service
from rlightning.rollout import OnCompleted, Sampling, TakePrompts
from rlightning.rollout.async_metrics import STOPPED, BottleneckMonitor
from rlightning.rollout.engine import Engine
from rlightning.rollout.engine_options import EngineOptions, Placement
from rlightning.rollout.engine_pool import EnginePool
from rlightning.rollout.engine_relay import EngineNetwork
from rlightning.rollout.in_flight import InFlight, SavedGroups
from rlightning.rollout.model_files import ModelFiles, read_copies
from rlightning.rollout.placement import COLLECTOR_RANK, check_group_hosts
from rlightning.rollout.rank_engines import RankEngines, colocated_engines, standalone_engines
from rlightning.rollout.requests import check_requests
from rlightning.rollout.weight_sync import WeightSync
from rlightning.run_dir import run_dir
from rlightning.types import Prompt, Trajectory

if TYPE_CHECKING:
    from rlightning.rollout.ray_engines import RayEngines

log = logging.getLogger(__name__)


class VLLMRollout(RolloutCallback):
    """Starts vLLM engines, sends them the actor's weights, samples from them, and ends them, also after an error.

    The engine is a separate process. It starts in ``setup``, while the actor is loaded. If the actor has changed, its
    weights are sent before the next completions; after the first sync and every ``verify_every``-th one, the canary's
    log-probabilities under engine and actor must be equal up to rounding. On a GPU shared with the actor the engine
    sleeps while it is not needed. If an engine dies or hangs during a rollout, its prompts go to other engines, and it
    is restarted with the next weight sync; without other engines, it is restarted immediately with the current weights,
    and finished completions are kept. An engine that dies twice in a step is not restarted, and without any engine the
    run ends with the engine's last log lines.

    Rank 0 collects the trajectories of all ranks' prompts from the engines of all ranks. With
    ``placement="standalone"`` the engines run on separate devices, and with ``max_staleness`` above 0 they continue to
    sample while the actor is updated: :meth:`collect_trajectories` then adds prompts and returns finished groups, some
    of which belong to earlier prompts. Weights are sent after each update, while engines sample.

    Your own loop calls :meth:`setup`, then :meth:`generate` in each step, and at the end :meth:`close`; it calls
    ``on_rollout_end`` before the update and ``on_update_end`` after it. Of ``trainer`` the callback uses ``callbacks``
    and ``default_root_dir``; of ``module`` ``model_path``, ``tokenizer``, ``max_model_length`` (tokens), ``device``,
    ``weight_version`` (increased here too if weights have changed without it), ``named_weights()``, and ``score(batch,
    dtype)``, which returns a packed batch's log-probabilities under the actor, [T], at temperature 1, computed in the
    engine's ``dtype``. ``examples/plain_loop.py`` is such a loop.

    Args:
        dtype: dtype of the engine; "auto" for bfloat16 on CUDA and float32 on the CPU.
        placement: "colocated" on the actor's devices, or "standalone" on other devices of the host.
        num_engines: number of engines that the run starts. Standalone: in all, each on
            ``engine["tensor_parallel_size"]`` devices, which engines share if there are too few. Colocated: on each
            rank's device; two may be faster than one if the GPU waits for the Python of vLLM's core.
        engines: URLs of standalone engines that `rlightning serve` has started on other hosts, ``tcp://host:8100``; the
            run then starts none.
        weight_folder: a folder with this path on the hosts of trainer and engines, for sending weights to standalone
            engines that no faster transport reaches.
        max_staleness: maximum number of updates between sampling a token and training on it; 0 is on-policy, and the
            engines wait while the actor is updated.
        oversample: additional prompts in flight, as a share of a step's prompts; a step trains on those that are
            complete first, the oldest first. That is biased toward short ones. The others continue if ``max_staleness``
            allows, or are requeued.
        cache_after_sync: whether completions that are running at a weight sync "keep" the keys and values of the old
            weights, or "recompute" them.
        gpu_memory_utilization: share of the device's memory that an awake engine may take; None for 0.45 if colocated,
            else 0.9.
        sleep: whether an engine frees its memory while the actor needs the device; waking takes half a second.
        bucket_bytes: memory of the buffer for sending weights, on the actor's device.
        start_timeout: maximum seconds until the engine is ready.
        hang_timeout: seconds without a heartbeat after which an engine counts as dead; at most 30 while it only
            samples, after its first samples.
        send_adapter: whether an adapter is sent separately, rather than merged into its base model; None to send it
            separately if possible: an engine of this process or host that cannot start so is started again for merged
            weights.
        engine: additional arguments of vLLM's AsyncEngineArgs.
        kwargs: arguments of :class:`~rlightning.callbacks.RolloutCallback`.
    """

    no_sampler = "There is no engine: it has not been set up, or has been closed."

    def __init__(
        self,
        *,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        placement: Placement = "colocated",
        num_engines: int = 1,
        engines: Sequence[str] = (),
        weight_folder: str | None = None,
        max_staleness: int = 0,
        oversample: float = 0.0,
        cache_after_sync: Literal["keep", "recompute"] = "keep",
        gpu_memory_utilization: float | None = None,
        sleep: bool = True,
        bucket_bytes: int = 2 << 30,
        start_timeout: float = 600.0,
        hang_timeout: float = 120.0,
        send_adapter: bool | None = None,
        engine: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.options = EngineOptions(
            dtype=dtype,
            placement=placement,
            num_engines=num_engines,
            engines=tuple(engines),
            weight_folder=None if weight_folder is None else Path(weight_folder).expanduser(),
            max_staleness=max_staleness,
            oversample=oversample,
            gpu_memory_utilization=gpu_memory_utilization,
            sleep=sleep,
            bucket_bytes=bucket_bytes,
            start_timeout=start_timeout,
            hang_timeout=hang_timeout,
            send_adapter=send_adapter,
            arguments=engine or {},
        )
        self.max_staleness, self.keeps_cache = max_staleness, cache_after_sync == "keep"
        # Not from the options, in which engines that a controller has started are also URLs.
        self.engines_key = "rollout.engines" if engines else "rollout.num_engines"
        self.in_flight = InFlight(max_staleness)
        self.last: dict[str, float] = {}
        self._engines: RankEngines | None = None
        self._network: EngineNetwork | None = None
        self._bottleneck: BottleneckMonitor | None = None
        self._is_started = False
        self._room = MakeRoomForEngine()

    # Start and end of the engines

    @property
    def max_sequence_length(self) -> int:
        """Maximum number of tokens of a sequence in an engine.

        Raises:
            EngineError: there is no engine.
        """
        if self._engines is None:
            raise EngineError(self.no_sampler)
        return int(self._engines.config.engine_args["max_model_len"])

    def start(self, stage: str, device: torch.device, sampling: Sampling, max_prompt_tokens: int | None) -> None:
        """Start the engines, and return before they are ready. Every rank must call it.

        If the user overrides ``configure_optimizers``, engines start after its result has been checked.
        """
        trainer, module = self._trainer, self._module
        if stage == "fit":
            self.in_flight.clear()  # left by an earlier run; a checkpoint's groups are loaded later
            check_engine(trainer, module)
            if self.options.oversample and global_rank() == COLLECTOR_RANK:
                log.info(
                    "rollout.oversample=%g: steps train on the trajectories that are complete first, which is biased "
                    "toward short ones.",
                    self.options.oversample,
                )
        files = replace(
            ModelFiles.read(module.model_path, trust_remote_code=trusts_remote_code(module)),
            tokenizer=module.tokenizer,
        )
        copies = read_copies(module.model_path)
        longest_prompt = max_prompt_tokens if self.is_single_turn else None  # the prompts of later turns are longer
        configs = self.options.configure(module, device, sampling, longest_prompt, run_dir(trainer))
        configs = [replace(config, files=files, copies=copies) for config in configs]
        self.options.choose_adapter(module, configs[0])
        if self.options.placement == "standalone":
            self._engines = standalone_engines(configs, keeps_cache=self.keeps_cache)
        else:
            self._engines = colocated_engines(configs, self.options.devices_per_engine)
        self._connect(self._engines, files)
        self._bottleneck = BottleneckMonitor(self.max_staleness, len(configs), self.engines_key)
        config = self._engines.config
        self.verification.begin_run(module, config.engine_args["max_model_len"], config.dtype, config.device)
        self._is_started = False
        if stage != "fit" or not has(module, HasUsualOptimizers) or module.has_usual_optimizers:
            self._ensure_started()
        self._room.begin_run()

    def _connect(self, engines: RankEngines, files: ModelFiles) -> None:
        """Connect rank 0 to the engines of all ranks, and create the collector; a collective."""
        self._network = EngineNetwork(engines.samplers, files)
        sync = partial(WeightSync, self._trainer, self._module, engines, self.verification, self._room)
        if global_rank() != COLLECTOR_RANK:
            self._collector = Collector(None, self.in_flight, sync())
            return
        pool = EnginePool(self._network.engines, lambda: collector.has_changed.set())
        runner = self.make_runner(pool)
        self.take_prefix_cache = partial(runner.loop.call, pool.take_prefix_cache)
        self._collector = collector = Collector(
            runner,
            self.in_flight,
            sync(pool, runner.loop),
            partial(runner.loop.call, pool.take_idle_seconds),
            max_failed_share=self.max_failed_share,
            time_limits=self.time_limits,
            verifier=self.make_verifier(pool, engines.config.dtype),
            score=self._serve_rewards(),
        )
        runner.check()

    def _serve_rewards(self) -> ScoreGroup | None:
        """Return the function that scores groups of all ranks; None if no prompts are in flight over several steps.

        With ``oversample`` alone a step stops what is not complete: to score first would favour what is scored fast.
        """
        if self.max_staleness == 0 or not has(self._module, ScoresGroups):
            return None
        return self._module.serve_rewards(world_size())

    def on_fit_start(self, trainer: Loop, module: object) -> None:
        """If a logger is a web service, wait for the first engine, so that a failed start creates no run there."""
        loggers = trainer.loggers if has(trainer, HasLoggers) else ()
        if self._engines is None or not any(is_service(logger) for logger in loggers):
            return
        self._engines.wait_for_first()

    def teardown(self, trainer: Loop, module: object, stage: str) -> None:
        """End the engines, move offloaded tensors back to the device, and free their host memory."""
        super().teardown(trainer, module, stage)
        self._room.teardown(trainer, module, stage)

    def on_exception(self, trainer: Loop, module: object, exception: BaseException) -> None:
        """End the engine, and processes that the module has started, such as reward workers."""
        super().on_exception(trainer, module, exception)
        self._room.on_exception(trainer, module, exception)

    def close(self) -> None:
        """End the engines and all processes that they started. May be called twice."""
        try:
            if self._collector is not None:
                self._collector.close()
        finally:
            if self._engines is not None:
                self._engines.close()
            if self._network is not None:
                self._network.close()
            self._engines = self._network = self._collector = None

    def ray_engines(self) -> "RayEngines | None":
        """Return the engines as Ray actors; None if they share the actor's devices, or are running servers."""
        if self.options.placement != "standalone" or self.options.engines:
            return None
        from rlightning.rollout.ray_engines import RayEngines

        return RayEngines(self)

    def describe(self) -> str:
        """Return a description of the engines in one line; an empty string if there are no engines."""
        if self._engines is None:
            return ""
        options, size = self.options, self.options.devices_per_engine
        per_host = options.num_engines * (world_size() // size if options.placement == "colocated" else 1)
        return options.describe(self._engines.config, len(options.engines) or per_host)

    def plan_memory(self, work: Work, max_prompt_tokens: int) -> RolloutMemory:
        """Return the memory that sampling takes on a rank's CUDA device: an engine, and the weights' send buffer."""
        engine = self.options.plan_memory(
            work.config,
            work.batch,
            max_prompt_tokens=max_prompt_tokens,
            longest=work.longest,
            num_ranks=work.parallelism.ranks,
            adapter=work.adapter,
        )
        itemsize = self.options.itemsize(torch.device("cuda"))
        return RolloutMemory(
            engine=engine,
            bucket_bytes=self.options.bucket_bytes,
            itemsize=itemsize,
            max_support=self.max_support,
        )

    @property
    def engine(self) -> Engine | None:
        """This rank's first engine; None while there is none."""
        engines = [] if self._engines is None else self._engines.samplers
        return engines[0] if engines else None

    # Hooks and state

    def on_train_start(self, trainer: Loop, module: object) -> None:
        """Start the engines unless :meth:`start` has; with user-defined optimizers it waits until they are checked."""
        self._ensure_started()

    def on_train_batch_start(self, trainer: Loop, module: object, batch: object, batch_idx: int) -> None:
        """Begin a step, and copy the list of groups in flight, which checkpoints save until the step ends."""
        super().on_train_batch_start(trainer, module, batch, batch_idx)
        self.in_flight.begin_step()

    def on_train_batch_end(self, trainer: Loop, module: object, outputs: object, batch: object, batch_idx: int) -> None:
        """End the step: checkpoints save the present groups in flight again, not those at the step's start."""
        self.in_flight.end_step()

    def on_update_end(self, trainer: Loop, module: object, batch: object) -> None:
        """With ``max_staleness``, send the weights while engines sample; begin a step. Every rank must call it."""
        if self.max_staleness and self._engines is not None:
            self._count_change()
            self._ensure_started()
            self.collector.weights.sync_weights()
        super().on_update_end(trainer, module, batch)

    def on_validation_batch_start(
        self, trainer: Loop, pl_module: object, batch: object, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Reset the restart budget of the engines."""
        if self._engines is not None:
            self._engines.reset_restart_budget()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def begin_step(self) -> None:
        """Reset the engines' restart budget and the step's counts; log if trainer or engines wait for each other."""
        if self._engines is not None and self._collector is not None and self._bottleneck is not None:
            self._engines.reset_restart_budget()
            totals = self._collector.begin_step()
            if totals.staleness and not self._engines.is_colocated:  # 0 if the method was called for this step before
                report = self._bottleneck.add(totals)
                if report is not None:
                    log.info(report)
        super().begin_step()

    def on_save_checkpoint(self, trainer: Loop, pl_module: object, checkpoint: dict[str, object]) -> None:
        """Move the actor's tensors back to its device before they are saved."""
        self._room.on_save_checkpoint(trainer, pl_module, checkpoint)

    def state_dict(self) -> dict[str, SavedGroups]:
        """Return the prompts in flight with their finished trajectories, for a resumed run; {} if there are none."""
        if self._collector is not None:
            self._collector.save_progress()
        # As PromptDataModule does: between the update and our on_train_batch_end other callbacks may save, too.
        is_at_start = not has(self._loop, HasFitLoop) or is_amid_step(self._loop.fit_loop)
        state = self.in_flight.state_dict(at_step_start=is_at_start)
        return {"in_flight": state} if state["groups"] else {}

    def load_state_dict(self, state_dict: dict[str, SavedGroups]) -> None:
        """Restore the prompts in flight and their finished trajectories, on rank 0."""
        if global_rank() == COLLECTOR_RANK:
            self.in_flight.load_state_dict(state_dict.get("in_flight", {"groups": []}))

    def seeded_sampling(self, device: torch.device) -> Sampling:
        """Return training's sampling parameters, with the run's seed only on the CPU.

        On a GPU vLLM samples seeded requests one by one, which is slow.
        """
        return super().seeded_sampling(device) if device.type == "cpu" else self.sampling

    def collect_trajectories(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        on_completed: OnCompleted | None = None,
        take_prompts: TakePrompts | None = None,
    ) -> list[list[Trajectory]]:
        """Put prompts in flight, and return the trajectories of as many finished groups. Every rank must call it.

        ``take_prompts`` provides prompts for ``max_staleness`` further steps, from which engines sample while the actor
        is updated. ``on_completed`` is called as by :meth:`generate`, for each returned group.
        """
        plan = self._module.plan if has(self._module, HasPlan) else None
        counts = gather_objects((len(prompts), len(self.in_flight)), name="prompts in flight")
        per_step = sum(number for number, _ in counts) if plan is None else plan.prompts_per_step
        ahead, (_, in_flight) = self.options.prompts_ahead(per_step), counts[COLLECTOR_RANK]
        if not ahead and not in_flight:
            return self.generate(prompts, num_samples, sampling, on_completed)
        check_requests(prompts, num_samples, sampling, self.max_sequence_length)
        self._count_change()
        self._ensure_started()
        collector, version = self.collector, self._module.weight_version
        wanted = StepPlan(len(prompts), per_step, room=per_step + ahead, weight_version=version)
        try:
            requests = self._streams.assign(prompts, sampling, version)
            if take_prompts is not None and ahead > in_flight:
                further = take_prompts(-(-(ahead - in_flight) // world_size()))
                requests += self._streams.assign(further, sampling, version)
            collector.is_training = True
            groups = collector.collect_trajectories(requests, num_samples, sampling, on_completed, wanted)
        except BaseException:
            self.begin_step()  # a loop may continue after Ctrl-C, and begin the step again
            raise
        self._log_totals(version)
        self._log_environments(collector)
        return groups

    def _log_totals(self, version: int) -> None:
        """Log the metrics of the step so far; a collective."""
        collector, engines = self.collector, self._engines
        assert engines is not None, "there is a collector"
        metrics: dict[str, float] = {}
        if global_rank() == COLLECTOR_RANK:
            metrics = {STOPPED: float(collector.totals.num_stopped)}
            if not engines.is_colocated:
                metrics = collector.totals.metrics(self.max_staleness, version)
                metrics["async/swap_pause"] = engines.pause_seconds
        self.last = gather_objects(metrics, name="metrics")[COLLECTOR_RANK]
        log_metrics(self._module, self.last)

    def _ensure_started(self) -> None:
        """Start the engines once; returns before they are ready."""
        if self._engines is not None and not self._is_started:
            self._is_started = True
            self._engines.start()

    def sleep_sampler(self) -> None:
        """If the engines share the actor's device, wait until they are idle, and have them free their memory."""
        if self._engines is None or self._network is None or not self._engines.can_sleep:
            return
        self._network.wait_until_idle()
        self._engines.sleep()
        self._room.on_engine_sleep(self._trainer, self._module)
        call_hook(self._trainer, self._module, "on_engine_sleep")

    def _check(self, stage: str) -> int | None:
        """Check the configuration; return the data module's limit on prompt tokens."""
        self.options.check()
        if self.options.placement == "colocated":
            check_group_hosts(self.options.devices_per_engine)
        return super()._check(stage)
