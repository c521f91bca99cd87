"""What a person writes behind `--where`: a small part of SQL, read here and never handed to a server as it is.

Comparisons of a column with a literal, IN, BETWEEN, IS NULL, AND, OR, NOT, parentheses. The columns are of types that
compare alike at the source and in the lake: no text but by equality, since its order is a collation's; no floats, no
numeric that the lake keeps as text; nothing of which the lake may hold another value than the source.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Context, Decimal
from typing import Final, NoReturn
from uuid import UUID

from headwater.errors import Refused
from headwater.names import BadName, parse_identifier
from headwater.predicate import Compared, Every, IsNull, OneOf, Operator, Predicate, Some, Value, negation
from headwater.schema import Column, TableSchema

_LONGEST: Final = 20_000  # characters; it is stored in the registry
_DEEPEST: Final = 100
_TOKEN = re.compile(
    r"""\s*(?:(?P<name>"(?:[^"]|"")+"|[^\W\d][\w$]*)|(?P<text>'(?:[^']|'')*')|(?P<number>[+-]?\s*\d+(?:\.\d+)?(?![\w.]))"""
    r"""|(?P<sign><=|>=|<>|!=|[<>=(),]))"""
)
_WORDS: Final = frozenset({"and", "or", "not", "in", "between", "is", "null", "true", "false"})
_INTEGERS: Final = ("smallint", "int", "bigint")
_EQUAL_ONLY: Final = ("text", "boolean")
_TEXT_OIDS: Final = (25, 1043)  # text, varchar; char(n) is padded, and a domain or an extension may compare otherwise
_NUMERIC_OID: Final = 1700
_DECIMAL_DIGITS: Final = 38  # of the widest decimal
_EXACT: Final = Context(prec=_DECIMAL_DIGITS)
_OPERATORS: Final[dict[str, Operator]] = {"<": "<", "<=": "<=", ">": ">", ">=": ">="}
_TYPES: Final = {
    ("date", "date"): "date",
    ("timestamp", "timestamp_ntz"): "timestamp",
    ("timestamptz", "timestamp"): "timestamptz",
    ("bool", "boolean"): "boolean",
    ("uuid", "string"): "uuid",
}
LANGUAGE: Final = "write comparisons of columns with literals, IN, BETWEEN, IS NULL, AND, OR, NOT: id between 5 and 9"


def parse(text: str, schema: TableSchema) -> Predicate:
    """The predicate that `text` writes over columns of the table; Refused (`bad_predicate`) where it is none."""
    return _Reading(text, schema).predicate()


