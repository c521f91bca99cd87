"""Reloads of the rows of a predicate beside a running driver: these rows are replaced and no others, and what moves
meanwhile is neither lost nor doubled."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fixtures.jobs import (
    armed,
    assert_equal,
    following,
    in_thread,
    lake_path_of,
    lake_rows,
    load_tables,
    record_of,
    source_rows,
    until,
)
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database, new_database
from headwater.cli import main
from headwater.delta.small_tables import open_version
from headwater.demo.postgres import EmbeddedServer
from headwater.errors import EXIT_REFUSED, LostLease, Refused
from headwater.lake.ledger import read_epoch
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.reload.reload import reload

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

PLAIN, PARTED, EVENTS, MOVED = "public.plain", "public.parted", "public.events", "public.moved"
PRICED = "public.priced"


@dataclass(frozen=True)
class Shop:
    database: Database
    pipeline: Pipeline
    running: Future[Any]

    def reload(self, table: str, where: str = "", *partitions: str) -> dict[str, Any]:
        names = [TableName.parse(name, default_schema="public") for name in partitions]
        done: dict[str, Any] = reload(self.pipeline, TableName.parse(table), names, where)["tables"][table]
        return done

    def differing(self, table: str) -> list[Any]:
        """The first values of the rows that are not the same on both sides."""
        columns, rows = source_rows(self.database, table)
        return sorted({row[0] for row in set(lake_rows(self.pipeline, table, columns)) ^ set(rows)})

    def until_differing(self, table: str, expected: list[Any]) -> None:
        until(lambda: self.differing(table) == expected or self.running.done(), f"{table} is as it should be")
        assert self.differing(table) == expected
        assert record_of(self.pipeline, table).state == "active", record_of(self.pipeline, table)
        if not expected:
            assert_equal(self.database, self.pipeline, table)

    def change_unseen(self, table: str, condition: str) -> None:
        """Other values in `n`, which the log does not carry."""
        self.database.execute(
            f"alter table {table} alter n type int using case when {condition} then n + 7000 else n end"
        )


@pytest.fixture(scope="module")
def shop(
    each_store: str, postgres: EmbeddedServer, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shop]:
    with new_database(postgres) as database:
        database.allow_publishing()
        yield from _shop(database, tmp_path_factory.mktemp("reload"))


def _shop(database: Database, folder: Path) -> Iterator[Shop]:
    database.execute(
        "create table plain (id int primary key, n int, note text)",
        "alter table plain alter note set storage external",
        "insert into plain select i, i, repeat('y', 3000) || i from generate_series(1, 100) i",
        "create table moved (id int primary key, region text, n int, note text)",
        "alter table moved alter note set storage external",
        "insert into moved select i, case when i % 2 = 0 then 'eu' else 'us' end, i, repeat('m', 3000) || i "
        "from generate_series(1, 60) i",
        "create table parted (id int, day date, n int, primary key (id, day)) partition by range (day)",
        "create table parted_1 partition of parted for values from ('2026-01-01') to ('2026-02-01')",
        "create table parted_2 partition of parted for values from ('2026-02-01') to ('2026-03-01')",
        "insert into parted select i, date '2026-01-01' + i % 59, i from generate_series(1, 118) i",
        "create table priced (id numeric(12, 2) primary key, n int)",
        "insert into priced select i * 0.5, i from generate_series(1, 60) i",
        "create table events (day date not null, n int) partition by range (day)",
        "create table events_1 partition of events for values from ('2026-01-01') to ('2026-02-01')",
        "insert into events select date '2026-01-01' + i % 30, i from generate_series(1, 60) i",
    )
    pipeline = write_pipeline(
        folder,
        database,
        PLAIN,
        PARTED,
        {"name": EVENTS, "insert_only": True},
        {"name": MOVED, "partition_by": ["region"]},
        PRICED,
    )
    load_tables(pipeline)
    with following(pipeline) as running:
        until(lambda: record_of(pipeline, PLAIN).state == "active" or running.done(), "the driver follows the log")
        yield Shop(database, pipeline, running)


@pytest.mark.usefixtures("reloads_by_spark")
def test_rows_of_a_predicate_are_replaced_and_no_others_while_the_source_goes_on(shop: Shop, tmp_path: Path) -> None:
    shop.change_unseen("plain", "id <= 50")
    with armed(tmp_path, "reload.after_capture") as hold:
        job = in_thread(lambda: shop.reload(PLAIN, "id between 11 and 40"))
        hold.reached(job)
        shop.database.execute(
            "update plain set n = -n where id in (15, 60)",  # large values stay out of the log
            "update plain set id = id + 1000 where id in (16, 61)",  # out of the part; around it
            "update plain set id = 1000 - id where id in (17, 62, 63)",
            "update plain set id = 17 where id = 62 + 876",  # into it: 938
            "delete from plain where id in (18, 19, 64)",
            "insert into plain values (19, 1, 'again'), (2019, 1, 'new')",
        )
        until(lambda: {17, 2019} <= {row[0] for row in lake_rows(shop.pipeline, PLAIN, ["id"])}, "it is applied")
        version = open_version(lake_path_of(shop.pipeline, PLAIN)).version()
        hold.release()
        done = job.result(120)
    assert (done["state"], done["rows"]) == ("active", 30)
    assert done["partitions"] == []
    newest = read_epoch(shop.pipeline.lake_path())
    assert newest is not None
    assert newest.tables[PLAIN].version > version
    shop.until_differing(PLAIN, [*range(1, 11), *range(41, 51)])
    shop.database.execute("update plain set n = 1")
    shop.until_differing(PLAIN, [])


def test_rows_that_an_update_moves_into_the_predicate_or_out_of_it_are_there_once(shop: Shop, tmp_path: Path) -> None:
    with armed(tmp_path, "reload.after_capture") as hold:
        job = in_thread(lambda: shop.reload(MOVED, "region in ('eu', 'asia') and id > 4"))
        hold.reached(job)
        shop.database.execute(
            "update moved set region = 'us' where id in (4, 6, 8)",
            "update moved set region = 'eu' where id in (3, 5, 7)",
            "update moved set id = id + 100, region = 'asia' where id in (9, 10)",
            "update moved set id = id + 100 where id in (11, 12)",
            "update moved set region = case region when 'eu' then 'us' else 'eu' end where id in (13, 14)",
            "update moved set region = case region when 'eu' then 'us' else 'eu' end where id in (13, 14)",
        )
        hold.release()
        assert job.result(120)["rows"] == 28
    shop.until_differing(MOVED, [])


def test_rows_that_are_gone_at_the_source_disappear_and_the_rest_of_a_partition_stays(shop: Shop) -> None:
    with shop.database.connect(autocommit=False) as owner:
        owner.execute("alter table parted_1 set unlogged")  # so that the log has nothing of what follows
        owner.execute("delete from parted_1 where id in (1, 2, 20)")
        owner.execute("insert into parted_1 values (501, '2026-01-02', 1), (502, '2026-01-20', 1)")
        owner.execute("update parted_1 set id = 503 where id = 3")
        owner.execute("alter table parted_1 set logged")
    shop.until_differing(PARTED, [1, 2, 3, 20, 501, 502, 503])
    version = open_version(lake_path_of(shop.pipeline, PARTED)).version()
    done = shop.reload(PARTED, "day < date '2026-01-10'")
    assert (done["rows"], done["replaced_rows"]) == (17, 18)
    history = open_version(lake_path_of(shop.pipeline, PARTED)).history(1)[0]
    assert (history["version"], history["operationParameters"]["path"]) == (version + 1, "positional")
    assert "where day < date '2026-01-10'" in history["operationParameters"]["because"]
    shop.until_differing(PARTED, [20, 502])
    assert shop.reload(PARTED, "day between '2026-01-10' and '2026-01-31' and id in (20, 502)")["rows"] == 1
    shop.until_differing(PARTED, [])


def test_numeric_keys_are_compared_as_the_source_compares_them(shop: Shop) -> None:
    shop.change_unseen(PRICED, "id between 4.5 and 9 or id = 30")
    expected = [Decimal(number) / 2 for number in (*range(9, 19), 60)]
    shop.until_differing(PRICED, expected)
    assert shop.reload(PRICED, "id > 4.50 and id <= 8.5")["rows"] == 8
    shop.until_differing(PRICED, [Decimal("4.5"), Decimal(9), Decimal(30)])
    shop.reload(PRICED, "id in (4.5, 30) or id = 9.0")
    shop.until_differing(PRICED, [])


def test_a_table_without_a_key_is_reloaded_by_its_partition_columns(shop: Shop, tmp_path: Path) -> None:
    shop.database.execute("alter table events alter n type int using case when n <= 30 then n + 7000 else n end")
    with armed(tmp_path, "reload.after_capture") as hold:
        job = in_thread(lambda: shop.reload(EVENTS, "day <= '2026-01-16'"))
        hold.reached(job)
        shop.database.execute("insert into events values ('2026-01-01', 1), ('2026-01-01', 1), ('2026-01-30', 2)")
        until(lambda: len(lake_rows(shop.pipeline, EVENTS, ["n"])) == 63, "it is applied")
        hold.release()
        job.result(120)
    assert len(lake_rows(shop.pipeline, EVENTS, ["n"])) == 63
    assert {str(day) for day in shop.differing(EVENTS)} == {f"2026-01-{day}" for day in range(17, 31)}
    shop.reload(EVENTS, "day > '2026-01-16'")
    shop.until_differing(EVENTS, [])


def test_reloads_of_predicates_run_side_by_side_unless_they_may_be_of_one_row(shop: Shop, tmp_path: Path) -> None:
    shop.change_unseen("parted", "true")
    with armed(tmp_path, "reload.after_capture") as hold:
        first = in_thread(lambda: shop.reload(PARTED, "id <= 60 and day < '2026-01-20'"))
        hold.reached(first)
        for where, partitions in (("", ()), ("id in (60, 61)", ()), ("", ("parted_1",))):
            with pytest.raises(LostLease) as refused:
                shop.reload(PARTED, where, *partitions)
            assert refused.value.code == "reload_running"
            assert "id <= 60 and day < '2026-01-20'" in str(refused.value)
        shop.database.execute("update parted set id = id + 1000 where id in (59, 118)")
        shop.reload(PARTED, "id > 60")
        shop.reload(PARTED, "", "parted_2")
        hold.release()
        first.result(120)
    shop.reload(PARTED, "id <= 60 and day between '2026-01-20' and '2026-01-31'")
    shop.until_differing(PARTED, [])


def test_what_the_predicate_may_not_name_is_refused(shop: Shop, capfd: pytest.CaptureFixture[str]) -> None:
    for table, where, words in (
        (PLAIN, "n = 1", "n: neither of its key nor of its partitions"),
        (EVENTS, "n = 1", "n: neither of its key nor of its partitions"),
        (MOVED, "region > 'eu'", "collation"),
    ):
        with pytest.raises(Refused) as refused:
            shop.reload(table, where)
        assert refused.value.code == "bad_predicate"
        assert words in refused.value.message
    shop.database.execute('create collation blind from "C"', "alter table moved alter region type text collate blind")
    with shop.database.server.connect(shop.database.name) as superuser:  # made without ICU, a server has no such one
        superuser.execute("update pg_collation set collisdeterministic = false where collname = 'blind'")
    with pytest.raises(Refused, match="nondeterministic"):
        shop.reload(MOVED, "region = 'EU'")
    for arguments in (["--partition", "parted_1"], ["--changed"]):
        command = ["reload", shop.pipeline.file, "--table", PARTED, "--where", "id = 1", *arguments]
        assert main(command) == EXIT_REFUSED
        assert "headwater reload --help" in capfd.readouterr().err
