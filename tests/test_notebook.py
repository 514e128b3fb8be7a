"""A run in a real Jupyter kernel, which has no ipywidgets: its lines, an interrupt, and what that leaves behind."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fork_server import START_BY_EXEC
from tiny import save_model

jupyter_client: Any = pytest.importorskip("jupyter_client", reason="needs ipykernel")

pytestmark = pytest.mark.processes

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
SECONDS = 300.0
"""Without a message of the kernel's."""

CHILDREN = """
import pathlib
def children():
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdecimal() and (entry / "stat").exists():
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid():
                found[entry.name] = (state, (entry / "cmdline").read_text())
    return found
import os
before = children()
"""
LEFT = """
handler = __import__("signal").getsignal(2)
left = {pid: child for pid, child in children().items() if pid not in before}
print("left:", left, module.training, module.sampler._engines, handler.__name__)
"""


class Kernel:
    """A kernel that runs cells."""

    def __init__(self, folder: Path) -> None:
        # An interrupt is sent to the kernel's process group, which a fork has a moment after its start.
        environment = os.environ | {"OMP_NUM_THREADS": "1", START_BY_EXEC: "1"}
        self.manager, self.client = jupyter_client.manager.start_new_kernel(
            startup_timeout=SECONDS, cwd=str(folder), env=environment
        )

    def run(self, code: str, *, interrupt_at: str | None = None) -> tuple[str, list[str]]:
        """Run a cell to its end.

        Args:
            code: of the cell.
            interrupt_at: the kernel is interrupted, once, when the cell has shown this.

        Returns:
            What the cell has shown, and the names of exceptions.
        """
        request = self.client.execute(code)
        shown, errors = "", []
        while True:
            message = self.client.get_iopub_msg(timeout=SECONDS)
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != request:
                continue
            if kind == "stream":
                shown += content["text"]
            elif kind == "error":
                errors.append(content["ename"])
            elif kind == "status" and content["execution_state"] == "idle":
                return shown, errors
            if interrupt_at is not None and interrupt_at in shown:
                interrupt_at = None
                self.manager.interrupt_kernel()

    def close(self) -> None:
        """End the kernel."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("notebook")
    save_model(folder / "model")
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kernel = Kernel(folder)
    yield kernel
    kernel.close()


def script(folder: str, num_steps: int) -> str:
    """The script of the page, small."""
    (section,) = re.findall(r"## From Python\n(.*?)\n## ", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    (code,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    for written, used in {
        "max_new_tokens=8": "max_new_tokens=8, engine={'kv_cache_memory_bytes': 1 << 28}",
        "runs/first": folder,
        "max_steps=2": f"max_steps={num_steps}, accelerator='cpu'",
    }.items():
        assert code.count(written) == 1
        code = code.replace(written, used)
    return str(code)


@pytest.mark.slow
def test_interrupt_ends_a_fit_and_another_one_may_follow(kernel: Kernel) -> None:
    assert kernel.run(CHILDREN) == ("", [])
    shown, errors = kernel.run(script("runs/first", 1000), interrupt_at="step 1/1000 |")
    assert errors == ["KeyboardInterrupt"], shown
    assert "validation at step 0 | sums |" in shown
    left, errors = kernel.run(LEFT)
    assert (left.strip(), errors) == ("left: {} True None default_int_handler", [])
    shown, errors = kernel.run(script("runs/second", 2))
    assert errors == [], shown
    assert re.findall(r"^step \d/2", shown, flags=re.MULTILINE) == ["step 1/2", "step 2/2"]
    assert kernel.run(LEFT)[0].startswith("left: {} True None")
