"""``--json``: one JSON value on stdout, and nothing else there."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from decimal import Decimal

import typer


def print_json(value: object, indent: int | None = 2) -> None:
    """Print a value as JSON: dataclasses as objects, infinite and undefined numbers as null, the rest as text."""
    typer.echo(json.dumps(_plain(value), indent=indent, allow_nan=False, default=str))


def _plain(value: object) -> object:
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, float | Decimal):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(part) for part in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value
