"""What ``algorithm.rollout_correction`` rejects by: estimates of a divergence and their bounds, as the user names them.

verl's names and forms: ``rollout_rs`` is one estimate or several with commas, every one of which must be kept to;
``rollout_rs_threshold`` is one bound for all, or one each. The estimates themselves are in ``rollout_correction``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lineage.hooks import UserError

# level and estimator; the maximum of k1, which is signed, bounds nothing
REJECTIONS = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)


class RejectionError(UserError):
    """``rollout_rs`` or ``rollout_rs_threshold`` that cannot be read."""


@dataclass(frozen=True)
class RejectionRule:
    """One estimate with its bounds: what lies outside is rejected.

    Attributes:
        name: one of :data:`REJECTIONS`.
        lower, upper: bounds of the estimate, nats. Of k1 they are the logarithms of the ratios given; the others have
            no lower one.
    """

    name: str
    lower: float
    upper: float

    @property
    def level(self) -> str:
        """``token``, ``seq_sum``, ``seq_mean`` or ``seq_max``: whose estimate it is."""
        return self.name.rpartition("_")[0]

    @property
    def estimator(self) -> str:
        """``k1``, ``k2`` or ``k3``."""
        return self.name.rpartition("_")[2]


def rejection_rules(rollout_rs: str | None, threshold: float | str | None) -> list[RejectionRule]:
    """The rules of a configuration, none when ``rollout_rs`` is null.

    Args:
        rollout_rs: ``token_k1`` or ``token_k1,seq_mean_k3``.
        threshold: ``2.0``, ``0.5_2.0`` (k1 alone: both sides of the ratio; one number u stands for 1/u and u), or one
            of these for each rule, with commas.

    Raises:
        RejectionError: an unknown name, a bound that is missing, or one that is no number.
    """
    if rollout_rs is None:
        return []
    names = list(dict.fromkeys(name.strip() for name in rollout_rs.split(",") if name.strip()))
    unknown = [name for name in names if name not in REJECTIONS]
    if unknown or not names:
        raise RejectionError(f"{_KEY}={rollout_rs}: unknown; choose from {', '.join(REJECTIONS)}, several with commas")
    bounds = [] if threshold is None else [bound.strip() for bound in str(threshold).split(",") if bound.strip()]
    if len(bounds) not in (1, len(names)):
        raise RejectionError(
            f"{_KEY}_threshold={_null(threshold)}: {rollout_rs} needs one bound"
            + (f", or {len(names)} with commas" if len(names) > 1 else "")
        )
    bounds = bounds * len(names) if len(bounds) == 1 else bounds
    return [_rule(name, bound) for name, bound in zip(names, bounds, strict=True)]


_KEY = "algorithm.rollout_correction.rollout_rs"


def _rule(name: str, bound: str) -> RejectionRule:
    low, both, high = bound.partition("_")
    signed = name.endswith("k1")
    try:
        upper = float(high if both else low)
        lower = float(low) if both else 1 / upper
    except (ValueError, ZeroDivisionError):
        lower = upper = math.nan
    if not 0 < upper < math.inf or (both and not (signed and 0 < lower <= upper)) or (signed and lower > upper):
        wanted = "a number of at least 1, or lower_upper, both greater than 0" if signed else "a number greater than 0"
        raise RejectionError(f"{_KEY}_threshold={bound}: {name} needs {wanted}")
    return RejectionRule(name, math.log(lower), math.log(upper)) if signed else RejectionRule(name, -math.inf, upper)


def _null(value: float | str | None) -> str:
    return "null" if value is None else str(value)
