"""The Lightning data module of prompt sets."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningDataModule
from lightning.pytorch.loops.progress import _ProcessedTracker

from rlightning.argument_checks import CheckedArguments, checked
from rlightning.data.formatting import PromptFormat, build_prompts, require_columns
from rlightning.data.loaders import ChosenPrompts, PromptBatches, PromptLoader
from rlightning.data.sources import RowTable, read_rows
from rlightning.data.stream import PromptStream
from rlightning.errors import ConfigError
from rlightning.seeds import run_seed
from rlightning.types import Prompt

logger = logging.getLogger(__name__)


@checked
@dataclass(frozen=True)
class ValidationSet:
    """A prompt set that validation runs on.

    Attributes:
        path: as of ``PromptDataModule(train=...)``.
        limit: use only this many rows, from the start.
        samples_per_prompt: completions of each prompt; k of pass@k.
        temperature: of these completions; None: 0 (greedy) for one completion a prompt, else 1.
        prompt_column: None: the data module's.
        prompt_template: None: the data module's.
        name: in the metrics ``val/<name>/...``; the data module takes it from the key.
    """

    path: str
    limit: int | None = None
    samples_per_prompt: int = 1
    temperature: float | None = None
    prompt_column: str | None = None
    prompt_template: str | None = None
    name: str = ""

    def resolve(self, name: str) -> "ValidationSet":
        """The same set with its name and its temperature filled in."""
        if self.samples_per_prompt < 1:
            raise ConfigError(
                f"Validation set '{name}': samples_per_prompt={self.samples_per_prompt} must be at least 1."
            )
        if self.limit is not None and self.limit < 1:
            raise ConfigError(
                f"Validation set '{name}': limit={self.limit} must be at least 1. Leave it out for all rows."
            )
        default = 0.0 if self.samples_per_prompt == 1 else 1.0
        temperature = default if self.temperature is None else self.temperature
        if temperature == 0 and self.samples_per_prompt > 1:
            samples = f"samples_per_prompt={self.samples_per_prompt}"
            raise ConfigError(
                f"Validation set '{name}': {samples} at temperature=0 are all alike. Use a temperature above 0."
            )
        return replace(self, name=name, temperature=temperature)


class PromptDataModule(CheckedArguments, LightningDataModule):
    """Prompt sets for training, validation and prediction.

    Reads from the trainer's module: ``tokenizer``, ``prompts_per_step``, ``max_model_length`` and, where it has them,
    ``vocab_size`` and ``completion_column``; calls its ``check_columns(columns, source)`` and, on rank 0,
    ``check_answers(prompts, where)``, where it has them, with what the reward functions will get. Everything wrong with
    the data is found in ``setup``, before any model loads. The position in the training prompts is part of every
    checkpoint.

    Args:
        train: a file (.jsonl, .json, .csv, .parquet), a folder saved by ``datasets``, or a hub name with its
            configuration and split, ``owner/name:config:split``.
        validation: sets by name, each a path or a :class:`ValidationSet`; or one path.
        predict: the set of ``rlightning predict``.
        prompt_column: the column that holds the prompt, a text or a list of chat messages.
        prompt_template: a format string over the columns, used instead, such as ``"Q: {question}\\nA:"``.
        system_prompt: the first message of every chat without one; before a plain text, with an empty line between.
        chat_template: whether to apply the tokenizer's chat template; None: where it has one.
        chat_template_arguments: passed to the chat template, such as ``enable_thinking: false``.
        max_prompt_tokens: the limit on a prompt's tokens.
        overlong: what to do with training, validation and prediction prompts over it; "truncate" keeps their end.
        shuffle: whether each epoch has its own order of the training prompts.
        seed: of these orders; None: of ``seed_everything``.
        validation_batch_size: prompts that all ranks together give the engine at once, in validation and prediction.
    """

    def __init__(
        self,
        train: str | None = None,
        *,
        validation: dict[str, ValidationSet | str] | str | None = None,
        predict: str | None = None,
        prompt_column: str = "prompt",
        prompt_template: str | None = None,
        system_prompt: str | None = None,
        chat_template: bool | None = None,
        chat_template_arguments: dict[str, Any] | None = None,
        max_prompt_tokens: int = 1024,
        overlong: Literal["drop", "truncate"] = "drop",
        shuffle: bool = True,
        seed: int | None = None,
        validation_batch_size: int = 256,
    ) -> None:
        super().__init__()
        if validation_batch_size < 1:
            raise ConfigError(f"validation_batch_size={validation_batch_size} must be at least 1.")
        if seed is not None and seed < 0:
            raise ConfigError(f"seed={seed} must be at least 0. Leave it out for that of seed_everything.")
        if isinstance(validation, str):
            validation = {_name_of(validation): validation}
        self.validation_sets = [
            (ValidationSet(chosen) if isinstance(chosen, str) else chosen).resolve(name)
            for name, chosen in (validation or {}).items()
        ]
        self.train = train
        self.predict = predict
        self.format = PromptFormat(
            column=prompt_column,
            template=prompt_template,
            system=system_prompt,
            chat_template=chat_template,
            chat_template_arguments=chat_template_arguments or {},
            max_tokens=max_prompt_tokens,
            overlong=overlong,
        )
        self.shuffle = shuffle
        self.seed = seed
        self.validation_batch_size = validation_batch_size
        self.stream: PromptStream | None = None
        self._steps_per_epoch = 0
        self.validation_prompts: list[Sequence[Prompt]] | None = None
        self.predict_prompts: Sequence[Prompt] | None = None
        self._is_left_out: Callable[[Prompt], bool] | None = None

    def setup(self, stage: str) -> None:
        """Read, check and tokenise the sets that ``stage`` needs."""
        self._check_lengths()
        if stage == "fit":
            self._setup_train()
        if stage in ("fit", "validate", "test") and self.validation_prompts is None:
            if stage != "fit" and not self.validation_sets:
                raise ConfigError(
                    "data.validation is not set, and there is nothing else to validate on. Give a prompt set."
                )
            self.validation_prompts = [self._load_validation(chosen) for chosen in self.validation_sets]
        if stage == "predict" and self.predict_prompts is None:
            if self.predict is None:
                raise ConfigError(
                    "data.predict is not set, and there is nothing else to predict from. Give a prompt set."
                )
            self.predict_prompts = self._load(self.predict, self.format)

    def prepare_data(self) -> None:
        """Fetch sets of the hub once a host, before the ranks of the host read them all at once."""
        for path in (self.train, self.predict, *(chosen.path for chosen in self.validation_sets)):
            if path is not None and not Path(path).expanduser().exists():
                # An error must reach every rank, not this one alone: setup() meets it again.
                with contextlib.suppress(ConfigError):
                    read_rows(path, limit=1)

    def take(self, num_prompts: int) -> list[Prompt]:
        """Further training prompts for this rank, beyond the loader's; every rank must take as many."""
        if self.stream is None:
            raise ConfigError("There are no training prompts to take: take() works in fit, with data.train set.")
        return self.stream.take(num_prompts)

    def train_dataloader(self) -> PromptLoader:
        """Yields this rank's share of ``prompts_per_step`` training prompts, a list each."""
        assert self.stream is not None
        return PromptLoader(
            self.stream, self._module.prompts_per_step // self.stream.num_ranks, num_steps=self._steps_per_epoch
        )

    def val_dataloader(self) -> list[PromptBatches]:
        """One loader a validation set, in the order of ``validation_sets``."""
        return [self._batches(prompts) for prompts in self.validation_prompts or []]

    def test_dataloader(self) -> list[PromptBatches]:
        """The validation loaders: ``test`` runs on the same sets."""
        return self.val_dataloader()

    def predict_dataloader(self) -> PromptBatches:
        """Yields the prompts of ``predict``."""
        prompts = self.predict_prompts or []
        if self._is_left_out is not None:
            places = [place for place, prompt in enumerate(prompts) if not self._is_left_out(prompt)]
            prompts = ChosenPrompts(prompts, places)
        return self._batches(prompts)

    def leave_out(self, is_left_out: Callable[[Prompt], bool] | None) -> None:
        """Have the loader of ``predict`` leave out some prompts, whose completions are there already."""
        self._is_left_out = is_left_out

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Leave prompts as they are: Lightning would walk through every token id, and refuses frozen dataclasses."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position in the training prompts; of a step that is not finished its start, as it will be repeated."""
        if self.stream is None:
            return {}
        assert self.trainer is not None
        progress = self.trainer.fit_loop.epoch_loop.batch_progress.current
        assert isinstance(progress, _ProcessedTracker)
        return self.stream.state_dict(at_step_start=progress.ready > progress.processed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint's position; nothing to do where no training follows."""
        if self.stream is not None:
            self.stream.load_state_dict(state_dict)

    @property
    def max_prompt_tokens(self) -> int:
        """No prompt has more tokens."""
        return self.format.max_tokens

    @property
    def _module(self) -> Any:
        assert self.trainer is not None, "setup() needs the trainer that Lightning attaches"
        return self.trainer.lightning_module

    @property
    def _rank_and_ranks(self) -> tuple[int, int]:
        """This process's rank and their number: each samples for prompts of its own, whatever it trains on."""
        assert self.trainer is not None
        return self.trainer.global_rank, self.trainer.world_size

    def _check_lengths(self) -> None:
        limit, model_limit = self.format.max_tokens, self._module.max_model_length
        if limit is None or limit < 1:
            raise ConfigError(f"max_prompt_tokens={limit} must be at least 1.")
        if limit >= model_limit:
            raise ConfigError(
                f"max_prompt_tokens={limit} leaves a model of {model_limit} positions no room for a completion. "
                f"Use at most {model_limit - 1}, less what you want completions to have."
            )

    def _setup_train(self) -> None:
        if self.train is None:
            raise ConfigError("data.train is not set, and there is nothing else to train on. Give a prompt set.")
        rank, num_ranks = self._rank_and_ranks
        prompts_per_step = self._module.prompts_per_step
        if prompts_per_step % num_ranks:
            below = prompts_per_step // num_ranks * num_ranks
            raise ConfigError(
                f"prompts_per_step={prompts_per_step} cannot be split over {num_ranks} ranks. "
                f"Use a multiple of {num_ranks}, such as {below or num_ranks}."
            )
        prompts = self._load(self.train, self.format, is_rewarded=True)
        if len(prompts) < prompts_per_step:
            raise ConfigError(
                f"'{self.train}' has {len(prompts)} usable prompts, and one step takes "
                f"prompts_per_step={prompts_per_step}. Use at most {len(prompts)} a step, or more data."
            )
        self._steps_per_epoch = len(prompts) // prompts_per_step
        if rank == 0:
            logger.info("%d training prompts, %d steps an epoch.", len(prompts), self._steps_per_epoch)
        limit = getattr(self.trainer, "overfit_batches", 0)
        if limit:  # always the same steps
            num_steps = limit if isinstance(limit, int) else int(limit * self._steps_per_epoch)
            prompts = prompts[: max(num_steps, 1) * prompts_per_step]
        self.stream = PromptStream(
            prompts,
            shuffle=self.shuffle and not limit,
            seed=(run_seed() or 0) if self.seed is None else self.seed,
            rank=rank,
            num_ranks=num_ranks,
        )

    def _load_validation(self, chosen: ValidationSet) -> Sequence[Prompt]:
        own = replace(
            self.format,
            column=chosen.prompt_column or self.format.column,
            # A column of the set's own is not to be hidden by the data module's template.
            template=chosen.prompt_template or (None if chosen.prompt_column else self.format.template),
        )
        return self._load(chosen.path, own, limit=chosen.limit, is_rewarded=True)

    def _load(
        self, path: str, prompt_format: PromptFormat, *, limit: int | None = None, is_rewarded: bool = False
    ) -> Sequence[Prompt]:
        table = read_rows(path, limit)
        check_columns = getattr(self._module, "check_columns", None)
        if is_rewarded and check_columns is not None:
            _check_columns(check_columns, table)
        completion_column = getattr(self._module, "completion_column", None) if is_rewarded else None
        prompts = build_prompts(
            table,
            self._module.tokenizer,
            replace(prompt_format, completion_column=completion_column),
            vocab_size=getattr(self._module, "vocab_size", None),
            max_length=self._module.max_model_length,
        )
        check_answers = getattr(self._module, "check_answers", None)
        if is_rewarded and check_answers is not None and self._rank_and_ranks[0] == 0:
            check_answers(prompts, table.where)
        return prompts

    def _batches(self, prompts: Sequence[Prompt]) -> PromptBatches:
        rank, num_ranks = self._rank_and_ranks
        return PromptBatches(prompts, self.validation_batch_size, rank=rank, num_ranks=num_ranks)


def _check_columns(check: Callable[[list[str], str], None], table: RowTable) -> None:
    """Call the module's check; where a single row is to blame, name that row."""
    try:
        check(sorted(table.columns), table.path)
    except ConfigError:
        every: set[str] = set().union(*table.rows)
        for column in sorted(every - table.columns):
            try:
                check(sorted(every - {column}), table.path)
            except ConfigError:
                require_columns(table, [column])
        raise


def _name_of(path: str) -> str:
    """The name of a set given by its path alone: "test" of data/test.jsonl, "gsm8k" of openai/gsm8k:main:test."""
    return Path(path.split(":")[0]).stem
