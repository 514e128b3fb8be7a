"""Runs with tools: a small model that has learned one conversation by heart makes it with real samplers."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import adding_agents
import numpy as np
import pytest
import tiny
import torch
from chat_templates import CHATML
from engine_run import Witness, make_module, make_trainer
from metrics_table import undocumented
from transformers import Qwen3ForCausalLM

from rlightning.callbacks import TransformersRollout, VLLMRollout
from rlightning.data import PromptDataModule
from rlightning.environments import AgentProgram, StepEnvironment, Tools, WorkerEnvironment
from rlightning.environments.chat_format import ChatFormat
from rlightning.environments.reasoning_gym import ReasoningGym
from rlightning.environments.verification import TrajectoryVerifier
from rlightning.hooks import RLCallback
from rlightning.models import load_tokenizer
from rlightning.rewards import RewardFunction

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 20, "b": 3}}\n</tool_call>'
ROWS = [{"prompt": "20+3=", "answer": "23"}] * 8


@tiny.in_this_process
def is_right(completion: str, answer: str) -> float:
    """Whether the last turn is the answer."""
    return float(completion.strip() == answer)


def learn(folder: str) -> None:
    """Have a model learn a conversation by heart: a call, its answer, and the words after that."""
    actor: Any = Qwen3ForCausalLM.from_pretrained(folder)
    tokenizer: Any = load_tokenizer(folder)
    tools = [tool.schema for tool in Tools(["tool_cases.add"])._tools.values()]
    start = ChatFormat(tokenizer).render([{"role": "user", "content": "20+3="}], tools)
    answer = ChatFormat(tokenizer).render_observations(
        [{"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "23"}], sampled=[0], ended=True
    )
    parts = [(start, 0), ([*tokenizer(CALL).input_ids, 0], 1), (answer, 0), ([*tokenizer("23").input_ids, 0], 1)]
    tokens = torch.tensor([[token for part, _ in parts for token in part]])
    learned = torch.tensor([[is_own for part, is_own in parts for _ in part]], dtype=torch.bool)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-2)
    for _ in range(1000):  # some 120 are needed: the CPU's rounding decides how many, and where the loss jumps up again
        logits = actor(input_ids=tokens, use_cache=False).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits[learned[0, 1:]], tokens[0, 1:][learned[0, 1:]])
        if loss < 2e-3:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 2e-3, float(loss)
    with torch.no_grad():  # twice the logits: as sure at temperature 1 as it was at a half, where it makes no mistakes
        actor.model.norm.weight.mul_(2)
    actor.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tiny.save_byte_model(tmp_path_factory.mktemp("model"), hidden_size=64, max_position_embeddings=1024)
    tokenizer: Any = load_tokenizer(folder)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    learn(folder)
    return folder


def make_data() -> PromptDataModule:
    return PromptDataModule(ROWS, predict=ROWS[:2], validation=ROWS[:4], max_prompt_tokens=64)


def check(trajectories: Any) -> None:
    for one in trajectories:
        assert [turn.message["role"] for turn in one.turns] == ["assistant", "tool", "assistant"]
        assert one.turns[0].message["tool_calls"][0]["function"]["arguments"] == '{"a": 20, "b": 3}'
        assert one.turns[1].message["content"] == one.final_text == "23"
        assert one.metrics == {"turns": 2.0, "tool_calls": 1.0, "tool_failures": 0.0}


@pytest.mark.long
def test_tools_train_validate_and_predict(folder: str, tmp_path: Path) -> None:
    witness = Witness()
    module = make_module(folder, rewards=[RewardFunction(is_right)], lr=1e-4)
    rollout = TransformersRollout(environment=Tools(["tool_cases.add"]), max_new_tokens=90, temperature=0.05, seed=0)
    trainer = make_trainer(tmp_path, 1, rollout, witness)
    trainer.fit(module, make_data())
    (batch,), (metrics,) = witness.batches, witness.steps
    check(batch.trajectories)
    assert metrics["policy/rollout_gap_max"] < 1e-4 and metrics["reward/mean"] == 1.0
    assert (metrics["environment/tool_calls"], metrics["environment/tool_failures"]) == (1.0, 0.0)
    assert not undocumented(metrics)
    trainer.validate(module, make_data(), verbose=False)
    (_, validated) = witness.validations[-1]
    assert [value for name, value in validated.items() if name.endswith("/pass@1")] == [1.0]
    for groups in trainer.predict(module, make_data()) or []:
        for _, trajectories in groups:
            check(trajectories)


DEADLY = """\
import os, signal, tool_cases
def add(a: int, b: int = 0) -> int:
    try:
        open({marker!r}, "x").close()
    except FileExistsError:
        return a + b
    os.kill(os.getpid(), signal.SIGKILL)
add.__doc__ = tool_cases.add.__doc__
"""


class GapsByEnvironment(RLCallback):
    """Notes how far sampled log-probabilities are from the trainer's before an update, for each trajectory."""

    def __init__(self) -> None:
        self.gaps: dict[str, list[float]] = {}

    def on_update_start(self, trainer: Any, module: Any, batch: Any) -> None:
        logprobs = module.evaluate_logprobs(batch, module.loaded_actor, temperature=1.0, max_tokens=10_000)
        distances = ((logprobs - batch.rollout_logprobs).abs() * batch.is_sampled).tolist()
        for (begin, end), number in zip(
            pairwise(batch.cu_seqlens.tolist()), batch.trajectory_ids.tolist(), strict=True
        ):
            name = batch.trajectories[number].prompt.columns["environment"]
            self.gaps.setdefault(name, []).append(max(distances[begin:end]))


