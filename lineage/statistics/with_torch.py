"""Row statistics by torch, for tensors that live on a device: the same bits as :mod:`lineage.statistics.with_numpy`.

In torch int64 wraps as uint64 does, a right shift of a negative number drags its sign along and has to be masked, and
sums of rows are differences of one wrapped running sum. Nothing is copied to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lineage.fingerprint import NAN_IMAGE, R

_LEAF = 16


def _signed(number: int) -> int:
    """The int64 with the bits of a uint64."""
    return number - (1 << 64) if number >= 1 << 63 else number


_R, _M1, _M2 = _signed(R), _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


@dataclass
class TensorStatistics:
    """One tensor of ``(rows,)`` a statistic, on the device of the content; nulls as in ``RowStatistics``.

    Fingerprints are int64 with the bits of the uint64.
    """

    fingerprint: Tensor
    sum: Tensor
    first: Tensor
    last: Tensor
    last_nnz: Tensor
    nnz: Tensor
    sum_in: Tensor
    min_in: Tensor
    max_in: Tensor
    sum_sq_in: Tensor
    nonfinite: Tensor
    nonfinite_in: Tensor
    mask_sum: Tensor | None = None
    mask_fingerprint: Tensor | None = None
    nnz_out: Tensor | None = None
    max_abs_out: Tensor | None = None


def image(values: Tensor) -> Tensor:
    """int64 image of each value: float64 bits (-0.0 is 0.0, one NaN), integers sign-extended, bools 0 or 1."""
    if values.is_floating_point():
        wide = values.double() + 0.0
        return torch.where(wide.isnan(), NAN_IMAGE, wide.view(torch.int64))
    return values.long()


def mix(z: Tensor) -> Tensor:
    """``mix(z + R)`` of every element, in wrapped int64 arithmetic."""
    z = z + _R
    z = (z ^ _shifted(z, 30)) * _M1
    z = (z ^ _shifted(z, 27)) * _M2
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, by: int) -> Tensor:
    """Logical right shift: torch's is arithmetic, so the sign's copies are masked off."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def powers(count: int, device: torch.device) -> Tensor:
    """``R^0 .. R^(count-1)`` modulo 2^64, by doubling."""
    table = torch.ones(1, dtype=torch.int64, device=device)
    step = R
    while len(table) < count:
        table = torch.cat([table, table * _signed(step)])
        step = step * step & ((1 << 64) - 1)
    return table[:count]


def tensor_statistics(values: Tensor, lengths: Tensor, mask: Tensor | None = None) -> TensorStatistics:
    """All statistics of every row of jagged content.

    Args:
        values: ``(sum(lengths),)`` elements, row after row.
        lengths: ``(rows,)`` int64 elements of each row.
        mask: ``(sum(lengths),)`` bools, or None.
    """
    rows = _Rows(lengths, len(values))
    x = values.double() + 0.0
    inside = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    nonzero, finite = values != 0, x.isfinite()
    under = torch.where(inside, x, 0.0)
    powers_here = powers(int(lengths.max()) if len(lengths) else 0, values.device)[rows.positions]
    result = TensorStatistics(
        fingerprint=rows.wrapped_sum(mix(image(values)) * powers_here),
        sum=tree_sum(x, lengths),
        first=rows.take(x, 0),
        last=rows.take(x, -1),
        last_nnz=rows.reduce(torch.where(nonzero, rows.positions, -1), "amax", -1),
        nnz=rows.wrapped_sum(nonzero.long()),
        sum_in=tree_sum(under, lengths),
        min_in=rows.extreme(x, inside, "amin"),
        max_in=rows.extreme(x, inside, "amax"),
        sum_sq_in=tree_sum(under * under, lengths),
        nonfinite=rows.wrapped_sum((~finite).long()),
        nonfinite_in=rows.wrapped_sum((~finite & inside).long()),
    )
    if mask is not None:
        result.mask_sum = rows.wrapped_sum(mask.long())
        result.mask_fingerprint = rows.wrapped_sum(mix(mask.long()) * powers_here)
        result.nnz_out = rows.wrapped_sum((nonzero & ~mask).long())
        result.max_abs_out = rows.extreme(x.abs(), ~mask, "amax")
    return result


class _Rows:
    """Row borders of flat content on a device."""

    def __init__(self, lengths: Tensor, total: int) -> None:
        self.lengths = lengths
        self.ends = lengths.cumsum(0)
        self.begins = self.ends - lengths
        self.row = torch.repeat_interleave(
            torch.arange(len(lengths), device=lengths.device), lengths, output_size=total
        )
        self.positions = torch.arange(total, device=lengths.device) - self.begins[self.row]

    def wrapped_sum(self, terms: Tensor) -> Tensor:
        running = torch.cat([terms.new_zeros(1), terms.cumsum(0)])
        return running[self.ends] - running[self.begins]

    def reduce(self, x: Tensor, how: str, empty: float) -> Tensor:
        start = torch.full((len(self.lengths),), empty, dtype=x.dtype, device=x.device)
        return start.scatter_reduce(0, self.row, x, how, include_self=False)

    def take(self, x: Tensor, which: int) -> Tensor:
        at = self.begins if which == 0 else self.ends - 1
        filled = torch.cat([x, x.new_zeros(1)])  # an empty row has no element to point at
        return torch.where(self.lengths > 0, filled[at.clamp(0, len(x))], torch.nan)

    def extreme(self, x: Tensor, keep: Tensor, how: str) -> Tensor:
        """Least or greatest element kept, NaN elements ignored; NaN where there is none."""
        keep = keep & ~x.isnan()
        neutral = torch.inf if how == "amin" else -torch.inf
        found = self.reduce(torch.where(keep, x, neutral), how, neutral)
        return torch.where(self.wrapped_sum(keep.long()) > 0, found, torch.nan)


def tree_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Row sums by the binary tree over positions that :func:`lineage.statistics.with_numpy.tree_sum` describes."""
    widths = lengths
    while True:
        padded = (widths + _LEAF - 1) // _LEAF * _LEAF
        shift = (padded.cumsum(0) - padded) - (widths.cumsum(0) - widths)
        total = len(values)
        row = torch.repeat_interleave(torch.arange(len(widths), device=widths.device), widths, output_size=total)
        wide = values.new_zeros(int(padded.sum()))
        wide[torch.arange(total, device=values.device) + shift[row]] = values
        values = wide.view(-1, _LEAF)
        for _ in range(4):
            values = values[:, 0::2] + values[:, 1::2]
        values = values.flatten()
        widths = padded // _LEAF
        if len(widths) == 0 or int(widths.max()) <= 1:
            break
    result = values.new_zeros(len(lengths))
    result[widths > 0] = values
    return result + 0.0
