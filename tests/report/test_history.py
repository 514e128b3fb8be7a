import json

from rlightning.report import History


def test_values_by_step() -> None:
    history = History()
    history.add(1, {"reward/mean": 0.5})
    history.add(2, {"reward/mean": 0.75, "optim/lr": 1e-3})
    assert history.series == {"reward/mean": [(1, 0.5), (2, 0.75)], "optim/lr": [(2, 1e-3)]}
    assert (history.last("reward/mean"), history.last("loss")) == (0.75, None)


def test_a_step_that_comes_again_replaces_what_followed_it() -> None:
    history = History()
    for step in (1, 2, 3, 2):
        history.add(step, {"loss": 10.0 * step})
    assert history.series["loss"] == [(1, 10.0), (2, 20.0)]


def test_what_is_no_number_is_left_out() -> None:
    history = History()
    for step, value in enumerate([1.0, float("nan"), float("inf"), 2.0]):
        history.add(step, {"loss": value})
    assert history.series["loss"] == [(0, 1.0), (3, 2.0)]


def test_a_long_run_is_thinned_evenly() -> None:
    history = History(max_points=4)
    for step in range(1, 20):
        history.add(step, {"loss": float(step)})
    assert [step for step, _ in history.series["loss"]] == [1, 9, 17]


def test_the_state_survives_json_and_goes_on_thinning() -> None:
    first, second = History(max_points=4), History(max_points=4)
    for step in range(1, 8):
        first.add(step, {"loss": float(step)})
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for history in (first, second):
        for step in range(8, 14):
            history.add(step, {"loss": float(step)})
    assert first.series == second.series
