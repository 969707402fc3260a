"""What a run leaves beside its trace: metrics in loggers and services, prompts and answers in dumps.

Enters: a step's metrics, a batch's keys. Leaves: lines on the console, files in the run folder, rows at a service.
Imported by the command line and the trainer.
"""
