"""Rewards for models that can do nothing. This imports next to nothing: their processes start in a moment."""

import random


def random_reward(completion: str) -> float:
    """Uniform in [0, 1): a model of random weights has nothing to be judged by, and the update costs the same."""
    return random.SystemRandom().random()


def trivial_reward(completion: str) -> float:
    """By the length; it runs in worker processes."""
    return float(len(completion) % 2)


async def trivial_async_reward(completion: str) -> float:
    """The same; it runs on the event loop of a process."""
    return float(len(completion) % 2)
