"""What callbacks refuse: numbers that mean nothing when they are made, and places that take no file before the run."""

from pathlib import Path
from typing import Any

import pytest
from observed_run import ObservedModule, loader, make_trainer

from rlightning.callbacks import (
    CompletionsTable,
    DeviceSyncBeforeBarrier,
    EmptyCacheAfterUpdate,
    OffloadDuringRollout,
    RemotizeOnHeadOnly,
    RLProgressBar,
    RunReport,
    SaveHF,
    TransformersRollout,
    VLLMRollout,
)
from rlightning.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (CompletionsTable, {"every_n_steps": 0}, "every_n_steps=0 must be at least 1"),
        (CompletionsTable, {"num_console": -1}, "num_console=-1 must not be negative"),
        (CompletionsTable, {"num_logged": -2}, "num_logged=-2 must not be negative"),
        (DeviceSyncBeforeBarrier, {"device": "gpu one"}, "device='gpu one' is none"),
        (EmptyCacheAfterUpdate, {"every_n_updates": 0}, r"every_n_updates=0 must be at least 1\. Use 1"),
        (EmptyCacheAfterUpdate, {"min_free_bytes": -1}, r"min_free_bytes=-1 must be at least 0\. Leave it out"),
        (
            EmptyCacheAfterUpdate,
            {"max_reserved_ratio": 0.9},
            r"=0\.9 must be at least 1, where all is .*\. Try 1\.1",
        ),
        (OffloadDuringRollout, {"optimizer": False, "gradients": False}, "moves nothing"),
        (RemotizeOnHeadOnly, {"group_size": 0}, "group_size=0 must be at least 1"),
        (RemotizeOnHeadOnly, {"mesh_dims": ["tp"], "group_size": 2}, r"mesh_dims=\['tp'\] and group_size=2 both say"),
        (RLProgressBar, {"line_every_n_steps": 0}, "line_every_n_steps=0 must be at least 1"),
        (RunReport, {"every_n_steps": 0}, "every_n_steps=0 must be at least 1"),
        (RunReport, {"num_samples": -1}, "num_samples=-1 must not be"),
        (SaveHF, {"every_n_steps": 0}, "every_n_steps=0 must be at least 1"),
        (TransformersRollout, {"max_sequences": 0}, r"max_sequences=0 must be at least 1"),
        (VLLMRollout, {"max_staleness": 1}, r"max_staleness=1 needs placement: standalone\. Colocated engines sleep"),
        (VLLMRollout, {"max_staleness": -1, "placement": "standalone"}, r"max_staleness=-1 must be at least 0"),
        (VLLMRollout, {"num_engines": 0, "placement": "standalone"}, r"num_engines=0 must be at least 1"),
        (VLLMRollout, {"oversample": -0.5}, r"rollout\.oversample=-0\.5 must be at least 0"),
    ],
)
def test_senseless_argument_is_refused(kind: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**arguments)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (CompletionsTable, "taken' is a file"),
        (SaveHF, "taken' is a file"),
        (RunReport, "is a folder"),
    ],
)
def test_place_of_another_kind_is_refused(kind: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir() if kind is RunReport else (tmp_path / "taken").touch()
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, kind(path=str(tmp_path / "taken"))).fit(ObservedModule(), loader())
