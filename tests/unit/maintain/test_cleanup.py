"""Clean-up takes what no version from the horizon on needs, all of it, and nothing else."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event

import pytest

from fixtures.hand_tables import HandTable, ids_at
from headwater.apply.waiting_files import (
    all_waiting,
    are_listed,
    discard_waiting,
    make_notes,
    put_list,
    put_note,
    waiting_files,
)
from headwater.delta import log_files
from headwater.delta.deletion_vectors import vector_file
from headwater.delta.delta_log import DataFile, read_snapshot
from headwater.lake.paths import reloaded_path
from headwater.maintain.cleanup import Cleaned, clean

DAY = 24 * 3600.0


def clean_at(table: HandTable, horizon: int, orphans_before: float | None = None) -> Cleaned:
    folder = str(table.folder)
    return clean(folder, log_files.look(folder), horizon, log_from=horizon, orphans_before=orphans_before, stop=Event())


def needed_by(table: HandTable, versions: range) -> set[str]:
    found = set()
    for version in versions:
        for file in read_snapshot(str(table.folder), version).files.values():
            vector = vector_file(str(table.folder), file.vector) if file.vector else None
            found |= {file.name} | ({Path(vector).name} if vector else set())
    return found


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_every_version_from_the_horizon_on_reads_as_before_and_nothing_else_is_left(
    tmp_path: Path, share: float
) -> None:
    seed = random.randrange(1 << 30)
    table, chance = HandTable(tmp_path / f"seed_{seed}"), random.Random(seed)
    for _ in range(4):
        table.at_random(chance, 12)
        table.checkpoint()
    table.at_random(chance, 5)
    horizon = int(table.version * share)
    needed = needed_by(table, range(horizon, table.version + 1))
    before = table.data_files()
    cleaned = clean_at(table, horizon)
    assert table.data_files() == needed
    assert cleaned.files == len(before - needed)
    assert cleaned.orphans == 0
    for version in range(horizon, table.version + 1):
        assert ids_at(table.folder, version) == table.contents[version], f"version {version} of {table.version}"
    assert ids_at(table.folder) == table.contents[-1]
    assert clean_at(table, horizon) == Cleaned(), "a second time there is nothing to do"


def test_the_log_is_kept_from_the_newest_checkpoint_at_or_below_the_horizon(tmp_path: Path) -> None:
    table = HandTable(tmp_path / "t")
    for checkpoint in (10, 20, 30):
        while table.version < checkpoint:
            table.commit(table.write(2))
        assert table.checkpoint() == checkpoint
    for name in (".00000000000000000009.json.crc", "00000000000000000012.crc", ".00000000000000000020.json.crc"):
        (tmp_path / "t" / "_delta_log" / name).touch()
    cleaned = clean_at(table, 29)
    left = table.log_files()
    assert [name for name in left if name.endswith(".json")] == [f"{v:020d}.json" for v in range(20, 31)]
    assert [name for name in left if "checkpoint" in name] == [
        "00000000000000000020.checkpoint.parquet",
        "00000000000000000030.checkpoint.parquet",
        "_last_checkpoint",
    ]
    assert [name for name in left if name.endswith(".crc")] == [".00000000000000000020.json.crc"]
    assert cleaned.log_files == 20 + 1 + 2
    table.commit(table.write(2))
    assert ids_at(table.folder) == table.contents[-1]
    assert log_files.look(str(table.folder)).oldest_readable == 20


def test_the_log_may_be_kept_for_longer_than_the_files(tmp_path: Path) -> None:
    table = HandTable(tmp_path / "t")
    table.at_random(random.Random(5), 10)
    table.checkpoint()
    folder = str(table.folder)
    clean(folder, log_files.look(folder), 10, log_from=4, orphans_before=None, stop=Event())
    assert table.data_files() == needed_by(table, range(10, 11))
    assert log_files.look(folder).entries == list(range(11))


def test_a_pointer_that_a_slower_writer_set_back_still_leads_somewhere(tmp_path: Path) -> None:
    table = HandTable(tmp_path / "t")
    table.at_random(random.Random(1), 8)
    table.checkpoint()
    pointer = tmp_path / "t" / "_delta_log" / "_last_checkpoint"
    first = pointer.read_text()
    table.at_random(random.Random(2), 8)
    table.checkpoint()
    pointer.write_text(first)
    clean_at(table, table.version)
    assert "00000000000000000008.checkpoint.parquet" in table.log_files()
    assert ids_at(table.folder) == table.contents[-1]


def test_a_vectors_file_stays_as_long_as_one_of_its_vectors_is_needed(tmp_path: Path) -> None:
    table = HandTable(tmp_path / "t")
    one, two = table.write(8), table.write(8)
    table.commit(one)
    table.commit(two)
    table.commit(gone={one.name: [1], two.name: [2]})
    shared = {name for name in table.data_files() if name.endswith(".bin")}
    table.commit(gone={one.name: [3]})
    assert clean_at(table, table.version).files == 0
    table.commit(gone={two.name: [4]})
    assert clean_at(table, table.version).files == 1
    assert not shared & table.data_files()
    assert ids_at(table.folder) == table.contents[-1]


def test_a_file_without_a_commit_stays_while_its_writer_may_still_live(tmp_path: Path) -> None:
    table = HandTable(tmp_path / "t")
    table.commit(table.write(8))
    young, old = table.write(8), table.write(8)
    (table.folder / f".{old.name}.crc").touch()
    table.age(DAY, old.name)
    now = time.time()
    assert clean_at(table, table.version, None) == Cleaned()
    cleaned = clean_at(table, table.version, now - DAY / 2)
    assert (cleaned.files, cleaned.orphans) == (1, 1)
    assert young.name in table.data_files()
    assert old.name not in table.data_files()
    assert not (table.folder / f".{old.name}.crc").exists()
    table.commit(young)
    assert ids_at(table.folder) == table.contents[-1]


def test_a_file_that_waited_long_for_its_commit_is_no_orphan_once_it_has_one(tmp_path: Path) -> None:
    table = HandTable(tmp_path / "t")
    table.commit(table.write(8))
    late = table.write(8)
    table.age(DAY, late.name)
    table.commit(late)
    assert clean_at(table, 1, time.time()) == Cleaned()
    assert ids_at(table.folder) == table.contents[-1]


@pytest.mark.parametrize(
    "name", ["_headwater_index/run.parquet", ".staged.parquet", "_change_data/a.parquet", "notes.txt"]
)
def test_what_is_not_a_data_file_is_left_alone(tmp_path: Path, name: str) -> None:
    table = HandTable(tmp_path / "t")
    path = table.folder / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    table.age(9 * DAY)
    clean_at(table, 0, time.time())
    assert path.exists()


def test_a_log_that_another_clean_up_has_shortened_meanwhile_is_looked_at_again(tmp_path: Path) -> None:
    """What the lost entries added would look like nobody's files."""
    table = HandTable(tmp_path / "t")
    table.at_random(random.Random(6), 12)
    table.checkpoint()
    table.age(2 * DAY)
    folder = str(table.folder)
    before = log_files.look(folder)
    clean_at(table, table.version)
    left = table.data_files()
    with pytest.raises(FileNotFoundError):
        clean(folder, before, 3, log_from=3, orphans_before=time.time(), stop=Event())
    assert table.data_files() == left


