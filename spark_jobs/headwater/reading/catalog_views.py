"""Views and tables in a catalog, for plain readers: SQL users who know neither cuts nor paths.

Views: one call makes or replaces those of all tables at the versions of one epoch. Spark has no transaction over
several: while the call runs, a reader of two of them may meet two epochs; each single one is always whole.
Each view has a pin of its own, which its properties name: whoever replaces or drops it finds there what to let go of.
Tables: what a catalog says of them is the name and the folder. They are read at their newest versions, not at one cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from headwater.delta.spark_rows import table_in_sql
from headwater.delta.storage import hadoop_place, path_of
from headwater.errors import Refused
from headwater.lake.cuts import (
    allow_old_versions,
    partitions_condition,
    pin_cut,
    read,
    refuse_at_source,
    refuse_behind,
    refuse_no_cut,
    release_pin,
    root_of,
)
from headwater.names import TableName
from headwater.spark.stores import enter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ODD = re.compile(r"[^A-Za-z0-9_]")
_EPOCH, _PIN, _LAKE = "headwater.epoch", "headwater.pin", "headwater.lake"


def publish(
    spark: SparkSession,
    cut: Mapping[str, Any],
    *,
    database: str | None = None,
    temporary: bool = False,
    allow_behind: bool = False,
    keep: float = 0.0,
) -> dict[str, str]:
    """Make or replace a view for each table of `cut`. Returns the view of each table, as SQL names it.

    A view is named after its table, with `_` for what is neither letter nor digit, and lies in `database` (None: one
    named after the table's schema), which is made when it is missing. `temporary`: in this session only, without a
    database. `keep`: for so many seconds what a view shows is pinned, unless it is replaced or dropped (`drop`)
    before; 0, and for temporary views: not at all. Refused when a table is not in step (with `allow_behind` it is
    shown as it last was), when a version is no longer kept, when it cannot be pinned, when two tables would have one
    view, and when the database has something else of a view's name, or the session another program's temporary one.
    """
    refuse_no_cut(cut)
    refuse_behind(cut, allow_behind=allow_behind)
    there = [name for name, table in cut["tables"].items() if table["state"] != "absent"]
    named = _names(cut, there, "" if temporary else database)
    if temporary:
        for view in named.values():
            if _is_temporary(spark, view):
                _own(spark, view)
        for name, frame in read(spark, cut, allow_behind=allow_behind).items():
            frame.createOrReplaceTempView(named[name])
            spark.conf.set(_mark(named[name]), str(cut["epoch"]))
        return named
    pins = _pinned(cut, named, keep) if keep else {}
    try:
        read(spark, cut, allow_behind=allow_behind)  # what is there now stays, being pinned
        allow_old_versions(spark)
        for folder in sorted({view.rpartition(".")[0] for view in named.values()}):
            spark.sql(f"CREATE DATABASE IF NOT EXISTS {folder}")
        for view in named.values():
            _own(spark, view)
        for name, view in named.items():
            before = _pin_in(_own(spark, view) or {})
            spark.sql(_statement(cut, name, view, pins.get(name)))
            pins.pop(name, None)
            _let_go(before)
    finally:
        for unused in pins.values():
            _let_go(unused)
    return named


def drop(spark: SparkSession, views: Iterable[str]) -> None:
    """Drop views that `publish` has made, as it names them, and let go of what they kept. Those that are gone are
    none's concern; Refused for what is no view of Headwater's."""
    for view in views:
        properties = _own(spark, view)
        if properties is None:
            continue
        spark.sql(f"DROP VIEW IF EXISTS {view}")
        spark.conf.unset(_mark(view))
        _let_go(_pin_in(properties))


_Pin = tuple[str, str]
"""Root of the lake, and id."""


def _pinned(cut: Mapping[str, Any], named: Mapping[str, str], keep: float) -> dict[str, _Pin]:
    """A pin for each table that lies in a lake. A copy elsewhere has nobody who would remove its files."""
    until, pins = datetime.now(UTC) + timedelta(seconds=keep), {}
    try:
        for name, view in named.items():
            table = cut["tables"][name]
            if root := root_of(name, table):
                pin = pin_cut(root, {**cut, "tables": {name: table}}, f"view {view.replace('`', '')}", until)
                pins[name] = root, pin.id
    except Refused:
        for made in pins.values():
            _let_go(made)
        raise
    return pins


def _properties(spark: SparkSession, view: str) -> dict[str, str] | None:
    """None where there is none. A table has properties, too."""
    if not spark.catalog.tableExists(view):
        return None
    if (epoch := spark.conf.get(_mark(view), None)) and spark.catalog.getTable(view).isTemporary:
        return {_EPOCH: epoch}
    return {row["key"]: row["value"] for row in spark.sql(f"SHOW TBLPROPERTIES {view}").collect()}


def _is_temporary(spark: SparkSession, view: str) -> bool:
    """A table of that name in the database, whether it can be read or not, is only hidden by a temporary view."""
    try:
        return spark.catalog.getTable(view).isTemporary
    except Exception:  # of Spark's, of Java's, of a catalog's own
        return False


def _own(spark: SparkSession, view: str) -> dict[str, str] | None:
    """The properties of a view of ours; None: there is none. Refused for anything else of that name."""
    properties = _properties(spark, view)
    if properties is not None and _EPOCH not in properties:
        raise Refused(
            f"{view} is no view that Headwater has made",
            code="name_taken",
            where="the session's catalog",
            remedy="drop it there, if nobody needs it",
        )
    return properties


def _mark(view: str) -> str:
    """A setting of the session that says that its temporary view is ours: such a view has no properties."""
    return f"{_EPOCH}.{view.replace('`', '').lower()}"


def _pin_in(properties: Mapping[str, str]) -> _Pin | None:
    return (properties[_LAKE], properties[_PIN]) if _PIN in properties and _LAKE in properties else None


def _let_go(pin: _Pin | None) -> None:
    if pin is not None:
        release_pin(*pin)


def register(spark: SparkSession, cut: Mapping[str, Any], *, database: str | None = None) -> dict[str, str]:
    """Make a table in the session's catalog for each table of `cut`, at the folder that it has; leaves those that are
    there. Returns the table of each, named as views are, as SQL names it.

    Dropped from the catalog, the folder stays. Refused when a view, or a table of another folder, has the name.
    """
    refuse_no_cut(cut)
    refuse_at_source(cut)
    named = _names(cut, [name for name, table in cut["tables"].items() if table["state"] != "absent"], database)
    for folder in sorted({table.rpartition(".")[0] for table in named.values()}):
        spark.sql(f"CREATE DATABASE IF NOT EXISTS {folder}")
    for name, table in named.items():
        path = path_of(cut["tables"][name]["path"])
        enter(spark, path)
        spark.sql(f"CREATE TABLE IF NOT EXISTS {table} USING delta LOCATION {_quoted(hadoop_place(path))}")
        described = {
            row["col_name"]: row["data_type"] for row in spark.sql(f"DESCRIBE TABLE EXTENDED {table}").collect()
        }
        there = described.get("Location", "")
        if not there or path_of(there) != path:
            raise Refused(
                f"{table} is {f'a table in {there}' if there else 'a view'}, not {name}",
                code="name_taken",
                where=f"pipeline {cut['pipeline']}",
                remedy="drop it from the catalog, or name another `database`",
            )
    return named


def _names(cut: Mapping[str, Any], tables: list[str], database: str | None) -> dict[str, str]:
    """The view of each table; `database` "": without one, None: the table's schema."""
    named: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in tables:
        table = TableName.parse(name)
        folder = table.schema if database is None else database
        view = ".".join(f"`{_ODD.sub('_', part)}`" for part in (folder, table.name) if part)
        other = taken.setdefault(view.lower(), name)
        if other != name:
            raise Refused(
                f"{other} and {name} would both be the view {view}",
                code="same_view",
                where=f"cut of pipeline {cut['pipeline']}, epoch {cut['epoch']}",
                remedy=_apart(TableName.parse(other), table, database),
            )
        named[name] = view
    return named


def _apart(one: TableName, other: TableName, database: str | None) -> str:
    """What to do about two tables that would have one view."""
    less = "make views of a cut with one of them"
    if database is None or _ODD.sub("_", one.schema).lower() == _ODD.sub("_", other.schema).lower():
        return less
    return f"{less}, or leave `{'database' if database else 'temporary'}` out: then schemas keep them apart"


def _statement(cut: Mapping[str, Any], name: str, view: str, pin: _Pin | None) -> str:
    table = cut["tables"][name]
    said = _quoted(f"{name} at epoch {cut['epoch']} of pipeline {cut['pipeline']}")
    properties = {_EPOCH: str(cut["epoch"]), **({_LAKE: pin[0], _PIN: pin[1]} if pin is not None else {})}
    shown = ", ".join(f"{_quoted(key)} = {_quoted(value)}" for key, value in properties.items())
    only = partitions_condition(table, "`")
    return (
        f"CREATE OR REPLACE VIEW {view} COMMENT {said} TBLPROPERTIES ({shown}) "
        f"AS SELECT * FROM {table_in_sql(table['path'])} VERSION AS OF {int(table['version'])}"
        + (f" WHERE {only}" if only else "")
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
