"""Cuts: their form, what they say of tables that are not in step, how long they are kept; what pollers read."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

import headwater
from fixtures.lakes import HandLake, position_at, utc
from headwater.delta import storage
from headwater.delta.row_count import row_count
from headwater.errors import Refused
from headwater.lake.cuts import list_pins, pin_cut, read, release_pin, remove_expired, remove_torn_pins, take_cut
from headwater.lake.look import NOT_YET_SHOWN
from headwater.lake.position_file import read_position_file, write_position_file
from headwater.lake.reader import LakeReader

A, B, C = "public.a", "public.b", 'public."Order Lines"'


@pytest.fixture
def lake(tmp_path: Path) -> HandLake:
    return HandLake(tmp_path / "lake", position_at(lsn=0x100), [A, B, C])


def cut_of(lake: HandLake, *tables: str, lsn: int) -> dict[str, Any]:
    reader = LakeReader(lake.root, "shop")
    look = reader.look()
    assert look.file is not None
    return take_cut(lake.root, "shop", look, reader.epoch(look.file.epoch), tables, lsn)


def test_a_cut_holds_the_versions_of_one_epoch_and_the_position_for_which_they_are_exact(lake: HandLake) -> None:
    lake.publish(0x200, A)
    lake.publish(0x300, A, C, read=0x380)
    assert cut_of(lake, A, C, lsn=0x380) == {
        "pipeline": "shop",
        "epoch": 2,
        "position": {"lsn": "0/380", "timeline": 1, "system_id": "7"},
        "source_time": None,
        "tables": {
            A: {
                "path": (Path(lake.root) / "public" / "a").as_uri(),
                "version": 2,
                "applied_lsn": "0/300",
                "state": "in step",
            },
            C: {
                "path": (Path(lake.root) / "public" / "Order~20Lines").as_uri(),
                "version": 1,
                "applied_lsn": "0/300",
                "state": "in step",
            },
        },
    }


def test_a_cut_says_since_when_and_why_a_table_is_behind_and_which_is_absent(lake: HandLake) -> None:
    lake.publish(0x200, A)
    lake.enter(B, "suspended", "column x was dropped")
    tables = cut_of(lake, A, B, "public.unknown", lsn=0x200)["tables"]
    assert tables[A]["state"] == "in step"
    assert (tables[B]["state"], tables[B]["reason"]) == ("behind", "column x was dropped")
    assert tables[B]["since"] == lake.registry.record(B).since
    assert (tables["public.unknown"]["state"], tables["public.unknown"]["version"]) == ("absent", None)


def test_a_table_that_the_registry_has_in_step_and_the_epoch_has_not_is_behind(lake: HandLake) -> None:
    lake.versions[A] = replace(lake.versions[A], state="suspended")
    lake.publish(0x200, B)
    lake.enter(A, "active")
    tables = cut_of(lake, A, B, lsn=0x200)["tables"]
    assert (tables[A]["state"], tables[A]["reason"]) == ("behind", NOT_YET_SHOWN)
    assert tables[B]["state"] == "in step"


def test_reading_a_cut_with_a_table_that_is_not_in_step_is_refused(lake: HandLake) -> None:
    lake.publish(0x200, A)
    lake.enter(B, "suspended", "column x was dropped")
    no_spark = cast("Any", None)
    with pytest.raises(Refused, match=r"public\.b is behind: column x was dropped") as refused:
        read(no_spark, cut_of(lake, A, B, lsn=0x200))
    assert refused.value.code == "not_in_step"


def test_pins_are_kept_until_they_expire_or_are_released(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert list_pins(root) == []
    now = utc(0)
    late = pin_cut(root, {"epoch": 2}, "dag run task", now + timedelta(hours=2))
    early = pin_cut(root, {"epoch": 1}, "shell", now + timedelta(hours=1))
    assert list_pins(root, now) == [early, late]
    assert [pin.cut for pin in list_pins(root, now + timedelta(hours=1))] == [{"epoch": 2}]
    release_pin(root, late.id)
    release_pin(root, late.id)
    assert list_pins(root, now) == [early]


def test_a_pin_is_a_file_of_cut_owner_and_expiry_and_nothing_unfinished_stays(tmp_path: Path) -> None:
    pin = pin_cut(str(tmp_path), {"epoch": 2}, "owner", utc(0))
    folder = tmp_path / "_headwater" / "pins"
    assert [path.name for path in folder.iterdir()] == [f"{pin.id}.json"]
    assert json.loads((folder / f"{pin.id}.json").read_text()) == {
        "cut": {"epoch": 2},
        "owner": "owner",
        "expiry": "2023-11-14T22:13:20Z",
    }


def test_who_may_write_to_the_lake_may_pin_and_read_pins_whatever_the_umask_of_who_pinned_first(tmp_path: Path) -> None:
    control = tmp_path / "_headwater"
    control.mkdir()
    control.chmod(0o2775)
    before = os.umask(0o077)
    try:
        pin_cut(str(tmp_path), {}, "carol", utc(0))
    finally:
        os.umask(before)
    assert stat.S_IMODE((control / "pins").stat().st_mode) == 0o2775
    assert [stat.S_IMODE(pin.stat().st_mode) for pin in (control / "pins").iterdir()] == [0o664]


def test_a_pin_that_its_owner_lets_nobody_read_stops_clean_up_and_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(tmp_path)
    hers, torn = pin_cut(root, {}, "carol", utc(0)), pin_cut(root, {}, "dan", utc(0))
    files = {pin.id: tmp_path / "_headwater" / "pins" / f"{pin.id}.json" for pin in (hers, torn)}
    files[torn.id].write_text("")
    read_text = storage.read_text

    def denied(place: str) -> str:
        if hers.id in place:
            raise PermissionError(13, f"Failed to open local file '{place}'")
        return read_text(place)

    monkeypatch.setattr(storage, "read_text", denied)
    remove_torn_pins(root)
    assert [pin_id for pin_id, file in files.items() if file.exists()] == [hers.id]
    for clean_up in (list_pins, remove_expired):
        with pytest.raises(Refused, match="nobody can tell which versions it keeps") as refused:
            clean_up(root)
        assert (refused.value.code, refused.value.where) == ("damaged_pin", str(files[hers.id]))
        assert refused.value.remedy.startswith("let this user read it, or remove the file")
    monkeypatch.setattr(storage, "names", lambda folder: denied(hers.id))
    remove_torn_pins(root)
    with pytest.raises(Refused, match="a pin cannot be read"):
        list_pins(root)


def test_a_lake_that_cannot_be_written_refuses_the_pin(tmp_path: Path) -> None:
    (tmp_path / "_headwater").write_text("not a folder")
    with pytest.raises(Refused) as refused:
        pin_cut(str(tmp_path), {}, "owner", utc(0))
    assert refused.value.code == "cannot_pin"


def test_a_position_file_of_a_late_writer_is_ignored(lake: HandLake) -> None:
    lake.publish(0x200, A)
    old = read_position_file(lake.root)
    assert old is not None
    reader = LakeReader(lake.root, "shop")
    lake.ledger.begin_generation(lake.position)
    lake.publish(0x300, A)
    new = reader.file()
    write_position_file(lake.root, old)
    assert reader.file() == new
    lake.publish(0x400, B)
    found = reader.file()
    assert found is not None
    assert found.read_position == 0x400


def test_without_a_position_file_the_ledger_says_what_is_covered(lake: HandLake) -> None:
    lake.publish(0x200, A, read=0x500, sample=(utc(1), 0x1F0))
    (Path(lake.root) / "_headwater" / "position.json").unlink()
    file = LakeReader(lake.root, "shop").file()
    assert file is not None
    assert (file.epoch, file.read_position, file.pending) == (1, 0x200, {})
    assert [lsn for _, lsn in file.samples] == [0x1F0]


@pytest.mark.parametrize("damaged", ["", '{"generation": 1', '{"generation": 1}'])
def test_a_damaged_position_file_is_none_and_the_ledger_is_asked(lake: HandLake, damaged: str) -> None:
    lake.publish(0x200, A, read=0x500)
    (Path(lake.root) / "_headwater" / "position.json").write_text(damaged)
    file = LakeReader(lake.root, "shop").look().file
    assert file is not None
    assert (file.epoch, file.read_position) == (1, 0x200)


def test_a_lake_of_another_pipeline_is_refused(lake: HandLake) -> None:
    with pytest.raises(Refused) as refused:
        LakeReader(lake.root, "other").look()
    assert refused.value.code == "foreign_root"


def test_a_change_of_a_tables_state_is_seen_at_the_next_look(lake: HandLake) -> None:
    lake.publish(0x200, A)
    reader = LakeReader(lake.root, "shop")
    assert reader.look().tables[A].state == "active"
    lake.enter(A, "suspended", "why", "remedy")
    table = reader.look().tables[A]
    assert (table.state, table.reason, table.remedy) == ("suspended", "why", "remedy")


def test_a_table_that_the_driver_has_left_behind_is_not_in_step_whatever_the_registry_says(lake: HandLake) -> None:
    lake.publish(0x200, A)
    assert lake.file is not None
    lake.file.states[A] = {"state": "suspended", "reason": "bad value", "since": "9999-01-01T00:00:00.000Z"}
    write_position_file(lake.root, lake.file)
    reader = LakeReader(lake.root, "shop")
    assert reader.look().tables[A].state == "suspended"
    # Older than the registry's word: it has come back, and the driver has yet to publish it.
    lake.file.states[A] = {"state": "suspended", "reason": "bad value", "since": "2000-01-01T00:00:00.000Z"}
    write_position_file(lake.root, lake.file)
    assert reader.look().tables[A].state == "catching up"


def test_rows_are_counted_from_the_log_without_those_in_deletion_vectors(tmp_path: Path) -> None:
    log = tmp_path / "_delta_log"
    log.mkdir()

    def commit(version: int, *actions: dict[str, Any]) -> None:
        (log / f"{version:020d}.json").write_text("\n".join(map(json.dumps, actions)))

    def added(path: str, rows: int, **more: Any) -> dict[str, Any]:
        stats = json.dumps({"numRecords": rows})
        return {"add": {"path": path, "size": 1, "modificationTime": 0, "stats": stats, **more}}

    vector = {"storageType": "u", "pathOrInlineDv": "x", "offset": 1, "sizeInBytes": 9, "cardinality": 3}
    commit(0, added("f", 10), added("g", 5))
    commit(1, {"remove": {"path": "f"}}, added("f", 10, deletionVector=vector))
    commit(2, {"remove": {"path": "f", "deletionVector": vector}})
    assert [row_count(str(tmp_path), version) for version in range(3)] == [15, 12, 5]
    assert row_count(str(tmp_path), 3) is None
    commit(3, {"add": {"path": "h", "size": 1, "modificationTime": 0}})
    assert row_count(str(tmp_path), 3) is None, "its statistics do not tell"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("cut.json", "this is no cut, but str"),
        ({"pipeline": "shop"}, "this is no cut, but dict"),
        ({"pipeline": "shop", "outcome": "suspended", "reason": "..."}, "the wait ended as suspended"),
        ({"error": {"code": "source_unreachable"}}, "the wait ended as source_unreachable"),
    ],
)
def test_what_is_no_cut_is_refused_as_that(given: Any, said: str) -> None:
    with pytest.raises(Refused, match=said):
        headwater.scan(given, "public.orders")