def test_files_of_partitions_are_found_in_their_folders(tmp_path: Path) -> None:
    table = HandTable(tmp_path / "t")
    folder = table.folder / "_region=eu%20west"
    folder.mkdir()
    (folder / "part-0.parquet").touch()
    table.age(9 * DAY)
    assert clean_at(table, 0, time.time()).orphans == 1


def test_files_that_wait_for_the_commit_of_a_reload_are_spared_however_old(tmp_path: Path) -> None:
    root = str(tmp_path)
    table = HandTable(tmp_path / "public" / "t")
    folder = str(table.folder)
    for name in ("noted", "listed", "nobodys"):
        (table.folder / f"part-{name}.parquet").touch()
    table.age(9 * DAY)
    file = DataFile("part-noted.parquet", 0, 0, None, {}, None, 0)
    put_note(root, make_notes(root, "reload"), folder, [file])
    put_list(root, "reload", folder, [replace(file, name="part-listed.parquet")])

    def cleaned() -> Cleaned:
        waiting = partial(all_waiting, root)
        found = log_files.look(folder)
        return clean(folder, found, 0, log_from=0, orphans_before=time.time(), waiting=waiting, stop=Event())

    assert cleaned().orphans == 1
    assert {path.name for path in table.folder.glob("*.parquet")} == {"part-noted.parquet", "part-listed.parquet"}
    discard_waiting(root, "reload")
    assert not list(table.folder.glob("*.parquet"))
    assert not are_listed(root, "reload")


