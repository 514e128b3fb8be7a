"""New weights for an engine that is in the midst of sampling: every token knows which weights it is from."""

import asyncio
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from engine_models import LONG_PROMPT, PROMPTS, Actor, Weights, bare_config, running_engine, save_model, stopped
from engine_run import find_core
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, DynamicCache
from waiting import PATIENCE_SECONDS

from rlightning.errors import EngineError
from rlightning.processes.process_group import end_group
from rlightning.rollout.engine import Engine
from rlightning.rollout.vllm.launcher import EngineProcess, engine_environment
from rlightning.rollout.vllm.server import VLLMServer
from rlightning.rollout.vllm.token_versions import TokenVersions
from rlightning.rollout.weights import plan_chunks
from rlightning.rollout.weights.shared_memory import SharedMemorySender
from rlightning.rollout.weights.source import weight_shapes
from rlightning.types import Prompt, Sample

MAX_TOKENS = 240
NUM_SWAPS = 4


class Policy:
    """Weights of several versions, and what transformers makes of them."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.actor = Actor(folder)
        self.weights: list[Weights] = []
        for version in range(NUM_SWAPS + 1):
            if version:
                self.actor.perturb(version)
            self.weights.append(Weights((name, weight.detach().clone()) for name, weight in self.actor.named_weights()))
        self.plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def logprobs(self, prompt: Prompt, sample: dict[str, Any], version: int) -> NDArray[np.float32]:
        """[C], as if all were of one version."""
        self.actor.model.load_state_dict(self.weights[version], strict=False)
        completion = Sample(
            sample["token_ids"].tolist(), sample["logprobs"], sample["weight_versions"].tolist(), "", "length"
        )
        return self.actor.logprobs(prompt, completion, temperature=1.0).numpy()

    @torch.no_grad()
    def cached_logprobs(self, prompt: Prompt, sample: dict[str, Any]) -> NDArray[np.float32]:
        """[C], each under the weights of its version, with keys and values that are computed once."""
        tokens = [*prompt.token_ids, *sample["token_ids"].tolist()]
        cache, num_cached = DynamicCache(), 0
        expected = []
        for version, num_sampled in spans(sample["weight_versions"]):
            self.plain.load_state_dict(self.weights[version], strict=False)
            # The last of a version's tokens has been sampled, and not read yet.
            end = max(num_cached + 1, len(prompt.token_ids)) - 1 + num_sampled
            logits = self.plain(torch.tensor([tokens[num_cached:end]]), past_key_values=cache).logits[0, -num_sampled:]
            sampled = torch.tensor(tokens[end - num_sampled + 1 : end + 1])
            expected.append(logits.log_softmax(-1).gather(1, sampled[:, None])[:, 0])
            num_cached = end
        return torch.cat(expected).numpy()


def spans(versions: NDArray[np.int32]) -> list[tuple[int, int]]:
    """Version and number of tokens of each run of equal versions."""
    cuts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [(int(versions[start]), end - start) for start, end in pairwise(cuts)]


@dataclass
class Trainer:
    """The requests of a trainer to an engine."""

    engine: Engine
    policy: Policy

    def __post_init__(self) -> None:
        plan = plan_chunks(weight_shapes(self.policy.weights[0]), torch.float32, 50_000)
        self.sender = SharedMemorySender(plan, torch.device("cpu"))
        self.ask("open_weight_receivers", [pickle.dumps(self.sender.make_receivers([""])[0])])

    def ask(self, method: str, *arguments: Any) -> Any:
        """The engine's answer."""
        return self.engine.submit(method, *arguments).result(timeout=120)

    def send(self, version: int) -> None:
        """Send weights to a paused engine, or pause it first."""
        missing: list[str] = []
        for chunk in self.sender.fill(self.policy.weights[version]):
            missing = self.ask("receive_weights", chunk)
        assert not missing

    def update(self, version: int, keeps_cache: bool) -> None:
        """Send weights to a busy engine, and let it go on with them."""
        self.send(version)
        self.ask("finish_weight_update", version, keeps_cache)

    def generate(self, prompt: Prompt, num_samples: int = 1, max_tokens: int = MAX_TOKENS) -> "Future[Any]":
        """Begin to sample completions that end at ``max_tokens``, whatever they say."""
        sampling = {"n": num_samples, "temperature": 1.0, "max_tokens": max_tokens, "ignore_eos": True}
        return self.engine.submit("generate", prompt.token_ids, sampling)

    def pause_amid(self, *requests: tuple[Prompt, int]) -> "list[Future[Any]]":
        """Begin these, and pause before they end; again where the engine was faster than this busy machine's turns."""
        for _ in range(20):
            with stopped(self.process.pid):
                begun = [self.generate(prompt, num_samples) for prompt, num_samples in requests]
                paused = self.begin_update()
            paused.result(timeout=120)
            self.ask("ping")  # answers to what has ended are there
            if not any(answer.done() for answer in begun):
                return begun
            self.update(0, keeps_cache=False)
        raise AssertionError("The engine had always sampled all tokens before it was paused.")

    def begin_update(self) -> "Future[Any]":
        """Send the first chunk of an update, which pauses the engine; :meth:`send` begins again with it."""
        next(self.sender.fill(self.policy.weights[0]))
        return self.engine.submit("receive_weights", 0)

    @property
    def process(self) -> EngineProcess:
        """The engine's."""
        assert isinstance(self.engine.process, EngineProcess)
        return self.engine.process

    @property
    def core(self) -> int:
        """The process that samples."""
        return find_core(self.process.pid)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return Policy(save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=512))


