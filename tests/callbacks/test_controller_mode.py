from pathlib import Path
from types import SimpleNamespace

import pytest
from observed_run import ObservedModule, PlainModule, loader, make_trainer

from rlightning.callbacks import ControllerMode
from rlightning.errors import ConfigError
from rlightning.parallel import device as platform
from rlightning.parallel.execution_mode import ExecutionMode, is_controller

pytestmark = pytest.mark.usefixtures("fresh_process")


def test_what_the_strategy_declares_holds_before_training_starts(tmp_path: Path) -> None:
    class LooksBeforeTraining(ObservedModule):
        def configure_model(self) -> None:
            assert is_controller()

    trainer = make_trainer(tmp_path, ControllerMode(), max_steps=1)
    trainer.strategy.execution_mode = "controller"  # type: ignore[attr-defined]
    trainer.fit(LooksBeforeTraining(), loader())
    assert is_controller()


def test_a_loop_of_ones_own() -> None:
    mode = ControllerMode("worker", controller="head:6379")
    mode.setup(SimpleNamespace(callbacks=[mode]), PlainModule(), "fit")
    assert mode.resolved is ExecutionMode.WORKER


def test_resume_keeps_no_mode(tmp_path: Path) -> None:
    """The mode is the process's, not the run's: a checkpoint of a controller goes on in another mode elsewhere."""
    mode = ControllerMode("controller")
    trainer = make_trainer(tmp_path, mode, max_steps=1)
    trainer.fit(ObservedModule(), loader())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert mode.state_dict() == {}
    trainer.fit(ObservedModule(), loader(), ckpt_path=tmp_path / "last.ckpt")  # set up twice, resolved to the same
    assert mode.resolved is ExecutionMode.CONTROLLER


def test_controller_that_used_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "has_context", lambda: True)
    with pytest.raises(ConfigError, match="has used a CUDA device already"):
        ControllerMode("controller").setup(SimpleNamespace(), PlainModule(), "fit")
