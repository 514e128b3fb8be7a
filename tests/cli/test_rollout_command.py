"""`rlightning rollout`: trajectories in a real environment by a real tiny model, by vLLM, and by any server."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from completions_server import CompletionsServer
from tiny import save_byte_model

from rlightning.__main__ import main
from rlightning.cli.rollout_cli import PrintGroups
from rlightning.types import Prompt, Sample, Trajectory

ENVIRONMENT = """\
import asyncio

from waiting import put_clock_forward

from rlightning.environments import Environment
from rlightning.types import Outcome

ended = []


class Deeds(Environment):
    async def run(self, prompt, policy):
        deed = prompt.columns["deed"]
        if deed == "hang":
            await policy.chat()
            while len(ended) < 4:  # of the other rows
                await asyncio.sleep(0.01)
            put_clock_forward(asyncio.get_running_loop(), 1000.0)
            await asyncio.sleep(600)
        try:
            return await self.do(deed, policy)
        finally:
            ended.append(deed)

    async def do(self, deed, policy):
        await policy.chat()
        await asyncio.sleep(0.05)
        if deed == "fail":
            raise ConnectionError("the sandbox is gone")
        if deed == "rewrite":
            await policy.sample([1, 2, 3])
        await policy.chat({"role": "user", "content": "more\\x1b"})
        return Outcome(reward=0.5, turn_rewards=[0.2, 0.3], metrics={"calls": 2.0})


def needs_more(completion: str, deed: str) -> float:
    if deed == "unscored":
        raise ValueError("no score")
    return 1.0
