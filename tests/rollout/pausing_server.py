"""A program: pauses an engine in the midst of many requests, and fails if tokens come in after the pause."""

import asyncio
import sys

import numpy as np

from rlightning.rollout.engine_output import EngineOutput
from rlightning.rollout.vllm.server import VLLMServer, start_engine

NUM_PAUSES = 8
MAX_TOKENS = 240
NUM_PROMPTS, NUM_SAMPLES = 12, 16
"""More samples at a time than vLLM takes in without a break, by default (128)."""


async def pause_often(model_folder: str) -> None:
    """Compare what is counted when a pause has begun with what is there a while later, and with what comes out."""
    engine = start_engine(
        {
            "model": model_folder,
            "load_format": "dummy",
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 256,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 1 << 25,
            "distributed_executor_backend": "uni",
            "logprobs_mode": "processed_logprobs",
            "scheduler_cls": "rlightning.rollout.vllm.scheduler.make_scheduler",
        }
    )
    server = VLLMServer(engine)
    await server.begin_weight_update()
    await server.finish_weight_update(0, False)
    first_version = num_before = 0
    while True:
        calls = await start_together(server)
        await server.begin_weight_update()
        if len(counted(server)) == len(calls) * NUM_SAMPLES:
            break
        # This process was suspended for longer than some requests took: sample anew.
        first_version, num_before = first_version + 1, num_before + len(calls)
        await server.finish_weight_update(first_version, False)
        await asyncio.gather(*calls)
    boundaries = []
    for number in range(1, NUM_PAUSES + 1):
        if number > 1:
            await server.begin_weight_update()
        boundaries.append(counted(server))
        await asyncio.sleep(0.1)
        assert counted(server) == boundaries[-1], "tokens came in after the pause"
        await server.finish_weight_update(first_version + number, keeps_cache=number % 2 == 0)
        await asyncio.sleep(0.02)
    for request, samples in enumerate(await asyncio.gather(*calls), start=num_before + 1):
        for index, sample in enumerate(samples):
            check(sample, first_version, [boundary.get((str(request), index)) for boundary in boundaries])
    assert not counted(server)


async def start_together(server: VLLMServer) -> "list[asyncio.Task[list[EngineOutput]]]":
    """Start all requests at once; they have their first tokens, or have ended, when this returns."""
    await server.engine.pause_generation(mode="keep", clear_cache=False)
    sampling = {"n": NUM_SAMPLES, "temperature": 1.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    calls = [asyncio.create_task(server.generate([1, 2, 3, 1 + index], sampling)) for index in range(NUM_PROMPTS)]
    while len(counted(server)) < NUM_PROMPTS * NUM_SAMPLES:
        await asyncio.sleep(0.01)
    await server.engine.resume_generation()
    while (counts := counted(server)) and not any(counts.values()):
        await asyncio.sleep(0)
    return calls


def counted(server: VLLMServer) -> dict[tuple[str, int], int]:
    """Tokens so far, by request and sample."""
    return {(request, index): count for request, index, count in server._count_tokens()}


def check(sample: EngineOutput, first_version: int, boundaries: list[int | None]) -> None:
    """Each token of the version that was active then."""
    expected = np.full(MAX_TOKENS, first_version, np.int32)
    for version, boundary in enumerate(boundaries, start=first_version + 1):
        if boundary is not None:  # else it was at its end before
            expected[boundary:] = version
    np.testing.assert_array_equal(sample["weight_versions"], expected)


if __name__ == "__main__":
    asyncio.run(pause_often(sys.argv[1]))
