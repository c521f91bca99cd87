"""Columns that are hashed or masked: the same in load, log, verify, repair and reads, and their values nowhere."""

from __future__ import annotations

import hashlib
import hmac
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headwater
from fixtures.jobs import (
    armed,
    catch_up,
    contents,
    following,
    in_thread,
    lake_path_of,
    lake_rows,
    load_tables,
    record_of,
)
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from fixtures.waiting import until
from headwater.cli import main
from headwater.errors import EXIT_REFUSED, LostLease, Refused
from headwater.gate.check import check
from headwater.lake.paths import staged_path
from headwater.monitor.status import status
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.reload.reload import reload
from headwater.verify.verify import verify

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

KEY, VARIABLE = "a key that only this test knows", "HEADWATER_TEST_HASH_KEY"
SECRET, NUMBER = "never-to-be-found", 7_340_192_837_465
TYPES = {
    "email": ("text", f"'{SECRET}' || g"),
    "phone": ("varchar(60)", f"case when g % 5 <> 0 then '{SECRET}' || g end"),
    "account": ("bigint", f"{NUMBER} + g"),
    "salary": ("numeric", "g * 1.10"),
    "rate": ("double precision", "g / 3.0"),
    "born": ("timestamptz", "timestamptz '2001-02-03 04:05:06+00' + g * interval '1 day'"),
    "agreed": ("boolean", "g % 2 = 0"),
    "photo": ("bytea", f"'{SECRET}'::bytea"),
    "extra": ("jsonb", f"jsonb_build_object('{SECRET}', g)"),
    "tags": ("text[]", f"array['{SECRET}', null, 'b']"),
    "place": ("point", "point(g, 0.5)"),
    "large": ("text", f"repeat('{SECRET}', 300)"),
}
HASHED = [name for name in TYPES if name != "phone"]
PEOPLE = "public.people"
ENTRY: dict[str, Any] = {
    "name": PEOPLE,
    "columns": {"hash": HASHED, "mask": {"phone": "***"}},
}
MADE = f"create table people (id int primary key, name text, {', '.join(f'{n} {t}' for n, (t, _) in TYPES.items())})"
ROWS = f"insert into people select g, 'name', {', '.join(value for _, value in TYPES.values())} from generate_series"
Started = Callable[..., Pipeline]


def digest(text: str) -> str:
    return hmac.new(KEY.encode(), text.encode(), hashlib.sha256).hexdigest()


def expected(database: Database) -> list[tuple[Any, ...]]:
    """The rows as PostgreSQL's own output functions and an HMAC of our own make them."""
    texts = ", ".join(f"case when {name} is distinct from null then format('%s', {name}) end" for name in TYPES)
    with database.connect() as connection:
        connection.execute("set timezone = 'UTC'")
        rows = connection.execute(f"select id, name, {texts} from people").fetchall()
    return sorted(
        (
            identity,
            name,
            *(
                None if text is None else "***" if column == "phone" else digest(text)
                for column, text in zip(TYPES, values, strict=True)
            ),
        )
        for identity, name, *values in rows
    )


def assert_equal(database: Database, pipeline: Pipeline) -> None:
    assert sorted(lake_rows(pipeline, PEOPLE, ["id", "name", *TYPES])) == expected(database)


def assert_nowhere(folder: Path, pipeline: Pipeline) -> None:
    """Neither in the bytes of a file nor in the values of a Parquet file's pages, which are compressed."""
    files = contents(folder, pipeline.lake_path())
    assert files
    numbers = [NUMBER + g for g in range(1, 50)]
    texts = [SECRET, SECRET.encode().hex(), str(NUMBER)[:-2]]
    raw = [n.to_bytes(8, order) for n in numbers for order in ("big", "little")] + [text.encode() for text in texts]
    for path, content in files.items():
        assert [needle for needle in raw if needle in content] == [], path
        if content[:4] == b"PAR1":
            try:
                file = pq.ParquetFile(io.BytesIO(content))
            except pa.ArrowInvalid:
                assert path.startswith(f"{staged_path(pipeline.lake_path())}/"), path
                continue  # it is being written
            for batch in file.iter_batches():
                values = repr(batch.to_pylist())
                assert [text for text in texts if text in values] == [], path


@pytest.fixture
def start(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    monkeypatch.setenv(VARIABLE, KEY)
    spilled = tmp_path / "spilled"
    spilled.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(spilled))
    database.allow_publishing()
    database.execute(MADE, f"{ROWS}(1, 30) g")
    database.execute("create table plain (id int primary key, n int)", "insert into plain values (1, 1)")

    def written(*tables: str | dict[str, Any]) -> Pipeline:
        return write_pipeline(tmp_path, database, *tables, source={"hash_key": f"env:{VARIABLE}"})

    return written


