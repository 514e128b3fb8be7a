"""Finished groups reach the ranks that train on them while others are sampled."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from collector_cases import CollectorRun
from rank_processes import finish, start_calls
from test_collector import ImmediateSampler

from rlightning.environments.collector import Collector, StepPlan
from rlightning.environments.trajectory_delivery import assign_ranks
from rlightning.rollout import Sampling
from rlightning.rollout.in_flight import InFlight
from rlightning.types import Prompt, Trajectory

LAST = 3
"""The prompt that is completed only when rank 1 has got another one."""


def collect_on_rank(folder: Path, keeps_in_flight: bool) -> dict[str, Any]:
    """Collect two groups on each of two ranks; the prompts that the rank was called with and has got."""
    dist.init_process_group("gloo")
    rank, has_arrived = dist.get_rank(), folder / f"arrived on rank 1, {keeps_in_flight}"
    sampler = ImmediateSampler(lambda index: index != LAST or has_arrived.exists())
    run = CollectorRun(sampler)
    collector = run.collector if rank == 0 else Collector(None, InFlight(1), run)
    called: list[list[Trajectory]] = []

    def on_completed(prompt: Prompt, trajectories: list[Trajectory]) -> None:
        assert [one.prompt.index for one in trajectories] == [prompt.index] * 2
        called.append(trajectories)
        if rank == 1:
            has_arrived.touch()

    requests = [(Prompt(index, "", [index], {}), 0) for index in (2 * rank, 2 * rank + 1)]
    if keeps_in_flight:
        plan = StepPlan(2, 4, room=8, weight_version=0)
        groups = collector.collect_trajectories(requests, 2, Sampling(), on_completed, plan)
    else:
        groups = collector.generate(requests, 2, Sampling(), on_completed)
    # Rewards that have begun are found by these objects.
    is_same = {id(one.turns) for group in called for one in group} == {
        id(one.turns) for group in groups for one in group
    }
    collector.close()
    run.collector.close()
    dist.destroy_process_group()
    return {"got": [group[0].prompt.index for group in groups], "called": len(called), "is_same": is_same}


@pytest.mark.processes
@pytest.mark.parametrize("keeps_in_flight", [False, True])
def test_ranks_get_groups_while_others_are_sampled(keeps_in_flight: bool, tmp_path: Path) -> None:
    ranks = finish(start_calls(collect_on_rank, 2, tmp_path, keeps_in_flight), timeout=120)
    assert all(rank["called"] == 2 and rank["is_same"] for rank in ranks)
    got = [rank["got"] for rank in ranks]
    assert sorted(got[0] + got[1]) == [0, 1, 2, 3] and all(one == sorted(one) for one in got)
    if not keeps_in_flight:
        assert got == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("num_groups", "missing", "ranks"),
    [
        (4, {0: 2, 1: 2}, [0, 0, 1, 1]),
        (1, {0: 1, 1: 2}, [1]),
        (3, {0: 3, 1: 0, 2: 2}, [0, 0, 2]),
        (0, {}, []),
    ],
)
def test_assign_ranks_prefers_ranks_that_lack_most(num_groups: int, missing: dict[int, int], ranks: list[int]) -> None:
    total = sum(missing.values())
    assert assign_ranks(num_groups, missing) == ranks
    assert sum(missing.values()) == total - num_groups
