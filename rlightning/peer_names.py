"""What other libraries call the keys of this one: TRL 1.16, verl 0.9 and OpenRLHF 0.9."""

from collections.abc import Iterable

from rlightning.errors import did_you_mean

CLASSES = {"model": "GRPO", "data": "PromptDataModule", "rollout": "VLLMRollout", "trainer": "Trainer"}
"""The usual class of each section."""

PEER_NAMES = {
    # The optimizer
    "learning_rate": "model.lr",
    "actor_learning_rate": "model.lr",
    "adam_betas": "model.betas",
    "adam_beta1": "model.betas",
    "adam_beta2": "model.betas",
    "grad_clip": "model.max_grad_norm",
    "max_norm": "model.max_grad_norm",
    "l2": "model.weight_decay",
    "lr_scheduler": "model.lr_schedule",
    "lr_scheduler_type": "model.lr_schedule",
    "lr_warmup_steps": "model.warmup_steps",
    "lr_warmup_ratio": "model.warmup_steps",
    "warmup_ratio": "model.warmup_steps",
    "optim": "model.optimizer_states",
    # A step
    "num_generations": "model.samples_per_prompt",
    "n_samples_per_prompt": "model.samples_per_prompt",
    "n": "model.samples_per_prompt",
    "group_size": "model.samples_per_prompt",
    "train_batch_size": "model.prompts_per_step",
    "rollout_batch_size": "model.prompts_per_step",
    "batch_size": "model.prompts_per_step",
    "per_device_train_batch_size": "model.prompts_per_step",
    "ppo_mini_batch_size": "model.updates_per_rollout",
    "num_mini_batches": "model.updates_per_rollout",
    "num_iterations": "model.epochs_per_rollout",
    "ppo_epochs": "model.epochs_per_rollout",
    "gradient_accumulation_steps": "model.max_tokens_per_microbatch",
    "micro_train_batch_size": "model.max_tokens_per_microbatch",
    "ppo_micro_batch_size_per_gpu": "model.max_tokens_per_microbatch",
    "ppo_max_token_len_per_gpu": "model.max_tokens_per_microbatch",
    # The loss
    "beta": "model.kl_coef",
    "init_kl_coef": "model.kl_coef",
    "kl_loss_coef": "model.kl_coef",
    "use_kl_loss": "model.kl_coef",
    "kl_loss_type": "model.kl_estimator",
    "use_kl_in_reward": "model.kl_placement",
    "entropy_coeff": "model.entropy_coef",
    "entropy_loss_coef": "model.entropy_coef",
    "epsilon": "model.clip_low",
    "clip_ratio": "model.clip_low",
    "clip_ratio_low": "model.clip_low",
    "cliprange": "model.clip_low",
    "eps_clip": "model.clip_low",
    "epsilon_high": "model.clip_high",
    "clip_ratio_high": "model.clip_high",
    "delta": "model.dual_clip",
    "clip_ratio_c": "model.dual_clip",
    "scale_rewards": "model.scale_by_std",
    "norm_adv_by_std_in_grpo": "model.scale_by_std",
    "loss_type": "model.loss_aggregation",
    "loss_agg_mode": "model.loss_aggregation",
    "tis_imp_ratio_cap": "model.rollout_correction",
    "vllm_importance_sampling_correction": "model.rollout_correction",
    # Models and rewards
    "model_name_or_path": "model.model",
    "model_path": "model.model",
    "pretrain": "model.model",
    "ref_model": "model.reference_model",
    "ref_pretrain": "model.reference_model",
    "reward_funcs": "model.rewards",
    "reward_fn": "model.rewards",
    "reward_function": "model.rewards",
    "remote_rm_url": "model.rewards",
    "enable_gradient_checkpointing": "model.gradient_checkpointing",
    "torch_compile": "model.compile",
    "val_before_train": "model.validate_first",
    "eval_on_start": "model.validate_first",
    # Data
    "train_dataset": "data.train",
    "train_files": "data.train",
    "prompt_data": "data.train",
    "eval_dataset": "data.validation",
    "val_files": "data.validation",
    "prompt_key": "data.prompt_column",
    "input_key": "data.prompt_column",
    "input_template": "data.prompt_template",
    "apply_chat_template": "data.chat_template",
    "chat_template_kwargs": "data.chat_template_arguments",
    "max_prompt_length": "data.max_prompt_tokens",
    "prompt_max_len": "data.max_prompt_tokens",
    "truncation": "data.overlong",
    "shuffle_dataset": "data.shuffle",
    "max_prompt_tokens": "data.max_prompt_tokens",
    "prompt_column": "data.prompt_column",
    # Sampling
    "max_completion_length": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "response_length": "rollout.max_new_tokens",
    "generate_max_len": "rollout.max_new_tokens",
    "max_tokens": "rollout.max_new_tokens",
    "max_new_tokens": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "vllm_num_engines": "rollout.num_engines",
    "vllm_server_base_url": "rollout.engines",
    "vllm_enable_sleep": "rollout.sleep",
    "vllm_tensor_parallel_size": "rollout.engine",
    "max_model_len": "rollout.engine",
    "max_model_length": "rollout.engine",
    # The run
    "num_train_epochs": "trainer.max_epochs",
    "epochs": "trainer.max_epochs",
    "total_epochs": "trainer.max_epochs",
    "num_episodes": "trainer.max_epochs",
    "total_training_steps": "trainer.max_steps",
    "max_steps": "trainer.max_steps",
    "max_epochs": "trainer.max_epochs",
    "output_dir": "trainer.default_root_dir",
    "save_path": "trainer.default_root_dir",
    "default_local_dir": "trainer.default_root_dir",
    "default_root_dir": "trainer.default_root_dir",
    "logging_steps": "trainer.log_every_n_steps",
    "report_to": "trainer.logger",
    "eval_steps": "trainer.val_check_interval",
    "test_freq": "trainer.val_check_interval",
    "save_steps": "trainer.callbacks",
    "save_freq": "trainer.callbacks",
    "bf16": "trainer.precision",
    "dtype": "trainer.precision",
    "torch_dtype": "trainer.precision",
    "precision": "trainer.precision",
    "n_gpus_per_node": "trainer.devices",
    "gpus": "trainer.devices",
    "num_gpus": "trainer.devices",
    "devices": "trainer.devices",
    "nnodes": "trainer.num_nodes",
}
"""By a name of theirs, or of another section here, the key that it is here."""

PARTS = {"fn": "function", "reward_fn": "function", "reward_function": "function"}
"""By a name of theirs, what an object is called that is a part of an argument; told where there is that name."""


def suggest_name(name: str, choices: Iterable[str]) -> str:
    """Return a sentence to end an error about an unknown name: what it is called here, or the nearest choices.

    Args:
        name: as it was given.
        choices: the names that there are where it was given.
    """
    known = list(choices)
    if PARTS.get(name) in known:
        return f"Did you mean '{PARTS[name]}'?"
    section, _, key = PEER_NAMES.get(name, "").partition(".")
    if not key:
        return did_you_mean(name, known)
    if key in known:
        return f"Did you mean '{key}'?"
    return f"That is {section}.{key} here, an argument of {CLASSES[section]}."
