"""Faults of the reference trainer: named, injected at seams, each with the code that must catch it.

Enters: the trainer's own functions, by their dotted names. Leaves: traces of runs with one thing wrong in
them. Imported by ``lineage faults``, ``lineage selftest`` and the makers of samples; nothing in the trainer imports it
or knows of it.
"""
