"""The plugin of dbt-duckdb without dbt: what DuckDB finds under the names of a cut's tables."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from headwater.errors import Refused
from headwater.names import TableName

_DBT = ("dbt", "dbt.adapters", "dbt.adapters.duckdb", "dbt.adapters.duckdb.plugins")


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Makes a connection that the plugin has set up, for tables of one row: the table's name."""
    for name in _DBT:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[_DBT[-1]], "BasePlugin", object, raising=False)
    monkeypatch.delitem(sys.modules, "headwater.reading.dbt_duckdb", raising=False)

    def connect(*names: str) -> duckdb.DuckDBPyConnection:
        tables = {name: tmp_path / TableName.parse(name).path for name in names}
        for name, path in tables.items():
            write_deltalake(path, pa.table({"name": [name]}))
        entry = {"version": 0, "applied_lsn": None, "state": "in step"}
        entries = {name: {**entry, "path": path.as_uri()} for name, path in tables.items()}
        (tmp_path / "cut.json").write_text(json.dumps({"pipeline": "shop", "epoch": 1, "tables": entries}))
        plugin = importlib.import_module("headwater.reading.dbt_duckdb").Plugin()
        plugin.initialize({"cut": str(tmp_path / "cut.json")})
        connection = duckdb.connect()
        plugin.configure_connection(connection)
        return connection

    return connect


def test_each_table_is_read_under_its_own_name(connected: Any) -> None:
    names = ['public."Orders"', "archive.orders", 'public."Ölig"', 'public."ölig"']
    connection = connected(*names)
    assert [connection.execute(f"from {name}").fetchall() for name in names] == [[(name,)] for name in names]


@pytest.mark.parametrize("other", ['public."Orders"', '"Public".orders'])
def test_tables_that_duckdb_takes_for_one_are_refused(connected: Any, other: str) -> None:
    with pytest.raises(Refused, match="does not tell case apart") as refused:
        connected("public.orders", other)
    assert refused.value.code == "same_view"
