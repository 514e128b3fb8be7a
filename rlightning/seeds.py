"""Seeds of a run's random streams: prompt order, mini-batches, engines, requests, and stochastic rounding.

Each stream has its own seed, a hash of the run's seed and of the stream's purpose, so that streams of the same run, and
of runs with different seeds, are independent.
"""

import hashlib
import os


def run_seed() -> int | None:
    """Return the seed that ``seed_everything`` has set in this process; None if it was not called."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    return None if seed is None else int(seed)


def mix_seed(*parts: int | str) -> int:
    """Return a seed computed from ``parts``: equal parts give the same seed in every process.

    Args:
        parts: the run's seed, the stream's name, and further distinctions, such as a step.

    Returns:
        A number in ``range(2 ** 62)``, so that vLLM can add a sample's index to it.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
