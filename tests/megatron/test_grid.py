"""Our formulas against the process groups that megatron-core builds."""

from __future__ import annotations

import copy
import itertools

import pytest
from megatron_environment import VARIABLE, NoEnvironmentError, megatron_python
from megatron_grid import WORLDS, ask, points, same, table

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("megatron")]


@pytest.fixture(scope="module")
def grid():
    """What was asked, and what the real groups are."""
    try:
        megatron_python()
    except NoEnvironmentError as error:
        pytest.skip(f"no environment with megatron-core: {error}")
    asked = points()
    return asked, ask(asked)


def test_the_formulas_are_those_of_the_real_groups(grid, capsys):
    """DP, expert DP, the ranks of each group and each rank's place are Megatron's; what it refuses, so do we."""
    asked, answered = grid
    lines = table(asked, answered)
    with capsys.disabled():
        print("", *lines, sep="\n")
    assert not [line for line in lines if line.endswith("DIFFERS")]
    built = [point for point, said in zip(asked, answered, strict=True) if "refused" not in said[0]]
    assert {point.world for point in built} == set(WORLDS)
    assert len(built) > 100
    assert len(built) < len(asked)


def test_real_replicas_are_disjoint(grid):
    """Every rank is in one dense data-parallel group, and its place there is the replica it belongs to."""
    for point, said in zip(*grid, strict=True):
        if "refused" in said[0]:
            continue
        groups = {tuple(rank["dp_group"]) for rank in said}
        assert sorted(itertools.chain(*groups)) == list(range(point.world))
        if not point.dynamic_cp:
            replicas = point.layout().replicas()
            assert all(rank in replicas[at] for group in groups for at, rank in enumerate(group))


def test_one_rank_in_another_group_is_seen(grid):
    """The comparison is not blind: a swap of two ranks between groups, another size, another place."""
    asked, answered = grid
    at = next(i for i, point in enumerate(asked) if (point.world, point.tp, point.pp, point.cp) == (8, 2, 2, 1))
    point, said = asked[at], answered[at]
    assert same(point, said)
    for name, value in {"dp": 4, "dp_group": [0, 3], "expert_dp": 9, "expert_dp_group": [1], "coord": {}}.items():
        other = copy.deepcopy(said)
        other[0][name] = value
        assert not same(point, other), name


def test_a_python_that_is_not_there_is_said(monkeypatch):
    """A wrong name is an error, and no reason to skip."""
    monkeypatch.setenv(VARIABLE, "/nowhere/python")
    with pytest.raises(FileNotFoundError, match="/nowhere/python is no file"):
        megatron_python()
