"""An adapter in a real engine: sent by itself, proven to be used, and every way of getting it wrong."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import LONG_PROMPT, engine_config, save_model
from torch import Tensor

from rlightning.errors import EngineError, EngineStartError
from rlightning.models import Adapter
from rlightning.models.adapter_layers import adapter_parameters
from rlightning.module.policy_module import PolicyModule
from rlightning.rollout.canary import Verification
from rlightning.rollout.engine import Engine
from rlightning.rollout.rank_engines import RankEngines, colocated_engines
from rlightning.rollout.vllm.adapter_support import engine_arguments
from rlightning.rollout.weight_sync import WeightSync
from rlightning.rollout.weights.source import AdapterSource, plan_source
from rlightning.types import RolloutBatch

pytestmark = pytest.mark.processes

ADAPTER = Adapter(rank=4, alpha=16)


class Policy(PolicyModule):
    """An actor with an adapter, of which a test sets the values, without a Trainer."""

    def __init__(self, model: str, adapter: Adapter = ADAPTER) -> None:
        torch.manual_seed(0)  # of A, whatever tests have drawn before
        super().__init__(model, adapter=adapter)
        self.weight_version, self.sends_adapter = 0, True
        self.configure_model()

    def score(self, batch: RolloutBatch, dtype: torch.dtype) -> Tensor:
        from rlightning.models import packed_logprobs

        with torch.no_grad():
            return packed_logprobs(self.loaded_actor, batch)[0]

    @torch.no_grad()
    def change(self, seed: int, size: float) -> None:
        """A further version, with other values of this size in B."""
        torch.manual_seed(seed)
        for name, weight in adapter_parameters(self.loaded_actor):
            if "lora_B" in name:
                weight.add_(torch.randn_like(weight), alpha=size)
        self.weight_version += 1


class Run:
    """An engine with room for an adapter, and what keeps it at the actor's version."""

    def __init__(self, model: str, folder: Path, policy: Policy, **arguments: Any) -> None:
        self.fault = folder / "fault"
        self.fault.write_text("")
        config = engine_config(model, folder / "engine.log", bucket_bytes=30_000)  # several chunks of both
        assert policy.adapter is not None
        config.engine_args.update(engine_arguments(policy.adapter), worker_extension_cls="wrong_adapters.WrongAdapter")
        config.engine_args.update(arguments)
        config.environment.update(FAULT=str(self.fault), PYTHONPATH=str(Path(__file__).parent))
        self.engines: RankEngines = colocated_engines([config])
        self.engines.keeps_cache = False
        self.engines.start()

    @property
    def engine(self) -> Engine:
        return self.engines.samplers[0]

    @contextmanager
    def other_sender(self, *, keeps_cache: bool = False) -> Iterator[None]:
        """Within, weights are sent by another sender than in other tests."""
        self.engines._updater, self.engines.keeps_cache = None, keeps_cache
        try:
            yield
        finally:
            self.engines._updater, self.engines.keeps_cache = None, False

    @contextmanager
    def finding(self, fault: str) -> "Iterator[pytest.ExceptionInfo[EngineError]]":
        """Within, the engine gets adapters wrong, and the weights that it is sent are found not to be the actor's."""
        self.fault.write_text(fault)
        try:
            with pytest.raises(EngineError, match="Actor and engine disagree") as error:
                yield error
        finally:
            self.fault.write_text("")
        assert self.engine.weight_version is None

    def begin(self, policy: Policy) -> WeightSync:
        """Forget what has been proven; the sync of a run with this policy."""
        self.engine.is_proven = self.engine.is_verified = False
        self.engine.weight_version = None
        verification = Verification(every=1, tolerance=1.2)
        verification.begin_run(policy, 256, torch.float32, torch.device("cpu"))
        trainer: Any = SimpleNamespace(callbacks=[])
        return WeightSync(trainer, policy, self.engines, verification)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def run(model: str, tmp_path_factory: pytest.TempPathFactory, starts_processes: None) -> Iterator[Run]:
    run = Run(model, tmp_path_factory.mktemp("engine"), Policy(model))
    try:
        yield run
    finally:
        run.engines.close()


def test_engine_start_names_the_layer_that_cannot_be_wrapped(
    model: str, tmp_path: Path, starts_processes: None
) -> None:
    refused = Run(model, tmp_path, Policy(model), lora_target_modules=["norm"])  # no linear layer
    try:
        with pytest.raises(EngineStartError, match=r"LoRA target module model\.norm .* rollout\.send_adapter: false"):
            refused.engines.wait_for_first()
    finally:
        refused.engines.close()


def scores(run: Run, token_ids: list[int]) -> Any:
    return run.engine.score_all(np.array([token_ids]))[0]


def expected(policy: Policy, token_ids: list[int]) -> Any:
    return policy.score(RolloutBatch.of_sequences([token_ids]), torch.float32).numpy()


