"""The type table: how a type of the source looks on the wire and in the lake.

One table for load and log. A type is known by its name in `pg_catalog` (an enum by its kind, a domain by its
base, an array by its element); a type of the same name in another schema is another type. What the table does
not have (composite, full-text and extension types, ranges of one's own) is the server's own text of it, which the log
only carries over a connection in text format. `headwater.log.values.binary` has a converter for every pair of `wire`
and `lake` that this module can give, `headwater.log.values.text` for the text form of each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from headwater.errors import Refused
from headwater.schema import SERVER_TEXT, ValueType


@dataclass(frozen=True, slots=True)
class PgType:
    """A row of pg_type, with the types it is made of.

    `kind` is typtype (b, d, e, c, r, m, p), `category` typcategory. `element_oid` is typelem, `base_oid`
    typbasetype (0: none). `typmod` is the column's atttypmod (-1: none); in the `base` of a domain it is the
    domain's typtypmod. An array's typmod is that of its elements.
    """

    oid: int
    name: str
    schema: str = "pg_catalog"
    kind: str = "b"
    category: str = "U"
    element_oid: int = 0
    base_oid: int = 0
    typmod: int = -1
    element: PgType | None = None
    base: PgType | None = None

    def __str__(self) -> str:
        if self.is_array and self.element is not None:
            return f"{self.element}[]"
        return self.name if self.schema == "pg_catalog" else f"{self.schema}.{self.name}"

    @property
    def is_array(self) -> bool:
        """A true array: the old vector types and the fixed-length ones (point, name) have an element too."""
        return (
            self.kind != "d"
            and self.category == "A"
            and self.element is not None
            and not (self.schema == "pg_catalog" and self.name in ("int2vector", "oidvector"))
        )


_MAX_PRECISION = 38
_DECIMAL = re.compile(r"\A(?:decimal|numeric)\((\d+)(?:,(-?\d+))?\)\Z")

# typname -> (wire, lake). Arrays of these become arrays of the lake, as do those of enums and numerics...
_LISTED: dict[str, tuple[str, str]] = {
    "bool": ("bool", "boolean"),
    "int2": ("int2", "smallint"),
    "int4": ("int4", "int"),
    "int8": ("int8", "bigint"),
    "oid": ("oid", "bigint"),
    "float4": ("float4", "float"),
    "float8": ("float8", "double"),
    "text": ("text", "string"),
    "varchar": ("text", "string"),
    "bpchar": ("text", "string"),
    "name": ("text", "string"),
    "uuid": ("uuid", "string"),
    "json": ("json", "string"),
    "jsonb": ("jsonb", "string"),
    "date": ("date", "date"),
    "timestamp": ("timestamp", "timestamp_ntz"),
    "timestamptz": ("timestamptz", "timestamp"),
}
# ... and arrays of these become text.
_UNLISTED: dict[str, tuple[str, str]] = {
    "bytea": ("bytea", "binary"),
    "char": ("char", "string"),
    "xml": ("xml", "string"),
    "time": ("time", "string"),
    "timetz": ("timetz", "string"),
    "interval": ("interval", "string"),
    "inet": ("inet", "string"),
    "cidr": ("cidr", "string"),
    "macaddr": ("macaddr", "string"),
    "macaddr8": ("macaddr", "string"),
    "money": ("money", "string"),
    "bit": ("bit", "string"),
    "varbit": ("bit", "string"),
    "pg_lsn": ("pg_lsn", "string"),
    "xid8": ("xid8", "string"),
    **{name: (name, "string") for name in ("point", "line", "lseg", "box", "path", "polygon", "circle")},
}
# Of the built-in ranges: typname -> subtype.
_RANGES = {
    "int4range": "int4",
    "int8range": "int8",
    "numrange": "numeric",
    "tsrange": "timestamp",
    "tstzrange": "timestamptz",
    "daterange": "date",
}
_MULTIRANGES = {name.replace("range", "multirange"): subtype for name, subtype in _RANGES.items()}
_TYPES = _LISTED | _UNLISTED
_SPELLINGS = {"short": "smallint", "integer": "int", "long": "bigint", "real": "float", "text": "string"}
_WIDER = {
    "smallint": ("int", "bigint"),
    "int": ("bigint",),
    "float": ("double",),
}
_SERVER_TEXT = ValueType(SERVER_TEXT, "string")
_CAN_BE_BAD = ("date", "timestamp", "timestamp_ntz")


def value_type(pg: PgType, override: str | None = None, on_bad_value: str = "suspend", where: str = "") -> ValueType:
    """How values of `pg` look on the wire and in the lake.

    `override` is the column's entry under `types:`; only what loses nothing is accepted. With `on_bad_value`
    "string" a type that can have bad values becomes text, so that none ever is. `where` names table and column
    in a refusal.
    """
    value = _declared(pg)
    if override is not None:
        value = _overridden(pg, value, override, where)
    if on_bad_value == "string" and can_be_bad(value):
        if override is not None:
            raise Refused(
                f"`types` asks for {value.lake} and `on_bad_value` for text where a value does not fit; "
                "a column has one type",
                code="bad_configuration",
                where=where,
                remedy="set on_bad_value to suspend or null for this column, or its type to string",
            )
        return _as_text(value)
    return value


def _declared(pg: PgType) -> ValueType:
    if pg.kind == "d" and pg.base is not None:
        return _declared(pg.base)
    if pg.is_array and pg.element is not None:
        return _array(pg, pg.element)
    if pg.kind == "e":
        return ValueType("enum", "string")
    if pg.kind == "b" and pg.schema == "pg_catalog":
        if pg.name == "numeric":
            return _numeric(pg.typmod)
        if pg.name in _TYPES:
            return ValueType(*_TYPES[pg.name])
    if pg.kind in ("r", "m") and pg.schema == "pg_catalog":
        for wire, subtypes in (("range", _RANGES), ("multirange", _MULTIRANGES)):
            if pg.name in subtypes:
                return ValueType(wire, "string", element=ValueType(subtypes[pg.name], "string"))
    return _SERVER_TEXT


def _numeric(typmod: int) -> ValueType:
    """numeric(p,s); bare numeric, and more digits than a decimal has, is text."""
    if typmod < 4:
        return ValueType("numeric", "string")
    precision = (typmod - 4) >> 16 & 0xFFFF
    scale = ((typmod - 4 & 0x7FF) ^ 0x400) - 0x400  # eleven bits, signed
    if scale < 0:
        precision, scale = precision - scale, 0
    precision = max(precision, scale)
    if precision > _MAX_PRECISION:
        return ValueType("numeric", "string")
    return _decimal(precision, scale)


def _decimal(precision: int, scale: int) -> ValueType:
    return ValueType("numeric", f"decimal({precision},{scale})", precision, scale)


def _array(pg: PgType, element: PgType) -> ValueType:
    inner = element if element.kind == "d" else replace(element, typmod=pg.typmod)
    value = _declared(inner)
    if value.wire in ("array", "box", SERVER_TEXT):
        # Of a domain over an array, or of what is not known here; boxes are the one type set apart by semicolons.
        return _SERVER_TEXT
    root = inner
    while root.kind == "d" and root.base is not None:
        root = root.base
    if root.kind == "e" or root.name == "numeric" or root.name in _LISTED:
        return ValueType("array", f"array<{value.lake}>", element=value)
    return ValueType("array", "string", element=_as_text(value))


def _as_text(value: ValueType) -> ValueType:
    element = _as_text(value.element) if value.element is not None else None
    return ValueType(value.wire, "string", element=element)


def text_of(pg: PgType) -> ValueType:
    """Every value of `pg` as PostgreSQL's text of it."""
    return _as_text(_declared(pg))


