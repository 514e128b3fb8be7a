"""Inference engines: their processes, sampling from them, and the transfer of the actor's weights to them.

::

    trainer process                        engine process              engine core (vLLM's child, one a device)
    Engine      -- prompts, sampling ---->  AsyncLLM  ------------->  model, KV cache
                <-- tokens, logprobs ----                             <-- WeightReceiver
    WeightSender ============ chunks of weights, by a transport ==============^
"""

from rlightning.rollout.sampler import (
    HasTrajectorySampler,
    OnCompleted,
    OnTokens,
    Sampler,
    Sampling,
    StructuredSampler,
    TakePrompts,
    TokenSampler,
    TrajectorySampler,
    follows_schemas,
)

__all__ = [
    "HasTrajectorySampler",
    "OnCompleted",
    "OnTokens",
    "Sampler",
    "Sampling",
    "StructuredSampler",
    "TakePrompts",
    "TokenSampler",
    "TrajectorySampler",
    "follows_schemas",
]
