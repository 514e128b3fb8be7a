"""Rollouts by the model itself, in the trainer's process: no engine to install or to start."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from rlightning.callbacks.rollout import RolloutCallback
from rlightning.environments import Environment
from rlightning.environments.collector import Collector
from rlightning.environments.policy import GroupRequest
from rlightning.errors import EngineError, check_rules
from rlightning.hooks import fire
from rlightning.memory_plan.work import RolloutMemory, Work
from rlightning.models import load_config
from rlightning.models.remote_code import trusts_remote_code
from rlightning.parallel.collectives import any_rank
from rlightning.rollout import OnCompleted, Sampling
from rlightning.rollout.decoding import CACHE_STEP
from rlightning.rollout.model_files import ModelFiles
from rlightning.rollout.requests import group_sampling
from rlightning.rollout.sampler import Request
from rlightning.rollout.transformers_sampler import MAX_PROMPT_TOKENS, TransformersSampler
from rlightning.rollout.vllm.memory import read_engine
from rlightning.types import RolloutBatch, Trajectory


class TransformersRollout(RolloutCallback):
    """Samples by Hugging Face's model in this process, on whatever device the actor is on; vLLM is not needed.

    Each rank has a copy of the model, in ``dtype``, and completes its own prompts; with the first completions that are
    asked for after the actor has changed it takes the actor's weights, gathered from all ranks where they are sharded.
    A prompt's completions do not depend on the number of ranks, nor on what else is sampled, but for rounding. It is
    for small models, for machines without vLLM, and for tests; on a GPU vLLM samples many times as fast.

    A loop of your own uses it as it would use :class:`~rlightning.callbacks.VLLMRollout`, which says what is needed of
    ``trainer`` and ``module``.

    Args:
        environment: makes trajectories of prompts (docs/environments.md); several by name, of which each row's column
            ``environment`` names one; None: a prompt is completed once. In YAML it is a section beside ``rollout``.
        trajectory_timeout: seconds that an environment may take for a trajectory, which else counts as not sampled;
            None: any time.
        dtype: what the copy computes in; "auto" is bfloat16 on CUDA and float32 elsewhere.
        max_sequences: completions that a rank decodes at once; more are faster, and take memory for their keys and
            values.
        kwargs: of :class:`~rlightning.callbacks.RolloutCallback`.
    """

    def __init__(
        self,
        *,
        environment: Environment | Mapping[str, Environment] | None = None,
        trajectory_timeout: float | None = None,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        max_sequences: int = 256,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        is_timeout = trajectory_timeout is None or trajectory_timeout > 0
        rules = {
            f"rollout.max_sequences={max_sequences} must be at least 1": max_sequences >= 1,
            f"rollout.trajectory_timeout={trajectory_timeout} must be above 0 seconds": is_timeout,
        }
        check_rules(rules)
        self.environment, self.trajectory_timeout = environment, trajectory_timeout
        self.dtype, self.max_sequences = dtype, max_sequences
        self._sampler: TransformersSampler | None = None
        self._collector: Collector | None = None

    @property
    def is_set_up(self) -> bool:
        """Whether there is a sampler."""
        return self._sampler is not None

    @property
    def sampler(self) -> TransformersSampler:
        """This rank's.

        Raises:
            EngineError: if there is none.
        """
        if self._sampler is None:
            raise EngineError("There is no sampler: it has not been set up, or has been closed.")
        return self._sampler

    @property
    def max_sequence_length(self) -> int:
        """Tokens of the longest sequence that the model takes."""
        return self.sampler.max_length

    def plan_memory(self, work: Work, max_prompt_tokens: int) -> RolloutMemory:
        """Return what sampling takes of a rank's CUDA device; see ``rlightning.memory_plan.work.PlannedRollout``."""
        num_samples = work.batch.samples_per_prompt
        most = min(self.max_sequences, -(-work.batch.prompts_per_step // work.parallelism.ranks) * num_samples)
        dtype = "bfloat16" if self.dtype == "auto" else self.dtype
        arguments = {
            "dtype": dtype,
            "max_num_seqs": most,
            "max_num_batched_tokens": max(MAX_PROMPT_TOKENS, max_prompt_tokens),
            "max_model_len": work.longest,
        }
        copy = read_engine(work.config, arguments, block_tokens=CACHE_STEP)
        # As sequences join the cache gets twice as many rows, beside those that are copied into them.
        rows, copied = min(max(MAX_PROMPT_TOKENS // max_prompt_tokens, 1) * num_samples, most), 0
        while rows < most:
            rows, copied = 2 * rows, rows
        copy = replace(copy, num_engines=0, kv_cache_bytes=(rows + copied) * copy.sequence)
        return RolloutMemory(engine=copy, bucket_bytes=0, itemsize=getattr(torch, dtype).itemsize)

    def start(self, stage: str, device: torch.device, sampling: Sampling, max_prompt_tokens: int | None) -> None:
        """Build the model, which has no weights yet."""
        module = self._module
        trusted = trusts_remote_code(module)
        name = self.dtype if self.dtype != "auto" else ("bfloat16" if device.type == "cuda" else "float32")
        sampler = TransformersSampler(
            load_config(module.model_path, trust_remote_code=trusted),
            replace(ModelFiles.read(module.model_path, trust_remote_code=trusted), tokenizer=module.tokenizer),
            device=device,
            dtype=getattr(torch, name),
            max_length=module.max_model_length,
            max_sequences=self.max_sequences,
        )
        sampler.sleep()
        self.verification.begin_run(module, sampler.max_length, sampler.dtype, device)
        self._sampler = sampler
        self._collector = Collector(
            sampler,
            module.tokenizer,
            self.environment,
            max_length=sampler.max_length,
            timeout=self.trajectory_timeout,
        )

    def close(self) -> None:
        """End the threads and free the model. May be called twice."""
        if self._sampler is not None and self._collector is not None:
            self._sampler.close()
            self._collector.close()
        self._sampler = self._collector = None

    def describe(self) -> str:
        """Return what samples, in a line; "" without a sampler."""
        if self._sampler is None:
            return ""
        dtype = str(self.sampler.dtype).removeprefix("torch.")
        return f"transformers in the trainer's process, {dtype}, {self.max_sequences} sequences at once"

    def on_rollout_end(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        """Leave the device to the actor."""
        self._rest()

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Leave the device to the actor."""
        super().on_validation_end(trainer, module)
        self._rest()

    def complete(
        self, requests: Sequence[Request], num_samples: int, sampling: Sampling, on_completed: OnCompleted | None
    ) -> list[list[Trajectory]]:
        """Take the actor's weights, if they have changed, and attempt the prompts."""
        assert self._collector is not None
        if any_rank(self.sampler.weight_version != self._module.weight_version, name="weights are there"):
            self._sync_weights()
        groups = [
            GroupRequest(prompt, group_sampling(sampling, prompt, stream), num_samples) for prompt, stream in requests
        ]
        done: dict[int, list[Trajectory]] = {}
        for place, trajectories in self._collector.collect(groups):
            done[place] = trajectories
            if on_completed is not None:
                on_completed(requests[place][0], trajectories)
        return [done[place] for place in range(len(requests))]

    def _sync_weights(self) -> None:
        """Bring the actor's weights into the sampler; all ranks take part."""
        trainer, module, sampler = self._trainer, self._module, self.sampler
        fire(trainer, module, "on_weight_sync_start", module.weight_version)
        is_due = self.verification.evaluate(module, [sampler])
        sampler.update_weights(module, module.weight_version)
        if sampler.can_sleep:
            fire(trainer, module, "on_engine_wake")
        if is_due:
            self.verification.verify(module, sampler)
        fire(trainer, module, "on_weight_sync_end", module.weight_version)

    def _rest(self) -> None:
        if self._sampler is not None and self._sampler.can_sleep:
            self._sampler.sleep()
            fire(self._trainer, self._module, "on_engine_sleep")
