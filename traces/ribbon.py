"""A trajectory as a ribbon: whose tokens follow whose, from the first of the prompt to the last of the response."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lineage.keys import parse_key
from lineage.traces.errors import reading

if TYPE_CHECKING:
    from lineage.traces.life import Life
    from lineage.traces.trace import Trace

UNKNOWN = "unknown"
ROLES = ("prompt", "policy", "observation", "inserted", UNKNOWN)


@dataclass(frozen=True)
class Span:
    """Tokens of one author, or those the trace says nothing of.

    Attributes:
        role: one of :data:`ROLES`; ``unknown`` where no turn covers the tokens.
        start: first token, counted from the first of the prompt.
        length: tokens.
        turn: number of the turn; None where the trace has no turn row.
        generated: tokens the engine counted.
        truncated_from: tokens before a declared cut.
        trimmed: tokens a declared trim removed.
    """

    role: str
    start: int
    length: int
    turn: int | None = None
    generated: int | None = None
    truncated_from: int | None = None
    trimmed: int | None = None

    @property
    def end(self) -> int:
        """The token after the last."""
        return self.start + self.length


@dataclass(frozen=True)
class Ribbon:
    """The turns of one trajectory and its four lengths, in tokens. None is not in the trace.

    Attributes:
        policy_len: mask sum of the response.
        min_global_steps, max_global_steps: oldest and newest weight version that wrote a token.
        from_turns: the spans are the trace's turn rows; else they are drawn from the lengths and the mask sum, which
            do not say where in the response the policy's tokens were: they come first.
    """

    global_steps: int
    key: str
    prompt_len: int | None
    response_len: int | None
    seq_len: int | None
    policy_len: int | None
    min_global_steps: int | None
    max_global_steps: int | None
    is_padding: bool
    from_turns: bool
    spans: tuple[Span, ...]

    @property
    def tokens(self) -> int:
        """Tokens the ribbon is long."""
        return max([self.seq_len or 0, *(span.end for span in self.spans)])


def ribbons(trace: Trace, found: Life) -> tuple[Ribbon, ...]:
    """The ribbon of each trajectory of a life, by step, session and index; one without tokens has none.

    Raises:
        TraceError: the trace cannot be read.
    """
    with reading(trace.path):
        arguments = {"keys": list(found.keys)}
        turns: dict[tuple[Any, ...], list[Span]] = defaultdict(list)
        for run, step, key, *turn in trace.connection.execute(_TURNS, arguments).fetchall():
            turns[run, step, key].append(Span(*turn))
        said = trace.connection.execute(_LENGTHS, arguments).fetchall()
    made = (_ribbon(turns.get((run, step, key)), step, key, *rest) for run, step, key, *rest in said)
    return tuple(sorted((one for one in made if one.tokens), key=_place))


_TURNS = """
    select distinct run_id, global_steps, key, role, start, length, turn, generated, truncated_from, trimmed
    from facts where entity = 'turn' and stage = 'rollout' and list_contains($keys, key)
    order by start, turn
"""
_LENGTHS = """
    select run_id, global_steps, key, prompt_len, response_len, seq_len, policy_len,
        min_global_steps, max_global_steps, is_padding
    from trajectories where list_contains($keys, key)
"""


def _place(ribbon: Ribbon) -> tuple[int, int, int]:
    parsed = parse_key(ribbon.key)
    return (ribbon.global_steps, parsed.session_id, parsed.index) if parsed else (ribbon.global_steps, -1, -1)


def _ribbon(
    turns: list[Span] | None,
    step: int,
    key: str,
    prompt: int | None,
    response: int | None,
    sequence: int | None,
    policy: int | None,
    oldest: int | None,
    newest: int | None,
    padding: bool,
) -> Ribbon:
    if sequence is None and prompt is not None and response is not None:
        sequence = prompt + response
    spans = turns or _from_lengths(prompt or 0, response or 0, policy or 0)
    lengths = (prompt, response, sequence, policy)
    return Ribbon(step, key, *lengths, oldest, newest, padding, turns is not None, tuple(spans))


def _from_lengths(prompt: int, response: int, policy: int) -> list[Span]:
    spans = [
        Span("prompt", 0, prompt),
        Span("policy", prompt, policy),
        Span(UNKNOWN, prompt + policy, response - policy),
    ]
    return [span for span in spans if span.length > 0]


def tiled(spans: Iterable[Span], tokens: int) -> list[Span]:
    """Spans end to end over ``tokens``: gaps are unknown, an overlap is the earlier span's, empty ones are out."""
    tiles: list[Span] = []
    at = 0
    for span in sorted((span for span in spans if span.length), key=lambda span: (span.start, span.end)):
        if span.start > at:
            tiles.append(Span(UNKNOWN, at, span.start - at))
            at = span.start
        if span.end > at:
            tiles.append(Span(span.role, at, span.end - at, span.turn))
            at = span.end
    if tokens > at:
        tiles.append(Span(UNKNOWN, at, tokens - at))
    return tiles


def cells(ribbon: Ribbon, width: int) -> list[tuple[str, int]]:
    """The ribbon on ``width`` characters: (role, characters) in order.

    A token takes one character where there is room; a longer ribbon is scaled so that every span keeps one at least.
    With more spans than characters each character shows the span in its middle.
    """
    tiles = tiled(ribbon.spans, ribbon.tokens)
    total = sum(tile.length for tile in tiles)
    if total <= width:
        return [(tile.role, tile.length) for tile in tiles]
    if len(tiles) <= width:
        return [(tile.role, size) for tile, size in zip(tiles, _shares(tiles, width, total), strict=True)]
    sampled: list[tuple[str, int]] = []
    ends = [tile.end for tile in tiles]
    tile = 0
    for cell in range(width):
        middle = (2 * cell + 1) * total // (2 * width)
        while ends[tile] <= middle:
            tile += 1
        sampled.append((tiles[tile].role, 1))
    return sampled


def _shares(tiles: Sequence[Span], width: int, total: int) -> list[int]:
    """One character each, the rest by length: borders are rounded, so that rounding never adds up."""
    spare, weight = width - len(tiles), total - len(tiles)
    borders = [i + (2 * spare * (tile.end - i) + weight) // (2 * weight) for i, tile in enumerate(tiles, start=1)]
    return [border - before for before, border in pairwise([0, *borders])]
