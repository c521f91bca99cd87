"""Reading a cut with Spark: the versions of the cut, whatever came after, and a clear word when they are gone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import headwater
from fixtures.hand_tables import HandTable
from headwater.delta import delta_log
from headwater.delta.data_files import write_batches
from headwater.delta.log_files import look
from headwater.delta.row_count import row_count
from headwater.errors import Refused
from headwater.maintain.cleanup import clean
from headwater.spark.session import build_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def session() -> SparkSession:
    return build_session()


@pytest.fixture
def table(session: SparkSession, tmp_path: Path) -> Path:
    """A Delta table of three versions: empty, 10 rows, 7 rows by a deletion vector."""
    path = tmp_path / "public" / "Order~20Lines"
    properties = "'delta.enableDeletionVectors' = 'true', 'delta.deletedFileRetentionDuration' = 'interval 0 hours'"
    session.sql(f"create table delta.`{path}` (id bigint) using delta tblproperties ({properties})")
    session.range(10).coalesce(1).write.format("delta").mode("append").save(str(path))
    session.sql(f"delete from delta.`{path}` where id < 3")
    return path


def cut_of(path: Path, version: int, state: str = "in step") -> dict[str, Any]:
    entry = {"path": path.as_uri(), "version": version, "applied_lsn": "0/10", "state": state, "reason": "why"}
    return {"pipeline": "shop", "epoch": 3, "tables": {'public."Order Lines"': entry}}


def test_a_cut_is_read_at_its_versions_also_past_deltas_own_retention(session: SparkSession, table: Path) -> None:
    for version, rows in enumerate((0, 10, 7)):
        frames = headwater.read(session, cut_of(table, version))
        assert list(frames) == ['public."Order Lines"']
        assert frames['public."Order Lines"'].count() == rows


@pytest.mark.parametrize("name", ["läke röot", "a%20b", "it's #1"])
def test_a_cut_is_read_below_a_folder_whose_uri_has_escapes(
    session: SparkSession, table: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).mkdir()
    moved = table.rename(tmp_path / name / table.name)
    frames = headwater.read(session, cut_of(moved, 2))
    assert sorted(row.id for row in frames['public."Order Lines"'].collect()) == list(range(3, 10))


def scanned(path: Path, version: int, state: str = "in step", **arguments: Any) -> list[int]:
    found = headwater.scan(cut_of(path, version, state), 'public."Order Lines"', **arguments).read_all()
    return sorted(found["id"].to_pylist())


def test_a_folder_that_delta_rs_cannot_find_is_not_told_as_a_cut_that_is_gone(table: Path) -> None:
    odd = table.rename(table.with_name("Order%20Lines"))
    with pytest.raises(Refused, match="%20 in its name") as refused:
        scanned(odd, 1)
    assert refused.value.code == "bad_argument"


def test_a_cut_is_scanned_without_spark(table: Path) -> None:
    for version, rows in enumerate(([], range(10), range(3, 10))):
        assert scanned(table, version) == list(rows)
    assert scanned(table, 2, where="id > 7", columns=["id"]) == [8, 9]
    assert scanned(table, 2, "behind", allow_behind=True) == list(range(3, 10))
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("not_in_step", {"state": "behind"}),
        ("not_in_cut", {"state": "absent"}),
        ("bad_argument", {"where": "id ="}),
        ("bad_argument", {"columns": ["ID"]}),
        ("cut_gone", {"version": 99}),
    ]
    for code, arguments in wrong:
        with pytest.raises(Refused) as refused:
            scanned(table, arguments.pop("version", 2), **arguments)
        assert refused.value.code == code
    next(table.glob("*.parquet")).unlink()
    with pytest.raises(Refused, match="its files were removed") as refused:
        scanned(table, 2)
    assert refused.value.code == "cut_gone"


def test_filters_find_nan_which_is_greater_than_all_other_numbers(session: SparkSession, tmp_path: Path) -> None:
    """As in the source; by Parquet's own statistics, which leave NaN out, readers would skip its rows."""
    folder = tmp_path / "public" / "f"
    schema = pa.schema([("id", pa.int32()), ("v", pa.float64()), ("r", pa.float32()), ("none", pa.float64())])
    session.sql(f"create table delta.`{folder}` (id int, v double, r float, none double) using delta")
    nan = float("nan")
    rows = pa.table([[1, 2, 3, 4], [1.0, nan, 0.5, None], [1.0, nan, 0.5, None], [None] * 4], schema=schema)
    file = write_batches(str(folder), schema, [rows])
    delta_log.commit(str(folder), 1, [delta_log.commit_info("BY HAND", {}, {}, 0), delta_log.add(file)])
    assert json.loads(file.stats or "")["nullCount"] == {"id": 0, "v": 1, "r": 1, "none": 4}
    cut = cut_of(folder, 1)
    (frame,) = headwater.read(session, cut).values()
    for condition, found in (
        ("v > 5", [2]),
        ("r >= 5", [2]),
        ("v > 0.7", [1, 2]),
        ("v < 0.7", [3]),
        ("r is null", [4]),
    ):
        assert sorted(row.id for row in frame.where(condition).collect()) == found, condition
        scanned = headwater.scan(cut, 'public."Order Lines"', where=condition).read_all()
        assert sorted(scanned["id"].to_pylist()) == found, condition


