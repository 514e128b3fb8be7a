"""Rollouts with a Hugging Face model in the trainer's process, without an engine."""

from dataclasses import replace
from typing import Any, Literal

import torch

from rlightning.callbacks.rollout import RolloutCallback
from rlightning.environments.collector import Collector
from rlightning.errors import EngineError, check_rules
from rlightning.hooks import call_hook
from rlightning.memory_plan.decisions import check_engine
from rlightning.memory_plan.work import RolloutMemory, Work
from rlightning.models import load_config
from rlightning.models.files import torch_dtype
from rlightning.models.remote_code import trusts_remote_code
from rlightning.parallel.collectives import global_rank
from rlightning.protocols import HasAdapter, SampledPolicy, has
from rlightning.rollout import Sampler, Sampling
from rlightning.rollout.decoding import CACHE_STEP
from rlightning.rollout.engine_memory import read_engine
from rlightning.rollout.in_flight import InFlight
from rlightning.rollout.in_process import BUCKET_BYTES, InProcessSampler, InProcessSamplers
from rlightning.rollout.model_files import ModelFiles
from rlightning.rollout.placement import COLLECTOR_RANK
from rlightning.rollout.transformers_sampler import MAX_PROMPT_TOKENS, TransformersSampler, can_sleep
from rlightning.rollout.weight_sync import WeightSync


class TransformersRollout(RolloutCallback):
    """Samples with a Hugging Face model in this process, on the actor's device; vLLM is not needed.

    Rank 0 has a copy of the model, in ``dtype``, and completes the prompts of all ranks. If the actor has changed, its
    weights are copied before the next completions, and gathered from all ranks if sharded. A prompt's completions do
    not depend on other prompts, except by rounding errors. This callback is meant for small models, machines without
    vLLM, and tests; on a GPU, vLLM samples many times as fast.

    Your own loop uses it like :class:`~rlightning.callbacks.VLLMRollout`, which describes the required members of
    ``trainer`` and ``module``.

    Args:
        dtype: dtype of the copy; "auto" for bfloat16 on CUDA and float32 elsewhere.
        max_sequences: maximum number of completions that are decoded concurrently; a larger number is faster, and needs
            more memory for keys and values.
        kwargs: arguments of :class:`~rlightning.callbacks.RolloutCallback`.
    """

    def __init__(
        self,
        *,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        max_sequences: int = 256,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_rules({f"rollout.max_sequences={max_sequences} must be at least 1": max_sequences >= 1})
        self.dtype, self.max_sequences = dtype, max_sequences
        self._sampler: Sampler | None = None
        self._device = torch.device("cpu")

    @property
    def max_sequence_length(self) -> int:
        """Maximum number of tokens of a sequence, from the model's positions.

        Raises:
            EngineError: there is no sampler.
        """
        if self._policy is None:
            raise EngineError(self.no_sampler)
        return int(self._policy.max_model_length)

    def plan_memory(self, work: Work, max_prompt_tokens: int) -> RolloutMemory:
        """Return the memory that sampling takes on rank 0's CUDA device: a copy of the model, and its KV cache."""
        num_samples = work.batch.samples_per_prompt
        most = min(self.max_sequences, work.batch.prompts_per_step * num_samples)
        dtype = "bfloat16" if self.dtype == "auto" else self.dtype
        arguments = {
            "dtype": dtype,
            "max_num_seqs": most,
            "max_num_batched_tokens": max(MAX_PROMPT_TOKENS, max_prompt_tokens),
            "max_model_len": work.longest,
        }
        copy = read_engine(work.config, arguments, block_tokens=CACHE_STEP)
        # When sequences join, the cache is copied into one with twice as many rows, while the old one still exists.
        rows, copied = min(max(MAX_PROMPT_TOKENS // max_prompt_tokens, 1) * num_samples, most), 0
        while rows < most:
            rows, copied = 2 * rows, rows
        copy = replace(copy, num_engines=0, kv_cache_bytes=(rows + copied) * copy.sequence)
        return RolloutMemory(
            engine=copy, bucket_bytes=BUCKET_BYTES, itemsize=torch_dtype(dtype).itemsize, max_support=self.max_support
        )

    def start(self, stage: str, device: torch.device, sampling: Sampling, max_prompt_tokens: int | None) -> None:
        """Build the model on rank 0, without weights; raise a ConfigError if it cannot fit beside the actor."""
        module = self._module
        if stage == "fit":
            check_engine(self._trainer, module)
        if has(module, HasAdapter):
            module.sends_adapter = False  # set if the module's last run sampled from vLLM's engines
        dtype = self._resolve_dtype(device)
        self._device = device
        self.verification.begin_run(module, self.max_sequence_length, dtype, device)
        runner, verifier, samplers = None, None, list[InProcessSampler]()
        if global_rank() == COLLECTOR_RANK:
            self._sampler = self.make_sampler(module, device, dtype)
            self._sampler.sleep()
            runner, verifier = self.make_runner(self._sampler), self.make_verifier(self._sampler, dtype)
            samplers = [InProcessSampler(self._sampler, runner.loop)]
        rank_samplers = InProcessSamplers(samplers, device, dtype, can_sleep=can_sleep(device))
        sync = WeightSync(self._trainer, module, rank_samplers, self.verification)
        self._collector = Collector(
            runner,
            InFlight(0),
            sync,
            max_failed_share=self.max_failed_share,
            time_limits=self.time_limits,
            verifier=verifier,
        )
        if runner is not None:
            runner.check()

    def close(self) -> None:
        """End the threads and free the model. May be called twice."""
        if self._collector is not None:
            self._collector.close()
        if self._sampler is not None:
            self._sampler.close()
        self._sampler = self._collector = None

    def describe(self) -> str:
        """Return a description of the sampler in one line; an empty string if there is no sampler."""
        if not self.is_set_up:
            return ""
        dtype = str(self._resolve_dtype(self._device)).removeprefix("torch.")
        return f"transformers in the trainer's process, {dtype}, {self.max_sequences} sequences at once"

    def _resolve_dtype(self, device: torch.device) -> torch.dtype:
        name = self.dtype if self.dtype != "auto" else ("bfloat16" if device.type == "cuda" else "float32")
        return torch_dtype(name)

    def make_sampler(self, module: SampledPolicy, device: torch.device, dtype: torch.dtype) -> Sampler:
        """Return a sampler without weights; override this to use your own (docs/samplers.md)."""
        trusted = trusts_remote_code(module)
        return TransformersSampler(
            load_config(module.model_path, trust_remote_code=trusted),
            replace(ModelFiles.read(module.model_path, trust_remote_code=trusted), tokenizer=module.tokenizer),
            device=device,
            dtype=dtype,
            max_length=self.max_sequence_length,
            max_sequences=self.max_sequences,
        )

    def sleep_sampler(self) -> None:
        """Free the sampler's copy of the weights if it shares the actor's device."""
        if not self.is_set_up or not can_sleep(self._device):
            return
        if self._sampler is not None:
            self._sampler.sleep()
        call_hook(self._trainer, self._module, "on_engine_sleep")
