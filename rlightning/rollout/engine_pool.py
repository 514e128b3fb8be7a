"""Several engines as one: requests go to the least loaded, and those of one that dies to the others.

An engine takes part when it holds the current weights. One that dies is started again and takes part once it has been
sent them; one that dies a second time before :meth:`EnginePool.forgive` stays away.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from rlightning import intervals
from rlightning.errors import EngineDiedError, EngineError
from rlightning.rollout.engine import Engine, model_files, vllm_sampling
from rlightning.rollout.engine_config import EngineConfig
from rlightning.rollout.engine_connection import EngineConnection
from rlightning.rollout.requests import group_sampling
from rlightning.rollout.sampler import Sampling
from rlightning.types import Prompt, Sample

log = logging.getLogger(__name__)

Answer = Future[list[Sample]]


@dataclass(eq=False, slots=True)
class Request:
    """One prompt to complete.

    Attributes:
        prompt: what is completed.
        arguments: of the engine process's ``generate``.
        num_samples: how many completions; what an engine's load is counted in.
        conversation: requests of one stay with one engine, whose cache holds what was said before.
        answer: what the asker waits for, whichever engine it comes from.
    """

    prompt: Prompt
    arguments: tuple[Any, ...]
    num_samples: int
    conversation: Hashable | None = None
    answer: Answer = field(default_factory=Future)


class Member:
    """An engine of the pool, and what it is at work on."""

    def __init__(self, number: int, config: EngineConfig) -> None:
        self.number = number
        self.engine = Engine(config)
        self.work: dict[Future[Any], Request] = {}
        self.num_coming = 0  # completions of requests that are just being sent
        self.has_died = self.is_gone = False
        self._idle_since: float | None = None
        self._idle_seconds = 0.0

    @property
    def load(self) -> int:
        """Completions that it is to write."""
        return self.num_coming + sum(request.num_samples for request in self.work.values())

    @property
    def is_up(self) -> bool:
        """Whether weights could be sent to it now."""
        process = self.engine.process
        return process is not None and self.engine.is_alive and process.ready.done()

    def mark_idle(self) -> None:
        """Count the seconds in which it has weights and no work."""
        is_idle = not self.work and self.engine.weight_version is not None
        now = time.monotonic()
        if self._idle_since is not None:
            self._idle_seconds += now - self._idle_since
        self._idle_since = now if is_idle else None

    def take_idle_seconds(self) -> float:
        """Those since the last call."""
        self.mark_idle()
        seconds, self._idle_seconds = self._idle_seconds, 0.0
        return seconds


class EnginePool:
    """Engines in processes of their own; any thread may ask, and the engines' own threads hand work on.

    Args:
        configs: of the engines, one each.
        on_change: called, in any thread, when an engine has come up or died.
    """

    def __init__(self, configs: Sequence[EngineConfig], on_change: Callable[[], None]) -> None:
        self.members = [Member(number, config) for number, config in enumerate(configs)]
        self._on_change = on_change
        self._backlog: deque[Request] = deque()
        self._homes: dict[Hashable, Member] = {}
        self._lock = threading.RLock()
        self._failure: EngineError | None = None
        self._is_closed = self._has_served = False

    def start(self) -> None:
        """Start all engines; returns before they are up."""
        for member in self.members:
            self._start(member)

    def submit(
        self, prompt: Prompt, stream: int, num_samples: int, sampling: Sampling, conversation: Hashable | None = None
    ) -> Answer:
        """Have a prompt completed by whichever engine has the least to do, or by its conversation's.

        Args:
            prompt: what to complete.
            stream: number of its random stream.
            num_samples: completions.
            sampling: how.
            conversation: what it is a turn of.

        Returns:
            The completions, or the error that ended all engines.
        """
        ends = model_files(self.members[0].engine.config).end_token_ids
        arguments = (prompt.token_ids, vllm_sampling(group_sampling(sampling, prompt, stream), num_samples, ends))
        request = Request(prompt, arguments, num_samples, conversation)
        self._dispatch(request)
        return request.answer

    def cancel(self, answers: Sequence[Answer]) -> None:
        """End requests that nobody waits for any more."""
        unwanted = set(answers)
        with self._lock:
            self._backlog = deque(request for request in self._backlog if request.answer not in unwanted)
            for member in self.members:
                asked = [inner for inner, request in member.work.items() if request.answer in unwanted]
                for inner in asked:
                    del member.work[inner]
                    inner.cancel()
                member.mark_idle()

    def stale_links(self, weight_version: int) -> dict[Member, EngineConnection]:
        """Engines that are up and hold other weights, each with its process of now."""
        links = {member: member.engine.process for member in self._living() if member.is_up}
        return {m: link for m, link in links.items() if link and m.engine.weight_version != weight_version}

    def note_weights(self, links: Mapping[Member, EngineConnection], weight_version: int | None) -> list[Member]:
        """Note what the engines hold whose processes are still these; those engines."""
        with self._lock:
            held = [member for member, link in links.items() if member.engine.process is link]
            for member in held:
                member.engine.weight_version = weight_version
        return held

    def serving_members(self, weight_version: int) -> list[Member]:
        """Engines that hold these weights."""
        return [m for m in self._living() if m.engine.weight_version == weight_version]

    def has_joiners(self) -> bool:
        """Whether an engine is up that holds no weights."""
        return any(member.is_up and member.engine.weight_version is None for member in self._living())

    def has_up(self) -> bool:
        """Whether an engine is up."""
        return any(member.is_up for member in self._living())

    def wait_for_one(self) -> None:
        """Block until an engine is up.

        Raises:
            EngineError: all are gone for good.
        """
        while not self.has_up():
            self.check()
            coming = [m.engine.process.ready for m in self._living() if m.engine.is_alive and m.engine.process]
            if coming:
                wait(coming, timeout=intervals.POLL_INTERVAL, return_when=FIRST_COMPLETED)
            else:
                time.sleep(intervals.POLL_INTERVAL)
        if not self._has_served:  # the first would get everything that is asked
            starting = [m.engine.process.ready for m in self._living() if m.engine.process]
            wait(starting, timeout=intervals.ENGINE_START_GRACE)

    def check(self) -> None:
        """Raise the error that ended all engines, if there is one."""
        if self._failure is not None:
            raise self._failure

    def resume(self) -> None:
        """Hand on what waits, now that engines have weights."""
        with self._lock:
            self._has_served = True
            waiting, self._backlog = self._backlog, deque()
        for request in waiting:
            self._dispatch(request)

    def forgive(self) -> None:
        """Let each engine die once more."""
        for member in self.members:
            member.has_died = False

    def take_idle_seconds(self) -> float:
        """In which engines that hold weights had nothing to do, since the last call; their mean."""
        with self._lock:
            return sum(member.take_idle_seconds() for member in self.members) / len(self.members)

    def close(self) -> None:
        """End all engines. May be called twice."""
        with self._lock:  # nobody starts one after this
            self._is_closed = True
        for member in self.members:
            member.engine.close()

    def _living(self) -> list[Member]:
        return [member for member in self.members if not member.is_gone]

    def _start(self, member: Member) -> None:
        member.engine.start()
        process = member.engine.process
        assert process is not None
        process.ready.add_done_callback(lambda _: self._on_change())
        process.ended.add_done_callback(lambda ended: self._bury(member, ended.result()))

    def _dispatch(self, request: Request) -> None:
        with self._lock:
            if self._failure is not None:
                request.answer.set_exception(self._failure)
                return
            # The processes of now: the next one of an engine that dies has no weights, and would refuse.
            links = {m: m.engine.process for m in self._living() if m.engine.weight_version is not None}
            serving = {member: link for member, link in links.items() if link is not None}
            home = self._homes.get(request.conversation) if request.conversation is not None else None
            if home not in serving:
                home = min(serving, key=lambda member: member.load, default=None)
            if home is None:
                self._backlog.append(request)
                return
            if request.conversation is not None:
                self._homes[request.conversation] = home
            home.num_coming += request.num_samples
        # Not under the lock: an engine that reads nothing would keep all others from being asked, and heard.
        inner = serving[home].submit("generate", *request.arguments)
        with self._lock:
            home.num_coming -= request.num_samples
            home.work[inner] = request
            home.mark_idle()
        inner.add_done_callback(lambda done: self._pass_on(home, done))

    def _pass_on(self, member: Member, inner: "Future[Any]") -> None:
        """An engine has answered, refused or died."""
        with self._lock:
            request = member.work.pop(inner, None)
            member.mark_idle()
        if request is None:  # nobody waits for it any more
            return
        error = inner.exception()
        if isinstance(error, EngineDiedError) and not self._is_closed:
            self._dispatch(request)
        elif error is not None:
            request.answer.set_exception(error)
        else:
            request.answer.set_result(member.engine.read(request.prompt, inner.result()))

    def _bury(self, member: Member, error: EngineError) -> None:
        """Start a dead engine again, once; its requests have been handed on."""
        reason = error.line
        with self._lock:
            if self._is_closed:
                return
            self._homes = {key: home for key, home in self._homes.items() if home is not member}
            may_return = isinstance(error, EngineDiedError) and not member.has_died
            member.has_died = True
            if may_return:
                again = "connected to again" if member.engine.config.url else "restarted"
                log.warning("Engine %d is %s: %s", member.number, again, reason)
                try:
                    self._start(member)
                except (EngineError, OSError) as failure:  # this thread has nobody to raise it to
                    may_return, reason = False, f"it cannot be started: {failure}"
                    error = EngineError(reason)
            if not may_return:
                member.is_gone = True
                log.warning("Engine %d stays away: %s", member.number, reason)
                if not self._living():
                    self._give_up(error)
        self._on_change()

    def _give_up(self, error: EngineError) -> None:
        self._failure = EngineError(
            f"No engine is left of {len(self.members)}. The last one: {error.line}", error.details
        )
        self._failure.__cause__ = error
        waiting, self._backlog = self._backlog, deque()
        for request in waiting:
            request.answer.set_exception(self._failure)
