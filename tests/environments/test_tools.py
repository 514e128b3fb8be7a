"""Tools: the policy calls Python functions, and reads what they return."""

import asyncio
import errno
import re
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.error import HTTPError, URLError

import httpx
import pytest
import tool_cases
from attempts import END, answers, attempt, say, write_call
from chat_templates import make_tokenizer
from test_chat_format import get_tokenizer
from waiting import PATIENCE_SECONDS

from rlightning.environments import Environment, Tools, WorkerEnvironment
from rlightning.environments.chat_format import ChatFormat
from rlightning.environments.runner import EnvironmentRunner
from rlightning.errors import ConfigError
from rlightning.rollout import Sampling
from rlightning.types import Prompt, Trajectory

PROMPT = Prompt(3, "", [5, 6], {"prompt": "What is 2+2?", "answer": "4"})


def play(environment: Environment, *texts: str, **settings: Any) -> Trajectory:
    usual: dict[str, Any] = {"sampling": Sampling(max_new_tokens=200), "max_length": 4000}
    (trajectory,) = attempt(environment, say(*texts), PROMPT, **usual | settings)
    return trajectory


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    tool_cases.RAN.clear()


def test_a_call_is_answered_and_the_answer_read() -> None:
    trajectory = play(Tools(["tool_cases.add"]), f"So:\n{write_call('add', a=2, b=2)}", "It is 4")
    assert [turn.message["role"] for turn in trajectory.turns] == ["assistant", "tool", "assistant"]
    assert trajectory.turns[0].message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2, "b": 2}'}
    assert trajectory.turns[1].message == {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "4"}
    assert trajectory.final_text == "It is 4" and trajectory.status == "finished"
    assert trajectory.metrics == {"turns": 2.0, "tool_calls": 1.0, "tool_failures": 0.0}
    assert trajectory.reward is None  # reward functions see the last turn
    assert tool_cases.RAN == [("add", False)]  # in a thread
    (branch,) = trajectory.branches
    tokenizer = make_tokenizer("qwen2.5")
    text = tokenizer.decode(branch.token_ids)
    assert '"name": "add", "description": "Add two numbers."' in text and text.count("# Tools") == 1
    assert text.endswith(
        f"<|im_start|>assistant\nSo:\n{write_call('add', a=2, b=2)}{END}\n<|im_start|>user\n<tool_response>\n4\n"
        f"</tool_response>{END}\n<|im_start|>assistant\nIt is 4{END}"
    )
    sampled = [token for token, is_own in zip(branch.token_ids, branch.is_sampled, strict=True) if is_own]
    assert sampled == [token for sample in trajectory.samples for token in sample.token_ids]


def test_calls_run_at_once_answered_in_order() -> None:
    are_there, has_second_ended = threading.Barrier(2), threading.Event()

    def meet(number: int) -> str:
        """Return when both calls have begun, the first one after the second."""
        are_there.wait(PATIENCE_SECONDS)
        if number == 1:
            has_second_ended.wait(PATIENCE_SECONDS)
        has_second_ended.set()
        return f"met {number}"

    both = f"{write_call('meet', number=1)}\n{write_call('meet', number=2)}\n{write_call('greet', name='Ä')}"
    trajectory = play(Tools([meet, tool_cases.greet]), both, "done")
    assert answers(trajectory) == ["met 1", "met 2", '{"greeting": "Hi Ä"}']


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<tool_call>{add}</tool_call>", "Error: A tool call is no JSON (Expecting property name"),
        ('<tool_call>{"name": "add", "arguments": {"a"', "Error: A tool call has no end."),
        (write_call("ad", a=1), "Error: There is no tool ad. Did you mean 'add'?"),
        (write_call("add", b=1), "Error: The argument a is missing."),
        (write_call("add", a=1, c=1), "Error: There is no argument 'c': it takes a, b."),
        (write_call("add", a="1"), "Error: a is '1', and has to be of type integer."),
        (write_call("greet", name="x", style="odd"), "Error: style is 'odd', and has to be one of ['short', 'long']."),
        (write_call("fail", kind="value"), "Error: ValueError: no value"),
        (write_call("fail", kind="nothing"), "Error: KeyError: 'nothing'"),
        (write_call("fail", kind="exit"), "Error: RuntimeError: the environment raised SystemExit: no exit"),
        (write_call("nap", seconds=30), "Error: nap took more than 0.3 s."),
    ],
)
@pytest.mark.long
def test_failure_of_a_call_is_its_answer(text: str, answer: str) -> None:
    names = ("add", "greet", "fail", "nap")
    timeout = 0.3 if "nap" in text else PATIENCE_SECONDS
    environment = Tools([f"tool_cases.{name}" for name in names], tool_timeout=timeout)
    trajectory = play(environment, text, "sorry")
    (found,) = answers(trajectory)
    assert found.startswith(answer)
    assert (trajectory.status, trajectory.metrics["tool_failures"]) == ("finished", 1.0)