"""
CONFIG = """\
model: {class_path: GRPO, init_args: {model: model, rewards: [own_deeds.needs_more]}}
environment: own_deeds.Deeds
rollout: {class_path: TransformersRollout, init_args: {max_new_tokens: 4, trajectory_timeout: 1000, seed: 1}}
data: {train: deeds.jsonl, max_prompt_tokens: 64}
trainer: {accelerator: cpu, max_steps: 1, default_root_dir: run}
"""
DEEDS = ["go on", "rewrite", "unscored", "fail", "hang"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_byte_model(tmp_path / "model", max_position_embeddings=256)
    (tmp_path / "own_deeds.py").write_text(ENVIRONMENT)
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "deeds.jsonl").write_text("".join(json.dumps({"prompt": f"{d}?", "deed": d}) + "\n" for d in DEEDS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("logging.raiseExceptions", False)
    monkeypatch.delitem(sys.modules, "own_deeds", raising=False)
    return tmp_path


@pytest.fixture
def server() -> Iterator[CompletionsServer]:
    with CompletionsServer.serving() as server:
        yield server


def rollout(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    """The exit code, and what stdout and stderr say."""
    try:
        code = main(["rollout", "--config", "run.yaml", *options])
    except SystemExit as stop:
        code = int(stop.code or 0)
    output = capsys.readouterr()
    return code, output.out, output.err


def test_groups_are_printed_in_order_once_ended() -> None:
    prompts = [Prompt(index, "", [1], {}) for index in (4, 2, 7)]
    groups = [[Trajectory.single_turn(prompt, Sample([1], [0.0], [0], "a", "stop"))] for prompt in prompts]
    printed: list[int] = []
    printer = PrintGroups(lambda trajectories: printed.append(trajectories[0].prompt.index))
    trainer: Any = SimpleNamespace(datamodule=SimpleNamespace(predict_prompts=prompts))
    printer.on_predict_start(trainer, None)
    printer.on_predict_prompt_end(trainer, None, prompts[1], groups[1])
    assert printed == []
    printer.on_predict_prompt_end(trainer, None, prompts[0], groups[0])
    assert printed == [4, 2]
    printer.on_predict_batch_end(trainer, None, list(zip(prompts, groups, strict=True)), None, 0)
    assert printed == [4, 2, 7]


@pytest.mark.processes
def test_trajectories_are_printed_turn_by_turn(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, errors = rollout(capsys, "--num", "5")
    blocks = dict(zip(DEEDS, re.split(r"(?m)^(?=== row)", text)[1:], strict=True))
    first = blocks["go on"]
    assert first.startswith("== row 0: ") and "reward 1.5 (needs_more 1, environment 0.5)\n" in first
    assert re.search(r"\n  2 turns, \d tokens sampled, [\d.]+ s \(engine [\d.]+ s, environment [\d.]+ s\)\n", first)
    labels = re.findall(r"(?m)^  \[(.*)\]$", first)
    assert labels[0] == "prompt" and labels[2] == "user" and len(labels) == 4
    assert re.fullmatch(r"assistant \(\d tokens, (stop|length)\) reward 0\.2", labels[1])
    assert "    more\\x1b\n" in first and "\x1b" not in text and "calls 2\n" in first
    assert "-- a branch begins: started_over" in blocks["rewrite"] and "a branch" not in first
    assert "a reward function failed (needs_more none, environment 0.5)" in blocks["unscored"]
    assert "failed (would not be trained on), no reward" in blocks["fail"]
    assert "ConnectionError: the sandbox is gone" in blocks["fail"]
    assert "timeout (would not be trained on)" in blocks["hang"]
    assert code == 1
    line = "error: 2 of 5 trajectories would not be trained on; the first, of row 3, is failed: ConnectionError"
    assert errors.splitlines()[-1].startswith(line)
    assert not list(project.rglob("*.ckpt")) and not list(project.rglob("predictions.jsonl"))


@pytest.mark.processes
def test_json_has_a_line_a_trajectory(
    project: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="rlightning")
    code, text, errors = rollout(capsys, "--num=4", "--samples", "2", "--json")
    assert code == 0, errors
    assert "layout  1 rank on CPU" in caplog.text and "writes  " not in caplog.text and not (project / "run").exists()
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["row"] for row in rows] == [0, 0, 1, 1]
    for row in rows:
        assert row["reward"] == 1.5 and row["scores"] == {"needs_more": 1.0} and row["columns"]["deed"] in DEEDS
        assert row["timings"]["environment"] >= 0.05
        assert sum(row["timings"][name] for name in ("engine", "environment")) == pytest.approx(
            row["timings"]["trajectory"]
        )
        assert row["turns"][-2] == {"role": "user", "content": "more\x1b"}
        assert row["columns"]["prompt"] in row["beginning"]
    assert [branch["reason"] for branch in rows[2]["branches"]] == ["start", "started_over"]
    assert rows[0]["turns"] != rows[1]["turns"]
    code, text, errors = rollout(capsys, "--num", "3", "--json")
    assert code == 1 and json.loads(text.splitlines()[2])["reward"] is None
    assert errors.splitlines()[-1].startswith("error: 1 of 3 trajectories have no reward, as a reward function failed")


@pytest.mark.processes
def test_bad_input_is_one_line(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {
        ("--num", "0"): "--num 0 must be a number from 1 on. Use 8.",
        ("--num", "3", "--samples", "2"): "--num 3 must be a multiple of --samples 2.",
        ("--json=yes",): "--json takes no value. Write --json alone.",
        ("--endpoint-model", "x"): "--endpoint-model and --endpoint-key-variable are of a server. Name it by",
        ("--endpoint", "localhost"): "--endpoint localhost is no address. Write one such as",
        ("--endpoint", "http://127.0.0.1:1"): "--endpoint http://127.0.0.1:1/v1: [Errno 111] Connection refused. Is an",
        ("--endpoint", "http://127.0.0.1:1", "--endpoint-key-variable", "NO_KEY"): "--endpoint-key-variable NO_KEY:",
        ("--environment", "own_deeds.Deds"): "environment: there is no 'Deds' in 'own_deeds'. Did you mean",
        ("--data.train", "null"): "data.train and data.predict are not set: there are no prompts.",
        ("--rollout.max_new_tokns", "3"): "rollout.max_new_tokns: there is no such key.",
        ("--rollout", "null", "--environment", "null"): "rollout: null samples nothing.",
        (
            *("--rollout", "VLLMRollout", "--rollout.max_new_tokens", "4"),
            *("--rollout.engine", "{tensor_parallel_size: 2}"),
        ): "rollout.engine.tensor_parallel_size=2 takes the devices of 2 ranks, and this command has one. Add",
        ("--model.rewards", "[rlightning.rewards.exact_match]"): "Reward 'exact_match' needs the column 'answer'",
    }
    for options, message in wrong.items():
        code, text, errors = rollout(capsys, *options)
        assert code == 2 and not text, errors
        assert errors.splitlines()[-1].startswith(f"error: {message}"), errors


@pytest.mark.processes
def test_server_samples_in_place_of_an_engine(
    project: Path, capsys: pytest.CaptureFixture[str], server: CompletionsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", "sk-of-the-server")
    (project / "model" / "model.safetensors").unlink()  # nothing loads the model
    command = ("--num", "2", "--json", "--endpoint", server.url, "--endpoint-key-variable", "SERVER_KEY")
    server.token_ids = [3, 4, 5, 0]
    code, text, errors = rollout(capsys, *command)
    assert code == 0, errors
    rows = [json.loads(line) for line in text.splitlines()]
    assert [turn.get("num_tokens") for turn in rows[0]["turns"]] == [4, None, 4]
    assert set(server.keys) == {"Bearer sk-of-the-server"}
    body = server.requests[0]
    assert body["model"] == "served" and body["max_tokens"] == 4 and body["return_token_ids"] is True
    assert len(body["prompt"]) > 4 and all(isinstance(token, int) for token in body["prompt"])
    server.token_ids, server.refused = None, "return_token_ids"
    code, text, errors = rollout(capsys, *command)
    assert code == 0 and json.loads(text.splitlines()[0])["turns"][0]["content"] == "hi"
    assert json.loads(text.splitlines()[0])["turns"][0]["num_tokens"] == 2


@pytest.mark.processes
def test_what_a_server_cannot_do_is_said(
    project: Path, capsys: pytest.CaptureFixture[str], server: CompletionsServer
) -> None:
    command = ("--num", "1", "--endpoint", server.url)
    for models, message in (([], "no --endpoint-model is named. It has: none."), ([{"id": "a"}, {"id": "b"}], "a, b.")):
        server.models = models
        code, _, errors = rollout(capsys, *command)
        assert code == 2 and errors.splitlines()[-1].endswith(message), errors
    code, _, errors = rollout(capsys, *command, "--endpoint-model", "c")
    assert code == 2 and "it has no model 'c'. It has: a, b." in errors
    server.models, server.status = [{"id": "a", "max_model_len": 16}], 404
    code, _, errors = rollout(capsys, *command)
    assert code == 2 and "but the engine takes 16 tokens" in errors
    server.models = [{"id": "a"}]
    code, _, errors = rollout(capsys, *command)
    assert code == 1 and f"error: {server.url}/v1/completions cannot be used, HTTP 404" in errors
    server.status = 400
    code, text, errors = rollout(capsys, *command)
    assert code == 1 and "1 of 1 trajectories would not be trained on" in errors and "HTTP 400" in text


@pytest.fixture(scope="module")
def vllm_server(tmp_path_factory: pytest.TempPathFactory, starts_processes: None) -> Iterator[str]:
    """vLLM's own server of the model."""
    pytest.importorskip("vllm")
    model = save_byte_model(tmp_path_factory.mktemp("served"), max_position_embeddings=256)
    place = socket.socket()  # keeps the port from others: the server alone binds it again, and listens
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    place.bind(("127.0.0.1", 0))
    port = place.getsockname()[1]
    arguments = ["--model", model, "--port", str(port), "--host", "127.0.0.1", "--enforce-eager", "--dtype", "float32"]
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
    scratch = tempfile.mkdtemp(dir="/tmp")  # of a short name: vLLM's sockets are in it, and stay
    variables |= {"TMPDIR": scratch, "VLLM_RPC_BASE_PATH": scratch}
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments],
        env={**os.environ, **variables, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}/v1"
        while True:
            assert process.poll() is None, "the server has ended"
            try:
                httpx.get(f"{url}/models").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.5)
        yield url
        assert any(path.is_socket() for path in Path(scratch).iterdir()), "its sockets are elsewhere"
    finally:
        process.terminate()
        process.wait()
        place.close()
        shutil.rmtree(scratch)


