"""The files beside a model's weights, which each engine reads again when it starts."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

SUFFIXES = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")
"""Of configurations, tokenizers, chat templates and a model's own code."""


@dataclass(frozen=True)
class ModelFiles:
    """What the files of a model were when the run began.

    Attributes:
        model: a folder, or a name on the Hugging Face hub.
        revision: the commit that a hub's files are of; None for a folder.
        digests: SHA-256 by file name; of a hub's model, those that have been downloaded.
    """

    model: str
    revision: str | None
    digests: Mapping[str, str]

    @classmethod
    def read(cls, model: str) -> "ModelFiles":
        """Read a model's files as they are now."""
        folder, revision = Path(model), None
        if not folder.is_dir():
            folder, revision = _cached_folder(model)
        files = [path for path in sorted(folder.glob("*")) if path.suffix in SUFFIXES and path.is_file()]
        digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
        return cls(model, revision, digests)

    def find_changes(self) -> list[str]:
        """Return the names of the files that are not what they were, or have come or gone."""
        now = ModelFiles.read(self.model)
        names = self.digests.keys() | now.digests.keys()
        if self.revision is not None:  # others may have been downloaded since
            names = self.digests.keys() & now.digests.keys() if self.revision == now.revision else set()
        return sorted(name for name in names if self.digests.get(name) != now.digests.get(name))


def _cached_folder(model: str) -> tuple[Path, str | None]:
    """Where the hub's cache has a model, and the commit that it is of."""
    try:
        path = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # neither a folder nor a name
        path = None
    if not isinstance(path, str):
        return Path("/nonexistent"), None
    return Path(path).parent, Path(path).parent.name
