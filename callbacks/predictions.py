"""Writes predictions to a file of JSON Lines, one for each prompt, or of trajectories in Parquet."""

import logging
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from rlightning.errors import ConfigError
from rlightning.hooks import RLCallback, check_outputs, check_repeated
from rlightning.parallel.collectives import any_rank, num_ranks_in, rank_in
from rlightning.protocols import (
    HasCheckpoint,
    HasData,
    HasGroupSize,
    HasModel,
    HasPredictPrompts,
    HasSampling,
    LeavesOutPrompts,
    Loop,
    callbacks_of,
    has,
)
from rlightning.report.prediction_file import PredictionFile
from rlightning.run_dir import run_dir
from rlightning.types import Prompt, Trajectory

logger = logging.getLogger("rlightning")


class JSONLPredictions(RLCallback):
    """Writes the completions of ``predict_step`` to a file: JSON Lines with one object a prompt, or Parquet.

    In JSON Lines each object is a prompt: ``index`` (the prompt's row), ``prompt``, ``completions`` and
    ``finish_reasons`` (lists of equal length), and ``columns`` (the row as it was read; NaN and infinities, which JSON
    does not have, are null). In Parquet each row is a trajectory, in full (docs/trajectories.md). An unfinished file is
    named ``<name>.partial`` and has a line of JSON for each prompt, so that a file with the final name is complete, and
    in the prompts' order. A prompt is written when all of its completions are finished. With several ranks each writes
    its own file, ``<name>.rank1.jsonl`` and so on.

    A run that finds a partial file continues it: prompts in the file are not completed again. The file must have been
    started with the same model, sampling, prompts and number of ranks; otherwise the run raises an error.

    In a loop that is not Lightning's, the callback needs ``on_predict_start``, ``on_predict_batch_end`` with a
    ``list[(Prompt, list[Trajectory])]`` as the outputs, and ``on_predict_end``. The loop's object has
    ``default_root_dir`` unless ``path`` is given. With :meth:`is_done` the loop can skip finished prompts.

    Args:
        path: the file, Parquet if its name ends in ``.parquet``; by default ``predictions.jsonl`` in the run's folder.
            The file must not exist yet.
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__()
        self.path = path
        self._file: PredictionFile | None = None
        self._earlier: dict[int, int] = {}  # the hash of each prompt's text by the prompt's index
        self._written: Counter[int] = Counter()  # indices of prompts of this batch that are in the file already

    @property
    def state_key(self) -> str:
        """Key of this callback's state in a checkpoint; contains the path, as a run may have two of these callbacks."""
        return self._generate_state_key(path=self.path)

    def output(self, trainer: Loop, stage: str) -> Path | None:
        """Return the path of the file."""
        return self._path(trainer) if stage == "predict" else None

    def setup(self, trainer: Loop, pl_module: object, stage: str) -> None:
        """In a prediction, exclude the prompts that an interrupted run has completed. Every rank must call it.

        Raises:
            ConfigError: the file exists, another process writes it, or a partial file is of a run with other settings.
        """
        check_repeated(callbacks_of(trainer))
        check_outputs(trainer, stage)
        if stage == "predict":
            self._prepare(trainer, pl_module)

    def on_predict_start(self, trainer: Loop, module: object) -> None:
        """Open the file."""
        file = self._file
        if file is None or file.is_open:  # None, or left open by a loop that was cut short without on_exception
            file = self._prepare(trainer, module)
        if self._earlier:
            logger.info("%s has %d prompts' completions: the others come next", file.partial, len(self._earlier))
        file.open()

    def is_done(self, prompt: Prompt) -> bool:
        """Return whether an earlier run has written the completions of ``prompt``.

        Raises:
            ConfigError: the earlier run has completed another prompt with this index.
        """
        if prompt.index not in self._earlier:
            return False
        if self._earlier[prompt.index] != hash(prompt.text):
            raise ConfigError(
                f"'{self._open_file.partial}' holds another prompt of row {prompt.index}. It is not overwritten: "
                "move it away, or name another output."
            )
        return True

    def on_predict_prompt_end(
        self, trainer: Loop, module: object, prompt: Prompt, trajectories: list[Trajectory]
    ) -> None:
        """Write a prompt when it is complete, before the rest of its batch."""
        if not self.is_done(prompt):
            self._open_file.write(prompt, trajectories)
        self._written[prompt.index] += 1

    def on_predict_batch_end(
        self,
        trainer: Loop,
        module: object,
        outputs: list[tuple[Prompt, list[Trajectory]]],
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Write the prompts of a batch that have not been written yet."""
        for prompt, trajectories in outputs:
            if self._written[prompt.index]:
                self._written[prompt.index] -= 1
            elif not self.is_done(prompt):
                self._open_file.write(prompt, trajectories)
        self._written.clear()

    def on_predict_end(self, trainer: Loop, module: object) -> None:
        """Rename the file to its final name."""
        file, self._file, self._earlier = self._open_file, None, {}
        file.finish()
        logger.info("%d completions of %d prompts in %s", file.num_completions, file.num_prompts, file.path)

    def teardown(self, trainer: Loop, pl_module: object, stage: str) -> None:
        """Rename the file to its final name if there was no prompt to complete: Lightning then calls no other hook."""
        if stage == "predict" and self._file is not None:
            self.on_predict_end(trainer, pl_module)

    def on_exception(self, trainer: Loop, module: object, exception: BaseException) -> None:
        """Close the partial file, which keeps its name."""
        file, self._file, self._earlier = self._file, None, {}
        if file is None:
            return
        file.close()
        if file.is_begun:
            rest = "the same command goes on from there"
            logger.info("%d prompts' completions are in %s; %s", file.num_prompts, file.partial, rest)

    def _prepare(self, trainer: Loop, module: object) -> PredictionFile:
        """Read the files of earlier runs, of all ranks, and have the data module exclude their prompts."""
        paths, rank = self._rank_paths(trainer), rank_in(trainer)
        data = trainer.datamodule if has(trainer, HasData) else None
        files = [PredictionFile(path, prediction_settings(trainer, module, data)) for path in paths]
        if self._file is not None:
            self._file.close()
        own = self._file = files[rank]
        refusal: ConfigError | None = None
        try:
            own.lock()
            self._earlier = self._read_earlier(own, files)
        except ConfigError as error:
            refusal = error
        # No rank writes before all have read what is there.
        if any_rank(refusal is not None, name="predictions of earlier runs are read"):
            own.close()
            raise refusal or ConfigError(f"Another rank refuses its file beside '{own.path}', and says why.")
        if has(data, LeavesOutPrompts):
            data.leave_out(self.is_done if self._earlier else None)
        self._written.clear()
        return own

    def _read_earlier(self, own: PredictionFile, files: list[PredictionFile]) -> dict[int, int]:
        """Return the prompts in the files of all ranks; after a kill some may be complete and others partial."""
        if own.path.exists() and not any(file.is_begun for file in files if len(files) > 1):
            raise ConfigError(
                f"path='{own.path}' is there already and is not overwritten. Name another file, or move it away."
            )
        return {index: text for file in files for index, text in file.read().items()}

    def _path(self, trainer: Loop) -> Path:
        return Path(self.path).expanduser() if self.path else run_dir(trainer) / "predictions.jsonl"

    def _rank_paths(self, trainer: Loop) -> list[Path]:
        """Return the final paths of all ranks' files; raise an error for partial files of another number of ranks."""
        path = self._path(trainer)
        num_ranks = num_ranks_in(trainer)
        paths = [path]
        if num_ranks > 1:
            paths = [path.with_suffix(f".rank{rank}{path.suffix}") for rank in range(num_ranks)]
        names = {f"{known.name}.partial" for known in paths}
        partial = re.compile(rf"{re.escape(path.stem)}(\.rank\d+)?{re.escape(path.suffix)}\.partial")
        for other in path.parent.iterdir() if path.parent.is_dir() else ():
            if partial.fullmatch(other.name) and other.name not in names:
                raise ConfigError(
                    f"'{other}' was begun with another number of ranks than {num_ranks}. Use as many as then, or "
                    "move it away."
                )
        return paths

    @property
    def _open_file(self) -> PredictionFile:
        assert self._file is not None, "on_predict_start() opens the file"
        return self._file


def prediction_settings(trainer: Loop, module: object, data: object) -> dict[str, object]:
    """Return the settings that affect completions, such as the model, by configuration key; unknown ones are None."""
    sampling = asdict(module.sampling) if has(module, HasSampling) else {}
    sampling.pop("returns_supports", None)  # completions do not depend on it
    prompts = data.predict_prompts if has(data, HasPredictPrompts) else None
    return {
        "model.model": module.model_path if has(module, HasModel) else None,
        "model.samples_per_prompt": module.samples_per_prompt if has(module, HasGroupSize) else None,
        "ckpt_path": trainer.ckpt_path if has(trainer, HasCheckpoint) else None,
        "the number of prompts": None if prompts is None else len(prompts),
        **{f"rollout.{name}": value for name, value in sampling.items()},
    }
