"""A report as SARIF 2.1.0 (OASIS), for code scanning and for whatever else reads findings.

One run for one ``lineage check``, however many traces it judged: GitHub takes at most 20 runs a file, and no two of one
tool and category. Only violations are results, because GitHub shows every result as an alert, whatever its ``kind``;
all verdicts are in ``properties.traces``, and what no result can say (refused traces, incomplete ones, required checks
that saw too little) is a notification of the invocation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from lineage.checks.blame import Headline
from lineage.checks.catalogue import Invariant
from lineage.checks.formats.artifact import Artifact
from lineage.checks.formats.fingerprints import fingerprints
from lineage.checks.formats.plain import plain, plural, shortened
from lineage.checks.policy import worst
from lineage.checks.report import Outcome, Refused, Report
from lineage.checks.verdict import Kind, Verdict, Violation

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
#: results of one run that GitHub keeps (it refuses more than 25,000)
LIMIT = 5_000
#: characters of a rule's description that GitHub shows
_DESCRIPTION = 1024
_PRECISION = "very-high"  # GitHub lists alerts by level, then by how often the rule is right


@dataclass(frozen=True)
class _Finding:
    """Violations that are one fault at one place: the first of them, and how many there are."""

    verdict: Verdict
    violation: Violation
    count: int


def render(outcomes: Sequence[Outcome], quiet: bool = False) -> str:
    """The outcomes as one SARIF log, in ASCII.

    Args:
        outcomes: of all traces.
        quiet: makes no difference here.
    """
    return json.dumps(to_dict(outcomes), indent=2)


def to_dict(outcomes: Sequence[Outcome], limit: int = LIMIT) -> dict[str, Any]:
    """The SARIF log as plain dictionaries and lists, with so many results at most."""
    reports = [one for one in outcomes if isinstance(one, Report)]
    rules = {one.code: one for report in reports for one in report.invariants}
    index = {code: at for at, code in enumerate(rules)}
    artifacts = [Artifact.of(one.path) for one in outcomes]
    places = {one: at for at, one in enumerate(dict.fromkeys(artifacts))}  # the same trace twice is one artifact
    found = [list(_findings(one)) if isinstance(one, Report) else [] for one in outcomes]
    kept = _kept(found, limit)
    known = any(verdict.accepted for report in reports for verdict in report.verdicts)
    results = [
        _result(finding, rules[finding.verdict.code], known)
        | {
            "ruleIndex": index[finding.verdict.code],
            "locations": [_location(finding.violation, artifact, places[artifact])],
        }
        for artifact, findings in zip(artifacts, kept, strict=True)
        for finding in findings
    ]
    run: dict[str, Any] = {
        "tool": {"driver": _driver(rules.values())},
        "automationDetails": {"id": _category(reports, len(outcomes))},
        "invocations": [_invocation(outcomes, artifacts, list(_left_out(outcomes, kept)))],
        "artifacts": [{"location": one.location(), "roles": ["analysisTarget"]} for one in places],
        "results": results,
        "columnKind": "unicodeCodePoints",
        "properties": {"traces": [_trace(one) for one in outcomes]},
    }
    bases = {base: {"uri": base} for one in artifacts for base in one.remote_bases}
    if bases:
        run["originalUriBaseIds"] = bases
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


# -- what was run ----------------------------------------------------------------------------------------------------


def _driver(rules: Iterable[Invariant]) -> dict[str, Any]:
    version = metadata.version("rl-lineage")
    return {
        "name": "lineage",
        "fullName": "lineage check",
        "version": version,
        "semanticVersion": version,
        "shortDescription": {"text": "Named invariants of an RL post-training step, checked over its trace."},
        "rules": [_rule(one) for one in rules],
    }


def _rule(one: Invariant) -> dict[str, Any]:
    says, causes = one.says or one.name, one.causes or "not written down"
    text = f"{says}\nUsually: {causes}\nSource: {one.source or 'not written down'}"
    lines = [f"**{one.code}** {says}", f"**Usually:** {causes}", f"**Source:** {one.source or 'not written down'}"]
    if one.needs or one.fields:
        needs = ", ".join(f"`{name}`" for name in (*one.needs, *one.fields))
        lines.append(f"**Needs** the columns and fields {needs}; without them it is not applicable.")
    lines.append(f"`lineage explain {one.code}` says more.")
    return {
        "id": one.code,
        "name": shortened(one.name, 255),
        "shortDescription": {"text": shortened(one.name, _DESCRIPTION)},
        "fullDescription": {"text": shortened(says, _DESCRIPTION)},
        "help": {"text": text, "markdown": "\n\n".join(lines)},
        "defaultConfiguration": {"level": one.severity},
        "properties": {
            "tags": ["reinforcement-learning", one.family],
            "family": one.family,
            "precision": _PRECISION,
            "problem.severity": one.severity,
        },
    }


def _category(reports: Sequence[Report], traces: int) -> str:
    """``category/run``: two uploads of one category replace each other, so the category is the same every time."""
    run = _segment(reports[0].run_id) if traces == 1 and reports else ""
    return f"lineage-check/{run}"


def _invocation(outcomes: Sequence[Outcome], artifacts: Sequence[Artifact], left_out: list[Any]) -> dict[str, Any]:
    code = worst([one.exit_code for one in outcomes])
    notifications = [
        _notification(level, text, artifacts[at])
        for at, outcome in enumerate(outcomes)
        for level, text in _said(outcome)
    ]
    return {
        "executionSuccessful": not any(_unseen(one) for one in outcomes),
        "exitCode": int(code),
        "exitCodeDescription": code.name.lower(),
        "toolExecutionNotifications": notifications + left_out,
    }


def _unseen(outcome: Outcome) -> bool:
    """True when results may be missing, and nobody has allowed that."""
    if isinstance(outcome, Refused):
        return True
    incomplete = bool(outcome.state) or any(one.kind is Kind.INCOMPLETE for one in outcome.verdicts)
    return incomplete and not outcome.policy.allow_incomplete


def _said(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """Level and text of what is to be said of a trace beside its violations."""
    if isinstance(outcome, Refused):
        yield "error", outcome.message
        return
    if outcome.state:
        level = "error" if _unseen(outcome) else "warning"
        yield level, f"incomplete trace: {outcome.state}; complete steps are judged"
    yield from (("error", complaint) for complaint in outcome.complaints)
    yield from (("note", note) for note in outcome.notes)


def _notification(level: str, text: str, artifact: Artifact | None = None) -> dict[str, Any]:
    said: dict[str, Any] = {"level": level, "message": {"text": plain(text)}}
    if artifact is not None:
        said["locations"] = [{"physicalLocation": {"artifactLocation": artifact.location()}}]
    return said


def _trace(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, Refused):
        return {"path": str(outcome.path), "error": outcome.message, "exitCode": int(outcome.exit_code)}
    return {
        "path": str(outcome.path),
        "runId": outcome.run_id,
        "profile": outcome.profile.name,
        "rows": outcome.rows,
        "facts": outcome.facts,
        "steps": outcome.steps,
        "incomplete": outcome.state or None,
        "exitCode": int(outcome.exit_code),
        "verdicts": [
            {
                "code": one.code,
                "verdict": one.kind.value,
                "examined": one.examined,
                "violations": one.errors,
                "accepted": one.accepted,
                "warnings": one.warnings,
                "needed": one.needed or None,
            }
            for one in outcome.verdicts
        ],
    }


# -- what was found --------------------------------------------------------------------------------------------------


def _findings(report: Report) -> Iterator[_Finding]:
    """The violations of a report, the headline's code first, then the codes in the order they broke."""
    failed = [one for one in report.verdicts if one.violations]
    head = report.headline
    failed.sort(key=lambda one: (not _leads(head, one), min(each.ord for each in one.violations), one.code))
    for verdict in failed:
        first: dict[tuple[Any, ...], Violation] = {}
        count: dict[tuple[Any, ...], int] = {}
        for one in verdict.violations:
            same = (one.stage, one.op, one.field, one.key, one.severity, one.accepted)
            first.setdefault(same, one)
            count[same] = count.get(same, 0) + 1
        order = sorted(first, key=lambda same: first[same].accepted)
        yield from (_Finding(verdict, first[same], count[same]) for same in order)


