"""Rollouts by vLLM: the callback that owns the engine."""

import logging
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from rlightning.callbacks.make_room_for_engine import MakeRoomForEngine
from rlightning.callbacks.rollout import RolloutCallback
from rlightning.callbacks.throughput import log_metrics
from rlightning.errors import EngineDiedError, EngineError, EngineStartError
from rlightning.hooks import fire
from rlightning.memory_plan.decisions import check_engine
from rlightning.memory_plan.work import RolloutMemory, Work
from rlightning.models.remote_code import trusts_remote_code
from rlightning.parallel.collectives import any_rank, gather_objects, world_size
from rlightning.report.loggers import is_service
from rlightning.rollout import OnCompleted, Sampling, TakePrompts
from rlightning.rollout.engine import Engine
from rlightning.rollout.engine_group import EngineGroup, check_group_size
from rlightning.rollout.engine_options import EngineOptions, Placement
from rlightning.rollout.in_flight import OWNER, InFlight
from rlightning.rollout.model_files import ModelFiles, read_copies
from rlightning.rollout.requests import check_requests, with_run_seed
from rlightning.rollout.sampler import Request
from rlightning.rollout.standalone import StandaloneEngines
from rlightning.run_dir import run_dir
from rlightning.types import Prompt, RolloutBatch, Trajectory

if TYPE_CHECKING:
    from rlightning.rollout.ray_engines import RayEngines

log = logging.getLogger(__name__)


