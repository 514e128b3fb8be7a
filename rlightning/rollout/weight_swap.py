"""New weights for the engines of a pool, in the middle of what they generate: pause, load, go on."""

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from rlightning.errors import EngineError
from rlightning.rollout.engine_link import EngineDiedError, EngineLink
from rlightning.rollout.engine_pool import EnginePool, Member
from rlightning.rollout.vllm_engine import VLLMEngine, check_complete
from rlightning.rollout.weights import SendingEnd, Weights

Answers = dict[Member, Future[Any]]


def group_by_device(links: Sequence[EngineLink]) -> list[int]:
    """For each engine how many before it run on the same devices, as far as the trainer has chosen these."""
    devices = [link.config.visible_devices for link in links]
    return [devices[:number].count(names) if names else 0 for number, names in enumerate(devices)]


class WeightSwap:
    """Sends weights to those engines of a pool that are up and hold other ones.

    An engine that dies of it is left to the pool. What the others have got may be half of the weights then: they stay
    paused, and stale, until they have been sent all of them.

    Args:
        pool: of the engines.
        end: the way of the weights to them.
        keeps_cache: whether running requests keep the keys and values that the old weights made of them.

    Attributes:
        fresh: the engines that were given weights last.
        pause_seconds: for how long generation stood still for it.
    """

    def __init__(self, pool: EnginePool, end: SendingEnd, *, keeps_cache: bool) -> None:
        self.pool, self.end = pool, end
        self.keeps_cache = keeps_cache
        self.fresh: list[VLLMEngine] = []
        self.pause_seconds = 0.0
        self._opened: list[EngineLink] = []
        self._are_connected = False
        self._loading: dict[Member, EngineLink] = {}
        self._is_whole = True
        self._has_paused = False
        self._paused_at = 0.0

    def load(self, weights: Weights, weight_version: int) -> None:
        """Send ``weights``; generation pauses when the first chunk is ready to be sent.

        Raises:
            EngineError: if a weight does not fit, or a parameter of the engine's model was set by none of them.
        """
        self._loading = self.pool.stale_links(weight_version)
        self._has_paused = any(member.engine.weight_version is not None for member in self._loading)
        self._is_whole = True
        self._is_whole = self._connect() and self._is_whole
        faults: list[str] = []
        for index in self.end.fill(weights):
            # The other ranks give their shards to the end, whoever has died.
            if self._is_whole and index == 0:
                self._paused_at = time.monotonic()
                self._results(self._ask("pause"))
            if self._is_whole:
                answers = self._ask("load_chunk", index)
                self._is_whole = self._hand_over(functools.partial(self.end.send, index), answers)
                faults = sorted({fault for told in self._results(answers) for fault in told})
        if not self._is_whole:
            return
        check_complete(faults)

    def finish(self, weight_version: int) -> None:
        """Let the engines go on, with the new weights."""
        is_whole = self._is_whole  # whoever dies now has got all of them
        if is_whole:
            self._results(self._ask("adopt", weight_version, self.keeps_cache))
            if self._has_paused:
                self.pause_seconds = time.monotonic() - self._paused_at
        else:
            self._are_connected = False
        held = self.pool.note_weights(self._loading, weight_version if is_whole else None)
        self.fresh = [member.engine for member in held] if is_whole else []
        self.pool.resume()

    def close(self) -> None:
        """Give the bucket back."""
        self.end.close()

    def _connect(self) -> bool:
        """Have the engines open their ends, unless they are the ones that have; False if one of them died of it."""
        links = list(self._loading.values())
        if self._are_connected and links == self._opened:
            return True
        for link in self._opened:
            if link.death is not None:
                link.ended.result()  # what it interrupts is the connection of before, not the next
        self._opened = links
        size = int(links[0].config.engine_args.get("tensor_parallel_size") or 1) if links else 1
        handles = self.end.handles([group for group in group_by_device(links) for _ in range(size)])
        answers = {
            member: link.submit("open_bucket", handles[number * size : (number + 1) * size])
            for number, (member, link) in enumerate(self._loading.items())
        }
        for link in links:
            link.ended.add_done_callback(functools.partial(self._interrupt, link))
        self._are_connected = self._hand_over(self.end.connect, answers)
        if self._are_connected:
            self._results(answers)
        return self._are_connected

    def _interrupt(self, link: EngineLink, ended: "Future[EngineError]") -> None:
        """An engine has died: nobody waits for it, if it is connected."""
        if link in self._opened:
            self.end.interrupt(str(ended.result()).splitlines()[0])

    def _hand_over(self, send: Callable[[], None], answers: Answers) -> bool:
        """Do the sender's part of what the engines have been asked for; False if one of them died of it."""
        try:
            send()
        except EngineError:
            wait(list(answers.values()))
            dead = [member for member, answer in answers.items() if isinstance(answer.exception(), EngineDiedError)]
            if not dead:
                raise
            for member in dead:
                del self._loading[member]
            return False
        return True

    def _ask(self, method: str, *arguments: Any) -> Answers:
        # Not the member's engine, which may have been started again meanwhile.
        return {member: link.submit(method, *arguments) for member, link in self._loading.items()}

    def _results(self, answers: Answers) -> list[Any]:
        """What the engines answer; those that die are left out from here on, and the others are sent nothing more."""
        results = []
        for member, answer in answers.items():
            try:
                results.append(answer.result())
            except EngineDiedError:
                self._loading.pop(member, None)
                self._is_whole = False
        return results
