"""Rollouts without an engine, and what their updates take: callbacks that benchmarks put into a run."""

import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import fields, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from probes import CSVTrace, reset_peak, six_n_flops

from rlightning.callbacks.throughput import device_peak, update_flops
from rlightning.hooks import RLCallback
from rlightning.parallel.device import memory_use, synchronize
from rlightning.rollout import OnCompleted, Sampling, TrajectorySampler
from rlightning.run_dir import run_dir
from rlightning.types import Prompt, RolloutBatch, Sample, Trajectory, single_turns

COLUMNS = ("seconds", "tokens", "mfu", "six_n_mfu", "peak", "reserved", "graphs")


async def coin(completion: str) -> float:
    """A reward that takes no time."""
    return float(random.random() < 0.5)


def mean_length(longest: int, *, is_variable: bool) -> float:
    """Tokens that :func:`draw_lengths` gives in the mean."""
    if not is_variable:
        return float(longest)
    chance = min(3 / longest, 1.0)
    return (1 - (1 - chance) ** longest) / chance


def draw_lengths(longest: int, count: int, rng: np.random.Generator, *, is_variable: bool) -> list[int]:
    """Lengths of completions: all the same, or as a sampler gives them that ends after each token with one chance.

    Args:
        longest: tokens at which a completion is cut; the chance to end is 3 in so many tokens.
        count: of lengths.
        rng: of them.
        is_variable: whether they differ: then about 5 in 100 are cut.
    """
    if not is_variable:
        return [longest] * count
    lengths: list[int] = np.minimum(rng.geometric(min(3 / longest, 1.0), count), longest).tolist()
    return lengths


class SyntheticRollout(RLCallback, TrajectorySampler):
    """Gives the module completions of random tokens, in no time.

    Args:
        max_new_tokens: the longest.
        is_variable: whether their lengths differ, see :func:`draw_lengths`.
        short_steps: so many of the last steps have completions for ``short_tokens`` alone, to be profiled.
        short_tokens: tokens that a rank has in each of these steps.
    """

    def __init__(
        self, max_new_tokens: int, *, is_variable: bool = False, short_steps: int = 0, short_tokens: int = 0
    ) -> None:
        super().__init__()
        self.max_new_tokens, self.is_variable = max_new_tokens, is_variable
        self.short_steps, self.short_tokens = short_steps, short_tokens
        self.num_steps = 0
        self.steps_begun = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take the engine's place."""
        pl_module.sampler = self
        pl_module.sampling = Sampling(max_new_tokens=self.max_new_tokens)
        self.vocabulary = pl_module.model_config.get_text_config().vocab_size
        self.num_steps = trainer.max_steps

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling, on_completed: OnCompleted | None = None
    ) -> list[list[Trajectory]]:
        """Completions with the log-probabilities of a sampler that knows nothing.

        A prompt's are the same in each run, whichever rank it is on.
        """
        self.steps_begun += 1
        room = math.inf if self.steps_begun <= self.num_steps - self.short_steps else self.short_tokens
        groups: list[list[Sample]] = []
        for prompt in prompts:
            rng = np.random.default_rng([self.steps_begun, prompt.index])
            lengths = draw_lengths(sampling.max_new_tokens, num_samples, rng, is_variable=self.is_variable)
            tokens = sum(lengths) + len(lengths) * len(prompt.token_ids)
            is_room = tokens <= room or not groups
            groups.append([random_completion(length, self.vocabulary, rng) for length in lengths] if is_room else [])
            room -= tokens
        return single_turns(prompts, groups)


def random_completion(length: int, vocabulary: int, rng: np.random.Generator) -> Sample:
    """As of a sampler that knows nothing, and so thinks all tokens equally likely."""
    return Sample(
        token_ids=array("q", rng.integers(vocabulary, size=length).tobytes()),
        logprobs=array("f", [-math.log(vocabulary)]) * length,
        weight_versions=array("i", [0]) * length,
        text="",
        finish_reason="length",
    )


