"""Known violations: a file that accepts what a trainer does today, so that only what is new fails.

A violation is known by what does not change from one run to the next: its code, the place in the step (stage, op,
field), and under ``match = "key"`` also its step and key. Keys are the same in every run of one seed where the trainer
draws its uids from it; where it does not, ``match = "site"`` knows so many violations of a place, whichever its keys.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lineage.checks.policy import Match
from lineage.checks.report import Report
from lineage.checks.verdict import Kind, Verdict, Violation
from lineage.errors import UserError

FORMAT_VERSION = 1

Place = tuple[str, str, str, str]  # code, stage, op, field
At = tuple[int, str]  # step, key ("" for the row as a whole)


class BaselineError(UserError):
    """A baseline file that cannot be read or written."""


@dataclass(frozen=True)
class Known:
    """What is accepted at one place.

    Attributes:
        count: violations there.
        at: step and key of the first of them, with how often; a report keeps a thousand a code, so there may be fewer.
    """

    count: int = 0
    at: Mapping[At, int] = field(default_factory=dict)

    @property
    def unlisted(self) -> int:
        """Violations of which only the number is known."""
        return self.count - sum(self.at.values())

    def at_least(self, other: Known) -> Known:
        """What either accepts: of each count the greater."""
        return Known(max(self.count, other.count), Counter(self.at) | Counter(other.at))


@dataclass(frozen=True)
class Baseline:
    """The accepted violations.

    Attributes:
        match: how a violation is recognised.
        known: what is accepted, by place.
    """

    match: Match = Match.KEY
    known: Mapping[Place, Known] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Baseline:
        """Read a baseline file.

        Raises:
            BaselineError: there is none, or it is not one.
        """
        try:
            said = json.loads(path.read_text("utf-8"))
            if said["format"] != FORMAT_VERSION:
                raise BaselineError(f"{path}: baseline format {said['format']}, this lineage reads {FORMAT_VERSION}")
            return cls(Match(said["match"]), dict(map(_known, said["violations"])))
        except FileNotFoundError as error:
            raise BaselineError(f"{path}: no such baseline; make it with --update-baseline") from error
        except OSError as error:
            raise BaselineError(f"{path}: cannot read the baseline: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BaselineError(
                f"{path}: not a baseline file; delete it, then make it anew with --update-baseline"
            ) from error

    @classmethod
    def of(cls, reports: Iterable[Report], match: Match = Match.KEY) -> Baseline:
        """A baseline that accepts every violation of these reports."""
        known: dict[Place, Known] = {}
        for report in reports:
            for verdict in report.verdicts:
                for place, new in _places(verdict).items():
                    known[place] = known.get(place, Known()).at_least(new)
        return cls(match, known)

    def keeping(self, other: Baseline, reports: Iterable[Report]) -> Baseline:
        """This baseline of these reports, and of the ``other`` what they could not see again: codes that were not run,
        or did not judge every step.
        """
        seen = _seen(reports)
        known = dict(self.known)
        for place, before in other.known.items():
            if place[0] not in seen:
                known[place] = known.get(place, Known()).at_least(before)
        return replace(self, known=known)

    def save(self, path: Path) -> None:
        """Write the file, one line a place and a violation, so that a change to it reads well in a review.

        Raises:
            BaselineError: it cannot be written.
        """
        said = {
            "format": FORMAT_VERSION,
            "match": self.match.value,
            "violations": [
                dict(zip(("code", "stage", "op", "field"), place, strict=True))
                | {"count": known.count}
                | ({} if self.match is Match.SITE else {"at": [[*at, times] for at, times in sorted(known.at.items())]})
                for place, known in sorted(self.known.items())
            ],
        }
        try:
            path.write_text(_lines(said), "utf-8")
        except OSError as error:
            raise BaselineError(f"{path}: cannot write the baseline: {error.strerror or error}") from error

    def accept(self, verdict: Verdict) -> Verdict:
        """The verdict with its known violations accepted; at a place that has more than are known, under
        ``match = "site"``, none is: which of them are new cannot be told.
        """
        now = _places(verdict)
        known = {place: self.known.get(place, Known()) for place in now}
        if self.match is Match.SITE:
            whole = {place for place, found in now.items() if found.count <= known[place].count}
            marked = [one.severity == "error" and _place(verdict.code, one) in whole for one in verdict.violations]
            accepted = sum(now[place].count for place in whole)
        else:
            left = {place: Counter(known[place].at) for place in now}
            marked = [
                one.severity == "error" and _took(left[_place(verdict.code, one)], one) for one in verdict.violations
            ]
            accepted = sum(marked) + sum(min(found.unlisted, known[place].unlisted) for place, found in now.items())
        pairs = zip(verdict.violations, marked, strict=True)
        return replace(verdict, violations=tuple(replace(one, accepted=yes) for one, yes in pairs), accepted=accepted)

    def gone(self, reports: Sequence[Report]) -> int:
        """Known violations that occurred in none of these traces, of the codes that would have seen them."""
        now = Baseline.of(reports).known
        seen = _seen(reports)
        return sum(
            max(0, known.count - now.get(place, Known()).count)
            for place, known in self.known.items()
            if place[0] in seen
        )


def _seen(reports: Iterable[Report]) -> set[str]:
    """Codes that judged every step of every trace."""
    verdicts = [(verdict, report.state) for report in reports for verdict in report.verdicts]
    blind = {one.code for one, state in verdicts if state or one.kind not in (Kind.PASS, Kind.FAIL)}
    return {one.code for one, _ in verdicts} - blind


def _took(left: Counter[At], one: Violation) -> bool:
    """Use up one known violation of this step and key, if there is one."""
    left[_at(one)] -= 1
    return left[_at(one)] >= 0


def _at(one: Violation) -> At:
    return (one.global_steps, one.key or "")


def _place(code: str, one: Violation) -> Place:
    return (code, one.stage, one.op, one.field)


def _places(verdict: Verdict) -> dict[Place, Known]:
    at: dict[Place, Counter[At]] = {}
    for one in verdict.violations:
        if one.severity == "error":
            at.setdefault(_place(verdict.code, one), Counter())[_at(one)] += 1
    places = {(verdict.code, site.stage, site.op, site.field): site.count for site in verdict.sites}
    return {place: Known(count, at.get(place, Counter())) for place, count in places.items()}


def _known(said: Mapping[str, Any]) -> tuple[Place, Known]:
    place = (str(said["code"]), str(said["stage"]), str(said["op"]), str(said["field"]))
    return place, Known(int(said["count"]), {(int(step), str(key)): int(n) for step, key, n in said.get("at", ())})


def _lines(said: Mapping[str, Any]) -> str:
    head = f'{{\n "format": {said["format"]},\n "match": "{said["match"]}",\n "violations": ['
    places = []
    for place in said["violations"]:
        at = place.pop("at", None)
        text = json.dumps(place)
        if at:
            text = text[:-1] + ', "at": [\n   ' + ",\n   ".join(map(json.dumps, at)) + "\n  ]}"
        places.append(f"\n  {text}")
    return head + ",".join(places) + ("\n ]\n}\n" if places else "]\n}\n")
