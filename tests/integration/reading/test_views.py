"""Published views: all tables of one cut in one call, for readers who know neither cuts nor versions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

import headwater
from fixtures.lakes import HandLake, position_at
from headwater.errors import Refused
from headwater.lake.cuts import list_pins, pin_cut, release_pin
from headwater.lake.horizon import Horizons
from headwater.names import TableName
from headwater.spark.session import build_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

TABLES = {"public.orders": 3, 'public."Order Lines"': 5, "archive.orders": 7}
RETENTION = "spark.databricks.delta.vacuum.enforceTimeTravelWithinDeletedFileRetentionDuration"


@pytest.fixture
def session() -> Iterator[SparkSession]:
    spark = build_session().newSession()
    yield spark
    for name in ("public", "archive", "shop"):
        spark.sql(f"drop database if exists {name} cascade")


@pytest.fixture
def cut(session: SparkSession, tmp_path: Path) -> dict[str, Any]:
    """Three tables with a version 0 without rows and a version 1 with as many as TABLES says. Delta by itself refuses
    to read version 1 as soon as there is another."""
    tables: dict[str, dict[str, Any]] = {}
    (tmp_path / "_headwater").mkdir()
    for name, rows in TABLES.items():
        path = tmp_path / TableName.parse(name).path
        session.sql(
            f"create table delta.`{path}` (id bigint) using delta "
            "tblproperties ('delta.deletedFileRetentionDuration' = 'interval 0 hours')"
        )
        session.range(rows).coalesce(1).write.format("delta").mode("append").save(str(path))
        tables[name] = {"path": path.as_uri(), "version": 1, "applied_lsn": "0/10", "state": "in step"}
    return {"pipeline": "shop", "epoch": 3, "tables": tables}


def test_views_of_a_lake_whose_uri_has_escapes(session: SparkSession, cut: dict[str, Any], tmp_path: Path) -> None:
    home = tmp_path / "läke röot"
    home.mkdir()
    (tmp_path / "_headwater").rename(home / "_headwater")
    for name, table in cut["tables"].items():
        path = home / TableName.parse(name).path
        path.parent.mkdir(exist_ok=True)
        (tmp_path / TableName.parse(name).path).rename(path)
        table["path"] = path.as_uri()
    one = {**cut, "tables": {"public.orders": cut["tables"]["public.orders"]}}
    named = {
        **headwater.views(session, cut),
        "as registered": headwater.register(session, one, database="shop")["public.orders"],
    }
    for name, view in named.items():
        assert session.sql(f"select count(*) from {view}").collect()[0][0] == TABLES.get(name, TABLES["public.orders"])


def more(session: SparkSession, cut: dict[str, Any]) -> dict[str, Any]:
    """A later cut: each table has a hundred rows more."""
    later = {name: {**table, "version": 2} for name, table in cut["tables"].items()}
    for table in later.values():
        session.range(1000, 1100).coalesce(1).write.format("delta").mode("append").save(table["path"])
    return {**cut, "epoch": 4, "tables": later}


def counts(session: SparkSession, views: dict[str, str]) -> dict[str, int]:
    return {name: session.sql(f"select * from {view}").count() for name, view in views.items()}


def test_views_show_the_cut_until_they_are_refreshed(session: SparkSession, cut: dict[str, Any]) -> None:
    views = headwater.views(session, cut)
    assert views == {
        "public.orders": "`public`.`orders`",
        'public."Order Lines"': "`public`.`Order_Lines`",
        "archive.orders": "`archive`.`orders`",
    }
    later = more(session, cut)
    assert session.conf.get(RETENTION) == "false"
    assert counts(session, views) == TABLES
    assert headwater.views(session, later) == views
    assert counts(session, views) == {name: rows + 100 for name, rows in TABLES.items()}
    # Another session of the same catalog reads them as well.
    assert counts(build_session().newSession(), views) == {name: rows + 100 for name, rows in TABLES.items()}


def pinned(root: Path) -> dict[str, int]:
    """The version that each view's pin keeps, by what clean-up goes by."""
    owners = [pin.owner for pin in list_pins(str(root))]
    assert len(owners) == len(set(owners)), "a view has one pin"
    return {name: version for name, (version, _) in Horizons.read(str(root), 1.0).pinned.items()}


