"""The content fingerprint: order-aware, composable, the same for a value whatever its dtype.

``H(x) = sum_i mix(image(x_i) + R) * R^i  mod 2^64`` over the elements of one row, with ``mix`` the splitmix64 finaliser
and ``R`` odd. ``H(a ++ b) = H(a) + R^len(a) * H(b)``, so a window's fingerprint follows from two prefixes. Two contents
are equal when (length, H) are. It detects accidents, not adversaries; never truncate it, never XOR or add row hashes.

This module is the numpy implementation and the plain-Python reference the others are tested against.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

R = 0x9E3779B97F4A7C15
MASK64 = 0xFFFFFFFFFFFFFFFF
NAN_IMAGE = 0x7FF8000000000000

UInt64 = NDArray[np.uint64]
Int64 = NDArray[np.int64]

_BLOCK = 1 << 15  # elements: the working arrays of a block stay in the second-level cache

_R = np.uint64(R)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_NAN = np.uint64(NAN_IMAGE)


def image(values: NDArray[Any]) -> UInt64:
    """One 64-bit image a value: floats as float64 bits (-0.0 is 0.0, one NaN), integers sign-extended, bools 0 or 1.

    Args:
        values: any numeric array; a new array of the same shape is returned.
    """
    if values.dtype.kind == "f":
        wide = values.astype(np.float64)
        wide += 0.0  # -0.0 becomes 0.0
        bits = wide.view(np.uint64)
        nan = np.isnan(wide)
        if nan.any():
            bits[nan] = _NAN
        return bits
    if values.dtype.kind == "u" and values.dtype.itemsize == 8:
        return values.astype(np.uint64)
    return values.astype(np.int64).view(np.uint64)


def mix_in_place(z: UInt64) -> UInt64:
    """``mix(z + R)`` of every element, written over ``z``."""
    shifted = np.empty_like(z)
    z += _R
    np.right_shift(z, _S30, out=shifted)
    z ^= shifted
    z *= _M1
    np.right_shift(z, _S27, out=shifted)
    z ^= shifted
    z *= _M2
    np.right_shift(z, _S31, out=shifted)
    z ^= shifted
    return z


_powers: UInt64 = np.ones(1, dtype=np.uint64)


def powers(count: int) -> UInt64:
    """``R^0 .. R^(count-1)`` modulo 2^64. The table only grows and is shared."""
    global _powers
    if len(_powers) < count:
        size = max(count, 2 * len(_powers), 1024)
        table = np.full(size, _R, dtype=np.uint64)
        table[0] = 1
        _powers = np.multiply.accumulate(table)
    return _powers[:count]


def fingerprint_rows(values: NDArray[Any], lengths: Int64) -> UInt64:
    """Fingerprint of every row of a flat ragged array.

    Args:
        values: ``(sum(lengths),)`` elements, row after row.
        lengths: ``(rows,)`` elements of each row.

    Returns:
        ``(rows,)`` uint64; an empty row has fingerprint 0.
    """
    result = np.zeros(len(lengths), dtype=np.uint64)
    full = np.flatnonzero(lengths)
    if len(full) == 0:
        return result
    terms = mix_in_place(image(values))
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(len(terms)) - np.repeat(starts, lengths)
    terms *= powers(int(lengths.max()))[positions]
    result[full] = np.add.reduceat(terms, starts[full])
    return result


def chained_prefixes(fingerprints: UInt64, lengths: Int64, begins: Int64) -> UInt64:
    """Prefix fingerprints of sequences cut into pieces, from those of the pieces.

    Args:
        fingerprints, lengths: ``(pieces,)`` of each piece.
        begins: ``(pieces,)`` elements that come before it in its sequence; 0 is where a sequence begins.

    Returns:
        ``(pieces, 2)``: the fingerprint of what comes before the piece, and of that with the piece.
    """
    if len(fingerprints) == 0:
        return np.zeros((0, 2), dtype=np.uint64)
    terms = fingerprints * powers(int(begins.max()) + 1)[begins]
    ends = np.cumsum(terms, dtype=np.uint64)
    starts = ends - terms
    heads = np.maximum.accumulate(np.where(begins == 0, np.arange(len(begins)), 0))
    base = starts[heads]
    return np.stack([starts - base, ends - base], axis=1)


def fingerprint_long(values: NDArray[Any]) -> int:
    """Fingerprint of one long row, block by block: no array as long as the row is made.

    Args:
        values: ``(length,)`` elements, e.g. a weight matrix laid flat.
    """
    total = 0
    table = powers(_BLOCK)
    for begin in range(0, len(values), _BLOCK):
        terms = mix_in_place(image(values[begin : begin + _BLOCK]))
        terms *= table[: len(terms)]
        total += pow(R, begin, 1 << 64) * int(terms.sum(dtype=np.uint64))
    return total & MASK64


def fingerprint_bytes(items: Sequence[bytes]) -> tuple[UInt64, Int64]:
    """Fingerprints and lengths of byte strings, each byte one element."""
    lengths = np.fromiter(map(len, items), dtype=np.int64, count=len(items))
    return fingerprint_rows(np.frombuffer(b"".join(items), dtype=np.uint8), lengths), lengths


def fingerprint_strings(items: Iterable[str]) -> UInt64:
    """Fingerprints of strings over their UTF-8 bytes."""
    return fingerprint_bytes([item.encode("utf-8", "surrogatepass") for item in items])[0]


def canonical_json(value: Any) -> bytes:
    """The one spelling of an object: sorted keys, no spaces, UTF-8. What JSON cannot say is spelled by ``repr``."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=_plain).encode(
        "utf-8", "surrogatepass"
    )


def _plain(value: Any) -> Any:
    tolist = getattr(value, "tolist", None)  # numpy arrays and scalars, torch tensors
    return tolist() if callable(tolist) else repr(value)


def compose(head: int, head_length: int, tail: int) -> int:
    """Fingerprint of ``a ++ b`` from that of ``a``, its length, and that of ``b``."""
    return (head + pow(R, head_length, 1 << 64) * tail) & MASK64


def reference_image(value: float | int | bool) -> int:
    """Plain-Python :func:`image` of one value."""
    if isinstance(value, float):
        if value != value:
            return NAN_IMAGE
        return int(struct.unpack("<Q", struct.pack("<d", value + 0.0))[0])
    return int(value) & MASK64


def reference_fingerprint(values: Iterable[float | int | bool]) -> int:
    """Plain-Python fingerprint of one row: the definition, written out."""
    total = 0
    for i, value in enumerate(values):
        z = (reference_image(value) + R) & MASK64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
        z ^= z >> 31
        total = (total + z * pow(R, i, 1 << 64)) & MASK64
    return total
