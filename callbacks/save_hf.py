"""Saves the policy as a Hugging Face folder."""

import logging
from pathlib import Path
from typing import Literal, TypeGuard

from lightning.pytorch import Trainer

from rlightning.disk import needed
from rlightning.errors import ConfigError
from rlightning.hooks import RunCallback
from rlightning.parallel.collectives import rank_in
from rlightning.protocols import CountsSteps, Loop, SavesAdapter, SavesHF, callbacks_of, has
from rlightning.run_dir import run_dir

logger = logging.getLogger("rlightning")


class SaveHF(RunCallback):
    """Saves the policy in Hugging Face's format at the end of a run, and optionally every few steps.

    ``AutoModelForCausalLM.from_pretrained`` and vLLM can load such a folder, but a run cannot be resumed from it. The
    callback is called after all other callbacks of a Trainer, since these may change weights at the end.

    In a loop that is not Lightning's, the callback needs ``on_train_end``, and ``on_update_end`` with a
    ``trainer.global_step`` (finished steps) for ``every_n_steps``; both on every rank, since all ranks with parts of
    the model take part in saving it. The module needs ``save_hf(path)``.

    Args:
        path: the folder of the final state; by default ``hf`` in the run's folder. Earlier states are saved beside it,
            as ``hf_step_000100``.
        every_n_steps: also save after every n-th rollout step; by default only at the end.
        adapter: for a module with an adapter (``model.adapter``): save the merged model, the adapter in PEFT's format
            (in the folder ``hf_adapter`` beside it), or "both".
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        every_n_steps: int | None = None,
        adapter: Literal["both", "adapter", "merged"] = "both",
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigError(
                f"every_n_steps={every_n_steps} must be at least 1. Leave it out to save at the end of the run only."
            )
        super().__init__()
        self.path = path
        self.every_n_steps, self.adapter = every_n_steps, adapter
        self._saves_adapter_alone = False
        self._seen_step = -1

    @property
    def state_key(self) -> str:
        """Key of this callback's state in a checkpoint; contains the path, as a run may have two of these callbacks."""
        return self._generate_state_key(path=self.path)

    def begin_run(self) -> None:
        """Reset the last saved step, since another run has steps with the same numbers."""
        self._seen_step = -1

    def output(self, trainer: Loop, stage: str) -> Path | None:
        """Return the folder of the saved policy; that of its adapter if that alone is saved."""
        if stage != "fit":
            return None
        folder = self._folder(trainer)
        return adapter_folder(folder) if self._saves_adapter_alone else folder

    def setup(self, trainer: Loop, pl_module: object, stage: str) -> None:
        """Raise a ConfigError if the policy cannot be saved to the path; move this callback to the end of the list."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        if not has(pl_module, SavesHF):
            raise ConfigError(
                f"{type(pl_module).__name__} has no save_hf(path). Derive it from RLModule, or drop SaveHF."
            )
        self._saves_adapter_alone = self.adapter == "adapter" and has_adapter(pl_module)
        folder = self._folder(trainer)
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"path='{folder}' is a file, a model is saved as a folder. Name another one.")
        if isinstance(trainer, Trainer):
            others = [other for other in callbacks_of(trainer) if other is not self]
            trainer.callbacks = [*others, self]  # type: ignore[attr-defined]  # Lightning is going through the old list

    def on_update_end(self, trainer: Loop, module: object, batch: object) -> None:
        """Save after every n-th step, in a loop without batches."""
        self._save_on_the_way(trainer, module)

    def on_train_batch_end(self, trainer: Loop, module: object, outputs: object, batch: object, batch_idx: int) -> None:
        """Save after every n-th step."""
        self._save_on_the_way(trainer, module)

    def on_train_end(self, trainer: Loop, module: object) -> None:
        """Save the final policy."""
        self._seen_step = -1
        self._save(trainer, module, self._folder(trainer))

    def _save_on_the_way(self, trainer: Loop, module: object) -> None:
        if self.every_n_steps is None:
            return
        if not has(trainer, CountsSteps):
            raise ConfigError(
                f"every_n_steps={self.every_n_steps} needs the number of finished steps, and "
                f"{type(trainer).__name__} has no global_step. Set it, or leave every_n_steps out."
            )
        # This is called at least twice in a step: after its update, its batch, and each of its micro-batches.
        step = trainer.global_step
        is_new, self._seen_step = step != self._seen_step, step
        if step == 0 or step % self.every_n_steps or not is_new:
            return
        folder = self._folder(trainer)
        self._save(trainer, module, folder.with_name(f"{folder.name}_step_{step:06d}"))

    def _save(self, trainer: Loop, module: object, folder: Path) -> None:
        assert has(module, SavesHF), "setup() has checked it"
        way_out = "Make room there, or name another path. The run's checkpoints are kept."
        beside = adapter_folder(folder)
        saved = [("model", folder, module.save_hf)]
        if has_adapter(module):
            saved.append(("adapter", beside, module.save_adapter))
            saved = {"both": saved, "merged": saved[:1], "adapter": saved[1:]}[self.adapter]
        for what, path, save in saved:
            with needed(f"The {what}", path, way_out):
                save(path)
            if rank_in(trainer) == 0:
                logger.info("saved the %s to %s", what, path)
        written = [path for _, path, _ in saved]
        for path in (folder, beside):
            if path not in written and path.exists() and rank_in(trainer) == 0:
                # It may be the user's own, such as the base of the adapter or the adapter of the start.
                logger.warning("%s is not of this save, and is left as it is. %s is.", path, written[0])

    def _folder(self, trainer: Loop) -> Path:
        return Path(self.path).expanduser() if self.path else run_dir(trainer) / "hf"


def has_adapter(module: object) -> TypeGuard[SavesAdapter]:
    """Return whether a module trains an adapter and can save it alone."""
    return has(module, SavesAdapter) and module.adapter is not None


def adapter_folder(folder: Path) -> Path:
    """Return the folder of the adapter beside that of the merged model."""
    return folder.with_name(f"{folder.name}_adapter")
