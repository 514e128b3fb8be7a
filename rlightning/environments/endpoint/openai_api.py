"""OpenAI's routes for chats and completions, and vLLM's route for tokens."""

import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate

from rlightning.environments.endpoint.errors import APIError
from rlightning.environments.endpoint.parameters import RequestParameters, read_parameters
from rlightning.environments.endpoint.session import Session, ToolUse
from rlightning.environments.endpoint.streaming import Answers, Emit, Event, EventWriter, Reply, answer
from rlightning.environments.recorder import RecordedTurn
from rlightning.foreign_text import cut_value
from rlightning.python_values import JsonObject

DONE = (None, "[DONE]")


async def complete_chat(session: Session, body: JsonObject, emit: Emit) -> Reply:
    """Return the policy's next turn as the response to ``/v1/chat/completions``; None if it was streamed.

    ``emit`` gets the events of a stream. Raises an APIError for an invalid request.
    """
    others = ("messages", "tools", "tool_choice")
    asked = read_parameters(
        body, session.policy.sampling, ignored=session.ignored, allowed=session.allowed, others=others
    )
    sample = partial(session.chat, asked, body.get("messages"), read_tools(body, session.ignored))
    return await answer(ChatWriter(session, asked), emit if asked.stream else None, sample)


async def complete_text(session: Session, body: JsonObject, emit: Emit) -> Reply:
    """Return the policy's continuations of a prompt as the response to ``/v1/completions``; None if they were streamed.

    ``emit`` gets the events of a stream. Raises an APIError for an invalid request.
    """
    asked = read_parameters(
        body, session.policy.sampling, ignored=session.ignored, allowed=session.allowed, others=("prompt",)
    )
    sample = partial(session.complete, asked, _read_prompt(body.get("prompt")))
    return await answer(TextWriter(session, asked), emit if asked.stream else None, sample)


async def generate_tokens(session: Session, body: JsonObject, emit: Emit) -> Reply:
    """Return the policy's continuations of token ids as the response to ``/inference/v1/generate``, vLLM's route.

    In the response tokens are named ``token_id:<id>``, as the package renderers parses them. Raises an APIError for an
    invalid request.
    """
    unknown = [name for name in body if name not in ("token_ids", "sampling_params", "model", "stream", "cache_salt")]
    if unknown:
        raise APIError(f"Unknown parameter: '{unknown[0]}'.", param=unknown[0], code="unknown_parameter")
    if body.get("stream"):
        raise APIError("stream=True is not supported here.", param="stream", code="unsupported_parameter")
    parameters = body.get("sampling_params") or {}
    if not isinstance(parameters, Mapping):
        raise APIError("sampling_params has to be an object.", param="sampling_params")
    asked = read_parameters(parameters, session.policy.sampling, ignored=session.ignored, allowed=session.allowed)
    answers = await session.complete(asked, _read_tokens(body.get("token_ids"), "token_ids"))
    choices = [
        {
            "index": index,
            "token_ids": list(turn.sample.token_ids),
            "finish_reason": turn.sample.finish_reason,
            "logprobs": {"content": _token_logprobs(turn, lambda token: f"token_id:{token}")},
        }
        for index, turn in enumerate(answers.turns)
    ]
    return {
        "request_id": secrets.token_hex(12),
        "model": session.model,
        "choices": choices,
        "usage": count_usage(answers),
    }


def list_models(session: Session) -> JsonObject:
    """Return the response to ``/v1/models``: a list of one model, the policy."""
    limit = session.policy.max_length
    one = {"id": session.model, "object": "model", "created": 0, "owned_by": "rlightning", "max_model_len": limit}
    return {"object": "list", "data": [one]}


def read_tools(body: JsonObject, ignored: frozenset[str]) -> ToolUse:
    """Return a request's tools, and whether calls are parsed; with the tool choice "none", calls stay text.

    The chat template gets the tools in any case, without OpenAI's ``strict``, which no model has learned to read.
    Raises an APIError for malformed tools, and for a tool choice other than "auto" and "none".
    """
    choice = None if "tool_choice" in ignored else body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise APIError(
            f"tool_choice={cut_value(choice)} is not supported: what the policy writes is not constrained. Use auto or "
            "none, or add 'tool_choice' to the endpoint's ignored parameters (environment.endpoint.ignored).",
            param="tool_choice",
            code="unsupported_parameter",
        )
    given = body.get("tools") or []
    if not isinstance(given, list) or not all(map(_is_function, given)):
        raise APIError(f"tools={cut_value(given)} has to be a list of functions.", param="tools")
    tools = [{**tool, "function": _without_strict(tool["function"])} for tool in given]
    return ToolUse(tools or None, bool(tools) and choice != "none")


def count_usage(answers: Answers) -> dict[str, int]:
    """Return a request's usage: the numbers of tokens of its prompt and of all its choices."""
    sampled = sum(len(turn.sample.token_ids) for turn in answers.turns)
    num_prompt = answers.num_prompt_tokens
    return {"prompt_tokens": num_prompt, "completion_tokens": sampled, "total_tokens": num_prompt + sampled}


def _without_strict(function: JsonObject) -> JsonObject:
    return {name: value for name, value in function.items() if name != "strict"}


