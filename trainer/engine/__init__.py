"""Model engines: how a global batch becomes local ones.

Enters: sizes from the configuration (nodes, devices, model-parallel sizes). Leaves: the logical data-parallel size
the batch is divided by, as the backend reports it. Imported by the trainer and its workers only.
"""
