"""Finds the longest recorded conversation that a client's messages continue, or the reason why there is none."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rlightning.environments.endpoint.errors import APIError
from rlightning.environments.messages import Message
from rlightning.environments.recorder import RecordedTurn
from rlightning.foreign_text import cut_value
from rlightning.types.trajectory import BranchReason

THOUGHT = re.compile(r"\s*(?:<think>)?.*?</think>", re.DOTALL)
"""Reasoning at the start of a text that was not parsed into reasoning and content."""
SYSTEM = ("system", "developer")


class Known(NamedTuple):
    """A chat message in a normal form, in which a client's messages are compared with recorded ones.

    The role "developer" becomes "system". Tool calls are JSON, "" for none. Reasoning counts if the client sends it.
    """

    role: str
    text: str
    calls: str
    reasoning: str

    def matches(self, recorded: "Known") -> bool:
        """Return whether this message of a client equals a recorded one."""
        return self[:3] == recorded[:3] and self.reasoning in ("", recorded.reasoning)

    def without_reasoning(self) -> "Known":
        """Return the message without its reasoning, also if its text contains it."""
        return self._replace(text=THOUGHT.sub("", self.text, count=1).strip(), reasoning="")


class Past(NamedTuple):
    """A recorded conversation: its tools as JSON, and its messages, of which the last is the policy's ``turn``."""

    tools: str
    messages: tuple[Known, ...]
    turn: RecordedTurn


class Found(NamedTuple):
    """The result of :meth:`Histories.find`: a recorded conversation, or None to render all messages from scratch.

    The last ``num_new`` messages are not recorded yet. ``reason`` says why a branch begins, if one does.
    """

    past: Past | None
    num_new: int
    reason: BranchReason


class Histories:
    """The recorded conversations of one session."""

    def __init__(self) -> None:
        self._pasts: list[Past] = []
        self._asked: set[int] = set()
        """Hashes of all conversations that requests have continued; whole ones would take far more memory."""

    def find(self, messages: Sequence[Known], tools: str) -> Found:
        """Return the longest recorded conversation that ``messages`` continue, if any, and why a branch begins."""
        own = tuple(messages)
        is_repeated = hash((tools, own)) in self._asked
        fitting = [past for past in self._pasts if past.tools == tools and _begins(own, past.messages)]
        if fitting:
            past = max(fitting, key=lambda one: (len(one.messages), one.turn.end == len(one.turn.branch.token_ids)))
            num_new = len(own) - len(past.messages)
            if num_new and all(message.role != "assistant" for message in own[-num_new:]):
                return Found(past, num_new, "sampled_again" if is_repeated else self._find_fork_reason(own, past))
        known = {message[:3] for past in self._pasts for message in past.messages}
        num_new = next((i for i, message in enumerate(reversed(own)) if message[:3] in known), len(own))
        return Found(None, num_new, "sampled_again" if is_repeated else self._find_reason(own, tools))

    def begin(self, messages: Sequence[Known], tools: str) -> None:
        """Record that a conversation is about to be continued: the next one with the same messages samples it again."""
        self._asked.add(hash((tools, tuple(messages))))

    def add(self, messages: Sequence[Known], tools: str, turn: RecordedTurn) -> None:
        """Record a conversation that ends with a turn of the policy that was just sampled."""
        self._pasts.append(Past(tools, (*messages, read_known(turn.message.to_message())), turn))

    def _find_fork_reason(self, own: tuple[Known, ...], past: Past) -> BranchReason:
        """Return why a branch begins, by comparing a conversation with others that continue the same recorded one."""
        others = [one.messages for one in self._pasts if len(one.messages) > len(past.messages)]
        others = [messages for messages in others if _begins(messages, past.messages)]
        return describe_difference(own, find_closest(own, others)) if others else "sampled_again"

    def _find_reason(self, own: tuple[Known, ...], tools: str) -> BranchReason:
        if not self._pasts:
            return "started_over"
        talk = _without_system(own)
        thoughtless = tuple(message.without_reasoning() for message in talk)
        for past in self._pasts:
            known = _without_system(past.messages)
            if not _begins(thoughtless, tuple(message.without_reasoning() for message in known)):
                continue
            if past.tools != tools:
                return "tools_changed"
            if not _begins(_only_system(own), _only_system(past.messages)):
                return "system_changed"
            if not _begins(talk, known):
                return "reasoning_dropped"
            if not _begins(own, past.messages):  # only the system messages have moved
                return "history_edited"
        same = [past for past in self._pasts if _begins(_without_system(past.messages), talk)]
        if same and all(past.tools != tools for past in same):
            return "tools_changed"
        if same and not any(_begins(past.messages, own) for past in same):
            return "system_changed"
        return describe_difference(talk, find_closest(talk, [_without_system(past.messages) for past in self._pasts]))


def find_closest(own: Sequence[Known], pasts: Sequence[Sequence[Known]]) -> Sequence[Known]:
    """Return the recorded conversation with the longest common prefix; of several, the one with the most messages."""
    keys = {message[:3] for message in own}
    return max(pasts, key=lambda past: (_count_shared(own, past), sum(one[:3] in keys for one in past)))