def test_what_a_view_shows_is_kept_until_it_is_refreshed_or_dropped(
    session: SparkSession, cut: dict[str, Any], tmp_path: Path
) -> None:
    views = headwater.views(session, cut)
    assert pinned(tmp_path) == dict.fromkeys(TABLES, 1)
    mine = pin_cut(str(tmp_path), cut, "me", list_pins(str(tmp_path))[0].expiry)
    later = more(session, cut)
    lines = 'public."Order Lines"'
    some = {**later, "tables": {name: later["tables"][name] for name in TABLES if name != lines}}
    assert headwater.views(session, some).keys() == some["tables"].keys()
    assert len(list_pins(str(tmp_path))) == len(TABLES) + 1
    release_pin(str(tmp_path), mine.id)
    assert pinned(tmp_path) == {**dict.fromkeys(TABLES, 2), lines: 1}, "a view that was not refreshed keeps its own"
    gone = {name: {**table, "version": 9} for name, table in later["tables"].items()}
    with pytest.raises(Refused) as refused:
        headwater.views(session, {**later, "tables": gone})
    assert refused.value.code == "cut_gone"
    assert pinned(tmp_path) == {**dict.fromkeys(TABLES, 2), lines: 1}
    headwater.drop_views(session, [views[lines], views[lines], "`public`.`never_was`"])
    assert not session.catalog.tableExists("public.Order_Lines")
    assert pinned(tmp_path) == dict.fromkeys(some["tables"], 2)
    assert headwater.views(session, some, keep_cut=0) == {name: views[name] for name in some["tables"]}
    assert pinned(tmp_path) == {}
    session.sql("create view public.other as select 1 as id")
    with pytest.raises(Refused, match="no view that Headwater has made"):
        headwater.drop_views(session, ["public.other"])
    assert session.catalog.tableExists("public.other")


def test_one_database_holds_the_views_of_tables_whose_names_differ(session: SparkSession, cut: dict[str, Any]) -> None:
    with pytest.raises(Refused, match=r"public\.orders and archive\.orders would both be the view") as refused:
        headwater.views(session, cut, database="shop")
    assert refused.value.code == "same_view"
    del cut["tables"]["archive.orders"]
    views = headwater.views(session, cut, database="shop")
    assert list(views.values()) == ["`shop`.`orders`", "`shop`.`Order_Lines`"]
    assert counts(session, views) == {name: TABLES[name] for name in views}


def test_temporary_views_are_this_sessions_alone(session: SparkSession, cut: dict[str, Any]) -> None:
    cut["tables"]['public."123"'] = cut["tables"].pop("archive.orders")
    views = headwater.views(session, cut, temporary=True)
    assert list(views.values()) == ["`orders`", "`Order_Lines`", "`123`"]
    more(session, cut)
    assert counts(session, views) == {name: TABLES.get(name, TABLES["archive.orders"]) for name in views}
    assert not build_session().newSession().catalog.tableExists("orders")


def test_of_temporary_views_those_of_headwater_are_dropped(session: SparkSession, cut: dict[str, Any]) -> None:
    del cut["tables"]["archive.orders"]
    headwater.views(session, cut, temporary=True)
    session.range(1).createOrReplaceTempView("mine")
    headwater.drop_views(session, ["orders", "`Order_Lines`"])
    assert not any(session.catalog.tableExists(view) for view in ("orders", "Order_Lines"))
    session.range(1).createOrReplaceTempView("orders")
    for view in ("mine", "orders"):
        with pytest.raises(Refused, match="no view that Headwater has made"):
            headwater.drop_views(session, [view])
        assert session.catalog.tableExists(view)
    with pytest.raises(Refused, match="no view that Headwater has made"):
        headwater.views(session, cut, temporary=True)
    assert session.table("orders").count() == 1
    assert not session.catalog.tableExists("Order_Lines")


