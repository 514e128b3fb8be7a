import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from observed_run import ObservedModule, loader, make_completion, make_prompt, make_trainer, messages

from rlightning.callbacks import JSONLPredictions
from rlightning.errors import ConfigError


def predict(folder: Path, callback: JSONLPredictions, module: ObservedModule | None = None) -> None:
    make_trainer(folder, callback).predict(module or ObservedModule(), loader(2), return_predictions=False)


def test_an_object_a_prompt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rlightning")
    predict(tmp_path, JSONLPredictions())
    path = tmp_path / "predictions.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2, 3]
    assert lines[3] == {
        "index": 3,
        "prompt": "2+2=",
        "completions": ["4", "55"],
        "finish_reasons": ["stop", "length"],
        "columns": {"answer": "4"},
    }
    assert messages(caplog) == [f"8 completions of 4 prompts in {path}"]
    assert [p.name for p in tmp_path.iterdir()] == ["predictions.jsonl"]


def test_a_path_of_ones_own(tmp_path: Path) -> None:
    predict(tmp_path, JSONLPredictions(str(tmp_path / "new" / "mine.jsonl")))
    assert len((tmp_path / "new" / "mine.jsonl").read_text().splitlines()) == 4


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "predictions.jsonl").write_text("precious")
    with pytest.raises(ConfigError, match=r"predictions.jsonl' is there already and is not overwritten"):
        predict(tmp_path, JSONLPredictions())
    assert (tmp_path / "predictions.jsonl").read_text() == "precious"


def test_a_run_that_dies_leaves_no_file_that_looks_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Dies(ObservedModule):
        def predict_step(self, prompts: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise RuntimeError("out of luck")
            return super().predict_step(prompts, batch_idx)

    caplog.set_level(logging.INFO, "rlightning")
    with pytest.raises(RuntimeError, match="out of luck"):
        predict(tmp_path, JSONLPredictions(), Dies())
    partial = tmp_path / "predictions.jsonl.partial"
    assert len(partial.read_text().splitlines()) == 2
    assert not (tmp_path / "predictions.jsonl").exists()
    assert messages(caplog) == [f"the first 2 prompts' completions are in {partial}"]


def test_the_next_run_starts_the_file_again(tmp_path: Path) -> None:
    (tmp_path / "predictions.jsonl.partial").write_text("half a li")
    predict(tmp_path, JSONLPredictions())
    assert len((tmp_path / "predictions.jsonl").read_text().splitlines()) == 4


def test_every_rank_writes_its_share(tmp_path: Path) -> None:
    for rank in (0, 1):
        trainer = SimpleNamespace(default_root_dir=tmp_path, world_size=2, global_rank=rank)
        callback = JSONLPredictions()
        callback.on_predict_start(trainer, None)
        callback.on_predict_batch_end(trainer, None, [(make_prompt(rank), [make_completion("4")])], None, 0)
        callback.on_predict_end(trainer, None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["predictions.rank0.jsonl", "predictions.rank1.jsonl"]


def test_training_is_none_of_its_business(tmp_path: Path) -> None:
    (tmp_path / "predictions.jsonl").write_text("precious")
    make_trainer(tmp_path, JSONLPredictions()).fit(ObservedModule(), loader())
    assert (tmp_path / "predictions.jsonl").read_text() == "precious"
