"""Lakes that Headwater wrote in each older format: `tests/fixtures/older_lakes/format_N.tar.xz`.

Each was made by the last Headwater of that format: `public.orders` (id, amount, note) with five rows, `load`, then, as
three transactions, row 2 updated, 5 deleted, 6 inserted, and `replicate --until now`.
"""

from __future__ import annotations

import json
import tarfile
from decimal import Decimal
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

import headwater
from fixtures.jobs import catch_up, lake_rows, load_tables
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from headwater.errors import Refused
from headwater.lake import registry
from headwater.lake.paths import registry_path
from headwater.lake.registry import FORMAT_VERSION, Registry
from headwater.pipeline_file.pipeline import Pipeline, load_pipeline
from headwater.reading.newest_views import newest_cut
from headwater.replicate.pausing import pause

pytestmark = pytest.mark.spark

LAKES = Path(__file__).resolve().parents[2] / "fixtures" / "older_lakes"
ROWS = {
    1: (Decimal("1.50"), "note 1"),
    2: (Decimal("3.00"), "changed"),
    3: (Decimal("4.50"), "note 3"),
    4: (Decimal("6.00"), "note 4"),
    6: (Decimal("9.00"), None),
}


@pytest.fixture(params=range(1, FORMAT_VERSION))
def older(request: pytest.FixtureRequest, tmp_path: Path) -> Pipeline:
    """A pipeline whose lake is of the older format; its source is gone."""
    with tarfile.open(LAKES / f"format_{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path / "lake", filter="data")
    file = tmp_path / "shop.yaml"
    root = (tmp_path / "lake").as_uri()
    file.write_text(
        f"pipeline: shop\nsource: {{connection: 'postgresql://localhost:1/shop'}}\nlake: {{root: '{root}'}}\n"
        "tables: [public.orders]\n"
    )
    assert formats(load_pipeline(file)) == {request.param}
    return load_pipeline(file)


def formats(pipeline: Pipeline) -> set[int]:
    """In which the registry's rows are stored, as any reader of Delta sees them."""
    rows = DeltaTable(registry_path(pipeline.lake_path())).to_pyarrow_table(columns=["format_version"])
    return set(rows["format_version"].to_pylist())


def rows_read(spark: SparkSession, pipeline: Pipeline) -> dict[int, tuple[Decimal, str | None]]:
    frame = headwater.read(spark, newest_cut(pipeline))["public.orders"]
    return {row["id"]: (row["amount"], row["note"]) for row in frame.collect()}


def test_a_reader_takes_an_older_lake_as_it_is_and_changes_nothing(spark: SparkSession, older: Pipeline) -> None:
    before = sorted(path for path in Path(older.lake_path()).rglob("*") if "pins" not in path.parts)
    assert rows_read(spark, older) == ROWS
    assert sorted(path for path in Path(older.lake_path()).rglob("*") if "pins" not in path.parts) == before


def test_the_first_writer_upgrades_all_of_it_and_an_older_headwater_is_out_from_then_on(
    spark: SparkSession, older: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Registry.open(older.lake_path(), "shop")
    assert known is not None
    (former,) = formats(older)
    pause(older)
    assert formats(older) == {FORMAT_VERSION}
    now = Registry.open(older.lake_path(), "shop")
    assert now is not None
    assert (now.tables, now.leases) == (known.tables, known.leases)
    assert now.pipeline is not None
    assert now.pipeline.paused
    assert rows_read(spark, older) == ROWS
    with monkeypatch.context() as gone_back:
        gone_back.setattr(registry, "FORMAT_VERSION", former)
        with pytest.raises(Refused, match=f"format {FORMAT_VERSION}, this one knows {former}") as refused:
            newest_cut(older)
        assert refused.value.code == "newer_format"
        with pytest.raises(Refused, match="newer Headwater"):
            known.refresh()  # as the driver of the older version does every second


def test_what_an_older_headwater_wrote_beside_the_upgrade_is_in_it(older: Pipeline) -> None:
    """Two writers that see the older format: the one that comes second finds the other's record."""
    first, second = Registry.open(older.lake_path(), "shop"), Registry.open(older.lake_path(), "shop")
    assert first is not None
    assert second is not None
    orders = first.tables["public.orders"]
    first.write(orders.entered("suspended", "by the first"))
    second.upgrade()
    second.upgrade()
    assert second.tables["public.orders"].reason == "by the first"
    assert formats(older) == {FORMAT_VERSION}
    documents = DeltaTable(registry_path(older.lake_path())).to_pyarrow_table()["document"].to_pylist()
    assert len([document for document in documents if json.loads(document).get("name") == "public.orders"]) == 1


@pytest.mark.postgres
def test_a_driver_upgrades_the_lake_that_it_goes_on_with(
    spark: SparkSession, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.allow_publishing()
    database.execute("create table orders (id int primary key, n int)", "insert into orders values (1, 1)")
    pipeline = write_pipeline(tmp_path, database, "public.orders")
    with monkeypatch.context() as before:
        before.setattr(registry, "FORMAT_VERSION", FORMAT_VERSION - 1)
        load_tables(pipeline)
        catch_up(pipeline)
    assert formats(pipeline) == {FORMAT_VERSION - 1}
    database.execute("insert into orders values (2, 2)")
    catch_up(pipeline)
    assert formats(pipeline) == {FORMAT_VERSION}
    assert lake_rows(pipeline, "public.orders", ["id", "n"]) == [(1, 1), (2, 2)]
