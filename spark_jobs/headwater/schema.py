"""Tables and columns as every part of Headwater speaks of them: plain values, no engine behind them.

`source` makes them from the catalog, the registry stores them as JSON, `log` decodes by them and `lake`
creates Delta tables from them. Columns are identified by `attnum`: names change, attnums do not.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from headwater.hidden import Hidden

PARTITION_COLUMN = "_hw_partition"
"""Column of the lake for partitioned tables: the relation id (oid) of the leaf that holds the row."""

_WIDER = {"smallint": ("int", "bigint"), "int": ("bigint",), "float": ("double",)}
_WIDER_WIRES = frozenset(
    [("int2", "int4"), ("int2", "int8"), ("int4", "int8"), ("float4", "float8"), ("numeric", "numeric")]
)
_CIDR = (650, 651)
"""The type oids of cidr and of its array."""
_DECIMAL = re.compile(r"\Adecimal\((\d+),(\d+)\)\Z")
SERVER_TEXT = "server text"
"""`wire` of a type whose binary form is not known here: every reader asks the server for its text."""
DELETED, DELETED_LSN, DELETED_AT = "_hw_deleted", "_hw_deleted_lsn", "_hw_deleted_at"
"""Columns of the lake for tables with `soft_delete`: whether the source has deleted the row, by the commit that ends at
which LSN (bigint), and when that was by the source's clock."""


@dataclass(frozen=True, slots=True)
class ValueType:
    """How one type looks on the wire and in the lake.

    `wire` names the binary form (what the type's send function writes); `lake` is the Spark SQL type name.
    `precision` and `scale` are set for decimals only; `element` for arrays, ranges and multiranges only.
    """

    wire: str
    lake: str
    precision: int | None = None
    scale: int | None = None
    element: ValueType | None = None

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ValueType:
        element = value.get("element")
        return cls(
            value["wire"],
            value["lake"],
            value.get("precision"),
            value.get("scale"),
            cls.from_json(element) if element else None,
        )


def is_wider(lake: str, than: str) -> bool:
    """Whether the lake type `lake` holds every value of the other one `than`, as the same number."""
    new, old = _DECIMAL.match(lake), _DECIMAL.match(than)
    if new is None or old is None:
        return lake in _WIDER.get(than, ())
    (precision, scale), (before, scale_before) = ((int(found[1]), int(found[2])) for found in (new, old))
    return lake != than and scale >= scale_before and precision - scale >= before - scale_before


def is_widening(before: ValueType, after: ValueType) -> bool:
    """Whether a column of the type `before` that becomes `after` keeps its numbers, in the lake as at the source. The
    lake's types do not tell: an `oid` is a bigint there, and -1 is none. They may also be wide enough before."""
    if (before.wire, after.wire) not in _WIDER_WIRES:
        return False
    if before.lake != after.lake:
        return is_wider(after.lake, before.lake)
    # A text shows more digits of a wider float; of a numeric the lake's type does not tell which one is wider.
    return before.wire.startswith("int") or (before.wire == "float4" and before.lake != "string")


@dataclass(frozen=True, slots=True)
class Column:
    """One replicated column of a source table.

    `type_oid` is the declared type (of a domain: the domain's own oid), `typmod` its modifier (-1: none): both
    as a Relation message shows them. `on_bad_value`: suspend | null | string (string: `value` is then already text).
    `missing`: of a column added with a constant default the value of all rows that were written before, as a row of
    binary COPY in hexadecimal digits; empty: NULL. `narrower`: what it was before its type was widened, oldest first.
    `hidden`: what the lake has in place of its values; None: the values. `value` is then their text.
    """

    name: str
    attnum: int
    type_oid: int
    typmod: int
    value: ValueType
    not_null: bool = False
    on_bad_value: str = "suspend"
    missing: str = ""
    narrower: tuple[Column, ...] = ()
    hidden: Hidden | None = None

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Column:
        narrower = tuple(map(cls.from_json, value.get("narrower", ())))
        hidden = Hidden.from_json(value.get("hidden"))
        kind = ValueType.from_json(value["value"])
        kind = _as_cidr(kind) if value["type_oid"] in _CIDR else kind
        return cls(**{**value, "value": kind, "narrower": narrower, "hidden": hidden})

    def sent_as(self, type_oid: int, typmod: int) -> Column:
        """The column as it was when the log sent it with this type."""
        for known in (self, *self.narrower):
            if (known.type_oid, known.typmod) == (type_oid, typmod):
                return replace(known, name=self.name)
        return self


