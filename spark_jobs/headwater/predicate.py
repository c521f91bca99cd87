"""A condition on the columns of a row, as source and lake evaluate it alike: a tree without NOT.

A row is of the predicate or it is not. SQL's third truth value is not needed: NOT is taken to the leaves when the text
is read (`headwater.pipeline_file.where_text`), no leaf but `IsNull` is true of NULL, and AND and OR of what is not true
are not true. The columns are of types whose values compare alike on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Final, Literal

Value = int | str | date | datetime | Decimal
"""A uuid is the text of its canonical form; a moment with a zone is in UTC."""
Operator = Literal["<", "<=", ">", ">="]
_OPPOSITE: Final[dict[Operator, Operator]] = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}


@dataclass(frozen=True, slots=True)
class Compared:
    column: str
    operator: Operator
    value: Value


@dataclass(frozen=True, slots=True)
class OneOf:
    """Equal to one of `values`; `negated`: to none of them, and not NULL."""

    column: str
    values: tuple[Value, ...]
    negated: bool = False


@dataclass(frozen=True, slots=True)
class IsNull:
    column: str
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Every:
    parts: tuple[Predicate, ...]


@dataclass(frozen=True, slots=True)
class Some:
    parts: tuple[Predicate, ...]


Predicate = Compared | OneOf | IsNull | Every | Some


def negation(predicate: Predicate) -> Predicate:
    """True of the rows that SQL's NOT would make it true of: not of those where it is unknown."""
    match predicate:
        case Compared(column, operator, value):
            return Compared(column, _OPPOSITE[operator], value)
        case OneOf(column, values, negated):
            return OneOf(column, values, not negated)
        case IsNull(column, negated):
            return IsNull(column, not negated)
        case Every(parts):
            return Some(tuple(map(negation, parts)))
        case Some(parts):
            return Every(tuple(map(negation, parts)))


def columns_of(predicate: Predicate) -> set[str]:
    """The columns that it names."""
    if isinstance(predicate, Every | Some):
        return set().union(*map(columns_of, predicate.parts))
    return {predicate.column}
