"""Detects files in the working directory that shadow modules of a run. Uses the standard library only."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

from rlightning.errors import ConfigError

PACKAGES = {
    *("datasets", "huggingface_hub", "jsonargparse", "lightning", "lightning_utilities", "numpy", "pandas", "pyarrow"),
    *("pydantic", "ray", "rich", "rlightning", "safetensors", "tensorboard", "tokenizers", "torch", "torchmetrics"),
    *("transformers", "triton", "vllm", "wandb", "yaml", "zmq"),
}
"""Packages that rlightning, Lightning and vLLM import."""
NEVER_IMPORTED = {
    *("aifc", "antigravity", "asynchat", "asyncore", "audioop", "cgitb", "chunk", "crypt"),
    *("ensurepip", "fileinput", "idlelib", "imaplib", "imghdr", "lib2to3", "mailbox", "mailcap"),
    *("modulefinder", "msilib", "nis", "nntplib", "ossaudiodev", "pipes", "poplib", "pydoc_data"),
    *("rlcompleter", "sched", "shelve", "smtpd", "smtplib", "sndhdr", "spwd", "sunau", "symtable"),
    *("tabnanny", "telnetlib", "test", "this", "tkinter", "trace", "turtle", "turtledemo", "uu"),
    *("venv", "wave", "xdrlib", "xmlrpc", "zipapp"),
}
"""Modules of Python's library that no run imports, so that files may have their names."""


def check_folder(folder: Path) -> None:
    """Raise an error if files in the first folder of Python's path shadow modules that a run imports.

    Raises:
        ConfigError: names the file.
    """
    for path in sorted(folder.iterdir()):
        name = path.stem
        is_module = path.suffix == ".py" or (path / "__init__.py").is_file()
        if not is_module or name in NEVER_IMPORTED or name not in PACKAGES | sys.stdlib_module_names:
            continue
        if path.resolve() == Path(__file__).resolve().parents[1]:  # the package that runs
            continue
        hidden = _find_elsewhere(name, folder)
        if hidden is not None and Path(hidden).resolve() != path.resolve():
            raise ConfigError(f"./{path.name} hides the module '{name}' ({hidden}), which a run imports. Rename it.")


def _find_elsewhere(name: str, folder: Path) -> str | None:
    """Return the file or folder of a module on Python's path outside of ``folder``; None if there is none."""
    path = [entry for entry in sys.path if entry and Path(entry).resolve() != folder.resolve()]
    spec = PathFinder.find_spec(name, path)
    if spec is None:
        return None
    return spec.submodule_search_locations[0] if spec.submodule_search_locations else spec.origin
