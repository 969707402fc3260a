"""Statistics and fingerprints equal the plain-Python definition bit for bit."""

from __future__ import annotations

import math
import struct
from dataclasses import fields
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineage.fingerprint import compose, fingerprint_long, fingerprint_rows, fingerprint_strings, reference_fingerprint
from lineage.statistics import Rows, row_statistics, tree_sum
from lineage.statistics.pairs import pair_statistics
from lineage.statistics.reference import reference_row, reference_sum
from lineage.statistics.rows import RowStatistics

FLOATS = {
    "float64": st.floats(width=64),
    "float32": st.floats(width=32),
    "float16": st.floats(width=16),
}
INTS = {
    "int64": st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-3, 60000)),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "uint8": st.integers(0, 255),
    "bool": st.booleans(),
}


def bits(value: float | int | list[int] | None) -> object:
    """A comparable image of a statistic: NaN equals NaN, 0.0 differs from -0.0."""
    if value is None:
        return None
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("<d", value)
    return value


def assert_equal_to_reference(rows: Rows, statistics: RowStatistics) -> None:
    """Compare every statistic of every row with the definition."""
    begin = 0
    for i, length in enumerate(rows.lengths.tolist()):
        piece = slice(begin, begin + length)
        begin += length
        expected = reference_row(
            rows.values[piece].tolist(),
            0 if rows.starts is None else int(rows.starts[i]),
            None if rows.valid is None else int(rows.valid[i]),
            None if rows.mask is None else rows.mask[piece].tolist(),
            None if rows.cuts is None else rows.cuts[i].tolist(),
        )
        for field in fields(RowStatistics):
            column = getattr(statistics, field.name)
            got = None if column is None else column[i].tolist()
            assert bits(got) == bits(expected[field.name]), (field.name, rows.values[piece])


@st.composite
def ragged(draw: st.DrawFn) -> Rows:
    """Ragged rows of one dtype, perhaps padded, perhaps masked."""
    name, elements = draw(st.sampled_from([*FLOATS.items(), *INTS.items()]))
    lists = draw(st.lists(st.lists(elements, max_size=40), min_size=1, max_size=6))
    lengths = np.array([len(x) for x in lists], dtype=np.int64)
    values = np.array([v for x in lists for v in x], dtype=name)
    starts = valid = mask = None
    if draw(st.booleans()):
        valid = np.array([draw(st.integers(0, n)) for n in lengths.tolist()], dtype=np.int64)
        if draw(st.booleans()):
            starts = np.array(
                [draw(st.integers(0, n - v)) for n, v in zip(lengths, valid, strict=True)], dtype=np.int64
            )
    if draw(st.booleans()):
        mask = np.array([draw(st.booleans()) for _ in range(len(values))], dtype=bool)
    cuts = None
    if draw(st.booleans()):
        ends = (lengths if valid is None else valid).tolist()
        cuts = np.array(
            [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2))) for n in ends], dtype=np.int64
        )
    return Rows(values, lengths, starts, valid, mask, cuts)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@given(ragged())
def test_row_statistics_equal_the_definition(rows: Rows) -> None:
    """numpy gives the bits of the plain-Python definition for any dtype, padding and mask."""
    assert_equal_to_reference(rows, row_statistics(rows))


@given(st.lists(st.floats(-1e6, 1e6), max_size=700))
def test_tree_sum_does_not_depend_on_neighbours(values: list[float]) -> None:
    """A row's sum is the same alone and between other rows, for rows longer than one leaf level."""
    row = np.array(values, dtype=np.float64)
    other = np.arange(33, dtype=np.float64)
    joined = np.concatenate([other, row, other])
    sums = tree_sum(joined, np.array([33, len(row), 33], dtype=np.int64))
    assert bits(float(sums[1])) == bits(reference_sum(values))