class Running(NamedTuple):
    """An engine, and how it answered before it had any weights and when the first ones, of version 2, had come."""

    trainer: Trainer
    without_weights: BaseException | None
    with_the_first: list[dict[str, Any]]


@pytest.fixture(scope="module")
def started(policy: Policy, tmp_path_factory: pytest.TempPathFactory, starts_processes: None) -> Iterator[Running]:
    with running_engine(policy.folder, tmp_path_factory.mktemp("log") / "engine.log") as engine:
        trainer = Trainer(engine, policy)
        refusal = trainer.generate(PROMPTS[0]).exception(timeout=120)
        trainer.update(2, keeps_cache=False)
        yield Running(trainer, refusal, trainer.generate(PROMPTS[0]).result(timeout=120))
        trainer.sender.close()


@pytest.fixture
def trainer(started: Running) -> Trainer:
    """An idle engine with the weights of version 0."""
    running = started.trainer
    running.update(0, keeps_cache=False)
    return running


Sampled = list[tuple[Prompt, dict[str, Any]]]


def sample_through_swaps(trainer: Trainer, keeps_cache: bool) -> Sampled:
    """Send new weights several times while the engine samples; again where it was through before a machine's turn."""
    for _ in range(20):
        samples = sample_once(trainer, keeps_cache)
        versions = [[version for version, _ in spans(sample["weight_versions"])] for _, sample in samples]
        if sum(len(own) > 1 for own in versions) > 4 and {0, 1} <= {version for own in versions for version in own}:
            return samples
        trainer.update(0, keeps_cache=False)
    raise AssertionError("The engine had always sampled all tokens before it was paused.")


def sample_once(trainer: Trainer, keeps_cache: bool) -> Sampled:
    """Sample more at once than the engine can run, and send new weights several times meanwhile."""
    counts = (1, 5, 8)
    begun = [(prompt, trainer.generate(prompt, num_samples)) for prompt in PROMPTS[:2] for num_samples in counts]
    marks = [trainer.generate(PROMPTS[0], max_tokens=8 + 60 * number) for number in range(NUM_SWAPS)]
    begun += [(prompt, trainer.generate(prompt, num_samples)) for prompt in PROMPTS for num_samples in (1, 4)]
    pending = {*marks, *(answer for _, answer in begun)}
    for version in range(1, NUM_SWAPS + 1):
        if not pending:
            break  # on a busy machine the engine may be through before this process has its turn
        # What had not ended at the last pause ends with tokens of the last version.
        assert wait(pending, timeout=120, return_when=FIRST_COMPLETED).done
        trainer.begin_update().result(timeout=120)
        pending = {answer for answer in pending if not answer.done()}
        trainer.update(version, keeps_cache)
    samples = [(prompt, sample) for prompt, answer in begun for sample in answer.result(timeout=120)]
    for _, sample in samples:
        assert len(sample["token_ids"]) == len(sample["weight_versions"]) == MAX_TOKENS
        assert sample["weight_versions"].format == "i"
        assert (np.diff(sample["weight_versions"]) >= 0).all()
        sample |= {name: np.asarray(sample[name]) for name in ("token_ids", "logprobs", "weight_versions")}
    return samples


