"""The tables of a cut as sources of dbt-duckdb: its plugin `headwater.reading.dbt_duckdb`.

Each table is a view in DuckDB, under its schema and name at the PostgreSQL source, which reads the cut's version anew
each time that it is asked for. So all models of a run see one state of the source. The views are there before the
first model begins: dbt-duckdb's own way, a source that a plugin loads, makes it again for each model that names it, and
models that run side by side then meet in DuckDB's catalog. See dbt-duckdb's documentation of plugins.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbt.adapters.duckdb.plugins import BasePlugin

from headwater.errors import Refused
from headwater.lake.cuts import refuse_no_cut
from headwater.names import TableName
from headwater.reading.scan import scan

if TYPE_CHECKING:
    import pyarrow as pa


class Plugin(BasePlugin):  # type: ignore[misc]  # dbt is not installed beside the type checker
    """In profiles.yml: `plugins: [{module: headwater.reading.dbt_duckdb, config: {cut: FILE, tables: {...}}}]`.

    `cut`: a file with a cut. `tables`: by name, of which tables only some `columns` are read, or only rows that meet
    `where`, a condition in DataFusion's SQL; the others are there as they are.
    """

    def initialize(self, config: dict[str, Any]) -> None:
        self._cut_file = str(config.get("cut") or "")
        self._narrowed = {
            str(TableName.parse(name)): dict(of or {}) for name, of in (config.get("tables") or {}).items()
        }
        self._known: dict[TableName, _Table] | None = None

    def configure_connection(self, conn: Any) -> None:
        """Called under dbt-duckdb's lock, before any model runs."""
        self._register(conn)
        for name in self._tables():
            conn.execute(f"create schema if not exists {_quoted(name.schema)}")
            conn.execute(f"create or replace view {_view(name)} as from {_quoted(_registered(name))}")

    def configure_cursor(self, cursor: Any) -> None:
        """What is registered is lost where a connection is copied, as each thread of dbt does."""
        self._register(cursor)

    def _register(self, connection: Any) -> None:
        for name, table in self._tables().items():
            connection.register(_registered(name), table)

    def _tables(self) -> dict[TableName, _Table]:
        if self._known is None:
            cut = self._cut()
            there = [name for name, table in cut["tables"].items() if table["state"] != "absent"]
            names = [TableName.parse(name) for name in dict.fromkeys([*there, *self._narrowed])]
            _refuse_same(names, self._cut_file)
            self._known = {name: _Table(cut, str(name), self._narrowed.get(str(name), {})) for name in names}
        return self._known

    def _cut(self) -> dict[str, Any]:
        if not self._cut_file:
            raise Refused(
                "there is no cut to read",
                code="bad_argument",
                where="the plugin's config in profiles.yml",
                remedy="""give the file that holds it: cut: "{{ env_var('HEADWATER_CUT') }}\"""",
            )
        try:
            found: dict[str, Any] = json.loads(Path(self._cut_file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise Refused(
                f"the file of the cut cannot be read: {error}",
                code="bad_argument",
                where=self._cut_file,
                remedy="make it with headwater wait --json, or by BashOnCutOperator",
            ) from None
        refuse_no_cut(found, self._cut_file)
        return found


def _refuse_same(names: Iterable[TableName], where: str) -> None:
    """DuckDB tells no A from an a: of two such tables the second would be read under the name of the first as well."""
    taken: dict[bytes, TableName] = {}
    for name in names:
        other = taken.setdefault(_view(name).encode().lower(), name)  # of bytes: those letters alone
        if other != name:
            raise Refused(
                f"{other} and {name} would both be the view {_view(name)}: DuckDB does not tell case apart",
                code="same_view",
                where=where,
                remedy="wait for a cut with one of them: name the tables that the models need",
            )


def _view(name: TableName) -> str:
    return f"{_quoted(name.schema)}.{_quoted(name.name)}"


def _registered(name: TableName) -> str:
    """How DuckDB calls what a view reads."""
    return f"headwater {name}"


def _quoted(name: str) -> str:
    """DuckDB has other keywords than PostgreSQL."""
    return '"' + name.replace('"', '""') + '"'


class _Table:
    """What DuckDB reads as often as it wants: each time the stream begins anew."""

    def __init__(self, cut: Mapping[str, Any], table: str, narrowed: Mapping[str, Any]) -> None:
        self._cut, self._table, self._narrowed = cut, table, narrowed
        self._schema: pa.Schema = self._open().schema

    def _open(self) -> pa.RecordBatchReader:
        columns, where = self._narrowed.get("columns"), self._narrowed.get("where")
        return scan(self._cut, self._table, columns=columns, where=where)

    def __arrow_c_schema__(self) -> object:
        return self._schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._open().__arrow_c_stream__(requested_schema)
