"""Model engines: how a global batch becomes local ones, and one model the work of several processes.

Enters: sizes from the configuration (nodes, devices, model-parallel sizes), a model, an address to meet at. Leaves: the
logical data-parallel size the batch is divided by, as the backend reports it; the ranks this process plays; the model
sharded, and its state in a folder. Imported by the trainer and its workers only.
"""
