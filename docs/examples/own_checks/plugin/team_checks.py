"""Invariants of a team, for every trace that is checked where this is installed."""

from __future__ import annotations

from collections.abc import Iterator

from lineage.checks import Finding, Invariant, Tables, hookimpl, invariant


@invariant(
    code="TEAM101",
    name="responses keep to the configured length",
    says="No response is longer than data.max_response_length of the run's own configuration.",
    needs=("valid_length",),
    fields=("responses",),
    examines="select count(*) from base where response_len is not null",
    causes="The sampling parameters of the rollout engine were set apart from the trainer's.",
)
def responses_keep_to_the_configured_length(tables: Tables) -> Iterator[Finding]:
    """The limit is in the configuration, which SQL does not see."""
    limit = int(tables.trace.metadata["config"]["data"]["max_response_length"])
    query = "select responses_rid, key, response_len from base join keys using (id)"
    for rid, key, length in tables.sql(query).fetchall():
        if length is not None and length > limit:
            yield Finding(rid, key, expected=f"at most {limit} tokens", actual=length)


@hookimpl
def lineage_invariants() -> list[Invariant]:
    """What this distribution brings."""
    return [responses_keep_to_the_configured_length]
