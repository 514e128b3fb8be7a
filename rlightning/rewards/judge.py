"""A language model as a judge: a reward function that calls an OpenAI-compatible API (docs/rewards.md)."""

import asyncio
import hashlib
import inspect
import json
import keyword
import math
import random
import re
import string
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from rlightning.config.argument_checks import CheckedArguments
from rlightning.config.secret_arguments import read_key
from rlightning.errors import ConfigError, check_rules
from rlightning.foreign_text import cut_line, cut_value
from rlightning.rewards.answer_cache import AnswerCache
from rlightning.rewards.event_loop import MAX_CONCURRENT

if TYPE_CHECKING:
    import httpx

SCORE = r"(?i)score[\s:=*_\"'`]*(-?\d+(?:\.\d+)?)(?!\d|[.,]\d)"
"""Default pattern of a score, as in "Score: 7" or "**Score:** 7.5"."""
JUDGED = ("completion", "full_text", "turns")
"""Placeholders for parts of the sample; a rubric needs at least one of them."""
RETRIED_STATUSES = (408, 409, 425, 429)
"""HTTP statuses after which a request is retried, in addition to those from 500 on."""
FIRST_DELAY, LONGEST_DELAY = 1.0, 30.0
"""Seconds before the second attempt, which double with each further one, and their maximum."""


class JudgeError(Exception):
    """The judge could not score a sample, whose reward is then NaN, never 0."""


class _Connection(NamedTuple):
    """The objects shared by calls on one event loop: HTTP client, limit on requests, running requests, cache."""

    client: "httpx.AsyncClient"
    places: asyncio.Semaphore
    asked: "dict[str, asyncio.Future[str]]"
    answers: AnswerCache | None


