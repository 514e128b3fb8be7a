"""Engines of `rlightning serve`, the project that they are started in, and trainers' connections to them."""

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cli_project import environment
from engine_models import bare_config
from engine_run import Witness, make_data, make_module, make_rollout, make_trainer
from waiting import PATIENCE_SECONDS

from rlightning.hooks import RLCallback
from rlightning.rollout.engine_config import EngineConfig
from rlightning.rollout.engine_connection import ServedEngine
from rlightning.rollout.model_files import ModelFiles
from rlightning.rpc.run_key import RUN_KEY_VARIABLE

RUN_YAML = """\
model:
  class_path: GRPO
  init_args: {model: model, rewards: [own_rewards.ones], prompts_per_step: 4, samples_per_prompt: 2, lr: 0.03}
data: {train: sums.jsonl, max_prompt_tokens: 16}
rollout:
  placement: standalone
  max_new_tokens: 64
  engine: {kv_cache_memory_bytes: 33554432}
trainer: {accelerator: cpu, max_steps: 4, enable_model_summary: false}
"""
OWN_REWARDS = """\
async def ones(completion: str) -> float:
    return completion.count("1") / max(len(completion), 1)
"""


class Server:
    """`rlightning serve` in a session of its own; ready when this returns."""

    def __init__(self, project: Path, token: str = "", port: int = 0, options: tuple[str, ...] = ()) -> None:
        command = [str(Path(sys.executable).with_name("rlightning")), "serve", "--config", "run.yaml", *options]
        self._errors = tempfile.TemporaryFile("a+")  # noqa: SIM115 (closed with it)
        self.process = subprocess.Popen(
            [*command, "--port", str(port)],
            cwd=project,
            env=environment() | ({RUN_KEY_VARIABLE: token} if token else {}),
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"listens at (tcp://127\.0\.0\.1:(\d+))", line)
        assert found, (line, self.errors())
        self.url, self.port = found[1], int(found[2])

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def interrupt(self) -> int:
        """Ctrl-C; its exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(PATIENCE_SECONDS)

    def close(self) -> None:
        if self.process.poll() is None:
            self.interrupt()
        self.process.communicate()
        self._errors.close()


@contextlib.contextmanager
def served(project: Path, token: str = "", port: int = 0, options: tuple[str, ...] = ()) -> Iterator[Server]:
    server = Server(project, token, port, options)
    try:
        yield server
    finally:
        server.close()


def make_config(project: Path, url: str, **kwargs: Any) -> EngineConfig:
    """As a trainer of the project's run has it."""
    usual: dict[str, Any] = {"model": str(project / "model"), "max_model_len": 80, "start_timeout": PATIENCE_SECONDS}
    arguments = usual | kwargs
    engine_args = {name: arguments.pop(name) for name in ("model", "max_model_len")}
    files = ModelFiles.read(engine_args["model"])
    return bare_config(project / "unused.log", engine_args=engine_args, url=url, files=files, **arguments)


@contextlib.contextmanager
def connected(config: EngineConfig) -> Iterator[ServedEngine]:
    link = ServedEngine(config)
    try:
        yield link
    finally:
        link.close()


def fit(project: Path, folder: Path, urls: list[str], *callbacks: Any, max_steps: int = 3, **kwargs: Any) -> Witness:
    """A run whose engines are at ``urls``, verified with every sync."""
    witness = Witness()
    arguments = {"placement": "standalone", "max_staleness": 1, "max_new_tokens": 64}
    rollout = make_rollout(engines=urls, **arguments | kwargs)
    trainer = make_trainer(folder, max_steps, rollout, witness, *callbacks)
    trainer.fit(make_module(str(project / "model")), make_data(folder))
    assert trainer.global_step == max_steps
    return witness


class At(RLCallback):
    """Does something once, in the update of a step."""

    def __init__(self, version: int, strike: Callable[[Any], None]) -> None:
        self.version, self.strike = version, strike

    def on_update_start(self, trainer: Any, module: Any, batch: Any) -> None:
        if module.weight_version == self.version:
            self.strike(module.sampler.engine)