def _is_function(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


class CompletionWriter(EventWriter):
    """Formats sampled turns as a response of OpenAI's completion APIs, whole or as the events of a stream."""

    id_prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, session: Session, asked: RequestParameters) -> None:
        super().__init__()
        self._session, self._asked = session, asked
        name = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self._head = {"id": name, "created": int(time.time()), "model": session.model}

    @abstractmethod
    def _choice(self, turn: RecordedTurn, index: int) -> JsonObject:
        """Return one choice in full."""

    @abstractmethod
    def _end_choice(self, turn: RecordedTurn, index: int) -> Iterator[Event]:
        """Yield the last chunks of a choice's stream."""

    def write(self, answers: Answers) -> JsonObject:
        """Return the whole response in the form of OpenAI's API."""
        choices = [self._choice(turn, index) for index, turn in enumerate(answers.turns)]
        return {**self._head, "object": self.kind, "choices": choices, "usage": count_usage(answers)}

    def end(self, answers: Answers) -> Iterator[Event]:
        """Yield the last events of a streamed response."""
        for index, turn in enumerate(answers.turns):
            yield from self.add(index, turn.message.reasoning or "", turn.message.content)
            yield from self._end_choice(turn, index)
        if self._asked.stream_options.include_usage:
            yield self._chunk(usage=count_usage(answers))
        yield DONE

    def _decode(self, token_id: int) -> str:
        return self._session.policy.chat_format.decode([token_id])

    def _chunk(self, *choices: JsonObject, **fields: object) -> Event:
        return None, {**self._head, "object": self.chunk_kind, "choices": choices, **fields}


class ChatWriter(CompletionWriter):
    """Formats turns as a response of ``/v1/chat/completions``, whole or as stream chunks; a tool call is one chunk.

    The last chunk of a choice has its log-probabilities.
    """

    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def begin(self, num_prompt_tokens: int) -> Iterator[Event]:
        """Yield the first event of each choice, in their order: the SDK looks choices up by their place."""
        for choice in range(self._asked.n):
            yield self._delta(choice, {"role": "assistant", "content": ""})

    def add(self, choice: int, reasoning: str, content: str) -> Iterator[Event]:
        """Yield events for the unsent parts of a choice's texts; ``reasoning`` and ``content`` are the texts so far."""
        new = self._take_new(choice, reasoning, content)
        for name, text in zip(("reasoning_content", "content"), new, strict=True):
            if text:
                yield self._delta(choice, {name: text})

    def _choice(self, turn: RecordedTurn, index: int) -> JsonObject:
        message = turn.message.to_message()
        if "tool_calls" in message:
            message["content"] = message["content"] or None
        logprobs = {"content": _token_logprobs(turn, self._decode)} if self._asked.wants_logprobs else None
        is_call = "tool_calls" in message and turn.sample.finish_reason == "stop"
        reason = "tool_calls" if is_call else turn.sample.finish_reason
        return {"index": index, "message": message, "finish_reason": reason, "logprobs": logprobs}

    def _end_choice(self, turn: RecordedTurn, index: int) -> Iterator[Event]:
        choice = self._choice(turn, index)
        for number, call in enumerate(choice.pop("message").get("tool_calls", ())):
            yield self._delta(index, {"tool_calls": [{"index": number, **call}]})
        yield self._chunk({**choice, "delta": {}})

    def _delta(self, choice: int, delta: JsonObject) -> Event:
        return self._chunk({"index": choice, "delta": delta, "finish_reason": None, "logprobs": None})


class TextWriter(CompletionWriter):
    """Formats sampled turns as a response of ``/v1/completions``, whole or as the events of a stream."""

    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def add(self, choice: int, reasoning: str, content: str) -> Iterator[Event]:
        """Yield events for the unsent part of a choice's text; ``content`` is the text so far."""
        _, text = self._take_new(choice, reasoning, content)
        if text:
            yield self._chunk({"index": choice, "text": text, "finish_reason": None, "logprobs": None})

    def _choice(self, turn: RecordedTurn, index: int) -> JsonObject:
        logprobs = _text_logprobs(turn, self._decode) if self._asked.wants_logprobs else None
        reason = turn.sample.finish_reason
        return {"index": index, "text": turn.message.content, "finish_reason": reason, "logprobs": logprobs}

    def _end_choice(self, turn: RecordedTurn, index: int) -> Iterator[Event]:
        yield self._chunk({**self._choice(turn, index), "text": ""})


def _token_logprobs(turn: RecordedTurn, name: Callable[[int], str]) -> list[JsonObject]:
    pairs = zip(turn.sample.token_ids, turn.sample.logprobs, strict=True)
    names = [(name(token), logprob) for token, logprob in pairs]
    return [
        {"token": one, "logprob": logprob, "bytes": list(one.encode()), "top_logprobs": []} for one, logprob in names
    ]


def _text_logprobs(turn: RecordedTurn, name: Callable[[int], str]) -> JsonObject:
    tokens, logprobs = [name(token) for token in turn.sample.token_ids], list(turn.sample.logprobs)
    starts = list(accumulate(map(len, tokens), initial=0))[:-1]
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": starts}


def _read_prompt(prompt: object) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    return _read_tokens(prompt, "prompt")


def _read_tokens(tokens: object, name: str) -> list[int]:
    if not isinstance(tokens, list) or not all(
        isinstance(t, int) and not isinstance(t, bool) and t >= 0 for t in tokens
    ):
        raise APIError(f"{name}={cut_value(tokens)} has to be one prompt, a text or token ids.", param=name)
    return tokens