async def leave() -> str:
    """Exit."""
    raise SystemExit("bye")


async def interrupt() -> str:
    """Interrupt."""
    raise KeyboardInterrupt


def test_async_tools_that_exit_end_no_event_loop() -> None:
    trajectory = play(Tools([leave, interrupt]), f"{write_call('leave')}\n{write_call('interrupt')}", "sorry")
    raised = "Error: RuntimeError: the environment raised "
    assert answers(trajectory) == [f"{raised}SystemExit: bye", f"{raised}KeyboardInterrupt"]


def test_a_broken_tool_fails_the_trajectory() -> None:
    environment = Tools([tool_cases.fail, tool_cases.nap])
    trajectory = play(environment, f"{write_call('fail', kind='connection')}\n{write_call('nap', seconds=0.1)}")
    assert (trajectory.status, trajectory.error) == ("failed", "ConnectionError: no connection")


REQUEST = httpx.Request("GET", "http://x")


class ConnectError(Exception):
    """As of httpx."""


class StatusError(Exception):
    """As the OpenAI SDK's errors have it, without the response."""

    status_code = 503


def look(kind: str) -> str:
    """Ask a server, which cannot be reached, or has no such page."""
    try:
        errors: dict[str, Exception] = {
            "name": socket.gaierror("no name"),
            "url": URLError("refused"),
            "page": HTTPError("http://x", 404, "no page", None, None),  # type: ignore[arg-type]
            "library": ConnectError("refused"),
            "answer": httpx.ReadTimeout("late"),
            "server": HTTPError("http://x", 503, "overloaded", None, None),  # type: ignore[arg-type]
            "status": httpx.HTTPStatusError("bad", request=REQUEST, response=httpx.Response(502)),
            "own status": StatusError(),
            "scheme": httpx.UnsupportedProtocol("no scheme"),
            "disk": OSError(errno.ENOSPC, "no space"),
            "import": ModuleNotFoundError("no module"),
            "time": TimeoutError("late"),
            "caught": ConnectionError("lost"),
        }
        raise errors[kind]
    except ConnectionError:
        raise ValueError("nothing found")  # noqa: B904


@pytest.mark.parametrize(
    ("kind", "broken_by", "status"),
    [
        ("name", (), "failed"),
        ("url", (), "failed"),
        ("library", (), "failed"),
        ("answer", (), "failed"),
        ("server", (), "failed"),
        ("status", (), "failed"),
        ("own status", (), "failed"),
        ("scheme", (), "finished"),
        ("disk", (), "failed"),
        ("import", (), "finished"),
        ("caught", (), "failed"),
        ("page", (), "finished"),
        ("time", (), "finished"),
        ("time", ["builtins.TimeoutError"], "failed"),
        ("page", [HTTPError], "failed"),
    ],
)
def test_lost_connections_are_no_fault_of_the_policy(kind: str, broken_by: Sequence[Any], status: str) -> None:
    environment = Tools([look], broken_by=broken_by)
    assert play(environment, write_call("look", kind=kind), "none").status == status


