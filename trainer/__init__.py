"""The reference synchronous GRPO trainer, after verl V1's names and order.

Enters: a configuration (``config/``), prompts (``dataset.py``) and a model (``models.py``). Leaves: trained weights,
metrics, and, through ``lineage.hooks``, the rows of a trace. Imports of ours: the hook API only. Imported by ``cli``.
"""