def test_versions_without_a_change() -> None:
    versions = TokenVersions()
    versions.activate(3, [])
    versions.begin("a", 2)
    assert [one.tolist() for one in versions.end("a", [2, 0])] == [[3, 3], []]


def test_versions_change_where_each_sample_was() -> None:
    versions = TokenVersions()
    versions.activate(0, [])
    versions.begin("a", 3)
    versions.activate(1, [("a", 0, 2), ("a", 1, 0), ("unknown", 0, 5)])  # the third sample is at its end
    versions.begin("b", 1)
    versions.activate(2, [("a", 0, 2), ("a", 1, 3), ("b", 0, 1)])
    assert [one.tolist() for one in versions.end("a", [4, 4, 2])] == [[0, 0, 2, 2], [1, 1, 1, 2], [0, 0]]
    assert [one.tolist() for one in versions.end("b", [2])] == [[1, 2]]
    assert versions.end("a", []) == []


def test_full_device_error_names_the_ways_out() -> None:
    """The error for a full device, as vLLM 0.24 reports it, names the keys to change; a CPU's error names no sleep."""

    class FullDevice:
        vllm_config = SimpleNamespace(lora_config=None)

        async def sleep(self, level: int) -> None:
            assert level == 2

        async def wake_up(self, tags: list[str]) -> None:
            raise RuntimeError("CUDA Error: out of memory at /workspace/cumem_allocator.cpp")

    async def wake() -> None:
        server = VLLMServer(FullDevice())  # type: ignore[arg-type]
        await server.sleep()
        for _ in range(2):  # what is held for an update is released again
            with pytest.raises(MemoryError, match=r"memory for its weights when it wakes, .* Lower rollout\.gpu"):
                await server.receive_weights(0)

    asyncio.run(asyncio.wait_for(wake(), 60))


def test_nothing_is_sampled_from_random_weights(started: Running) -> None:
    assert isinstance(started.without_weights, EngineError)
    assert "not been sent any weights yet" in str(started.without_weights)
    (sample,) = started.with_the_first
    assert spans(sample["weight_versions"]) == [(2, MAX_TOKENS)]


def test_tokens_are_of_their_version_all_computed_anew(trainer: Trainer, policy: Policy) -> None:
    wrong = []
    for prompt, sample in sample_through_swaps(trainer, keeps_cache=False):
        for version, _ in spans(sample["weight_versions"]):
            mine = sample["weight_versions"] == version
            expected = policy.logprobs(prompt, sample, version)
            np.testing.assert_allclose(sample["logprobs"][mine], expected[mine], atol=1e-4)
            beside = mine ^ (np.roll(mine, 1) | np.roll(mine, -1))  # one too many or too few would have been seen
            wrong += np.abs(sample["logprobs"] - expected)[beside & ~mine].tolist()
    assert np.median(wrong) > 0.01


def test_tokens_over_kept_kv_cache_match_their_version(trainer: Trainer, policy: Policy) -> None:
    differences = []
    for prompt, sample in sample_through_swaps(trainer, keeps_cache=True):
        np.testing.assert_allclose(sample["logprobs"], policy.cached_logprobs(prompt, sample), atol=1e-4)
        last = sample["weight_versions"][-1]
        if last != sample["weight_versions"][0]:
            differences.append(abs(policy.logprobs(prompt, sample, last)[-1] - sample["logprobs"][-1]))
    assert np.median(differences) > 0.001  # old keys and values are another thing than new ones


