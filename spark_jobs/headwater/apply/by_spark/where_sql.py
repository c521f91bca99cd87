"""A predicate in Spark's SQL."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from decimal import Decimal
from typing import assert_never

from headwater.delta.tables import quoted
from headwater.predicate import Compared, Every, IsNull, OneOf, Predicate, Some, Value

_PLAIN = re.compile(r"[ !#-&(-\[\]-~]*")
"""Printable ASCII without quotes and backslashes: means the same under every setting of the session."""


def spark_condition(predicate: Predicate, alias: str) -> str:
    """The predicate over the columns of `alias`; false or NULL where it is not true."""
    match predicate:
        case Every(parts):
            return f"({' AND '.join(spark_condition(part, alias) for part in parts)})"
        case Some(parts):
            return f"({' OR '.join(spark_condition(part, alias) for part in parts)})"
        case IsNull(column, negated):
            return f"{alias}.{quoted(column)} IS {'NOT ' if negated else ''}NULL"
        case OneOf(column, values, negated):
            return f"{alias}.{quoted(column)} {'NOT ' if negated else ''}IN ({', '.join(_literals(values))})"
        case Compared(column, operator, value):
            return f"{alias}.{quoted(column)} {operator} {_literals([value])[0]}"
        case _:
            assert_never(predicate)


def _literals(values: Iterable[Value]) -> list[str]:
    return [_literal(value) for value in values]


def _literal(value: Value) -> str:
    if isinstance(value, bool | int):
        # The least bigint is none of its own: its minus is an operator.
        return str(value) if value != -(2**63) else f"({value + 1}L - 1)"
    if isinstance(value, Decimal):
        return f"{value:f}BD"
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return f"'{value}'"  # Delta leaves files unread by literals only, not by what is computed
    if isinstance(value, str):
        # By code points: no setting of the session changes what they mean.
        return f"decode(unhex('{value.encode().hex()}'), 'utf-8')"
    if isinstance(value, datetime):
        kind = "TIMESTAMP_NTZ" if value.tzinfo is None else "TIMESTAMP"
        return f"{kind}'{value.isoformat(' ')}'"
    return f"DATE'{value.isoformat()}'"
