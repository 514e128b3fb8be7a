"""AdamW with stored moments against torch's own, through steps, saves and parameters without gradients."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from sft_run import train, write_rows
from tiny import full_weights, save_model
from torch import nn
from torch.optim import AdamW

from rlightning.optim import OptimizerStates, StoredMomentsAdamW
from rlightning.optim.moments import unpack_moment
from rlightning.optim.optimizer import make_lr_schedule, make_optimizer
from rlightning.parallel.host_memory import HostMemory

SMALLER: list[OptimizerStates] = ["bfloat16", "8bit"]
ALL: list[OptimizerStates] = ["float32", *SMALLER]
LR = 0.01
ON_CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)


class HalfAtATime(StoredMomentsAdamW):
    """Two of the parameters of :func:`make_parameters` at a time."""

    bytes_at_a_time = 2 * 2 * 4 * 256 * 4


def make_parameters(device: str = "cpu") -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(4, 256).to(device)) for _ in range(3)] + [
        nn.Parameter(torch.zeros(256).to(device))
    ]


def make_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:3], "weight_decay": 0.1}, {"params": parameters[3:], "weight_decay": 0.0}]


def take_steps(optimizer: torch.optim.Optimizer, steps: range) -> list[nn.Parameter]:
    """Steps on gradients that follow from the step's number."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        optimizer.step()
    return parameters


@pytest.mark.parametrize("device", ["cpu", ON_CUDA])
def test_state_on_the_host_changes_no_step(device: str) -> None:
    usual = AdamW(make_groups(make_parameters(device)), lr=LR, fused=True)
    offloaded = HalfAtATime(make_groups(make_parameters(device)), is_state_on_host=True, lr=LR, fused=True)
    pairs = zip(take_steps(offloaded, range(3)), take_steps(usual, range(3)), strict=True)
    for parameter, other in pairs:
        assert torch.equal(parameter, other)
        for name, value in usual.state[other].items():
            assert torch.equal(offloaded.state[parameter][name].cpu(), value.cpu())
        moments = [offloaded.state[parameter][name] for name in ("exp_avg", "exp_avg_sq")]
        assert all(moment.device.type == "cpu" for moment in moments)
        assert device == "cpu" or all(moment.is_pinned() for moment in moments)
    assert [len(group["params"]) for group in offloaded.param_groups] == [3, 1]


@pytest.mark.parametrize("device", ["cpu", ON_CUDA])
@pytest.mark.parametrize(("states", "first", "second"), [("bfloat16", 2**-7, 2**-7), ("8bit", 0.0211, 0.0284)])
def test_steps_are_adamws_up_to_rounding(states: OptimizerStates, first: float, second: float, device: str) -> None:
    """Three steps on gradients between 1/2 and 1 in size, of any sign.

    Rounding is off by at most ``first`` of the largest first moment there can be (0.1 after one step, 0.19 after two)
    and by ``second`` of a second moment. bfloat16's neighbours are 2^-7 apart; of 8 bits the largest gaps are
    1.5 * 0.9 / 64 of a block's maximum with a sign, and 0.9 / 128 of the largest root without, of which a root is at
    least half: 1/71, so 1.0141^2 - 1 of a second moment.

    The first step is taken before anything is rounded. A step is lr m / sqrt(v), both corrected for their bias, with
    m at most 1 and v at least 1/4. In the second one m is off by 0.9 * 0.1 / 0.19 = 0.474 ``first``, v by one
    ``second``: 0.95 ``first`` + ``second``. In the third one m is off by 0.9 * (0.09 + 0.19) / 0.271 = 0.93 ``first``,
    v by two ``second``: 1.86 ``first`` + 2 ``second``. A twentieth is for products of errors.
    """
    results = []
    usual = AdamW(make_groups(make_parameters(device)), lr=LR)
    for optimizer in (usual, HalfAtATime(make_groups(make_parameters(device)), states=states, lr=LR)):
        after = []
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for parameter in (parameters := parameters_of(optimizer)):
                sign = torch.randn(parameter.shape, generator=generator).sign()
                parameter.grad = (sign * (1 + torch.rand(parameter.shape, generator=generator)) / 2).to(device)
            optimizer.step()
            after.append([parameter.detach().clone() for parameter in parameters])
        results.append(after)
    bounds = [0, 1.05 * (0.95 * first + second) * LR, 1.05 * (2.81 * first + 3 * second) * LR]
    for expected, got, bound in zip(*results, bounds, strict=True):
        difference = max((one - other).abs().max().item() for one, other in zip(expected, got, strict=True))
        assert difference <= bound
    assert difference > 0  # something was rounded