@given(st.lists(st.integers(-(2**40), 2**40)), st.lists(st.integers(-(2**40), 2**40)))
def test_fingerprint_composes(head: list[int], tail: list[int]) -> None:
    """H(a ++ b) follows from H(a), len(a) and H(b)."""
    whole = compose(reference_fingerprint(head), len(head), reference_fingerprint(tail))
    assert whole == reference_fingerprint(head + tail)


@given(st.lists(st.integers(0, 50000), min_size=2, max_size=50), st.data())
def test_fingerprint_sees_what_sums_do_not(tokens: list[int], data: st.DataObject) -> None:
    """Swapping two different tokens or dropping a trailing zero changes (length, H)."""
    i = data.draw(st.integers(0, len(tokens) - 1))
    j = data.draw(st.integers(0, len(tokens) - 1))
    swapped = list(tokens)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    assert (reference_fingerprint(swapped) == reference_fingerprint(tokens)) == (swapped == tokens)
    assert reference_fingerprint([*tokens, 0]) != reference_fingerprint(tokens)


@given(st.sampled_from(["float16", "float32", "float64"]), st.lists(st.floats(width=16), max_size=20))
def test_fingerprint_does_not_depend_on_dtype(dtype: str, values: list[float]) -> None:
    """The same numbers have the same fingerprint whatever the float width, -0.0 and NaN included."""
    row = np.array(values, dtype=dtype)
    got = fingerprint_rows(row, np.array([len(row)], dtype=np.int64))[0]
    assert int(got) == reference_fingerprint(values)


@given(st.lists(st.floats(width=32), max_size=60))
def test_long_rows_are_fingerprinted_block_by_block(values: list[float]) -> None:
    """Blocks compose to the fingerprint of the whole row."""
    with mock.patch("lineage.fingerprint._BLOCK", 7):
        assert fingerprint_long(np.array(values, dtype=np.float32)) == reference_fingerprint(values)


@given(
    st.lists(
        st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9), st.booleans()), max_size=20), min_size=1, max_size=4
    )
)
def test_pair_statistics_equal_the_definition(rows: list[list[tuple[float, float, bool]]]) -> None:
    """Differences are exact; correlations at shift 0, -1 and +1 are those of the counted tokens of the row alone."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    flat = [token for row in rows for token in row]
    a, b = (np.array([token[side] for token in flat], dtype=np.float64) for side in (0, 1))
    found = pair_statistics(a, b, lengths, np.array([token[2] for token in flat], dtype=bool))
    for i, row in enumerate(rows):
        differences = [abs(x - y) for x, y, counted in row if counted]
        assert found.n_in[i] == len(differences)
        assert found.n_equal[i] == sum(x == y for x, y, counted in row if counted)
        assert found.absdiff_sum[i] == reference_sum([abs(x - y) if counted else 0.0 for x, y, counted in row])
        assert found.absdiff_max[i] == max(differences) if differences else np.isnan(found.absdiff_max[i])
        for shift, column in ((0, found.corr0), (-1, found.corr_prev), (1, found.corr_next)):
            pairs = [
                (x, row[at + shift][1])
                for at, (x, _, counted) in enumerate(row)
                if counted and 0 <= at + shift < len(row) and row[at + shift][2]
            ]
            assert _close(column[i], pairs)


def _close(found: float, pairs: list[tuple[float, float]]) -> bool:
    """The correlation of the pairs, where both sides vary enough for it to be more than rounding."""
    sides = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    if sides.shape[1] < 2 or (sides.max(axis=1) == sides.min(axis=1)).any():
        return bool(np.isnan(found)) or bool((np.ptp(sides, axis=1) == 0).any())
    if (sides.std(axis=1) < 1e-6).any():
        return True
    return bool(abs(found - np.corrcoef(sides)[0, 1]) < 1e-6)


def test_fingerprint_of_strings_is_over_their_bytes() -> None:
    """A string is the sequence of its UTF-8 bytes; an empty one has fingerprint 0."""
    got = fingerprint_strings(["", "ab", "é"])
    assert got.tolist() == [reference_fingerprint(s.encode()) for s in ("", "ab", "é")]
    assert got[0] == 0