def test_tools_that_seem_defective_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    calls = "\n".join([write_call("look", kind="import")] * 2)
    assert answers(play(Tools([look]), calls, "none")) == ["Error: ModuleNotFoundError: no module"] * 2
    (said,) = [record.getMessage() for record in caplog.records if "look" in record.getMessage()]
    assert said == "The tool look raised ModuleNotFoundError: no module, which the policy reads."


class Opens:
    """Has a resource of the event loop's, and a tool that is not async."""

    def __init__(self) -> None:
        self.page = asyncio.get_running_loop().create_future()
        self.page.set_result("page")

    async def get(self) -> str:
        """Get the page."""
        return str(await self.page)

    def repeat(self, count: int, words: list[int | str]) -> str:
        """Repeat words."""
        return f"{words}" * count


def test_async_objects_are_made_on_the_loop() -> None:
    calls = [write_call("get"), write_call("repeat", count=2.0, words=[1.0, "a"])]
    assert answers(play(Tools([Opens]), "\n".join(calls), "done")) == ["page", "[1, 'a'][1, 'a']"]


def test_answers_are_in_the_order_of_the_calls() -> None:
    bad = "<tool_call>{add}</tool_call>"
    turn = f"{bad}{write_call('add', a=1)}{bad}{bad}{write_call('add', a=2)}{bad}"
    found = answers(play(Tools([tool_cases.add]), turn, "done"))
    assert ["Error" if one.startswith("Error: A tool call is no JSON") else one for one in found] == [
        *("Error", "1", "Error", "Error", "2", "Error")
    ]


def test_results_are_cut_and_written_as_json() -> None:
    environment = Tools([tool_cases.shout, tool_cases.odd], max_result_characters=100)
    calls = f"{write_call('shout', count=1000)}\n{write_call('shout', count=3)}\n{write_call('odd', keys=1)}"
    long, half, odd = answers(play(environment, calls, "done"))
    assert "[... 941 characters left out ...]" in long and len(long) <= 100
    assert half == "\\ud800AA" and odd == "{(1, 2): 1, 'self': Ellipsis}"


def lives() -> list[tuple[str, int]]:
    """Of counters; functions of an earlier test may still be on their way."""
    return [event for event in tool_cases.RAN if event[0] in ("made", "closed")]


def test_state_is_a_trajectorys_own_and_always_closed() -> None:
    environment = Tools([tool_cases.Counter])
    script = (f"{write_call('increase', by=2)}\n{write_call('increase', by=3, name='x')}", write_call("read"), "9")
    assert answers(play(environment, *script)) == ["6", "9", "9"]
    assert answers(play(environment, *script)) == ["6", "9", "9"]
    failing = Tools([tool_cases.Counter, tool_cases.fail])
    assert play(failing, write_call("fail", kind="connection")).status == "failed"
    assert lives() == [("made", 4), ("closed", 9)] * 2 + [("made", 4), ("closed", 4)]


def test_limits_truncate() -> None:
    turn = write_call("add", a=1)
    trajectory = play(Tools([tool_cases.add], max_turns=2), turn, turn)
    num_calls = [event[0] for event in tool_cases.RAN].count("add")
    assert (trajectory.status, trajectory.metrics["turns"], num_calls) == ("truncated", 2.0, 1)
    bad = write_call("ad")
    trajectory = play(Tools([tool_cases.add], max_failures=1), bad, bad, bad)
    assert (trajectory.status, trajectory.metrics["tool_failures"]) == ("truncated", 2.0)
    length = len(ChatFormat(make_tokenizer("qwen2.5")).render([{"role": "user", "content": "What is 2+2?"}])) + 400
    trajectory = play(Tools([tool_cases.add], max_turns=99), *[turn] * 99, max_length=length)
    assert trajectory.status == "truncated" and 1 <= trajectory.metrics["turns"] < 99
    with pytest.raises(ValueError, match="max_turns=0 must be at least 1"):
        Tools(["tool_cases.add"], max_turns=0)


