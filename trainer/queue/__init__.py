"""The data plane between stages: tags (state, lengths, versions) and values (the fields), by key.

Enters: rows under a trajectory or prompt key. Leaves: the rows asked for, as jagged TensorDicts. ``local`` keeps them
in this process with TransferQueue's interface and semantics; ``transfer_queue`` is the real one, of a Ray cluster,
imported by its own name since it needs the ``ray`` extra. Imported by the trainer and its workers.
"""

from lineage.trainer.queue.batch_meta import BatchMeta
from lineage.trainer.queue.local import LocalTransferQueue

__all__ = ["BatchMeta", "LocalTransferQueue"]
