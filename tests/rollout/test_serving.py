"""Engines that `rlightning serve` has started: real servers on loopback, and trainers that come by URL."""

import contextlib
import json
import logging
import os
import pickle
import re
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import Actor
from engine_run import Witness, in_session, make_data, make_module, make_rollout, make_trainer, save_model
from served_engines import OWN_REWARDS, RUN_YAML, At, Server, connected, fit, make_config, served
from waiting import PATIENCE_SECONDS, wait_for

from rlightning import intervals, rpc
from rlightning.__main__ import main
from rlightning.errors import EngineDiedError, EngineError, RequestRefusedError
from rlightning.models import Adapter
from rlightning.processes.liveness import Deadline
from rlightning.rollout import Sampling, engine_connection
from rlightning.rollout.engine import vllm_sampling
from rlightning.rollout.engine_connection import ServedEngine
from rlightning.rollout.weights.shared_memory import SharedMemorySender
from rlightning.rollout.weights.source import plan_source
from rlightning.rpc.peer import Peer
from rlightning.rpc.run_key import RUN_KEY_VARIABLE


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    save_model(folder / "model")
    (folder / "run.yaml").write_text(RUN_YAML)
    (folder / "own_rewards.py").write_text(OWN_REWARDS)
    (folder / "sums.jsonl").write_text("".join(json.dumps({"prompt": f"{a}+1="}) + "\n" for a in range(8)))
    return folder


@pytest.fixture(scope="module")
def server(project: Path, starts_processes: None) -> Iterator[Server]:
    with served(project) as server:
        yield server


@pytest.fixture(autouse=True)
def tries_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "RECONNECT_INTERVAL", 0.1)


# Who is there


