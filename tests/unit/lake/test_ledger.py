"""The ledger's rows stand in order, say what every table is at each epoch, and let no fenced driver write."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headwater.delta import storage
from headwater.delta.small_tables import SmallTable, open_version, write_checkpoint
from headwater.errors import Fenced
from headwater.lake import ledger as ledger_module
from headwater.lake.ledger import (
    Epoch,
    Ledger,
    TableVersion,
    first_sample,
    last_sample,
    read_all,
    read_epoch,
    read_generation,
)
from headwater.lake.paths import ledger_path
from headwater.position import Position

START = Position("7318", 1, 100)


def _publish(ledger: Ledger, lsn: int, touched: dict[str, TableVersion], everything: dict[str, TableVersion]) -> Epoch:
    return ledger.publish(
        START.at(lsn), touched, all_tables=everything, source_time=None, sample=None, stages={"apply": 0.5}
    )


def _driver(root: Path) -> Ledger:
    ledger = Ledger(str(root), "shop")
    ledger.begin_generation(START)
    return ledger


def test_an_epoch_is_read_back_with_the_tables_it_did_not_touch(tmp_path: Path) -> None:
    ledger = _driver(tmp_path)
    a, b = TableVersion(1, 110, "active", 5, "merge", True), TableVersion(4, 90, "active")
    _publish(ledger, 110, {"a": a}, {"a": a, "b": b})
    later = TableVersion(2, 120, "active", 1, "append", True)
    _publish(ledger, 120, {"a": later}, {"a": later, "b": b})
    newest = read_epoch(str(tmp_path))
    assert newest is not None
    assert (newest.epoch, newest.position, newest.from_lsn) == (2, START.at(120), 110)
    assert newest.tables == {"a": later, "b": b}
    first = read_epoch(str(tmp_path), 1)
    assert first is not None
    assert first.tables == {"a": a, "b": b}
    assert read_epoch(str(tmp_path), 3) is None


def test_the_tables_are_whole_however_long_ago_a_row_carried_them_all(tmp_path: Path) -> None:
    ledger = _driver(tmp_path)
    still = TableVersion(0, 90, "active")
    for number in range(1, 131):
        moving = TableVersion(number, 100 + number, "active", 1, "merge", True)
        _publish(ledger, 100 + number, {"moving": moving}, {"moving": moving, "still": still})
    for epoch in (1, 99, 100, 101, 130):
        found = read_epoch(str(tmp_path), epoch)
        assert found is not None
        assert found.tables["still"] == still
        assert found.tables["moving"].version == epoch
    assert [epoch.epoch for epoch in read_all(str(tmp_path))] == list(range(1, 131))


def test_no_row_is_read_below_the_one_that_carries_all_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"a": TableVersion(1, 110, "active", 5, "merge", True)}
    for _ in range(2):  # the first row of a driver carries them all
        ledger = _driver(tmp_path)
        for lsn in range(110, 150):
            _publish(ledger, lsn, table, table)
    opened: list[str] = []
    genuine = storage.parquet_file

    def counting(place: str) -> Any:
        opened.append(place)
        return genuine(place)

    monkeypatch.setattr(storage, "parquet_file", counting)
    for epoch, files in ((41, 1), (42, 2), (80, 40)):
        opened.clear()
        found = read_epoch(str(tmp_path), epoch)
        assert found is not None
        assert found.tables == table
        assert len(opened) == files, epoch


def test_a_driver_whose_successor_has_begun_writes_no_row(tmp_path: Path) -> None:
    first = _driver(tmp_path)
    _publish(first, 110, {}, {})
    second = _driver(tmp_path)
    assert (first.generation, second.generation) == (1, 2)
    for _ in range(2):  # also when it tries again, having seen the newer generation
        with pytest.raises(Fenced):
            _publish(first, 120, {}, {})
        with pytest.raises(Fenced):
            first.check_fence()
    _publish(second, 115, {}, {})
    assert [epoch.position.lsn for epoch in read_all(str(tmp_path))] == [110, 115]
    assert read_generation(str(tmp_path), "shop") == 2


def test_a_look_at_the_fence_does_not_open_the_way_past_it(tmp_path: Path) -> None:
    """The publisher thread looks at the ledger beside `publish`: what it sees must not let a row land on top."""
    first = _driver(tmp_path)
    _driver(tmp_path)
    with pytest.raises(Fenced):
        first.check_fence()
    with pytest.raises(Fenced):
        _publish(first, 120, {}, {})
    assert read_all(str(tmp_path)) == []


def test_a_look_that_failed_behind_the_fence_does_not_open_the_way_past_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of nobody's epoch loses the race; then the successor begins, and the store is away for a moment."""
    first, successor = _driver(tmp_path), Ledger(str(tmp_path), "shop")
    genuine = SmallTable.look

    def away(table: SmallTable) -> bool:
        if table is first._table:
            successor.begin_generation(START)
            genuine(table)
            raise OSError("away")
        return genuine(table)

    open_version(ledger_path(str(tmp_path))).alter.add_constraint({"any": "true"})
    with monkeypatch.context() as patch:
        patch.setattr(SmallTable, "look", away)
        with pytest.raises(OSError, match="away"):
            _publish(first, 110, {}, {})
    with pytest.raises(Fenced):
        _publish(first, 110, {}, {})
    assert read_all(str(tmp_path)) == []