class Judge(CheckedArguments):
    """A reward function: a language model scores each sample by a rubric; the score is scaled to a reward from 0 to 1.

    A sample that could not be judged, because the API failed or its answer contains no score, has no reward: it is left
    out of its group and counts in ``reward/failed``.

    Args:
        rubric: the message to the judge. Names in braces stand for the runner's arguments (``{prompt}``,
            ``{completion}``, ``{turns}``, ...) and for columns, such as ``{answer}``; ``{{`` is a brace.
        model: the judge's name at the API.
        base_url: URL of the API, such as ``http://127.0.0.1:8000/v1``.
        api_key_variable: environment variable with the API key; None if the API needs none.
        system: a system message.
        pattern: regular expression whose first group, or else whole match, is the score; the last match counts.
        scores: numbers by the words that the pattern matches, in any case; None if it matches numbers.
        lowest: score with a reward of 0.
        highest: score with a reward of 1. A score outside of this range is invalid.
        max_concurrent: maximum number of concurrent requests of each rank.
        request_timeout: maximum seconds for a response of the API.
        max_retries: further attempts after a temporary failure: no connection, a timeout, or the HTTP statuses 408,
            409, 425, 429 and from 500 on.
        cache: file with earlier answers, which are not requested again; runs may share it. None for no file.
        request: additional keys of each request, such as ``{max_tokens: 512}``; null removes a default key.

    Attributes:
        repeat_argument: name of an argument of calls, no name of a rubric's field: if it is true, the API is requested
            even if the cache has the answer, and its answer is not cached.
    """

    repeat_argument = "*repeats"

    def __init__(
        self,
        rubric: str,
        *,
        model: str,
        base_url: str = "https://api.openai.com/v1",
        api_key_variable: str | None = None,
        system: str | None = None,
        pattern: str = SCORE,
        scores: Mapping[str, float] | None = None,
        lowest: float = 0.0,
        highest: float = 10.0,
        max_concurrent: int = 16,
        request_timeout: float = 60.0,
        max_retries: int = 4,
        cache: str | None = None,
        request: Mapping[str, Any] | None = None,
    ) -> None:
        self.rubric, self.system, self.model, self.base_url = rubric, system, model, base_url
        self.api_key_variable, self.pattern, self.lowest, self.highest = api_key_variable, pattern, lowest, highest
        self.scores = None if scores is None else {word.casefold(): float(score) for word, score in scores.items()}
        self.max_concurrent, self.request_timeout, self.max_retries = max_concurrent, request_timeout, max_retries
        self.cache = None if cache is None else Path(cache).expanduser()
        self.request = dict(request or {})
        self.__name__ = "judge"
        self._connections: WeakKeyDictionary[asyncio.AbstractEventLoop, _Connection] = WeakKeyDictionary()

    def check_arguments(self) -> None:
        """Check the arguments before a run starts, and set ``__signature__`` to the fields that the rubric names.

        Raises:
            ConfigError: names the invalid argument.
        """
        is_url, is_time = self.base_url.startswith(("http://", "https://")), 0 < self.request_timeout < math.inf
        is_scale = -math.inf < self.lowest < self.highest < math.inf
        rules = {
            f"Judge: base_url={self.base_url} must begin with http:// or https://": is_url,
            f"Judge: lowest={self.lowest} must be below highest={self.highest}": is_scale,
            f"Judge: max_concurrent={self.max_concurrent} must be at least 1": self.max_concurrent >= 1,
            f"Judge: request_timeout={self.request_timeout} must be a number of seconds above 0": is_time,
            f"Judge: max_retries={self.max_retries} must be at least 0": self.max_retries >= 0,
        }
        check_rules(rules)
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ConfigError(f"Judge: pattern={cut_value(self.pattern)} is no regular expression: {error}.") from error
        self._read_key()
        if self.cache is not None:
            AnswerCache(self.cache).close()  # raises if the file cannot be used
        names = dict.fromkeys(read_fields(self.rubric))
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        self.__signature__ = inspect.Signature(parameters)

    def __getstate__(self) -> dict[str, object]:
        """Return the state of a copy for another process, without connections."""
        return self.__dict__ | {"_connections": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._connections = WeakKeyDictionary()

    @property
    def call_timeout(self) -> float:
        """Maximum seconds of a call, including the time for which it waits for other calls."""
        attempts = (self.max_retries + 1) * self.request_timeout + self.max_retries * LONGEST_DELAY
        return math.ceil(MAX_CONCURRENT / self.max_concurrent) * attempts + 10.0

    async def __call__(self, **given: object) -> float:
        """Score one sample.

        Raises:
            JudgeError: the judge could not score the sample.
        """
        body = self._make_request(given)
        answers = None if given.get(self.repeat_argument) else self._connect().answers
        return self.read(await (self._ask(body) if answers is None else self._ask_once(body, answers)))

    def read(self, answer: str) -> float:
        """Return the reward, from 0 to 1, for the text of the judge's answer.

        Raises:
            JudgeError: the answer has no score.
        """
        score = self.parse(answer)
        if math.isnan(score):
            raise JudgeError(f"the judge's answer has no score from {self.lowest:g} to {self.highest:g}: {answer!r}")
        return (score - self.lowest) / (self.highest - self.lowest)

    def parse(self, answer: str) -> float:
        """Return the score in the judge's answer; NaN if there is none, or it is out of range."""
        matches = list(re.finditer(self.pattern, answer))
        if not matches:
            return math.nan
        last = matches[-1]
        text = (last[1] if last.re.groups else last[0]) or ""
        if self.scores is not None:
            score = self.scores.get(text.strip().casefold(), math.nan)
        else:
            try:
                score = float(text)
            except ValueError:
                return math.nan
        return score if self.lowest <= score <= self.highest else math.nan

    def write(self, given: Mapping[str, object]) -> list[dict[str, str]]:
        """Return a request's chat messages: a system message, if any, and the rubric with values from ``given``."""
        values = dict(given)
        if isinstance(turns := given.get("turns"), list):
            values["turns"] = "\n\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in turns)
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.rubric.format(**values)}]

    def _make_request(self, given: Mapping[str, object]) -> dict[str, object]:
        """Return the body of a request to the judge's API."""
        body = {"model": self.model, "messages": self.write(given), "temperature": 0.0, **self.request}
        return {name: value for name, value in body.items() if value is not None}

    async def _ask_once(self, body: Mapping[str, object], answers: AnswerCache) -> str:
        """Return the API's answer, from the cache or an identical running request if possible."""
        key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        asked = self._connect().asked
        while (equal := asked.get(key)) is not None:
            await asyncio.wait([equal])
            if not equal.cancelled():
                return equal.result()
        kept = answers.read(key)
        if kept is not None and not math.isnan(self.parse(kept)):
            return kept
        asked[key] = future = asyncio.get_running_loop().create_future()
        try:
            answer = await self._ask(body)
            if not math.isnan(self.parse(answer)):
                answers.write(key, answer)
            future.set_result(answer)
        except Exception as error:
            future.set_exception(error)
            future.exception()  # marks it as retrieved, as no caller may be waiting for it
            raise
        finally:
            future.cancel()  # no effect if it is done; otherwise a waiting call requests again
            del asked[key]
        return answer

    async def _ask(self, body: Mapping[str, object]) -> str:
        """Return the API's answer, with retries.

        Raises:
            JudgeError: the API gave no answer.
        """
        import httpx

        connection = self._connect()
        async with connection.places:
            for attempt in range(self.max_retries + 1):
                wait = min(FIRST_DELAY * 2**attempt, LONGEST_DELAY) * random.uniform(0.5, 1.0)
                try:
                    async with asyncio.timeout(self.request_timeout):
                        response = await connection.client.post(self._url, json=body)
                except TimeoutError:
                    problem = f"no answer in {self.request_timeout:g} s"
                except httpx.TransportError as error:
                    problem = cut_line(f"{type(error).__name__}: {error}")
                else:
                    if response.is_success:
                        return read_answer(response.text)
                    problem = f"HTTP {response.status_code}: {cut_line(response.text)}"
                    if response.status_code not in RETRIED_STATUSES and response.status_code < 500:
                        raise JudgeError(f"{self._url} refused the request, {problem}")
                    wait = max(wait, min(_read_seconds(response.headers.get("retry-after")), LONGEST_DELAY))
                if attempt < self.max_retries:
                    await asyncio.sleep(wait)
        raise JudgeError(f"{self._url} gave no answer in {self.max_retries + 1} attempts; the last: {problem}")

    @property
    def _url(self) -> str:
        return f"{self.base_url.rstrip('/')}/chat/completions"

    def _connect(self) -> _Connection:
        """Return the connection of the running event loop."""
        import httpx

        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            key, answers = self._read_key(), None if self.cache is None else AnswerCache(self.cache)
            client = httpx.AsyncClient(
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=None,  # each request has one timeout for all of it
                limits=httpx.Limits(max_connections=self.max_concurrent),
            )
            self._connections[loop] = _Connection(client, asyncio.Semaphore(self.max_concurrent), {}, answers)
        return self._connections[loop]

    def _read_key(self) -> str | None:
        """Read the API's key, and mask it in all later messages.

        Raises:
            ConfigError: the variable is not set.
        """
        name = self.api_key_variable
        return read_key(
            name,
            f"Judge: the environment variable {name}, which api_key_variable names, is not set. Set it to the key: "
            f"export {name}=...",
        )


