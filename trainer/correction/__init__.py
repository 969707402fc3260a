"""Rollout correction: the policy that sampled is not quite the policy that is trained.

Enters: the log-probs of both, the mask. Leaves: importance weights, a smaller mask, ``rollout_corr/*`` metrics.
Imported by the advantage stage and the loss.
"""