@pytest.mark.parametrize("left", [b"", bytes(200), b'{"below": "publ'])
def test_a_list_that_a_power_cut_has_torn_spares_nothing_and_keeps_nobody(tmp_path: Path, left: bytes) -> None:
    """Its job had not told the driver of it: what it named is nobody's, and goes when it is old."""
    root = str(tmp_path)
    table = HandTable(tmp_path / "public" / "t")
    folder = str(table.folder)
    (table.folder / "part-listed.parquet").touch()
    table.age(9 * DAY)
    make_notes(root, "reload")
    put_list(root, "reload", folder, [DataFile("part-listed.parquet", 0, 0, None, {}, None, 0)])
    Path(reloaded_path(root, "reload"), "files.json").write_bytes(left)
    assert waiting_files(root, "reload") is None
    waiting, found = partial(all_waiting, root), log_files.look(folder)
    done = clean(folder, found, 0, log_from=0, orphans_before=time.time(), waiting=waiting, stop=Event())
    assert done.orphans == 1
    discard_waiting(root, "reload")
    assert not are_listed(root, "reload")


def test_a_stopped_clean_up_leaves_a_log_that_reads_on(tmp_path: Path) -> None:
    table = HandTable(tmp_path / "t")
    table.at_random(random.Random(3), 20)
    table.checkpoint()

    class AfterAFew(Event):
        def __init__(self, looks: int) -> None:
            super().__init__()
            self.looks = looks

        def is_set(self) -> bool:
            self.looks -= 1
            return self.looks < 0

    folder = str(table.folder)
    for looks in (3, 25, 30, 35):
        stop = AfterAFew(looks)
        clean(folder, log_files.look(folder), table.version, log_from=table.version, orphans_before=None, stop=stop)
        assert ids_at(table.folder) == table.contents[-1]
    assert 0 < sum(name.endswith(".json") for name in table.log_files()) < 20, "one of them was stopped in the log"


def test_checkpoints_of_another_kind_are_not_judged(tmp_path: Path) -> None:
    table = HandTable(tmp_path / "t")
    (table.folder / "_delta_log" / f"{0:020d}.checkpoint.3a0d65cd-4056-49b8-937b-95f9e3ee90e5.parquet").touch()
    with pytest.raises(log_files.UnknownLog):
        log_files.look(str(table.folder))


def test_the_version_of_a_moment_is_found_by_the_times_of_the_entries(tmp_path: Path) -> None:
    table = HandTable(tmp_path / "t")
    table.at_random(random.Random(4), 6)
    now = time.time()
    for version in range(7):
        table.age((7 - version) * 100, f"_delta_log/{version:020d}.json")
    found = log_files.look(str(table.folder))
    assert [found.current_at(now - ago) for ago in (750, 650, 150, 50)] == [0, 0, 5, 6]
