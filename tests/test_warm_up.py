"""What a run compiles before it trains."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import copy_weights, make_data, make_trainer, save_model, share_of_ones
from torch._dynamo.utils import counters

from rlightning.algorithms import GRPO
from rlightning.models import layers


@pytest.fixture(autouse=True)
def without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of torch.compile but for the code it writes."""
    torch.compiler.reset()
    counters.clear()
    monkeypatch.setattr(layers, "BACKEND", "aot_eager")
    monkeypatch.setenv("CXX", "true")  # there is no code to compile


class Watched(GRPO):
    """Counts the graphs that are compiled for what follows on each rollout."""

    def on_fit_start(self) -> None:
        self.new_graphs: list[int] = []

    def estimate_advantages(self, batch: Any) -> Any:
        self.new_graphs.append(-counters["stats"]["unique_graphs"])
        return super().estimate_advantages(batch)

    def update(self, batch: Any) -> dict[str, float]:
        metrics = super().update(batch)
        self.new_graphs[-1] += counters["stats"]["unique_graphs"]
        return metrics


class Cold(Watched):
    def on_train_start(self) -> None:
        pass


@pytest.mark.timeout(200)
def test_the_first_update_finds_its_graphs_and_no_other_trace(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    runs = []
    for kind in (Watched, Cold):
        module = kind(
            model,
            rewards=[share_of_ones],
            prompts_per_step=4,
            samples_per_prompt=2,
            max_tokens_per_microbatch=24,
            lr=1e-3,
            validate_first=False,
            kl_coef=0.1,
            entropy_coef=0.01,
            compile=True,
        )
        make_trainer(tmp_path, 2).fit(module, datamodule=make_data(tmp_path))
        runs.append(module)
        torch.compiler.reset()
    warm, cold = runs
    # of the actor with gradient, and of the reference; the sampler here has used the actor's without gradient
    assert (warm.new_graphs, cold.new_graphs) == ([0, 0], [2, 0])
    torch.testing.assert_close(copy_weights(warm), copy_weights(cold), atol=0, rtol=0)