def test_a_table_that_is_behind_changes_no_view_unless_it_is_allowed(
    session: SparkSession, cut: dict[str, Any]
) -> None:
    views = headwater.views(session, cut)
    later = more(session, cut)
    later["tables"]["archive.orders"] |= {"state": "behind", "reason": "suspended"}
    with pytest.raises(Refused, match="suspended"):
        headwater.views(session, later)
    assert counts(session, views) == TABLES
    assert headwater.views(session, later, allow_behind=True) == views
    assert counts(session, views)["public.orders"] == TABLES["public.orders"] + 100


def test_a_pipeline_stands_for_all_its_tables_at_the_newest_epoch(session: SparkSession, tmp_path: Path) -> None:
    root = tmp_path / "lake"
    file = tmp_path / "shop.yaml"
    source = {"connection": "postgresql://nobody@localhost/none"}
    content = {"pipeline": "shop", "source": source, "lake": {"root": str(root)}, "tables": ["public.orders"]}
    file.write_text(yaml.safe_dump(content))
    lake = HandLake(root, position_at(), ["public.orders"])
    with pytest.raises(Refused) as refused:
        headwater.views(session, file)
    assert refused.value.code == "no_epoch"
    path = str(root / "public" / "orders")
    session.sql(f"create table delta.`{path}` (id bigint) using delta")
    for epoch in range(2):
        session.range(10).coalesce(1).write.format("delta").mode("append").save(path)
        lake.publish(0x2000 + epoch, "public.orders")
        session.range(10).coalesce(1).write.format("delta").mode("append").save(path)  # no epoch tells of it
        assert counts(session, headwater.views(session, file)) == {"public.orders": 10 * (epoch + 1)}


def test_registered_tables_are_read_by_name_at_their_newest_version(session: SparkSession, cut: dict[str, Any]) -> None:
    tables = headwater.register(session, cut)
    assert tables["public.orders"] == "`public`.`orders`"
    more(session, cut)
    assert headwater.register(session, cut) == tables
    assert counts(build_session().newSession(), tables) == {name: rows + 100 for name, rows in TABLES.items()}
    session.sql("drop table public.orders")
    session.sql("create view public.orders as select 1 as id")
    with pytest.raises(Refused, match=r"`public`\.`orders` is a view") as refused:
        headwater.register(session, cut)
    assert refused.value.code == "name_taken"
    session.sql("drop view public.orders")
    session.sql(f"create table public.orders using delta location '{cut['tables']['archive.orders']['path']}'")
    with pytest.raises(Refused, match=r"`public`.`orders` is a table in file:.*, not public\.orders"):
        headwater.register(session, cut)
    assert headwater.read(session, cut)["public.orders"].count() == TABLES["public.orders"]


def test_a_view_of_somebody_elses_is_not_replaced(session: SparkSession, cut: dict[str, Any]) -> None:
    session.sql("create database if not exists public")
    session.sql("create view public.orders as select 1 as mine")
    with pytest.raises(Refused, match=r"`public`\.`orders` is no view that Headwater has made") as refused:
        headwater.views(session, cut)
    assert refused.value.code == "name_taken"
    assert session.sql("select * from public.orders").columns == ["mine"]
    session.sql("drop view public.orders")
    assert headwater.views(session, cut) == headwater.views(session, cut)


_HIVE = """
import json, sys
import headwater
from headwater.spark.session import build_session
spark = build_session(app_name="headwater hive test")
assert spark.conf.get("spark.sql.catalogImplementation") == "hive"
if sys.argv[1:]:
    headwater.register(spark, json.loads(sys.argv[1]), database="shop")
print(spark.sql("select count(*) from shop.orders").first()[0])
"""


def test_a_hive_metastore_keeps_what_was_registered(cut: dict[str, Any], tmp_path: Path) -> None:
    del cut["tables"]["archive.orders"]
    (tmp_path / "spark-defaults.conf").write_text(
        "spark.sql.catalogImplementation hive\n"
        f"spark.hadoop.javax.jdo.option.ConnectionURL jdbc:derby:;databaseName={tmp_path}/metastore;create=true\n"
    )
    environment = {**os.environ, "SPARK_CONF_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    for arguments in ([json.dumps(cut)], []):  # the second process knows the name only
        program = [sys.executable, "-c", _HIVE, *arguments]
        done = subprocess.run(program, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        assert int(done.stdout) == TABLES["public.orders"]