WRITES = [
    f"{ROWS}(101, 110) g",
    "update people set name = 'changed' where id in (1, 3)",  # its large value is left out of the log
    f"update people set email = '{SECRET} again', phone = '{SECRET} 2', account = null where id = 4",
    "update people set email = null where id = 6",
    "update people set id = 500 where id = 5",
    "delete from people where id in (7, 9)",
]


@pytest.mark.parametrize(("identity", "form"), [("default", "binary"), ("full", "text")])
def test_values_are_hidden_in_load_and_log_and_are_nowhere(
    database: Database, start: Started, spark: SparkSession, tmp_path: Path, identity: str, form: str
) -> None:
    database.execute(f"alter table people replica identity {identity}")
    if form == "text":  # because of a type whose binary form is not known
        database.execute(
            "create type pair as (a int, b text)",
            f"create table odd as select 1 as id, row(1, '{SECRET}')::pair as pair",
        )
        database.execute("alter table odd add primary key (id)")
    odd = [{"name": "public.odd", "columns": {"hash": ["pair"]}}] if form == "text" else []
    pipeline = start({**ENTRY, "history": bool(odd)}, "public.plain", *odd)
    load_tables(pipeline)
    catch_up(pipeline)
    assert_equal(database, pipeline)
    if odd:
        assert lake_rows(pipeline, "public.odd", ["id", "pair"]) == [(1, digest(f"(1,{SECRET})"))]
    with following(pipeline) as running:
        until(lambda: status(pipeline)["running"] or running.done(), "the driver runs")
        database.execute(*WRITES)
        headwater.wait(pipeline)
        assert_equal(database, pipeline)
        # A transaction in progress goes through files of the reader and the stager.
        with database.connect(autocommit=False) as large:
            large.execute(f"{ROWS}(1000, 16000) g".replace("'name'", "repeat('y', 3000)"))
            until(lambda: any(tmp_path.rglob("*.blocks")) or running.done(), "it is spilled")
            assert_nowhere(tmp_path, pipeline)
        headwater.wait(pipeline)
        assert_equal(database, pipeline)
        (found,) = verify(pipeline, [TableName.parse(PEOPLE)])["tables"].values()
        assert (found["missing"], found["extra"], found["different"], found["unsettled"]) == (0, 0, 0, 0)
        if form == "binary":
            reload(pipeline, TableName.parse(PEOPLE))
        else:
            load_tables(pipeline, PEOPLE, again=True)
            headwater.wait(pipeline)
        assert_equal(database, pipeline)
    if form == "binary":  # what is not in the log is not in a history: there nothing is repaired
        spark.sql(f"delete from delta.`{lake_path_of(pipeline, PEOPLE)}` where id = 1")
        spark.sql(f"update delta.`{lake_path_of(pipeline, PEOPLE)}` set email = 'another' where id = 2")
        repaired = verify(pipeline, [TableName.parse(PEOPLE)], repair=True)["tables"][PEOPLE]
        assert (repaired["missing"], repaired["different"], repaired["repaired"]) == (1, 1, 2)
        catch_up(pipeline)
        assert_equal(database, pipeline)
    cut = headwater.wait(pipeline, tables=[PEOPLE], timeout=0.1, on_timeout="fallback", require="now")
    row = headwater.read(spark, cut)[PEOPLE].where("id = 1").collect()[0]
    assert (row["email"], row["phone"]) == (digest(f"{SECRET}1"), "***")
    assert_nowhere(tmp_path, pipeline)


def test_a_table_that_joins_a_running_driver_is_hidden_from_its_first_change_on(
    database: Database, start: Started, spark: SparkSession, tmp_path: Path
) -> None:
    pipeline = start("public.plain")
    load_tables(pipeline)
    with following(pipeline) as running:
        until(lambda: status(pipeline)["running"] or running.done(), "the driver runs")
        both = start(ENTRY, "public.plain")
        with armed(tmp_path, "load.after_publication") as hold:
            loading = in_thread(lambda: load_tables(both))
            hold.reached(loading)
            with database.connect(autocommit=False) as large:
                large.execute(f"{ROWS}(1000, 16000) g".replace("'name'", "repeat('y', 3000)"))
                until(lambda: any(tmp_path.rglob("*.blocks")) or running.done(), "it is spilled")
                assert_nowhere(tmp_path, pipeline)
        loading.result(120)
        database.execute(*WRITES)
        headwater.wait(both)
        assert_equal(database, both)
        # The same table with another selection: what was masked is hashed from its load on.
        other = start({"name": PEOPLE, "columns": {"hash": list(TYPES)}}, "public.plain")
        assert "option_waits_for_load" in {problem.code for problem in check(other).problems}
        load_tables(other, PEOPLE, again=True)
        database.execute(f"update people set phone = '{SECRET}' where id = 2")
        headwater.wait(other)
        assert (2, digest(SECRET)) in lake_rows(other, PEOPLE, ["id", "phone"])
    assert_nowhere(tmp_path, pipeline)