@pytest.mark.parametrize("states", SMALLER)
def test_state_takes_what_it_says(states: OptimizerStates) -> None:
    optimizer = StoredMomentsAdamW(make_groups(make_parameters()), states=states, lr=LR)
    matrix, *_, vector = take_steps(optimizer, range(1))
    dtypes = {name: value.dtype for name, value in optimizer.state[matrix].items() if value.ndim}
    of_vector = {value.dtype for value in optimizer.state[vector].values() if value.ndim}
    if states == "bfloat16":
        assert set(dtypes.values()) == of_vector == {torch.bfloat16}
        assert set(dtypes) == {"exp_avg", "exp_avg_sq"}
    else:
        assert dtypes == dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.uint8) | dict.fromkeys(
            ("exp_avg_scale", "exp_avg_sq_scale"), torch.float32
        )
        assert of_vector == {torch.float32}


@pytest.mark.parametrize("is_on_host", [False, True])
@pytest.mark.parametrize("states", SMALLER)
def test_step_portion_size_changes_neither_parameters_nor_state(states: OptimizerStates, is_on_host: bool) -> None:
    whole = StoredMomentsAdamW(make_groups(make_parameters()), states=states, lr=LR)
    halves = HalfAtATime(make_groups(make_parameters()), states=states, is_state_on_host=is_on_host, lr=LR)
    for parameter, other in zip(take_steps(halves, range(3)), take_steps(whole, range(3)), strict=True):
        assert torch.equal(parameter, other)
        assert_same_state(halves.state[parameter], whole.state[other])


def assert_same_state(state: dict[str, Any], other: dict[str, Any]) -> None:
    assert state.keys() == other.keys()
    for name, value in state.items():
        assert value.dtype == other[name].dtype and torch.equal(value, other[name]), name


@pytest.mark.parametrize("states", SMALLER)
def test_parameters_without_a_gradient_stay_as_they_are(states: OptimizerStates) -> None:
    optimizer = StoredMomentsAdamW(make_groups(make_parameters()), states=states, lr=LR)
    parameters = take_steps(optimizer, range(2))
    before = [parameter.detach().clone() for parameter in parameters]
    state_before = copy.deepcopy([optimizer.state[parameter] for parameter in parameters])
    for parameter in parameters:
        parameter.grad = None  # what clip_gradients does where they are not finite
    optimizer.step()
    for parameter, old, old_state in zip(parameters, before, state_before, strict=True):
        assert torch.equal(parameter, old)
        assert_same_state(optimizer.state[parameter], old_state)