def _leads(head: Headline | None, verdict: Verdict) -> bool:
    return head is not None and head.invariant.code == verdict.code


def _kept(found: Sequence[Sequence[_Finding]], limit: int) -> list[list[_Finding]]:
    """Within the limit: the first of every code of every trace before the second of any."""
    ranked: list[tuple[int, int, int, _Finding]] = []
    for at, findings in enumerate(found):
        seen: dict[str, int] = {}
        for finding in findings:
            rank = seen[finding.verdict.code] = seen.get(finding.verdict.code, -1) + 1
            ranked.append((rank, at, len(ranked), finding))
    kept = sorted(sorted(ranked, key=lambda item: item[:3])[:limit], key=lambda item: item[1:3])
    return [[finding for _, trace, _, finding in kept if trace == at] for at in range(len(found))]


def _left_out(outcomes: Sequence[Outcome], kept: Sequence[Sequence[_Finding]]) -> Iterator[dict[str, Any]]:
    """A note for each code of which not every violation is in a result."""
    for outcome, findings in zip(outcomes, kept, strict=True):
        for verdict in outcome.verdicts if isinstance(outcome, Report) else ():
            total = verdict.errors + verdict.warnings
            shown = sum(one.count for one in findings if one.verdict is verdict)
            if shown < total:
                said = (
                    f"{verdict.code}: {plural(total, 'violation')} in {outcome.path}, {shown:,} of them in the results"
                )
                yield _notification("note", said)


