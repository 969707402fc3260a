"""The stages of a training step, one function each, in verl's order.

Enters: the trainer's parts and a ``KVBatchMeta`` (keys and tags); values are fetched from the queue by key. Leaves:
fields written back under the same keys, and the stage's metrics. Imported by ``grpo``, whose step calls them in order.
"""
