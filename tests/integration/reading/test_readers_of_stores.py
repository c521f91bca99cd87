"""A lake in a store is read by engines that have nothing of Headwater: each finds the source's rows and values."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC
from functools import cached_property
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pytest
from duckdb_extensions import import_extension

from fixtures import spark_in_s3
from fixtures.jobs import catch_up, lake_path_of, queried, source_rows
from fixtures.loaded import pipeline_in_step
from fixtures.object_stores import AzureServer, S3Server, absent
from fixtures.postgres import Database, new_database
from headwater.delta.delta_log import read_snapshot
from headwater.demo.postgres import EmbeddedServer
from headwater.pipeline_file.pipeline import Pipeline
from headwater.spark.jars import store_jar_paths

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

PLAIN, PARTED = "public.plain", "public.parted"
COLUMNS = {
    "id": ("bigint", pa.int64()),
    "n": ("int", pa.int32()),
    "price": ("numeric(20,4)", pa.decimal128(20, 4)),
    "ratio": ("double precision", pa.float64()),
    "word": ("text", pa.string()),
    "is_open": ("boolean", pa.bool_()),
    "day": ("date", pa.date32()),
    "moment": ("timestamptz", pa.timestamp("us", "UTC")),
    "raw": ("bytea", pa.binary()),
}
SCHEMA = pa.schema([(name, kind) for name, (_, kind) in COLUMNS.items()])
ROWS = (
    "select i, i % 7 - 3, (i * 1234567.8901)::numeric(20,4), i / 3.0,"
    " case when i % 5 > 0 then repeat('ä ''x'' ', i) end, i % 2 = 0, date '1999-12-30' + i,"
    " timestamptz '2026-03-29 00:30:00.123456+00' + i * interval '1 hour', decode(lpad(to_hex(i), 4, '0'), 'hex')"
    " from generate_series({}, {}) i"
)

_SPARK = """
import json, sys
import pyarrow as pa
from headwater import store_options
from headwater.session import build_session
from headwater.spark.stores import enter
from headwater.store_options import StoreOptions
given = json.load(sys.stdin)
keys = given["keys"]
secrets = tuple((name, key) for name, key in keys.items() if name not in ("endpoint", "region"))
store_options.register(given["root"], StoreOptions(keys["endpoint"], keys.get("region", ""), None, secrets))
session = build_session(lake=given["root"])
enter(session, given["root"])
for place, out in given["tables"]:
    table = session.read.format("delta").load(place.replace("s3://", "s3a://")).toArrow()
    with pa.OSFile(out, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
"""


class Lake:
    """Two tables with rows that were loaded, changed and removed, so that files have deletion vectors."""

    def __init__(self, server: S3Server | AzureServer, database: Database, folder: Path) -> None:
        self.server, self.database = server, database
        columns = ", ".join(f"{name} {kind}" for name, (kind, _) in COLUMNS.items())
        for name in (PLAIN, PARTED):
            database.execute(
                f"create table {name} ({columns}, primary key (id, n))", f"insert into {name} {ROWS.format(1, 60)}"
            )
        database.allow_publishing()
        lake = server.lake("lake")
        self.keys: dict[str, str] = lake["storage"]
        parted = {"name": PARTED, "partition_by": ["n"]}
        self.pipeline: Pipeline = pipeline_in_step(folder, database, PLAIN, parted, lake=lake)
        for name in (PLAIN, PARTED):
            database.execute(
                f"delete from {name} where id % 9 = 0",
                f"update {name} set word = 'changed', price = -price where id % 4 = 0",
                f"insert into {name} {ROWS.format(61, 70)}",
            )
        catch_up(self.pipeline)

    def place(self, name: str) -> str:
        return lake_path_of(self.pipeline, name)

    def expected(self, name: str) -> list[tuple[Any, ...]]:
        columns, rows = source_rows(self.database, name)
        assert columns == SCHEMA.names
        return sorted(
            tuple(value.astimezone(UTC) if hasattr(value, "astimezone") else value for value in row) for row in rows
        )

    @cached_property
    def read_by_spark(self) -> dict[str, pa.Table]:
        """In a JVM of its own: the tests' may have been started for lakes on disk."""
        if not store_jar_paths("s3" if isinstance(self.server, S3Server) else "azure"):
            absent("the jars by which Spark reads in a store are not there: `make servers` fetches them")
        files = {name: Path(self.pipeline.file).with_name(f"{name}.arrow") for name in (PLAIN, PARTED)}
        tables = [(self.place(name), str(file)) for name, file in files.items()]
        given = {"root": self.pipeline.lake_path(), "keys": self.keys, "tables": tables}
        environment = {**os.environ, "PYTHONPATH": str(Path(spark_in_s3.__file__).parents[1])}
        ran = subprocess.run(
            [sys.executable, "-c", _SPARK], input=json.dumps(given), env=environment, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
        return {name: pa.ipc.open_file(file.read_bytes()).read_all() for name, file in files.items()}


@pytest.fixture(scope="module")
def lake(
    request: pytest.FixtureRequest, postgres: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lake]:
    server = request.getfixturevalue(f"{request.param}_server")
    with new_database(postgres) as database:
        yield Lake(server, database, tmp_path_factory.mktemp("lake"))


def by_delta_rs(lake: Lake, name: str) -> pa.Table:
    return queried(lake.place(name), "select * from t")


def by_polars(lake: Lake, name: str) -> pa.Table:
    return polars.scan_delta(lake.place(name), storage_options=lake.server.options).collect().to_arrow()


def by_duckdb(lake: Lake, name: str) -> pa.Table:
    with duckdb.connect() as connection:
        for extension in ("httpfs", "delta"):
            import_extension(extension, con=connection)
            connection.execute(f"load {extension}")
        keys = lake.keys
        connection.execute(
            f"create secret (type s3, key_id '{keys['access_key_id']}', secret '{keys['secret_access_key']}',"
            f" region '{keys['region']}', endpoint '{lake.server.address}', url_style 'path', use_ssl false)"
        )
        return connection.execute(f"from delta_scan('{lake.place(name)}')").fetch_arrow_table()


def by_spark(lake: Lake, name: str) -> pa.Table:
    return lake.read_by_spark[name]


@pytest.mark.parametrize("name", [PLAIN, PARTED])
@pytest.mark.parametrize(
    ("lake", "read"),
    [
        *(("s3", read) for read in (by_delta_rs, by_polars, by_duckdb, by_spark)),
        *(("azure", read) for read in (by_delta_rs, by_polars, by_spark)),
    ],
    indirect=["lake"],
)
def test_a_table_in_a_store_is_read_by_others_with_the_source_s_values(
    lake: Lake, read: Callable[[Lake, str], pa.Table], name: str
) -> None:
    found = read(lake, name).select(SCHEMA.names).cast(SCHEMA)
    assert sorted(tuple(row.values()) for row in found.to_pylist()) == lake.expected(name)


@pytest.mark.parametrize("lake", ["s3", "azure"], indirect=True)
def test_the_tables_that_are_read_have_deletion_vectors(lake: Lake) -> None:
    """Else a reader that leaves them out would pass."""
    for name in (PLAIN, PARTED):
        assert any(file.deleted for file in read_snapshot(lake.place(name)).files.values())
