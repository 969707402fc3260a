"""Which stored types stand for a column of the schema: other writers have other strings, lists and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyarrow import types

from lineage.schema import COLUMNS


def unfit(stored: Iterable[pa.Field]) -> Iterator[str]:
    """The columns whose stored type cannot be read as the schema's, each with both, for a person to read."""
    wanted = {column.name: column.arrow_type for column in COLUMNS}
    for field in stored:
        if field.name in wanted and not fits(field.type, wanted[field.name]):
            yield f"column {field.name} is {field.type}, expected {wanted[field.name]}"


def fits(stored: pa.DataType, wanted: pa.DataType) -> bool:
    """True when values of one type can be read as the other without a loss."""
    if types.is_dictionary(stored):
        return fits(stored.value_type, wanted)
    if types.is_null(stored):
        return not types.is_nested(wanted)
    if types.is_string(wanted):
        return bool(types.is_string(stored) or types.is_large_string(stored))
    if types.is_boolean(wanted):
        return bool(types.is_boolean(stored))
    if wanted == pa.uint64():  # a hash: a float has lost its end
        return bool(types.is_integer(stored))
    if types.is_integer(wanted) or types.is_floating(wanted):
        return bool(types.is_integer(stored) or types.is_floating(stored))
    if types.is_map(wanted):
        return bool(types.is_map(stored)) and fits(stored.key_type, wanted.key_type)
    if types.is_list(wanted):
        return bool(types.is_list(stored) or types.is_large_list(stored)) and fits(stored.value_type, wanted.value_type)
    return bool(types.is_struct(stored)) and all(
        (place := stored.get_field_index(field.name)) >= 0 and fits(stored.field(place).type, field.type)
        for field in wanted
    )
