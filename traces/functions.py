"""Functions the SQL over a trace may call: fingerprints of text, of repeated and of counting
numbers, and the composition law."""

from __future__ import annotations

from functools import cache

import duckdb
import numpy as np
import pyarrow as pa
from duckdb import DuckDBPyConnection

from lineage.fingerprint import compose as compose_one
from lineage.fingerprint import fingerprint_strings, image, mix_in_place, powers

# Beyond this many elements a table of powers costs more than raising R to the length one by one.
_TABLE = 1 << 20
# A count beyond it is no count of tokens.
_LONGEST = 1 << 26


def compose(head: pa.Array, head_length: pa.Array, tail: pa.Array) -> pa.Array:
    """``H(a ++ b) = H(a) + R^len(a) * H(b)`` modulo 2^64, element by element; a negative length gives null."""
    heads, tails, lengths = _numbers(head, 0), _numbers(tail, 0), _numbers(head_length, -1)
    known = lengths >= 0
    for one in (head, tail):
        if one.null_count:
            known &= _valid(one)
    longest = int(lengths.max(initial=0))
    if longest < _TABLE:
        result = powers(longest + 1)[np.maximum(lengths, 0)]
        result *= tails
        result += heads
    else:
        each = [compose_one(int(h), max(int(n), 0), int(t)) for h, n, t in zip(heads, lengths, tails, strict=True)]
        result = np.array(each, dtype=np.uint64)
    return pa.array(result, mask=None if known.all() else ~known)


def repeated(value: pa.Array, count: pa.Array) -> pa.Array:
    """Fingerprint of a whole number said ``count`` times, element by element: that of a mask of one author."""
    counts = _numbers(count, -1)
    known = counts >= 0
    if value.null_count:
        known &= _valid(value)
    terms = mix_in_place(image(_numbers(value, 0)))
    sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(powers(int(counts.max(initial=0))))])
    terms *= sums[np.maximum(counts, 0)]
    return pa.array(terms, mask=None if known.all() else ~known)


def counting(count: pa.Array) -> pa.Array:
    """Fingerprint of 0, 1, ..., ``count - 1``, element by element: that of the positions of a sequence.

    Null for no count, and for one that no sequence can have.
    """
    counts = _numbers(count, -1)
    known = (counts >= 0) & (counts < _LONGEST)
    wanted = np.where(known, counts, 0)
    # a power of two beyond the longest: few tables serve all calls
    return pa.array(_counted(1 << max(10, int(wanted.max(initial=0)).bit_length()))[wanted], mask=~known)


@cache
def _counted(size: int) -> np.ndarray:
    """Fingerprints of the first 0, 1, ..., ``size`` counting numbers."""
    terms = mix_in_place(image(np.arange(size))) * powers(size)
    return np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(terms, dtype=np.uint64)])


def text_fingerprint(text: pa.Array) -> pa.Array:
    """Fingerprint of each string over its UTF-8 bytes; null stays null."""
    whole = _whole(text)
    distinct = whole.dictionary_encode() if not pa.types.is_dictionary(whole.type) else whole
    prints = pa.array(fingerprint_strings(value or "" for value in distinct.dictionary.to_pylist()), pa.uint64())
    return prints.take(distinct.indices)


def register(con: DuckDBPyConnection) -> None:
    """Make the functions of this module callable in this connection's SQL."""
    number, whole, text = duckdb.type("UBIGINT"), duckdb.type("BIGINT"), duckdb.type("VARCHAR")
    con.create_function("compose", compose, [number, whole, number], number, type="arrow")
    con.create_function("repeated", repeated, [whole, whole], number, type="arrow")
    con.create_function("counting", counting, [whole], number, type="arrow")
    con.create_function("text_fingerprint", text_fingerprint, [text], number, type="arrow")


def _whole(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    if not isinstance(array, pa.ChunkedArray):
        return array
    return array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()


def _valid(array: pa.Array | pa.ChunkedArray) -> np.ndarray:
    return np.asarray(_whole(array).is_valid().to_numpy(zero_copy_only=False), dtype=bool)


def _numbers(array: pa.Array | pa.ChunkedArray, missing: int) -> np.ndarray:
    """The numbers of a vector of a query; it is short, so that a null to fill costs more than the sum itself."""
    whole = _whole(array)
    return np.asarray((pa.compute.fill_null(whole, missing) if whole.null_count else whole).to_numpy())
