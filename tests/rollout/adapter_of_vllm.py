"""Log-probabilities that vLLM computes by itself with adapters in PEFT's folders.

``python adapter_of_vllm.py BASE TOKENS RESULT ADAPTER...`` scores the token ids, a JSON list, with the base alone and
with each adapter, and writes the log-probabilities of all but the first one into the file RESULT.
"""

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def main(base: str, tokens: str, result: str, *adapters: str) -> None:
    token_ids = json.loads(tokens)
    llm = LLM(
        base,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=2,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 25,
        enable_lora=True,
        max_lora_rank=8,
        skip_tokenizer_init=True,
    )
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = []
    for request in (None, *(LoRARequest(path, number, path) for number, path in enumerate(adapters, start=1))):
        (output,) = llm.generate({"prompt_token_ids": token_ids}, sampling, lora_request=request, use_tqdm=False)
        entries: Any = output.prompt_logprobs
        found.append([entry[token].logprob for entry, token in zip(entries[1:], token_ids[1:], strict=True)])
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
