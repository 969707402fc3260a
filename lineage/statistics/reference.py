"""The definition of every statistic in plain Python, one row at a time: slow, obvious, what the others must equal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lineage.fingerprint import reference_fingerprint

Number = float | int | bool
NAN = math.nan


def reference_sum(values: Sequence[float]) -> float:
    """Sum by a binary tree over positions, neighbours first, zero-padded to a power of two."""
    if not values:
        return 0.0
    level = [float(v) for v in values]
    level += [0.0] * ((1 << (len(level) - 1).bit_length()) - len(level))
    while len(level) > 1:
        level = [level[i] + level[i + 1] for i in range(0, len(level), 2)]
    return level[0] + 0.0


def _square(value: Number) -> float:
    # Python's float ** raises where IEEE multiplication gives infinity
    return float(value) * float(value)


def reference_row(
    values: Sequence[Number],
    start: int = 0,
    valid: int | None = None,
    mask: Sequence[bool] | None = None,
    cuts: Sequence[int] | None = None,
) -> dict[str, float | int | list[int] | None]:
    """All statistics of one row, by name; NaN, -1 and None stand for null as in ``RowStatistics``.

    Args:
        values: the container's elements.
        start: first valid element.
        valid: number of valid elements; None: the whole container.
        mask: one flag an element; None: no mask.
        cuts: positions within the valid elements at which to give prefix fingerprints.
    """
    end = len(values) if valid is None else start + valid
    window = [start <= i < end for i in range(len(values))]
    inside = list(mask) if mask is not None else window
    under = [float(v) for v, keep in zip(values, inside, strict=True) if keep]
    numbers = [v for v in under if not math.isnan(v)]
    nonzero = [i for i, v in enumerate(values) if v != 0]
    data = [v for v, keep in zip(values, window, strict=True) if keep]
    result: dict[str, float | int | list[int] | None] = {
        "fingerprint": reference_fingerprint(data),
        "sum": reference_sum([float(v) for v in values]),
        "first": float(values[0]) + 0.0 if values else NAN,
        "last": float(values[-1]) + 0.0 if values else NAN,
        "last_nnz": nonzero[-1] if nonzero else -1,
        "nnz": len(nonzero),
        "sum_in": reference_sum([float(v) if keep else 0.0 for v, keep in zip(values, inside, strict=True)]),
        "min_in": min(numbers) + 0.0 if numbers else NAN,
        "max_in": max(numbers) + 0.0 if numbers else NAN,
        "sum_sq_in": reference_sum([_square(v) if keep else 0.0 for v, keep in zip(values, inside, strict=True)]),
        "nonfinite": sum(not math.isfinite(v) for v in values),
        "nonfinite_in": sum(not math.isfinite(v) for v in under),
        "mask_sum": None,
        "mask_fingerprint": None,
        "nnz_out": None,
        "max_abs_out": None,
        "prefixes": None if cuts is None else [reference_fingerprint(data[:cut]) for cut in cuts],
    }
    if mask is not None:
        out = [abs(float(v)) for v, keep in zip(values, mask, strict=True) if not keep]
        out_numbers = [v for v in out if not math.isnan(v)]
        result["mask_sum"] = sum(mask)
        result["mask_fingerprint"] = reference_fingerprint([k for k, keep in zip(mask, window, strict=True) if keep])
        result["nnz_out"] = sum(v != 0 for v in out)
        result["max_abs_out"] = max(out_numbers) + 0.0 if out_numbers else NAN
    return result
