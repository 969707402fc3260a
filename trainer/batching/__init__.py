"""How rows become batches: the arithmetic, padding rows, the ranks' shares, micro-batches by tokens.

Enters: lengths, tags and sizes of the configuration. Leaves: orders, splits and rows to add; no loss is computed here.
Imported by the stages, the worker and the checks of the configuration.
"""