class VLLMRollout(RolloutCallback):
    """Owns a vLLM engine: starts it, sends it the actor's weights, samples from it, and ends it, come what may.

    The engine is a process of its own. It starts in ``setup``, while the actor is loaded. Weights are sent with the
    first completions that are asked for after the actor has changed; the first time and every ``verify_every``-th time
    the canary's log-probabilities under the engine must be the actor's but for rounding. On a GPU that it shares with
    the actor it sleeps while it is not needed. If it dies or hangs in the middle of a rollout it is restarted, sent the
    current weights, and finishes the step with what was done already; the second death in a step ends the run with the
    engine's last log lines.

    With ``placement="standalone"`` the engines run on devices of their own, and with ``max_staleness`` above 0 they go
    on generating while the actor is updated: :meth:`exchange` then takes prompts and gives back completed ones, some of
    which were handed in before. Weights are sent as soon as an update is done, in the midst of what is being generated.

    A loop of your own calls :meth:`setup`, then :meth:`generate` in each step, and in the end :meth:`close`; it fires
    ``on_rollout_end`` before the update and ``on_update_end`` after it. The callback needs of ``trainer``:
    ``callbacks``, ``default_root_dir``. Of ``module``: ``model_path``, ``tokenizer``, ``max_model_length`` (tokens),
    ``device``, ``weight_version`` (counted up here too, when weights have changed without), ``named_weights()``, and
    ``score(batch, dtype)``, a packed batch's log-probabilities under the actor, [T], at temperature 1, computed in the
    engine's ``dtype``. ``examples/plain_loop.py`` is one such loop.

    Args:
        dtype: the engine's; "auto" is bfloat16 on CUDA and float32 on the CPU.
        placement: "colocated" on the actor's devices, or "standalone" on others of the host.
        num_engines: that the run starts: standalone in all, on ``engine["tensor_parallel_size"]`` devices each, in turn
            where there are fewer; colocated on each rank's device, which they share. Two on a device may be faster
            than one where a GPU waits for the Python of vLLM's core.
        engines: URLs of standalone engines that `rlightning serve` has started on other hosts, ``tcp://host:8100``; the
            run starts none then.
        weight_folder: a folder that trainer and engines see by this name, for the weights of standalone engines that
            nothing faster reaches.
        max_staleness: how many updates old a token may be when it is trained on; 0 is on-policy, and the engines wait
            while the actor is updated.
        oversample: further prompts in flight, as a share of a step's; a step trains on the first that are complete, the
            oldest of them first. The others begin again with the next one, or go on if they may be that old.
        cache_after_sync: whether completions that are under way when weights arrive "keep" the keys and values that the
            old ones made, or "recompute" them.
        gpu_memory_utilization: share of the device's memory that an awake engine may take; None: 0.45 colocated, 0.9
            standalone.
        sleep: whether an engine gives that memory back while the actor needs the device; waking costs half a second.
        bucket_bytes: memory that weights travel through, on the actor's device.
        start_timeout: seconds that the engine may take to come up.
        hang_timeout: seconds without a heartbeat until it counts as dead; 30 if that is less, while it only samples,
            and has before.
        engine: any further arguments of vLLM's AsyncEngineArgs.
        kwargs: of :class:`~rlightning.callbacks.RolloutCallback`.
    """

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
            arguments=engine or {},
        )
        self.max_staleness, self.keeps_cache = max_staleness, cache_after_sync == "keep"
        # Not by the options: the engines that a controller has started are named by URL there too.
        self.engines_key = "rollout.engines" if engines else "rollout.num_engines"
        self.in_flight = InFlight(max_staleness)
        self.last: dict[str, float] = {}
        self._engines: EngineGroup | StandaloneEngines | None = None
        self._is_started = False
        self._room = MakeRoomForEngine()

    # The engine's life

    @property
    def is_set_up(self) -> bool:
        """Whether there are engines."""
        return self._engines is not None

    @property
    def max_sequence_length(self) -> int:
        """Tokens of the longest sequence that an engine takes."""
        return int(self._running_engines.config.engine_args["max_model_len"])

    def start(self, stage: str, device: torch.device, sampling: Sampling, max_prompt_tokens: int | None) -> None:
        """Start the engines; returns before they are up.

        With optimizers of the user's own they start when these have been checked.
        """
        trainer, module = self._trainer, self._module
        if stage == "fit":
            self.in_flight.clear()  # of a run before; a checkpoint's is loaded after this
            check_engine(trainer, module)
        files = replace(
            ModelFiles.read(module.model_path, trust_remote_code=trusts_remote_code(module)),
            tokenizer=module.tokenizer,
        )
        copies = read_copies(module.model_path)
        configs = self.options.configure(module, device, sampling, max_prompt_tokens, run_dir(trainer))
        configs = [replace(config, files=files, copies=copies) for config in configs]
        if self.options.placement == "standalone":
            self._engines = StandaloneEngines(
                configs, self.in_flight, engines_key=self.engines_key, keeps_cache=self.keeps_cache
            )
        else:
            self._engines = EngineGroup(configs, self.in_flight, num_ranks=self.options.devices_per_engine)
        config = self._engines.config
        self.verification.begin_run(module, config.engine_args["max_model_len"], config.dtype, config.device)
        self._is_started = False
        if stage != "fit" or getattr(module, "has_usual_optimizers", True):
            self._start_engines()
        self._room.begin_run()

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Refuse an engine that cannot start before a service's logger begins a run there; one that is up suffices."""
        if self._engines is None or not any(is_service(logger) for logger in getattr(trainer, "loggers", ())):
            return
        engines = self._engines.engines
        starts = [engine.process.ready for engine in engines if engine.process is not None]
        for start in wait(starts, return_when=FIRST_COMPLETED).done:
            if isinstance(error := start.exception(), EngineStartError):
                raise error

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """End the engine."""
        super().teardown(trainer, module, stage)
        self._room.teardown(trainer, module, stage)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """End the engine, and the module's processes."""
        super().on_exception(trainer, module, exception)
        self._room.on_exception(trainer, module, exception)

    def close(self) -> None:
        """End the engine and whatever it started. May be called twice."""
        if self._engines is not None:
            self._engines.close()
            self._engines = None

    def ray_engines(self) -> "RayEngines | None":
        """Return the engines as Ray actors; None if they share the actor's devices, or run already."""
        if self.options.placement != "standalone" or self.options.engines:
            return None
        from rlightning.rollout.ray_engines import RayEngines

        return RayEngines(self)

    def describe(self) -> str:
        """Return which engines there are, in a line; "" without any."""
        if self._engines is None:
            return ""
        options, size = self.options, self.options.devices_per_engine
        per_host = options.num_engines * (world_size() // size if options.placement == "colocated" else 1)
        return options.describe(self._engines.config, len(options.engines) or per_host)

    @property
    def max_new_tokens(self) -> int:
        """Tokens of the longest training completion."""
        return self.sampling.max_new_tokens

    def plan_memory(self, work: Work, max_prompt_tokens: int) -> RolloutMemory:
        """Return what sampling takes of a rank's CUDA device; see ``rlightning.memory_plan.work.PlannedRollout``."""
        engine = self.options.plan_memory(
            work.config,
            work.batch,
            max_prompt_tokens=max_prompt_tokens,
            longest=work.longest,
            num_ranks=work.parallelism.ranks,
        )
        itemsize = getattr(torch, self.options.engine_dtype(torch.device("cuda"))).itemsize
        return RolloutMemory(engine=engine, bucket_bytes=self.options.bucket_bytes, itemsize=itemsize)

    @property
    def engine(self) -> Engine | None:
        """This rank's first engine, while there is one."""
        engines = [] if self._engines is None else self._engines.engines
        return engines[0] if engines else None

    # When it is needed, and when not

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Start the engine, if :meth:`setup` has not: the optimizers are there, and have been checked."""
        self._start_engines()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a step, in which each engine may die once."""
        super().on_train_batch_start(trainer, module, batch, batch_idx)
        self.in_flight.begin_step()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """What the step has consumed is not in flight any more: a checkpoint may be written next."""
        self.in_flight.end_step()

    def on_rollout_end(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        """Leave the device to the actor."""
        self._rest()

    def on_update_end(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        """Send the weights to engines that go on generating; begin a step."""
        if self.max_staleness and self._engines is not None:
            self._count_change()
            self._update_engines()
        super().on_update_end(trainer, module, batch)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Leave the device to the actor."""
        super().on_validation_end(trainer, module)
        self._rest()

    def on_validation_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Forgive one death a batch."""
        if self._engines is not None:
            self._engines.forgive()

    on_test_batch_start: Any = on_validation_batch_start
    on_predict_batch_start: Any = on_validation_batch_start

    def begin_step(self) -> None:
        """Let each engine die once more."""
        if self._engines is not None:
            self._engines.forgive()
        super().begin_step()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Have the actor's tensors on its device, to be saved."""
        self._room.on_save_checkpoint(trainer, pl_module, checkpoint)

    def state_dict(self) -> dict[str, Any]:
        """What is in flight, so that a resumed run loses no prompt and repeats none."""
        # As PromptDataModule does: between the update and our on_train_batch_end other callbacks may save, too.
        epoch_loop = getattr(getattr(self._trainer, "fit_loop", None), "epoch_loop", None)
        progress = None if epoch_loop is None else epoch_loop.batch_progress.current
        state = self.in_flight.state_dict(at_step_start=progress is None or progress.ready > progress.processed)
        return {"in_flight": state} if state["groups"] else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with what was in flight."""
        groups = state_dict.get("in_flight", {"groups": []})["groups"]
        if self.options.placement == "colocated":
            groups = [group | {"trajectories": None} for group in groups]  # complete or not, they are requeued
        self.in_flight.load_state_dict({"groups": groups})

    # Sampling

    def seeded_sampling(self, device: torch.device) -> Sampling:
        """Return how training completions are sampled: on a GPU without the run's seed, which slows vLLM."""
        return with_run_seed(self.sampling, device)

    def complete(
        self, requests: Sequence[Request], num_samples: int, sampling: Sampling, on_completed: OnCompleted | None
    ) -> list[list[Trajectory]]:
        """Wake the engines, send them the weights, and sample.

        Raises:
            EngineError: if an engine died for the second time in a step, or refused a request.
        """
        return self._running_engines.generate(requests, num_samples, sampling, on_completed, self._update_engines)

    def exchange(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        on_completed: OnCompleted | None = None,
        take_prompts: TakePrompts | None = None,
    ) -> list[list[Trajectory]]:
        """Hand in prompts and get the trajectories of as many; with some in flight, perhaps others that came before.

        ``max_staleness`` steps' worth of further prompts keep the engines busy while the actor is updated.

        Args:
            prompts: of this rank.
            num_samples: of each.
            sampling: how.
            on_completed: as of :meth:`generate`, where nothing is in flight; else of what is consumed, on a rank that
                has the engine, or the engines, to itself.
            take_prompts: gives this rank that many further prompts; without it there are no others than those given.

        Returns:
            The trajectories of each.
        """
        plan = getattr(self._module, "plan", None)
        counts = gather_objects((len(prompts), len(self.in_flight)), name="prompts in flight")
        per_step = sum(number for number, _ in counts) if plan is None else plan.prompts_per_step
        ahead, (_, in_flight) = self.options.prompts_ahead(per_step), counts[OWNER]
        if not ahead and not in_flight:
            return self.generate(prompts, num_samples, sampling, on_completed)
        check_requests(prompts, num_samples, sampling, self.max_sequence_length)
        self._count_change()
        requests = self._streams.assign(prompts, sampling, self._module.weight_version)
        if take_prompts is not None and ahead > in_flight:
            further = take_prompts(-(-(ahead - in_flight) // world_size()))
            requests += self._streams.assign(further, sampling, self._module.weight_version)
        consumed = self._running_engines.consume(
            requests,
            num_samples,
            sampling,
            on_completed,
            self._update_engines,
            num_groups=len(prompts),
            per_step=per_step,
            room=per_step + ahead,
            weight_version=self._module.weight_version,
        )
        self.last = consumed.metrics
        log_metrics(self._module, consumed.metrics)
        return consumed.groups

    @property
    def _running_engines(self) -> EngineGroup | StandaloneEngines:
        if self._engines is None:
            raise EngineError("There is no engine: it has not been set up, or has been closed.")
        self._start_engines()
        return self._engines

    def _start_engines(self) -> None:
        """Start the engines, once; returns before they are up."""
        if self._engines is not None and not self._is_started:
            self._is_started = True
            self._engines.start()

    def _update_engines(self) -> None:
        """Send all engines that need it the actor's current weights, until each has them."""
        engines = self._running_engines
        if isinstance(engines, StandaloneEngines):  # which are told stale only once they are up
            self._wait_for_start(engines)
        while any_rank(engines.is_stale(self._module.weight_version), name="weights are there"):
            try:
                self._sync(engines)
            except EngineDiedError as error:
                self._restart(engines, error)

    def _wait_for_start(self, engines: EngineGroup | StandaloneEngines) -> None:
        """Wait until there is an engine to send weights to. One that died meanwhile is found out as they are sent."""
        if engines.is_starting:
            fire(self._trainer, self._module, "on_engine_start")
            engines.wait_for_start()
            fire(self._trainer, self._module, "on_engine_ready")

    def _restart(self, engines: EngineGroup | StandaloneEngines, error: EngineDiedError) -> None:
        """Start what has died again, which takes all of its memory at once."""
        if engines.can_sleep:
            self._room.on_weight_sync_start(self._trainer, self._module, self._module.weight_version)
        engines.restart(error)

    def _rest(self) -> None:
        if self._engines is None or not self._engines.can_sleep:
            return
        try:
            self._engines.sleep()
        except EngineDiedError as error:
            # The actor has the device now: whoever asks for completions next finds it dead, and starts it again.
            log.warning("The engine died as it went to sleep: %s", error.line)
        self._room.on_engine_sleep(self._trainer, self._module)
        fire(self._trainer, self._module, "on_engine_sleep")

    def _sync(self, engines: EngineGroup | StandaloneEngines) -> None:
        """Send the actor's weights; all ranks take part, though one alone may have an engine that needs them."""
        module, version = self._module, self._module.weight_version
        fire(self._trainer, module, "on_weight_sync_start", version)
        if engines.can_sleep:
            self._room.on_weight_sync_start(self._trainer, module, version)
        # While the actor has the device: its memory may be somewhere else once the engine is awake.
        is_due = self.verification.evaluate(module, engines.engines)
        self._wait_for_start(engines)
        engines.send_weights(module, version)
        if engines.can_sleep:
            fire(self._trainer, module, "on_engine_wake")
            self._room.on_engine_wake(self._trainer, module)
        engines.activate_weights(version)
        for engine in engines.fresh if is_due else ():
            try:
                self.verification.verify(module, engine)
            except EngineDiedError as error:
                self._restart(engines, error)
        if engines.can_sleep:
            self._room.on_weight_sync_end(self._trainer, module, version)
        fire(self._trainer, module, "on_weight_sync_end", version)

    # Configuration

    def _check(self, trainer: Any, module: Any, stage: str) -> int | None:
        """Refuse what cannot work; the longest prompt that the data module lets through."""
        self.options.check()
        if self.options.placement == "colocated":
            check_group_size(self.options.devices_per_engine)
        return super()._check(trainer, module, stage)