class SetRewards(RLCallback):
    """Gives the completions of a group rewards that differ, or that are all equal.

    Args:
        alike: the share of the groups whose rewards are equal.
    """

    def __init__(self, alike: float) -> None:
        super().__init__()
        self.alike = alike

    def on_reward_end(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        """Replace the rewards."""
        groups = torch.unique(batch.group_ids, return_inverse=True)[1]
        has_signal = groups >= round(self.alike * len(set(groups.tolist())))
        batch.rewards = torch.where(has_signal, torch.arange(batch.num_trajectories) % 2, 0).double()


class UpdateTrace(CSVTrace):
    """Writes each update's seconds, the device being waited for, its MFU, memory and compiled graphs so far."""

    def __init__(self) -> None:
        super().__init__("update", COLUMNS)
        self._begun = 0.0
        torch._logging.set_logs(recompiles=True)  # with their reasons, to the run's log

    def on_update_start(self, trainer: Any, module: Any, batch: Any) -> None:
        """Start the clock."""
        synchronize(module.device)
        reset_peak(module.device)
        self._begun = perf_counter()

    def on_update_end(self, trainer: Any, module: Any, batch: Any) -> None:
        """Stop it."""
        synchronize(module.device)
        seconds = perf_counter() - self._begun
        use, peak = memory_use(module.device), device_peak(module.device)
        flops = (update_flops(module, batch), six_n_flops(module.model_config, batch.num_tokens))
        mfu = [share / (seconds * peak) for share in flops] if peak else ["", ""]
        memory = (use.peak, use.reserved) if use else (0, 0)
        self.write(trainer, seconds, batch.num_tokens, *mfu, *memory, count_graphs())


class ProfileUpdate(RLCallback):
    """Profiles one step's update on rank 0, into the run's folder: ``<name>.json.gz``, for kernels.py and Perfetto.

    Args:
        step: which one, from 1.
        name: of the trace.
        has_host: record the host's operations too, with a table of them in ``<name>.txt``. That slows the host down,
            and so adds gaps between kernels.
    """

    def __init__(self, step: int, name: str, *, has_host: bool) -> None:
        super().__init__()
        self.step, self.name, self.has_host = step, name, has_host
        self._profiler: Any = None

    def on_update_start(self, trainer: Any, module: Any, batch: Any) -> None:
        """Start, if it is the step."""
        if trainer.global_step + 1 != self.step or not trainer.is_global_zero:
            return
        synchronize(module.device)
        is_cuda = module.device.type == "cuda"
        kinds = [torch.profiler.ProfilerActivity.CUDA] if is_cuda else []
        if self.has_host or not is_cuda:
            kinds.append(torch.profiler.ProfilerActivity.CPU)
        self._profiler = torch.profiler.profile(activities=kinds, acc_events=True)
        self._profiler.start()

    def on_update_end(self, trainer: Any, module: Any, batch: Any) -> None:
        """Stop, and write."""
        if self._profiler is None:
            return
        synchronize(module.device)
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        profiler.export_chrome_trace(str(run_dir(trainer) / f"{self.name}.json.gz"))
        if self.has_host:
            order = "self_cuda_time_total" if module.device.type == "cuda" else "self_cpu_time_total"
            table = profiler.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=80)
            (run_dir(trainer) / f"{self.name}.txt").write_text(table)


def count_graphs() -> int:
    """Graphs that torch.compile has made in this process."""
    counters: Any = torch._dynamo.utils.counters
    return int(counters["stats"]["unique_graphs"])


class Schedule(RLCallback):
    """Gives each step a size of its own: how many prompts, and how many tokens their completions have.

    Args:
        sizes: a step's number of prompts and ``max_new_tokens``, in the steps' order; after the last the first again.
    """

    def __init__(self, sizes: list[list[int]]) -> None:
        super().__init__()
        self.sizes = sizes

    def on_train_batch_start(self, trainer: Any, module: Any, batch: list[Prompt], batch_idx: int) -> None:
        """Cut the step's prompts, and set how long their completions may be."""
        num_prompts, num_tokens = self.sizes[trainer.global_step % len(self.sizes)]
        del batch[num_prompts:]
        module.sampling = replace(module.sampling, max_new_tokens=num_tokens)


class Stretch(RLCallback):
    """Puts long sequences of random tokens in the place of what was sampled, when the update begins.

    Args:
        length: tokens of each.
        count: of them.
    """

    def __init__(self, length: int, count: int) -> None:
        super().__init__()
        self.length, self.count = length, count

    def on_update_start(self, trainer: Any, module: Any, batch: RolloutBatch) -> None:
        """Replace what the batch holds."""
        prompt = batch.prompts[0]
        rng = np.random.default_rng(0)
        num_new = self.length - len(prompt.token_ids)
        vocabulary = module.model_config.get_text_config().vocab_size
        long = RolloutBatch.pack(
            single_turns([prompt], [[random_completion(num_new, vocabulary, rng) for _ in range(self.count)]])
        )
        long.rewards, long.advantages = torch.zeros(self.count), torch.ones(long.num_tokens)
        for field in fields(batch):
            setattr(batch, field.name, getattr(long, field.name))
