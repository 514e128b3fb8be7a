"""Renews the salts of vLLM's prefix cache, with which a request finds only keys and values of its own weights."""

from collections.abc import Iterable
from typing import Any
from uuid import uuid4


def renew_salts(requests: Iterable[Any]) -> None:
    """Give requests of which nothing is computed another cache salt, since the weights may have changed meanwhile.

    With the salt that they came with, they would find keys and values that the weights before have computed.

    Args:
        requests: vLLM's requests of a scheduler; those without a salt are left alone.
    """
    salt = uuid4().hex
    renewed: dict[object, list[Any]] = {}  # by the last hash under the old salt: samples share a prompt
    for request in requests:
        if request.cache_salt is None or request.num_computed_tokens or request.num_output_tokens:
            continue
        request.cache_salt = salt
        if not request.block_hashes:
            continue
        last = request.block_hashes[-1]
        request.block_hashes.clear()
        if last not in renewed:
            request.update_block_hashes()
            renewed[last] = list(request.block_hashes)
        request.block_hashes[:] = renewed[last]
