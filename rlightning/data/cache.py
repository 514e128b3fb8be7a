"""Cached folders beside those of ``datasets``, which one process fills for all processes and later runs."""

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from rlightning.errors import ConfigError


def cached_folder(parts: Mapping[str, object], build: Callable[[Path], None]) -> Path:
    """Return the cache folder for ``parts``; if it is missing, one process fills it by ``build`` while others wait.

    Args:
        parts: everything that determines the content, as JSON values.
        build: fills an empty folder, which is renamed when it is complete.
    """
    import datasets
    from filelock import FileLock

    digest = hashlib.blake2b(json.dumps(parts, sort_keys=True, default=repr).encode(), digest_size=16).hexdigest()
    root = Path(datasets.config.HF_DATASETS_CACHE).expanduser() / "rlightning"
    folder = root / digest
    if folder.is_dir():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                with tempfile.TemporaryDirectory(dir=root) as temporary:
                    (Path(temporary) / "new").mkdir()
                    build(Path(temporary) / "new")
                    (Path(temporary) / "new").rename(folder)
    except OSError as error:
        raise ConfigError(
            f"The prompt set cannot be cached in '{root}': {error}. Make room there, or set HF_DATASETS_CACHE."
        ) from error
    return folder


def file_digest(file: Path) -> str:
    """Return a digest of a file's content."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
