"""To which engines a weight sync sends, and what it does for them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from engine_models import bare_config
from tiny import save_byte_model
from torch import Tensor

from rlightning.models import load_tokenizer
from rlightning.rollout.canary import Verification
from rlightning.rollout.rank_engines import RankEngines
from rlightning.rollout.weight_sync import WeightSync
from rlightning.types import RolloutBatch


class RecordedEngines(RankEngines):
    """Engines that have what they are sent at once; ``sent`` are the indices of those that each sync may send to."""

    sent: list[list[int]]

    def update_weights(
        self, source: object, weight_version: int, on_loaded: Callable[[], None], *, among: Sequence[Any]
    ) -> Sequence[Any]:
        self.sent.append([self.samplers.index(engine) for engine in among])
        on_loaded()
        for engine in among:
            engine.weight_version = weight_version
        return among


def test_starting_engine_causes_no_evaluation(tmp_path: Path) -> None:
    """Neither of the test adapter nor of the weights, at each sync of the engine beside it."""
    calls: list[str] = []

    def score(batch: RolloutBatch, dtype: torch.dtype) -> Tensor:
        calls.append("score")
        return torch.zeros(batch.num_tokens)

    @contextmanager
    def perturbed_adapter() -> Iterator[None]:
        calls.append("perturbed_adapter")
        yield

    module: Any = SimpleNamespace(
        tokenizer=load_tokenizer(save_byte_model(tmp_path)),
        weight_version=1,
        score=score,
        named_weights=dict,
        **dict.fromkeys(("adapter", "sends_adapter", "adapter_weights", "base_weights", "adapter_off"), True),
        perturbed_adapter=perturbed_adapter,
    )
    engines: list[Any] = [
        SimpleNamespace(is_alive=True, is_up=is_up, is_verified=is_up, is_proven=is_up, weight_version=None, error=None)
        for is_up in (True, False)
    ]
    make_sender: Any = None  # nothing is sent
    samplers = RecordedEngines([bare_config(tmp_path / "log")], engines, make_sender, is_colocated=False)
    samplers.sent, samplers._has_waited = [], True  # the run has begun
    verification = Verification(100, 1.2)
    verification.begin_run(module, 256, torch.float32, torch.device("cpu"))
    verification.num_syncs = 1  # the next one is not verified
    trainer: Any = SimpleNamespace(callbacks=[])
    sync = WeightSync(trainer, module, samplers, verification)
    for module.weight_version in (1, 2):
        sync.sync_weights()
    assert samplers.sent == [[0], [0]] and calls == []
    engines[1].is_up = True
    assert verification.needs_proof(module, samplers.reachable)
