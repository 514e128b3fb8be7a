"""How long a run may take to end after SIGTERM or Ctrl-C."""

from rlightning.distributed.sigterm import EndOnSigterm


class StopOnSignal(EndOnSigterm):
    """Sets the grace period within which SIGTERM and Ctrl-C end a fit with its state saved.

    A fit of an ``RLModule`` has one by itself, with 120 seconds. The signal is noted, the step under way is finished,
    ``ModelCheckpoint`` saves, and the command to go on with is shown. After half of the grace period a step that still
    samples is left, as when an engine hangs, and the state after the step before is saved. At the end of the grace
    period the process ends, whatever it does; a second signal ends it at once.

    It belongs to a Lightning Trainer: other loops handle signals themselves.

    Args:
        grace_period: seconds; a little less than what the scheduler waits before it kills the process.
    """