@pytest.mark.slow
def test_vllm_server_gives_exact_samples(
    project: Path, capsys: pytest.CaptureFixture[str], vllm_server: str, caplog: pytest.LogCaptureFixture
) -> None:
    code, text, errors = rollout(capsys, "--num", "2", "--json", "--endpoint", vllm_server)
    assert code == 0, errors
    assert "returns no token ids" not in errors + caplog.text
    rows = [json.loads(line) for line in text.splitlines()]
    turns: list[dict[str, Any]] = [turn for row in rows for turn in row["turns"] if turn["role"] == "assistant"]
    assert len(turns) == 5 and all(1 <= turn["num_tokens"] <= 4 for turn in turns)


AGENT = """\
async def agent(client, prompt):
    messages = [{"role": "user", "content": prompt.columns["prompt"]}]
    first = await client.chat.completions.create(model="any", messages=messages)
    messages += [first.choices[0].message, {"role": "user", "content": "more"}]
    stream = await client.chat.completions.create(model="any", messages=messages, stream=True)
    return 0.25 * len([chunk async for chunk in stream if chunk.choices[0].finish_reason])
"""


@pytest.mark.processes
def test_engine_of_the_configuration_samples_for_an_agent(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "streaming_agent.py").write_text(AGENT)  # a name that no other test in the process imports
    section = "environment: {class_path: AgentProgram, init_args: {agent: streaming_agent.agent}}"
    (project / "run.yaml").write_text(CONFIG.replace("environment: own_deeds.Deeds", section))
    options = ("--rollout", "VLLMRollout", "--rollout.engine.kv_cache_memory_bytes", str(1 << 28))
    code, text, errors = rollout(capsys, "--num", "1", "--json", *options, "--rollout.max_new_tokens", "4")
    assert code == 0, errors
    (row,) = map(json.loads, text.splitlines())
    assert row["status"] in ("finished", "truncated")  # by the four tokens of its last turn
    assert (row["reward"], row["scores"]) == (1.25, {"needs_more": 1.0})
    assert [branch["reason"] for branch in row["branches"]] == ["start"]
    assert [turn["role"] for turn in row["turns"]] == ["user", "assistant"] * 2
    assert row["turns"][2]["content"] == "more"
    assert list((project / "run").glob("engine*.log"))
