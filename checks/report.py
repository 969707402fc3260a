"""The result of a check: verdicts, violations as a relation, the headline; readable in a notebook."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import pyarrow as pa

from lineage.checks.blame import Headline
from lineage.checks.catalogue import Invariant
from lineage.checks.policy import Policy
from lineage.checks.profiles import Profile
from lineage.checks.verdict import ExitCode, Verdict

if TYPE_CHECKING:
    import pandas as pd

_VIOLATIONS = pa.schema(
    [
        ("code", pa.string()),
        ("run_id", pa.string()),
        ("global_steps", pa.int64()),
        ("seq", pa.int64()),
        ("process", pa.string()),
        ("stage", pa.string()),
        ("op", pa.string()),
        ("field", pa.string()),
        ("key", pa.string()),
        ("expected", pa.string()),
        ("actual", pa.string()),
        ("detail", pa.string()),
        ("severity", pa.string()),
        ("accepted", pa.bool_()),
    ]
)


@dataclass(frozen=True, repr=False)
class Report:
    """All verdicts on one trace.

    Attributes:
        path: the trace.
        run_id: the run it records.
        profile: whose conventions were used.
        rows: trace rows.
        facts: elements of all rows.
        steps: training steps judged.
        state: what is missing from the trace; empty when complete.
        verdicts: one per invariant run, by code.
        invariants: the invariants run, in the same order.
        headline: the first bad event; None when nothing failed that is not accepted.
        seconds: time the whole took.
        policy: what the exit code lets through.
        notes: what else a reader should know, a sentence each.
    """

    path: Path | str
    run_id: str
    profile: Profile
    rows: int
    facts: int
    steps: int
    state: str
    verdicts: tuple[Verdict, ...]
    invariants: tuple[Invariant, ...]
    headline: Headline | None
    seconds: float
    policy: Policy = field(default_factory=Policy)
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> ExitCode:
        """The exit code this report stands for, under its policy."""
        return self.policy.exit_code(self.verdicts, complete=not self.state)

    @property
    def ok(self) -> bool:
        """True when the exit code is 0."""
        return self.exit_code is ExitCode.PASS

    @property
    def complaints(self) -> tuple[str, ...]:
        """What the policy holds against it beside violations, a sentence each."""
        return tuple(self.policy.complaints(self.verdicts))

    def name(self, code: str) -> str:
        """What the invariant of this code calls itself."""
        return next((one.name for one in self.invariants if one.code == code), "")

    def verdict(self, code: str) -> Verdict:
        """The verdict of one code.

        Raises:
            KeyError: that code was not run.
        """
        for one in self.verdicts:
            if one.code == code.upper():
                return one
        raise KeyError(code)

    @cached_property
    def violations(self) -> duckdb.DuckDBPyRelation:
        """Violations as a DuckDB relation, in order, at most a thousand a code: ``code``, the event, the element."""
        found = [(one.ord, verdict.code, one) for verdict in self.verdicts for one in verdict.violations]
        found.sort(key=lambda item: item[:2])
        rows = [asdict(one) | {"code": code} for _, code, one in found]
        self._connection.register("violations", pa.Table.from_pylist(rows, _VIOLATIONS))
        return self._connection.view("violations")

    @cached_property
    def _connection(self) -> duckdb.DuckDBPyConnection:
        return duckdb.connect()

    def df(self) -> pd.DataFrame:
        """Verdicts as a pandas DataFrame, one row a code."""
        import pandas as pd

        return pd.DataFrame(
            {
                "code": [one.code for one in self.verdicts],
                "name": [self.name(one.code) for one in self.verdicts],
                "verdict": [one.kind.value for one in self.verdicts],
                "examined": [one.examined for one in self.verdicts],
                "violations": [one.errors for one in self.verdicts],
                "accepted": [one.accepted for one in self.verdicts],
                "warnings": [one.warnings for one in self.verdicts],
                "needed": [one.needed for one in self.verdicts],
            }
        )

    def __repr__(self) -> str:
        """Short: what a failing assertion or a debugger shows."""
        from lineage.checks.formats.text import summary

        return f"<Report {summary(self)}>"

    def __str__(self) -> str:
        from lineage.checks.formats.text import to_text

        return to_text(self)

    def _repr_html_(self) -> str:
        """The report for a notebook: the headline, then the verdicts as a table."""
        from lineage.checks.formats.text import headline_lines, summary

        parts = [f"<p>{html.escape(summary(self))}</p>"]
        if self.headline is not None:
            parts.insert(0, f"<pre>{html.escape(chr(10).join(headline_lines(self.headline, self.name)))}</pre>")
        if self.state:
            parts.append(f"<p>incomplete trace: {html.escape(self.state)}</p>")
        table = self.df()
        table = table.loc[:, [name for name in table if name not in ("accepted", "needed") or any(table[name])]]
        return "".join(parts) + str(table.to_html(index=False, border=0))


@dataclass(frozen=True)
class Refused:
    """A trace that could not be judged at all.

    Attributes:
        path: as it was given.
        message: what is wrong, where, and how to mend it, in one line.
    """

    path: Path | str
    message: str

    @property
    def exit_code(self) -> ExitCode:
        """Unusable input."""
        return ExitCode.UNUSABLE


Outcome = Report | Refused
