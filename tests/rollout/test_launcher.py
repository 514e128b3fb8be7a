import pytest

from rlightning.rollout.vllm.launcher import find_cause

PREFIX = "(EngineCore pid=7) ERROR 11-25 13:46:07 [core.py:15]"
TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "/vllm/moe.py", line 185, in make',
    "    assert sizes[top_k]",
]
CONSEQUENCE = "RuntimeError: Engine core initialization failed. See root cause above."


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([], None),
        (["all is well"], None),
        (["ValueError: too small"], "ValueError: too small"),
        (["ValueError: first", "ValueError: second", CONSEQUENCE], "ValueError: second"),
        ([*TRACEBACK, "AssertionError", CONSEQUENCE], "AssertionError in moe.py, line 185: assert sizes[top_k]"),
        (
            [f"{PREFIX} {line}" for line in [*TRACEBACK, "           ^^^^", "AssertionError"]],
            "AssertionError in moe.py, line 185: assert sizes[top_k]",
        ),
        ([*TRACEBACK, "torch.OutOfMemoryError: 2 GiB"], "OutOfMemoryError: 2 GiB"),
        (["Fatal Python error: Bus error", "", "Current thread:", CONSEQUENCE], "Fatal Python error: Bus error"),
        (["terminate called after throwing an instance of 'std::system_error'", "  what():  Resource"], "Resource"),
    ],
)
def test_find_cause_takes_the_last_error_that_is_no_consequence(lines: list[str], cause: str | None) -> None:
    assert find_cause(lines) == cause