class _Reading:
    """Recursive descent; a word of SQL ends where an operand begins, as in SQL itself."""

    def __init__(self, text: str, schema: TableSchema) -> None:
        self._schema = schema
        if len(text) > _LONGEST:
            self._refuse(f"it is longer than {_LONGEST} characters")
        self._tokens = self._cut(text)
        self._at = 0
        self._depth = 0

    def predicate(self) -> Predicate:
        found = self._either()
        if self._at < len(self._tokens):
            self._refuse(f"nothing may follow here: {self._tokens[self._at][1]!r}")
        return found

    def _cut(self, text: str) -> list[tuple[str, str]]:
        if "\0" in text:
            self._refuse("it holds a character that no value of the source has")
        tokens, at, end = [], 0, len(text.rstrip())
        while at < end:
            match = _TOKEN.match(text, at)
            if match is None:
                self._refuse(f"it cannot be read from {text[at:end].strip()[:20]!r} on")
            kind = str(match.lastgroup)
            found = match[kind]
            if kind == "name" and found.lower() in _WORDS:
                kind, found = "word", found.lower()
            tokens.append((kind, found))
            at = match.end()
        return tokens

    def _next(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "its end")

    def _take(self) -> tuple[str, str]:
        found = self._next()
        self._at += 1
        return found

    def _is(self, *wanted: str) -> bool:
        """Takes the words or signs `wanted` if all of them come next."""
        coming = self._tokens[self._at : self._at + len(wanted)]
        if [text for kind, text in coming if kind in ("word", "sign")] != list(wanted):
            return False
        self._at += len(wanted)
        return True

    def _must(self, wanted: str) -> None:
        if not self._is(wanted):
            self._refuse(f"{wanted.upper()} is wanted where {self._next()[1]!r} stands")

    def _either(self) -> Predicate:
        return self._joined("or", self._both, Some)

    def _both(self) -> Predicate:
        return self._joined("and", self._maybe_not, Every)

    def _joined(
        self, word: str, part: Callable[[], Predicate], make: Callable[[tuple[Predicate, ...]], Predicate]
    ) -> Predicate:
        parts = [part()]
        while self._is(word):
            parts.append(part())
        return make(tuple(parts)) if len(parts) > 1 else parts[0]

    def _maybe_not(self) -> Predicate:
        odd = False
        while self._is("not"):
            odd = not odd
        found = self._one()
        return negation(found) if odd else found

    def _one(self) -> Predicate:
        if not self._is("("):
            return self._of_column()
        self._depth += 1
        if self._depth > _DEEPEST:
            self._refuse(f"its parentheses are deeper than {_DEEPEST}")
        found = self._either()
        self._must(")")
        self._depth -= 1
        return found

    def _of_column(self) -> Predicate:
        kind, text = self._take()
        if kind != "name":
            self._refuse(f"a column is wanted where {text!r} stands")
        column = self._column(text)
        if self._is("is", "not", "null"):
            return IsNull(column.name, negated=True)
        if self._is("is", "null"):
            return IsNull(column.name)
        negated = self._is("not")
        if self._is("in", "("):
            values = [self._literal(column)]
            while self._is(","):
                values.append(self._literal(column))
            self._must(")")
            return OneOf(column.name, tuple(values), negated)
        if self._is("between"):
            self._refuse_order(column)
            low = Compared(column.name, ">=", self._literal(column))
            self._must("and")
            between = Every((low, Compared(column.name, "<=", self._literal(column))))
            return negation(between) if negated else between
        kind, sign = self._take()
        if negated or kind != "sign" or sign in "(),":
            self._refuse(f"a comparison, IN, BETWEEN or IS NULL is wanted where {sign!r} stands")
        if sign in ("=", "<>", "!="):
            return OneOf(column.name, (self._literal(column),), negated=sign != "=")
        self._refuse_order(column)
        return Compared(column.name, _OPERATORS[sign], self._literal(column))

    def _column(self, text: str) -> Column:
        try:
            return self._schema.column(parse_identifier(text))
        except BadName as error:
            self._refuse(str(error))
        except KeyError:
            known = ", ".join(column.name for column in self._schema.columns)
            self._refuse(f"the table has no column {text}; it has {known}")

    def _refuse_order(self, column: Column) -> None:
        kind = self._type_of(column)
        if kind in _EQUAL_ONLY:
            why = "the order of text is its collation's" if kind == "text" else "it has two values"
            self._refuse(f"the column {column.name} is only compared by =, <> and IN: {why}")

    def _type_of(self, column: Column) -> str:
        value = column.value
        kind = _TYPES.get((value.wire, value.lake), "")
        if value.lake in _INTEGERS and value.wire in ("int2", "int4", "int8"):
            kind = "integer"
        elif value.wire == "text" and column.type_oid in _TEXT_OIDS:
            kind = "text"
        elif value.wire == "numeric" and column.type_oid == _NUMERIC_OID and value.precision is not None:
            kind = "numeric"
        if not kind:
            self._refuse(
                f"the column {column.name} is of a type that is not compared alike at the source and in the lake; "
                f"those that are: integers, numeric(p,s), text, varchar, {', '.join(_TYPES.values())}"
            )
        if column.hidden is not None:
            self._refuse(f"the column {column.name} is hidden in the lake (columns.{column.hidden.way})")
        if column.on_bad_value != "suspend":
            self._refuse(f"the column {column.name} may hold another value in the lake (on_bad_value)")
        return kind

    def _literal(self, column: Column) -> Value:
        kind = self._type_of(column)
        how, text = self._take()
        if how == "name" and text.lower() == kind and self._next()[0] == "text":  # date '2026-01-01'
            how, text = self._take()
        value = _decimal(column, how, text) if kind == "numeric" else _value(kind, how, text)
        if value is None:
            self._refuse(f"{text} is no {kind} to compare the column {column.name} with")
        return value

    def _refuse(self, message: str) -> NoReturn:
        where = f"--where, table {self._schema.schema}.{self._schema.name}"
        raise Refused(message, code="bad_predicate", where=where, remedy=LANGUAGE)


def _value(kind: str, how: str, text: str) -> Value | None:
    """The value of a literal; None where it is none of its kind."""
    if kind == "boolean":
        return {"true": True, "false": False}.get(text) if how == "word" else None
    if kind == "integer":
        digits = re.sub(r"\s", "", text)
        number = int(digits) if how == "number" and "." not in digits and len(digits.lstrip("+-0")) < 20 else None
        return number if number is not None and -(2**63) <= number < 2**63 else None
    if how != "text":
        return None
    inner = text[1:-1].replace("''", "'")
    if kind == "text":
        return inner
    try:
        return str(UUID(inner)) if kind == "uuid" else _moment(kind, inner)
    except (ValueError, OverflowError):
        return None


def _decimal(column: Column, how: str, text: str) -> Value | None:
    """A number with no more places behind the point than the column has, and so few before it that every engine can
    compare the two exactly; None where it is none."""
    scale = column.value.scale or 0
    if how != "number":
        return None
    whole, _, places = re.sub(r"[\s+-]", "", text).partition(".")
    if len(places.rstrip("0")) > scale or len(whole.lstrip("0")) > _DECIMAL_DIGITS - scale:
        return None
    return Decimal(re.sub(r"\s", "", text)).quantize(Decimal(1).scaleb(-scale), context=_EXACT)


def _moment(kind: str, text: str) -> Value | None:
    """ISO 8601. One with a zone is no timestamp without one, and the source would cut the time of day off a date."""
    if kind == "date":
        return date.fromisoformat(text) if len(text) == len("2026-01-01") else None
    found = datetime.fromisoformat(text)
    if kind == "timestamp":
        return None if found.tzinfo is not None else found
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
