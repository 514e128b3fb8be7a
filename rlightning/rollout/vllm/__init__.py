"""vLLM's engine: its process, its settings, and rlightning's extensions of it."""
