"""What vLLM's core does for a token with its own scheduler and with rlightning's, without a device or a model.

    python benchmarks/scheduling.py

--sequences completions of prompts of 128 tokens, eight a prompt, each step one token of each, with synthetic samples; a
step is scheduled before the one before it has been taken in. Prints one table, microseconds of CPU time a token, the
least of --repetitions, turn by turn: "schedule", "take in" what was sampled, "write" the messages to the process in
front.
"""

import argparse
import time
from collections import defaultdict
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from launch import format_table, say
from make_model import make_tokenizer
from transformers import Qwen3Config
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

from rlightning.rollout.vllm.scheduler import AsyncRolloutScheduler

BLOCK_TOKENS = 16
PROMPT_TOKENS = 128
WARM_UP = 20
"""Steps that do not count."""
SCHEDULERS: dict[str, Any] = {"vLLM's own": AsyncScheduler, "rlightning's": AsyncRolloutScheduler}


def make_scheduler(kind: Any, folder: str, num_sequences: int, longest: int) -> Any:
    """One with all requests waiting, and room for all of them."""
    config = EngineArgs(
        model=folder, max_model_len=longest, max_num_seqs=num_sequences, block_size=BLOCK_TOKENS, enforce_eager=True
    ).create_engine_config()
    config.scheduler_config.async_scheduling = True  # which vLLM turns off on a CPU
    num_blocks = num_sequences * -(-longest // BLOCK_TOKENS) + 1
    config.cache_config.num_gpu_blocks = num_blocks
    layers = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32)
    scheduler = kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], layers)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        log_stats=False,
    )
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(BLOCK_TOKENS, hash_function)
    params = SamplingParams(
        max_tokens=longest - PROMPT_TOKENS,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    for number in range(num_sequences):
        prompt = [1 + number // 8 % 200] * PROMPT_TOKENS
        scheduler.add_request(
            Request(str(number), prompt, sampling_params=params, pooling_params=None, block_hasher=hasher)
        )
    return scheduler


def make_output(scheduled: Any, random: np.random.Generator) -> ModelRunnerOutput:
    """A token for each request of a step."""
    names = list(scheduled.num_scheduled_tokens)
    tokens = random.integers(1, 1000, (len(names), 1))
    logprobs = random.normal(size=tokens.shape).astype(np.float32)
    lists = LogprobsLists(tokens.astype(np.int32), logprobs, np.ones(len(names), np.int64), None)
    index = {name: place for place, name in enumerate(names)}
    return ModelRunnerOutput(names, index, sampled_token_ids=tokens.tolist(), logprobs=lists)


def measure(kind: Any, folder: str, num_sequences: int, num_steps: int) -> dict[str, float]:
    """Microseconds a token, by part."""
    scheduler = make_scheduler(kind, folder, num_sequences, PROMPT_TOKENS + num_steps + WARM_UP + BLOCK_TOKENS)
    encoder, random = MsgpackEncoder(), np.random.default_rng(0)
    seconds: dict[str, float] = defaultdict(float)
    num_tokens, before = 0, scheduler.schedule()
    for step in range(num_steps + WARM_UP):
        if step == WARM_UP:
            seconds.clear()
            num_tokens = 0
        start = time.process_time()
        scheduled = scheduler.schedule()
        seconds["schedule"] += time.process_time() - start
        output = make_output(before, random)
        num_tokens += len(output.req_ids)
        start = time.process_time()
        messages = scheduler.update_from_output(before, output)
        taken_in = time.process_time()
        for message in messages.values():
            encoder.encode(message)
        seconds["take in"] += taken_in - start
        seconds["write"] += time.process_time() - taken_in
        before = scheduled
    return {part: 1e6 * spent / num_tokens for part, spent in seconds.items()}


def main() -> None:
    """Measure both, turn by turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=512, help="in a step (512)")
    parser.add_argument("--steps", type=int, default=300, help="(300)")
    parser.add_argument("--repetitions", type=int, default=3, help="(3)")
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    with TemporaryDirectory() as folder:
        Qwen3Config(vocab_size=2000, num_hidden_layers=1, architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        for _ in range(arguments.repetitions):
            for name, kind in SCHEDULERS.items():
                found[name].append(measure(kind, folder, arguments.sequences, arguments.steps))
    rows = []
    for name, measured in found.items():
        row = {part: min(one[part] for one in measured) for part in measured[0]}
        rows.append({"scheduler": name, **row, "all": min(sum(one.values()) for one in measured)})
    say(format_table(rows))


if __name__ == "__main__":
    main()
