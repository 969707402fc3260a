"""The SQL functions agree with the plain-Python fingerprint."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from lineage.fingerprint import compose as compose_one
from lineage.fingerprint import fingerprint_strings, reference_fingerprint
from lineage.traces.functions import compose, repeated, text_fingerprint

_TOKENS = st.lists(st.integers(-(2**40), 2**40), max_size=20)


@settings(deadline=None)
@given(st.lists(st.tuples(_TOKENS, _TOKENS), min_size=1, max_size=5))
def test_composition_is_the_fingerprint_of_the_concatenation(pairs):
    """H(a ++ b) from H(a), len(a) and H(b), for any contents, empty ones included."""
    heads = pa.array([reference_fingerprint(a) for a, _ in pairs], pa.uint64())
    lengths = pa.array([len(a) for a, _ in pairs], pa.int64())
    tails = pa.array([reference_fingerprint(b) for _, b in pairs], pa.uint64())
    assert compose(heads, lengths, tails).to_pylist() == [reference_fingerprint(a + b) for a, b in pairs]


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 2**64 - 1))
def test_long_heads_compose_without_a_table(head, length, tail):
    """A length beyond any table of powers gives the same number as modular exponentiation."""
    got = compose(pa.array([head], pa.uint64()), pa.array([length], pa.int64()), pa.array([tail], pa.uint64()))
    assert got.to_pylist() == [compose_one(head, length, tail)]


def test_a_repeated_number_is_the_row_of_it():
    """As the fingerprint of the row written out, for no times as well; a null or negative count gives null."""
    pairs = [(1, 5), (0, 3), (1, 0), (-7, 2), (0, None), (1, -1)]
    values, counts = (pa.array(column, pa.int64()) for column in zip(*pairs, strict=True))
    rows = [reference_fingerprint([value] * count) for value, count in pairs[:4]]
    assert repeated(values, counts).to_pylist() == [*rows, None, None]


def test_unknown_parts_compose_to_null():
    """A null or negative length is not a fingerprint."""
    one = pa.array([1, 1], pa.uint64())
    assert compose(one, pa.array([None, -1], pa.int64()), one).to_pylist() == [None, None]


@settings(deadline=None)
@given(st.lists(st.one_of(st.none(), st.text(max_size=12)), min_size=1, max_size=8))
def test_text_fingerprints_are_those_of_the_bytes(texts):
    """Each string over its UTF-8 bytes, whatever repeats; null stays null."""
    expected = [None if text is None else int(fingerprint_strings([text])[0]) for text in texts]
    assert text_fingerprint(pa.array(texts, pa.string())).to_pylist() == expected


def test_the_functions_are_callable_in_sql(trace_file):
    """compose and text_fingerprint are there for user SQL too."""
    from lineage.traces import open_trace

    with open_trace(trace_file) as trace:
        got = trace.sql("select compose(1::ubigint, 3, 5::ubigint), text_fingerprint('abc')").fetchall()[0]
    assert got == (compose_one(1, 3, 5), int(fingerprint_strings(["abc"])[0]))
