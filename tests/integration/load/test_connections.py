"""`load.connections: auto`: as many sessions read as the source, the cores and the file's ceiling bear."""

from __future__ import annotations

import contextlib
import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from fixtures.jobs import assert_equal, catch_up, load_tables
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from fixtures.waiting import until
from headwater.load import connections
from headwater.load.connections import connections_for, free_sessions
from headwater.source.connection import connect
from headwater.spark.session import cores_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.postgres


def test_room_is_what_server_role_and_database_have_left(database: Database) -> None:
    with database.superuser() as admin, contextlib.closing(connect(database.conninfo)) as connection:
        role, name = connection.info.user, connection.info.dbname
        ((most,),) = admin.execute("select current_setting('max_connections')::int").fetchall()
        assert 0 < free_sessions(connection) < most

        def is_counted() -> bool:
            """Not if another session, of autovacuum say, ends meanwhile."""
            before = free_sessions(connection)
            with contextlib.closing(connect(database.conninfo)):
                return free_sessions(connection) < before

        until(is_counted, "a session takes room")
        admin.execute(f'alter role "{role}" connection limit 12')
        try:
            with contextlib.closing(connect(database.conninfo)):
                assert free_sessions(connection) <= 10
                admin.execute(f'alter database "{name}" connection limit 5')
                assert free_sessions(connection) <= 3
                admin.execute(f'alter role "{role}" connection limit 1')
                assert free_sessions(connection) == 0, "there are more than that already"
        finally:
            admin.execute(f'alter role "{role}" connection limit -1')


@pytest.mark.parametrize(
    ("free", "cores", "most", "found"),
    [(400, 8, 32, 8), (400, 64, 16, 16), (80, 64, 32, 10), (80, None, 4, 4), (3, 8, 32, 1), (0, 8, 32, 1)],
)
def test_the_least_of_room_cores_and_ceiling_counts(
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    cores: int | None,
    most: int,
    found: int,
) -> None:
    monkeypatch.setattr(connections, "free_sessions", lambda connection: free)
    monkeypatch.setattr(multiprocessing, "cpu_count", lambda: cores)
    load = {"connections": "auto", "max_connections": most}
    pipeline = write_pipeline(tmp_path, database, "public.a", load=load)
    none: Any = None
    assert connections_for(pipeline, none, None) == found
    told = write_pipeline(tmp_path, database, "public.a", load={"connections": 5, "max_connections": most})
    assert connections_for(told, none, None) == 5


@pytest.mark.parametrize(
    ("master", "settings", "cores"),
    [
        ("local[3]", {}, 3),
        ("spark://host:7077", {}, None),
        ("spark://host:7077", {"spark.cores.max": "12"}, 12),
        ("k8s://host", {"spark.executor.instances": "4", "spark.executor.cores": "2"}, 8),
        ("yarn", {"spark.dynamicAllocation.maxExecutors": "5", "spark.executor.cores": "3"}, 15),
        ("yarn", {"spark.dynamicAllocation.maxExecutors": "infinity", "spark.executor.cores": "3"}, None),
    ],
)
def test_a_cluster_has_the_cores_that_its_settings_say(
    master: str, settings: dict[str, str], cores: int | None
) -> None:
    context = SimpleNamespace(master=master, defaultParallelism=3, getConf=lambda: settings)
    session: Any = SimpleNamespace(sparkContext=context)
    assert cores_of(session) == cores


def test_tables_are_loaded_by_as_many_as_there_is_room_for(
    database: Database, tmp_path: Path, spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headwater")
    tables = [f"public.t{number}" for number in range(3)]
    database.allow_publishing()
    for table in tables:
        database.execute(f"create table {table} (id int primary key)", f"insert into {table} values (1), (2)")
    pipeline = write_pipeline(tmp_path, database, *tables, load={"connections": "auto"})
    loaded = load_tables(pipeline)["tables"]
    assert {name: table["rows"] for name, table in loaded.items()} == dict.fromkeys(tables, 2)
    assert "room for" in caplog.text
    catch_up(pipeline)
    assert_equal(database, pipeline, *tables)