def _as_cidr(value: ValueType) -> ValueType:
    """Older registries call it inet, whose text is another one."""
    if value.element is not None:
        return replace(value, element=_as_cidr(value.element))
    return replace(value, wire="cidr") if value.wire == "inet" else value


@dataclass(frozen=True, slots=True)
class Leaf:
    """One relation that holds rows: the table itself, or a leaf partition of it. `link`: the transaction (32 bits) that
    attached it, or a tree above it, as far as its rows were compared since; 0: nobody had to. `seen`: the files that it
    had later, under the columns that are registered (a TRUNCATE makes new ones); 0: none others were seen."""

    relation_id: int
    schema: str
    name: str
    relfilenode: int
    replica_identity: str = "d"
    link: int = 0
    seen: int = 0


@dataclass(frozen=True, slots=True)
class TableSchema:
    """A source table as the lake replicates it. `key` is empty for insert-only tables without one.

    `leaves` has one entry, the table itself, unless `partitioned`. `soft_delete`: deleted rows are marked and stay;
    `history`: a table of all changes stands beside it. `last_attnum`: the highest that any column had by then, dropped
    ones included, and virtual ones that came since (0: an older Headwater did not ask). `excluded`: columns that stay
    at the source; `where`: which rows are replicated (empty: all), as the pipeline file says it, and as the server
    does: `row_filter`. `meanings`: what decides about the text of its values beside themselves
    (`headwater.source.catalog.meanings`), by key.
    """

    relation_id: int
    schema: str
    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    leaves: tuple[Leaf, ...] = field(default=())
    partitioned: bool = False
    insert_only: bool = False
    partition_by: tuple[str, ...] = ()
    cluster_by: tuple[str, ...] = ()
    soft_delete: bool = False
    history: bool = False
    last_attnum: int = 0
    excluded: tuple[str, ...] = ()
    where: str = ""
    row_filter: str = ""
    meanings: tuple[tuple[str, str], ...] = ()

    def column(self, name: str) -> Column:
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)

    @property
    def definition(self) -> tuple[tuple[str, int, int, int], ...]:
        """(name, attnum, type oid, typmod) of each column: what makes them the same columns as those of another."""
        return tuple((column.name, column.attnum, column.type_oid, column.typmod) for column in self.columns)

    @property
    def hashed(self) -> dict[str, str]:
        """The columns whose values are hashed, with the fingerprint of the key."""
        return {c.name: c.hidden.text for c in self.columns if c.hidden is not None and c.hidden.way == "hash"}

    @property
    def masked(self) -> dict[str, str]:
        """The columns in whose place a fixed text stands, with that text."""
        return {c.name: c.hidden.text for c in self.columns if c.hidden is not None and c.hidden.way == "mask"}

    @property
    def hides(self) -> bool:
        """Whether the lake must not hold all values as they are: then its columns are not followed."""
        return any(column.hidden is not None for column in self.columns)

    @property
    def needs_text(self) -> tuple[Column, ...]:
        """The columns that the log can only carry over a connection in text format."""
        return tuple(column for column in self.columns if column.value.wire == SERVER_TEXT)

    def with_leaves(self, leaves: tuple[Leaf, ...]) -> TableSchema:
        return replace(self, leaves=leaves)

    def without_marks(self) -> TableSchema:
        """The columns that log and load bring: none that say whether a row is deleted."""
        return replace(self, soft_delete=False) if self.soft_delete else self

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> TableSchema:
        return cls(
            **{
                **value,
                "columns": tuple(Column.from_json(c) for c in value["columns"]),
                "leaves": tuple(Leaf(**leaf) for leaf in value["leaves"]),
                "key": tuple(value["key"]),
                "partition_by": tuple(value["partition_by"]),
                "cluster_by": tuple(value.get("cluster_by", ())),
                "excluded": tuple(value.get("excluded", ())),
                "meanings": tuple((key, meaning) for key, meaning in value.get("meanings", ())),
            }
        )