def test_a_version_that_is_gone_is_refused(session: SparkSession, table: Path) -> None:
    for path, version in ((table, 99), (table.parent / "nothing", 0)):
        with pytest.raises(Refused, match=rf'version {version} of public\."Order Lines" cannot be read') as refused:
            headwater.read(session, cut_of(path, version))
        assert refused.value.code == "cut_gone"


def test_a_table_that_is_behind_is_read_only_on_request_and_an_absent_one_never(
    session: SparkSession, table: Path
) -> None:
    with pytest.raises(Refused):
        headwater.read(session, cut_of(table, 1, "behind"))
    behind = headwater.read(session, cut_of(table, 1, "behind"), allow_behind=True)
    assert behind['public."Order Lines"'].count() == 10
    assert headwater.read(session, cut_of(table, 1, "absent"), allow_behind=True) == {}


def test_the_rows_that_status_counts_are_those_that_spark_reads(session: SparkSession, table: Path) -> None:
    assert [row_count(str(table), version) for version in range(3)] == [0, 10, 7]
    session.sql(f"alter table delta.`{table}` set tblproperties ('delta.checkpointInterval' = '1')")
    session.range(100, 104).coalesce(1).write.format("delta").mode("append").save(str(table))
    session.sql(f"delete from delta.`{table}` where id = 100")
    assert list((table / "_delta_log").glob("*.checkpoint.parquet"))
    newest = 5
    assert row_count(str(table), newest) == session.read.format("delta").load(str(table)).count() == 10


def test_a_version_whose_files_are_gone_is_refused_though_the_log_still_tells_of_it(
    session: SparkSession, table: Path
) -> None:
    session.sql(f"delete from delta.`{table}` where id = 7")
    assert headwater.read(session, cut_of(table, 2))['public."Order Lines"'].count() == 7
    oldest = min(table.glob("deletion_vector_*.bin"), key=lambda path: path.stat().st_mtime_ns)
    oldest.unlink()
    with pytest.raises(Refused, match="its files were removed") as refused:
        headwater.read(session, cut_of(table, 2))
    assert refused.value.code == "cut_gone"
    assert headwater.read(session, cut_of(table, 3))['public."Order Lines"'].count() == 6


def test_cuts_from_the_horizon_on_are_read_after_log_and_files_were_cleaned_up(
    session: SparkSession, tmp_path: Path
) -> None:
    table, chance = HandTable(tmp_path / "public" / "t"), random.Random(11)
    for _ in range(3):
        table.at_random(chance, 8)
        table.checkpoint()
    folder = str(table.folder)
    cleaned = clean(folder, look(folder), 18, log_from=18, orphans_before=None, stop=Event())
    assert cleaned.files
    assert look(folder).entries == list(range(16, 25))
    for version in (18, 21, 24):
        (frame,) = headwater.read(session, cut_of(table.folder, version)).values()
        assert sorted(row.id for row in frame.collect()) == table.contents[version]
    assert session.read.format("delta").load(folder).count() == len(table.contents[-1])
    for version in (3, 16):
        with pytest.raises(Refused) as refused:
            headwater.read(session, cut_of(table.folder, version))
        assert refused.value.code == "cut_gone"
    session.range(9000, 9003).coalesce(1).write.format("delta").mode("append").save(folder)
    assert session.read.format("delta").load(folder).count() == len(table.contents[-1]) + 3
