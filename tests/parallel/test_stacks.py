"""What a run's stacks.txt holds."""

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import wait_for

from rlightning.parallel.stacks import StackRecorder


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the thread is ended by one
def test_stacks_that_arrive_in_parts_are_one_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal's handler writes line by line, while the recorder's thread may look at what there is."""
    recorder, is_over = StackRecorder(tmp_path / "stacks.txt", "rank 1"), threading.Event()
    parts = [f"line {number}\n" for number in range(5)]

    def sleep(seconds: float) -> None:
        if parts:
            os.write(recorder._raw, parts.pop(0).encode())
        elif is_over.is_set():
            raise SystemExit
        else:
            time.sleep(0.01)

    monkeypatch.setattr(
        "rlightning.parallel.stacks.time", SimpleNamespace(sleep=sleep, strftime=lambda form: "2026-01-01 00:00:00")
    )
    recorder.start()
    wait_for(recorder.path.exists)
    is_over.set()
    recorder.join()
    header, *lines = recorder.path.read_text().strip().splitlines()
    assert header.startswith("=== rank 1, process") and header.endswith(": SIGUSR1 to rank 1")
    assert lines == [f"line {number}" for number in range(5)]
