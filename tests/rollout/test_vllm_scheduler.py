"""The scheduler against vLLM's own, on the same requests: what runs when, in which blocks, and what comes of it."""

from collections import defaultdict
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import vllm
from engine_models import save_model
from scheduler_core import KINDS, SIZES, Core, make_core, make_request, run, sample
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request

from rlightning.rollout.vllm import scheduler as own_scheduler
from rlightning.rollout.vllm.scheduler import (
    STEPS_TO_GATHER,
    TOKENS_AT_ONCE,
    DeferredSequences,
    is_tested,
    make_scheduler,
)

pytestmark = pytest.mark.processes  # the first configuration of vLLM in a process runs a program


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("is_ahead", "num_blocks", "max_batched_tokens"),
    [
        *[pytest.param(True, *sizes, marks=pytest.mark.slow if sizes == SIZES[2] else ()) for sizes in SIZES],
        *[pytest.param(False, *sizes, marks=pytest.mark.slow if sizes != SIZES[2] else ()) for sizes in SIZES],
    ],
)
def test_what_runs_when_is_vllms(folder: str, is_ahead: bool, num_blocks: int, max_batched_tokens: int) -> None:
    """Also where the cache is too small for all, and some have to begin again."""
    sizes: dict[str, Any] = {"num_blocks": num_blocks, "max_batched_tokens": max_batched_tokens}
    for seed in range(4):
        own = run(folder, make_scheduler, is_ahead=is_ahead, seed=seed, **sizes)
        vllms = run(folder, KINDS[is_ahead], is_ahead=is_ahead, seed=seed, **sizes)
        assert isinstance(own.scheduler, KINDS[is_ahead]) and type(own.scheduler) is not KINDS[is_ahead]
        assert own.steps == vllms.steps
        assert [list(scheduled) for scheduled, *_ in own.steps] == [list(scheduled) for scheduled, *_ in vllms.steps]
        assert own.reasons == vllms.reasons
        assert all(own.tokens[name] == vllms.tokens[name] for name in own.reasons)
        assert set(own.reasons.values()) == {"stop", "length"}
        num_preempted = sum(len(preempted) for *_, preempted in own.steps)
        assert len(own.reasons) >= 28 and (num_preempted > 5) == (num_blocks < 200)  # two are aborted


@pytest.mark.parametrize("is_ahead", [False, True])
def test_requests_with_the_adapter_are_deferred(folder: str, is_ahead: bool) -> None:
    sizes: dict[str, Any] = {"num_blocks": 45, "is_ahead": is_ahead, "has_adapter": True}
    with patch.object(DeferredSequences, "begin", autospec=True, side_effect=DeferredSequences.begin) as begin:
        own = run(folder, make_scheduler, **sizes)
    vllms = run(folder, KINDS[is_ahead], **sizes)
    assert own.steps == vllms.steps and own.reasons == vllms.reasons
    assert all(own.tokens[name] == vllms.tokens[name] for name in own.reasons)
    deferred = {call.args[1].request_id for call in begin.call_args_list}
    assert len({name for name in deferred if int(name) % 5}) > 10