def describe_difference(own: Sequence[Known], past: Sequence[Known]) -> BranchReason:
    """Return why a branch begins: how a client's conversation ``own`` differs from the recorded one ``past``."""
    start = _count_shared(own, past)
    new, old = [one[:3] for one in own[start:]], [one[:3] for one in past[start:]]
    said = {one[:3] for one in past if one.role == "assistant"}
    if start == 0 and not said.intersection(new):
        return "started_over"
    if not new and not old:
        return "history_edited"
    if not new:  # the new history ends earlier
        return "sampled_again" if old[0][0] == "assistant" else "messages_dropped"
    if not old:  # it has an assistant turn that the policy did not sample
        return "turn_edited"
    if new[0] in old:
        return "messages_dropped"
    found = next(((i, old.index(one)) for i, one in enumerate(new) if one in old), None)
    is_replaced = new[0][0] == old[0][0] if found is None else found[0] == found[1]
    if is_replaced:
        return "turn_edited" if new[0][0] == "assistant" else "message_edited"
    return "compacted" if found is None or found[0] < found[1] else "history_edited"


def read_known(message: Message) -> Known:
    """Return a message in the normal form in which messages are compared; :func:`clean` has to have cleaned it."""
    calls = [
        {"name": call["function"].get("name"), "arguments": _read_arguments(call["function"].get("arguments"))}
        for call in message.get("tool_calls", ())
    ]
    reasoning = str(message.get("reasoning_content", "")).strip()
    text = message["content"].strip()
    return Known(message["role"], text, to_json(calls) if calls else "", reasoning)


def clean(messages: object) -> list[Message]:
    """Return the messages of a request, with only text contents and the fields that chat templates read.

    Results of tools get their tool's name. Raises an APIError for other contents.
    """
    if not isinstance(messages, list) or not messages:
        raise APIError(f"messages={cut_value(messages)} has to be a list of messages.", param="messages")
    cleaned = [_clean(message, f"messages.{place}") for place, message in enumerate(messages)]
    if cleaned[-1]["role"] == "assistant":
        raise APIError(
            "messages: the last message is the assistant's, and a turn of the policy's cannot be continued. End with "
            "another one's.",
            param="messages",
        )
    names: dict[str, str] = {}
    for message in cleaned:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if "id" in call}
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])
    return cleaned


def to_json(value: object) -> str:
    """Return a value as canonical JSON, for comparisons; whole numbers are written as 1, never as 1.0."""
    return json.dumps(_with_whole_numbers(value), sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _with_whole_numbers(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {name: _with_whole_numbers(one) for name, one in value.items()}
    return [_with_whole_numbers(one) for one in value] if isinstance(value, list | tuple) else value


def _clean(message: object, where: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise APIError(f"{where}={cut_value(message)} has to be a message with a role.", param=where)
    role = "system" if message["role"] in SYSTEM else message["role"]
    cleaned: Message = {"role": role, "content": "\n".join(_read_parts(message.get("content"), f"{where}.content"))}
    if message.get("function_call"):
        raise APIError(f"{where}.function_call is not supported. Use tool_calls.", param=f"{where}.function_call")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if role == "assistant" and isinstance(reasoning, str):
        cleaned["reasoning_content"] = reasoning
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            cleaned[name] = message[name]
    if calls := message.get("tool_calls"):
        cleaned["tool_calls"] = [_clean_call(call, f"{where}.tool_calls") for call in calls]
    return cleaned


def _clean_call(call: object, where: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise APIError(f"{where}: {cut_value(call)} is no call of a function.", param=where)
    arguments = _read_arguments(function.get("arguments"))
    if not isinstance(arguments, Mapping):
        raise APIError(f"{where}: the arguments {cut_value(arguments)} are no JSON object.", param=where)
    named = {"name": function["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": str(call.get("id", "")), "type": "function", "function": named}


def _read_parts(content: object, where: str) -> Iterator[str]:
    if content is None:
        return
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type", "part") if isinstance(part, Mapping) else type(part).__name__
            raise APIError(f"{where}: {kind} is not supported; the policy reads text alone.", param=where)
        yield text


def _read_arguments(arguments: object) -> object:
    """Parse the arguments of a tool call; a text that is not JSON stays a text."""
    if isinstance(arguments, str):
        try:
            return json.loads(arguments or "{}")
        except ValueError:
            return arguments
    return {} if arguments is None else arguments


def _count_shared(own: Sequence[Known], past: Sequence[Known]) -> int:
    pairs = enumerate(zip(own, past, strict=False))
    return next((i for i, (one, other) in pairs if not one.matches(other)), min(len(own), len(past)))


def _begins(messages: tuple[Known, ...], past: tuple[Known, ...]) -> bool:
    return len(past) <= len(messages) and all(map(Known.matches, messages, past))


def _only_system(messages: tuple[Known, ...]) -> tuple[Known, ...]:
    return tuple(message for message in messages if message.role == "system")


def _without_system(messages: tuple[Known, ...]) -> tuple[Known, ...]:
    return tuple(message for message in messages if message.role != "system")