def read_fields(rubric: str) -> Iterator[str]:
    """Yield the field names in braces of a rubric.

    Raises:
        ConfigError: the rubric is not a valid template, or has no placeholder for the sample.
    """
    way_out = "Write a name, such as {completion}, and {{ and }} for braces."
    try:
        fields = [field for _, *field in string.Formatter().parse(rubric) if field[0] is not None]
    except ValueError as error:
        raise ConfigError(f"Judge: the rubric cannot be read: {error}. {way_out}") from error
    for name, layout, conversion in fields:
        if not name or not name.isidentifier() or keyword.iskeyword(name) or layout or conversion:
            raise ConfigError(f"Judge: the rubric's {{{cut_line(name or '')}}} is no name. {way_out}")
    names = [str(name) for name, _, _ in fields]
    if not set(JUDGED).intersection(names):
        raise ConfigError("Judge: the rubric shows the judge nothing of the sample. Put {completion} into it.")
    yield from names


def read_answer(text: str) -> str:
    """Return the judge's text from an API response, which is a chat completion in JSON.

    Raises:
        JudgeError: the response contains no text, or only a part of it.
    """
    try:
        choice = json.loads(text)["choices"][0]
        answer, reason = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise JudgeError(f"the judge's API answered something else than a chat completion: {cut_value(text)}") from None
    if not isinstance(answer, str) and reason != "length":
        raise JudgeError(f"the judge's answer has no text: {cut_value(answer)}")
    return read_answer_text(answer, reason)


def read_answer_text(answer: str, reason: str | None) -> str:
    """Return the judge's text unchanged; raise a JudgeError if its ``finish_reason`` is "length".

    Raises:
        JudgeError: the text is incomplete.
    """
    if reason == "length":
        raise JudgeError(f"the judge's answer was cut at the limit on its tokens: {cut_value(answer)}")
    return answer


def _read_seconds(header: str | None) -> float:
    """Return the seconds in a Retry-After header; 0 for no header, or a date."""
    return float(header) if header is not None and re.fullmatch(r"\d+(\.\d+)?", header) else 0.0
