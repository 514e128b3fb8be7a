import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from tiny import bare_trainer, make_grpo

from rlightning.callbacks import SaveHF
from rlightning.controller import RayController
from rlightning.controller.command_feed import CommandFeed, WorkerData
from rlightning.controller.commands import (
    Call,
    Command,
    CommandQueue,
    Completed,
    End,
    EndEpoch,
    EndEvaluation,
    Evaluate,
    EvaluateBatch,
    Failed,
    ForeseenWorkerError,
    HookCall,
    Load,
    PromptRequest,
    StartEpoch,
    StartTraining,
    StopRequest,
    Train,
    WorkerError,
    raise_failure,
)
from rlightning.controller.driver import DriverContext
from rlightning.controller.hook_relay import BatchPart, HookRelay, Relay, RemoteBatch
from rlightning.controller.remote_module import ControllerModule
from rlightning.controller.rtensor import RTensor, fetch_tensors
from rlightning.controller.worker import Worker
from rlightning.controller.worker_trainer import WorkerTrainer
from rlightning.errors import ConfigError
from rlightning.models import Adapter


def queue_of(*commands: Command[object]) -> CommandQueue:
    """A queue that has got these, numbered from 0."""
    queue = CommandQueue()
    for number, command in enumerate(commands):
        queue.submit(number, command)
    return queue


def feed_of(queue: CommandQueue, done: list[Any]) -> CommandFeed:
    """A feed that notes what is executed."""
    return CommandFeed(
        queue,
        execute=lambda command: done.append(command),
        evaluate=lambda command: {},
        step_result=lambda: len(done),
        report_stop=lambda: None,
    )


def test_command_sent_twice_is_executed_once() -> None:
    call = Call("save_hf", ("here",))
    queue, done = queue_of(call, Train([7])), list[Any]()
    queue.submit(0, call)
    feed = feed_of(queue, done)
    assert feed.await_batch() == Train([7]) and next(feed.training_batches()) == [7]
    assert done == [call]
    queue.submit(0, call)  # executed already: its answer is read again
    assert queue.collect(0, 0) == queue.collect(0, 0) == [Completed(None)]
    queue.submit(1, Train([7]))  # while it is under way
    queue.submit(2, EndEpoch())
    feed.answer_step()
    assert feed.await_batch() is None
    assert done == [call]
    assert queue.collect(1, 0) == [Completed(1)]


def test_command_is_refused_after_its_answer() -> None:
    queue = CommandQueue()
    queue.submit(3, End())
    queue.take()
    queue.answer("done")
    queue.forget(3)
    with pytest.raises(RuntimeError, match="command 3 has been executed"):
        queue.submit(3, End())


def test_entries_are_read_as_they_come() -> None:
    queue = queue_of(Train([]))
    queue.take()
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.extend(queue.collect(0, 0)))
    reader.start()
    queue.record(PromptRequest(2))
    reader.join(120)
    assert found == [PromptRequest(2)]
    queue.answer(None)
    assert queue.collect(0, 1) == [Completed(None)]


def test_what_a_step_asks_for_comes_once() -> None:
    queue = CommandQueue()
    for number, prompts in ((0, ["a"]), (0, ["a"]), (1, ["b"])):
        queue.supply(number, prompts)
    assert [queue.await_prompts(), queue.await_prompts()] == [["a"], ["b"]]


def test_failure_answers_all_commands() -> None:
    queue, failure = queue_of(Train([])), Failed(1, "ValueError: boom", "Traceback", exit_code=None, is_first=True)
    queue.fail(failure)
    queue.submit(1, End())
    assert queue.collect(0, 0) == queue.collect(1, 0) == [failure]


