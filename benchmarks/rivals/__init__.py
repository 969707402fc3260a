"""The same five rules in other tools, each as its users would write it; how many keys break each is what all must find.

- alignment: the fields of a response span of one key have one valid length;
- groups: a uid has as many real sessions in the sampled batch as were declared;
- order: the first put of a key is not after its first get, and no use comes after its clear;
- conservation: every key that was put was cleared, and no other one;
- advantage: (score - mean) / (std + 1e-6) over the sessions of a uid is the advantage that was used.

A module has ``violations(path, threads)``; its lines of code are those of the rule.
"""
