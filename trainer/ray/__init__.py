"""``mode=ray``: the trainer's own code on Ray actors, the real TransferQueue and FSDP2.

Enters: a validated configuration and a run folder. Leaves: trained weights, the metrics of each step as they come, and
one part of the trace from every process. Imported by ``cli``; nothing outside this folder imports ray.

The processes, by the names their rows carry: ``driver`` (the task runner, which runs the step), ``actor:<rank>`` (actor
and reference), ``rollout:<replica>`` (generation), ``agent_loop:<n>`` (sessions) and ``reward:<n>`` (scores).
"""
