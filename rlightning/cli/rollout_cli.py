"""``rlightning rollout``: prints trajectories of a configuration's environment, without training."""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Callback

from rlightning.cli.lightning_cli import RLCLI, as_list
from rlightning.cli.named_classes import find_class
from rlightning.cli.rollout_options import RolloutOptions, read_options
from rlightning.config.secret_arguments import read_key
from rlightning.data import PromptDataModule
from rlightning.data.in_memory import read_source
from rlightning.environments.policy import GroupRequest
from rlightning.environments.runner import CLOSE_TIMEOUT, EnvironmentRunner
from rlightning.errors import ConfigError, EnvironmentFailedError, check_rules
from rlightning.foreign_text import cut_line
from rlightning.hooks import RLCallback
from rlightning.module import RLModule
from rlightning.protocols import HasData, HasPredictPrompts, Loop, callbacks_of, has
from rlightning.report.prediction_file import to_json
from rlightning.report.trajectory_text import ScoredTrajectory, describe_trajectory, to_data
from rlightning.rewards import FailureCount
from rlightning.rollout.endpoint_sampler import EndpointSampler
from rlightning.rollout.engine_options import has_engine_options
from rlightning.rollout.model_files import ModelFiles
from rlightning.rollout.requests import RandomStreams, check_requests, group_sampling
from rlightning.rpc.peer import DeadlineExceededError
from rlightning.trainer import find_callback
from rlightning.types import Prompt, Trajectory

COMMAND = "predict"
"""The Lightning command whose keys and parsing `rlightning rollout` uses."""


def rollout(options: list[str]) -> None:
    """Make trajectories of a few prompts, and print them turn by turn.

    Raises:
        ConfigError: the user's configuration has a mistake.
        EnvironmentFailedError: a trajectory or its reward failed.
    """
    own, rest = read_options(options)
    RolloutCLI(own, rest).finish()


