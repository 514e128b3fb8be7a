"""The session of one trajectory at the endpoint: it samples the turns that clients request, and records them."""

import asyncio
import json
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rlightning.environments.endpoint.errors import APIError, reading
from rlightning.environments.endpoint.history import Found, Histories, Known, clean, read_known, to_json
from rlightning.environments.endpoint.parameters import RESPONSE_FORMAT, RequestParameters, to_sampling
from rlightning.environments.endpoint.streaming import Answers, Reply, TurnStream
from rlightning.environments.environment import LimitReachedError
from rlightning.environments.messages import AssistantMessage, Message
from rlightning.environments.partial_message import PartialMessage, TokenText
from rlightning.environments.policy import RecordedPolicy
from rlightning.environments.recorder import RecordedTurn
from rlightning.errors import RequestRefusedError, StreamLostError
from rlightning.rollout.detokenize import CONTEXT_TOKENS, decode_tokens
from rlightning.types.trajectory import BranchReason, Sample


class ToolUse(NamedTuple):
    """The tool schemas of a request, None without tools, and whether the policy's calls are parsed or stay text."""

    schemas: list[Message] | None
    are_called: bool


class Session:
    """Answers one trajectory's requests by sampling from the policy, and records the turns.

    The arguments are those of :class:`Endpoint`.

    Attributes:
        id: public part of the key.
        key: key with which clients authenticate.
        model: the policy's name on the hub, or the name of the folder that it was loaded from.
        responses: the messages up to and including each response of ``/v1/responses``, by the response's id.
        failure: error after which no request can be answered.
        num_abandoned: number of requests whose client disconnected before the response.
        num_refused: number of requests that were refused as invalid or unsupported.
    """

    def __init__(
        self,
        policy: RecordedPolicy,
        *,
        keeps_reasoning: bool,
        ignored: frozenset[str],
        allowed: frozenset[str] = frozenset(),
    ) -> None:
        self.id = secrets.token_hex(8)
        self.key = f"sk-{self.id}-{secrets.token_urlsafe(24)}"
        self.policy, self.ignored, self.allowed = policy, ignored, allowed
        self.model = name_model(policy)
        self.failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.requests: set[asyncio.Task[Reply]] = set()
        self.num_abandoned = self.num_refused = 0
        self.responses: dict[str, list[Message]] = {}
        self._keeps_reasoning = keeps_reasoning
        self._histories = Histories()
        self._texts: list[tuple[str, RecordedTurn, Sequence[str]]] = []

    @property
    def has_reached_limit(self) -> bool:
        """Whether the session has sampled turns, and the last request's sequence had reached the maximum length."""
        return self.policy.has_reached_limit and bool(self.policy.recorder.branches)

    def fail(self, error: Exception) -> None:
        """End the session with an error; its trajectory fails with the same error."""
        if not self.failure.done():
            self.failure.set_result(error)

    def close(self) -> None:
        """Cancel the session's running requests."""
        for request in self.requests:
            request.cancel()

    async def chat(
        self, asked: RequestParameters, messages: object, tool_use: ToolUse, stream: TurnStream | None = None
    ) -> Answers:
        """Sample the policy's next turn of a conversation, once for each requested choice, and return the turns.

        Raises an APIError if the messages cannot be rendered.

        Tokens are added to ``stream``, if given; the caller has to end it.
        """
        tools = tool_use.schemas
        known, tools_key, reason, new, history = self._prepare(messages, tools)
        self._histories.begin(known, tools_key)
        number, read_tools = self.policy.num_requested, tools if tool_use.are_called else None

        def read(sample: Sample) -> AssistantMessage:
            return self._read(sample, history, read_tools, asked.stops, number)

        begin = partial(self.policy.chat_format.begin_message, read_tools, prompt_ids=history, stops=asked.stops)
        answers = await self._sample(asked, history, read, begin, stream, reason=reason, observations=new)
        for turn in answers.turns:
            self._histories.add(known, tools_key, turn)
        return answers

    def count_tokens(self, messages: object, tool_use: ToolUse) -> int:
        """Return the number of tokens after which :meth:`chat` would sample. Nothing is recorded.

        Raises an APIError if the messages cannot be rendered.
        """
        *_, history = self._prepare(messages, tool_use.schemas)
        return len(history)

    def _prepare(
        self, messages: object, tools: Sequence[Message] | None
    ) -> tuple[list[Known], str, BranchReason, list[Message], list[int]]:
        """Compare the messages of a request with those recorded, and render them.

        Returns:
            The messages in the form in which they are compared, the tools as JSON, why a branch begins if one does, the
            messages that are not recorded yet, and the token ids [L] that the policy continues.
        """
        with reading("messages"):
            cleaned = clean(messages)
            known, tools_key = [read_known(message) for message in cleaned], to_json(tools or [])
            found = self._without_dropped_reasoning(self._histories.find(known, tools_key), cleaned, tools)
            new = cleaned[len(cleaned) - found.num_new :]
            return known, tools_key, found.reason, new, self._render(found, cleaned, new, tools)

    async def complete(
        self, asked: RequestParameters, prompt: str | list[int], stream: TurnStream | None = None
    ) -> Answers:
        """Sample continuations of a text or of token ids, one for each requested choice, and return them.

        A text that extends an earlier text reuses the earlier tokens.
        """
        with reading("prompt"):
            history = self._tokenize(prompt) if isinstance(prompt, str) else prompt
        if not history:
            raise APIError("prompt: the prompt has no token.", param="prompt")

        def read(sample: Sample) -> AssistantMessage:
            return AssistantMessage(cut_at_stops(sample.text, asked.stops))

        answers = await self._sample(asked, history, read, partial(self._begin_text, history, asked.stops), stream)
        if isinstance(prompt, str):
            self._texts += [(prompt + turn.message.content, turn, asked.stops) for turn in answers.turns]
        return answers

    def _begin_text(self, history: list[int], stops: Sequence[str]) -> PartialMessage:
        text = TokenText(partial(decode_tokens, self.policy.chat_format.tokenizer), history[-CONTEXT_TOKENS:])
        return PartialMessage(text, reads_thought=False, stops=stops)

    def _tokenize(self, text: str) -> list[int]:
        tokenizer = self.policy.chat_format.tokenizer
        seen = [one for one in self._texts if one[1].message.content and text.startswith(one[0])]
        if not seen:
            token_ids: list[int] = tokenizer(text).input_ids
            return token_ids
        known, turn, stops = max(seen, key=lambda one: len(one[0]))
        # The string that ended the turn was sampled; a client that continues the text writes the string itself.
        sampled, rest = turn.sample.text[len(turn.message.content) :], text[len(known) :]
        ended = next((stop for stop in stops if sampled.startswith(stop) and rest.startswith(stop)), "")
        added = tokenizer(rest.removeprefix(ended), add_special_tokens=False).input_ids
        return [*turn.token_ids, *added]

    async def _sample(
        self,
        asked: RequestParameters,
        history: list[int],
        read: Callable[[Sample], AssistantMessage],
        begin: Callable[[], PartialMessage | None],
        stream: TurnStream | None,
        *,
        reason: BranchReason | None = None,
        observations: Sequence[Message] = (),
    ) -> Answers:
        """Sample the turns that a request asks for, after a history of token ids [L].

        Args:
            begin: returns the partial message of a turn that is about to be sampled.
            reason, observations: see :meth:`RecordedPolicy.sample_turns`.
        """
        if stream is not None:
            stream.expect([begin() for _ in range(asked.n)], len(history))

        def finish(sample: Sample) -> AssistantMessage:
            message = read(sample)
            return message if stream is None else stream.finish(message)

        policy = self.policy
        sampling = to_sampling(asked, policy.sampling, policy.stream, policy.temperature)
        if sampling.json_schema is not None:
            check_schema_is_followed(policy, self.allowed)
        before, policy.temperature = policy.temperature, sampling.temperature
        try:
            turns = await policy.sample_turns(
                history,
                sampling,
                num_samples=asked.n,
                reason=reason,
                observations=observations,
                read=finish,
                on_tokens=None if stream is None else stream.add_tokens,
            )
        except LimitReachedError:
            if not policy.recorder.branches and len(self.requests) <= 1:
                policy.temperature = before  # nothing was sampled: the temperature is not yet fixed
            raise
        except RequestRefusedError as error:
            if sampling.json_schema is None or isinstance(error, StreamLostError):
                raise
            raise APIError(
                f"response_format: the engine does not take the schema ({error.line}).", param="response_format"
            ) from error
        return Answers(turns, len(history))

    def _without_dropped_reasoning(
        self, found: Found, messages: list[Message], tools: Sequence[Message] | None
    ) -> Found:
        """Return ``found`` without its recorded conversation if the chat template has dropped reasoning from it."""
        if self._keeps_reasoning or found.past is None:
            return found
        thoughts = [message.reasoning for message in found.past.messages if message.reasoning]
        if not thoughts:
            return found
        text = self.policy.chat_format.render_text(messages, tools)
        if all(thought in text for thought in thoughts):
            return found
        return Found(None, found.num_new, "reasoning_dropped")

    def _render(
        self, found: Found, messages: list[Message], new: list[Message], tools: Sequence[Message] | None
    ) -> list[int]:
        chat_format = self.policy.chat_format
        if tools:
            chat_format.check_tools()
        if found.past is None:
            if self.policy.recorder.branches:
                return chat_format.render(messages, tools)
            return list(chat_format.render_json(json.dumps([messages, tools])))
        turn = found.past.turn
        ended = turn.sample.finish_reason == "stop"
        added = chat_format.render_observations(new, sampled=turn.sample.token_ids, ended=ended)
        return [*turn.token_ids, *added]

    def _read(
        self, sample: Sample, history: list[int], tools: Sequence[Message] | None, stops: Sequence[str], number: int
    ) -> AssistantMessage:
        """Parse a turn into the client's message: malformed tool calls stay text, stop strings are removed."""
        parse = self.policy.chat_format.parse
        message = parse(sample.token_ids, tools, prompt_ids=history, turn=number)
        if message.errors:
            message = parse(sample.token_ids, None, prompt_ids=history, turn=number)
        return message._replace(content=cut_at_stops(message.content, stops))


def check_schema_is_followed(policy: RecordedPolicy, allowed: frozenset[str]) -> None:
    """Raise an APIError if the sampler does not support JSON schemas, or the endpoint does not allow them."""
    if RESPONSE_FORMAT in allowed and policy.follows_schemas:
        return
    reason = ": what samples from the policy has no structured output. vLLM's engine has."
    if RESPONSE_FORMAT not in allowed:
        reason = (
            " by default: it leaves out tokens that training counts on. Leave it out, add 'response_format' to the "
            "endpoint's ignored parameters (environment.endpoint.ignored), or to those that it honours all the same "
            "(environment.endpoint.allowed)."
        )
    text = f"response_format other than text is not supported{reason}"
    raise APIError(text, param=RESPONSE_FORMAT, code="unsupported_parameter")


def name_model(policy: RecordedPolicy) -> str:
    """Return the name that API requests use for the policy."""
    name = policy.chat_format.tokenizer.name_or_path or "policy"
    return Path(name).name if Path(name).is_dir() else name


def cut_at_stops(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first of the stop strings."""
    return text[: min((place for place in map(text.find, stops) if place >= 0), default=len(text))]