@pytest.mark.parametrize(
    ("exit_code", "kind", "message"),
    [(None, WorkerError, "worker 1 failed: it died"), (1, ForeseenWorkerError, r"^worker 1: it died\nTrace$")],
)
def test_a_failure_is_raised_as_what_it_is(exit_code: int | None, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        raise_failure(Failed(1, "it died", "Trace", exit_code=exit_code, is_first=True))


def test_config_error_of_worker_reaches_controller() -> None:
    failed = Worker(1, 2, DriverContext.here([]), "1")._describe(ConfigError("value=3 is wrong. Use 4."))
    assert failed.rank == 1 and failed.is_first
    with pytest.raises(ConfigError, match=r"^value=3 is wrong\. Use 4\.$"):
        raise_failure(failed)


class Doubling(LightningModule):
    """Returns a tensor from each step."""

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> list[torch.Tensor]:
        return [2 * batch]

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return 2 * batch.sum()

    test_step = validation_step


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_controller_receives_no_tensors_from_evaluation_steps(stage: str, tmp_path: Path) -> None:
    """To read one of a GPU it would have to use that GPU itself."""
    queue = queue_of(Evaluate(1), EvaluateBatch(torch.arange(3), 0), EndEvaluation())
    feed = feed_of(queue, [])
    trainer = bare_trainer(tmp_path, 1, HookRelay(feed, ()), enable_checkpointing=True)
    getattr(trainer, stage)(Doubling(), datamodule=WorkerData(LightningDataModule(), feed))
    [answered] = queue.collect(1, 0)
    assert isinstance(answered, Completed)
    if stage != "predict":
        assert answered.result is None
    else:
        assert [type(handle) for handle in answered.result] == [RTensor]
        assert fetch_tensors(answered.result)[0].tolist() == [0, 2, 4]


def worker_trainer(folder: Path, feed: CommandFeed, **settings: Any) -> WorkerTrainer:
    """On one CPU."""
    relay = HookRelay(feed, ())
    shared: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
    return WorkerTrainer(feed, default_root_dir=folder, callbacks=[relay], **shared, **settings)


def test_steps_are_estimated_without_epochs_only(tmp_path: Path) -> None:
    feed = feed_of(CommandQueue(), [])
    assert worker_trainer(tmp_path, feed, max_steps=7, max_epochs=-1).estimated_stepping_batches == 7
    with pytest.raises(ConfigError, match=r"asked for with max_epochs=2, .* Set trainer\.max_steps"):
        _ = worker_trainer(tmp_path, feed, max_epochs=2).estimated_stepping_batches


class SkipsEpoch(LightningModule):
    automatic_optimization = False

    def configure_optimizers(self) -> None: ...

    def training_step(self, batch: Any) -> None: ...

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1


def test_worker_skipping_an_epoch_raises_config_error(tmp_path: Path) -> None:
    feed = feed_of(queue_of(StartTraining(2), StartEpoch(2), Train([7])), [])
    trainer = worker_trainer(tmp_path, feed, max_steps=7)
    with pytest.raises(ConfigError, match="on_train_batch_start returned -1"):
        trainer.fit(SkipsEpoch(), datamodule=WorkerData(LightningDataModule(), feed))


class Starts(SkipsEpoch):
    """Stops in its second epoch's start, and notes what it finds when training and epochs start."""

    def __init__(self) -> None:
        super().__init__()
        self.random: list[float] = []
        self.num_batches: list[float] = []

    def on_train_start(self) -> None:
        self.random.append(torch.rand(1).item())

    def on_train_epoch_start(self) -> None:
        self.num_batches.append(self.trainer.num_training_batches)
        self.trainer.should_stop = len(self.num_batches) == 2


def test_worker_keeps_loaded_rng_and_reports_stop_immediately(tmp_path: Path) -> None:
    """A checkpoint may bring a state of random numbers, which training goes on with."""
    epochs: list[Command[object]] = [StartEpoch(2), EndEpoch(), StartEpoch(3), EndEpoch()]
    queue, module = queue_of(Load("", None), StartTraining(2), *epochs, End()), Starts()
    feed = CommandFeed(
        queue,
        execute=lambda command: torch.manual_seed(7) and None,
        evaluate=lambda command: {},
        step_result=lambda: None,
        report_stop=lambda: queue.record(StopRequest()) if module.trainer.should_stop else None,
    )
    worker_trainer(tmp_path, feed, max_steps=7).fit(module, datamodule=WorkerData(LightningDataModule(), feed))
    torch.manual_seed(7)
    assert module.random == [torch.rand(1).item()]
    assert module.num_batches == [2, 3]
    answers = [queue.collect(number, 0) for number in range(6)]
    assert answers == [[Completed(None)]] * 4 + [[StopRequest(), Completed(None)]] * 2


def test_rank_hook_does_not_wait_for_others() -> None:
    call: list[tuple[str, list[Any]]] = []
    relay = Relay(2, lambda hook, arguments: call.append((hook.hook, list(arguments))))
    for rank, hook, argument in [
        (1, "on_predict_prompt_end", ["b"]),
        (0, "on_rollout_start", ["a"]),
        (1, "on_predict_prompt_end", ["c"]),
        (1, "on_rollout_start", ["d"]),
    ]:
        relay.add(rank, HookCall(hook, (argument,), 0, 0))
    assert call == [
        ("on_predict_prompt_end", [["b"]]),
        ("on_predict_prompt_end", [["c"]]),
        ("on_rollout_start", [["a", "d"]]),
    ]


def test_flush_calls_other_ranks_hooks_with_current_counts() -> None:
    """Ranks 1 and 2 have restarted their engines; rank 0 has updated since."""
    call: list[tuple[str, int, int]] = []
    relay = Relay(3, lambda hook, arguments: call.append((hook.hook, hook.global_step, hook.weight_version)))
    for rank in (0, 1, 2):
        for hook in ("on_engine_start", "on_engine_ready") if rank else ():
            relay.add(rank, HookCall(hook, (), 6, 3))
        relay.add(rank, HookCall("on_update_end", (None,), 7, 4))
    assert call == [("on_update_end", 7, 4)]
    relay.flush()
    assert call == [("on_update_end", 7, 4), ("on_engine_start", 7, 4), ("on_engine_ready", 7, 4)]


def test_flush_does_not_lower_step_or_weight_version() -> None:
    """Rank 1 is ahead of the last hook that was called."""
    call: list[tuple[str, int, int]] = []
    relay = Relay(2, lambda hook, arguments: call.append((hook.hook, hook.global_step, hook.weight_version)))
    relay.add(0, HookCall("on_engine_start", (), 6, 3))
    relay.add(1, HookCall("on_engine_start", (), 6, 3))
    relay.add(1, HookCall("on_engine_ready", (), 7, 4))
    relay.flush()
    assert call == [("on_engine_start", 6, 3), ("on_engine_ready", 7, 4)]


@pytest.mark.parametrize("head_rank", [None, 1, 2])
def test_flush_calls_update_hook_only_with_head_rank(head_rank: int | None) -> None:
    """The other ranks of a tensor-parallel group store no tensors of the group's batch."""
    call: list[list[Any]] = []
    relay = Relay(3, lambda hook, arguments: call.append(list(arguments)))
    for rank in (1, 2):
        part = BatchPart(5, 2, 2, None, None, is_head=rank == head_rank)
        relay.add(rank, HookCall("on_update_start", (part,), 7, 4))
    relay.flush()
    assert [[batch.num_tokens for batch in arguments] for arguments in call] == ([] if head_rank is None else [[5]])


def test_batch_in_controller_cannot_be_changed() -> None:
    batch = RemoteBatch([BatchPart(5, 2, 2, None, None, is_head=True)], has_global_groups=True)
    with pytest.raises(AttributeError, match="advantages cannot be changed in the controller"):
        batch.advantages = torch.zeros(5)
    assert batch.num_tokens == 5


def test_workers_write_the_model_and_its_adapter(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller has the weights of neither."""
    calls: list[tuple[Any, ...]] = []
    strategy = RayController(num_workers=1, worker_strategy="ddp", accelerator="cpu")
    monkeypatch.setattr(strategy, "call", lambda *arguments: calls.append(arguments))
    module = ControllerModule(make_grpo(model_folder, adapter=Adapter(rank=2)), strategy)
    SaveHF(str(tmp_path / "hf")).on_train_end(bare_trainer(tmp_path, 1), module)
    assert calls == [("save_hf", tmp_path / "hf"), ("save_adapter", tmp_path / "hf_adapter")]


class WithCallback(LightningModule):
    def configure_callbacks(self) -> Callback:
        return SaveHF()


def test_single_callback_of_module_is_taken(tmp_path: Path) -> None:
    module = ControllerModule(WithCallback(), RayController(num_workers=1))
    module.trainer = bare_trainer(tmp_path, 1)
    assert [type(callback) for callback in module.configure_callbacks()] == [SaveHF]
