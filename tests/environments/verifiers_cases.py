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
from chat_templates import make_tokenizer

from rlightning.environments.chat_format import ChatFormat
from rlightning.environments.policy import GroupRequest
from rlightning.environments.recorded_group import RecordedGroup
from rlightning.environments.verifiers import Verifiers
from rlightning.rollout import Sampling
from rlightning.rpc.client import LoopThread
from rlightning.types import Prompt, RolloutBatch, Trajectory

VERSION = "0.4.0"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "rlightning"
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
            install = [str(python), "-m", "pip", "install", "-q", f"verifiers[ta]=={VERSION}", "uv"]
            for command in ([sys.executable, "-m", "venv", str(folder)], install):
                done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
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


def attempt(
    loop: LoopThread,
    environment: Verifiers,
    folder: Path,
    *said: str,
    task: int | dict[str, Any] = 0,
    max_length: int = 16384,
    num_trajectories: int = 1,
    timeout: float | None = 120.0,
    delay: float = 0.0,
    error: Exception | None = None,
    during: Callable[[Verifiers, ScriptedSampler], Any] | None = None,
) -> list[Trajectory]:
    """Attempt a task with a policy that says these texts.

    Args:
        loop: of the environment, whose servers stay.
        during: awaited while the trajectories are made, with the policy's sampler.
    """
    tokenizer = make_tokenizer("qwen3")
    tokenizer.save_pretrained(folder)
    tokenizer.name_or_path = str(folder)
    sampler = ScriptedSampler(tokenizer, *said, end="<|im_end|>", delay=delay)
    sampler.error = error
    prompt = Prompt(0, "", [1], {"task": task})
    request = GroupRequest(prompt, Sampling(max_new_tokens=200, seed=3), num_trajectories)
    group = RecordedGroup(sampler, ChatFormat(tokenizer), request, max_length, timeout)  # type: ignore[arg-type]

    async def run() -> Any:
        await environment.check()
        other = asyncio.ensure_future(during(environment, sampler)) if during is not None else None
        outcomes = await environment.run_group(prompt, group)
        if other is not None:
            await other
        return outcomes

    trajectories = group.finish(loop.run(run(), timeout=300), 0.0)
    RolloutBatch.pack([[one for one in trajectories if one.branches]])
    return trajectories
