import logging
import re
from pathlib import Path

import pytest
import torch
from observed_run import ObservedModule, loader, make_trainer, messages, save_run, shown_on_terminal

from rlightning.callbacks import RLProgressBar
from rlightning.callbacks.progress_bar import validation_lines

STEP = (
    r"step (\d)/3 \| reward 0\.\d00 \| length 1\.5 \| [\d,]+ tokens/s"
    r" \| generate \d+\.\ds reward \d+\.\ds update \d+\.\ds sync \d+\.\ds"
)


@pytest.fixture(autouse=True)
def _informed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rlightning")


def logged_steps_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """How each line begins."""
    return [line.split(" | ")[0] for line in messages(caplog)]


def test_line_for_each_step_without_terminal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(tmp_path, RLProgressBar()).fit(ObservedModule(), loader())
    matches = [re.fullmatch(STEP, line) for line in messages(caplog)]
    assert [match and match[1] for match in matches] == ["1", "2", "3"]
    assert messages(caplog)[0].startswith("step 1/3 | reward 0.100 | length 1.5 | ")


def test_steps_are_counted_over_epochs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(tmp_path, RLProgressBar(), max_steps=-1, max_epochs=2).fit(ObservedModule(), loader(2))
    assert logged_steps_of(caplog) == ["step 1/4", "step 2/4", "step 3/4", "step 4/4"]


def test_supervised_steps_show_the_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(tmp_path, RLProgressBar(), max_steps=1).fit(ObservedModule(learns=False), loader())
    assert re.fullmatch(r"step 1/1 \| loss 1\.000 \| [\d,]+ tokens/s \| \d+\.\ds", messages(caplog)[0])


def test_validation_has_its_own_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(tmp_path, RLProgressBar(), max_steps=2, val_check_interval=2)
    trainer.fit(ObservedModule(), loader(), loader(1))
    wanted = "validation at step 2 | sums | reward 0.250 | pass@1 0.250 | length 1.5 | truncated 12.5%"
    assert messages(caplog)[-1] == wanted
    trainer.validate(ObservedModule(), loader(1), verbose=False)
    assert messages(caplog)[-1] == wanted


def test_a_line_for_each_validation_set() -> None:
    metrics = {"val/a/reward": 0.5, "val/b/reward": 1.0, "reward/mean": 0.0, "val/a/pass@8": 0.75}
    assert validation_lines(3, {name: torch.tensor(value) for name, value in metrics.items()}) == [
        "validation at step 3 | a | reward 0.500 | pass@8 0.750",
        "validation at step 3 | b | reward 1.000",
    ]


def test_fewer_lines_on_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(tmp_path, RLProgressBar(line_every_n_steps=2), max_steps=5).fit(ObservedModule(), loader(5))
    assert logged_steps_of(caplog) == ["step 2/5", "step 4/5", "step 5/5"]


def test_refresh_rate_zero_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(tmp_path, RLProgressBar(refresh_rate=0)).fit(ObservedModule(), loader())
    assert messages(caplog) == []


def test_the_bar_on_a_terminal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shown = shown_on_terminal(lambda: make_trainer(tmp_path, RLProgressBar()).fit(ObservedModule(), loader(2)))
    assert "Training" in shown and "3/3" in shown and "Epoch" not in shown
    assert re.search(r"reward 0\.300 · length 1\.5 · [\d,]+ tokens/s · generate \d+\.\ds reward", shown)
    assert messages(caplog) == []


def test_resume_goes_on_counting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = save_run(tmp_path, RLProgressBar(), max_steps=2)
    caplog.clear()
    make_trainer(tmp_path, RLProgressBar(), max_steps=4).fit(ObservedModule(), loader(), ckpt_path=saved)
    assert logged_steps_of(caplog) == ["step 3/4", "step 4/4"]
