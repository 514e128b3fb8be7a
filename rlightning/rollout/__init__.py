"""Where completions come from: the engine, its process, and the way of the weights to it.

::

    trainer process                        engine process              engine core (vLLM's child, one a device)
    VLLMEngine  -- prompts, sampling ---->  AsyncLLM  ---------------->  model, KV cache
                <-- tokens, logprobs ----                              <-- WeightReceiver
    WeightSender ============ one flat bucket: shared memory, or CUDA IPC ====^
"""

from rlightning.rollout.sampler import Generator, OnCompleted, Sampler, Sampling, TakePrompts

__all__ = ["Generator", "OnCompleted", "Sampler", "Sampling", "TakePrompts"]