def test_a_successor_goes_on_from_its_predecessors_last_row(tmp_path: Path) -> None:
    first = _driver(tmp_path)
    a = TableVersion(1, 110, "active", 5, "merge", True)
    second = Ledger(str(tmp_path), "shop")
    _publish(first, 110, {"a": a}, {"a": a})  # between the successor's first look and its generation
    second.begin_generation(START)
    assert second.newest is not None
    assert (second.newest.epoch, second.newest.tables) == (1, {"a": a})


def test_an_empty_ledger_has_no_epoch(tmp_path: Path) -> None:
    assert read_epoch(str(tmp_path)) is None
    _driver(tmp_path)
    assert read_epoch(str(tmp_path)) is None


def _sampled(ledger: Ledger, *samples: tuple[int, int]) -> None:
    for seconds, lsn in samples:
        ledger.publish(
            START.at(lsn), {}, all_tables={}, source_time=None, sample=(_moment(seconds), lsn), stages={"apply": 0.5}
        )


def _moment(seconds: int) -> datetime:
    return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)


def test_a_moment_is_found_at_the_first_sample_after_it(tmp_path: Path) -> None:
    _sampled(_driver(tmp_path), (10, 110), (20, 120), (20, 120), (30, 130))
    found = [first_sample(str(tmp_path), _moment(at), ("7318", 1)) for at in (5, 10, 15, 30, 31)]
    assert found == [(_moment(10), 110), (_moment(10), 110), (_moment(20), 120), (_moment(30), 130), None]
    assert first_sample(str(tmp_path), _moment(5), ("7318", 2)) is None
    assert last_sample(str(tmp_path), START.at(125)) == (_moment(20), 120)


def test_a_moment_that_the_clock_has_shown_twice_is_found_behind_the_second_time(tmp_path: Path) -> None:
    """Set back from 100 s to somewhere below 57: what was committed at 55 then lies between 180 and 190."""
    root, log = str(tmp_path), ("7318", 1)
    _sampled(_driver(tmp_path), (54, 110), (56, 120), (100, 180), (57, 190), (60, 200))
    found = [first_sample(root, _moment(at), log) for at in (55, 58, 90, 101)]
    assert found == [(_moment(57), 190), (_moment(60), 200), None, None]
    assert last_sample(root, START.at(195)) == (_moment(57), 190)


def test_a_step_back_between_the_ledger_and_the_position_file_is_seen(tmp_path: Path) -> None:
    root, log = str(tmp_path), ("7318", 1)
    _sampled(_driver(tmp_path), (54, 110), (56, 120), (100, 180))
    assert first_sample(root, _moment(55), log, (_moment(57), 190)) == (_moment(57), 190)
    assert first_sample(root, _moment(55), log, (_moment(57), 180)) == (_moment(57), 180)
    # The file of a clock that went on: rows of the ledger that are newer than its first sample are no step back.
    assert first_sample(root, _moment(55), log, (_moment(99), 175)) == (_moment(56), 120)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_ledger_of_an_older_headwater_learns_what_is_new_in_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: bool
) -> None:
    before = pa.schema([column for column in ledger_module._SCHEMA if column.name != "lag_seconds"])
    with monkeypatch.context() as older:
        older.setattr(ledger_module, "_SCHEMA", before)
        _publish(_driver(tmp_path), 110, {}, {})
    folder = ledger_path(str(tmp_path))
    before_us = open_version(folder)
    assert "lag_seconds" not in pa.schema(before_us.schema()).names
    if checkpoint:  # as it is found after days: what the log said first is in there
        write_checkpoint(folder)
        for entry in (Path(folder) / "_delta_log").glob("*.json"):
            entry.unlink()
    ledger = _driver(tmp_path)
    for lsn, lag in ((120, 2.5), (130, None)):
        ledger.publish(START.at(lsn), {}, all_tables={}, source_time=None, sample=None, stages={}, lag=lag)
    table = open_version(folder)
    assert pa.schema(table.schema()).names == ledger_module._SCHEMA.names
    assert table.metadata().configuration == before_us.metadata().configuration
    assert table.metadata().id == before_us.metadata().id
    rows = table.to_pyarrow_table(filters=[("kind", "=", "epoch")]).sort_by("epoch").to_pylist()
    assert [(row["to_lsn"], row["lag_seconds"]) for row in rows] == [(110, None), (120, 2.5), (130, None)]
    assert [epoch.position.lsn for epoch in read_all(str(tmp_path))] == [110, 120, 130]
    log = (Path(folder) / "_delta_log").glob("*.json")
    assert sum('"metaData"' in entry.read_text() for entry in log) == (1 if checkpoint else 2), "once is enough"
    write_checkpoint(folder)
    assert [epoch.position.lsn for epoch in read_all(str(tmp_path))] == [110, 120, 130]
    assert pa.schema(open_version(folder).schema()).names == ledger_module._SCHEMA.names


def test_a_generation_can_begin_above_one_that_the_ledger_has_lost(tmp_path: Path) -> None:
    ledger = _driver(tmp_path)
    assert ledger.begin_generation(START, 7) == 8
    assert ledger.begin_generation(START) == 9
    assert read_generation(str(tmp_path), "shop") == 9
