import pytest
import torch

from rlightning.objectives import approximate_proximal

NOW = torch.tensor([-1.0, -2.0, -4.0])
SAMPLER = torch.tensor([-3.0, -1.0, -2.0])
AGES = torch.tensor([0, 1, 3])


def test_proximal_before_first_step_is_current_policy() -> None:
    now = NOW.clone().requires_grad_()
    proximal = approximate_proximal(now, SAMPLER, AGES, 0.0)
    assert torch.equal(proximal, NOW) and not proximal.requires_grad


@pytest.mark.parametrize(
    ("progress", "expected"),
    # Shares of the way from sampler to now: 0, 1 / 1.5, 3 / 3.5; and 0, 1 / 1.25, 3 / 3.25.
    [(0.5, [-3.0, -1 - 1 / 1.5, -2 - 2 * 3 / 3.5]), (0.25, [-3.0, -1 - 1 / 1.25, -2 - 2 * 3 / 3.25])],
)
def test_proximal_policy_interpolates_sampler_and_current_by_staleness(progress: float, expected: list[float]) -> None:
    proximal = approximate_proximal(NOW, SAMPLER, AGES, progress)
    assert proximal.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("progress", [0.0, 0.5])
def test_proximal_policy_of_bfloat16_is_float32(progress: float) -> None:
    assert approximate_proximal(NOW.bfloat16(), SAMPLER.bfloat16(), AGES, progress).dtype == torch.float32


def test_prompts_do_not_matter() -> None:
    # Their version is -1, which may be ahead of nothing.
    assert approximate_proximal(NOW[:1], SAMPLER[:1], torch.tensor([-2]), 0.5).isfinite().all()
