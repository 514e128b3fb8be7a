"""VLLMRollout in the matrix of test_matrix.py: one object in four fits, and two ranks without Lightning."""

import contextlib
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_run import (
    Witness,
    in_session,
    make_data,
    make_module,
    make_rollout,
    make_trainer,
    save_model,
    versions,
)
from sharded_net import run_ranks
from small_steps import ComputesAll
from tiny import heed_ctrl_c, make_algorithm

from rlightning.hooks import call_hook
from rlightning.types import Prompt

pytestmark = pytest.mark.processes
PLAIN_LOOP = Path(__file__).parents[2] / "examples" / "plain_loop.py"


class FailingWitness(Witness):
    """Raises in the update of a step, once, as listed by finished steps; notes the engines."""

    def __init__(self, errors: dict[int, BaseException]) -> None:
        super().__init__()
        self.errors = errors
        self.sessions: list[int] = []

    def on_rollout_end(self, trainer: Any, module: Any, batch: Any) -> None:
        super().on_rollout_end(trainer, module, batch)
        if (session := module.sampler.engine.process.pid) not in self.sessions:
            self.sessions.append(session)

    def on_update_start(self, trainer: Any, module: Any, batch: Any) -> None:
        if trainer.global_step in self.errors:
            raise self.errors.pop(trainer.global_step)


class OwnOptimizer(ComputesAll):
    """Has an optimizer of the user's, which the engine waits for."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run of several micro-batches a step fails in its second step, is interrupted in its third; then another run."""
    folder = tmp_path_factory.mktemp("story")
    rollout = make_rollout()
    witness = FailingWitness({1: RuntimeError("out of luck"), 2: KeyboardInterrupt()})
    model = save_model(folder / "model")
    trainer = make_trainer(folder, 3, rollout, witness)
    module, data = make_module(model, max_tokens_per_microbatch=32), make_data(folder)
    engines = []
    for error in (RuntimeError, SystemExit, None):
        with pytest.raises(error) if error else contextlib.nullcontext():
            trainer.fit(module, data)
        engines.append(rollout.engine)
    heed_ctrl_c()
    second = make_trainer(folder, 1, rollout, witness)
    second.fit(make_algorithm(OwnOptimizer, model), make_data(folder))
    return SimpleNamespace(trainer=trainer, second=second, rollout=rollout, witness=witness, engines=engines)


def test_fit_after_exception_has_its_own_engine(story: SimpleNamespace) -> None:
    assert story.trainer.global_step == 3 and story.second.global_step == 1
    assert len(story.witness.sessions) == 4
    assert story.engines == [None] * 3 and story.rollout.engine is None
    assert [in_session(session) for session in story.witness.sessions] == [[]] * 4


def test_every_step_is_sampled_from_its_weights(story: SimpleNamespace) -> None:
    """Steps 1, 2 (which fails), 2, 3 (which is interrupted), 3, and 1 of the second run."""
    assert [versions(batch) for batch in story.witness.batches] == [[0], [1], [1], [2], [2], [0]]
    assert [step["policy/rollout_gap_max"] < 1e-3 for step in story.witness.steps] == [True] * 4


def generate_in_a_plain_loop(folder: Path) -> list[list[list[list[int]]]]:
    """Each rank's completions of prompts of its own, twice, a step each."""
    policy = runpy.run_path(str(PLAIN_LOOP), run_name="example")["Policy"](str(folder / "model"))
    rollout = make_rollout(seed=0)
    loop = SimpleNamespace(callbacks=[rollout], default_root_dir=folder)
    texts = [f"{a}+{b}=" for a in range(2) for b in range(2)]
    prompts = [Prompt(i, text, policy.tokenizer(text).input_ids, {}) for i, text in enumerate(texts)]
    share = prompts[dist.get_rank() :: 2]

    call_hook(loop, policy, "setup", "fit")
    try:
        first = rollout.generate(share, 2, rollout.sampling)
        call_hook(loop, policy, "on_update_end", None)
        again = rollout.generate(share, 2, rollout.sampling)
    finally:
        call_hook(loop, policy, "teardown", "fit")
    return [[[one.completion.token_ids.tolist() for one in group] for group in groups] for groups in (first, again)]


@pytest.mark.slow
def test_two_ranks_without_lightning_have_an_engine_each(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    by_rank = run_ranks(generate_in_a_plain_loop, 2, tmp_path)
    for first, again in by_rank:
        assert again == first, "a step with the same weights samples the same"
        assert [len(group) for group in first] == [2, 2]
    assert by_rank[0] != by_rank[1]
