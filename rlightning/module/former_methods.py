"""Methods that algorithms could override in former versions, and which nothing calls any more."""

import logging

log = logging.getLogger(__name__)

FORMER_METHODS = {
    "aggregate": "each LossComponent of loss_components() has its own denominator",
    "share_out": "balance(batch)",
    "pick": "to_microbatch(batch, sequences)",
    "count_checkpointed_layers": "checkpointed_share()",
    "leave_out_skippable": "rebalance(batch)",
    "skip_by_changed_advantages": "decide_skipped(batch)",
}
"""The replacement of each method, by its former name (CHANGELOG.md)."""


def warn_of_former_methods(module: type) -> None:
    """Log a warning for each method that a subclass defines under a former name, as its override would do nothing."""
    for name in FORMER_METHODS.keys() & vars(module).keys():
        log.warning(
            "%s defines %s(), which rlightning called in a former version and no longer does. In its place: %s. If it "
            "is a method of your own, another name avoids this warning.",
            *(module.__name__, name, FORMER_METHODS[name]),
        )