class RolloutCLI(RLCLI):
    """Runs ``rlightning rollout`` when it is constructed, with the keys and errors of ``predict``, on one device."""

    def __init__(self, own: RolloutOptions, options: list[str]) -> None:
        self.own = own
        self.scored: list[ScoredTrajectory] = []
        super().__init__(args=[COMMAND, *options])

    def before_instantiate_classes(self) -> None:
        """Remove the keys that only training needs, and select the prompts."""
        config = self.config[COMMAND]
        trainer, kind = config["trainer"], find_callback("RolloutCallback")
        listed = as_list(trainer["callbacks"])
        classes = [find_class(one["class_path"], [], "trainer.callbacks") for one in listed]
        trainer["callbacks"] = [one for one, found in zip(listed, classes, strict=True) if issubclass(found, kind)]
        trainer["plugins"] = trainer["profiler"] = None
        trainer["logger"] = trainer["enable_progress_bar"] = trainer["enable_checkpointing"] = False
        trainer["strategy"], trainer["devices"], trainer["num_nodes"] = "auto", 1, 1
        if self.own.endpoint is not None:
            trainer["accelerator"] = "cpu"
        self._choose_prompts(config["data"])
        super().before_instantiate_classes()

    def _choose_prompts(self, data: Namespace) -> None:
        """Limit the rows that the data module reads from the prediction set, or without one from the training set."""
        num_prompts = self.own.num_trajectories // self.own.num_samples
        if not issubclass(find_class(data["class_path"], [], "data.class_path"), PromptDataModule):
            raise ConfigError(
                f"data.class_path={data['class_path']} has prompts that this command cannot choose from. Give it "
                "a file of some: --data PromptDataModule --data.predict prompts.jsonl."
            )
        arguments = data["init_args"]
        if arguments["predict"] is None:
            if arguments["train"] is None:
                raise ConfigError("data.train and data.predict are not set: there are no prompts. Give a prompt set.")
            arguments["predict"] = arguments["train"]
        arguments["predict_limit"] = min(num_prompts, arguments["predict_limit"] or num_prompts)

    def make_own_callbacks(self, listed: Sequence[object]) -> list[Callback]:
        """Return the callback that prints trajectories; the command writes no files."""
        return [PrintGroups(self.show)]

    def _run_subcommand(self, subcommand: str) -> None:
        """Roll out the prompts, with the configured rollout callback or through an API server."""
        self._check_columns()
        if self.own.endpoint is not None:
            self._sample_endpoint(self.own.endpoint)
            return
        rollout = self._find_rollout()
        if has_engine_options(rollout) and rollout.options.placement == "colocated":
            size = rollout.options.devices_per_engine
            rule = f"rollout.engine.tensor_parallel_size={size} takes the devices of {size} ranks"
            way_out = "this command has one. Add --rollout.placement standalone, or use --endpoint"
            check_rules({f"{rule}, and {way_out}": size == 1})
        self.model.plan = replace(self.model.plan, samples_per_prompt=self.own.num_samples)
        ckpt_path = self._get(self.config_init, "ckpt_path")
        self.trainer.predict(self.model, datamodule=self.datamodule, ckpt_path=ckpt_path)

    def _find_rollout(self) -> Any:  # a RolloutCallback: nothing here imports callbacks
        """Return the rollout callback of the configuration.

        Raises:
            ConfigError: there is no rollout callback.
        """
        kind = find_callback("RolloutCallback")
        found = next((one for one in callbacks_of(self.trainer) if isinstance(one, kind)), None)
        if found is None:
            raise ConfigError("rollout: null samples nothing. Leave the key out, or name a class.")
        return found

    def _check_columns(self) -> None:
        """Raise a ConfigError for prompts that the reward functions cannot score, before an engine starts."""
        data = self.datamodule
        table = read_source(data.predict, data.predict_limit, "data.predict", data.environment)
        self.model.check_columns(sorted(table.columns), table.path)

    def _sample_endpoint(self, url: str) -> None:
        """Roll out the prompts through an API server, and print them in order; the model is not loaded."""
        module, data, trainer, num_samples = self.model, self.datamodule, self.trainer, self.own.num_samples
        rollout = self._find_rollout()
        files = ModelFiles.read(module.model_path, trust_remote_code=module.trust_remote_code)
        variable = self.own.endpoint_key_variable
        missing = f"--endpoint-key-variable {variable}: this environment variable is not set. Set it to the key."
        key = read_key(variable, missing)
        sampler = EndpointSampler(url, files, model=self.own.endpoint_model, key=key)
        sampler.connect()
        max_length = min(sampler.max_length or module.max_model_length, module.max_model_length)
        trainer.strategy.connect(module)
        data.trainer = trainer
        data.setup(COMMAND)
        prompts = list(data.predict_prompts)
        check_requests(prompts, num_samples, rollout.sampling, max_length)
        runner = EnvironmentRunner(
            sampler,
            module.tokenizer,
            rollout.environment,
            max_length=max_length,
            timeout=rollout.trajectory_timeout,
            turn_timeout=rollout.turn_timeout,
            prompt_format=data.format,
            max_requeues=rollout.max_requeues,
        )
        futures: list[Future[list[Trajectory]]] = []
        try:
            runner.check()
            futures += [
                runner.submit(GroupRequest(prompt, group_sampling(rollout.sampling, prompt, stream), num_samples))
                for prompt, stream in RandomStreams().assign(prompts, rollout.sampling, 0)
            ]
            for future in futures:
                self.show(future.result())
        finally:
            runner.cancel(futures)  # the trajectories still use the sampler
            with suppress(DeadlineExceededError):  # code of the environment may block the loop
                runner.loop.run(sampler.close(), timeout=CLOSE_TIMEOUT)
            runner.close()

    def show(self, trajectories: Sequence[Trajectory]) -> None:
        """Compute rewards for the trajectories of a prompt, print them, and keep them for :meth:`finish`."""
        scored = score_groups(self.model, [trajectories])
        self.scored += scored
        for one in scored:
            if one.trajectory.branches:
                token_ids = list(one.trajectory.branches[0].beginning)
                one = one._replace(beginning=str(self.model.tokenizer.decode(token_ids, skip_special_tokens=False)))
            text = f"{to_json(to_data(one))}\n" if self.own.is_json else describe_trajectory(one)
            sys.stdout.write(text)
        sys.stdout.flush()

    def finish(self) -> None:
        """End the module's worker processes; then raise an error if a trajectory or its reward function failed.

        Raises:
            EnvironmentFailedError: trajectories failed, or have no reward because a reward function failed.
        """
        self.model.close()
        check_scored(self.scored)


