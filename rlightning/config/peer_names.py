"""Names that other libraries (TRL 1.16, verl 0.9, OpenRLHF 0.9) use for this library's configuration keys."""

from collections.abc import Iterable

from rlightning.errors import did_you_mean

CLASSES = {"model": "GRPO", "data": "PromptDataModule", "rollout": "VLLMRollout", "trainer": "Trainer"}
"""The usual class of each section."""

_NAMES_BY_KEY = {
    "model.lr": "learning_rate actor_learning_rate",
    "model.betas": "adam_betas adam_beta1 adam_beta2",
    "model.max_grad_norm": "grad_clip max_norm",
    "model.weight_decay": "l2",
    "model.lr_schedule": "lr_scheduler lr_scheduler_type",
    "model.warmup_steps": "lr_warmup_steps lr_warmup_ratio warmup_ratio",
    "model.optimizer_states": "optim",
    "model.samples_per_prompt": "num_generations n_samples_per_prompt n group_size",
    "model.prompts_per_step": "train_batch_size rollout_batch_size batch_size per_device_train_batch_size",
    "model.updates_per_rollout": "ppo_mini_batch_size num_mini_batches",
    "model.epochs_per_rollout": "num_iterations ppo_epochs",
    "model.max_tokens_per_microbatch": "gradient_accumulation_steps micro_train_batch_size "
    "ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu",
    "model.kl_coef": "beta init_kl_coef kl_loss_coef use_kl_loss",
    "model.kl_estimator": "kl_loss_type",
    "model.kl_placement": "use_kl_in_reward",
    "model.entropy_coef": "entropy_coeff entropy_loss_coef",
    "model.clip_low": "epsilon clip_ratio clip_ratio_low cliprange eps_clip",
    "model.clip_high": "epsilon_high clip_ratio_high",
    "model.dual_clip": "delta clip_ratio_c",
    "model.scale_by_std": "scale_rewards norm_adv_by_std_in_grpo",
    "model.loss_aggregation": "loss_type loss_agg_mode",
    "model.rollout_correction": "tis_imp_ratio_cap vllm_importance_sampling_correction",
    "model.model": "model_name_or_path model_path pretrain",
    "model.reference_model": "ref_model ref_pretrain",
    "model.rewards": "reward_funcs reward_fn reward_function remote_rm_url",
    "model.gradient_checkpointing": "enable_gradient_checkpointing",
    "model.compile": "torch_compile",
    "model.adapter": "lora use_lora lora_config peft_config",
    "model.adapter.rank": "r lora_r lora_rank",
    "model.adapter.alpha": "lora_alpha",
    "model.adapter.target_modules": "lora_target_modules",
    "model.adapter.quantize_base": "load_in_4bit load_in_8bit",
    "model.validate_first": "val_before_train eval_on_start",
    "data.train": "train_dataset train_files prompt_data",
    "data.validation": "eval_dataset val_files",
    "data.prompt_column": "prompt_key input_key prompt_column",
    "data.prompt_template": "input_template",
    "data.chat_template": "apply_chat_template",
    "data.chat_template_arguments": "chat_template_kwargs",
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len max_prompt_tokens",
    "data.overlong": "truncation",
    "data.shuffle": "shuffle_dataset",
    "rollout.max_new_tokens": "max_completion_length max_response_length response_length "
    "generate_max_len max_tokens max_new_tokens",
    "rollout.temperature": "temperature",
    "rollout.top_p": "top_p",
    "rollout.top_k": "top_k",
    "rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization gpu_memory_utilization",
    "rollout.num_engines": "vllm_num_engines",
    "rollout.engines": "vllm_server_base_url",
    "rollout.sleep": "vllm_enable_sleep",
    "rollout.engine": "vllm_tensor_parallel_size max_model_len max_model_length",
    "trainer.max_epochs": "num_train_epochs epochs total_epochs num_episodes max_epochs",
    "trainer.max_steps": "total_training_steps max_steps",
    "trainer.default_root_dir": "output_dir save_path default_local_dir default_root_dir",
    "trainer.log_every_n_steps": "logging_steps",
    "trainer.logger": "report_to",
    "trainer.val_check_interval": "eval_steps test_freq",
    "trainer.callbacks": "save_steps save_freq",
    "trainer.precision": "bf16 dtype torch_dtype precision",
    "trainer.devices": "n_gpus_per_node gpus num_gpus devices",
    "trainer.num_nodes": "nnodes",
}
PEER_NAMES = {name: key for key, names in _NAMES_BY_KEY.items() for name in names.split()}
"""The key of this configuration for each name used by another library, or in another section."""

ELSEWHERE = dict.fromkeys(("verify", "verify_trajectories"), "rollout.verify_trajectories")
"""The key of this configuration for names that stand in other sections; they may be arguments of any class."""

NOWHERE = {"lora_dropout": "Adapters are trained without dropout, as policies are. Leave it out."}
"""What to say of names of other libraries that have no counterpart here."""

PARTS = {"fn": "function", "reward_fn": "function", "reward_function": "function"}
"""Keys inside an argument's value, such as a reward's ``function``, by their names in other libraries.

Suggested only where the value has that key.
"""


def suggest_name(name: str, choices: Iterable[str]) -> str:
    """Return a sentence that suggests a known name: this library's for that of TRL, verl or OpenRLHF, or a similar one.

    Args:
        name: the unknown name.
        choices: the known names at its place.
    """
    known = list(choices)
    if PARTS.get(name) in known:
        return f"Did you mean '{PARTS[name]}'?"
    if name in NOWHERE and name not in known:
        return NOWHERE[name]
    section, _, key = (PEER_NAMES.get(name) or ELSEWHERE.get(name, "")).partition(".")
    if not key:
        return did_you_mean(name, known)
    group, _, last = key.rpartition(".")
    if key in known or (group and last in known):
        return f"Did you mean '{last}'?"
    if group:
        return f"That is {section}.{key} here."
    return f"That is {section}.{key} here, an argument of {CLASSES[section]}."
