"""RL post-training for language models, the Lightning way."""