@pytest.mark.processes
def test_the_command_refuses_what_it_cannot_do(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ("--config", "run.yaml", "--port", "0")
    wrong = {
        ("--host", "0.0.0.0"): rf"--host=0\.0\.0\.0 is no loopback address.*{RUN_KEY_VARIABLE}",
        ("--port", "many"): "--port many must be a number from 0 to 65535",
        ("--port",): "--port: its value is missing",
        ("--config", "run.yaml", "--prot", "1"): "prot: there is no such key",
        (*run, "--data.max_prompt_tokens", "null", "--rollout.max_new_tokens", "256"): (
            "max_new_tokens=256 leaves a model of 256 positions no room for a prompt"
        ),
        ("--config", "run.yaml", "--rollout.engine.max_num_sqs", "1"): "max_num_sqs",
        (*run, "--rollout", "TransformersRollout"): "rollout: TransformersRollout has no engine to serve",
        (*run, "--rollout", "null"): "rollout: null has no engine to serve",
        (*run, "--rollout.engine.num_gpu_blocks_override", "1"): "override=1 must be at least 2",
    }
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    monkeypatch.delenv(RUN_KEY_VARIABLE, raising=False)

    def errors_of(*options: str) -> str:
        assert main(["serve", *options]) == 2
        output, errors = capsys.readouterr()
        assert output == ""
        return errors

    for options, message in wrong.items():
        errors = errors_of(*options)
        assert re.fullmatch(rf"error: .*{message}.*\n", errors), errors
    with socket.create_server(("127.0.0.1", 0)) as listener:
        errors = errors_of("--config", "run.yaml", "--port", str(listener.getsockname()[1]))
    assert re.fullmatch(r"error: .*nothing can listen there.*\n", errors), errors
    errors = errors_of(*run, "--rollout.engine.kv_cache_memory_bytes", str(1 << 50))
    rule = r"error: The engine could not start: ValueError: Available memory .* \(Its log is .*\.log\)"
    assert re.fullmatch(rule, errors.splitlines()[-1]), errors
    assert main(["serve", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: rlightning serve")


# One trainer after the other


@pytest.mark.parametrize("has_folder", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["broadcast", "folder"])
def test_a_run_by_url(project: Path, server: Server, tmp_path: Path, has_folder: bool) -> None:
    folder = tmp_path / "weights" if has_folder else None
    witness = fit(project, tmp_path, [server.url], weight_folder=folder and str(folder))
    assert [event for event in witness.events if "sync" in event] == [f"sync {version}" for version in range(4)]
    for step, batch in enumerate(witness.batches):
        assert batch.num_sequences == 8
        versions = batch.weight_versions[batch.is_sampled].unique().tolist()
        assert versions and set(versions) <= {step - 1, step}
    assert folder is None or list(folder.iterdir()) == []


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_with_an_adapter_by_url(project: Path, tmp_path: Path) -> None:
    """It goes to the served engine by itself, which is shown to apply it."""
    witness, module = Witness(), make_module(str(project / "model"), adapter=Adapter(rank=4), lr=0.1)
    proven: list[bool] = []
    note = At(1, lambda engine: proven.append(engine.is_proven))
    with served(project, options=("--model.adapter.rank", "4")) as server:
        rollout = make_rollout(engines=[server.url], placement="standalone")
        make_trainer(tmp_path, 2, rollout, witness, note).fit(module, make_data(tmp_path))
    assert module.sends_adapter and proven == [True]
    assert [step["policy/rollout_gap_max"] < 1e-4 for step in witness.steps] == [True] * 2


def test_idle_connections_do_not_keep_a_trainer_out(project: Path, server: Server) -> None:
    descriptors = len(os.listdir(f"/proc/{server.process.pid}/fd"))
    before = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (descriptors + 20, before[1]))
    try:
        others = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
        with connected(make_config(project, server.url)) as link:
            assert link.ready.result(PATIENCE_SECONDS)["max_model_len"] == 80
            assert len(os.listdir(f"/proc/{server.process.pid}/fd")) <= descriptors + 20
        for other in others:
            other.close()
    finally:
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def over_when_busy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the deadline for a connection be over once the engine has refused it because it serves another trainer."""
    refused = threading.Event()

    class UntilRefused(Deadline):
        @property
        def is_over(self) -> bool:
            return refused.is_set()

    async def connect(*arguments: Any, **options: Any) -> Peer:
        try:
            return await rpc.connect(*arguments, **options)
        except rpc.BusyError:
            refused.set()
            raise

    with monkeypatch.context() as patch:
        patch.setattr(engine_connection, "Deadline", UntilRefused)
        patch.setattr(engine_connection, "connect", connect)
        yield


def test_disconnected_trainer_leaves_no_state_for_next(
    project: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(project, server.url)
    sampling = vllm_sampling(Sampling(max_new_tokens=60), num_samples=8, end_token_ids=())

    def ask(engine: ServedEngine, method: str, *arguments: Any) -> Any:
        return engine.submit(method, *arguments).result(PATIENCE_SECONDS)

    actor = Actor(config.engine_args["model"])
    sender = SharedMemorySender(plan_source(actor, config.dtype, 50_000), torch.device("cpu"))

    def pause(engine: ServedEngine) -> None:
        """Send the first chunk of an update; what it holds is the engine's affair."""
        ask(engine, "open_weight_receivers", [pickle.dumps(sender.make_receivers([""])[0])])
        next(sender.fill(actor))
        ask(engine, "receive_weights", 0)

    with connected(config) as first:
        pause(first)
        ask(first, "finish_weight_update", 0, False)
        with pytest.raises(RequestRefusedError, match=r"refused a request: .*\nTraceback"):
            ask(first, "generate", [1], {"no such": "parameter"})
        answers = [first.submit("generate", [1, 2, 3], sampling) for _ in range(200)]
        answers[0].result(PATIENCE_SECONDS)
        for answer in answers[100:]:
            answer.cancel()
        pause(first)
        answers.append(first.submit("generate", [1, 2, 3], sampling))  # held back
        message = "could not be reached for 300 s: it serves another trainer"
        with pytest.raises(EngineError, match=message), over_when_busy(monkeypatch), connected(config) as second:
            second.ready.result(PATIENCE_SECONDS)
    assert not wait(answers, PATIENCE_SECONDS).not_done
    assert isinstance(answers[-1].exception(), EngineDiedError)
    with connected(config) as third:
        pause(third)  # it was paused
        ask(third, "finish_weight_update", 2, False)
        [sample] = ask(third, "generate", [1, 2, 3], sampling | {"n": 1})
        assert sample["weight_versions"].tolist() == [2] * 60
    sender.close()


def test_an_engine_of_another_run_is_refused(project: Path, server: Server) -> None:
    other = save_model(project / "deeper", num_hidden_layers=3)
    config = make_config(project, server.url, model=other, max_model_len=81)
    with connected(config) as link:
        message = r"num_hidden_layers 2, not 3; .*; max_model_len 80, not 81 or more\."
        with pytest.raises(EngineError, match=message) as caught:
            link.ready.result(PATIENCE_SECONDS)
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.processes
def test_unauthenticated_data_is_never_unpickled(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(project, token="the secret") as server:
        config = make_config(project, server.url)
        for token, message in ((None, "asks for a key"), ("a guess", "another key")):
            monkeypatch.setenv(RUN_KEY_VARIABLE, token) if token else monkeypatch.delenv(
                RUN_KEY_VARIABLE, raising=False
            )
            with connected(config) as link, pytest.raises(EngineError, match=message):
                link.ready.result(PATIENCE_SECONDS)
        mark = tmp_path / "was here"
        with socket.create_connection(("127.0.0.1", server.port)) as end:
            end.settimeout(PATIENCE_SECONDS)
            end.sendall(pickle.dumps(_Touch(mark)).ljust(4096))
            with contextlib.suppress(ConnectionError):
                while end.recv(4096):
                    pass
        monkeypatch.setenv(RUN_KEY_VARIABLE, "the secret")
        with connected(config) as link:
            link.submit("ping").result(PATIENCE_SECONDS)
            pid = link.pid
        assert not mark.exists()
        assert server.interrupt() == 130
        assert server.errors().splitlines()[-1] == "interrupted"
        assert in_session(pid) == []
        wait_for(lambda: not in_session(server.process.pid))  # the tests' own fork server dies a moment later


class _Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


# Deaths


@pytest.mark.slow
def test_an_engine_that_never_answers_is_left_out(
    project: Path, server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        # The server that answers has as many seconds for that, on a busy machine.
        witness = fit(project, tmp_path, [url, server.url], start_timeout=20.0)
    assert len(witness.steps) == 3
    assert (
        f"Engine 0 is not restarted: The engine at {url} could not be reached for 20 s: it did not answer for"
        in caplog.text
    )


@pytest.mark.slow
@pytest.mark.long
def test_a_run_whose_only_engine_never_answers_ends(project: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(
            EngineError, match=r"^The engine at .* could not be reached for 1 s: it did not answer for .*\."
        ):
            fit(project, tmp_path, [url], start_timeout=1.0)


def test_run_continues_after_one_server_is_killed(
    project: Path, server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with served(project) as other:
        pids = []

        def kill(engine: Any) -> None:
            pids.append(engine.process.pid)
            other.process.kill()
            other.process.wait()

        witness = fit(project, tmp_path, [other.url, server.url], At(1, kill), max_steps=4, start_timeout=60.0)
        assert len(witness.steps) == 4
    assert (
        f"Engine 0 is connected to again, once in this step: The engine at {other.url} closed the connection"
        in caplog.text
    )
    wait_for(lambda: in_session(pids[0]) == [])  # the engine does not outlive its server


@pytest.mark.slow
def test_dead_served_engine_restarts_without_its_models_folder(
    project: Path, server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed: list[int] = []

    def kill(engine: Any) -> None:
        model.rename(moved)
        killed.append(engine.process.pid)
        os.kill(killed[0], signal.SIGKILL)

    model, moved = project / "model", project / "moved"
    try:
        witness = fit(project, tmp_path, [server.url], At(1, kill))
    finally:
        moved.rename(model)
    assert "The model's folder 'model' is gone." in server.errors()
    assert len(witness.steps) == 3
    assert f"is connected to again, once in this step: {server.url}: The engine died (SIGKILL)" in caplog.text
    wait_for(lambda: in_session(killed[0]) == [])


@pytest.mark.slow
def test_hung_server_is_detected_and_may_reconnect(
    project: Path, server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def go_on() -> None:
        wait_for(lambda: "gave no heartbeat for 1 s" in caplog.text)
        os.kill(server.process.pid, signal.SIGCONT)

    def stop(engine: Any) -> None:
        os.kill(server.process.pid, signal.SIGSTOP)
        engine.process.config = replace(engine.process.config, hang_timeout=1.0)  # only this life is to seem to hang
        threading.Thread(target=go_on, daemon=True).start()

    witness = fit(project, tmp_path, [server.url], At(1, stop))
    assert len(witness.steps) == 3
    assert "gave no heartbeat for 1 s" in caplog.text
