"""The grid: which parallel sizes are asked of megatron-core, what its groups are, and what our formula says.

``python tests/megatron/megatron_grid.py`` prints the table; exits 1 where the two differ.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_environment import megatron_python

from lineage.trainer.engine.topology import MegatronLayout, TopologyError

WORLDS = (2, 4, 8)
Said = list[dict[str, Any]]


@dataclass(frozen=True)
class Point:
    """One layout to ask for. ``etp`` None leaves the experts' tensor parallel size to Megatron."""

    world: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int | None = None
    dynamic_cp: bool = False

    def layout(self) -> MegatronLayout:
        """As our formulas have it; raises TopologyError where they refuse it."""
        return MegatronLayout(**asdict(self))


def points() -> list[Point]:
    """All sizes that divide 2, 4 and 8 ranks, experts with a tensor parallel size of their own, and some too large."""
    return [point for world in WORLDS for point in _points_of(world)]


def _points_of(world: int) -> Iterator[Point]:
    sizes = [1 << power for power in range(world.bit_length())]
    for tp, pp, cp in itertools.product(sizes, repeat=3):
        if world % (tp * pp * cp):
            continue
        for ep in sizes:  # one size too large is asked for as well: Megatron is to refuse it
            if tp * pp * ep <= 2 * world:
                yield Point(world, tp, pp, cp, ep)
            if tp > 1 and cp == 1 and pp * ep <= world:
                yield Point(world, tp, pp, cp, ep, etp=1)
    yield Point(world, 3, 1, 1, 1)
    yield Point(world, 2, 1, world, 1)
    yield Point(world, 1, 1, 1, 3)
    yield Point(world, 1, 1, 1, 1, dynamic_cp=True)


def ask(asked: list[Point]) -> list[Said]:
    """What the ranks of each point say (``megatron_ranks``), by rank.

    Raises:
        NoEnvironmentError: there is no megatron-core here, and it cannot be installed.
    """
    script = Path(__file__).with_name("megatron_ranks.py")
    with tempfile.TemporaryDirectory() as name:
        question, answer = Path(name, "points.json"), Path(name, "answers.json")
        question.write_text(json.dumps([asdict(point) for point in asked]))
        command = [str(megatron_python()), str(script), str(question), str(answer)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{script.name} failed:\n{done.stderr[-4000:]}")
        said: list[Said] = json.loads(answer.read_text())
    return said


def same(point: Point, said: Said) -> bool:
    """Megatron and the formulas refuse the same sizes, and have the same groups and places."""
    try:
        layout = point.layout()
    except TopologyError:
        return all("refused" in rank for rank in said)
    if any("refused" in rank for rank in said):
        return False
    dense, expert = layout.data_parallel_groups(), layout.expert_data_parallel_groups()
    # under dynamic context parallel the groups are there as without it; the batch is not dealt by them
    static = replace(layout, dynamic_cp=False)
    places = [static.coord(rank) for rank in range(point.world)]
    return (
        _once(rank["dp_group"] for rank in said) == dense
        and _once(rank["expert_dp_group"] for rank in said) == expert
        and {rank["dp"] for rank in said} == {len(dense[0])}
        and {rank["expert_dp"] for rank in said} == {layout.expert_data_parallel_size}
        and [rank["coord"] for rank in said] == places
    )


def _once(groups: Iterator[list[int]]) -> list[list[int]]:
    return sorted(list(group) for group in {tuple(group) for group in groups})


def table(asked: list[Point], answered: list[Said]) -> list[str]:
    """A line a point: its sizes, DP and expert DP of the real groups, and by formula."""
    head = "world  TP  PP  CP  EP  ETP |  DP  groups | formula | expert DP  formula |"
    return [head, "-" * len(head), *itertools.starmap(_line, zip(asked, answered, strict=True))]


def _line(point: Point, said: Said) -> str:
    etp = point.tp if point.etp is None else point.etp
    line = f"{point.world:5} {point.tp:3} {point.pp:3} {point.cp:3} {point.ep:3} {etp:4} | "
    try:
        layout = point.layout()
        formula, expert = str(layout.data_parallel_size), str(layout.expert_data_parallel_size)
    except TopologyError:
        formula = expert = "-"
    if "refused" in said[0]:
        line += f"  -       - | {formula:>7} | {'-':>9}  {expert:>7} | refused"
    else:
        groups = len({tuple(rank["dp_group"]) for rank in said})
        real, experts = said[0]["dp"], said[0]["expert_dp"]
        line += f"{real:3}  {groups:6} | {formula:>7} | {experts:9}  {expert:>7} |"
    line += " dynamic CP: one replica" if point.dynamic_cp else ""
    return line + ("" if same(point, said) else " DIFFERS")


def main() -> None:
    """Ask, print, and say whether all agree."""
    asked = points()
    answered = ask(asked)
    print("\n".join(table(asked, answered)))
    wrong = sum(not same(*both) for both in zip(asked, answered, strict=True))
    built = sum("refused" not in said[0] for said in answered)
    print(f"{built} layouts built, {len(asked) - built} refused by both; {wrong} differ")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
