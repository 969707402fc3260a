"""Invariants of a team, for every trace that is checked where this is installed."""

from __future__ import annotations

from collections.abc import Iterator

from lineage.checks import Finding, Invariant, Tables, hookimpl, invariant


@invariant(
    code="TEAM101",
    name="prompts leave room for turns",
    says="No prompt takes more than half of data.max_prompt_length, so that what a tool says can be added.",
    needs=("valid_length",),
    fields=("prompts",),
    examines="select count(*) from base where prompt_len is not null",
    causes="A chat template or a system message grew.",
)
def prompts_leave_room_for_turns(tables: Tables) -> Iterator[Finding]:
    """The limit is in the configuration, which SQL does not see."""
    limit = int(tables.trace.metadata["config"]["data"]["max_prompt_length"]) // 2
    query = "select prompts_rid, key, prompt_len from base join keys using (id)"
    for rid, key, length in tables.sql(query).fetchall():
        if length is not None and length > limit:
            yield Finding(rid, key, expected=f"at most {limit} tokens", actual=length)


@hookimpl
def lineage_invariants() -> list[Invariant]:
    """What this distribution brings."""
    return [prompts_leave_room_for_turns]
