"""Lightning's command line with sections ``model``, ``data`` and ``rollout``, a run folder, and one-line errors."""

import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import lightning.pytorch
import yaml
from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning_utilities.core.enums import StrEnum

import rlightning.algorithms  # noqa: F401  so that `--model GRPO` finds an algorithm by its bare name
from rlightning.atomic_save import written_aside
from rlightning.cli.config_keys import ConfigKeys, asks_for_help, check_model
from rlightning.cli.option_texts import mark_files, spell_out_files, spell_out_options
from rlightning.cli.parser_messages import summarise
from rlightning.config.argument_checks import parameters_of
from rlightning.config.files import load_keys, plain_texts, use_strict_yaml
from rlightning.config.jsonargparse_internals import hint_of, keep_text, parser_actions
from rlightning.config.run_settings import flatten
from rlightning.config.secret_arguments import check_references, hide_secrets, mask_secrets, resolve_secrets
from rlightning.config.type_hints import takes_text
from rlightning.data import PromptDataModule
from rlightning.disk import needed
from rlightning.environments import Environment
from rlightning.error_report import set_run_folder, yield_to_rank_0
from rlightning.errors import ConfigError, cause_chain, find_run_error
from rlightning.foreign_text import visible, visible_on_one_line, without_secrets
from rlightning.module import RLModule
from rlightning.module.policy_module import PolicyModule
from rlightning.module.trainer_options import check_callbacks, check_options
from rlightning.parallel.checkpoint_search import is_rank_0, settle_checkpoint
from rlightning.parallel.stop_signal import stop_signal
from rlightning.parallel.strategy import replace_lightning_ddp
from rlightning.run_dir import new_run_folder, run_dir
from rlightning.run_lock import FolderTakenError, check_writable, lock_run, unlock_all
from rlightning.trainer import DEFAULTS, Trainer, find_callback, settle_lengths

log = logging.getLogger(__name__)

T = TypeVar("T")

# Defaults of Lightning's, such as that of Timer, are enums where their types say str.
yaml.SafeDumper.add_multi_representer(StrEnum, lambda dumper, value: dumper.represent_str(value.value))

ROLLOUT = "rlightning.callbacks.VLLMRollout"


class RLArgumentParser(LightningArgumentParser):
    """A parser with one-line errors, without jsonargparse's long usage text."""

    keys: ConfigKeys | None = None
    secrets: Mapping[str, str] = {}
    """Secrets of this command line, by their names in the configuration."""

    def add_class_arguments(self, *args: Any, **kwargs: Any) -> Any:
        """Add a class's arguments; a file name is not replaced by the file's content if the argument accepts texts."""
        added = super().add_class_arguments(*args, **kwargs)
        for action in parser_actions(self):
            if takes_text(hint_of(action)):
                keep_text(action)  # otherwise jsonargparse reads the file as configuration
        return added

    def instantiate(self, *args: object, **kwargs: object) -> Namespace:
        """Return a configuration with its objects constructed, and references to secrets replaced by the secrets."""
        try:
            built: Namespace = super().instantiate(*args, **kwargs)
        except ValueError as error:
            for cause in cause_chain(error, with_context=True):
                if isinstance(cause, MisconfigurationException):
                    raise ConfigError(f"{cause}") from error
            raise
        return resolve_secrets(plain_texts(built), "the configuration", RLArgumentParser.secrets)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Write a one-line summary of jsonargparse's message and exit with code 2."""
        if not self.exit_on_error:
            super().error(message, ex)
        causes = cause_chain(ex) if ex is not None else ()
        cause = next((cause for cause in causes if isinstance(cause, ConfigError)), None)
        gist = visible_on_one_line(str(cause)) if cause else visible(summarise(message, RLArgumentParser.keys))
        yield_to_rank_0()
        self.exit(2, f"error: {gist}\n")
        raise AssertionError("exit returned")


