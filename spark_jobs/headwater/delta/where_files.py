"""A predicate in the lake: which rows it is true of, and which files may have some."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from functools import reduce
from typing import Any, Final, assert_never

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

from headwater.delta.data_files import column_batches
from headwater.delta.delta_log import DataFile
from headwater.delta.layout import Layout
from headwater.delta.partition_values import from_text
from headwater.predicate import Compared, Every, IsNull, OneOf, Predicate, Some, columns_of

Bool = npt.NDArray[np.bool_]

_COMPARE: Final = {"<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal}
_WIDEST_DECIMAL: Final = 38
_FLOAT_DIGITS: Final = 15
_MILLISECOND: Final = timedelta(milliseconds=1)


def columns_read(predicate: Predicate, schema: pa.Schema) -> pa.Schema:
    """The columns of `schema` that `matches` looks at."""
    return pa.schema([schema.field(name) for name in sorted(columns_of(predicate))])


def matches(predicate: Predicate, rows: pa.Table) -> Bool:
    """Which of `rows` the predicate is true of."""
    match predicate:
        case Every(parts):
            return reduce(np.logical_and, (matches(part, rows) for part in parts))
        case Some(parts):
            return reduce(np.logical_or, (matches(part, rows) for part in parts))
        case IsNull(column, negated):
            found = pc.is_valid(rows[column]) if negated else pc.is_null(rows[column])
        case OneOf(column, values, negated):
            values_there = _comparable(rows[column])
            found = pc.is_in(values_there, value_set=pa.array(values, values_there.type))
            if negated:
                found = pc.and_(pc.invert(found), pc.is_valid(values_there))
        case Compared(column, operator, value):
            values_there = _comparable(rows[column])
            found = pc.fill_null(_COMPARE[operator](values_there, pa.scalar(value, values_there.type)), False)
        case _:
            assert_never(predicate)
    return np.asarray(found.to_numpy(zero_copy_only=False) if isinstance(found, pa.Array) else found, dtype=np.bool_)


def rows_matching(predicate: Predicate, folder: str, file: DataFile, layout: Layout, schema: pa.Schema) -> BitMap:
    """The rows of the file that the predicate is true of, those that are gone included. `schema`: the
    columns of `columns_read`."""
    rows, first = BitMap(), 0
    if may_match(predicate, file, layout, schema):
        for part in column_batches(folder, file, schema, layout):
            rows |= BitMap((np.flatnonzero(matches(predicate, part)) + first).astype(np.uint32))
            first += part.num_rows
    return rows


def may_match(predicate: Predicate, file: DataFile, layout: Layout, schema: pa.Schema) -> bool:
    """Whether the file's partition values and statistics leave it possible that one of its rows matches. `schema`: the
    columns of `columns_read`."""
    stats = json.loads(file.stats or "{}", parse_float=Decimal)

    def bounds(column: str) -> tuple[Any, Any]:
        name, kind = layout.in_files(column), schema.field(column).type
        if column in layout.partition_by:
            value = from_text(file.partition_values.get(name), kind)
            return value, value
        low, high = stats.get("minValues", {}).get(name), stats.get("maxValues", {}).get(name)
        return _bound(low, kind), _bound(high, kind, highest=True)

    return _may_match(predicate, bounds)


def _may_match(predicate: Predicate, bounds: Callable[[str], tuple[Any, Any]]) -> bool:
    if isinstance(predicate, Every):
        return all(_may_match(part, bounds) for part in predicate.parts)
    if isinstance(predicate, Some):
        return any(_may_match(part, bounds) for part in predicate.parts)
    low, high = bounds(predicate.column)
    if low is None or high is None or isinstance(predicate, IsNull):
        return True
    if isinstance(predicate, OneOf):
        return predicate.negated or any(low <= value <= high for value in predicate.values)
    value = predicate.value
    match predicate.operator:
        case "<":
            return bool(low < value)
        case "<=":
            return bool(low <= value)
        case ">":
            return bool(high > value)
        case ">=":
            return bool(high >= value)


def _comparable(values: Any) -> Any:
    """Numbers as the widest of their kind: a literal may be larger than the column's type."""
    if pa.types.is_decimal(values.type):
        return values.cast(pa.decimal128(_WIDEST_DECIMAL, values.type.scale))
    return values.cast(pa.int64()) if pa.types.is_integer(values.type) else values


def _bound(value: Any, kind: Any, *, highest: bool = False) -> Any:
    """A bound out of Delta's statistics. Times in them are cut off to the millisecond, by some writers downwards."""
    if pa.types.is_decimal(kind):
        # A JSON number of somebody who knows but floats: they keep fifteen digits.
        return Decimal(value) if isinstance(value, int | Decimal) and kind.precision <= _FLOAT_DIGITS else None
    if not isinstance(value, str) or pa.types.is_string(kind):
        return value if isinstance(value, int | str) and not isinstance(value, bool) else None
    if pa.types.is_date(kind):
        return date.fromisoformat(value)
    found = datetime.fromisoformat(value)
    if (found.tzinfo is None) != (kind.tz is None):
        return None
    try:
        return found + _MILLISECOND if highest else found
    except OverflowError:
        return None