@pytest.mark.parametrize(
    ("tools", "broken_by", "message"),
    [
        ([], (), r"^Tools: tools=\[\] must name at least one function or class\.$"),
        ("my_tools.add", (), r"^Tools: tools='my_tools\.add' must be a list\. Write \['my_tools\.add'\]\.$"),
        (tool_cases.add, (), r"^Tools: tools=add must be a list\. Write \[add\]\.$"),
        ([tool_cases.add], "builtins.TimeoutError", r"^Tools: broken_by='builtins\.TimeoutError' must be a list\."),
    ],
)
def test_single_item_in_place_of_a_list_is_refused(tools: Any, broken_by: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Tools(tools, broken_by=broken_by)


def test_prompt_without_room_for_the_tools_fails() -> None:
    trajectory = play(Tools([tool_cases.add]), "", max_length=20)
    assert trajectory.status == "failed" and "the policy cannot begin" in str(trajectory.error)


@pytest.mark.parametrize(
    ("names", "line"),
    [
        ("ad", r": 'tool_cases' has no class or function 'ad'\. Did you mean 'add'"),
        ("no_hint", r": the parameter 'a' of 'no_hint' has no type hint\. Write one, such as a: str"),
        ("no_words", r": 'no_words' has no docstring\. Write what it does"),
        ("odd_hint", r": the parameter 'a' of 'odd_hint' has the type <class 'complex'>, which JSON"),
        ("lost_hint", r": the type hints of 'lost_hint' cannot be read: name 'Nowhere'"),
        ("star", r": 'star' has the parameter '\*numbers: int'\. Give each argument a name"),
        ("add Adder", r": there is another tool .* name 'add'"),
        ("Empty", r": the class has no public methods"),
        ("Needy", r": the class needs the argument 'path'\."),
        ("NUMBER", r" is a int, and no function or class\."),
    ],
)
def test_tools_that_cannot_be_described_are_refused(names: str, line: str) -> None:
    tools = [f"tool_cases.{name}" for name in names.split()]
    with pytest.raises(ConfigError, match=rf"^Tools: tools={re.escape(tools[-1])}{line}") as caught:
        asyncio.run(Tools(tools).check())
    assert "\n" not in str(caught.value)


def test_missing_module_of_tools_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^Tools: tools=nowhere\.add cannot be imported by .*No module named 'nowhere'"
    ):
        asyncio.run(Tools(["nowhere.add"]).check())


def test_model_without_tools_is_refused_before_the_run() -> None:
    tokenizer = make_tokenizer("qwen2.5")
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"^The model's chat template writes tool calls in no form that is known"):
        play(Tools([tool_cases.add]), "", chat_format=ChatFormat(get_tokenizer("gemma3")))
    sampler: Any = say()
    runner = EnvironmentRunner(sampler, tokenizer, Tools([tool_cases.add]), max_length=100)
    try:
        with pytest.raises(ConfigError, match=r"^Tools need a chat template, and the model's tokenizer has none\."):
            runner.check()
    finally:
        runner.close()


def test_tools_stay_the_same_in_a_trajectory() -> None:
    class Changes(Environment):
        async def run(self, prompt: Prompt, policy: Any) -> Any:
            await policy.chat(tools=[])
            await policy.chat({"role": "user", "content": "on"}, tools=[{"type": "function"}])

    trajectory = play(Changes(), "a", "b")
    assert trajectory.status == "failed" and "stay the same" in str(trajectory.error)


@pytest.mark.processes
def test_workers_make_the_same_trajectories() -> None:
    script = (
        f"{write_call('increase', by=2)}\n<tool_call>x</tool_call>\n{write_call('add', a=1)}",
        write_call("ad"),
        "6",
    )
    tools = ["tool_cases.Counter", "tool_cases.add"]
    here = play(Tools(tools), *script)
    there = play(WorkerEnvironment("rlightning.environments.Tools", {"tools": tools, "max_turns": 4}), *script)
    here, there = (replace(one, timings={}) for one in (here, there))
    assert here == there and here.metrics["tool_failures"] == 2.0
    with pytest.raises(ConfigError, match="'no_words' has no docstring"):
        play(WorkerEnvironment("rlightning.environments.Tools", {"tools": ["tool_cases.no_words"]}), "")