def run_full_cache(folder: str, make: Any, *, is_ahead: bool, seed: int) -> Core:
    """Groups of samples of one prompt, in a KV cache that holds about half of the requests that may run at a time."""
    random = np.random.default_rng(seed)
    max_num_seqs, num_samples = int(random.integers(20, 60)), int(random.integers(1, 9))
    num_blocks, max_batched_tokens = int(random.integers(3, 6)) * max_num_seqs, int(random.choice([64, 150, 2048]))
    core, hasher = make_core(folder, make, num_blocks, max_batched_tokens, is_ahead=is_ahead, max_num_seqs=max_num_seqs)
    arrivals: dict[int, list[Request]] = defaultdict(list)
    last_arrival = int(random.choice([1, 40, 300]))
    for group in range(2 * max_num_seqs // num_samples):
        step, prompt_tokens = int(random.integers(last_arrival)), int(random.integers(5, 70))
        for sample_number in range(num_samples):
            length, streams = int(random.integers(60, 180)), random.random() < 0.05
            request = make_request(
                f"{group}.{sample_number}", hasher, length, group, prompt_tokens=prompt_tokens, streams=streams
            )
            arrivals[step].append(request)
    aborts = {int(step): f"{int(random.integers(4))}.0" for step in random.integers(20, 200, 3)}
    core.run(arrivals, aborts, is_ahead=is_ahead)
    return core


@pytest.mark.long
@pytest.mark.parametrize("is_ahead", [pytest.param(False, marks=pytest.mark.slow), True])
def test_schedule_with_full_cache_equals_vllms(folder: str, is_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_scheduler, "STEPS_TO_GATHER", 1)  # requests begin as they come
    num_preempted, shares = 0, list[float]()
    for seed in range(5):
        own = run_full_cache(folder, make_scheduler, is_ahead=is_ahead, seed=seed)
        vllms = run_full_cache(folder, KINDS[is_ahead], is_ahead=is_ahead, seed=seed)
        assert own.steps == vllms.steps
        assert [list(scheduled) for scheduled, *_ in own.steps] == [list(scheduled) for scheduled, *_ in vllms.steps]
        assert own.reasons == vllms.reasons
        assert all(own.tokens[name] == vllms.tokens[name] for name in own.reasons)
        num_preempted += sum(len(preempted) for *_, preempted in own.steps)
        shares += own.shares
        assert not own.scheduler.requests  # those preempted were resumed, and ended
    assert num_preempted > 100 and len(shares) > 500
    assert np.mean(shares) > 0.6


@pytest.mark.parametrize(("num_blocks", "max_batched_tokens"), SIZES)
@pytest.mark.parametrize("is_ahead", [False, True])
def test_logprobs_come_in_order_and_seldom(
    folder: str, is_ahead: bool, num_blocks: int, max_batched_tokens: int
) -> None:
    core = run(folder, make_scheduler, num_blocks=num_blocks, max_batched_tokens=max_batched_tokens, is_ahead=is_ahead)
    for name in core.reasons:
        prompt_tokens = 20 + int(name) // 3
        expected = [sample(name, prompt_tokens + place) for place in range(len(core.tokens[name]))]
        assert core.tokens[name] == [token for token, _, _ in expected]
        rows = [(ids[0], round(logprobs[0], 3), rank) for ids, logprobs, rank in core.logprobs[name]]
        assert rows == expected
        every = 1 if int(name) % 7 == 0 else TOKENS_AT_ONCE
        most = len(expected) if every == 1 else 1 + -(-(len(expected) - 1) // every)  # the first goes by itself
        assert core.messages[name] == most if every == 1 else core.messages[name] <= most
    assert sum(len(tokens) > TOKENS_AT_ONCE for tokens in core.tokens.values()) > 10


def test_request_with_more_logprobs_does_not_affect_others(folder: str) -> None:
    core, hasher = make_core(folder, make_scheduler, 200, 2048, is_ahead=True)
    whole, wide = (make_request(name, hasher, 60, streams=name == "1") for name in ("0", "1"))
    assert whole.sampling_params is not None and wide.sampling_params is not None
    whole.sampling_params.stop_token_ids = wide.sampling_params.stop_token_ids = []
    wide.sampling_params.logprobs = 2
    core.num_columns = 3
    core.run({0: [whole, wide]}, {}, is_ahead=True)
    assert [len(row[0]) for row in core.logprobs["1"]] == [3] * 60 and core.messages["1"] == 60
    assert [len(row[0]) for row in core.logprobs["0"]] == [3] + [1] * 59 and core.messages["0"] == 3
    assert [row[0][0] for row in core.logprobs["0"]] == core.tokens["0"]


@pytest.mark.long
@pytest.mark.parametrize("is_ahead", [False, True])
def test_pause_delivers_all_tokens_and_preserves_results(folder: str, is_ahead: bool) -> None:
    """The process in front counts tokens while it changes the weights."""

    def make(hasher: Any) -> list[Request]:
        return [make_request(str(n), hasher, length, n) for n, length in enumerate((120, 90, 60))]

    whole, hasher = make_core(folder, make_scheduler, 200, 2048, is_ahead=is_ahead)
    whole.run({0: make(hasher)}, {}, is_ahead=is_ahead)
    ends = [len(tokens) for tokens in whole.tokens.values()]  # a request may end with what was under way
    for pause_at in (*range(5, 40, 3), *ends):
        core, hasher = make_core(folder, make_scheduler, 200, 2048, is_ahead=is_ahead)
        for request in make(hasher):
            core.scheduler.add_request(request)
        under_way = []
        for _ in range(pause_at):
            under_way.append(core.begin())
            while len(under_way) > is_ahead:
                core.end(*under_way.pop(0))
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while core.scheduler.has_requests() or under_way:
            if core.scheduler.has_requests():
                under_way.append(core.begin())
            core.end(*under_way.pop(0))
        for name, request in core.scheduler.requests.items():
            assert len(core.tokens[name]) == request.num_output_tokens == min(pause_at, len(whole.tokens[name]))
        core.scheduler.set_pause_state(PauseState.UNPAUSED)
        core.run({0: []}, {}, is_ahead=is_ahead)
        assert core.tokens == whole.tokens and core.logprobs == whole.logprobs and core.reasons == whole.reasons


@pytest.mark.parametrize("is_ahead", [False, True])
def test_queued_requests_share_new_blocks_after_pause(folder: str, is_ahead: bool) -> None:
    core, hasher = make_core(folder, make_scheduler, 200, 2048, is_ahead=is_ahead, max_num_seqs=2)
    requests = [make_request(str(number), hasher, 20, prompt_tokens=40, salt="0") for number in range(5)]
    for request in requests:
        core.scheduler.add_request(request)
    for _ in range(3):
        core.end(*core.begin())
    hashes = [list(request.block_hashes) for request in requests]
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    while core.scheduler.has_requests():
        core.end(*core.begin())
    core.scheduler.set_pause_state(PauseState.UNPAUSED)
    core.run({0: []}, {}, is_ahead=is_ahead)
    assert [request.block_hashes[:2] == known[:2] for request, known in zip(requests, hashes, strict=True)] == [
        *[True] * 2,
        *[False] * 3,
    ]
    computed = {name: tokens for _, tokens, *_ in reversed(core.steps) for name, tokens in tokens.items()}
    assert [computed[name] for name in "01234"] == [0, 32, 0, 32, 32], "at their beginning"
    assert sorted(core.reasons) == list("01234")


@pytest.mark.parametrize("is_ahead", [False, True])
def test_all_may_begin_again_amid_their_blocks(folder: str, is_ahead: bool) -> None:
    """As for weights that are to compute the keys and values anew."""
    core, hasher = make_core(folder, make_scheduler, 200, 2048, is_ahead=is_ahead)
    for number in range(3):
        core.scheduler.add_request(make_request(str(number), hasher, 100, number))
    for step in range(30):
        core.end(*core.begin())
        if step % 7 == 6:
            core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            while core.scheduler.has_requests():
                core.end(*core.begin())
            assert core.scheduler.reset_prefix_cache(reset_running_requests=True)
            core.scheduler.set_pause_state(PauseState.UNPAUSED)
    core.run({0: []}, {}, is_ahead=is_ahead)
    for name in "012":
        assert core.tokens[name] == [sample(name, 20 + place)[0] for place in range(len(core.tokens[name]))]
        assert len(core.logprobs[name]) == len(core.tokens[name]) > 30


def test_unknown_vllm_defers_no_request(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_tested.cache_clear()
    known, hasher = make_core(folder, make_scheduler, 200, 2048, is_ahead=True)
    monkeypatch.setattr(vllm, "__version__", "0.28.1")
    unknown, _ = make_core(folder, make_scheduler, 200, 2048, is_ahead=True)
    make_core(folder, make_scheduler, 200, 2048, is_ahead=True)  # is not logged again
    (said,) = [one.getMessage() for one in caplog.records if one.name == "rlightning.rollout.vllm.scheduler"]
    assert said.startswith("vLLM 0.28.1 schedules") and "tested with vLLM 0.24 and 0.32 only" in said
    for core in (known, unknown):
        core.scheduler.add_request(make_request("0", hasher, 60))
        for _ in range(10):
            core.end(*core.begin())
    assert list(known.scheduler.deferred.rows) == ["0"] and not unknown.scheduler.deferred.rows
    unknown.run({0: []}, {}, is_ahead=True)
    assert unknown.tokens["0"] == [sample("0", 20 + place)[0] for place in range(len(unknown.tokens["0"]))]


def test_of_an_aborted_request_nothing_is_kept(folder: str) -> None:
    core = run(folder, make_scheduler, num_blocks=200, is_ahead=True)
    assert not core.scheduler.requests and "4" not in core.reasons
    assert len(core.logprobs["4"]) == len(core.tokens["4"]) > 0
    assert not core.scheduler.deferred.rows and not core.scheduler.unsent
    free = core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert free == 200 - 1  # one is vLLM's own, for padding


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_canary_goes_before_what_waits(folder: str, is_ahead: bool) -> None:
    core, hasher = make_core(folder, make_scheduler, 200, 2048, is_ahead=is_ahead)
    # of which twelve run at once
    waiting = [make_request(str(number), hasher, 20 + number, number) for number in range(20)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY)
    canary = Request("canary", list(range(32)), sampling_params=params, pooling_params=None, block_hasher=hasher)
    core.run({0: waiting, 3: [canary]}, {}, is_ahead=is_ahead)
    begun = list(dict.fromkeys(name for scheduled, *_ in core.steps for name in scheduled))
    assert begun == [*(str(number) for number in range(12)), "canary", *(str(number) for number in range(12, 20))]
    assert len(core.reasons) == 21


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_canary_beside_many_sequences_begins_at_once(folder: str, is_ahead: bool) -> None:
    core, hasher = make_core(folder, make_scheduler, 2000, 2048, is_ahead=is_ahead, max_num_seqs=200)
    running = [make_request(str(number), hasher, 60, number) for number in range(100)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY)
    canary = Request("canary", list(range(32)), sampling_params=params, pooling_params=None, block_hasher=hasher)
    core.run({0: running, 3: [canary]}, {}, is_ahead=is_ahead)
    assert next(step for step, (scheduled, *_) in enumerate(core.steps) if "canary" in scheduled) == 3


def run_turns(folder: str, num_running: int, *, is_ahead: bool) -> tuple[Core, dict[str, int]]:
    """Forty requests that come one a step while others run; of each the steps for which it has waited."""
    core, hasher = make_core(folder, make_scheduler, 2000, 2048, is_ahead=is_ahead, max_num_seqs=200)
    arrivals = {0: [make_request(f"running {n}", hasher, 120, n) for n in range(num_running)]}
    arrivals |= {5 + n: [make_request(str(n), hasher, 6, n)] for n in range(40)}
    core.run(arrivals, {}, is_ahead=is_ahead)
    begun: dict[str, int] = {}
    for step, (scheduled, *_) in enumerate(core.steps):
        begun |= dict.fromkeys(scheduled.keys() - begun.keys(), step)
    return core, {str(n): begun[str(n)] - 5 - n for n in range(40)}


@pytest.mark.parametrize("is_ahead", [False, True])
def test_turns_beside_many_sequences_begin_together(folder: str, is_ahead: bool) -> None:
    core, waited = run_turns(folder, 100, is_ahead=is_ahead)
    assert max(waited.values()) == STEPS_TO_GATHER - 1
    assert len({5 + int(name) + steps for name, steps in waited.items()}) == 40 // STEPS_TO_GATHER
    assert len(core.reasons) == 140
    alone = run_turns(folder, 0, is_ahead=is_ahead)[0]
    assert all(core.tokens[name] == alone.tokens[name] for name in waited)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_turns_beside_few_sequences_begin_at_once(folder: str, is_ahead: bool) -> None:
    _, waited = run_turns(folder, 8, is_ahead=is_ahead)
    assert set(waited.values()) == {0}


@pytest.mark.parametrize("is_ahead", [False, True])
def test_turns_without_room_begin_in_the_next_step(folder: str, is_ahead: bool) -> None:
    """Five of 180 tokens, of which a step beside 100 sequences reads 200."""
    begun = []
    for make in (make_scheduler, KINDS[is_ahead]):
        core, hasher = make_core(folder, make, 2000, 300, is_ahead=is_ahead, max_num_seqs=200)
        arrivals = {0: [make_request(f"running {n}", hasher, 120, n) for n in range(100)]}
        arrivals[20] = [make_request(str(n), hasher, 6, 7 * n, prompt_tokens=180) for n in range(5)]
        core.run(arrivals, {}, is_ahead=is_ahead)
        firsts: dict[str, int] = {}
        for step, (scheduled, *_) in enumerate(core.steps):
            firsts |= dict.fromkeys(scheduled.keys() - firsts.keys(), step)
        begun.append([firsts[str(n)] for n in range(5)])
    own, vllms = begun
    assert vllms[-1] > 20
    assert all(mine <= theirs + STEPS_TO_GATHER - 1 for mine, theirs in zip(own, vllms, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("is_ahead", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gathered_turns_beside_full_cache_all_end(folder: str, is_ahead: bool) -> None:
    for seed in range(5):
        own = run_full_cache(folder, make_scheduler, is_ahead=is_ahead, seed=seed)
        vllms = run_full_cache(folder, KINDS[is_ahead], is_ahead=is_ahead, seed=seed)
        whole = {name for name, reason in vllms.reasons.items() if reason == own.reasons.get(name)}
        assert len(whole) >= len(vllms.reasons) - 3  # those that are aborted may have ended before
        assert all(own.tokens[name] == vllms.tokens[name] for name in whole)
        assert not own.scheduler.requests