@pytest.mark.processes
def test_no_tokens_arrive_after_pause_begins(policy: Policy, tmp_path: Path) -> None:
    config = bare_config(tmp_path / "engine.log")
    program = Path(__file__).with_name("pausing_server.py")
    with config.log_file.open("wb") as log, TemporaryDirectory() as scratch:  # a socket's path has to be short
        process = subprocess.Popen(
            [sys.executable, str(program), policy.folder],
            env=engine_environment(config, scratch),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            assert process.wait(PATIENCE_SECONDS) == 0, config.log_file.read_text()[-4000:]
        finally:
            end_group(process.pid)


@pytest.mark.parametrize("keeps_cache", [True, False])
def test_paused_requests_wait_and_read_nothing_old(trainer: Trainer, policy: Policy, keeps_cache: bool) -> None:
    (before,) = trainer.generate(LONG_PROMPT, max_tokens=16).result(timeout=120)  # its prompt is in the cache now
    (running,) = trainer.pause_amid((PROMPTS[0], 4))
    trainer.begin_update().result(timeout=120)
    waiting = [trainer.generate(LONG_PROMPT, num_samples, max_tokens=16) for num_samples in (1, 3)]
    trainer.send(1)
    trainer.ask("ping")
    assert not any(answer.done() for answer in [*waiting, running])
    trainer.ask("finish_weight_update", 1, keeps_cache)
    later = trainer.generate(LONG_PROMPT, max_tokens=16)
    samples = [sample for answer in [*waiting, later] for sample in answer.result(timeout=120)]
    for sample, version in [(before, 0), *((sample, 1) for sample in samples)]:
        assert spans(sample["weight_versions"]) == [(version, 16)]
        expected = policy.logprobs(LONG_PROMPT, sample, version)
        np.testing.assert_allclose(sample["logprobs"], expected, atol=1e-4)
    running.result(timeout=120)


def test_queued_requests_read_only_new_weights_cache(trainer: Trainer, policy: Policy) -> None:
    """Of those that had been passed to vLLM before the pause, beside more than it runs at once."""
    trainer.generate(LONG_PROMPT, max_tokens=16).result(timeout=120)  # its prompt is in the cache now
    running, waiting, alone = trainer.pause_amid((PROMPTS[0], 32), (LONG_PROMPT, 4), (LONG_PROMPT, 1))
    trainer.update(1, keeps_cache=True)
    for sample in [*waiting.result(timeout=120), *alone.result(timeout=120)]:
        assert spans(sample["weight_versions"]) == [(1, len(sample["token_ids"]))]
        np.testing.assert_allclose(sample["logprobs"], policy.logprobs(LONG_PROMPT, sample, 1), atol=1e-4)
    running.result(timeout=120)


def test_a_score_waits_for_the_new_weights(trainer: Trainer, policy: Policy) -> None:
    tokens = LONG_PROMPT.token_ids
    before = trainer.ask("score", tokens)
    trainer.begin_update().result(timeout=120)
    answer = trainer.engine.submit("score", tokens)
    trainer.update(1, keeps_cache=True)
    assert np.abs(np.subtract(before, answer.result(timeout=120))).max() > 0.01
    again = trainer.ask("score", tokens)
    np.testing.assert_allclose(answer.result(), again, atol=1e-5)


def test_an_update_ends_only_after_it_has_begun(trainer: Trainer) -> None:
    with pytest.raises(EngineError, match="No weight update has begun"):
        trainer.ask("finish_weight_update", 1, False)
    (sample,) = trainer.generate(PROMPTS[0], max_tokens=16).result(timeout=120)
    assert spans(sample["weight_versions"]) == [(0, 16)]


def cancel(trainer: Trainer, *answers: "Future[Any]") -> None:
    """Have these calls ended, before any later one begins."""
    assert all(answer.cancel() for answer in answers)
    assert not wait(answers, timeout=120).not_done


def test_cancelled_requests_end_and_others_go_on(trainer: Trainer) -> None:
    with stopped(trainer.core):
        doomed = [trainer.generate(PROMPTS[0], num_samples) for num_samples in (16, 128)]
        others = [trainer.generate(PROMPTS[1], num_samples) for num_samples in (1, 8)]
        cancel(trainer, *doomed)
    assert [len(answer.result(timeout=120)) for answer in others] == [1, 8]
    trainer.update(1, keeps_cache=False)
    (sample,) = trainer.generate(PROMPTS[0], max_tokens=16).result(timeout=120)
    assert spans(sample["weight_versions"]) == [(1, 16)]


def test_requests_can_be_cancelled_during_a_pause(trainer: Trainer) -> None:
    other, begun = trainer.pause_amid((PROMPTS[1], 2), (PROMPTS[0], 8))
    held = trainer.generate(PROMPTS[0], 8)
    cancel(trainer, begun, held)
    trainer.update(1, keeps_cache=False)
    assert {len(sample["weight_versions"]) for sample in other.result(timeout=120)} == {MAX_TOKENS}
    trainer.update(2, keeps_cache=False)
