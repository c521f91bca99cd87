"""Views and tables in a catalog, for plain readers: SQL users who know neither cuts nor paths.

Views: one call makes or replaces those of all tables at the versions of one epoch. Spark has no transaction over
several: while the call runs, a reader of two of them may meet two epochs; each single one is always whole.
Tables: what a catalog says of them is the name and the folder. They are read at their newest versions, not at one cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headwater.errors import Refused
from headwater.lake.cuts import allow_old_versions, partitions_condition, read
from headwater.lake.storage import path_of
from headwater.names import TableName

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ODD = re.compile(r"[^A-Za-z0-9_]")


def publish(
    spark: SparkSession,
    cut: Mapping[str, Any],
    *,
    database: str | None = None,
    temporary: bool = False,
    allow_behind: bool = False,
) -> dict[str, str]:
    """Make or replace a view for each table of `cut`. Returns the view of each table, as SQL names it.

    A view is named after its table, with `_` for what is neither letter nor digit, and lies in `database` (None: one
    named after the table's schema), which is made when it is missing. `temporary`: in this session only, without a
    database. Refused when a table is not in step (with `allow_behind` it is shown as it last was), when a version is
    no longer kept, and when two tables would have one view.
    """
    frames = read(spark, cut, allow_behind=allow_behind)
    named = _names(cut, list(frames), "" if temporary else database)
    if temporary:
        for name, frame in frames.items():
            frame.createOrReplaceTempView(named[name])
        return named
    allow_old_versions(spark)
    for folder in sorted({view.rpartition(".")[0] for view in named.values()}):
        spark.sql(f"CREATE DATABASE IF NOT EXISTS {folder}")
    for name in frames:
        spark.sql(_statement(cut, name, named[name]))
    return named


def register(spark: SparkSession, cut: Mapping[str, Any], *, database: str | None = None) -> dict[str, str]:
    """Make a table in the session's catalog for each table of `cut`, at the folder that it has; leaves those that are
    there. Returns the table of each, named as views are, as SQL names it.

    Dropped from the catalog, the folder stays. Refused when a view, or a table of another folder, has the name.
    """
    named = _names(cut, [name for name, table in cut["tables"].items() if table["state"] != "absent"], database)
    for folder in sorted({table.rpartition(".")[0] for table in named.values()}):
        spark.sql(f"CREATE DATABASE IF NOT EXISTS {folder}")
    for name, table in named.items():
        path = path_of(cut["tables"][name]["path"])
        place = path.replace("\\", "\\\\").replace("'", "\\'")
        spark.sql(f"CREATE TABLE IF NOT EXISTS {table} USING delta LOCATION '{place}'")
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
        parts = [_ODD.sub("_", part) for part in (folder, table.name) if part]
        view = ".".join(f"`{part}`" for part in parts) if len(parts) > 1 else parts[0]
        other = taken.setdefault(view.lower(), name)
        if other != name:
            raise Refused(
                f"{other} and {name} would both be the view {view}",
                code="same_view",
                where=f"cut of pipeline {cut['pipeline']}, epoch {cut['epoch']}",
                remedy="make views of a cut with one of them, or leave `database` out: then schemas keep them apart",
            )
        named[name] = view
    return named


def _statement(cut: Mapping[str, Any], name: str, view: str) -> str:
    table = cut["tables"][name]
    path = str(table["path"]).replace("`", "``")
    said = f"{name} at epoch {cut['epoch']} of pipeline {cut['pipeline']}".replace("\\", "\\\\").replace("'", "\\'")
    only = partitions_condition(table, "`")
    return (
        f"CREATE OR REPLACE VIEW {view} COMMENT '{said}' TBLPROPERTIES ('headwater.epoch' = '{cut['epoch']}') "
        f"AS SELECT * FROM delta.`{path}` VERSION AS OF {int(table['version'])}" + (f" WHERE {only}" if only else "")
    )
