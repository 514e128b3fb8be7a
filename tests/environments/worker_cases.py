"""Environments that tests run in workers, also of an interpreter that has nothing but msgpack."""

import asyncio
import os
import signal
import sys
import time
import zlib
from pathlib import Path

from rlightning.environments import AskLimitError, Environment, LimitReachedError, Policy
from rlightning.types.trajectory import AgentTrace, Outcome, Prompt


class NoRoomError(LimitReachedError):
    pass


class Deeds(Environment):
    """Samples a turn, and then does what the prompt says."""

    def __init__(self, folder: str = "") -> None:
        self.folder = Path(folder)
        self.num_running = 0

    async def close(self) -> None:
        (self.folder / f"closed {os.getpid()}").touch()

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        deed = prompt.text
        if deed == "forget":
            return None  # type: ignore[return-value]
        sample = await policy.chat()
        await self.harm_the_worker(deed)
        num_running = 0
        if deed in ("slow", "meet"):
            self.num_running += 1
            num_running = self.num_running
            await (asyncio.sleep(0.5) if deed == "slow" else self.meet(4))
            self.num_running -= 1
        elif deed == "print":
            sys.stdout.write("a line of the environment's\n")
        elif deed == "raise":
            raise ConnectionError("the sandbox is gone")
        elif deed == "sys.exit":
            sys.exit(4)
        elif deed == "no room":
            raise NoRoomError("no turn is left")
        elif deed == "until the limit":
            while True:
                await policy.sample(list(sample.token_ids))
        elif deed == "catch the limit":
            try:
                await policy.chat({"role": "user", "content": "more"})
            except LimitReachedError as error:
                return Outcome(status="truncated", error=str(error))
        elif deed == "ask too much":
            try:
                await policy.ask({"role": "user", "content": "more"})
            except AskLimitError as error:
                return Outcome(error=str(error))
        elif deed in ("hold", "ask forever"):
            (self.folder / f"{deed} {os.getpid()}").touch()
            try:
                await (policy.chat({"role": "user", "content": "go on"}) if "ask" in deed else asyncio.sleep(3600))
            finally:
                await asyncio.sleep(0.05)
                (self.folder / f"cleaned up {deed}").touch()
        heavy = [name for name in ("torch", "numpy", "ray", "vllm", "transformers") if name in sys.modules]
        return Outcome(
            reward=float(sample.logprobs[0]),
            turn_rewards=[1.0],
            metrics={
                **{"pid": os.getpid(), "heavy": len(heavy), "num_running": num_running},
                "version": sys.version_info.minor,
                "received": zlib.crc32(f"{sample.text} {prompt.columns}".encode(errors="surrogatepass")),
            },
            traces=[AgentTrace("me", 0.5, [0])],
        )

    async def meet(self, number: int) -> None:
        """Return when so many have begun that do this, and as many for each that number of earlier ones."""
        earlier = len(list(self.folder.glob("met *")))
        (self.folder / f"met {os.getpid()} {time.monotonic_ns()}").touch()
        while len(list(self.folder.glob("met *"))) < number * (earlier // number + 1):
            await asyncio.sleep(0.01)

    async def harm_the_worker(self, deed: str) -> None:
        """Do what costs the process, or what it must be ended for."""
        if deed == "exit":
            (self.folder / f"exit {os.getpid()}").touch()
            os._exit(3)
        elif deed == "exit once" and not list(self.folder.glob("exit once *")):
            (self.folder / f"exit once {os.getpid()}").touch()
            while not list(self.folder.glob("hold once *")):
                await asyncio.sleep(0.01)
            os._exit(3)
        elif deed == "hold once" and not list(self.folder.glob("hold once *")):
            (self.folder / f"hold once {os.getpid()}").touch()
            await asyncio.sleep(3600)
        elif deed == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif deed == "block":
            time.sleep(3600)
        elif deed == "take memory":
            self.taken = bytes(b"x" * 400_000_000)
            await asyncio.sleep(3600)
        elif deed == "flood":
            while True:
                sys.stdout.write("x" * 10_000 + "\n")
                await asyncio.sleep(0)
        elif deed == "flood and block":
            while True:
                os.write(1, b"x" * 10_000)


class NeedsRoom(Environment):
    """Cannot be made without its argument, nor run without room."""

    def __init__(self, rooms: int) -> None:
        self.rooms = rooms

    async def check(self) -> None:
        if self.rooms < 1:
            raise OSError("no room is free")


class Other:
    pass
