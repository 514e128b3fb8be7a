"""Predictions as a file, a line a prompt."""

import json
import logging
from pathlib import Path
from typing import Any, TextIO

from rlightning.errors import ConfigError
from rlightning.hooks import RLCallback, check_repeated
from rlightning.loop_ranks import num_ranks_in, rank_in
from rlightning.run_dir import run_dir
from rlightning.types import Completion, Prompt

logger = logging.getLogger("rlightning")


class JSONLPredictions(RLCallback):
    """Writes what ``predict_step`` returns to a JSONL file, an object a prompt.

    An object has ``index`` (the prompt's row), ``prompt``, ``completions`` and ``finish_reasons`` (lists of equal
    length), and ``columns`` (the row as it was read). While it grows the file is called ``<name>.partial``, so a
    file of the final name is whole. With several ranks each writes its share, as ``<name>.rank1.jsonl`` and so on.

    From a loop that is not Lightning's it needs ``on_predict_start``, ``on_predict_batch_end`` with a ``list[(Prompt,
    list[Completion])]`` as the outputs, and ``on_predict_end``. The loop's object has ``default_root_dir`` unless
    ``path`` is given.

    Args:
        path: the file; by default ``predictions.jsonl`` in the run's folder. It must not be there yet.
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__()
        self.path = path
        self._file: TextIO | None = None
        self._final = Path()
        self._num_prompts = 0
        self._num_completions = 0

    @property
    def state_key(self) -> str:
        """Two of them write two files."""
        return self._generate_state_key(path=self.path)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse to overwrite before anything is generated."""
        check_repeated(getattr(trainer, "callbacks", ()))
        if stage == "predict":
            self._final = self._locate(trainer)

    def on_predict_start(self, trainer: Any, module: Any) -> None:
        """Open the file."""
        self._close()  # of a loop that was cut short, without on_exception
        self._final = self._locate(trainer)
        self._final.parent.mkdir(parents=True, exist_ok=True)
        self._num_prompts = self._num_completions = 0
        self._file = self._partial.open("w", encoding="utf-8")

    def on_predict_batch_end(
        self,
        trainer: Any,
        module: Any,
        outputs: list[tuple[Prompt, list[Completion]]],
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Write the batch's lines."""
        assert self._file is not None
        for prompt, completions in outputs:
            self._file.write(json.dumps(prediction(prompt, completions), ensure_ascii=False, default=str) + "\n")
            self._num_prompts += 1
            self._num_completions += len(completions)
        self._file.flush()

    def on_predict_end(self, trainer: Any, module: Any) -> None:
        """Give the file its name."""
        self._close()
        self._partial.replace(self._final)
        logger.info("%d completions of %d prompts in %s", self._num_completions, self._num_prompts, self._final)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Keep what is there, under the name that says it is not whole."""
        if self._file is not None:
            self._close()
            logger.info("the first %d prompts' completions are in %s", self._num_prompts, self._partial)

    def _locate(self, trainer: Any) -> Path:
        path = Path(self.path).expanduser() if self.path else run_dir(trainer) / "predictions.jsonl"
        if num_ranks_in(trainer) > 1:
            path = path.with_suffix(f".rank{rank_in(trainer)}{path.suffix}")
        if path.exists():
            raise ConfigError(
                f"path='{path}' is there already and is not overwritten. Name another file, or move it away."
            )
        return path

    @property
    def _partial(self) -> Path:
        return self._final.with_name(f"{self._final.name}.partial")

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def prediction(prompt: Prompt, completions: list[Completion]) -> dict[str, Any]:
    """The object of one prompt."""
    return {
        "index": prompt.index,
        "prompt": prompt.text,
        "completions": [c.text for c in completions],
        "finish_reasons": [c.finish_reason for c in completions],
        "columns": prompt.columns,
    }
