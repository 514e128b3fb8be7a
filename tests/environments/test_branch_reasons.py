"""Why a branch begins: what a client made of a history that the policy has read."""

from typing import Any

import pytest

from rlightning.environments.endpoint.history import Histories, Known, read_known
from rlightning.environments.messages import AssistantMessage
from rlightning.environments.recorder import Recorder
from rlightning.types import Sample

ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
TALK = "s:be u:one a:1 t:ok a:2 u:two a:3"
"""What the policy has said and read."""


def read(words: str) -> list[Known]:
    """Return messages, each of which is a letter for its role and a text; a third part is the policy's reasoning."""
    parts = [word.split(":") for word in words.split()]
    return [
        read_known({"role": ROLES[role], "content": text, "reasoning_content": "".join(thought)})
        for role, text, *thought in parts
    ]


class Client:
    """Sends conversations of one session; each message is one token."""

    def __init__(self) -> None:
        self.histories, self.recorder = Histories(), Recorder(str)

    def send(self, words: str, said: str, tools: str = "[]") -> str:
        """Have the policy answer, and return the reason of the answer's branch."""
        messages = read(words)
        found = self.histories.find(messages, tools)
        new = [hash(one) for one in messages[len(messages) - found.num_new :]]
        past = [] if found.past is None else list(found.past.turn.token_ids)
        history = [*past, *new] if found.past else [hash((one, tools)) for one in messages]
        content, *thought = said.split(":")
        reply = AssistantMessage(content, "".join(thought))
        sample = Sample([hash(said)], [0.0], [0], content, "stop")
        (turn,) = self.recorder.record(self.recorder.reserve(history, found.reason), [sample], (), [reply])
        self.histories.add(messages, tools, turn)
        return turn.branch.reason

    def talk(self, words: str) -> "Client":
        """Have the policy say its turns of a conversation."""
        parts = words.split()
        for place, part in enumerate(parts):
            if part.startswith("a:"):
                assert self.send(" ".join(parts[:place]), part[2:]) == "start"
        return self


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("s:be u:one a:1 t:ok a:2 u:two a:3 u:more", "start"),
        ("s:be u:one a:1 t:ok a:2 u:two", "sampled_again"),
        ("s:be u:one", "sampled_again"),
        ("s:be u:one a:1 t:ok a:2 u:2", "message_edited"),
        ("s:be u:one a:1 t:ok a:2 u:2 u:more", "message_edited"),
        ("s:be u:one a:1 t:cleared a:2 u:two a:3 u:more", "message_edited"),
        ("s:be u:1 a:1 t:ok a:2 u:two a:3 u:more", "message_edited"),
        ("s:be u:one a:1 t:ok a:2.5 u:two a:3 u:more", "turn_edited"),
        ("s:be u:one a:1 t:ok a:2 u:two a:3 a:4 u:more", "turn_edited"),
        ("s:be u:one a:7 u:more", "turn_edited"),
        ("s:be u:one t:ok a:2 u:two a:3 u:more", "messages_dropped"),
        ("s:be u:two a:3 u:more", "messages_dropped"),
        ("s:be u:one u:summary u:two a:3 u:more", "compacted"),
        ("s:be u:one u:summary", "compacted"),
        ("s:be u:summary a:3 u:more", "compacted"),
        ("s:be u:one u:reminder a:1 t:ok a:2 u:two a:3 u:more", "history_edited"),
        ("s:is u:one a:1 t:ok a:2 u:two a:3 u:more", "system_changed"),
        ("s:is u:one", "system_changed"),
        ("s:be u:other", "started_over"),
        ("u:other a:few t:shot", "started_over"),
        ("u:one a:1 t:ok a:2 u:two a:3 s:be", "history_edited"),
        ("u:one a:1 s:be", "history_edited"),
        ("u:one s:be a:1 t:ok a:2 u:two a:3 u:more", "history_edited"),
    ],
)
def test_a_rewritten_conversation_says_how(words: str, reason: str) -> None:
    assert Client().talk(TALK).send(words, "new") == reason


def test_several_changes_are_named_by_the_widest() -> None:
    talk = "s:be u:one a:1:why u:two a:2:so"
    more = "s:be u:one a:1 u:two a:2 u:more"
    assert Client().talk(talk).send(more, "new") == "start"  # reasoning that a client does not send stays
    other = more.replace("a:1", "a:1:else")
    assert Client().talk(talk).send(other, "new") == "reasoning_dropped"
    assert Client().talk(talk).send(other.replace("s:be", "s:is"), "new") == "system_changed"
    assert Client().talk(talk).send(other.replace("s:be", "s:is"), "new", tools="[1]") == "tools_changed"


def test_the_closest_of_several_histories_is_compared() -> None:
    client = Client().talk(TALK)
    assert client.send("s:be u:other", "9") == "started_over"
    assert client.send("s:be u:other a:9 u:then", "10") == "started_over"  # it goes on
    assert client.send("s:be u:other a:9 u:else", "11") == "message_edited"
    assert client.send("s:be u:other a:9 u:else", "12") == "sampled_again"


def reason_of(known: list[int], num_prompt: int, history: list[int], decode: Any) -> str:
    recorder = Recorder(decode)
    sampled = known[num_prompt:]
    sample = Sample(sampled, [0.0] * len(sampled), [0] * len(sampled), "", "stop")
    recorder.record(recorder.reserve(known[:num_prompt]), [sample])
    return recorder.reserve(history).reason


def test_branch_with_an_empty_sample_has_reasons() -> None:
    assert reason_of([1, 2], 2, [1], str) == "sampled_again"
    assert reason_of([1, 2], 2, [1, 3], str) == reason_of([1, 2], 2, [3], str) == "started_over"


def test_tokens_tell_a_text_that_was_tokenized_anew() -> None:
    texts = {1: "ask ", 2: "hel", 3: "lo", 4: "hello", 5: " more", 6: "howdy"}

    def find(*history: int) -> str:
        return reason_of([1, 2, 3], 1, list(history), lambda tokens: "".join(map(texts.__getitem__, tokens)))

    assert find(1, 2, 3, 5) == "start"
    assert find(1, 4, 5) == find(1, 4) == "retokenized"
    assert find(1) == find(1, 2) == "sampled_again"
    assert find(1, 6) == "history_edited"
    assert find(6) == "started_over"


def test_tokens_are_decoded_from_the_first_difference() -> None:
    decoded: list[list[int]] = []

    def decode(tokens: list[int]) -> str:
        decoded.append(tokens)
        return str(tokens)

    prompt = list(range(3000))
    assert reason_of([*prompt, 1, 2, 3], 3000, [*prompt, 1, 4], decode) == "history_edited"
    assert decoded == [[4], [2, 3]]
    assert reason_of([*prompt, 1, 2, 3], 3000, [*prompt[1:], 1, 2], decode) == "started_over"
    assert len(decoded) == 2
