"""Runs with tools: a small model that has learned one conversation by heart makes it with real samplers."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from chat_templates import CHATML
from engine_run import Witness, make_module, make_trainer
from metrics_table import undocumented
from transformers import Qwen3ForCausalLM

from rlightning.callbacks import TransformersRollout, VLLMRollout
from rlightning.data import PromptDataModule
from rlightning.environments import Tools, WorkerEnvironment
from rlightning.environments.chat_format import ChatFormat
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
    for _ in range(80):
        logits = actor(input_ids=tokens, use_cache=False).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits[learned[0, 1:]], tokens[0, 1:][learned[0, 1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 1e-2, float(loss)
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


@pytest.mark.slow
@pytest.mark.processes
def test_tools_in_workers_beside_an_engine(folder: str, tmp_path: Path) -> None:
    witness = Witness()
    environment = WorkerEnvironment("rlightning.environments.Tools", {"tools": ["tool_cases.add"]})
    rollout = VLLMRollout(
        environment=environment,
        max_new_tokens=90,
        temperature=0.05,
        seed=0,
        engine={"kv_cache_memory_bytes": 1 << 28},
    )
    module = make_module(folder, rewards=[RewardFunction(is_right)], lr=1e-4)
    make_trainer(tmp_path, 1, rollout, witness).fit(module, make_data())
    (batch,), (metrics,) = witness.batches, witness.steps
    check(batch.trajectories)
    assert metrics["policy/rollout_gap_max"] < 1e-3 and metrics["reward/mean"] == 1.0
