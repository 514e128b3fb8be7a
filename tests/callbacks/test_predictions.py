import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from observed_run import ObservedModule, loader, make_completion, make_prompt, make_trainer, messages
from tiny import ActorSampler, UseSampler, save_model
from tiny import make_trainer as make_actor_trainer

from rlightning.algorithms import GRPO
from rlightning.callbacks import JSONLPredictions
from rlightning.data import PromptDataModule
from rlightning.errors import ConfigError
from rlightning.module import RLModule
from rlightning.report.trajectories import read_trajectories
from rlightning.rollout import OnCompleted, Sampling
from rlightning.types import Prompt, Trajectory


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


def test_parquet_output_has_a_trajectory_a_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rlightning")
    path = tmp_path / "predictions.parquet"
    predict(tmp_path, JSONLPredictions(str(path)))
    records = read_trajectories(path)
    assert [record.group for record in records] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [record.trajectory.final_text for record in records] == ["4", "55"] * 4
    assert [record.trajectory.prompt for record in records[::2]] == [make_prompt(index) for index in range(4)]
    assert messages(caplog) == [f"8 completions of 4 prompts in {path}"]
    assert [p.name for p in tmp_path.iterdir()] == ["predictions.parquet"]


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "predictions.jsonl").write_text("precious")
    with pytest.raises(ConfigError, match=r"predictions.jsonl' is there already and is not overwritten"):
        predict(tmp_path, JSONLPredictions())
    assert (tmp_path / "predictions.jsonl").read_text() == "precious"


class Dictated(ActorSampler):
    """Tells of each prompt as soon as it is complete, as engines do, and keeps count of them."""

    def __init__(self, module: RLModule, dies_after: int = 1000, how: Callable[[], None] | None = None) -> None:
        super().__init__(module)
        self.asked: list[int] = []
        self.dies_after, self.how = dies_after, how

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling, on_completed: OnCompleted | None = None
    ) -> list[list[Trajectory]]:
        done = {}
        for prompt in reversed(prompts):  # the last ones first: engines have an order of their own
            if len(self.asked) == self.dies_after and self.how is not None:
                self.how()
            self.asked.append(prompt.index)
            (done[prompt.index],) = super().generate([prompt], num_samples, sampling)
            if on_completed is not None and prompt.index % 4 != 3:  # not for all
                on_completed(prompt, done[prompt.index])
        return [done[prompt.index] for prompt in prompts]


def attempt() -> Trajectory:
    return Trajectory.single_turn(make_prompt(), make_completion("4"))


def out_of_luck() -> None:
    raise RuntimeError("out of luck")


class Prediction:
    """``predict`` of ten sums by the real Trainer in batches of four, in a folder that is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = save_model(folder / "model")
        rows = [{"prompt": f"{a}+1=", "column": float("nan") if a == 4 else "half a \ud83d"} for a in range(10)]
        (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(self, dies_after: int = 1000, how: Callable[[], None] = out_of_luck, **settings: Any) -> list[int]:
        """The indices of the prompts that were completed, in their order."""
        module = GRPO(self.model, samples_per_prompt=2)
        data = PromptDataModule(predict=str(self.folder / "sums.jsonl"), max_prompt_tokens=8, validation_batch_size=4)
        samplers: list[Dictated] = []

        def make(module: RLModule) -> Dictated:
            samplers.append(Dictated(module, dies_after, how))
            return samplers[0]

        trainer = make_actor_trainer(self.folder, 1, UseSampler(make, **settings), JSONLPredictions())
        try:
            trainer.predict(module, data, return_predictions=False)
        except RuntimeError as error:
            assert str(error) == "out of luck"
        return samplers[0].asked

    def lines(self, name: str = "predictions.jsonl") -> list[dict[str, Any]]:
        text = (self.folder / name).read_bytes().decode()
        return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the file that an uninterrupted run writes."""
    prediction = Prediction(tmp_path_factory.mktemp("whole"))
    assert prediction.run() == [3, 2, 1, 0, 7, 6, 5, 4, 9, 8]
    return prediction.lines()


@pytest.mark.long
def test_every_prompt_is_in_valid_json_in_order(whole: list[dict[str, Any]]) -> None:
    assert [line["index"] for line in whole] == list(range(10))
    assert [line["columns"]["column"] for line in whole] == ["half a \ud83d"] * 4 + [None] + ["half a \ud83d"] * 5


