"""``rlightning serve``: starts the engine of a configuration for trainers on other hosts."""

import os
import socket
import sys
from pathlib import Path
from pkgutil import resolve_name

import torch

from rlightning.cli.lightning_cli import RLCLI, as_list
from rlightning.cli.serve_options import read_options
from rlightning.data import PromptDataModule
from rlightning.data.prompt_limit import default_prompt_limit
from rlightning.errors import ConfigError
from rlightning.models import describe_length_limit
from rlightning.module import RLModule
from rlightning.protocols import HasPromptLimit, has
from rlightning.rollout.engine_config import EngineConfig
from rlightning.rollout.engine_options import has_engine_options
from rlightning.rollout.service import EngineService, open_listener
from rlightning.rpc import make_url
from rlightning.rpc.run_key import RUN_KEY_VARIABLE, read_key
from rlightning.trainer import find_callback


class ServeCLI(RLCLI):
    """Parses the configuration of ``fit``, with the same errors, and derives the engine's configuration from it."""

    def _set_seed(self) -> None:
        """Do nothing: the engine has its own random state."""

    def before_instantiate_classes(self) -> None:
        """Remove the keys that only a trainer needs."""
        trainer = self.config[self.subcommand]["trainer"]
        listed = as_list(trainer["callbacks"])
        kind = find_callback("RolloutCallback")
        trainer["callbacks"] = [one for one in listed if issubclass(resolve_name(one["class_path"]), kind)]
        trainer["logger"] = trainer["plugins"] = trainer["profiler"] = None
        trainer["strategy"] = "auto"

    def instantiate_classes(self) -> None:
        """Construct the module without weights, the data module without rows, and the callback without an engine."""
        self.config_init = self.parser.instantiate_classes(self.config)
        listed = self._get(self.config_init, "trainer")["callbacks"]
        self.module: RLModule = self._get(self.config_init, "model")
        rollout: object = listed[0] if listed else self._get(self.config_init, "rollout")
        if not has_engine_options(rollout):
            name = "null" if rollout is None else type(rollout).__name__
            raise ConfigError(f"rollout: {name} has no engine to serve. Name a class that has, such as VLLMRollout.")
        self.rollout = rollout
        data = self._get(self.config_init, "data")
        self.max_prompt_tokens = data.max_prompt_tokens if has(data, HasPromptLimit) else None
        if self.max_prompt_tokens is None and isinstance(data, PromptDataModule):
            new_tokens = self.rollout.sampling.max_new_tokens
            self.max_prompt_tokens = default_prompt_limit(self.module.max_model_length, new_tokens)

    def _run_subcommand(self, subcommand: str) -> None:
        """Do nothing: no command of Lightning is run."""

    def configure_engine(self, name: str) -> EngineConfig:
        """Return the engine's configuration, with ``<name>.log`` in the run's folder as its log file."""
        trainer, module, options = self._get(self.config_init, "trainer"), self.module, self.rollout.options
        options.check()
        if self.max_prompt_tokens is not None and hasattr(module, "plan"):
            new_tokens = self.rollout.sampling.max_new_tokens
            module.plan.check_sequence_length(
                self.max_prompt_tokens, new_tokens, module.max_model_length, describe_length_limit(module.model_config)
            )
        has_cuda = trainer["accelerator"] in ("auto", "gpu", "cuda") and torch.cuda.is_available()
        log_file = Path(trainer["default_root_dir"] or "runs") / f"{name}.log"
        device = torch.device("cuda" if has_cuda else "cpu")
        return options.configure_served(module, device, self.rollout.sampling, self.max_prompt_tokens, log_file)


def serve(options: list[str]) -> None:
    """Start the engine of a configuration, and serve trainers until Ctrl-C.

    Raises:
        ConfigError: the user's configuration has a mistake.
        EngineError: the engine cannot start, or dies repeatedly.
    """
    own, rest = read_options(options)
    host = own["--host"]
    cli = ServeCLI(args=["fit", *rest])
    listener = open_listener(host, int(own["--port"]))
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
    bound = listener.getsockname()[1]
    config = cli.configure_engine(f"engine-{shown}-{bound}")

    def announce() -> None:
        url = make_url(shown, bound)
        sys.stdout.write(f"The engine of {config.engine_args['model']} listens at {url}; its log: {config.log_file}\n")
        sys.stdout.flush()

    key = read_key()
    os.environ.pop(RUN_KEY_VARIABLE, None)  # vLLM does not use it
    EngineService(config, listener, key).run(announce)
