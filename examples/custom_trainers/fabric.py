"""The four callbacks of colocated training in a loop of Lightning Fabric, here with two processes::

    torchrun --nproc-per-node 2 examples/custom_trainers/fabric.py

Teaches a network to choose the one of four actions that its input names, by REINFORCE. A copy of the network stands for
the engine.
"""

import copy
import logging
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn

from rlightning.callbacks import ControllerMode, DeviceSyncBeforeBarrier, EmptyCacheAfterUpdate, OffloadDuringRollout
from rlightning.hooks import call_hook

log = logging.getLogger("fabric_loop")


def make_callbacks() -> list[Any]:
    """All of them; each works without the others."""
    return [ControllerMode(), DeviceSyncBeforeBarrier(), EmptyCacheAfterUpdate(), OffloadDuringRollout(parameters=True)]


def main(num_steps: int = 30, callbacks: Sequence[Any] | None = None, devices: int = 1) -> list[float]:
    """Train for ``num_steps``; the mean reward of each."""
    fabric = Fabric(devices=devices, strategy="ddp" if devices > 1 else "auto")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4))
    engine = copy.deepcopy(net).to(fabric.device)
    policy, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.02))
    torch.manual_seed(fabric.global_rank)  # each rank has inputs of its own
    # What the callbacks look at: who else is there, the strategy with its device and its barrier, the optimizer.
    callbacks = make_callbacks() if callbacks is None else callbacks
    loop = SimpleNamespace(callbacks=callbacks, strategy=fabric.strategy, optimizer=optimizer)
    call_hook(loop, policy, "setup", "fit")
    rewards: list[float] = []
    try:
        while len(rewards) < num_steps:
            targets = torch.randint(4, (64,), device=fabric.device)
            inputs = nn.functional.one_hot(targets, 4).float()
            call_hook(loop, policy, "on_rollout_start", inputs)
            call_hook(loop, policy, "on_weight_sync_start", len(rewards))
            engine.load_state_dict(net.state_dict())
            call_hook(loop, policy, "on_engine_wake")  # the policy's parameters may go now
            call_hook(loop, policy, "on_weight_sync_end", len(rewards))
            with torch.no_grad():
                actions = engine(inputs).softmax(-1).multinomial(1)[:, 0]
            call_hook(loop, policy, "on_engine_sleep")  # and are back
            call_hook(loop, policy, "on_rollout_end", actions)
            call_hook(loop, policy, "on_update_start", actions)
            reward = (actions == targets).float()
            logprobs = policy(inputs).log_softmax(-1)[torch.arange(64, device=fabric.device), actions]
            fabric.backward(((reward.mean() - reward) * logprobs).mean())
            optimizer.step()
            optimizer.zero_grad()
            rewards.append(reward.mean().item())
            del logprobs
            call_hook(loop, policy, "on_update_end", actions)
            fabric.barrier("end of a step")
    finally:
        call_hook(loop, policy, "teardown", "fit")
    del policy  # as the last that holds gloo's threads, DDP would wait for one that waits for Python's lock
    if dist.is_initialized():
        dist.destroy_process_group()  # which Fabric leaves to the end of Python, and gloo may abort there
    log.info("reward %.2f -> %.2f", rewards[0], rewards[-1])
    return rewards


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main(devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
