"""Poll intervals and timeouts between the processes of a run that no argument of the user sets.

All in seconds, and read when they are used, so that a test can set them.
"""

POLL_INTERVAL = 0.25
"""Between two checks of what may take long: a rank in a barrier, a child process, the start of an engine."""
SHORT_POLL_INTERVAL = 0.02
"""Between two checks of what usually comes within milliseconds: an entry of a store, a file, the end of a process."""
WORKER_POLL_INTERVAL = 0.1
"""Between two checks whether a worker process gets on with its calls, and between two heartbeats of its event loop."""
TRANSFER_POLL_INTERVAL = 0.0005
"""Between two checks whether a chunk of weights has arrived."""
HEARTBEAT_INTERVAL = 2.0
"""Between two heartbeats of an engine or a rank, and between two checks whether an engine's trainer is there."""
RECONNECT_INTERVAL = 1.0
"""Between two tries to connect to an engine."""
DELIVERY_INTERVAL = 1.0
"""Between two deliveries of finished trajectories to the ranks of their prompts, while others are sampled."""
RANK_SYNC_INTERVAL = 60.0
"""After which the rank that collects trajectories meets the other ranks, before their barrier takes it for lost."""

WAIT_REPORT_DELAY = 60.0
"""After which a rank that waits says for whom; it says so again after twice the time, four times, and so on."""
SILENT_AFTER = 10.0
"""Without a heartbeat, after which a process counts as one that does not run."""

LOOP_TIMEOUT = 60.0
"""Of a call on an event loop in another thread, which answers at once unless code on it blocks."""
CONNECT_TIMEOUT = 5.0
"""Of connecting to another process, and of each message until the two know each other."""
SERVICE_CONNECT_TIMEOUT = 10.0
"""The same of a service of others: an environment's server, an endpoint that samples."""
JOIN_TIMEOUT = 30.0
"""Of connecting a rank to the failure watch of rank 0, which is busy if many start at once."""
STORE_TIMEOUT = 30.0
"""Of an answer of torch's store, which usually takes 0.1 ms, and seconds on a host with more work than cores."""
MIN_STORE_TIMEOUT = 10.0
"""The same where a deadline is closer: a rank that asks at its deadline asks what went wrong."""
TRANSFER_TIMEOUT = 60.0
"""Of connecting an engine for weights, and of sending it a chunk of them."""
PLACEMENT_TIMEOUT = 60.0
"""Of finding room for workers in a Ray cluster, where another run may be about to end."""
ACTOR_START_TIMEOUT = 300.0
"""Of the actors of engines, which have to find room and to import what they need."""
WORKER_START_TIMEOUT = 300.0
"""Of a worker process that imports its reward functions, or makes its environment."""
TASK_SET_TIMEOUT = 600.0
"""Of a server of verifiers that starts and loads its task set."""
ENGINE_PROGRESS_TIMEOUT = 30.0
"""Of an engine's heartbeat while it only samples, and has before, where ``rollout.hang_timeout`` is longer."""
FAILURE_ANSWER_TIMEOUT = 5.0
"""Of the answer to a rank that failed which rank was the first to fail."""

FAILURE_DECISION_DELAY = 0.1
"""Between a reported failure and the decision that it was the first, for a report of a death that caused it."""
CAUSE_GRACE = 30.0
"""For the cause of a failure of Ray workers to be known: one whose neighbour died may report that before Ray does."""
SAME_SIGNAL_GRACE = 0.5
"""Within which two signals to stop are one: a terminal sends it to each process, and so does the launcher of ranks."""
INTERRUPT_VOTE_TIMEOUT = 10.0
"""For all ranks to say whether the step under way may be left, half of their grace period after a signal to stop."""
BARRIER_REPORT_GRACE = 2.5
"""For ranks to report that they have reached a barrier, after a connection broke."""
CLEANUP_GRACE = 15.0
"""For the other ranks to clean up after the first failure, unless ``failure_grace`` is set."""
HANG_GRACE = 5.0
"""Over ``barrier_timeout``, before the watch ends a run: a collective that times out by itself says more."""
DEVICE_TIMEOUT_MARGIN = 60.0
"""Over ``barrier_timeout``, of collectives on devices."""
STACKS_GRACE = 1.0
"""For the ranks to write their stacks, before a timeout ends the run."""
ABORT_DELAY = 1.0
"""For a rank to begin to clean up after another one's failure, before its collectives on devices are aborted."""
STUCK_GRACE = 5.0
"""For the other ranks to begin to clean up once rank 0 has; a rank that does not is stuck in a collective."""
RANK_EXIT_GRACE = 5.0
"""For a rank to exit after its connections were closed."""
ENGINE_EXIT_GRACE = 10.0
"""The same for an engine, whose exit status is reported."""
EXIT_STATUS_GRACE = 2.0
"""For a child process to exit by itself after it has closed its connection, so that its exit code is known."""
ENGINE_START_GRACE = 30.0
"""For the other engines to start, once the first one has, when a run begins."""
GROUP_LEAVE_GRACE = 2.0
"""For a process to leave a process group, before it is left behind."""
TRACKER_GRACE = 60.0
"""For resource trackers to clean up, and then for what does not end by SIGKILL at once."""
RANK_0_GRACE = 3.0
"""For rank 0 to report an error first, which is usually that of all ranks."""
REWARD_BLOCKED_GRACE = 0.5
"""Over a call's timeout, after which its process or event loop counts as blocked by it."""
CANCEL_GRACE = 2.0
"""For cancelled rewards to clean up."""
