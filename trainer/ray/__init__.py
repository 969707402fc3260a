"""``mode=ray``: the trainer's own code on Ray actors, the real TransferQueue and FSDP2.

Enters: a validated configuration and a run folder. Leaves: trained weights, the metrics of each step as they come, and
one part of the trace from every process. Imported by ``cli``; of the rest the queue's adapter alone imports ray.

The processes, by the names their rows carry: ``driver`` (the task runner, which runs the step), ``actor:<rank>`` (actor
and reference), ``rollout:<replica>`` (generation), ``agent_loop:<n>`` (sessions) and ``reward:<n>`` (scores).
"""

import os

# Of every process of a run. Ray reads some of it when it is imported, so it stands here; what this process starts
# inherits it, and a process of a cluster that was joined is given it with the job (``cluster.start``).
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing leaves the machine
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray leaves the GPUs' variable alone
    "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",  # a step waits for its workers, and means to
    "RAY_AUTH_MODE": "disabled",  # else it warns that no token is set
    "RAY_DEDUP_LOGS_SKIP_REGEX": "^A worker died or was killed while executing",  # the run says so in a line of its own
    "RAY_worker_niceness": "0",  # the training is what the machine is for
    "TQ_LOGGING_LEVEL": "ERROR",  # the trace says what is missing; the controller says it too, at every get
    "TQ_NUM_THREADS": "1",  # of torch in a storage unit; the default, 8, is warned of at every put on a small machine
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
