"""Rollout engines: token ids in, sampled token ids and their log-probabilities out.

Enters: requests of agent loops, weights from the actor. Leaves: TokenOutput. Imported by the agent loops, the weight
sync and the trainer; an engine knows nothing of prompts, groups or rewards.
"""