def can_be_bad(value: ValueType) -> bool:
    return value.lake in _CAN_BE_BAD or value.lake.startswith(("decimal(", "array<"))


def _overridden(pg: PgType, value: ValueType, override: str, where: str) -> ValueType:
    wanted = re.sub(r"\s+", "", override).lower()
    wanted = _SPELLINGS.get(wanted, wanted)
    if wanted == value.lake:
        return value
    if wanted == "string":
        return _as_text(value)
    if wanted in _WIDER.get(value.lake, ()):
        return replace(value, lake=wanted)
    match = _DECIMAL.match(wanted)
    if match is not None and value.wire == "numeric":
        precision, scale = int(match[1]), int(match[2] or 0)
        if not (0 < precision <= _MAX_PRECISION and 0 <= scale <= precision):
            raise Refused(
                f"{override!r} is not a decimal that the lake has",
                code="bad_configuration",
                where=where,
                remedy="write decimal(p,s) with p from 1 to 38 and s from 0 to p",
            )
        declared = value.precision is not None and value.scale is not None
        if not declared or _holds(precision, scale, value):
            return _decimal(precision, scale)
    allowed = ["string", *_WIDER.get(value.lake, ())]
    if value.wire == "numeric":
        allowed.append("decimal(p,s) that holds every declared value")
    raise Refused(
        f"type {pg} cannot become {override} without loss",
        code="bad_configuration",
        where=where,
        remedy=f"remove the entry under `types` ({value.lake} is then used), or use one of: {', '.join(allowed)}",
    )


def _holds(precision: int, scale: int, declared: ValueType) -> bool:
    whole = (declared.precision or 0) - (declared.scale or 0)
    return scale >= (declared.scale or 0) and precision - scale >= whole
