"""AdamW whose moments are stored, between steps, in fewer bytes or in host memory."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rlightning.optim.moments import SIGNED, OptimizerStates, pack_moment, scale_name, unpack_moment
from rlightning.parallel import device as platform
from rlightning.parallel.gathering import split_by_bytes
from rlightning.parallel.sharding import local_tensor
from rlightning.protocols import StateDict
from rlightning.seeds import mix_seed, run_seed
from rlightning.torch_internals import AdamW, with_local_tensor

State = dict[str, Tensor]
"""State of a parameter by AdamW's names: its step count and moments, and the scales of 8-bit moments."""


class StoredMomentsAdamW(AdamW):
    """AdamW that stores its moments in bfloat16, in 8 bits or in host memory, and restores them only during a step.

    They are restored for some parameters at a time, which limits the device memory that this needs.

    The step itself is torch's, on the parameters' device and in their dtype. Stored moments are rounded stochastically,
    with random numbers from the run's seed, the step, the parameter's index and the shard: the same after a resume, and
    on ranks with copies of the parameters.

    Args:
        groups: parameters, plain or sharded, as for AdamW.
        states: format of the stored moments; ``float32`` is the format of the computation.
        is_state_on_host: whether moments are stored in host memory, pinned if the parameters are on a GPU.
        kwargs: arguments of AdamW.
    """

    bytes_at_a_time = 1 << 30
    """Maximum bytes of unpacked moments on the device at a time, unless those of a single parameter are more."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        states: OptimizerStates = "float32",
        is_state_on_host: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(groups, **kwargs)
        self.states: OptimizerStates = states
        self.is_state_on_host = is_state_on_host

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take an optimizer step as AdamW does; return the result of ``closure``, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        try:
            for number, group in enumerate(groups):
                group["num_steps"] = group.get("num_steps", 0) + 1
                places = {parameter: f"{number} {place}" for place, parameter in enumerate(group["params"])}
                trained = [parameter for parameter in group["params"] if parameter.grad is not None]
                for parameters in split_by_bytes(trained, _moment_bytes, self.bytes_at_a_time):
                    stored = {p: self.state[p] for p in parameters if self.state[p]}
                    self.state.update({p: fetch(state, p) for p, state in stored.items()})
                    self.param_groups = [{**group, "params": parameters}]
                    super().step()
                    for parameter in parameters:
                        seed = f"{group['num_steps']} {places[parameter]}"
                        self.state[parameter] = self._store(parameter, stored.get(parameter, {}), seed)
        finally:
            self.param_groups = groups
        if self.is_state_on_host:
            for device in {parameter.device for group in groups for parameter in group["params"]}:
                platform.synchronize_stream(device)  # readers of the state on the host do not wait for copies
        return loss

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state dict with moments in any stored format, and convert them to this optimizer's format."""
        super().load_state_dict({**state_dict, "state": {}})
        for number, parameter in parameters_by_number(self, state_dict).items():
            if saved := state_dict["state"].get(number):
                self.state[parameter] = self._convert_saved(saved, parameter, seed=f"loaded {number}")

    def _store(self, parameter: Tensor, stored: State, seed: str) -> State:
        """Pack the moments after an optimizer step into ``stored``, whose tensors are created in the first step."""
        state = self.state[parameter]
        stored["step"] = state["step"]
        for name in SIGNED:
            values = local_tensor(state[name])
            generator = seeded(f"{seed} {name}", parameter, values.device)
            for key, packed in pack_moment(name, values, self.states, generator).items():
                if key in stored and local_tensor(stored[key]).shape == packed.shape:
                    local_tensor(stored[key]).copy_(packed, non_blocking=True)
                else:
                    stored[key] = self._place(packed, parameter)
        return stored

    def _convert_saved(self, saved: Mapping[str, Tensor], parameter: Tensor, seed: str) -> State:
        """Convert a saved state of any format to this optimizer's format."""
        adopted: State = {"step": saved["step"].to(parameter.device)}  # AdamW counts steps on its own device
        for name in SIGNED:
            keys = [key for key in (name, scale_name(name)) if key in saved]
            kept = {key: local_tensor(saved[key]) for key in keys}
            if self.states != "8bit" or len(keys) == 1:  # 8-bit codes read as numbers would be rounded again
                values = unpack_moment(name, kept).to(parameter.dtype)
                kept = pack_moment(name, values, self.states, seeded(f"{seed} {name}", parameter, values.device))
            adopted |= {key: self._place(packed, parameter) for key, packed in kept.items()}
        return adopted

    def _place(self, packed: Tensor, parameter: Tensor) -> Tensor:
        """Copy this rank's part to the memory for stored moments, as a DTensor if the parameter is sharded."""
        copied = torch.empty(
            packed.shape,
            dtype=packed.dtype,
            device="cpu" if self.is_state_on_host else parameter.device,
            pin_memory=self.is_state_on_host and parameter.is_cuda,
        ).copy_(packed)
        own = local_tensor(parameter)
        if packed.shape == own.shape:
            return with_local_tensor(parameter.detach(), copied)
        num_blocks = packed.shape[-1] * parameter.shape[-1] // own.shape[-1]
        return with_local_tensor(parameter.detach(), copied, (*parameter.shape[:-1], num_blocks))


def _moment_bytes(parameter: Tensor) -> int:
    """Return the bytes of a parameter's two moments on this rank, in the format of the computation."""
    return 2 * local_tensor(parameter).nbytes


def fetch(state: State, parameter: Tensor) -> State:
    """Return a parameter's stored state as plain AdamW has it: moments in the parameter's dtype and on its device."""
    fetched = {"step": state["step"]}
    for name in SIGNED:
        keys = [key for key in (name, scale_name(name)) if key in state]
        kept = {key: local_tensor(state[key]).to(parameter.device, non_blocking=True) for key in keys}
        fetched[name] = with_local_tensor(parameter.detach(), unpack_moment(name, kept).to(parameter.dtype))
    return fetched


def fetch_all(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    """Return a state dict for a plain AdamW: moments of any stored format are converted to the parameters' dtype."""
    owners = parameters_by_number(optimizer, state_dict)
    states = {n: fetch(state, owners[n]) for n, state in state_dict["state"].items() if state}
    return {**state_dict, "state": states}


def parameters_by_number(optimizer: Optimizer, state_dict: StateDict) -> dict[int, nn.Parameter]:
    """Return an optimizer's parameters by their numbers in a state dict."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return dict(zip(numbers, parameters, strict=True))


def seeded(seed: str, parameter: Tensor, device: torch.device) -> Generator:
    """Return a random generator for rounding a parameter's moments: the same on ranks with copies of one shard."""
    if isinstance(parameter, DTensor):
        coordinate: Sequence[int] = parameter.device_mesh.get_coordinate() or ()
        is_copy = [placement.is_replicate() for placement in parameter.placements]
        seed = f"{seed} {[None if same else part for part, same in zip(coordinate, is_copy, strict=True)]}"
    return torch.Generator(device).manual_seed(mix_seed(run_seed() or 0, "optimizer states", seed))
