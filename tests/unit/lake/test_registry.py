"""The registry keeps the newest record of each thing, and lets no other pipeline, format or writer pass unnoticed."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from deltalake import DeltaTable

from headwater.delta import storage
from headwater.delta.log_entries import files_of
from headwater.delta.small_tables import SmallTable, rows_of
from headwater.errors import LostLease, Refused
from headwater.lake import registry as registry_module
from headwater.lake.paths import registry_path
from headwater.lake.registry import Capture, Lease, PipelineRecord, Registry, TableRecord
from headwater.lake.reload_records import Keeping, KeepingState, Reload, ReloadState, is_open
from headwater.schema import Column, Leaf, TableSchema, ValueType

SCHEMA = TableSchema(
    relation_id=7,
    schema="public",
    name="orders",
    columns=(
        Column("id", 1, 23, -1, ValueType("int4", "int"), not_null=True),
        Column("tags", 2, 1009, -1, ValueType("array", "array<string>", element=ValueType("text", "string"))),
    ),
    key=("id",),
    leaves=(Leaf(7, "public", "orders", 4711),),
)
TABLE = TableRecord(
    "public.orders",
    "public/orders",
    "catching up",
    incarnation=2,
    start_lsn=2**40,
    capture=Capture(2**40, "10:20:10,14", None, "2026-01-01T00:00:00Z"),
    schemas=((2**40, SCHEMA),),
    membership=2**31 + 7,
)
PIPELINE = PipelineRecord("7318", 1, "slot", "publication", 5, True, True)


def test_what_is_written_is_read_back_by_another_process(tmp_path: Path) -> None:
    written = Registry.create(str(tmp_path), "shop")
    lease = Lease("load", "a1", "headwater load a1", "host", 1, "2026-01-01T00:00:00Z")
    written.write(PIPELINE, TABLE, lease)
    read = Registry.open(str(tmp_path), "shop")
    assert read is not None
    assert (read.pipeline, read.tables, read.leases) == (PIPELINE, {"public.orders": TABLE}, {"load": lease})
    assert read.tables["public.orders"].app_id("shop") == "headwater/shop/public.orders/2"


def test_a_record_is_on_disk_when_it_is_written_with_the_one_below_which_may_be_another_process_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[list[str]] = []
    real = storage.sync_files

    def sync_files(*places: str) -> None:
        synced.append(sorted(Path(place).name for place in places if place.endswith(".json")))
        real(*places)

    one = Registry.create(str(tmp_path), "shop")
    other = Registry.open(str(tmp_path), "shop")
    assert other is not None
    monkeypatch.setattr(storage, "sync_files", sync_files)
    for writer in (one, one, other, one):
        writer.refresh()
        writer.write(TABLE)
    entries = [f"{version:020d}.json" for version in range(5)]
    assert synced == [entries[0:2], entries[2:3], entries[2:4], entries[3:5]]


def test_a_reader_sees_the_newest_record_after_a_refresh(tmp_path: Path) -> None:
    writer = Registry.create(str(tmp_path), "shop")
    writer.write(TABLE)
    reader = Registry.open(str(tmp_path), "shop")
    assert reader is not None
    writer.write(TABLE.entered("suspended", "its columns changed", "headwater load"))
    assert reader.record("public.orders") == TABLE
    reader.refresh()
    seen = reader.record("public.orders")
    assert (seen.state, seen.reason, seen.remedy) == ("suspended", "its columns changed", "headwater load")


@pytest.mark.parametrize("more", [0, 1])
def test_a_reader_that_has_read_what_a_power_cut_took_reads_what_has_its_number_now(tmp_path: Path, more: int) -> None:
    writer = Registry.create(str(tmp_path), "shop")
    writer.write(TABLE)
    writer.write(TABLE.entered("suspended", "nobody will remember it", ""))
    reader = Registry.open(str(tmp_path), "shop")
    assert reader is not None
    folder = Path(registry_path(str(tmp_path)))
    for file in map(Path, files_of(str(folder), 2)):
        file.unlink()
    after = Registry.open(str(tmp_path), "shop")
    assert after is not None
    after.write(replace(TABLE, name="public.customers"))
    for _ in range(more):
        after.write(replace(TABLE, name="public.lines"))
    reader.refresh()
    assert reader.tables == after.tables
    assert reader.tables["public.orders"].state == "catching up"


def test_where_nothing_was_loaded_there_is_no_registry(tmp_path: Path) -> None:
    assert Registry.open(str(tmp_path), "shop") is None


def test_two_writers_of_different_records_both_succeed(tmp_path: Path) -> None:
    first = Registry.create(str(tmp_path), "shop")
    first.write(PIPELINE)
    second = Registry.open(str(tmp_path), "shop")
    assert second is not None
    first.write(TABLE)
    second.write(replace(TABLE, name="public.customers"))
    first.refresh()
    assert set(first.tables) == {"public.orders", "public.customers"}


def test_two_writers_of_one_record_are_told_apart(tmp_path: Path) -> None:
    first = Registry.create(str(tmp_path), "shop")
    first.write(TABLE)
    second = Registry.open(str(tmp_path), "shop")
    assert second is not None
    first.write(TABLE.entered("active"))
    with pytest.raises(LostLease):
        second.write(TABLE.entered("suspended"))
    second.refresh()
    assert second.tables["public.orders"].state == "active"


@pytest.mark.parametrize("known", [False, True])
def test_a_load_begins_a_table_from_what_another_job_has_made_of_it_at_the_same_moment(
    tmp_path: Path, known: bool
) -> None:
    load = Registry.create(str(tmp_path), "shop")
    load.write(TABLE if known else PIPELINE)
    driver = Registry.open(str(tmp_path), "shop")
    assert driver is not None
    driver.write(replace(TABLE, state="active", incarnation=5))
    begun = load.begin(
        TABLE.name, lambda before: replace(TABLE, state="loading", incarnation=before.incarnation + 1 if before else 1)
    )
    driver.refresh()
    assert begun.phase == driver.record(TABLE.name).phase == (6, "loading")


def test_several_tables_change_in_one_commit_and_behind_a_lost_race_each_is_asked_again(tmp_path: Path) -> None:
    """A driver that ends has something to note of each of its tables, which may be hundreds."""
    names = ["public.a", "public.b", "public.c"]
    driver = Registry.create(str(tmp_path), "shop")
    driver.write(*(replace(TABLE, name=name) for name in names))
    job = Registry.open(str(tmp_path), "shop")
    assert job is not None
    job.write(replace(TABLE, name="public.b", state="suspended"))
    version = DeltaTable(registry_path(str(tmp_path))).version()
    driver.change_each(names, lambda record: record.entered("active") if record.state == "catching up" else None)
    assert DeltaTable(registry_path(str(tmp_path))).version() == version + 1
    job.refresh()
    assert [job.tables[name].state for name in names] == ["active", "suspended", "active"]
    driver.change_each(names, lambda record: None)
    assert DeltaTable(registry_path(str(tmp_path))).version() == version + 1, "nothing is to be noted"


def test_a_second_pipeline_under_the_same_root_is_refused(tmp_path: Path) -> None:
    Registry.create(str(tmp_path), "shop").write(PIPELINE)
    with pytest.raises(Refused) as refused:
        Registry.open(str(tmp_path), "billing")
    assert refused.value.code == "foreign_root"
    assert "'shop'" in str(refused.value)


def test_a_lake_of_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(registry_module, "FORMAT_VERSION", registry_module.FORMAT_VERSION + 1)
        Registry.create(str(tmp_path), "shop").write(PIPELINE)
    with pytest.raises(Refused) as refused:
        Registry.open(str(tmp_path), "shop")
    assert refused.value.code == "newer_format"


def test_a_table_that_a_registry_without_memberships_holds_is_read(tmp_path: Path) -> None:
    registry = Registry.create(str(tmp_path), "shop")
    row = registry._row(TABLE)
    document = json.loads(row["document"])
    del document["membership"]
    registry._commit([{**row, "document": json.dumps(document)}])
    read = Registry.open(str(tmp_path), "shop")
    assert read is not None
    assert read.tables == {"public.orders": replace(TABLE, membership=None)}


def test_a_registry_of_many_changes_stays_small_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "_COMPACT_ABOVE", 5)
    writer = Registry.create(str(tmp_path), "shop")
    writer.write(PIPELINE, replace(TABLE, name="public.customers"))
    for number in range(20):
        writer.write(replace(TABLE, rows=number))
    read = Registry.open(str(tmp_path), "shop")
    assert read is not None
    assert read.pipeline == PIPELINE
    assert {name: record.rows for name, record in read.tables.items()} == {
        "public.orders": 19,
        "public.customers": None,
    }
    assert len(read._table.files) <= 7
    read.write(replace(TABLE, rows=20))
    writer.refresh()
    assert writer.tables["public.orders"].rows == 20


@pytest.mark.parametrize("failing", ["look", "rows"])
def test_what_a_refresh_could_not_read_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    monkeypatch.setattr(registry_module, "_COMPACT_ABOVE", 0)
    one = Registry.create(str(tmp_path), "shop")
    one.write(PIPELINE, TABLE)
    other = Registry.open(str(tmp_path), "shop")
    assert other is not None
    other.write(replace(TABLE, name="public.new"))
    other.change("public.orders", lambda record: record.entered("suspended", "why"))
    look = SmallTable.look

    def away(table: SmallTable) -> None:
        look(table)
        raise OSError("away")

    with monkeypatch.context() as patch:
        if failing == "look":
            patch.setattr(SmallTable, "look", away)
        else:
            patch.setattr(registry_module, "rows_of", away)
        with pytest.raises(OSError, match="away"):
            one.refresh()
    # As who holds a lease gives it back, whatever has happened.
    lease = Lease("load", "a1", "", "", 0, "")
    one.change_lease("load", lambda held: lease)
    read = Registry.open(str(tmp_path), "shop")
    assert read is not None
    assert {name: record.state for name, record in read.tables.items()} == {
        "public.orders": "suspended",
        "public.new": "catching up",
    }
    assert read.leases == {"load": lease}


def test_what_happened_to_tables_is_told_for_a_week_whatever_has_become_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert TABLE.capture is not None
    old, former, late, now = (now_text(-days) for days in (9, 6, 5, 0))
    loaded = [replace(TABLE, capture=replace(TABLE.capture, taken_at=moment)) for moment in (old, former, now)]
    suspended = [replace(record.entered("suspended", "why"), since=late) for record in loaded[1:2]]
    writer = Registry.create(str(tmp_path), "shop")
    for record in (loaded[0], loaded[0].entered("active"), loaded[1], *suspended, replace(suspended[0], rows=7)):
        writer.write(record)
    writer.write(loaded[2], replace(TABLE, name="public.new", capture=None))
    reader = Registry.open(str(tmp_path), "shop")
    assert reader is not None
    lately = {
        (former, "loaded", "public.orders"),
        (late, "suspended", "public.orders"),
        (now, "loaded", "public.orders"),
    }
    assert reader.happened() == writer.happened() == lately

    monkeypatch.setattr(registry_module, "_COMPACT_ABOVE", 5)
    writer.write(PIPELINE)
    assert len(writer._table.files) == 1
    for _ in range(2):  # what stays stays the next time, too
        reader.refresh()
        assert reader.happened() == lately
        assert reader.tables == {**writer.tables, "public.orders": loaded[2]}
        for number in range(6):
            writer.write(replace(PIPELINE, start_lsn=number))
    rows = rows_of(writer._table)
    older = [
        row for row in rows if row["kind"] == "table" and row["revision"] < writer._revisions["table", row["name"]]
    ]
    assert 1 <= len(older) <= 2, "at most one for each event"
    assert all(json.loads(row["document"])["schemas"] == [] for row in older)


def test_what_job_and_driver_said_of_a_reload_goes_at_once_a_week_after_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reload without its answer would look like one that a driver has yet to begin."""
    week, days = now_text(-8), now_text(-6)
    writer = Registry.create(str(tmp_path), "shop")

    def say(name: str, state: ReloadState, answer: KeepingState | None, asked: str, answered: str = "") -> None:
        writer.write(Reload(name, TABLE.name, 1, (), "all", "session", state, asked))
        if answer is not None:
            writer.write(Keeping(name, TABLE.name, answer, 1, 0, answered))

    say("done", "read", "done", week, week)
    say("failed", "given up", "failed", week, week)
    say("done lately", "read", "done", week, days)
    say("going on", "read", "keeping", week, week)
    say("given up, and not yet by the driver", "given up", "keeping", week, week)
    say("not answered", "asked", None, week)
    say("given up without a driver", "given up", None, week)
    say("thinned out by an older one", "read", None, week)
    writer.write(Keeping("of a load", TABLE.name, "done", 1, 0, week))
    monkeypatch.setattr(registry_module, "_COMPACT_ABOVE", 0)
    writer.write(PIPELINE)
    reader = Registry.open(str(tmp_path), "shop")
    assert reader is not None
    answered = {"done lately", "going on", "given up, and not yet by the driver"}
    assert set(reader.kept) == answered
    assert set(reader.reloads) == {*answered, "not answered"}
    names = [name for name, reload in reader.reloads.items() if is_open(reload, reader.kept.get(name))]
    assert names == ["going on", "not answered"]


def now_text(days: float) -> str:
    """The moment so many days from now, as records tell it."""
    moment = datetime.now(UTC) + timedelta(days=days)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