@pytest.mark.long
def test_interrupted_prediction_completes_no_prompt_twice(
    tmp_path: Path, whole: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rlightning")
    prediction = Prediction(tmp_path)
    assert prediction.run(dies_after=6) == [3, 2, 1, 0, 7, 6]  # 7 was not told of: it went with its batch
    partial = tmp_path / "predictions.jsonl.partial"
    assert sorted(line["index"] for line in prediction.lines(partial.name)) == [0, 1, 2, 3, 6]
    assert not (tmp_path / "predictions.jsonl").exists()
    assert f"5 prompts' completions are in {partial}; the same command goes on from there" in messages(caplog)
    assert prediction.run(dies_after=2) == [8, 7]
    assert f"{partial} has 5 prompts' completions: the others come next" in messages(caplog)
    assert prediction.run() == [9, 7, 5, 4]
    assert prediction.lines() == whole
    assert not list(tmp_path.glob("predictions.jsonl.partial*"))
    assert messages(caplog)[-1] == f"20 completions of 10 prompts in {tmp_path / 'predictions.jsonl'}"


@pytest.mark.long
def test_complete_partial_file_gets_its_name(tmp_path: Path, whole: list[dict[str, Any]]) -> None:
    prediction = Prediction(tmp_path)
    prediction.run(dies_after=6)
    settings = (tmp_path / "predictions.jsonl.partial.settings").read_bytes()
    prediction.run()
    (tmp_path / "predictions.jsonl").rename(tmp_path / "predictions.jsonl.partial")
    (tmp_path / "predictions.jsonl.partial.settings").write_bytes(settings)
    assert prediction.run() == []
    assert prediction.lines() == whole


@pytest.mark.long
def test_other_sampling_or_prompts_are_refused(tmp_path: Path) -> None:
    prediction = Prediction(tmp_path)
    prediction.run(dies_after=6)
    before = prediction.lines("predictions.jsonl.partial")
    with pytest.raises(
        ConfigError, match=r"was begun with rollout\.temperature=1\.0, and now it is 0\.5\. It is not over"
    ):
        prediction.run(temperature=0.5)
    rows = (tmp_path / "sums.jsonl").read_text()
    (tmp_path / "sums.jsonl").write_text(rows.replace("3+1=", "4+4="))
    with pytest.raises(ConfigError, match=r"partial' holds another prompt of row 3\. It is not overwritten"):
        prediction.run()
    assert prediction.lines("predictions.jsonl.partial") == before


@pytest.mark.processes
def test_sigkill_within_a_batch_loses_no_prompt(tmp_path: Path, whole: list[dict[str, Any]]) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal, sys\nfrom pathlib import Path\n"
        f"sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parent.parent)]!r}\n"
        "from test_predictions import Prediction\n"
        f"Prediction(Path({str(tmp_path)!r})).run(6, lambda: os.kill(os.getpid(), signal.SIGKILL))\n"
    )
    killed = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    prediction = Prediction(tmp_path)
    assert sorted(line["index"] for line in prediction.lines("predictions.jsonl.partial")) == [0, 1, 2, 3, 6]
    assert prediction.run() == [8, 7, 5, 4, 9]
    assert prediction.lines() == whole


def rank_of_two(folder: Path, rank: int) -> Any:
    return SimpleNamespace(default_root_dir=folder, world_size=2, global_rank=rank)


def predict_on_rank(folder: Path, rank: int, *indices: int, how: Callable[..., None]) -> None:
    """These prompts on a rank that then ends one way or the other."""
    trainer, callback = rank_of_two(folder, rank), JSONLPredictions()
    callback.setup(trainer, None, "predict")
    callback.on_predict_start(trainer, None)
    for index in indices:
        callback.on_predict_prompt_end(trainer, None, make_prompt(index), [attempt()])
    how(callback, trainer, None)


def interrupt(callback: JSONLPredictions, trainer: Any, module: Any) -> None:
    callback.on_exception(trainer, module, KeyboardInterrupt())


def test_rank_leaves_out_prompts_of_any_rank(tmp_path: Path) -> None:
    predict_on_rank(tmp_path, 1, 5, how=interrupt)
    other = JSONLPredictions()
    other.setup(rank_of_two(tmp_path, 0), None, "predict")
    assert [other.is_done(make_prompt(index)) for index in (4, 5)] == [False, True]
    interrupt(other, rank_of_two(tmp_path, 0), None)
    with pytest.raises(ConfigError, match=r"rank1\.jsonl\.partial' was begun with another number of ranks than 1"):
        JSONLPredictions().setup(SimpleNamespace(default_root_dir=tmp_path), None, "predict")


def test_a_kill_between_two_ranks_ends_loses_nothing(tmp_path: Path) -> None:
    predict_on_rank(tmp_path, 0, 0, how=JSONLPredictions.on_predict_end)
    predict_on_rank(tmp_path, 1, 1, how=interrupt)
    again = [JSONLPredictions(), JSONLPredictions()]
    for rank, callback in enumerate(again):
        callback.setup(rank_of_two(tmp_path, rank), None, "predict")
        assert [callback.is_done(make_prompt(index)) for index in (0, 1, 2)] == [True, True, False]
    for rank, callback in enumerate(again):
        callback.on_predict_start(rank_of_two(tmp_path, rank), None)
        if rank == 0:
            callback.on_predict_prompt_end(rank_of_two(tmp_path, rank), None, make_prompt(2), [attempt()])
        callback.on_predict_end(rank_of_two(tmp_path, rank), None)
    lines = {path.name: [json.loads(line)["index"] for line in path.open()] for path in tmp_path.iterdir()}
    assert lines == {"predictions.rank0.jsonl": [0, 2], "predictions.rank1.jsonl": [1]}
    with pytest.raises(ConfigError, match=r"rank0\.jsonl' is there already and is not overwritten"):
        JSONLPredictions().setup(rank_of_two(tmp_path, 0), None, "predict")
    assert len(list(tmp_path.iterdir())) == 2


def test_training_is_none_of_its_business(tmp_path: Path) -> None:
    (tmp_path / "predictions.jsonl").write_text("precious")
    make_trainer(tmp_path, JSONLPredictions()).fit(ObservedModule(), loader())
    assert (tmp_path / "predictions.jsonl").read_text() == "precious"
