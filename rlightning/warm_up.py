"""Compiling before there is anything to train on."""

from typing import Any

from rlightning.types import RolloutBatch

LENGTHS = (13, 23, 17)
"""Tokens of the sequences to compile with: torch.compile takes equal sizes for one, and these are like no other."""


def warm_up(module: Any) -> None:
    """Let everything be compiled that the first update takes, on sequences of no meaning; all ranks do it together.

    An engine takes its time to start, and compiling takes no less.

    Args:
        module: an :class:`~rlightning.module.RLModule` that is about to train; it is left as it was.
    """
    batch = RolloutBatch.concatenate([RolloutBatch.of_sequence([0] * length) for length in LENGTHS])
    evaluated = [module.loaded_actor] if module.plan.optimizer_steps > 1 else []
    if module.reference is not None:
        evaluated.append(module.reference.model)
    with module.trainer.precision_plugin.train_step_context():
        for model in evaluated:
            module.evaluate_logprobs(batch, model, temperature=1.0, max_tokens=batch.num_tokens)
        logprobs, entropy = module.compute_logprobs(batch.to(module.device))
        module.manual_backward(logprobs.sum() + module.entropy_coef * entropy.sum())
    module.optimizers().zero_grad()
