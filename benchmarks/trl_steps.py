"""TRL's side of compare_trl.py: GRPO steps on the same prompts, with the same lengths, and what each of them took.

    python benchmarks/trl_steps.py --model runs/models/0.6b --prompts prompts.jsonl --out steps.csv

Written for TRL 1.16 (`pip install trl`). Phases are told by wrapping methods of its trainer: what a method takes counts
without the wrapped ones inside it. The update is what of a step is not spent on getting its completions ready: forward,
backward, optimizer. "other" is tokenising, padding, decoding, and the log-probabilities that the importance sampling
correction computes before the update.
"""

import argparse
import asyncio
import csv
import json
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from agent_work import ANSWER
from device_poll import DevicePoll
from probes import reset_peak, six_n_flops
from transformers import AutoConfig, AutoTokenizer, TrainerCallback

from rlightning.callbacks.throughput import device_peak
from rlightning.models.counts import sequence_flops
from rlightning.parallel.device import memory_use, synchronize

COLUMNS = (
    *("step", "seconds", "generate", "sync", "reward", "other", "update"),
    *("tokens", "completion_tokens", "longest", "mfu", "six_n_mfu", "allocated", "used"),
)


TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function }}{% endfor %}{% endfor %}"
)
"""A chat template by which conversations are their contents, as without one here; TRL wants it to write calls."""


def reward(completions: list[Any], **columns: Any) -> list[float]:
    """Uniform in [0, 1), as rewards.random_reward."""
    return [random.random() for _ in completions]


class Answers:
    """An environment of TRL whose tool answers after some time, as agent_work.Waits; 0: at once."""

    seconds = 0.0

    def reset(self, **columns: Any) -> None:
        """Keep the prompt as it is."""

    async def look_up(self) -> str:
        """
        Look it up.

        Returns:
            The answer.
        """
        if self.seconds:
            await asyncio.sleep(self.seconds)
        return ANSWER


