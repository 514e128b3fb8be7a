"""The Lightning data module of prompt sets."""

import contextlib
import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

from lightning.pytorch import LightningDataModule

from rlightning.config.argument_checks import CheckedArguments
from rlightning.data.formatting import PromptFormat, build_prompts, require_columns
from rlightning.data.in_memory import PromptSource, check_source, hold_rows, paths_of, read_source
from rlightning.data.own_sampling import longest_limit
from rlightning.data.prompt_limit import PROMPT_TOKENS, check_prompt_limit, choose_prompt_limit
from rlightning.data.protocols import (
    ChecksAnswers,
    ChecksColumns,
    HasCompletionColumn,
    HasVocabSize,
    ReadsColumns,
    ReadsPrompts,
    TakesPrompts,
    required,
)
from rlightning.data.sources import RowTable, read_rows
from rlightning.data.stream import ChosenPrompts, PromptBatches, PromptLoader, PromptStream
from rlightning.data.validation_sets import ValidationSet, ValidationSource, make_validation_sets
from rlightning.errors import ConfigError, check_rules, did_you_mean
from rlightning.lightning_internals import is_amid_step
from rlightning.protocols import StateDict, generates, has
from rlightning.seeds import run_seed
from rlightning.types import Prompt

logger = logging.getLogger(__name__)


class _HasWorkerCallbacks(Protocol):
    """A controller's strategy, which has callbacks that run only in its workers."""

    @property
    def worker_callbacks(self) -> Sequence[object]: ...


