"""Device names as PyTorch reports them, and how fast such a device is."""

import pytest

from rlightning.memory_plan.devices import peak_flops


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_boards_are_told_apart_by_name(name: str, tera: float) -> None:
    assert peak_flops(name) == tera * 1e12


@pytest.mark.parametrize(
    "name", ["NVIDIA A10G", "NVIDIA L40", "AMD Instinct MI300X", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"]
)
def test_nothing_is_said_of_others_and_of_parts(name: str) -> None:
    assert peak_flops(name) is None
