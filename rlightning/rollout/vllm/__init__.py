"""vLLM's engine: its process, its settings, and what rlightning adds inside of it."""