class PrintGroups(RLCallback):
    """Prints each prompt's trajectories in the prompts' order, as soon as all earlier ones are printed."""

    def __init__(self, show: Callable[[Sequence[Trajectory]], None]) -> None:
        self._show = show
        self._waiting: list[int] = []
        self._ended: dict[int, list[Trajectory]] = {}

    def on_predict_start(self, trainer: Loop, module: object) -> None:
        """Store the order of the prompts."""
        data = trainer.datamodule if has(trainer, HasData) else None
        prompts = data.predict_prompts if has(data, HasPredictPrompts) else None
        self._waiting = [prompt.index for prompt in prompts or ()]

    def on_predict_prompt_end(
        self, trainer: Loop, module: object, prompt: Prompt, trajectories: list[Trajectory]
    ) -> None:
        """Print the prompt's trajectories, and those of waiting prompts, once all earlier prompts are printed."""
        self._ended[prompt.index] = trajectories
        while self._waiting and self._waiting[0] in self._ended:
            self._show(self._ended.pop(self._waiting.pop(0)))

    def on_predict_batch_end(
        self,
        trainer: Loop,
        module: object,
        outputs: Iterable[tuple[Prompt, list[Trajectory]]],
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Print trajectories for which :meth:`on_predict_prompt_end` was not called."""
        for prompt, trajectories in outputs:
            if prompt.index in self._waiting:
                self.on_predict_prompt_end(trainer, module, prompt, trajectories)


def score_groups(module: RLModule, groups: Sequence[Sequence[Trajectory]]) -> list[ScoredTrajectory]:
    """Return trajectories, grouped by prompt, with the rewards that they would get in a training step."""
    batch = module.select_sampled(module.batch_type.pack(groups))
    rewards: list[float] = []
    if batch.num_trajectories:
        with module.rewarder.counting(FailureCount(batch.num_trajectories, 1.0)):
            rewards = module.compute_rewards(batch).tolist()
    values = {name: component.tolist() for name, component in batch.scores.items()}
    scored: list[ScoredTrajectory] = []
    place = 0  # index in the batch, which contains some of the trajectories, in this order
    for one in (one for group in groups for one in group):
        kept = batch.trajectories[place] if place < len(rewards) else None
        if kept is None or kept.turns is not one.turns or kept.status != one.status:
            scored.append(ScoredTrajectory(one))
            continue
        has_own = not math.isnan(rewards[place]) and rewards[place] != 0  # set by the module's own compute_rewards()
        is_rewarded = bool(module.rewarder.functions) or one.reward is not None or has_own
        scores = {name: _number(component[place]) for name, component in values.items()}
        reward = _number(rewards[place]) if is_rewarded else None
        scored.append(ScoredTrajectory(one, True, reward, scores, is_rewarded and math.isnan(rewards[place])))
        place += 1
    return scored


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def check_scored(scored: Sequence[ScoredTrajectory]) -> None:
    """Raise an EnvironmentFailedError if a trajectory would not be trained on, or its reward function failed."""
    lost = [one.trajectory for one in scored if not one.is_sampled]
    unrewarded = [one.trajectory for one in scored if one.has_failed_reward]
    if lost:
        first = lost[0]
        line = (first.error or first.status).strip().splitlines()[-1]
        raise EnvironmentFailedError(
            f"{len(lost)} of {len(scored)} trajectories would not be trained on; the first, of row "
            f"{first.prompt.index}, is {first.status}: {cut_line(line)}",
            first.error or "",
        )
    if unrewarded:
        raise EnvironmentFailedError(
            f"{len(unrewarded)} of {len(scored)} trajectories have no reward, as a reward function failed: the log has "
            f"the first failure. The first is of row {unrewarded[0].prompt.index}."
        )
