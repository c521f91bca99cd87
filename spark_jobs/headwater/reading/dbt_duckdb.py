"""Sources of dbt-duckdb that are the tables of a cut: its plugin `headwater.reading.dbt_duckdb`.

A source's schema and name are those of the table at the PostgreSQL source. Each is a view in DuckDB that reads the
table at the cut's version each time that a model asks for it, so all models of a run see one state of the source. See
dbt-duckdb's documentation of plugins for the class that they begin with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbt.adapters.duckdb.plugins import BasePlugin

from headwater.errors import Refused
from headwater.names import TableName
from headwater.reading.scan import scan

if TYPE_CHECKING:
    from dbt.adapters.duckdb.utils import SourceConfig


class Plugin(BasePlugin):  # type: ignore[misc]  # dbt is not installed beside the type checker
    """In profiles.yml: `plugins: [{module: headwater.reading.dbt_duckdb, alias: headwater, config: {cut: FILE}}]`.

    A source has `plugin: headwater` in its config, and may have `columns`, a list, and `where`, a condition in
    DataFusion's SQL. `materialization: table` copies it into the DuckDB file instead, for each model that names it.
    """

    def initialize(self, config: dict[str, Any]) -> None:
        self._cut_file = str(config.get("cut") or "")
        self._known: dict[str, Any] | None = None

    def default_materialization(self) -> str:
        return "view"

    def load(self, source_config: SourceConfig) -> _Table:
        table = str(source_config.get("table") or TableName(source_config.schema, source_config.identifier))
        found = _Table(self._cut(), table, source_config.get("columns"), source_config.get("where"))
        found.opened()  # a table that is not in the cut ends the model that names it, and not the query of another
        return found

    def _cut(self) -> dict[str, Any]:
        if self._known is None:
            if not self._cut_file:
                raise Refused(
                    "there is no cut to read",
                    code="bad_argument",
                    where="the plugin's config in profiles.yml",
                    remedy="""give the file that holds it: cut: "{{ env_var('HEADWATER_CUT') }}\"""",
                )
            self._known = json.loads(Path(self._cut_file).read_text(encoding="utf-8"))
        return self._known


class _Table:
    """What DuckDB reads as often as it wants: each time the stream begins anew."""

    def __init__(self, cut: dict[str, Any], table: str, columns: list[str] | None, where: str | None) -> None:
        self._cut, self._table, self._columns, self._where = cut, table, columns, where

    def opened(self) -> Any:
        return scan(self._cut, self._table, columns=self._columns, where=self._where)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.opened().__arrow_c_stream__(requested_schema)
