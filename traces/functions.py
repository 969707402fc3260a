"""Functions the SQL over a trace may call: fingerprints of text, and the composition law."""

from __future__ import annotations

import duckdb
import numpy as np
import pyarrow as pa
from duckdb import DuckDBPyConnection

from lineage.fingerprint import compose as compose_one
from lineage.fingerprint import fingerprint_strings, powers

# Beyond this many elements a table of powers costs more than raising R to the length one by one.
_TABLE = 1 << 20


def compose(head: pa.Array, head_length: pa.Array, tail: pa.Array) -> pa.Array:
    """``H(a ++ b) = H(a) + R^len(a) * H(b)`` modulo 2^64, element by element; a negative length gives null."""
    heads, tails = _unsigned(head), _unsigned(tail)
    lengths = np.asarray(pa.compute.fill_null(_whole(head_length), -1).to_numpy(zero_copy_only=False))
    known = (lengths >= 0) & _valid(head) & _valid(tail)
    if len(lengths) and lengths.max(initial=0) < _TABLE:
        table = powers(int(lengths.max(initial=0)) + 1)
        result = heads + table[np.where(known, lengths, 0)] * tails
    else:
        each = [compose_one(int(h), max(int(n), 0), int(t)) for h, n, t in zip(heads, lengths, tails, strict=True)]
        result = np.array(each, dtype=np.uint64)
    return pa.array(result, mask=~known)


def text_fingerprint(text: pa.Array) -> pa.Array:
    """Fingerprint of each string over its UTF-8 bytes; null stays null."""
    whole = _whole(text)
    distinct = whole.dictionary_encode() if not pa.types.is_dictionary(whole.type) else whole
    prints = pa.array(fingerprint_strings(value or "" for value in distinct.dictionary.to_pylist()), pa.uint64())
    return prints.take(distinct.indices)


def register(con: DuckDBPyConnection) -> None:
    """Make ``compose(head, length, tail)`` and ``text_fingerprint(text)`` callable in this connection's SQL."""
    number, whole, text = duckdb.type("UBIGINT"), duckdb.type("BIGINT"), duckdb.type("VARCHAR")
    con.create_function("compose", compose, [number, whole, number], number, type="arrow")
    con.create_function("text_fingerprint", text_fingerprint, [text], number, type="arrow")


def _whole(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _valid(array: pa.Array | pa.ChunkedArray) -> np.ndarray:
    return np.asarray(_whole(array).is_valid().to_numpy(zero_copy_only=False), dtype=bool)


def _unsigned(array: pa.Array | pa.ChunkedArray) -> np.ndarray:
    filled = pa.compute.fill_null(_whole(array), 0)
    return np.asarray(filled.to_numpy(zero_copy_only=False), dtype=np.uint64)
