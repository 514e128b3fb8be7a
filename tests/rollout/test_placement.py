"""Which devices standalone engines get, on a host whose devices are made up."""

import pytest
import torch

from rlightning.errors import ConfigError
from rlightning.rollout.placement import free_devices

OWN = torch.device("cuda:0")


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> str:
    names = "4,5,6,7"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    return names


@pytest.mark.parametrize(
    ("num_engines", "size", "expected"),
    [
        (1, 1, [("5",)]),
        (3, 1, [("5",), ("6",), ("7",)]),
        (1, 2, [("5", "6")]),
        (5, 1, [("5",), ("6",), ("7",), ("5",), ("6",)]),
        (2, 3, [("5", "6", "7"), ("5", "6", "7")]),
    ],
)
def test_further_engines_share_in_turn(
    visible: str, num_engines: int, size: int, expected: list[tuple[str, ...]]
) -> None:
    assert free_devices(OWN, num_engines, size) == expected


def test_one_engine_has_to_fit(visible: str) -> None:
    message = r"A standalone engine of 4 devices .* which leaves 3 of 4\. Lower trainer\.devices"
    with pytest.raises(ConfigError, match=message):
        free_devices(OWN, 1, 4)


def test_without_gpus_the_system_shares_out() -> None:
    assert free_devices(torch.device("cpu"), 3, 2) == [(), (), ()]
