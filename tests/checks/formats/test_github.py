"""GitHub workflow commands and the step summary: read as the runner reads them, within its caps."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given
from made import VIOLATION, failed, report, reports, violations

from lineage.checks.catalogue import catalogue
from lineage.checks.formats import step_summary
from lineage.checks.formats.github import PER_LEVEL, render
from lineage.checks.formats.plain import plain, shortened
from lineage.checks.policy import Policy


@dataclass(frozen=True)
class Command:
    """A workflow command as the runner understands it."""

    name: str
    properties: dict[str, str]
    data: str


def _command(line: str) -> Command | None:
    """What the runner (ActionCommand.TryParseV2) makes of a line of a log."""
    line = line.lstrip()
    if not line.startswith("::") or line.find("::", 2) < 0:
        return None
    info, data = line[2:].split("::", 1)
    name, _, listed = info.partition(" ")
    pairs = [part.split("=", 1) for part in listed.strip().split(",") if part]
    properties = {pair[0]: _unescaped(pair[1], ("\r", "\n", ":", ",")) for pair in pairs if len(pair) == 2}
    return Command(name, properties, _unescaped(data, ("\r", "\n")))


def _unescaped(text: str, marks: tuple[str, ...]) -> str:
    for mark in marks:
        text = text.replace(f"%{ord(mark):02X}", mark)
    return text.replace("%25", "%")


def _commands(*outcomes) -> list[Command]:
    return [found for line in render(outcomes).split("\n") if (found := _command(line)) is not None]


def test_a_good_trace_has_no_annotation(judged):
    """Only the report as text."""
    assert _commands(judged["good"]) == []
    assert render([judged["good"]]).startswith("ADV001")


def test_a_bad_trace_has_one_error_with_the_headline(judged):
    """Title, place and message are the headline's; the log shows the report as text too."""
    (command,) = _commands(judged["bad"])
    title = "MSK002 consumers use the rollout's mask: first broken at step 2, stage update_actor"
    assert command.name == "error"
    assert command.properties["title"] == title
    assert command.properties["line"] == "1"
    lines = command.data.split("\n")
    assert f"expected  {judged['bad'].headline.violation.expected}" in lines
    assert lines[-1] == f"{judged['bad'].verdict('MSK002').errors} violations in all"
    assert render([judged["bad"]]).startswith(title)


def test_what_stops_a_gate_beside_violations_is_an_error():
    """A trace that cannot be used, an incomplete one, and a required check that saw too little."""
    lacking = report(failed("KEY001"), state="step 3 torn", policy=Policy(require={"KEY001": 10}))
    said = [(one.name, one.properties["title"], one.data) for one in _commands(lacking)]
    assert said == [
        ("error", "lineage: the gate does not hold", "KEY001 is required to examine 10 facts and examined 9"),
        ("error", "lineage: incomplete trace", "step 3 torn; complete steps are judged"),
    ]


def test_unusable_traces_come_first(judged):
    """Before any headline, in the order given."""
    said = [one.properties["title"] for one in _commands(judged["bad"], judged["empty"], judged["missing"])]
    assert said[:2] == ["lineage: unusable trace"] * 2
    assert said[2].startswith("MSK002")


def test_what_stops_nothing_is_a_warning_or_a_notice():
    """Warnings of a code and an allowed incomplete trace warn; accepted violations and notes are notices."""
    one = report(
        failed("KEY001", replace(VIOLATION, severity="warning")),
        failed("KEY002", replace(VIOLATION, accepted=True)),
        state="step 3 torn",
        policy=Policy(allow_incomplete=True),
        notes=("2 known violations did not occur",),
    )
    said = [(each.name, each.data.split("\n")[-1]) for each in _commands(one)]
    assert said == [
        ("warning", "step 3 torn; complete steps are judged"),
        ("warning", "1 warning in all"),
        ("notice", "1 violation accepted: KEY002"),
        ("notice", "2 known violations did not occur"),
    ]


