"""Cuts in a session that is not ours and has no JVM here: a client of Spark Connect, whose server was started with the
jars and settings that any Spark needs for the lake."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import headwater
from fixtures.class_archive import SMALL
from fixtures.jobs import catch_up
from fixtures.loaded import pipeline_in_step
from fixtures.postgres import Database
from fixtures.waiting import until
from headwater.errors import Refused
from headwater.lake.cuts import Cut
from headwater.reading.newest_views import newest_cut
from headwater.session import submit_conf, submit_environment
from headwater.spark.session import SHORT_LIVED_JVM

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

ORDERS = "public.orders"
_PORTS_TRIED = 3


@pytest.fixture
def connected(tmp_path: Path) -> Iterator[SparkSession]:
    """A client of a server in a process of its own."""
    connect = pytest.importorskip("pyspark.sql.connect.session", reason="the client of Spark Connect is not installed")
    for attempt in range(1, _PORTS_TRIED + 1):
        with _server(tmp_path) as (running, port):
            # Another process may have taken the port meanwhile, and may be what answers.
            if running.poll() is None:
                session = connect.SparkSession.builder.remote(f"sc://127.0.0.1:{port}").create()
                yield session
                session.stop()
                return
            assert attempt < _PORTS_TRIED, (tmp_path / "connect.log").read_text()[-3000:]


@contextlib.contextmanager
def _server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Its process, which answers or has ended, and its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        **submit_conf(),
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        **SMALL,
        "spark.sql.warehouse.dir": (tmp_path / "warehouse").as_uri(),
    }
    given = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    server = ["--master", "local[1]", "--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    environment = {**os.environ, **submit_environment(), "JDK_JAVA_OPTIONS": SHORT_LIVED_JVM}
    program = ["spark-submit", *server, *given, "spark-internal"]
    with (tmp_path / "connect.log").open("wb") as log:
        running = subprocess.Popen(
            program, env=environment, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True
        )
        try:

            def answers() -> bool:
                with socket.socket() as looking:
                    return looking.connect_ex(("127.0.0.1", port)) == 0 or running.poll() is not None

            until(answers, "the server answers")
            yield running, port
        finally:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait(30)


def test_cuts_views_and_partitions_are_read_by_a_client_of_spark_connect(
    database: Database, connected: SparkSession, tmp_path: Path
) -> None:
    database.allow_publishing()
    database.execute(
        "create table orders (id int, region text, amount numeric(10, 2), tags text[], primary key (id, region)) "
        "partition by list (region)",
        "create table orders_eu partition of orders for values in ('eu')",
        "create table orders_us partition of orders for values in ('us')",
        "insert into orders select i, (array['eu', 'us'])[1 + i % 2], i / 4.0, array['a', null, i::text] "
        "from generate_series(1, 20) i",
    )
    pipeline = pipeline_in_step(tmp_path, database, ORDERS)
    before = newest_cut(pipeline)
    database.execute("delete from orders where id > 15", "update orders set amount = 0 where id = 1")
    catch_up(pipeline)
    now = newest_cut(pipeline)

    def rows(cut: Cut) -> list[tuple[Any, ...]]:
        frame = headwater.read(connected, cut)[ORDERS]
        return sorted((row["id"], row["region"], row["amount"], tuple(row["tags"])) for row in frame.collect())

    at_source = [(i, r, a, tuple(t)) for i, r, a, t in database.query("select * from orders order by id")]
    assert rows(now) == at_source
    assert len(rows(before)) == 20
    views = headwater.views(connected, now, temporary=True)
    total = connected.sql(f"select sum(amount) as total from {views[ORDERS]}").collect()[0]["total"]
    assert total == sum(row[2] for row in at_source)
    table = now["tables"][ORDERS]
    gone = {**now, "tables": {ORDERS: {**table, "version": table["version"] + 50}}}
    with pytest.raises(Refused) as refused:
        headwater.read(connected, gone)
    assert refused.value.code == "cut_gone"
    with pytest.raises(Refused) as refused:
        headwater.read(connected, {**now, "fallback": {"pipeline_file": pipeline.file}})
    assert refused.value.code == "no_spark_driver"
