"""What makes two keys the same key: one meaning for every part of Headwater.

A key is what the lake holds of it: two keys are the same exactly if their values in the lake are. That is also what the
log speaks of: an UPDATE carries the old key whenever a byte of it changes, also where the source's index finds both
equal (docs/decisions/0049-a-key-is-what-the-lake-holds.md has the measurement and the table by type). Of floats
several bit patterns are one value, as in PostgreSQL and in Spark: every NaN is NaN, and -0 is 0.

PostgreSQL's own equality is never finer than this one, but coarser for some types: `citext`, nondeterministic
collations, `numeric` without a scale, `char` without a length, `interval`, `jsonb`. A question to the source by key may
therefore bring more rows than were asked for; what asks keeps those that `headwater.delta.index.codes.encode` finds.
"""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc


def comparable(values: Any) -> Any:
    """A key column (array or chunked array) as values of which those of the same key, and no others, are identical, of
    a type that Arrow numbers: lists become bytes."""
    kind = values.type
    if pa.types.is_floating(kind):
        return pc.if_else(pc.is_nan(values), pa.scalar(math.nan, kind), pc.add(values, pa.scalar(0.0, kind)))
    if pa.types.is_list(kind):
        return pa.array([None if one is None else _written(one) for one in values.to_pylist()], pa.binary())
    return values


def _written(elements: list[Any]) -> bytes:
    """Other elements are written otherwise. Adding 0.0 makes -0 a 0, and every NaN is written alike."""
    return repr([one + 0.0 if isinstance(one, float) else one for one in elements]).encode()
