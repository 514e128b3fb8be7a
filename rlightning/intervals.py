"""Poll intervals and timeouts between the processes of a run that no argument sets.

All are in seconds, and are read when they are used, so that tests can change them.
"""

POLL_INTERVAL = 0.25
"""Seconds between two checks of what may take long: a rank in a barrier, a child process, the start of an engine."""
SHORT_POLL_INTERVAL = 0.02
"""Seconds between two checks of what usually takes milliseconds: a store's entry, a file, the end of a process."""
WORKER_POLL_INTERVAL = 0.1
"""Seconds between two checks of a worker process's progress, and between two heartbeats of its event loop."""
TRANSFER_POLL_INTERVAL = 0.0005
"""Seconds between two checks whether a chunk of weights has arrived."""
HEARTBEAT_INTERVAL = 2.0
"""Seconds between two heartbeats of an engine or a rank, and between an engine's checks for its trainer's end."""
RECONNECT_INTERVAL = 1.0
"""Seconds between two tries to connect to an engine."""
DELIVERY_INTERVAL = 1.0
"""Seconds between two deliveries of finished trajectories to their ranks, while others are sampled."""
RANK_SYNC_INTERVAL = 60.0
"""Seconds after which the collector's rank synchronizes with the other ranks, before their barrier times out."""

WAIT_REPORT_DELAY = 60.0
"""Seconds after which a waiting rank logs which ranks it waits for, and again after 2, 4, 8 times as long."""
SILENT_AFTER = 10.0
"""Seconds without a heartbeat after which a process counts as not running."""

LOOP_TIMEOUT = 60.0
"""Seconds for a call on an event loop in another thread, which returns at once unless other code blocks the loop."""
CONNECT_TIMEOUT = 5.0
"""Seconds for a connection to another process, and for each message of the handshake."""
SERVICE_CONNECT_TIMEOUT = 10.0
"""Seconds for a connection to an external service: an environment's server, an API endpoint."""
JOIN_TIMEOUT = 30.0
"""Seconds for a rank to connect to rank 0's failure watch, which is busy if many start at once."""
STORE_TIMEOUT = 30.0
"""Seconds for an answer of torch's store: usually 0.1 ms, but seconds on a host with more work than cores."""
MIN_STORE_TIMEOUT = 10.0
"""Least seconds for an answer of the store, even at a rank's deadline, when it asks for the cause."""
TRANSFER_TIMEOUT = 60.0
"""Seconds for an engine to connect for weights, and to receive a chunk of them."""
PLACEMENT_TIMEOUT = 60.0
"""Seconds for workers to be placed in a Ray cluster, where another run may be about to end."""
ACTOR_START_TIMEOUT = 300.0
"""Seconds for the engines' actors to start: they have to be placed, and to import what they need."""
WORKER_START_TIMEOUT = 300.0
"""Seconds for a worker process to import its reward functions, or to construct its environment."""
TASK_SET_TIMEOUT = 600.0
"""Maximum seconds for a server of verifiers to start and load its task set."""
ENGINE_PROGRESS_TIMEOUT = 30.0
"""Seconds without a heartbeat of an engine that only samples, after its first samples, unless set to less."""
FAILURE_ANSWER_TIMEOUT = 5.0
"""Seconds for rank 0 to answer a failed rank which rank was the first to fail."""

FAILURE_DECISION_DELAY = 0.1
"""Seconds from a reported failure to the decision that it was first; a death that caused it is reported within them."""
CAUSE_GRACE = 30.0
"""Seconds for the cause of a Ray worker's failure to be known: a neighbour may report it before Ray does."""
SAME_SIGNAL_GRACE = 0.5
"""Seconds within which two stop signals count as one: a terminal and a launcher each send one to every process."""
INTERRUPT_VOTE_TIMEOUT = 10.0
"""Maximum seconds of the ranks' vote on interrupting the current step, at most half of the remaining grace period."""
BARRIER_REPORT_GRACE = 2.5
"""Seconds for ranks to report that they have reached a barrier, after a connection broke."""
CLEANUP_GRACE = 15.0
"""Seconds for the other ranks to clean up after the first failure, unless ``failure_grace`` is set."""
HANG_GRACE = 5.0
"""Seconds beyond ``barrier_timeout`` before the watch ends a run: a collective's own timeout has a better message."""
DEVICE_TIMEOUT_MARGIN = 60.0
"""Seconds by which the timeout of collectives on devices exceeds ``barrier_timeout``."""
STACKS_GRACE = 1.0
"""Seconds for the ranks to write their stacks, before a timeout ends the run."""
ABORT_DELAY = 1.0
"""Seconds for a rank to begin its cleanup after another's failure, before its collectives on devices are aborted."""
STUCK_GRACE = 5.0
"""Seconds for other ranks to begin their cleanup after rank 0; a rank that takes longer is stuck in a collective."""
RANK_EXIT_GRACE = 5.0
"""Seconds for a rank to exit after its connections were closed."""
ENGINE_EXIT_GRACE = 10.0
"""Seconds for an engine to exit after its connection was closed, so that its exit status can be reported."""
EXIT_STATUS_GRACE = 2.0
"""Seconds for a child process to exit after it has closed its connection, so that its exit code is known."""
ENGINE_START_GRACE = 30.0
"""Seconds for the other engines to start after the first one, when a run begins."""
GROUP_LEAVE_GRACE = 2.0
"""Seconds for a process to leave a process group, before the group is abandoned."""
TRACKER_GRACE = 60.0
"""Seconds for resource trackers to clean up, and then for processes that SIGKILL does not end at once."""
RANK_0_GRACE = 3.0
"""Seconds for rank 0 to report an error first, since errors are usually the same on all ranks."""
REWARD_BLOCKED_GRACE = 0.5
"""Seconds beyond a call's timeout after which its process or event loop counts as blocked by the call."""
CANCEL_GRACE = 2.0
"""Seconds for cancelled rewards to clean up."""
