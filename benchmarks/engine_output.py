"""What the two Python ends of an engine do for each token that its device samples, without a device or a model.

    python benchmarks/engine_output.py

vLLM's core writes what each step sampled into a message, and the process in front of it reads the message and keeps
each completion's tokens, log-probabilities and text. These are vLLM's own classes, here in one process, on synthetic
steps of --sequences completions. Neither end gives more tokens a second than its part of the table allows.

Prints one table, microseconds of CPU time a token: ``core`` writes, ``front`` reads and keeps, ``text`` is what
rlightning decodes when a completion is there. The least of --repetitions counts. The tokenizer reads byte by byte.
"""

import argparse
import time
from typing import Any

import numpy as np
from launch import format_table, say
from make_model import make_tokenizer
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from rlightning.rollout.detokenize import decode_completions

WAYS: dict[str, dict[str, Any]] = {
    "text in the end": {"detokenize": False, "logprobs": 0},
    "text as it comes (with stop strings)": {"detokenize": True, "logprobs": 0},
    "text as it comes, no log-probabilities": {"detokenize": True},
    "no text, no log-probabilities": {"detokenize": False},
}
"""How a request asks for its output; the first is rlightning's."""
PROMPT = list(range(1, 65))


def make_steps(num_sequences: int, num_tokens: int, *, with_logprobs: bool) -> list[EngineCoreOutputs]:
    """What the core has to say after each step."""
    random = np.random.default_rng(0)
    steps = []
    for step in range(num_tokens):
        tokens = random.integers(1, 257, (num_sequences, 1))
        logprobs = LogprobsLists(
            tokens, random.normal(size=tokens.shape).astype(np.float32), np.ones(num_sequences, np.int64), None
        )
        outputs = [
            EngineCoreOutput(
                request_id=str(i),
                new_token_ids=tokens[i].tolist(),
                new_logprobs=logprobs.slice_request(i, 1) if with_logprobs else None,
                finish_reason=FinishReason.LENGTH if step == num_tokens - 1 else None,
            )
            for i in range(num_sequences)
        ]
        steps.append(EngineCoreOutputs(outputs=outputs))
    return steps


def measure(tokenizer: Any, asked: dict[str, Any], num_sequences: int, num_tokens: int) -> dict[str, float]:
    """Microseconds a token at either end."""
    processor = OutputProcessor(tokenizer, log_stats=False)
    params = SamplingParams(
        max_tokens=num_tokens, flat_logprobs="logprobs" in asked, output_kind=RequestOutputKind.FINAL_ONLY, **asked
    )
    for i in range(num_sequences):
        request = EngineCoreRequest(
            request_id=str(i),
            external_req_id=str(i),
            prompt_token_ids=PROMPT,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        processor.add_request(request, None)
    steps = make_steps(num_sequences, num_tokens, with_logprobs="logprobs" in asked)
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
    start = time.process_time()
    messages = [encoder.encode(step) for step in steps]
    encoded = time.process_time()
    for message in messages:
        outputs = processor.process_outputs(decoder.decode(message).outputs).request_outputs
    kept = time.process_time()
    token_ids = [output.outputs[0].token_ids for output in outputs]
    if not asked["detokenize"]:
        decode_completions(tokenizer, PROMPT, token_ids)
    decoded = time.process_time()
    seconds = {"core": encoded - start, "front": kept - encoded, "text": decoded - kept}
    return {end: value / (num_sequences * num_tokens) * 1e6 for end, value in seconds.items()}


def main() -> None:
    """Measure each way to ask, turn by turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=512, help="in a step (512)")
    parser.add_argument("--tokens", type=int, default=256, help="of each (256)")
    parser.add_argument("--repetitions", type=int, default=3, help="(3)")
    arguments = parser.parse_args()
    tokenizer = make_tokenizer()
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(arguments.repetitions):
        for way, asked in WAYS.items():
            found[way].append(measure(tokenizer, asked, arguments.sequences, arguments.tokens))
    rows = []
    for way, measured in found.items():
        row: dict[str, Any] = {"output": way}
        for end in measured[0]:
            row[f"{end}, us"] = min(one[end] for one in measured)
        slowest = max(row["core, us"], row["front, us"])
        rows.append(row | {"at most, tokens/s": round(1e6 / slowest)})
    say(format_table(rows))


if __name__ == "__main__":
    main()
