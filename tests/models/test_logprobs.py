from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import load_eager, make_sequences, save_tiny
from torch import Tensor

from rlightning.models import load_policy
from rlightning.models.logprobs import packed_logprobs
from rlightning.types import Prompt, RolloutBatch, Sample, single_turns


def make_batch(sequences: list[Tensor], prompt_length: int = 1) -> RolloutBatch:
    """Each sequence's first tokens are its prompt."""
    prompts = [Prompt(i, "", s[:prompt_length].tolist(), {}) for i, s in enumerate(sequences)]
    rests = [s[prompt_length:].numpy() for s in sequences]
    zeros = [np.zeros(len(rest), np.float32) for rest in rests]
    completions = [
        [Sample(r.tolist(), z, z.astype(np.int32).tolist(), "", "stop")] for r, z in zip(rests, zeros, strict=True)
    ]
    return RolloutBatch.pack(single_turns(prompts, completions))


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False}),
        ("gemma3_text", {"head_dim": 8, "final_logit_softcapping": 2.0}),
    ],
)
def test_packed_logprobs_are_those_of_each_sequence_alone(kind: str, config: dict[str, Any], tmp_path: Path) -> None:
    folder = save_tiny(kind, tmp_path, **config)
    sequences = make_sequences()
    got, entropy = packed_logprobs(load_policy(folder), make_batch(sequences), temperature=0.7)
    alone = load_eager(folder)
    start = 0
    for sequence in sequences:
        table = (alone(sequence[None], use_cache=False).logits[0, :-1] / 0.7).log_softmax(-1)
        end = start + len(sequence)
        # The first token is the prompt: nothing is asked about it.
        expected = torch.cat([torch.zeros(1), table.gather(1, sequence[1:, None])[:, 0]])
        torch.testing.assert_close(got[start:end], expected, atol=1e-5, rtol=1e-5)
        expected = torch.cat([torch.zeros(1), -(table.exp() * table).sum(-1)])
        torch.testing.assert_close(entropy[start:end], expected, atol=1e-5, rtol=1e-5)
        start = end


def test_longer_prompts_change_no_logprob(tmp_path: Path) -> None:
    policy = load_policy(save_tiny("qwen3", tmp_path, head_dim=8))
    sequences = [s for s in make_sequences() if len(s) > 3]
    whole, _ = packed_logprobs(policy, make_batch(sequences, 1))
    batch = make_batch(sequences, 3)
    part, _ = packed_logprobs(policy, batch)
    torch.testing.assert_close(part, torch.where(batch.is_sampled, whole, 0))
    assert (part[~batch.is_sampled] == 0).all()
