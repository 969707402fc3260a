"""Where contracts were first written down: the field invariants S1 to S11 of the step the checks are about.

They are those of the synchronous GRPO step of verl V1 (revision 5b79827b), which the reference trainer follows. An
invariant's ``source`` names them; what stands after them is what was seen in verl's or TransferQueue's source, or the
part of the step's description a contract comes from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

SOURCES: Mapping[str, str] = {
    "S1": "prompts, responses, response_mask and loss_mask of a trajectory agree in their valid lengths",
    "S2": "the length of input_ids is prompt_len + response_len, and position_ids have a compatible shape",
    "S3": "trajectories sampled from one prompt share a stable uid; session and index in the key restore the hierarchy",
    "S4": "observation and padding tokens (response_mask 0) are never taken for actions of the policy",
    "S5": "padding rows carry an is_padding tag and are left out of rewards, metrics and sample counts",
    "S6": "a reorder of the batch changes no uid, no trajectory key and no version tag",
    "S7": "the global PPO mini-batch divides by the logical data-parallel size the backend reports",
    "S8": "the actor's TP, PP, CP and SP are recorded apart from the rollout's TP; "
    "the actor's DP never follows from the rollout's",
    "S9": "nested to padded to nested loses no row's real length",
    "S10": "advantages and returns are valid exactly where the response mask is",
    "S11": "the clear uses the whole merged set of keys and leaves no trajectory for the next step",
}


def named(source: str) -> dict[str, str]:
    """The sources a header's ``source`` names, with the sentence of each; none when it names none of them."""
    return {name: SOURCES[name] for name in re.findall(r"\bS\d+\b", source) if name in SOURCES}
