"""Environments of OpenEnv servers: by the protocol of openenv-core 0.3.0, and by its own server where that is there."""

import asyncio
import json
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from attempts import PROMPT, CannedPolicy, CannedSampler, make_group, play, run_group
from pages import read_environment, read_section
from waiting import PATIENCE_SECONDS, wait_for

from rlightning.environments.chat_format import ChatFormat
from rlightning.environments.openenv import OpenEnv
from rlightning.errors import ConfigError

websockets = pytest.importorskip("websockets.asyncio.server")


class Server:
    """Counts up to three, in a session each; answers as openenv-core's server does.

    Attributes:
        received: messages.
        most_at_once: sessions at the same time.
    """

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.num_open = self.most_at_once = 0
        self.url = ""

    async def serve(self, connection: Any) -> None:
        self.num_open += 1
        self.most_at_once = max(self.most_at_once, self.num_open)
        number = 0
        try:
            async for text in connection:
                message = json.loads(text)
                self.received.append(message)
                if message["type"] == "close":
                    return
                if message.get("data", {}).get("text") == "leave":
                    return
                if message.get("data", {}).get("text") == "refuse":
                    answer: Any = {"type": "error", "data": {"message": "no such move", "code": "VALIDATION_ERROR"}}
                elif message.get("data", {}).get("text") == "nonsense":
                    answer = ["?"]
                else:
                    number = 0 if message["type"] == "reset" else number + 1
                    observation = {"said": f"count {number}", "board": [number]}
                    reward = None if message["type"] == "reset" else 0.5
                    answer = {"observation": observation, "reward": reward, "done": number == 3}
                    answer = {"type": "observation", "data": answer}
                await connection.send(json.dumps(answer))
        finally:
            self.num_open -= 1

    def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Serve while ``work`` runs."""

        async def serve_and_work() -> None:
            async with websockets.serve(self.serve, "127.0.0.1", 0) as server:
                self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
                await work()
                while self.num_open:
                    await asyncio.sleep(0.01)

        asyncio.run(asyncio.wait_for(serve_and_work(), PATIENCE_SECONDS))


def test_trajectory_is_a_session_of_the_server() -> None:
    server, policy = Server(), CannedPolicy()

    async def work() -> None:
        environment = OpenEnv(
            server.url, "text", action_fields={"kind": "say"}, observation="said", reset_columns=["answer"]
        )
        await environment.check()
        outcome = await environment.run(PROMPT, policy)
        assert outcome.status == "finished" and outcome.turn_rewards == [0.5, 0.5, 0.5] and outcome.reward == 1.5
        short = await OpenEnv(server.url, "text", max_turns=2).run(PROMPT, policy)
        assert short.status == "truncated" and short.reward == 1.0

    server.run(work)
    assert [heard[0]["content"] for heard in policy.heard[:3]] == ["count 0", "count 1", "count 2"]
    assert json.loads(policy.heard[3][0]["content"]) == {"said": "count 0", "board": [0]}
    kinds = [message["type"] for message in server.received]
    assert kinds == ["close", "reset", "step", "step", "step", "close", "reset", "step", "step", "close"]
    assert server.received[1]["data"] == {"seed": PROMPT.index, "answer": PROMPT.columns["answer"]}
    assert server.received[2]["data"].keys() == {"kind", "text"}


def test_sessions_at_once_are_bounded() -> None:
    server = Server()

    class Tokenizer:
        chat_template = None

        def __call__(self, text: str, **settings: Any) -> Any:
            return type("Encoding", (), {"input_ids": [1] * 3})

    async def work() -> None:
        environment = OpenEnv(server.url, "text", max_sessions=2)
        group = make_group(CannedSampler(), PROMPT, 6, chat_format=ChatFormat(Tokenizer()))  # type: ignore[arg-type]
        assert [one.status for one in await run_group(environment, group, PROMPT)] == ["finished"] * 6

    server.run(work)
    assert server.most_at_once == 2


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        ({}, "refuse", r"the server refused step \(VALIDATION_ERROR\): no such move"),
        ({}, "leave", "the server closed the session before it answered step"),
        ({}, "nonsense", "answered step by something else than OpenEnv's messages"),
        ({"observation": "seen"}, "a", "the server's observation has no field 'seen': said, board"),
    ],
)
def test_what_a_server_does_wrong_fails_the_trajectory(arguments: dict[str, Any], text: str, message: str) -> None:
    server = Server()

    async def work() -> None:
        with pytest.raises(RuntimeError, match=message):
            await OpenEnv(server.url, "text", **arguments).run(PROMPT, CannedPolicy(text))

    server.run(work)


def test_bad_input_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"url": "127.0.0.1:8000"}, "url=127.0.0.1:8000 must begin with"),
        ({"max_sessions": 0}, "max_sessions=0 must be at least 1"),
        ({"timeout": 0}, "timeout=0 must be above 0"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ConfigError, match=message):
            OpenEnv(**{"url": "http://127.0.0.1:1", "action": "text"} | arguments)
    with pytest.raises(
        ConfigError, match=r"ws://127\.0\.0\.1:1/ws cannot be reached: .*\. Start the server, or change url"
    ):
        asyncio.run(OpenEnv("http://127.0.0.1:1", "text").check())
    monkeypatch.setitem(sys.modules, "websockets.asyncio.client", None)
    with pytest.raises(ConfigError, match=r"^OpenEnv: .*\. Install it: pip install websockets\.$"):
        asyncio.run(OpenEnv("http://127.0.0.1:1", "text").check())


def test_section_of_the_page_is_understood() -> None:
    environment = read_environment(read_section("environments.md", "Servers of OpenEnv"))
    assert environment["class_path"] == f"{OpenEnv.__module__}.OpenEnv"
    OpenEnv(**environment["init_args"])


def test_server_of_the_package_is_played() -> None:
    # Pinned for CPUs alone, where it comes without gradio, whose bound on Pillow is below the others'.
    pytest.importorskip("openenv")
    uvicorn = pytest.importorskip("uvicorn")
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Say(Action):  # type: ignore[misc]  # untyped
        text: str

    class Heard(Observation):  # type: ignore[misc]  # untyped
        said: str

    class Counter(Environment):  # type: ignore[misc]  # untyped
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **others: Any) -> Heard:
            self.number = 0
            return Heard(said=f"seed {seed}")

        def step(self, action: Say, timeout_s: float | None = None, **others: Any) -> Heard:
            self.number += 1
            return Heard(said=f"heard {action.text}", reward=0.5, done=self.number == 3)

        @property
        def state(self) -> State:
            return State()

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = uvicorn.Config(create_fastapi_app(Counter, Say, Heard), log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    policy = CannedPolicy()
    environment = OpenEnv(f"http://127.0.0.1:{port}", "text", observation="said")
    asyncio.run(environment.check())
    outcome = play(environment, policy)
    assert (outcome.status, outcome.reward) == ("finished", 1.5)
    assert policy.heard[0][0]["content"] == f"seed {PROMPT.index}"
    server.should_exit = True
    thread.join(PATIENCE_SECONDS)
