"""Turns: whose tokens a trajectory is made of, kept while a session grows and recorded when it is written.

The tokens of a session are only ever added to. What was sent to the engine is never tokenised again, so the prompt of a
turn is the prompt of the last one, the tokens the policy answered, and the observation.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lineage import hooks

if TYPE_CHECKING:
    from lineage.trainer.agent_loop.base import AgentLoopOutput

POLICY = "policy"


@dataclass(frozen=True)
class Turn:
    """A run of tokens with one author.

    Attributes:
        role: ``prompt``, ``policy``, ``observation`` (a tool's or a user's message) or ``inserted`` (what the chat
            template puts between the policy's last token and that message).
        start: first token, counted from the first of the prompt.
        length: tokens.
        generated: tokens the engine counted; None where the policy did not write.
        truncated_from: tokens before a declared cut (``data.truncation``, ``max_tool_response_length``).
        trimmed: tokens a declared trim removed.
    """

    role: str
    start: int
    length: int
    generated: int | None = None
    truncated_from: int | None = None
    trimmed: int | None = None


@dataclass
class Conversation:
    """The tokens of one session as they grow.

    Attributes:
        ids: all tokens, the prompt's first.
        prompt_length: how many are the prompt's.
        mask: 1 on the policy's tokens, 0 on the others; from the first token after the prompt.
        log_probs: the sampler's, 0 on the others; as long as ``mask``.
    """

    ids: list[int]
    prompt_length: int
    turns: list[Turn]
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    @classmethod
    def begin(cls, prompt_ids: Sequence[int], truncated_from: int | None = None) -> Conversation:
        """A conversation that has its prompt and nothing else."""
        size = len(prompt_ids)
        return cls(list(prompt_ids), size, [Turn("prompt", 0, size, truncated_from=truncated_from)])

    @property
    def response_length(self) -> int:
        """Tokens after the prompt."""
        return len(self.mask)

    @property
    def response_ids(self) -> list[int]:
        """Everything after the prompt."""
        return self.ids[self.prompt_length :]

    def answer(self, ids: Sequence[int], log_probs: Sequence[float], generated: int) -> None:
        """Add what the policy wrote."""
        self.turns.append(Turn(POLICY, len(self.ids), len(ids), generated))
        self._add(ids, 1, log_probs)

    def observe(self, role: str, ids: Sequence[int], truncated_from: int | None = None) -> None:
        """Add what somebody else wrote: ``observation`` or ``inserted``. Nothing is no turn."""
        if ids:
            self.turns.append(Turn(role, len(self.ids), len(ids), truncated_from=truncated_from))
            self._add(ids, 0, [0.0] * len(ids))

    def _add(self, ids: Sequence[int], mask: int, log_probs: Sequence[float]) -> None:
        self.ids.extend(ids)
        self.mask.extend([mask] * len(ids))
        self.log_probs.extend(log_probs)


def turns_of(output: AgentLoopOutput) -> list[Turn]:
    """The output's turns; of a loop that names none: the prompt, then a turn for each run of equal mask values."""
    if output.turns:
        return output.turns
    turns = [Turn("prompt", 0, len(output.prompt_ids))]
    runs = [(value, len(list(run))) for value, run in itertools.groupby(output.response_mask)]
    generated = output.extra_fields.get("generated") if sum(value for value, _ in runs) == 1 else None
    for value, length in runs:
        start = turns[-1].start + turns[-1].length
        turns.append(Turn(POLICY, start, length, generated) if value else Turn("observation", start, length))
    return turns


def record_turns(keys: Sequence[str], outputs: Sequence[AgentLoopOutput]) -> None:
    """Trace the turns of trajectories: an element a turn, its content the turn's tokens in the trajectory as written.

    Turns of a loop of somebody's own may be anything. Those no row can be made of are a lost row, not an error: an
    untraced run would not have looked at them.

    Args:
        keys: trajectory key of each output.
    """
    recorder = hooks.recorder()
    if isinstance(recorder, hooks.NullRecorder) or not keys:
        return
    try:
        _produce_turns(keys, outputs)
    except Exception as error:
        recorder.drop(1, f"turns: {type(error).__name__}: {error}")


def _produce_turns(keys: Sequence[str], outputs: Sequence[AgentLoopOutput]) -> None:
    tokens: list[np.ndarray] = []  # of numpy: making a jagged tensor would cost more than all the rest
    names: list[str] = []
    numbers: list[int] = []
    turns: list[Turn] = []
    for key, output in zip(keys, outputs, strict=True):
        sequence, mine = np.array([*output.prompt_ids, *output.response_ids]), turns_of(output)
        tokens += [sequence[turn.start : turn.start + turn.length] for turn in mine]
        names += [key] * len(mine)
        numbers += range(len(mine))
        turns += mine
    columns: dict[str, list[Any]] = {
        "turn": numbers,
        "start": [turn.start for turn in turns],
        "role": [turn.role for turn in turns],
        "generated": [turn.generated for turn in turns],
        "truncated_from": [turn.truncated_from for turn in turns],
        "trimmed": [turn.trimmed for turn in turns],
    }
    hooks.current().produce({"turns": tokens}, keys=names, entity="turn", columns=columns)