def call_tool(tokenizer: Any, token_ids: list[int], **options: Any) -> dict[str, Any]:
    """Read a turn as a call of the tool, whatever it says: in place of TRL's ``parse_response``."""
    call = {"type": "function", "function": {"name": Answers.look_up.__name__, "arguments": {}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def tool_settings(tokenizer: Any, rows: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Have the rows be chats, whose turns all call a tool; arguments of TRL's trainer."""
    from trl.trainer import grpo_trainer

    grpo_trainer.parse_response = call_tool
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, {}
    for row in rows:
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]
    Answers.seconds = seconds
    return {"environment_factory": Answers}


class Clock:
    """Seconds by name, of calls that may be inside each other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = 0.0

    def wrap(self, owner: Any, method: str, name: str, then: Callable[[Any, Any], None] | None = None) -> None:
        """Time each call of ``owner.method``, and call ``then`` with its first argument and its result."""
        call = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            outer, self._inside = self._inside, 0.0
            begun = perf_counter()
            result = call(*args, **kwargs)
            spent = perf_counter() - begun
            self.seconds[name] += spent - self._inside
            self._inside = outer + spent
            if then is not None:
                then(args[0] if args else None, result)
            return result

        setattr(owner, method, timed)


class StepTrace(TrainerCallback):
    """Writes a row a step.

    Args:
        path: of the CSV file.
        config: the model's.
        device: that TRL runs on.
    """

    def __init__(self, path: Path, config: Any, device: torch.device) -> None:
        self.path, self.config, self.device = path, config, device
        self.clock = Clock()
        self.poll: DevicePoll | None = None
        self.begun = 0.0
        self.lengths: list[tuple[int, int]] = []  # of each sequence, and of what was sampled of it
        self.allocated = 0
        with path.open("w", newline="") as file:
            csv.writer(file).writerow(COLUMNS)

    def watch(self, trainer: Any) -> None:
        """Time the trainer's methods."""
        self.clock.wrap(trainer, "_generate_single_turn", "generate")
        self.clock.wrap(trainer, "_generate", "other", self._count)
        self.clock.wrap(trainer, "_calculate_rewards", "reward")
        if getattr(trainer, "vllm_generation", None) is not None:
            self.clock.wrap(trainer.vllm_generation, "sync_weights", "sync")
        self.clock.wrap(trainer, "_generate_and_score_completions", "other", self._begin_update)

    def _count(self, _: Any, result: Any) -> None:
        token_ids, completions, sampled = result[:3]
        masks = sampled or [[1] * len(completion) for completion in completions]
        lengths = zip(token_ids, completions, masks, strict=True)
        self.lengths += [(len(prompt) + len(completion), sum(mask)) for prompt, completion, mask in lengths]

    def _begin_update(self, *_: Any) -> None:
        begun = perf_counter()
        synchronize(self.device)
        self.clock.seconds["other"] += perf_counter() - begun
        reset_peak(self.device)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Begin to watch the device, now that the engine has captured its graphs."""
        self.poll = DevicePoll(self.device)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop watching."""
        assert self.poll is not None
        self.poll.close()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        assert self.poll is not None
        synchronize(self.device)
        self.clock.seconds.clear()
        self.lengths.clear()
        self.poll.take()
        self.begun = perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop it, the device having done its work, and write the row."""
        assert self.poll is not None
        synchronize(self.device)
        seconds = perf_counter() - self.begun
        phases = self.clock.seconds
        update = seconds - sum(phases.values())
        lengths, completions = (list(column) for column in zip(*self.lengths, strict=True))
        tokens = sum(lengths)
        flops = sequence_flops(self.config, torch.tensor(lengths), torch.tensor(completions))
        peak = device_peak(self.device)
        mfu = ["", ""]
        if peak is not None:
            six_n = six_n_flops(self.config, tokens)
            mfu = [str(needed / (update * peak)) for needed in (float(flops.sum()), six_n)]
        use = memory_use(self.device)
        row = [state.global_step, seconds, *(phases[name] for name in ("generate", "sync", "reward", "other")), update]
        row += [tokens, sum(completions), max(completions), *mfu, use.peak if use else 0, self.poll.take().used]
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerow(row)


def make_lora(adapter: dict[str, Any]) -> Any:
    """PEFT's settings of an adapter as rlightning makes it; None without one."""
    if not adapter:
        return None
    from peft import LoraConfig

    rank = adapter["rank"]
    scale = adapter.get("alpha", 2 * rank)
    return LoraConfig(r=rank, lora_alpha=scale, target_modules="all-linear", task_type="CAUSAL_LM")


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with a column prompt")
    parser.add_argument("--out", type=Path, required=True, help="the CSV file")
    parser.add_argument("--settings", default="{}", help="JSON: arguments of GRPOConfig")
    parser.add_argument("--adapter", type=json.loads, default={}, help="JSON: rank and alpha of LoRA")
    parser.add_argument(
        "--tool-seconds", type=float, help="of a call; each turn calls a tool (completions of one turn)"
    )
    arguments = parser.parse_args()
    try:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer
    except ImportError as error:
        raise SystemExit(f"TRL is not installed here ({error}): pip install trl") from error
    rows = [json.loads(line) for line in arguments.prompts.read_text().splitlines()]
    settings = GRPOConfig(output_dir=str(arguments.out.parent), **json.loads(arguments.settings))
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    tools = {} if arguments.tool_seconds is None else tool_settings(tokenizer, rows, arguments.tool_seconds)
    trace = StepTrace(arguments.out, AutoConfig.from_pretrained(arguments.model), settings.device)
    trainer = GRPOTrainer(
        model=arguments.model,
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[trace],
        peft_config=make_lora(arguments.adapter),
        **tools,
    )
    trace.watch(trainer)
    trainer.train()


if __name__ == "__main__":
    main()
