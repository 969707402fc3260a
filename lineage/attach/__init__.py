"""Adapters to programs and libraries that are not ours. Enters: their objects. Leaves: rows of the trace."""
