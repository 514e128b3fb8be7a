from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from metrics_table import undocumented
from observed_run import ObservedModule, PlainModule, loader, logged_rows, make_batch, make_trainer
from torch import Tensor, nn
from torch.optim import AdamW

from rlightning.callbacks import OffloadDuringRollout
from rlightning.hooks import RLCallback, call_hook
from rlightning.module.roles import ModelRole


class OnCPU(OffloadDuringRollout):
    """Moves tensors that are on the CPU already, which is the same but for the speed."""

    device_type = "cpu"


class Adam(ObservedModule):
    """With optimizer state to move, and gradients that outlive the update."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.weight = nn.Parameter(torch.linspace(0, 1, 1000))

    def configure_optimizers(self) -> AdamW:
        return AdamW(self.parameters(), lr=0.1)


def num_bytes(tensors: Any) -> int:
    """Return the bytes of the tensors' storages; 0 for offloaded ones."""
    return sum(t.untyped_storage().nbytes() for t in tensors)


def state_of(optimizer: Any) -> list[Tensor]:
    return [v for s in getattr(optimizer, "optimizer", optimizer).state.values() for v in s.values()]


class Watch(RLCallback):
    """Notes the bytes of optimizer state, gradients and parameters at each hook, as the callbacks after it see them."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int, int]] = []

    def note(self, hook: str, trainer: Any, module: Any) -> None:
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        state = state_of(trainer.optimizers[0])
        self.seen.append((hook, num_bytes(state), num_bytes(gradients), num_bytes(module.parameters())))

    def __getattribute__(self, name: str) -> Any:
        hooks = ("on_rollout_start", "on_weight_sync_start", "on_engine_wake", "on_rollout_end", "on_engine_sleep")
        if name in (*hooks, "on_update_start", "on_update_end"):
            return lambda trainer, module, *args: self.note(name, trainer, module)
        return super().__getattribute__(name)


class WithEngine(Adam):
    """Calls the hooks that VLLMRollout calls about an engine on the same device."""

    def roll_out(self, trainer: Any, prompts: Any) -> Any:
        call_hook(trainer, self, "on_rollout_start", prompts)
        call_hook(trainer, self, "on_weight_sync_start", 1)
        call_hook(trainer, self, "on_engine_wake")
        call_hook(trainer, self, "on_weight_sync_end", 1)
        batch = make_batch()
        call_hook(trainer, self, "on_engine_sleep")
        call_hook(trainer, self, "on_rollout_end", batch)
        return batch


STATE, WEIGHTS = 2 * 4000 + 4, 4000  # two moments of 1,000 floats and a step; 1,000 floats


@pytest.mark.parametrize(
    ("arguments", "state", "gradients", "weights"),
    [
        ({}, 0, 0, WEIGHTS),
        ({"parameters": True}, 0, 0, 0),
        ({"optimizer": False}, STATE, 0, WEIGHTS),
        ({"gradients": False}, 0, WEIGHTS, WEIGHTS),
        ({"optimizer": False, "gradients": False, "parameters": True}, STATE, WEIGHTS, 0),
    ],
)
def test_what_is_away_when(
    tmp_path: Path, arguments: dict[str, bool], state: int, gradients: int, weights: int
) -> None:
    watch = Watch()
    make_trainer(tmp_path, OnCPU(**arguments), watch, max_steps=2).fit(WithEngine(), loader())
    assert watch.seen[7:] == [  # the second step: in the first there is no optimizer state yet
        ("on_rollout_start", state, gradients, WEIGHTS),
        ("on_weight_sync_start", state, gradients, WEIGHTS),  # about to be read
        ("on_engine_wake", state, gradients, weights),
        ("on_engine_sleep", STATE, WEIGHTS, WEIGHTS),
        ("on_rollout_end", STATE, WEIGHTS, WEIGHTS),
        ("on_update_start", STATE, WEIGHTS, WEIGHTS),
        ("on_update_end", STATE, WEIGHTS, WEIGHTS),
    ]


def test_offload_without_engine_restores_all_after_rollout(tmp_path: Path) -> None:
    watch = Watch()
    make_trainer(tmp_path, OnCPU(parameters=True), watch, max_steps=2).fit(Adam(), loader())
    assert watch.seen[5:8] == [
        ("on_rollout_start", 0, 0, WEIGHTS),
        ("on_weight_sync_start", 0, 0, WEIGHTS),
        ("on_rollout_end", STATE, WEIGHTS, WEIGHTS),
    ]


def train(folder: Path, *callbacks: Callback, max_steps: int = 4, **kwargs: Any) -> Tensor:
    module = WithEngine()
    make_trainer(folder, *callbacks, max_steps=max_steps).fit(module, loader(8), **kwargs)
    return module.weight.detach().clone()


def test_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    assert torch.equal(train(tmp_path, OnCPU(parameters=True)), train(tmp_path))


def test_resume_from_checkpoint_saved_while_offloaded(tmp_path: Path) -> None:
    """Saved in the middle of the rollout, the worst time for it."""

    class SaveInRollout(RLCallback):
        def on_rollout_end(self, trainer: Any, module: Any, batch: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "last.ckpt")

    train(tmp_path, OnCPU(parameters=True), SaveInRollout(), max_steps=3)
    resumed = train(tmp_path, OnCPU(parameters=True), max_steps=5, ckpt_path=tmp_path / "last.ckpt")
    assert torch.equal(resumed, train(tmp_path, max_steps=5))


def test_checkpoint_after_engine_validation_includes_offloaded_tensors(tmp_path: Path) -> None:
    class Validates(WithEngine):
        def validation_step(self, prompts: Any, batch_idx: int) -> None:
            call_hook(self.trainer, self, "on_weight_sync_start", 1)
            call_hook(self.trainer, self, "on_engine_wake")
            call_hook(self.trainer, self, "on_weight_sync_end", 1)
            self.log("val/sums/reward", 1.0, batch_size=1)

    class Sleeps(RLCallback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            call_hook(trainer, module, "on_engine_sleep")

    checkpoint = ModelCheckpoint(tmp_path / "saved", monitor="val/sums/reward", filename="one")
    offload = OnCPU(parameters=True)
    trainer = make_trainer(
        tmp_path, offload, Sleeps(), checkpoint, max_steps=2, enable_checkpointing=True, val_check_interval=2
    )
    trainer.fit(Validates(), loader(), loader(1))
    saved = torch.load(tmp_path / "saved" / "one.ckpt", weights_only=False)
    assert num_bytes([saved["state_dict"]["weight"]]) == WEIGHTS
    assert num_bytes(saved["optimizer_states"][0]["state"][0].values()) == STATE


def test_after_an_exception_everything_is_there(tmp_path: Path) -> None:
    class Fails(RLCallback):
        def on_weight_sync_end(self, trainer: Any, module: Any, weight_version: int) -> None:
            if trainer.global_step == 1:
                raise RuntimeError("the engine is gone")

    module, offload = WithEngine(), OnCPU(parameters=True)
    trainer = make_trainer(tmp_path, offload, Fails())
    with pytest.raises(RuntimeError, match="the engine is gone"):
        trainer.fit(module, loader())
    assert num_bytes([module.weight]) == WEIGHTS and num_bytes(state_of(trainer.optimizers[0])) == STATE


def test_restore_out_of_memory_keeps_original_exception(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload = OnCPU()
    loop, module = SimpleNamespace(callbacks=[offload], optimizers=[]), nn.Linear(1, 1)
    call_hook(loop, module, "on_rollout_start", [])

    def full() -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(offload._state, "close", full)
    offload.on_exception(loop, module, RuntimeError("the first"))
    assert "stay on the host: the engine still has their memory" in caplog.text


def test_a_restarted_engine_is_sent_the_weights_again() -> None:
    """An engine that died during a rollout gets the weights again, although the parameters are on the host."""
    offload, module = OnCPU(optimizer=False, parameters=True), nn.Linear(10, 10, bias=False)
    loop = SimpleNamespace(callbacks=[offload], optimizers=[])
    sizes = []
    for hook, args in (("on_engine_wake", ()), ("on_weight_sync_start", (1,)), ("on_engine_wake", ())):
        call_hook(loop, module, hook, *args)
        sizes.append(num_bytes(module.parameters()))
    offload.teardown(loop, module, "fit")
    assert [*sizes, num_bytes(module.parameters())] == [0, 400, 0, 400]


def test_the_reference_model_is_moved_with_the_parameters() -> None:
    model: Any = nn.Linear(10, 10, bias=False)
    module = SimpleNamespace(roles={"reference": ModelRole(load=lambda: model, network=model)})
    loop = SimpleNamespace(callbacks=[offload := OnCPU(parameters=True)])
    call_hook(loop, module, "on_engine_wake")
    away = num_bytes(model.parameters())
    call_hook(loop, module, "on_engine_sleep")
    assert (away, num_bytes(model.parameters())) == (0, 400)
    assert offload.last["memory/offloaded_gib"] == 400 / 2**30


def test_wrapped_optimizers_states_are_offloaded() -> None:
    model = nn.Linear(10, 10, bias=False)
    plain = AdamW(model.parameters())
    _, wrapped = Fabric(accelerator="cpu", devices=1).setup(model, plain)
    model.weight.sum().backward()
    plain.step()
    for loop in (SimpleNamespace(optimizer=wrapped), SimpleNamespace(optimizers=(wrapped,))):
        offload = OnCPU(gradients=False)
        call_hook(SimpleNamespace(callbacks=[offload], **vars(loop)), PlainModule(), "on_rollout_start", [])
        away = num_bytes(state_of(plain))
        offload.teardown(loop, PlainModule(), "fit")
        assert (away, num_bytes(state_of(plain))) == (0, 804)


def test_supervised_training_leaves_everything_in_place(tmp_path: Path) -> None:
    watch = Watch()
    module = WithEngine()
    module.generates = False  # type: ignore[assignment]
    loop = SimpleNamespace(callbacks=[OnCPU(), watch], optimizers=[AdamW(module.parameters())])
    call_hook(loop, module, "on_rollout_start", [])
    assert watch.seen == [("on_rollout_start", 0, 0, WEIGHTS)]
    assert loop.callbacks[0].last == {}


def test_metrics_are_logged_and_documented(tmp_path: Path) -> None:
    rows = logged_rows(tmp_path, WithEngine(), OnCPU())
    moved = [float(row["memory/offloaded_gib"] or 0) * 2**30 for row in rows]
    assert moved == pytest.approx([0, STATE + WEIGHTS, STATE + WEIGHTS], rel=1e-6)
    assert all(0 <= float(rows[2][name]) < 10 for name in ("time/offload", "time/restore"))
    assert undocumented(rows[0]) == []


def test_nothing_on_the_cpu(tmp_path: Path) -> None:
    offload = OffloadDuringRollout(parameters=True)
    watch = Watch()
    make_trainer(tmp_path, offload, watch, max_steps=2).fit(WithEngine(), loader())
    assert {entry[3] for entry in watch.seen} == {WEIGHTS} and offload.last == {}


@pytest.mark.gpu
def test_offload_frees_device_memory_and_preserves_training() -> None:
    results = []
    for callbacks in ([], [OffloadDuringRollout(parameters=True)]):
        torch.manual_seed(0)
        torch.cuda.empty_cache()
        model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)]).cuda()  # 16 MiB each
        loop = SimpleNamespace(callbacks=callbacks, optimizer=AdamW(model.parameters(), lr=1e-3, fused=True))
        freed = []
        for _ in range(3):
            before, _ = torch.cuda.mem_get_info()
            for hook, args in (("on_rollout_start", ([],)), ("on_weight_sync_start", (1,)), ("on_engine_wake", ())):
                call_hook(loop, model, hook, *args)
            freed.append(torch.cuda.mem_get_info()[0] - before)
            call_hook(loop, model, "on_engine_sleep")
            call_hook(loop, model, "on_rollout_end", None)
            model(torch.ones(4, 2048, device="cuda")).square().mean().backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
        if callbacks:
            assert freed[2] >= 3 * 128 << 20  # parameters and two moments
            assert callbacks[0].last["memory/offloaded_gib"] >= 3 * 128 / 1024
            callbacks[0].teardown(loop, model, "fit")
    for plain, offloaded in zip(*results, strict=True):
        assert torch.equal(plain, offloaded)