@pytest.mark.parametrize("is_on_host", [False, True])
@pytest.mark.parametrize("states", SMALLER)
def test_what_is_saved_and_loaded_goes_on_exactly(states: OptimizerStates, is_on_host: bool, tmp_path: Path) -> None:
    def make() -> torch.optim.Optimizer:
        groups = make_groups(make_parameters())
        return HalfAtATime(groups, states=states, is_state_on_host=is_on_host, lr=LR)

    in_one_go, first, second = make(), make(), make()
    take_steps(in_one_go, range(5))
    half_way = take_steps(first, range(3))
    torch.save(first.state_dict(), tmp_path / "optimizer.pt")
    for parameter, other in zip(parameters_of(second), half_way, strict=True):
        parameter.data.copy_(other.data)
    second.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    for parameter, other in zip(take_steps(second, range(3, 5)), parameters_of(in_one_go), strict=True):
        assert torch.equal(parameter, other)
        assert_same_state(second.state[parameter], in_one_go.state[other])


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@pytest.mark.parametrize("loaded", ALL)
@pytest.mark.parametrize("saved", ALL)
def test_any_states_are_read_by_any_others(saved: OptimizerStates, loaded: OptimizerStates) -> None:
    first, second = (
        make_optimizer(nn.ParameterList(make_parameters()), lr=LR, weight_decay=0.1, betas=(0.9, 0.999), states=states)
        for states in (saved, loaded)
    )
    take_steps(first, range(3))
    second.load_state_dict(first.state_dict())
    for parameter, other in zip(parameters_of(second), parameters_of(first), strict=True):
        values, expected = (
            state if type(o) is AdamW else moments(state)
            for o, state in ((second, second.state[parameter]), (first, first.state[other]))
        )
        assert values["step"] == expected["step"] == 3
        largest = {name: expected[name].abs().max().item() for name in ("exp_avg", "exp_avg_sq")}
        for name, most in largest.items():  # each rounded once at most, by at most 1.5 * 0.9 / 64 of the largest
            bound = 0.0 if loaded in ("float32", saved) else 0.0211 * most
            torch.testing.assert_close(values[name].float(), expected[name].float(), rtol=0, atol=bound)
    take_steps(second, range(3, 4))


def moments(state: dict[str, Any]) -> dict[str, Any]:
    """A stored state as numbers."""
    return {"step": state["step"]} | {name: unpack_moment(name, state) for name in ("exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize("states", SMALLER)
def test_the_learning_rate_is_the_schedules(states: OptimizerStates) -> None:
    """Steps on a constant gradient are lr: 1/2 and then all of it."""
    parameter = nn.Parameter(torch.zeros(4, 256))
    optimizer = make_optimizer(
        nn.ParameterList([parameter]), lr=LR, weight_decay=0.0, betas=(0.9, 0.999), states=states
    )
    schedule = make_lr_schedule(optimizer, "constant", warmup_steps=2, max_steps=-1)
    for expected in (-0.5 * LR, -1.5 * LR):
        parameter.grad = torch.ones(4, 256)
        optimizer.step()
        schedule.step()
        assert parameter.mean().item() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("states", SMALLER)
def test_state_is_offloaded_during_rollouts(states: OptimizerStates) -> None:
    optimizer, memory = StoredMomentsAdamW(make_groups(make_parameters()), states=states, lr=LR), HostMemory()
    usual = StoredMomentsAdamW(make_groups(make_parameters()), states=states, lr=LR)
    for step in range(3):
        memory.take([value for state in optimizer.state.values() for value in state.values()], "cpu")
        memory.give_back()
        for parameter, other in zip(
            take_steps(optimizer, range(step, step + 1)), take_steps(usual, range(step, step + 1)), strict=True
        ):
            assert torch.equal(parameter, other)


def test_a_closure_is_called_once() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = make_optimizer(
        nn.ParameterList([parameter]), lr=0.1, weight_decay=0.0, betas=(0.9, 0.999), is_state_on_host=True
    )
    losses = []

    def closure() -> float:
        parameter.grad = torch.ones(2)
        losses.append(1.5)
        return 1.5

    assert optimizer.step(closure) == 1.5
    assert losses == [1.5]


@pytest.mark.long
@pytest.mark.parametrize("states", SMALLER)
def test_a_run_goes_on_exactly_from_its_checkpoint(states: OptimizerStates, tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    write_rows(tmp_path)
    in_one_go, _ = train(tmp_path, 4, optimizer_states=states)
    _, trainer = train(tmp_path, 2, optimizer_states=states)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    module, _ = train(tmp_path, 4, ckpt_path=tmp_path / "half.ckpt", optimizer_states=states)
    expected = full_weights(in_one_go)
    for name, weight in full_weights(module).items():
        assert torch.equal(weight, expected[name]), name