class PromptDataModule(CheckedArguments, LightningDataModule):
    """Prompt sets for training, validation and prediction.

    Reads from the trainer's module ``tokenizer``, ``prompts_per_step``, ``max_model_length`` and, if it has them,
    ``vocab_size`` and ``completion_column``. Calls its ``check_columns(columns, source)``, ``read_columns(columns)``
    and, on rank 0, ``check_answers(prompts, where)``, if it has them, with the data for the reward functions. Mistakes
    in the data are found in ``setup``, before any model loads. The position in the training prompts is part of every
    checkpoint.

    Args:
        train: a file (.jsonl, .json, .csv, .parquet), a folder saved by ``datasets``, or a hub name with its
            configuration and split, ``owner/name:config:split``; a list of them, which are one set; or rows: a
            ``datasets.Dataset``, a list of dicts, a DataFrame of pandas or polars, any iterable of dicts.
        validation: sets by name, each in a form of ``train``, a :class:`ValidationSet` or a mapping of its keys; or a
            single set in a form of ``train``; or a list of paths, each of which is a set.
        predict: the set of ``rlightning predict``, in a form of ``train``.
        train_limit: use only this many rows of ``train``, from the start; required if its length is unknown.
        predict_limit: the same for ``predict``.
        prompt_column: the column of the prompt, a text or a list of chat messages.
        prompt_template: a format string over the columns, used instead, such as ``"Q: {question}\\nA:"``.
        system_prompt: the first message of every chat without one; put before a plain text, with an empty line between.
        chat_template: whether to apply the tokenizer's chat template; None to apply it if there is one.
        chat_template_arguments: passed to the chat template, such as ``enable_thinking: false``.
        max_prompt_tokens: the limit on a prompt's tokens; None for 1,024, or less if the model's positions leave too
            little room for a completion.
        temperature_column: a column with the temperature of each training and prediction prompt's completions; an empty
            cell stands for ``rollout.temperature``. A validation set has one temperature.
        max_new_tokens_column: a column with the limit on each prompt's completions, at most ``rollout.max_new_tokens``,
            which also replaces an empty cell. Sets other than ``train`` may lack these columns.
        overlong: what to do with prompts over ``max_prompt_tokens`` in all sets; "truncate" keeps their end.
        shuffle: whether each epoch has its own order of the training prompts.
        seed: determines these orders; None for the seed of ``seed_everything``.
        validation_batch_size: number of prompts in a batch of validation or prediction, over all ranks.
        environment: in a run with several, the name of the environment for rows without one in a column
            ``environment``; or a mapping of the sets' paths to names. A validation set can have its own.
    """

    def __init__(
        self,
        train: PromptSource | None = None,
        *,
        validation: ValidationSource | None = None,
        predict: PromptSource | None = None,
        train_limit: int | None = None,
        predict_limit: int | None = None,
        prompt_column: str = "prompt",
        prompt_template: str | None = None,
        system_prompt: str | None = None,
        chat_template: bool | None = None,
        chat_template_arguments: dict[str, Any] | None = None,
        max_prompt_tokens: int | None = None,
        overlong: Literal["drop", "truncate"] = "drop",
        temperature_column: str | None = None,
        max_new_tokens_column: str | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        validation_batch_size: int = 256,
        environment: str | dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        rules = {
            f"validation_batch_size={validation_batch_size} must be at least 1": validation_batch_size >= 1,
            f"seed={seed} must be at least 0. Leave it out for that of seed_everything": seed is None or seed >= 0,
        }
        for key, source, limit in (("train", train, train_limit), ("predict", predict, predict_limit)):
            check_source(source, f"data.{key}")
            rules[f"{key}_limit={limit} must be at least 1. Leave it out for all rows"] = limit is None or limit >= 1
        check_rules(rules)
        self.validation_sets = make_validation_sets(validation)
        self.train, self.train_limit = train, train_limit
        self.predict, self.predict_limit = predict, predict_limit
        self.max_prompt_tokens = max_prompt_tokens  # None until setup() knows the model
        self._is_limit_chosen = max_prompt_tokens is None
        self.format = PromptFormat(
            column=prompt_column,
            template=prompt_template,
            system=system_prompt,
            chat_template=chat_template,
            chat_template_arguments=chat_template_arguments or {},
            max_tokens=PROMPT_TOKENS if max_prompt_tokens is None else max_prompt_tokens,
            overlong=overlong,
            temperature_column=temperature_column,
            max_new_tokens_column=max_new_tokens_column,
        )
        self.shuffle, self.seed, self.validation_batch_size = shuffle, seed, validation_batch_size
        self.environment = environment
        self._check_paths()
        self.longest_limit = 0  # the largest limit of a prompt's own in the sets read so far
        self.stream: PromptStream | None = None
        self._steps_per_epoch = 0
        self.validation_prompts: list[Sequence[Prompt]] | None = None
        self.predict_prompts: Sequence[Prompt] | None = None
        self._is_left_out: Callable[[Prompt], bool] | None = None

    def setup(self, stage: str) -> None:
        """Read, check and tokenise the prompt sets that ``stage`` needs."""
        self._settle_prompt_limit(stage)
        own = next(iter(self.format.own_sampling), None)
        if own is not None and not self._is_sampling(stage):
            raise ConfigError(f"data.{own} has no effect: {type(self._module).__name__} samples nothing. Remove it.")
        if stage == "fit":
            self._setup_train()
        if stage in ("fit", "validate", "test") and self.validation_prompts is None:
            if not self.validation_sets and stage != "fit":
                raise _not_set("validation", "validate on")
            self.validation_sets = [
                replace(chosen, path=hold_rows(chosen.path, chosen.limit, chosen.key, f"{chosen.key}.limit"))
                for chosen in self.validation_sets
            ]
            self.validation_prompts = [self._load_validation(chosen) for chosen in self.validation_sets]
        if stage == "predict" and self.predict_prompts is None:
            if self.predict is None:
                raise _not_set("predict", "predict from")
            self.predict = hold_rows(self.predict, self.predict_limit, "data.predict", "data.predict_limit")
            table = read_source(self.predict, self.predict_limit, "data.predict", self.environment)
            self.predict_prompts = self._build(
                table, self.format.without_absent_columns(table.columns), is_rewarded=False
            )

    def prepare_data(self) -> None:
        """Download sets from the hub once a host, before all ranks of the host read them."""
        for source in (self.train, self.predict, *(chosen.path for chosen in self.validation_sets)):
            for path in paths_of(source):
                # Every rank must raise this error, not only this one: setup() raises it again.
                with contextlib.suppress(ConfigError, OSError):
                    if not Path(path).expanduser().exists():
                        read_rows(path, limit=1)

    def take(self, num_prompts: int) -> list[Prompt]:
        """Return this rank's next ``num_prompts`` training prompts, outside of the loader; every rank must call it.

        All ranks must take the same number. Called to replace dropped groups, and to keep further prompts in flight.
        """
        if self.stream is None:
            raise ConfigError("There are no training prompts to take: take() works in fit, with data.train set.")
        return self.stream.take(num_prompts)

    def train_dataloader(self) -> PromptLoader:
        """Return a loader that yields, for each step, this rank's share of ``prompts_per_step``."""
        assert self.stream is not None
        return PromptLoader(
            self.stream,
            required(self._module, TakesPrompts).prompts_per_step // self.stream.num_ranks,
            num_steps=self._steps_per_epoch,
        )

    def val_dataloader(self) -> list[PromptBatches]:
        """Return one loader for each validation set, in the order of ``validation_sets``."""
        return [self._batches(prompts) for prompts in self.validation_prompts or []]

    def test_dataloader(self) -> list[PromptBatches]:
        """Return the validation loaders, because ``test`` runs on the same sets."""
        return self.val_dataloader()

    def predict_dataloader(self) -> PromptBatches:
        """Return a loader of the prompts of ``predict``."""
        prompts = self.predict_prompts or []
        if self._is_left_out is not None:
            places = [place for place, prompt in enumerate(prompts) if not self._is_left_out(prompt)]
            prompts = ChosenPrompts(prompts, places)
        return self._batches(prompts)

    def leave_out(self, is_left_out: Callable[[Prompt], bool] | None) -> None:
        """Exclude the prompts for which ``is_left_out`` is true from the loader of ``predict``; None excludes none."""
        self._is_left_out = is_left_out

    def transfer_batch_to_device(self, batch: list[Prompt], device: object, dataloader_idx: int) -> list[Prompt]:
        """Return the batch unchanged: Lightning would traverse all token ids."""
        return batch

    def state_dict(self) -> StateDict:
        """Return the position in the training prompts; during a step, the position at its start."""
        if self.stream is None:
            return {}
        assert self.trainer is not None
        return self.stream.state_dict(at_step_start=is_amid_step(self.trainer.fit_loop))

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore a checkpoint's position; does nothing outside of training."""
        if self.stream is not None:
            self.stream.load_state_dict(state_dict)

    def without_rows(self) -> "PromptDataModule":
        """Return a copy without rows and prompts, for a process that receives its prompts from another."""
        copied = copy.copy(self)
        copied.trainer = copied.train = copied.predict = copied.stream = None
        copied.validation_prompts = copied.predict_prompts = None
        copied.validation_sets = [replace(chosen, path=chosen.key) for chosen in self.validation_sets]
        return copied

    @property
    def _module(self) -> object:
        assert self.trainer is not None, "setup() needs the trainer that Lightning attaches"
        return self.trainer.lightning_module

    @property
    def environment_names(self) -> dict[str, str]:
        """Names of environments in the data configuration, by key, such as ``data.validation.gsm8k.environment``."""
        named = {f"data.validation.{one.name}.environment": one.environment for one in self.validation_sets}
        if isinstance(self.environment, dict):
            named |= {f"data.environment.{path}": name for path, name in self.environment.items()}
        else:
            named["data.environment"] = self.environment
        return {key: name for key, name in named.items() if name is not None}

    def _check_paths(self) -> None:
        """Raise a ConfigError if an environment is set for a path that is not read."""
        sources = (self.train, self.predict, *(chosen.path for chosen in self.validation_sets))
        known = [path for source in sources for path in paths_of(source)]
        for path in self.environment if isinstance(self.environment, dict) else ():
            if path not in known:
                hint = did_you_mean(path, known) if known else "Rows in memory name theirs in a column 'environment'."
                raise ConfigError(f"data.environment.{path}: no set is read from there. {hint}")

    def _is_sampling(self, stage: str) -> bool:
        return stage == "predict" or generates(self._module)

    @property
    def _rank_and_ranks(self) -> tuple[int, int]:
        """This process's rank, and the number of ranks over which prompts are divided."""
        assert self.trainer is not None
        return self.trainer.global_rank, self.trainer.world_size

    def _settle_prompt_limit(self, stage: str) -> None:
        """Choose the limit on prompt tokens if none is set; raise a ConfigError if completions get no token."""
        before, trainer = self.max_prompt_tokens, self.trainer
        assert trainer is not None
        length = required(self._module, ReadsPrompts).max_model_length
        if self._is_limit_chosen:
            callbacks = [*trainer.callbacks]  # type: ignore[attr-defined]  # set by a connector
            if has(trainer.strategy, _HasWorkerCallbacks):
                callbacks += trainer.strategy.worker_callbacks
            self.max_prompt_tokens, reason = choose_prompt_limit(length, callbacks if self._is_sampling(stage) else ())
            self.format = replace(self.format, max_tokens=self.max_prompt_tokens)
            if self.max_prompt_tokens != before:
                self.validation_prompts = self.predict_prompts = None  # read for an earlier stage, with another limit
                if self._rank_and_ranks[0] == 0:
                    logger.info("data.max_prompt_tokens=%d: %s.", self.max_prompt_tokens, reason)
        check_prompt_limit(self.format.max_tokens, length)

    def _setup_train(self) -> None:
        if self.train is None:
            raise _not_set("train", "train on")
        module, (rank, num_ranks) = self._module, self._rank_and_ranks
        prompts_per_step = required(module, TakesPrompts).prompts_per_step
        if prompts_per_step % num_ranks:
            below = prompts_per_step // num_ranks * num_ranks
            raise ConfigError(
                f"prompts_per_step={prompts_per_step} cannot be split over {num_ranks} ranks. "
                f"Use a multiple of {num_ranks}, such as {below or num_ranks}."
            )
        self.train = hold_rows(self.train, self.train_limit, "data.train", "data.train_limit")
        table = read_source(self.train, self.train_limit, "data.train", self.environment)
        prompts = self._build(table, self.format)
        if len(prompts) < prompts_per_step:
            raise ConfigError(
                f"'{table.path}' has {len(prompts)} usable prompts, and one step takes "
                f"prompts_per_step={prompts_per_step}. Use at most {len(prompts)} a step, or more data."
            )
        self._steps_per_epoch = len(prompts) // prompts_per_step
        if rank == 0:
            logger.info("%d training prompts, %d steps an epoch.", len(prompts), self._steps_per_epoch)
        limit: int | float = self.trainer.overfit_batches  # type: ignore[union-attr]  # set by a connector
        if limit:  # the same steps in every epoch
            num_steps = limit if isinstance(limit, int) else int(limit * self._steps_per_epoch)
            prompts = prompts[: max(num_steps, 1) * prompts_per_step]
        self.stream = PromptStream(
            prompts,
            shuffle=self.shuffle and not limit,
            seed=(run_seed() or 0) if self.seed is None else self.seed,
            rank=rank,
            num_ranks=num_ranks,
            columns=module.read_columns(sorted(table.columns)) if has(module, ReadsColumns) else (),
        )

    def _load_validation(self, chosen: ValidationSet) -> Sequence[Prompt]:
        own = replace(
            self.format,
            column=chosen.prompt_column or self.format.column,
            # The data module's template must not override a column that the set itself names.
            template=chosen.prompt_template or (None if chosen.prompt_column else self.format.template),
            temperature_column=None,  # the set has one for all
        )
        environment = self.environment if chosen.environment is None else chosen.environment
        table = read_source(chosen.path, chosen.limit, chosen.key, environment)
        return self._build(table, own.without_absent_columns(table.columns))

    def _build(self, table: RowTable, prompt_format: PromptFormat, *, is_rewarded: bool = True) -> Sequence[Prompt]:
        module = required(self._module, ReadsPrompts)
        if is_rewarded and has(module, ChecksColumns):
            _check_columns(module.check_columns, table)
        completion_column = module.completion_column if is_rewarded and has(module, HasCompletionColumn) else None
        prompts = build_prompts(
            table,
            module.tokenizer,
            replace(prompt_format, completion_column=completion_column),
            vocab_size=module.vocab_size if has(module, HasVocabSize) else None,
            max_length=module.max_model_length,
        )
        self.longest_limit = max(self.longest_limit, longest_limit(prompts))
        if is_rewarded and self._rank_and_ranks[0] == 0 and has(module, ChecksAnswers):
            module.check_answers(prompts, table.where)
        return prompts

    def _batches(self, prompts: Sequence[Prompt]) -> PromptBatches:
        rank, num_ranks = self._rank_and_ranks
        return PromptBatches(prompts, self.validation_batch_size, rank=rank, num_ranks=num_ranks)


def _not_set(key: str, purpose: str) -> ConfigError:
    return ConfigError(f"data.{key} is not set, and there is nothing else to {purpose}. Give a prompt set.")


def _check_columns(check: Callable[[list[str], str], None], table: RowTable) -> None:
    """Call the module's check of columns; if only some rows lack a column, the error names one of these rows."""
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
