"""The data module under the real Trainer: what a run sees, and what an interrupted run sees after its resume."""

import itertools
import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from prompt_files import make_tokenizer, write_rows
from tiny import bare_trainer

from rlightning.data import PromptDataModule, ValidationSet
from rlightning.errors import ConfigError
from rlightning.rollout import Sampling
from rlightning.types import Prompt


class Recorder(LightningModule):
    """Steps by hand as RLModule does, and writes down the prompts of each finished step."""

    def __init__(self, *, prompts_per_step: int = 3, refill: int = 0, fail_at: int | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.tokenizer = make_tokenizer()
        self.prompts_per_step = prompts_per_step
        self.max_model_length = 64
        self.refill = refill
        self.fail_at = fail_at
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.steps: list[list[int]] = []
        self.validated: dict[int, list[int]] = {}
        self.checked: list[tuple[list[str], str]] = []
        self.answers_checked: list[tuple[int, str]] = []

    def check_columns(self, columns: list[str], source: str) -> None:
        self.checked.append((columns, Path(source).name))

    def check_answers(self, prompts: list[Prompt], where: Callable[[int], str]) -> None:
        self.answers_checked.append((len(prompts), Path(where(0)).name))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, prompts: list[Prompt], batch_idx: int) -> None:
        if self.refill and self.global_step % 2:
            prompts = prompts + self.trainer.datamodule.take(self.refill)  # type: ignore[attr-defined]
        if self.global_step == self.fail_at:
            raise RuntimeError("interrupted in the middle of a step")
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        self.manual_backward(self.weight.sum())
        optimizer.step()
        self.steps.append([prompt.index for prompt in prompts])

    def validation_step(self, prompts: list[Prompt], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validated.setdefault(dataloader_idx, []).extend(prompt.index for prompt in prompts)

    test_step = validation_step

    def predict_step(self, prompts: list[Prompt], batch_idx: int) -> list[str]:
        return [prompt.text for prompt in prompts]


class StopAfter(Callback):
    """Ends the run after some steps, as an interruption between two steps does."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if trainer.global_step == self.steps:
            raise InterruptedError("between two steps")


def make_trainer(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    usual = {"max_epochs": 3, "enable_checkpointing": bool(callbacks), "use_distributed_sampler": True}
    return bare_trainer(folder, -1, *callbacks, **usual | options)


@pytest.fixture
def train(tmp_path: Path) -> str:
    """Eleven prompts: three steps of three an epoch, and two left over."""
    return write_rows(tmp_path / "train.jsonl", [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(11)])


def make_data(train: Any, **options: Any) -> PromptDataModule:
    return PromptDataModule(train, **{"max_prompt_tokens": 32, "seed": 5, **options})


def stop_after(steps: int, folder: Path, data: PromptDataModule, *, refill: int) -> Recorder:
    """A run that is interrupted, with a checkpoint after each step."""
    module = Recorder(refill=refill)
    checkpoints = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    with pytest.raises(InterruptedError):
        make_trainer(folder, checkpoints, StopAfter(steps)).fit(module, datamodule=data)
    return module


def resume(folder: Path, data: PromptDataModule, step: int, *, refill: int = 0, **options: Any) -> list[list[int]]:
    """The steps of a run that goes on from a checkpoint."""
    module = Recorder(refill=refill)
    make_trainer(folder, **options).fit(module, datamodule=data, ckpt_path=folder / f"step={step}.ckpt")
    return module.steps


def run_whole(folder: Path, train: str, **options: Any) -> list[list[int]]:
    module = Recorder(**options)
    make_trainer(folder).fit(module, datamodule=make_data(train))
    return module.steps


def test_epochs_go_on_where_the_last_ended(tmp_path: Path, train: str) -> None:
    steps = run_whole(tmp_path, train)
    assert [len(step) for step in steps] == [3] * 9
    seen = [index for step in steps for index in step]
    assert sorted(seen[:11]) == sorted(seen[11:22]) == list(range(11))


@pytest.mark.parametrize("name", ["tokenizer", "prompts_per_step", "max_model_length"])
def test_module_without_what_is_read_of_it_is_refused(name: str, tmp_path: Path, train: str) -> None:
    module = Recorder()
    delattr(module, name)
    with pytest.raises(ConfigError, match=f"needs {name} of the module, which Recorder does not have"):
        make_trainer(tmp_path).fit(module, datamodule=make_data(train))


@pytest.mark.parametrize(("limit", "num_steps"), [(2, 2), (1, 1), (0.67, 2)])
def test_overfit_batches_repeat_first_steps_in_order(limit: float, num_steps: int, tmp_path: Path, train: str) -> None:
    module = Recorder()
    make_trainer(tmp_path, overfit_batches=limit).fit(module, datamodule=make_data(train))
    assert module.steps == [[0, 1, 2], [3, 4, 5]][:num_steps] * 3


def test_run_seed_orders_prompts_unless_data_seed_set(
    tmp_path: Path, train: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def order(run_seed: int, own: int | None) -> list[list[int]]:
        monkeypatch.setenv("PL_GLOBAL_SEED", str(run_seed))
        module = Recorder()
        make_trainer(tmp_path, max_epochs=1).fit(module, datamodule=make_data(train, seed=own))
        return module.steps

    assert order(1, None) == order(1, None) == order(2, 1) != order(2, None)


@pytest.mark.parametrize("refill", [0, 2])
@pytest.mark.parametrize("last_step", [1, 2, 3, 4, 6, 7])  # 3 and 6 end an epoch
def test_a_resumed_run_sees_exactly_the_rest(tmp_path: Path, train: str, last_step: int, refill: int) -> None:
    whole = run_whole(tmp_path, train, refill=refill)
    first = stop_after(last_step + 1, tmp_path, make_data(train), refill=refill)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*your dataloader is not resumable.*")
        rest = resume(tmp_path, make_data(train), last_step, refill=refill)
    assert first.steps[:last_step] + rest == whole


@pytest.mark.parametrize("fail_at", [1, 3, 4])  # 3 is the first step of the second epoch
def test_a_step_that_was_not_finished_is_repeated(tmp_path: Path, train: str, fail_at: int) -> None:
    whole = run_whole(tmp_path, train, refill=2)
    checkpoints = ModelCheckpoint(tmp_path, save_on_exception=True, every_n_train_steps=100)
    first = Recorder(refill=2, fail_at=fail_at)
    with pytest.raises(RuntimeError, match="interrupted"):
        make_trainer(tmp_path, checkpoints).fit(first, datamodule=make_data(train))
    (checkpoint,) = tmp_path.glob("*.ckpt")
    resumed = Recorder(refill=2)
    make_trainer(tmp_path).fit(resumed, datamodule=make_data(train), ckpt_path=checkpoint)
    assert first.steps + resumed.steps == whole


def test_a_checkpoint_of_a_validation_inside_an_epoch(tmp_path: Path, train: str) -> None:
    whole = run_whole(tmp_path, train)
    checkpoints = ModelCheckpoint(tmp_path, save_on_train_epoch_end=False, save_top_k=-1, filename="{step}")
    options: dict[str, Any] = {"val_check_interval": 2, "check_val_every_n_epoch": None}
    data = make_data(train, validation=train)
    first = Recorder()
    make_trainer(tmp_path, checkpoints, **options).fit(first, datamodule=data)
    assert first.steps == whole
    for last_step in (2, 4, 6):
        rest = resume(tmp_path, make_data(train, validation=train), last_step, **options)
        assert whole[:last_step] + rest == whole


def test_resume_with_other_data_is_refused(tmp_path: Path, train: str) -> None:
    checkpoints = ModelCheckpoint(tmp_path, filename="last")
    make_trainer(tmp_path, checkpoints, max_epochs=1).fit(Recorder(), datamodule=make_data(train))
    other = write_rows(tmp_path / "other.jsonl", [{"prompt": f"{i}-{i}="} for i in range(11)])
    with pytest.raises(ConfigError, match="The 11 training prompts are not those"):
        make_trainer(tmp_path).fit(Recorder(), datamodule=make_data(other), ckpt_path=tmp_path / "last.ckpt")
    # Validation of the checkpoint needs no training prompts.
    data = PromptDataModule(validation=other, max_prompt_tokens=32)
    make_trainer(tmp_path).validate(Recorder(), datamodule=data, ckpt_path=tmp_path / "last.ckpt")


def read_rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_run_on_rows_equals_run_on_file(tmp_path: Path, train: str) -> None:
    rows = read_rows(train)
    whole = run_whole(tmp_path, train, refill=1)
    first = stop_after(4, tmp_path, make_data(rows), refill=1)
    for source in (rows, train):
        assert first.steps[:3] + resume(tmp_path, make_data(source), 3, refill=1) == whole
    with pytest.raises(ConfigError, match="The 11 training prompts are not those"):
        resume(tmp_path, make_data([*rows[:10], {"prompt": "1-1="}]), 3)


def test_a_generator_is_read_once_for_all_stages(tmp_path: Path, train: str) -> None:
    rows = read_rows(train)
    yielded: list[int] = []

    def generate() -> Iterator[dict[str, Any]]:
        for i, row in enumerate(itertools.cycle(rows)):
            yielded.append(i)
            yield row

    data = make_data(
        generate(),
        train_limit=6,
        validation={"v": {"path": generate(), "limit": 4}},
        predict=generate(),
        predict_limit=3,
    )
    assert yielded == []
    for _ in range(2):
        module = Recorder()
        make_trainer(tmp_path, max_epochs=1).fit(module, datamodule=data)
        assert len(module.steps) == 2 and module.validated == {0: [0, 1, 2, 3]}
        make_trainer(tmp_path).validate(module, datamodule=data)
        batches = make_trainer(tmp_path).predict(module, datamodule=data)
        assert batches == [["0+0=", "1+1=", "2+2="]]
    assert yielded == [*range(6), *range(4), *range(3)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": iter([])}, r"data\.train is a list_iterator, .* Say how many to take by data\.train_limit"),
        ({"validation": iter([])}, r"data\.validation\.validation is a .* by data\.validation\.validation\.limit"),
    ],
)
def test_generators_without_a_length_are_refused(
    tmp_path: Path, train: str, data: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path).fit(Recorder(), datamodule=make_data(**{"train": train, **data}))


def test_models_prompt_limit_is_said_once(tmp_path: Path, train: str, caplog: pytest.LogCaptureFixture) -> None:
    rows = [*read_rows(train), {"prompt": "1" * 59}]  # 64 positions, less 6 of a completion, are 58
    data = PromptDataModule(rows, validation=rows, seed=5)

    def validate(max_model_length: int, max_new_tokens: int) -> list[int]:
        module = Recorder()
        module.max_model_length = max_model_length
        make_trainer(tmp_path, UseSampling(max_new_tokens)).validate(module, datamodule=data)
        return module.validated[0]

    with caplog.at_level("INFO"):
        trainer = make_trainer(tmp_path, UseSampling(6), max_epochs=1, enable_checkpointing=False)
        trainer.fit(Recorder(), datamodule=data)
        assert validate(64, 6) == list(range(11))
    said = "data.max_prompt_tokens=58: the model's 64 positions, less rollout.max_new_tokens=6."
    assert [record.message for record in caplog.records if "max_prompt_tokens=58:" in record.message] == [said]
    assert data.max_prompt_tokens == 58
    assert "1 of 12 prompts of 'data.train' have more than max_prompt_tokens=58 tokens and are dropped" in caplog.text
    assert validate(4096, 6) == list(range(12)) and data.max_prompt_tokens == 1024
    with pytest.raises(ConfigError, match=r"rollout\.max_new_tokens=64 leaves a model of 64 positions no room for a"):
        validate(64, 64)


def test_a_copy_for_other_processes_has_no_rows(tmp_path: Path, train: str) -> None:
    rows = [{**row, "check": lambda: None} for row in read_rows(train)]  # which cannot be pickled
    data = PromptDataModule(rows, validation={"v": ValidationSet(rows, limit=2)}, predict=rows)
    module = Recorder()
    make_trainer(tmp_path, max_epochs=1).fit(module, datamodule=data)
    sent = pickle.loads(pickle.dumps(data.without_rows()))
    assert sent.max_prompt_tokens == 63 and [chosen.name for chosen in sent.validation_sets] == ["v"]
    assert data.train is rows and data.validation_sets[0].path is rows and data.stream is not None


class UseSampling(Callback):
    """Has what the data module looks for in a callback that samples."""

    def __init__(self, max_new_tokens: int) -> None:
        self.sampling = Sampling(max_new_tokens=max_new_tokens)


def test_validation_sets_have_own_columns_and_samples(tmp_path: Path, train: str) -> None:
    other = write_rows(tmp_path / "other.jsonl", [{"question": "9*9"}])
    data = make_data(
        train,
        validation={
            "greedy": ValidationSet(train, limit=5),
            "many": ValidationSet(other, samples_per_prompt=4, prompt_column="question"),
        },
        validation_batch_size=2,
    )
    module = Recorder()
    make_trainer(tmp_path, max_epochs=1).fit(module, datamodule=data)
    assert [(s.name, s.samples_per_prompt, s.temperature) for s in data.validation_sets] == [
        ("greedy", 1, 0.0),
        ("many", 4, 1.0),
    ]
    assert module.validated == {0: [0, 1, 2, 3, 4], 1: [0]}
    assert module.checked == [
        (["answer", "prompt"], "train.jsonl"),
        (["answer", "prompt"], "train.jsonl"),
        (["question"], "other.jsonl"),
    ]
    make_trainer(tmp_path).test(module, datamodule=data)


def test_predict_gives_all_rows_in_order(tmp_path: Path, train: str) -> None:
    data = PromptDataModule(predict=train, max_prompt_tokens=32, validation_batch_size=8)
    batches = make_trainer(tmp_path).predict(Recorder(), datamodule=data)
    assert batches is not None
    assert [len(batch) for batch in batches] == [8, 3]
    assert batches[0][0] == "0+0="


@pytest.mark.parametrize(
    ("options", "prompts_per_step", "message"),
    [
        ({}, 12, r"has 11 usable prompts, and one step takes prompts_per_step=12\. Use at most 11"),
        ({"max_prompt_tokens": 64}, 3, "max_prompt_tokens=64 leaves a model of 64 positions no room"),
        ({"max_prompt_tokens": 0}, 3, "max_prompt_tokens=0 must be at least 1"),
        ({"prompt_column": "promt"}, 3, r"no column 'promt'\. Did you mean 'prompt'\?"),
        ({"train": None}, 3, r"data\.train is not set, and there is nothing else to train on"),
    ],
)
def test_mistakes_are_found_before_the_model_loads(
    tmp_path: Path,
    train: str,
    options: dict[str, Any],
    prompts_per_step: int,
    message: str,
) -> None:
    class Unloadable(Recorder):
        def configure_model(self) -> None:
            raise AssertionError("the model loads")

    module = Unloadable(prompts_per_step=prompts_per_step)
    with pytest.raises(ConfigError, match=message) as caught:
        make_trainer(tmp_path).fit(module, datamodule=make_data(**{"train": train, **options}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stage", ["validate", "predict"])
def test_a_stage_without_its_set(tmp_path: Path, train: str, stage: str) -> None:
    with pytest.raises(ConfigError, match=f"is not set, and there is nothing else to {stage}"):
        getattr(make_trainer(tmp_path), stage)(Recorder(), datamodule=make_data(train))


class Writer(Recorder):
    """Writes what its rank saw to a file."""

    def on_fit_end(self) -> None:
        record = {"steps": self.steps, "validated": self.validated}
        (Path(self.trainer.default_root_dir) / f"rank{self.global_rank}.json").write_text(json.dumps(record))


@pytest.mark.processes
def test_two_ranks_share_every_step_and_every_validation_batch(tmp_path: Path, train: str) -> None:
    whole = Recorder(prompts_per_step=4)
    make_trainer(tmp_path, max_epochs=1).fit(whole, datamodule=make_data(train))
    data = make_data(train, validation={"v": ValidationSet(train, limit=5)}, validation_batch_size=4)
    trainer = make_trainer(tmp_path, max_epochs=1, devices=2, strategy=DDPStrategy(start_method="spawn"))
    trainer.fit(Writer(prompts_per_step=4), datamodule=data)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert [a + b for a, b in zip(first["steps"], second["steps"], strict=True)] == whole.steps
    # Batches of four: the last one holds a single prompt, and the second rank gets an empty share of it.
    assert first["validated"] == {"0": [0, 2, 4]}
    assert second["validated"] == {"0": [1, 3]}


@pytest.mark.parametrize(
    ("rank", "expected"), [(0, [(11, "train.jsonl, line 1"), (5, "train.jsonl, line 1")]), (1, [])]
)
def test_reference_answers_are_checked_on_rank_0(
    tmp_path: Path,
    train: str,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    expected: list[tuple[int, str]],
) -> None:
    data = make_data(train, validation={"v": ValidationSet(train, limit=5)}, predict=train)
    data.trainer = make_trainer(tmp_path)
    module = Recorder()
    data.trainer.strategy.connect(module)
    monkeypatch.setattr(PromptDataModule, "_rank_and_ranks", (rank, 1))
    data.setup("fit")
    data.setup("predict")
    assert module.answers_checked == expected


def test_prompts_that_the_ranks_cannot_split(tmp_path: Path, train: str) -> None:
    data = make_data(train)
    data.trainer = make_trainer(tmp_path, devices=2, strategy="ddp")
    data.trainer.strategy.connect(Recorder())
    with pytest.raises(ConfigError, match=r"prompts_per_step=3 cannot be split over 2 ranks\. .* such as 2"):
        data.setup("fit")
