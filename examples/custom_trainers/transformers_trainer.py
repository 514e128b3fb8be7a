"""The four callbacks of colocated training in a transformers ``Trainer``, through ``TransformersAdapter``::

    pip install accelerate
    torchrun --nproc-per-node 2 examples/custom_trainers/transformers_trainer.py

Teaches a tiny language model to write even tokens, by REINFORCE.
"""

import logging
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

from rlightning.callbacks import ControllerMode, DeviceSyncBeforeBarrier, EmptyCacheAfterUpdate, OffloadDuringRollout
from rlightning.hooks import call_hook
from rlightning.transformers_adapter import TransformersAdapter

log = logging.getLogger("transformers_trainer")


def make_callbacks() -> list[Any]:
    """All of them; each works without the others."""
    return [ControllerMode(), DeviceSyncBeforeBarrier(), EmptyCacheAfterUpdate(), OffloadDuringRollout()]


class OnlineTrainer(Trainer):
    """Trains on what the model itself has just written."""

    def __init__(self, callbacks: Sequence[Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rewards: list[float] = []
        self.adapter = TransformersAdapter(self, callbacks)
        self.add_callback(self.adapter)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Generate, then let the Trainer do what it always does."""
        call_hook(self.adapter, model, "on_rollout_start", inputs)
        prompts = inputs["input_ids"].to(self.args.device)
        written = self.accelerator.unwrap_model(model).generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, max_new_tokens=8, pad_token_id=0
        )
        call_hook(self.adapter, model, "on_rollout_end", written)
        call_hook(self.adapter, model, "on_update_start", written)
        loss: Tensor = super().training_step(model, {"input_ids": written}, *args, **kwargs)
        self.accelerator.wait_for_everyone()
        return loss

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The share of even tokens is the reward."""
        tokens = inputs["input_ids"]
        logprobs = model(input_ids=tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        reward = (tokens[:, 1:] % 2 == 0).float().mean(-1)
        self.rewards.append(reward.mean().item())
        loss: Tensor = ((reward.mean() - reward)[:, None] * logprobs).mean()
        return loss


def main(num_steps: int = 20, callbacks: Sequence[Any] | None = None) -> list[float]:
    """Train for ``num_steps``; the mean reward of each."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=16, num_hidden_layers=2, head_dim=16, eos_token_id=None, **sizes))
    rows = [{"input_ids": torch.tensor([i % 16])} for i in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=num_steps,
            per_device_train_batch_size=32,
            ddp_find_unused_parameters=False,
            learning_rate=0.01,
            lr_scheduler_type="constant",
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = OnlineTrainer(
            make_callbacks() if callbacks is None else callbacks, model=model, args=arguments, train_dataset=rows
        )
        trainer.train()
    accelerator, rewards = trainer.accelerator, trainer.rewards
    del trainer  # as the last that holds gloo's threads, its DDP would wait for one that waits for Python's lock
    accelerator.free_memory()
    accelerator.end_training()
    log.info("reward %.2f -> %.2f", rewards[0], rewards[-1])
    return rewards


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    main()
