"""Reads vLLM's source where importing vLLM would have side effects on this process."""

from importlib.util import find_spec
from pathlib import Path


def source_of(module: str) -> str:
    """Return the source of one of vLLM's modules; "" if its file does not exist."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent.joinpath(*module.split(".")[1:])
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file.read_text(encoding="utf-8") for file in files if file.is_file()), "")
