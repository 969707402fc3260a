"""Tasks that make their own rows: ``builtin:<task>`` and ``reasoning_gym:<task>``.

Enters: a task's name, a number of rows and a seed. Leaves: rows in verl's prompt schema. Imported by ``dataset`` and
by the reward scorers.
"""

from lineage.trainer.tasks.registry import TaskError, is_task, make_rows

__all__ = ["TaskError", "is_task", "make_rows"]
