"""A task set for verifiers, which is imported in verifiers' interpreter, and a harness that starts no process."""

# mypy: disable-error-code="misc, untyped-decorator, arg-type"

import asyncio
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from waiting import put_clock_forward

__all__ = ["LoopHarness", "NumberTaskset"]


class NumberData(vf.TaskData):
    """A task.

    Attributes:
        what: the harness does after its first turn.
        file: that it writes after that turn, if it then takes longer than there is.
        seconds: that go by at once on the server's clock after that.
    """

    answer: str
    what: str = ""
    file: str = ""
    seconds: float = 0.0


class NumberTask(vf.Task[NumberData]):
    @vf.reward(weight=2.0)
    async def said(self, trace: Any) -> float:
        if self.data.what == "broken":
            raise RuntimeError("the scorer's service is down")
        return float(self.data.answer in trace.last_reply)


class NumberTaskset(vf.Taskset[NumberTask, vf.TasksetConfig]):
    def load(self) -> list[NumberTask]:
        ways = ("", "again", "fork", "broken", "slow", "long")
        return [NumberTask(NumberData(prompt="Say 7.", answer="7", what=what), self.config.task) for what in ways]


class LoopConfig(vf.HarnessConfig):
    pass


class LoopHarness(vf.Harness[LoopConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False
    SUPPORTS_RESUME = True

    async def launch(self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, urls: Any, data: Any) -> Any:
        _, prompt = self.resolve_prompt(data)
        first = [{"role": "user", "content": str(prompt)}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=300) as client:

            async def ask(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                return [*messages, {"role": "assistant", "content": reply.choices[0].message.content}]

            said = await ask(first)
            what = getattr(data, "what", "")
            if what == "slow":
                if data.file:
                    Path(data.file).touch()
                put_clock_forward(asyncio.get_running_loop(), data.seconds)
                await asyncio.sleep(600)
            if what == "again":
                await ask([*said, {"role": "user", "content": "Again."}])
            if what == "fork":
                for follow in ("Again.", "Once more."):
                    await ask([*said, {"role": "user", "content": follow}])
            if what == "long":
                try:
                    await ask([*said, {"role": "user", "content": "Again. " * 2000}])
                except Exception as error:
                    if "maximum context length" not in str(error):
                        raise
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