@pytest.mark.parametrize("is_loaded", [False, True], ids=["never loaded", "made again"])
def test_nothing_is_shown_of_a_table_that_somebody_else_publishes_before_its_load(
    database: Database, start: Started, spark: SparkSession, tmp_path: Path, is_loaded: bool
) -> None:
    database.execute("create table wide (id int primary key, note text)")
    database.publish("headwater_shop", "wide", "people")
    with database.superuser() as dba:
        for name in ("headwater_shop", "headwater_shop_inserts"):
            dba.execute(f"alter publication {name} owner to current_user")
    pipeline = start(ENTRY, "public.wide")
    load_tables(pipeline, "public.wide", *([PEOPLE] if is_loaded else []))
    with following(pipeline) as running:
        until(lambda: status(pipeline)["running"] or running.done(), "the driver runs")
        if is_loaded:
            database.execute("drop table people", MADE)
            with database.superuser() as dba:
                dba.execute("alter publication headwater_shop add table people")
        with database.connect(autocommit=False) as large:
            large.execute(f"{ROWS}(1000, 3000) g")  # more than a block: it comes first in the file
            large.execute("insert into wide select g, repeat('y', 3000) from generate_series(1, 30000) g")
            until(lambda: any(tmp_path.rglob("*.blocks")) or running.done(), "it is spilled")
            assert_nowhere(tmp_path, pipeline)
        with pytest.raises(LostLease, match="does not know what to hide of it"):
            load_tables(pipeline, PEOPLE, again=is_loaded)
    load_tables(pipeline, PEOPLE, again=is_loaded)
    database.execute(*WRITES)
    catch_up(pipeline)
    assert_equal(database, pipeline)
    assert_nowhere(tmp_path, pipeline)


def test_a_partition_with_the_name_of_a_table_that_hides_columns_suspends_its_table_and_shows_nothing(
    database: Database, start: Started, spark: SparkSession, tmp_path: Path
) -> None:
    database.execute("create table parts (id int primary key, email text) partition by range (id)", "drop table people")
    load_tables(start("public.parts", "public.plain"))
    pipeline = start("public.parts", "public.plain", {"name": PEOPLE, "columns": {"hash": ["email"]}})
    database.execute(
        "create table people partition of parts for values from (0) to (10)",
        f"insert into parts values (1, '{SECRET}')",
        "insert into plain values (2, 2)",
    )
    catch_up(pipeline)
    record = record_of(pipeline, "public.parts")
    assert (record.state, f"hides columns of {PEOPLE}" in record.reason) == ("suspended", True)
    assert record.remedy == "headwater load PIPELINE.yaml --table public.parts --again"
    assert lake_rows(pipeline, "public.plain", ["id"]) == [(1,), (2,)], "no other table minds"
    assert_nowhere(tmp_path, pipeline)
    load_tables(pipeline, "public.parts", again=True)
    database.execute("insert into parts values (2, 'shown')")
    catch_up(pipeline)
    assert lake_rows(pipeline, "public.parts", ["id", "email"]) == [(1, SECRET), (2, "shown")]


def test_a_table_that_was_made_again_is_hidden_from_its_first_change_on(
    database: Database, start: Started, spark: SparkSession, tmp_path: Path
) -> None:
    pipeline = start(ENTRY)
    load_tables(pipeline)
    with following(pipeline) as running:
        until(lambda: status(pipeline)["running"] or running.done(), "the driver runs")
        database.execute("drop table people", MADE)
        until(lambda: record_of(pipeline, PEOPLE).state == "suspended" or running.done(), "it is noticed")
        with armed(tmp_path, "load.after_publication") as hold:
            loading = in_thread(lambda: load_tables(pipeline, PEOPLE, again=True))
            hold.reached(loading)
            with database.connect(autocommit=False) as large:
                large.execute(f"{ROWS}(1000, 16000) g".replace("'name'", "repeat('y', 3000)"))
                until(lambda: any(tmp_path.rglob("*.blocks")) or running.done(), "it is spilled")
                assert_nowhere(tmp_path, pipeline)
        loading.result(120)
        database.execute(*WRITES)
        headwater.wait(pipeline)
        assert_equal(database, pipeline)
    assert_nowhere(tmp_path, pipeline)