def test_the_adapter_alone_is_sent_and_used(run: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once and after a change."""
    policy, tokens = Policy(model), list(LONG_PROMPT.token_ids)
    sync = run.begin(policy)
    sync.sync_weights()
    assert run.engine.is_proven and run.engine.is_verified
    assert run.engine.process is not None
    submit, chunks = run.engine.process.submit, list[int]()

    def submit_counted(method: str, *arguments: Any) -> Any:
        chunks.extend(arguments if method == "receive_weights" else ())
        return submit(method, *arguments)

    monkeypatch.setattr(run.engine.process, "submit", submit_counted)
    seen = []
    for seed in range(3):
        seen.append(scores(run, tokens))
        np.testing.assert_allclose(seen[-1][1:], expected(policy, tokens)[1:], atol=1e-4)
        policy.change(seed, 0.3)
        sync.sync_weights()
    assert all(np.abs(seen[i] - seen[i + 1]).max() > 0.1 for i in range(2))
    plan = plan_source(AdapterSource(policy), torch.float32, run.engine.config.bucket_bytes)
    assert 1 < plan.num_adapter_chunks < len(plan.chunks) - 1
    assert chunks == list(range(plan.num_adapter_chunks)) * 3


@contextmanager
def tensor_parallel(model: str, folder: Path) -> Iterator[Run]:
    """An engine of two workers, each of which holds a part of each adapted layer."""
    run = Run(model, folder, Policy(model), tensor_parallel_size=2, distributed_executor_backend="mp")
    try:
        yield run
    finally:
        run.engines.close()


def check_later_versions(run: Run, model: str, adapter: Adapter) -> None:
    """They are installed without vLLM's own installation, and are those of the actor; so is a new receiver's first."""
    policy, tokens = Policy(model, adapter), list(LONG_PROMPT.token_ids)
    with run.other_sender():
        sync = run.begin(policy)
        sync.sync_weights()
        run.fault.write_text("no installation")
        try:
            for seed in range(2):
                policy.change(seed, 0.3)
                sync.sync_weights()
                np.testing.assert_allclose(scores(run, tokens)[1:], expected(policy, tokens)[1:], atol=1e-4)
        finally:
            run.fault.write_text("")
    with run.other_sender():
        policy.change(2, 0.3)
        run.begin(policy).sync_weights()
        np.testing.assert_allclose(scores(run, tokens)[1:], expected(policy, tokens)[1:], atol=1e-4)


@pytest.mark.parametrize("adapter", [ADAPTER, Adapter(rank=3, use_rslora=True, target_modules=["q_proj", "v_proj"])])
def test_later_versions_are_written_without_vllms_installation(adapter: Adapter, run: Run, model: str) -> None:
    check_later_versions(run, model, adapter)


@pytest.mark.slow
def test_later_versions_reach_each_tensor_parallel_worker(tmp_path: Path, starts_processes: None) -> None:
    model = save_model(tmp_path / "model", num_key_value_heads=2)  # one a worker
    with tensor_parallel(model, tmp_path) as run:
        check_later_versions(run, model, ADAPTER)


@pytest.mark.parametrize("fault", ["no second chunk", "no repetition"])
def test_sync_after_a_failed_one_installs_the_actors_adapter(fault: str, run: Run, model: str) -> None:
    """Over the same receiver, which has some or all of the failed sync's values."""
    policy, tokens = Policy(model), list(LONG_PROMPT.token_ids)
    with run.other_sender():
        sync = run.begin(policy)
        sync.sync_weights()
        policy.change(0, 0.3)
        run.fault.write_text(fault)
        try:
            with pytest.raises(EngineError, match=fault):
                sync.sync_weights()
        finally:
            run.fault.write_text("")
        for seed in range(1, 3):
            policy.change(seed, 0.3)
            sync.sync_weights()
            np.testing.assert_allclose(scores(run, tokens)[1:], expected(policy, tokens)[1:], atol=1e-4)


def test_former_adapters_keys_and_values_are_not_read(run: Run, model: str) -> None:
    """Where a sync leaves them in the prefix cache; to score a prompt does not read that, to generate does."""
    policy, tokens = Policy(model), list(LONG_PROMPT.token_ids)
    with run.other_sender(keeps_cache=True):
        sync = run.begin(policy)
        for seed in range(2):
            policy.change(seed, 0.3)
            sync.sync_weights()
            for is_cached in (False, True):
                answer = run.engine.submit("generate", tokens, {"n": 1, "temperature": 1.0, "max_tokens": 1})
                sample = answer.result(60)[0]
                assert (sample["num_cached_tokens"] > 0) == is_cached
                sampled = np.asarray(sample["token_ids"]).tolist()
                logprob = expected(policy, [*tokens, *sampled])[-1]
                np.testing.assert_allclose(np.asarray(sample["logprobs"])[0], logprob, atol=1e-3)


@pytest.mark.parametrize("fault", ["not applied", "applied twice", "alpha", "rslora", "one module missing"])
def test_wrong_new_adapter_is_found(fault: str, run: Run, model: str) -> None:
    """A new adapter changes nothing, so only other values in it show that it is wrong."""
    sync = run.begin(Policy(model))
    with run.finding(fault) as error:
        sync.sync_weights()
    if fault == "not applied":
        assert "it does not apply the adapter" in str(error.value)
    assert not run.engine.is_proven


@pytest.mark.parametrize("size", [0.001, pytest.param(0.1, marks=pytest.mark.slow)])
def test_wrong_later_adapter_is_found(size: float, run: Run, model: str) -> None:
    policy = Policy(model)
    policy.change(1, size)
    sync = run.begin(policy)
    for seed, fault in enumerate(("older", "not applied", "applied twice", "alpha", "one module missing"), start=2):
        sync.sync_weights()
        policy.change(seed, size)
        with run.finding(fault):
            sync.sync_weights()


def test_running_requests_go_on_with_new_adapter(run: Run, model: str) -> None:
    """Tokens carry the version that sampled them; those after the sync are the new adapter's, on the whole sequence."""
    policy = Policy(model)
    policy.change(1, 0.3)
    sync = run.begin(policy)
    sync.sync_weights()
    sampling = {"n": 1, "temperature": 1.0, "max_tokens": 250, "ignore_eos": True, "seed": 3}
    for attempt in range(2, 32):  # until a sync comes amid the tokens, which on a busy machine the first may not
        before = policy.weight_version
        was = {name: weight.clone() for name, weight in adapter_parameters(policy.loaded_actor)}
        answer = run.engine.submit("generate", [1, 2, 3], sampling)
        threading.Event().wait(0.05 * attempt)
        policy.change(attempt, 0.3)
        sync.sync_weights()
        sample = answer.result(60)[0]
        versions = np.asarray(sample["weight_versions"])
        if len(set(versions.tolist())) == 2:
            break
    tokens = [1, 2, 3, *np.asarray(sample["token_ids"]).tolist()]
    assert set(versions.tolist()) == {before, before + 1}, "no sync came amid the tokens"
    new = expected(policy, tokens)[3:]
    with torch.no_grad():
        for name, weight in adapter_parameters(policy.loaded_actor):
            weight.copy_(was[name])
    logprobs, former = np.asarray(sample["logprobs"]), expected(policy, tokens)[3:]
    np.testing.assert_allclose(logprobs[versions == before], former[versions == before], atol=1e-3)
    np.testing.assert_allclose(logprobs[versions > before], new[versions > before], atol=1e-3)


def test_restarted_engine_gets_and_proves_base_and_adapter(run: Run, model: str) -> None:
    policy = Policy(model)
    policy.change(1, 0.3)
    sync = run.begin(policy)
    sync.sync_weights()
    run.engine.close()
    run.engine.start()
    assert not run.engine.has_base and not run.engine.is_proven
    sync.sync_weights()
    assert run.engine.is_proven
    tokens = list(LONG_PROMPT.token_ids)
    np.testing.assert_allclose(scores(run, tokens)[1:], expected(policy, tokens)[1:], atol=1e-4)


@pytest.mark.parametrize("has_base", [True, False])
def test_adapter_module_without_place_in_engine_is_named(has_base: bool, run: Run, model: str) -> None:
    """Also where the base follows the adapter, of whose last chunk the engine reports too."""
    policy = Policy(model)
    run.engine.has_base = has_base
    policy.adapter_weights = lambda: (  # type: ignore[method-assign]
        (name.replace("q_proj", "z_proj"), weight) for name, weight in adapter_parameters(policy.loaded_actor)
    )
    with (
        run.other_sender(),
        pytest.raises(EngineError, match=r"weights that the actor sent were not taken, such as .*z_proj"),
    ):
        run.begin(policy).sync_weights()


def test_a_quantised_bases_numbers_are_the_engines_too(run: Run, model: str) -> None:
    """The engine has them in its own dtype: rounding alone is between actor and engine, as with any base."""
    pytest.importorskip("torchao")
    policy, plain = Policy(model, Adapter(rank=4, alpha=16, quantize_base="nf4")), Policy(model)
    run.engine.has_base = False
    try:
        sync = run.begin(policy)
        sync.sync_weights()
        policy.change(1, 0.3)
        sync.sync_weights()
        assert run.engine.is_proven and run.engine.is_verified and run.engine.has_base
        tokens = list(LONG_PROMPT.token_ids)
        np.testing.assert_allclose(scores(run, tokens)[1:], expected(policy, tokens)[1:], atol=1e-4)
        assert np.abs(expected(policy, tokens) - expected(plain, tokens)).max() > 0.01
    finally:
        run.engine.has_base = False  # other tests' base is the model's
