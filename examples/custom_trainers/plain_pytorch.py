"""The four callbacks of colocated training in a loop of plain PyTorch.

Teaches a network to choose the one of four actions that its input names, by REINFORCE::

    torchrun --nproc-per-node 2 examples/custom_trainers/plain_pytorch.py

A copy of the network stands for the engine; a real one is in examples/plain_loop.py.
"""

import copy
import logging
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlightning.callbacks import ControllerMode, DeviceSyncBeforeBarrier, EmptyCacheAfterUpdate, OffloadDuringRollout
from rlightning.hooks import call_hook
from rlightning.parallel.barrier import barrier

log = logging.getLogger("plain_pytorch")


def make_callbacks() -> list[Any]:
    """All of them; each works without the others."""
    return [ControllerMode(), DeviceSyncBeforeBarrier(), EmptyCacheAfterUpdate(), OffloadDuringRollout(parameters=True)]


def main(num_steps: int = 30, callbacks: Sequence[Any] | None = None) -> list[float]:
    """Train for ``num_steps``; the mean reward of each."""
    has_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if has_cuda else torch.device("cpu")
    if has_cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4)).to(device)
    engine = copy.deepcopy(policy)
    torch.manual_seed(int(os.environ.get("RANK", 0)))  # each rank has inputs of its own
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.02)
    # What the callbacks look at: who else is there, the device, the optimizer.
    loop = SimpleNamespace(
        callbacks=make_callbacks() if callbacks is None else callbacks, device=device, optimizer=optimizer
    )
    call_hook(loop, policy, "setup", "fit")
    rewards: list[float] = []
    try:
        while len(rewards) < num_steps:
            targets = torch.randint(4, (64,), device=device)
            inputs = nn.functional.one_hot(targets, 4).float()
            call_hook(loop, policy, "on_rollout_start", inputs)
            call_hook(loop, policy, "on_weight_sync_start", len(rewards))
            engine.load_state_dict(policy.state_dict())
            call_hook(loop, policy, "on_engine_wake")  # the policy's parameters may go now
            call_hook(loop, policy, "on_weight_sync_end", len(rewards))
            with torch.no_grad():
                actions = engine(inputs).softmax(-1).multinomial(1)[:, 0]
            call_hook(loop, policy, "on_engine_sleep")  # and are back
            call_hook(loop, policy, "on_rollout_end", actions)
            call_hook(loop, policy, "on_update_start", actions)
            reward = (actions == targets).float()
            logprobs = policy(inputs).log_softmax(-1)[torch.arange(64, device=device), actions]
            ((reward.mean() - reward) * logprobs).mean().backward()
            if dist.is_initialized():
                for parameter in policy.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            rewards.append(reward.mean().item())
            del logprobs
            call_hook(loop, policy, "on_update_end", actions)
            barrier("end of a step")
    finally:
        call_hook(loop, policy, "teardown", "fit")
    log.info("reward %.2f -> %.2f", rewards[0], rewards[-1])
    return rewards


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if "RANK" in os.environ:
        dist.init_process_group()
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
