"""An interpreter with verifiers, made once and kept, and attempts in it."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest
from agent_cases import ScriptedSampler
from attempts import make_group, run_group, say
from waiting import PATIENCE_SECONDS

from rlightning.environments.verifiers import Verifiers
from rlightning.rollout import Sampling
from rlightning.rpc.client import LoopThread
from rlightning.types import Prompt, Trajectory

VERSION = "0.4.0"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "rlightning"
CONSTRAINTS = Path(__file__).with_name("verifiers_constraints.txt")
INSTALL_SECONDS = 900
WORDS = "apple banana cherry lemon melon orange peach plum"


def make_interpreter() -> str:
    """The path of a Python with verifiers; the test is skipped where there can be none."""
    folder = CACHE / f"verifiers-{VERSION}-{sys.version_info.major}.{sys.version_info.minor}"
    python, is_made = folder / "bin" / "python", folder / "is_made"
    CACHE.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{folder}.lock"):
        if not is_made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            pip = [str(python), "-m", "pip", "install", "-q", "--no-compile", "-c", str(CONSTRAINTS)]
            # What servers import is compiled once; pip would compile all, which takes as long as the installation.
            compiling = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
            for command in (
                [sys.executable, "-m", "venv", str(folder)],
                [*pip, f"verifiers[ta]=={VERSION}", "uv"],
                [str(python), "-c", "import verifiers.v1.serve"],
            ):
                done = subprocess.run(
                    command, env=compiling, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
                )
                if done.returncode:
                    pytest.skip(f"verifiers {VERSION} cannot be installed here: {done.stderr.strip()[-500:]}")
            is_made.touch()
    return str(python)


def write_words(folder: Path) -> dict[str, str]:
    """Write the words that textarena's Hangman takes from NLTK; the variables that name them."""
    words = folder / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("README", "en", "en-basic"):
        (words / name).write_text(WORDS.replace(" ", "\n") + "\n")
    return {"NLTK_DATA": str(folder)}


def attempt_task(
    loop: LoopThread,
    environment: Verifiers,
    folder: Path,
    *said: str,
    task: int | dict[str, Any] = 0,
    number: int = 1,
    delay: float = 0.0,
    error: Exception | None = None,
    during: Callable[[Verifiers, ScriptedSampler], Any] | None = None,
    **settings: Any,
) -> list[Trajectory]:
    """Attempt a task with a policy that says these texts.

    Args:
        loop: of the environment, whose servers stay.
        during: awaited while the trajectories are made, with the policy's sampler.
    """
    sampler = say(*said, family="qwen3", error=error)
    sampler.delay = delay
    sampler.tokenizer.save_pretrained(folder)
    sampler.tokenizer.name_or_path = str(folder)
    prompt = Prompt(0, "", [1], {"task": task})
    sampling = Sampling(max_new_tokens=200, seed=3)
    limits: dict[str, Any] = {"sampling": sampling, "max_length": 16384, "timeout": PATIENCE_SECONDS}
    group = make_group(sampler, prompt, number, **limits | settings)

    async def run() -> list[Trajectory]:
        await environment.check()
        other = asyncio.ensure_future(during(environment, sampler)) if during is not None else None
        trajectories = await run_group(environment, group, prompt)
        if other is not None:
            await other
        return trajectories

    return loop.run(run(), timeout=500)
