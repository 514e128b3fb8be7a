"""Seeds of a run's random streams: prompt order, mini-batches, engines, requests, and stochastic rounding.

Each stream has a seed of its own, a hash of the run's seed and of what the stream is for. A stream of seed 0 then has
nothing in common with its neighbours, nor with the same stream of seed 1.
"""

import hashlib
import os


def run_seed() -> int | None:
    """Return the seed that ``seed_everything`` has set in this process, or None."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    return None if seed is None else int(seed)


def mix_seed(*parts: int | str) -> int:
    """Return the seed of the random stream named by ``parts``, which is the same in every process.

    Args:
        parts: the run's seed, the stream's name, and what tells its random numbers apart, such as a step.

    Returns:
        A number in ``range(2 ** 62)``, which leaves room for vLLM to add a sample's number to it.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