class SaveRunConfig(SaveConfigCallback):
    """Writes the resolved configuration to the run's folder, and to the loggers when the set-up is complete."""

    _unlogged: dict[str, Any] | None = None
    _path: Path | None = None
    """Path of the saved configuration until the first step may begin; None afterwards."""

    def setup(self, trainer: lightning.pytorch.Trainer, pl_module: LightningModule, stage: str) -> None:
        """On rank 0, write ``config.yaml``, or ``config-2.yaml`` and so on if earlier runs have left such files."""
        if self.already_saved or not trainer.is_global_zero:
            return
        self.already_saved = True
        text = self.parser.dump(self.config, skip_none=False)
        folder = Path(trainer.default_root_dir)
        earlier = len(list(folder.glob("config*.yaml")))
        path = folder / (f"config-{earlier + 1}.yaml" if earlier else "config.yaml")
        with (
            needed("The configuration", path, "Make room there, or name another folder."),
            written_aside(path) as partial,
        ):
            partial.write_text(text, encoding="utf-8")
        self._unlogged, self._path = load_keys(text), path

    def on_exception(
        self, trainer: lightning.pytorch.Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Remove the configuration file of a run that failed before its first step, as with a wrong checkpoint."""
        if self._path is not None and isinstance(find_run_error(exception), ConfigError):
            self._path.unlink(missing_ok=True)

    def on_train_start(self, trainer: lightning.pytorch.Trainer, pl_module: LightningModule) -> None:
        """Log the configuration to the loggers."""
        unlogged, self._unlogged, self._path = self._unlogged, None, None
        if unlogged is not None:
            for logger in trainer.loggers:
                logger.log_hyperparams(unlogged)

    on_validation_start = on_test_start = on_predict_start = on_train_start


class RLCLI(LightningCLI):
    """Lightning's command line for ``fit``, ``validate``, ``test`` and ``predict``; the constructor runs it."""

    def __init__(self, args: list[str]) -> None:
        self.args = args
        replace_lightning_ddp()
        spell_out_files()
        use_strict_yaml()
        for name in import_module("rlightning.callbacks").__all__:
            find_callback(name)  # afterwards `--trainer.callbacks+=SaveHF` finds the callback by its bare name
        try:
            self.run_command(args)
        finally:
            unlock_all()

    def run_command(self, args: list[str]) -> None:
        """Parse the options, construct all objects, and run the command."""
        super().__init__(
            model_class=RLModule,
            datamodule_class=PromptDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=SaveRunConfig,
            trainer_defaults=dict(DEFAULTS),
            seed_everything_default=0,
            parser_class=RLArgumentParser,
            parser_kwargs={"allow_abbrev": False, **{name: {"allow_abbrev": False} for name in self.subcommands()}},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=args,
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # of which Lightning has a static one
        """Return, only for the command to run, the names of its Trainer method's arguments that are not options.

        Other commands are left out: constructing a parser for each is slow.
        """
        command = self.args[0]
        skipped = {"return_predictions"} if command == "predict" else set()
        return {command: LightningCLI.subcommands()[command] | skipped}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add sections for the rollout callback and the environment, and default classes of sections."""
        parser.add_lightning_class_args(find_callback("RolloutCallback"), "rollout", subclass_mode=True, required=False)
        parser.add_argument(
            "--environment",
            type=Environment | Mapping[str, Environment] | None,
            default=None,
            help="What turns prompts into trajectories; several by name. Null completes each prompt once.",
        )
        data = f"{PromptDataModule.__module__}.{PromptDataModule.__qualname__}"
        parser.set_defaults({"data": {"class_path": data}, "rollout": {"class_path": ROLLOUT}})

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: object) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "predict":
            text = "The file, a new one: Parquet if its name ends in .parquet, else JSON Lines."
            parser.add_argument("--output", type=str | None, default=None, help=text)
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Set ``self.config`` to the parsed options; before, check all keys with better errors than jsonargparse's."""
        command, options = self.args[0], mark_files(spell_out_options(self.args[1:]))
        keys = ConfigKeys(
            parameters_of(self._subcommand_parsers[command]),
            {"data": PromptDataModule, "rollout": find_callback("VLLMRollout")},
        )
        RLArgumentParser.keys = keys
        if not asks_for_help(options):
            options = keys.check_options(options)
            classes = {key: kind for key, kind in keys.classes.items() if isinstance(kind, type)}
            check_callbacks(kind for key, kind in classes.items() if key.startswith("trainer.callbacks"))
            check_model(keys)
        self.config = parser.parse_args([command, *options])

    def _parse_ckpt_path(self) -> None:
        """Do nothing: a checkpoint's hyperparameters are not merged into the configuration."""

    def before_instantiate_classes(self) -> None:
        """Mask secrets, make or lock the run's folder, and find the checkpoint, before objects are constructed."""
        config = self.config[self.subcommand]
        expand_home(config)
        self.mask_secrets()
        config = self.config[self.subcommand]
        trainer = config["trainer"]
        if trainer["default_root_dir"] is None:
            trainer["default_root_dir"] = make_run_folder()
        check_options(trainer)
        folder = run_dir(trainer)
        if folder.is_file():
            raise ConfigError(f"trainer.default_root_dir={folder} is a file. Name a folder for the run.")
        if is_rank_0():
            if self.subcommand == "fit":
                lock_run(folder)
            else:
                check_writable(folder, "trainer.default_root_dir")
        config["ckpt_path"] = settle_checkpoint(
            str(self.subcommand), folder, trainer["callbacks"], config.get("ckpt_path")
        )
        set_run_folder(folder)
        settle_lengths(trainer)
        if trainer["logger"] is True:
            trainer["logger"] = None

    def mask_secrets(self) -> None:
        """Replace secrets in the configuration, which is written to files and loggers, by references to them."""
        masked, RLArgumentParser.secrets = mask_secrets(self.config[self.subcommand])
        self.config[self.subcommand] = masked
        check_references(masked, RLArgumentParser.secrets)
        hide_secrets(RLArgumentParser.secrets)
        if RLArgumentParser.secrets:
            log.info(
                "Secrets are in no file of this run and no logger. What goes on from its config.yaml needs them in the "
                "environment: %s.",
                ", ".join(RLArgumentParser.secrets),
            )

    def instantiate_classes(self) -> None:
        """Construct all objects, and store the whole configuration in the module, for its checkpoints."""
        super().instantiate_classes()
        if isinstance(self.model, PolicyModule):
            text = self._parser(self.subcommand).dump(self.config[self.subcommand], skip_none=False)
            self.model.configuration = flatten(load_keys(text))

    def instantiate_trainer(self, **kwargs: object) -> Trainer:
        """Return the Trainer, with the rollout callback and the callbacks that the command line adds."""
        config = {**self._get(self.config_init, "trainer"), **kwargs}
        listed = as_list(config["callbacks"])
        rollout = self._get(self.config_init, "rollout")
        own = [callback for callback in listed if isinstance(callback, find_callback("RolloutCallback"))]
        if own:
            keys = RLArgumentParser.keys
            if keys is not None and any(key.startswith("rollout.") for key in keys.seen):
                raise ConfigError(
                    f"rollout: this section and a {type(own[0]).__name__} under trainer.callbacks are both there. "
                    "Keep one of them."
                )
            rollout = None
        set_environment(rollout or next(iter(own), None), self._get(self.config_init, "environment"))
        listed = [*listed, *self.make_own_callbacks(listed)]
        try:
            trainer = Trainer(**config | {"callbacks": listed, "rollout": rollout})
        except ConfigError:
            raise
        except (MisconfigurationException, TypeError, ValueError) as error:
            raise ConfigError(f"trainer: {error}") from error
        stop_signal(trainer).command = resume_command(self.args, config["default_root_dir"])
        return trainer

    def make_own_callbacks(self, listed: Sequence[object]) -> list[Callback]:
        """Return the callbacks that this command adds to the user's ``listed`` ones."""
        own: list[Callback] = []
        predictions = find_callback("JSONLPredictions")
        if self.subcommand == "predict" and not any(isinstance(callback, predictions) for callback in listed):
            own.append(predictions(self._get(self.config_init, "output")))
        if not self._get(self.config_init, "trainer")["fast_dev_run"]:
            own.append(SaveRunConfig(self._parser(self.subcommand), self.config[self.subcommand]))
        return own

    def predict(self, **kwargs: Any) -> None:
        """Run prediction without keeping the completions in memory, since a callback writes them to a file."""
        self.trainer.predict(**{**kwargs, "return_predictions": False})


def as_list(callbacks: list[T] | T | None) -> list[T]:
    """Return ``trainer.callbacks`` as a list; it may be a single callback or null."""
    return callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []


def set_environment(rollout: object, environment: object) -> None:
    """Set the environment of the section ``environment`` on the rollout callback.

    Raises:
        ConfigError: there is no rollout callback.
    """
    if environment is None:
        return
    if not isinstance(rollout, find_callback("RolloutCallback")):
        raise ConfigError(
            "environment: this run has no rollout, which environments need. Leave either out, or neither."
        )
    rollout.environment = environment


def make_run_folder() -> str:
    """Create and lock a new run folder, and return its path; ranks other than 0 get rank 0's."""
    while True:
        path = new_run_folder()
        if not is_rank_0():
            return path
        with suppress(FolderTakenError):  # another run that began in the same second uses it
            lock_run(Path(path))
            return path


def resume_command(args: list[str], folder: str) -> str:
    """Return the shell command that resumes the run of the options ``args`` from its run folder."""
    kept = [arg for arg in args if not arg.startswith("--ckpt_path=")]
    if "--ckpt_path" in kept:
        place = kept.index("--ckpt_path")
        del kept[place : place + 2]
    if not any(arg.partition("=")[0] == "--trainer.default_root_dir" for arg in kept):
        kept += ["--trainer.default_root_dir", folder]
    return without_secrets(shlex.join(["rlightning", *kept, "--ckpt_path", "last"]))


def expand_home(values: object) -> object:
    """Replace ``~`` at the start of every path in a configuration by the user's home, in place; return the result."""
    if isinstance(values, Namespace | dict):
        entries = vars(values) if isinstance(values, Namespace) else values
        for key, value in entries.items():
            entries[key] = expand_home(plain_texts(value) if key == "dict_kwargs" else value)
    elif isinstance(values, list):
        values[:] = [expand_home(value) for value in values]
    elif isinstance(values, str) and (values == "~" or values.startswith("~/")):
        return os.path.expanduser(values)
    return values