@pytest.mark.parametrize(
    "change",
    [
        "alter table people rename email to mail",
        "begin; alter table people rename email to other; alter table people rename name to email; "
        "alter table people rename other to name; commit",
        "alter table people add column more text default 'x'",
        "alter table people drop column salary",
    ],
)
def test_a_change_of_columns_suspends_the_table_and_shows_nothing(
    database: Database, start: Started, spark: SparkSession, tmp_path: Path, change: str
) -> None:
    pipeline = start(ENTRY)
    load_tables(pipeline)
    catch_up(pipeline)
    database.execute(change, "update people set id = -id where id < 4")
    catch_up(pipeline)
    record = record_of(pipeline, PEOPLE)
    assert record.state == "suspended"
    assert "--again" in record.remedy
    assert_nowhere(tmp_path, pipeline)


def test_another_key_is_refused_until_its_tables_are_loaded_anew(
    database: Database, start: Started, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = start(ENTRY, "public.plain")
    load_tables(pipeline)
    catch_up(pipeline)
    monkeypatch.setenv(VARIABLE, "another key, which is as long")
    with pytest.raises(Refused, match="another key than when the table was loaded"):
        catch_up(pipeline)
    with pytest.raises(Refused, match="another key than when the table was loaded"):
        verify(pipeline, [TableName.parse(PEOPLE)])
    load_tables(pipeline, PEOPLE, again=True)
    catch_up(pipeline)
    monkeypatch.delenv(VARIABLE)
    # Who only waits or looks needs no key.
    assert status(pipeline)["tables"][PEOPLE]["state"] == "active"
    assert headwater.wait(pipeline, require="5m")["tables"][PEOPLE]["state"] == "in step"
    with pytest.raises(Refused, match=f"{VARIABLE} is not set"):
        catch_up(pipeline)
    with pytest.raises(Refused, match=f"{VARIABLE} is not set"):
        load_tables(pipeline, PEOPLE, again=True)


def test_a_load_with_a_mistaken_key_changes_nothing(
    database: Database, start: Started, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = start(ENTRY)
    load_tables(pipeline)
    database.execute("create table more (id int primary key, email text)", "insert into more values (1, 'a@b.example')")
    both = start(ENTRY, {"name": "public.more", "columns": {"hash": ["email"]}})
    monkeypatch.setenv(VARIABLE, "another key, which is as long")
    for again in (False, True):
        with pytest.raises(Refused, match=f"another key than when {PEOPLE} was loaded"):
            load_tables(both, "public.more", again=again)
    monkeypatch.setenv(VARIABLE, KEY)
    catch_up(both)
    monkeypatch.setenv(VARIABLE, "another key, which is as long")
    load_tables(both, "public.more", PEOPLE, again=True)
    catch_up(both)
    assert {record_of(both, name).state for name in (PEOPLE, "public.more")} == {"active"}


def test_a_load_from_a_new_source_with_a_mistaken_key_changes_nothing(
    database: Database, start: Started, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_tables(start(ENTRY, "public.plain"))
    database.execute("create table more (id int primary key, email text)", "drop table people")
    pipeline = start("public.p*", {"name": "public.more", "columns": {"hash": ["email"]}})
    monkeypatch.setenv(VARIABLE, "another key, which is as long")
    assert main(["load", pipeline.file, "--again", "--new-source"]) == EXIT_REFUSED
    assert "suspended" not in {record_of(pipeline, name).state for name in (PEOPLE, "public.plain")}


def test_what_cannot_be_hidden_is_refused_with_its_reason(database: Database, start: Started) -> None:
    database.execute("create table parts (id int primary key, email text) partition by range (id)")
    pipeline = start(
        {"name": PEOPLE, "columns": {"hash": ["id", "nobody"], "mask": {"email": "x"}}},
        {"name": "public.parts", "columns": {"hash": ["email"]}},
    )
    found = {(problem.code, problem.where) for problem in check(pipeline).problems if problem.is_error}
    assert {("hidden_key", PEOPLE), ("unknown_column", PEOPLE), ("part_of_partitioned", "public.parts")} <= found