def _result(finding: _Finding, invariant: Invariant, known: bool) -> dict[str, Any]:
    """A result but for its place.

    Args:
        finding: what it says.
        invariant: what is broken.
        known: some violations of this check are accepted, so those that are not are new.
    """
    one = finding.violation
    result: dict[str, Any] = {
        "ruleId": invariant.code,
        # GitHub's check fails on errors: what is accepted must not be one there
        "level": "note" if one.accepted else one.severity,
        "message": {"text": _message(invariant, one)},
        "partialFingerprints": fingerprints(invariant.code, one),
        "occurrenceCount": finding.count,
        "properties": {
            "step": one.global_steps,
            "stage": one.stage,
            "op": one.op,
            "field": one.field,
            "key": one.key,
            "expected": one.expected,
            "actual": one.actual,
            "detail": one.detail,
            "runId": one.run_id,
            "process": one.process,
            "seq": one.seq,
        },
    }
    if one.accepted:
        why = "known from the baseline, or no more of them than are let through"
        result["suppressions"] = [{"kind": "external", "status": "accepted", "justification": why}]
    if known and one.severity == "error":
        result["baselineState"] = "unchanged" if one.accepted else "new"
    return result


def _message(invariant: Invariant, one: Violation) -> str:
    """A first sentence that stands alone: GitHub's lists show no more."""
    at = f" of {one.key}" if one.key is not None else ""
    detail = f" ({one.detail})" if one.detail else ""
    where = f"step {one.global_steps}, stage {one.stage}, {one.op} {one.field}{at}"
    said = (
        f"{invariant.name}: broken at {where}. Expected {one.expected}; actual {one.actual}{detail}. "
        f"Usually: {invariant.causes}"
    )
    return plain(said).replace("](", "] (")  # SARIF reads [text](target) as a link


def _location(one: Violation, artifact: Artifact, index: int) -> dict[str, Any]:
    parts = (f"step {one.global_steps}", one.stage, one.op, one.field)
    path = "/".join(map(_segment, parts))
    logical = [{"name": one.field, "fullyQualifiedName": path, "kind": "variable"}]
    if one.key is not None:
        logical.append({"name": one.key, "fullyQualifiedName": f"{path}/{_segment(one.key)}", "kind": "element"})
    return {
        "physicalLocation": {
            "artifactLocation": artifact.location() | {"index": index},
            # a Parquet file has no lines; GitHub shows no result without one
            "region": {"startLine": 1, "startColumn": 1, "endLine": 1, "endColumn": 1},
        },
        "logicalLocations": logical,
    }


def _segment(text: str) -> str:
    """One part of a path: a slash in it is none of the path's."""
    return text.replace("%", "%25").replace("/", "%2F")