def test_there_is_one_annotation_a_code_and_ten_a_level():
    """The headline is first, whichever its code; the tenth says how many more there are."""
    codes = [one.code for one in catalogue()[:14]]
    assert len(codes) == 14
    verdicts = [failed(code, *[replace(VIOLATION, key=f"q_{at}_0", ord=50 - at) for at in range(3)]) for code in codes]
    head = replace(verdicts[13], violations=(replace(VIOLATION, ord=1),), errors=1)
    commands = _commands(report(*verdicts[:13], head))
    assert [one.name for one in commands] == ["error"] * PER_LEVEL
    assert commands[0].properties["title"].startswith(codes[13])
    assert commands[-1].properties["title"] == "lineage: 5 more of these"


def test_a_message_is_cut_where_the_runner_cuts_it():
    """4,096 characters, with a sign that something is missing."""
    (command,) = _commands(report(failed("KEY001", replace(VIOLATION, expected="x" * 9000))))
    assert len(command.data) == 4096
    assert command.data.endswith("…")


def test_a_line_of_the_log_cannot_be_a_command():
    """A path that looks like one is printed so that the runner passes it by."""
    text = render([report(failed("KEY001"), path="::add-mask::x", notes=("##[add-mask]y",))])
    assert "##[" not in text.split("\n::notice")[0]
    assert [one.name for one in map(_command, text.split("\n")) if one] == ["notice"]


@given(one=violations)
@example(
    one=replace(VIOLATION, key="%0A::stop-commands::x", expected="a\n::error::b", stage="x:y,z%3A", actual="\ud800")
)
def test_any_text_survives(one):
    """The runner reads one command, with every value in it; nothing in the trace makes another."""
    (command,) = _commands(report(failed("KEY001", one)))
    title = f"KEY001 trajectory keys parse: first broken at step 2, stage {plain(one.stage)}"
    assert command.properties["title"] == shortened(title, 255).rstrip()  # the runner trims the end
    for value in (one.key or "", one.expected, one.actual, one.detail or "", one.field):
        assert plain(value) in command.data


@given(one=reports())
def test_there_is_an_error_where_the_gate_fails(one):
    """An error annotation exactly where the exit code is not 0."""
    assert any(each.name == "error" for each in _commands(one)) == (one.exit_code != 0)


# -- the step summary ------------------------------------------------------------------------------------------------


def _cells(text: str, code: str) -> list[str]:
    """Cells of the last table row of this code, unescaped."""
    row = [line for line in text.splitlines() if line.startswith(f"| {code} |")][-1]
    return [html.unescape(re.sub("</?code>", "", cell)) for cell in row[2:-2].split(" | ")]


def test_the_summary_has_every_verdict_and_the_headline(judged):
    """A table row a code, the headline in a block of its own, the violations below."""
    text = step_summary.render([judged["good"], judged["bad"], judged["missing"]], 1 << 20)
    assert text.startswith("## lineage check: unusable\n")
    for code in (one.code for one in judged["good"].verdicts):
        assert text.count(f"| {code} | ") >= 2
    assert "```text\nMSK002 consumers use the rollout's mask: first broken at step 2" in text
    assert _cells(text, "MSK002")[:4] == ["MSK002", "error", "2", "update_actor"]
    assert "no such file" in text


def test_an_incomplete_trace_is_said_in_the_summary(judged):
    """With what is torn."""
    assert "incomplete trace: <code>step 3 torn" in step_summary.render([judged["incomplete"]], 1 << 20)


@pytest.mark.parametrize("room", [0, 20, 500, 5_000, 50_000])
def test_the_summary_never_outgrows_its_room(room):
    """It ends between two pieces and says that more did not fit."""
    many = [replace(VIOLATION, key=f"ключ_{at}_0") for at in range(1000)]
    text = step_summary.render([report(failed("KEY001", *many))], room)
    assert len(text.encode()) <= room
    assert not text or text.endswith("No more fits into a step summary.\n")


@given(one=violations)
@example(one=replace(VIOLATION, key="a|b`c", expected="</code><script>", actual="[x](y) @you #1 $z$", detail="\\|\n"))
def test_any_text_survives_in_the_summary(one):
    """A row keeps its ten cells and each its value; no mark-up of a value is left as such."""
    text = step_summary.render([report(failed("KEY001", one))], 1 << 20)
    cells = _cells(text, "KEY001")
    assert cells[3:] == [
        plain(part)
        for part in (one.stage, "forward", one.field, one.key or "", one.expected, one.actual, one.detail or "")
    ]
    table = text.split("### Violations")[1]
    assert not re.search(r"[`\[\]@]|<(?!/?code>)", table)