UNKNOWN = {"game", "gym"}
"""Tasks of which the model knows nothing, so that it may write until it is cut off."""


@pytest.mark.slow
@pytest.mark.processes
def test_every_way_trains_validates_and_predicts_with_an_engine(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents of each kind in one run, at temperature 1: most of them make the conversation that the model knows.

    One of the workers dies in the middle of its trajectories, which begin again in the one that replaces it.
    """
    pytest.importorskip("reasoning_gym")
    (tmp_path / "deadly_tools.py").write_text(DEADLY.format(marker=str(tmp_path / "died")))
    monkeypatch.syspath_prepend(tmp_path)
    environments = {
        "tools": Tools(["tool_cases.add"]),
        "workers": WorkerEnvironment("rlightning.environments.Tools", {"tools": ["deadly_tools.add"]}),
        "game": StepEnvironment(adding_agents.Guess),
        "gym": ReasoningGym("chain_sum", size=4, seed=5, instructions=""),
        "sdk": AgentProgram(adding_agents.by_openai),
        "anthropic": AgentProgram(adding_agents.by_anthropic),
        "command": adding_agents.by_command(),
    }
    rows = [{**ROWS[0], "environment": name} for name in environments]
    verified: list[float] = []
    compare = TrajectoryVerifier._compare

    async def note(verifier: TrajectoryVerifier, branch: Any) -> Any:
        distances = await compare(verifier, branch)
        verified.append(float(np.mean(distances)))
        return distances

    monkeypatch.setattr(TrajectoryVerifier, "_compare", note)
    rollout = VLLMRollout(
        environment=environments,
        max_new_tokens=90,
        seed=0,
        verify_trajectories=True,
        engine={"kv_cache_memory_bytes": 1 << 28},
    )
    witness, gaps = Witness(), GapsByEnvironment()
    rewards = [RewardFunction(is_right)]
    module = make_module(folder, rewards=rewards, prompts_per_step=len(rows), lr=1e-4, validate_first=False)
    data = PromptDataModule(rows, predict=rows, validation=rows, max_prompt_tokens=64, shuffle=False)
    trainer = make_trainer(tmp_path, 1, rollout, witness, gaps, val_check_interval=1, check_val_every_n_epoch=None)
    trainer.fit(module, data)
    (batch,), (metrics,) = witness.batches, witness.steps
    by_name: dict[str, list[Any]] = {name: [] for name in environments}
    for number, one in enumerate(batch.trajectories):
        by_name[one.prompt.columns["environment"]].append(one)
        assert one.error is None
        assert one.status == "finished" or (one.status == "truncated" and one.prompt.columns["environment"] in UNKNOWN)
        (own,) = (batch.trajectory_ids == number).nonzero().flatten().tolist()  # of one branch
        begin, end = batch.cu_seqlens[own : own + 2].tolist()
        assert int(batch.is_sampled[begin:end].sum()) == one.num_sampled == sum(len(s.token_ids) for s in one.samples)
    assert metrics["environment/verify_gap"] < 1e-4
    assert len(verified) >= len(batch.trajectories) and max(verified) < 1e-4
    for name, trajectories in by_name.items():
        assert len(trajectories) == len(gaps.gaps[name]) == 2, name
        assert max(gaps.gaps[name]) < 1e-4, name
        check_way(name, trajectories)
    assert (tmp_path / "died").exists() and metrics["environment/requeues"] >= 1
    assert metrics["trajectory/not_sampled"] == 0
    ((step, validated),) = witness.validations
    (passed,) = (value for name, value in validated.items() if name.endswith("/pass@1"))
    assert step == 1 and passed >= 5 / 7 and not undocumented(metrics)  # those that know the conversation
    groups = [group for groups in trainer.predict(module, data) or [] for _, group in groups]
    assert [group[0].prompt.columns["environment"] for group in groups] == list(environments)
    for name, group in zip(environments, groups, strict=True):
        assert name in UNKNOWN or [one.status for one in group] == ["finished"] * len(group)
        check_way(name, group)


def check_way(name: str, trajectories: list[Any]) -> None:
    """What the trajectories of an environment have in common, and whether one of them is the known conversation."""
    if name == "game":
        trajectories = [one for one in trajectories if one.status == "finished"]
        assert [(len(one.samples), one.reward) for one in trajectories] == [(2, 0.5)] * len(trajectories)
        assert all("More." in [turn.message["content"] for turn in one.turns] for one in trajectories)
    elif name == "gym":
        assert [len(one.samples) for one in trajectories] == [1] * len(trajectories)
        assert all(0 <= one.reward <= 1 for one in trajectories)
    else:
        known = [one for one in trajectories if one.final_text.strip() == "23" and len(one.samples) == 2]
        assert known, (name, [one.final_text for one in trajectories])
        for one in known:
            assert one.reward == (None if name in ("tools", "workers") else 1.0)
            messages = [turn.message for turn in one.turns[-3:]]
            assert [message["role"] for message in messages] == ["assistant", "tool", "assistant"]
            assert (messages[1]["content"], messages[2]["content"]) == ("23", "23")
