"""What the door to the lake's files promises, on a disk and in each kind of store: the same tests."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from fixtures.jobs import files_below
from fixtures.object_stores import AzureServer, GcsServer, ObjectServer, Proxy, S3Server
from headwater import store_options
from headwater.delta import object_store, small_tables, storage
from headwater.delta.data_files import NewFile
from headwater.delta.delta_log import DataFile
from headwater.delta.layout import Layout
from headwater.delta.new_files import write_rows
from headwater.lake_root import is_remote
from headwater.store_options import StoreOptions

ROWS = pa.schema([("a", pa.int64())])


def options_of(server: ObjectServer) -> StoreOptions:
    """As the pipeline file would give them."""
    if isinstance(server, S3Server):
        return server.entry
    if isinstance(server, AzureServer):
        return StoreOptions(server.endpoint, "", None, (("account_key", server.key),))
    assert isinstance(server, GcsServer)
    return StoreOptions(server.endpoint, "", None, (("service_account_key", server.options["service_account_key"]),))


def place_in(server: ObjectServer) -> str:
    place = storage.path_of(server.uri(server.bucket(), "lake"))
    store_options.register(place, options_of(server))
    return place


@pytest.fixture(params=["disk", "s3", "azure", "gcs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "disk":
        return str(tmp_path)
    return place_in(request.getfixturevalue(f"{request.param}_server"))


def test_what_was_written_is_read_whole_and_in_parts(folder: str) -> None:
    place = f"{folder}/a b%20~ü=1"
    storage.write(place, b"abcdef")
    assert (storage.read(place), storage.read_text(place)) == (b"abcdef", "abcdef")
    assert [storage.read_range(place, *part) for part in ((1, 2), (4, 9), (6, 1), (0, 0))] == [b"bc", b"ef", b"", b""]
    storage.replace(place, b"x")
    found = storage.info(place)
    assert (found.path, found.size, storage.read(place)) == (place, 1, b"x")
    assert storage.exists(place)
    storage.delete(place)
    storage.delete(place)
    assert not storage.exists(place)


def test_many_files_go_whichever_of_them_are_there(folder: str) -> None:
    storage.make_folder(f"{folder}/p=a%20b")
    names = [f"{number}.parquet" for number in range(7)]
    for name in (*names, "p=a%20b/x", "stays"):
        storage.write(f"{folder}/{name}", b"x")
    storage.delete(f"{folder}/{names[3]}")
    storage.delete_files(folder, [*names, "p=a%20b/x", "never was"])
    assert [one.path for one in storage.files_below(folder, bool)] == ["stays"]
    storage.delete_files(folder, names)
    storage.delete_files(folder, [])


def test_what_is_missing_is_missing_alike(folder: str) -> None:
    missing = f"{folder}/a/b"
    for call in (storage.read, storage.read_text, storage.info, storage.parquet_file):
        with pytest.raises(FileNotFoundError):
            call(missing)
    with pytest.raises(FileNotFoundError):
        storage.read_range(missing, 0, 1)
    assert (storage.exists(missing), storage.is_folder(missing), storage.token(missing)) == (False, False, None)
    assert storage.names(missing) == [] == list(storage.files_below(missing, bool))
    storage.delete_folder(missing)


def test_a_folder_is_listed_by_names_and_below(folder: str) -> None:
    for name in ("t/x", "t/_log/1", "t/_log/2", "t/p=1/q=2/y", "tt/z"):
        storage.make_folder(f"{folder}/{name.rpartition('/')[0]}")
        storage.write(f"{folder}/{name}", name.encode())
    assert sorted(storage.names(f"{folder}/t")) == ["_log", "p=1", "x"]
    assert storage.is_folder(f"{folder}/t/p=1")
    found = storage.files_below(f"{folder}/t", lambda name: not name.startswith("_"))
    assert {one.path: one.size for one in found} == {"x": 3, "p=1/q=2/y": 11}
    storage.move_folder(f"{folder}/t/_log", f"{folder}/moved")
    assert sorted(storage.names(f"{folder}/moved")) == ["1", "2"]
    storage.delete_folder(f"{folder}/t")
    assert sorted(storage.names(folder)) == ["moved", "tt"]


def test_a_parquet_file_is_written_in_parts_and_read_by_columns(folder: str) -> None:
    place, rows = (
        f"{folder}/rows.parquet",
        pa.table({"a": range(200_000), "text": [f"{i:>40}" for i in range(200_000)]}),
    )
    with storage.parquet_writer(place, rows.schema, compression="none") as writer:
        for part in rows.to_batches(50_000):
            writer.write_batch(part)
    assert storage.info(place).size > 8 << 20
    with storage.parquet_file(place) as file:
        assert file.read() == rows
        assert file.read_row_group(2, ["a"])["a"].to_pylist() == list(range(100_000, 150_000))
    assert storage.is_readable(place)
    storage.replace(place, b"PAR1 and no more")
    assert not storage.is_readable(place)


def test_a_copy_is_a_file_of_its_own(folder: str) -> None:
    storage.write(f"{folder}/a", b"abc")
    for _ in range(2):
        storage.link(f"{folder}/a", f"{folder}/b")
    storage.delete(f"{folder}/a")
    assert storage.read(f"{folder}/b") == b"abc"
    for other in (b"another one", b"ABC"):
        storage.replace(f"{folder}/c", other)
        with pytest.raises(FileExistsError):
            storage.link(f"{folder}/c", f"{folder}/b")
    assert storage.read(f"{folder}/b") == b"abc"


def test_lines_of_several_writers_are_read_once_each(folder: str) -> None:
    place, seen, known = f"{folder}/2026-01-01.jsonl", b"", None
    for number in range(6):
        storage.append(place, f"{number}\n".encode())
        if number % 2:
            found, known = storage.lines(place, known)
            seen += found
    assert seen.split() == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert storage.lines(place, known)[0] == b""


def test_of_many_writers_of_one_name_exactly_one_succeeds(folder: str) -> None:
    won: list[tuple[int, str]] = []

    def put(number: int) -> None:
        with contextlib.suppress(FileExistsError):
            won.append((number, storage.put_if_absent(f"{folder}/00.json", f"of {number}".encode())))

    threads = [threading.Thread(target=put, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [(winner, token)] = won
    assert storage.read_text(f"{folder}/00.json") == f"of {winner}"
    assert storage.token(f"{folder}/00.json") == token
    assert (storage.why_not_writable(folder), storage.why_not_exclusive(folder)) == ("", "")


def test_work_that_waits_for_the_store_is_done_in_order_and_an_error_leaves_none_of_it_going_on(folder: str) -> None:
    going: set[int] = set()

    def one(number: int) -> int:
        going.add(number)
        storage.write(f"{folder}/{number}", b"x" * number)
        going.remove(number)
        if number == 11:
            raise ValueError(number)
        return number

    assert storage.side_by_side(folder, [partial(one, number) for number in range(10)]) == list(range(10))
    assert storage.side_by_side(folder, []) == []
    with pytest.raises(ValueError, match="11"):
        storage.side_by_side(folder, [partial(one, number) for number in range(30)])
    assert not going
    assert storage.info(f"{folder}/9").size == 9


def test_what_goes_up_beside_a_block_is_there_at_its_end_whatever_ends_it(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine, slow = object_store.replace, threading.Event()

    def late(place: str, data: bytes) -> None:
        slow.wait(0.2)
        genuine(place, data)

    monkeypatch.setattr(object_store, "replace", late)
    rows = pa.table({"a": [1, 2]}, ROWS)
    with storage.uploads_beside(folder):
        for number in range(30):
            storage.write(f"{folder}/bytes{number}", b"abc")
        with storage.parquet_writer(f"{folder}/rows", ROWS) as writer:
            writer.write_table(rows)
        size = writer.size()
    assert storage.info(f"{folder}/rows").size == size
    with storage.parquet_file(f"{folder}/rows") as file:
        assert file.read() == rows
    assert {storage.read(f"{folder}/bytes{number}") for number in range(30)} == {b"abc"}

    def ended_by_an_error() -> None:
        with storage.uploads_beside(folder):
            storage.write(f"{folder}/late", b"abc")
            raise KeyError

    with pytest.raises(KeyError):
        ended_by_an_error()
    # On disk it was there at once; in a store nothing of it goes on behind the block, and nothing is left.
    assert storage.exists(f"{folder}/late") == (not is_remote(folder))
    time.sleep(0.3)
    assert storage.exists(f"{folder}/late") == (not is_remote(folder))
    storage.write(f"{folder}/later", b"abc")
    assert storage.read(f"{folder}/later") == b"abc"


def test_files_of_partitions_are_all_there_or_none_is(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = pa.schema([("day", pa.int64()), ("a", pa.int64())])
    rows = pa.table({"day": [number % 9 for number in range(90)], "a": range(90)}, schema)
    written = write_rows(folder, schema, [rows], Layout(partition_by=("day",)))
    assert sorted(len(one.numbers) for one in written) == [10] * 9
    before = files_below(folder)
    assert len(before) == 9
    finish, turns = NewFile.finish, iter(range(9))

    def failing(file: NewFile) -> DataFile:
        if next(turns) == 4:
            raise OSError("no more")
        return finish(file)

    monkeypatch.setattr(NewFile, "finish", failing)
    with pytest.raises(OSError, match="no more"):
        write_rows(folder, schema, [rows], Layout(partition_by=("day",)))
    assert files_below(folder) == before


def test_of_two_appends_to_one_version_one_loses_its_race(folder: str) -> None:
    table = small_tables.create_table(f"{folder}/small", ROWS)
    other = small_tables.open_table(f"{folder}/small")
    assert other is not None
    small_tables.append_once(table, [{"a": 1}], ROWS, {"app": 7})
    with pytest.raises(small_tables.LostRace):
        small_tables.append_once(other, [{"a": 2}], ROWS)
    assert (other.look(), other.look()) == (True, False)
    assert (small_tables.rows_of(other), other.transaction_version("app")) == ([{"a": 1}], 7)
    small_tables.append_once(other, [{"a": 2}], ROWS)
    assert small_tables.write_checkpoint(f"{folder}/small") == 2
    found = small_tables.open_table(f"{folder}/small")
    assert found is not None
    assert sorted(row["a"] for row in small_tables.rows_of(found)) == [1, 2]
    assert small_tables.read_rows(found, {"a": (2, None)}).to_pylist() == [{"a": 2}]
    assert [part["a"].to_pylist() for part in small_tables.newest_first(found, "a", {}, [])] == [[2], [1]]


# The network fails


@pytest.fixture
def way(s3_server: S3Server, proxy_before: Callable[[str], Proxy]) -> tuple[str, Proxy]:
    """A place in S3, reached by a proxy."""
    proxy = proxy_before(s3_server.address)
    return place_in(s3_server.through(proxy.address)), proxy


def test_a_commit_whose_answer_was_lost_is_ours_and_another_s_is_not(way: tuple[str, Proxy]) -> None:
    folder, proxy = way
    storage.put_if_absent(f"{folder}/0.json", b"other's")
    lost = proxy.limit_data(0)
    healing = threading.Timer(0.6, proxy.remove, [lost])
    healing.start()
    token = storage.put_if_absent(f"{folder}/1.json", b"mine")
    healing.join()
    assert (storage.read(f"{folder}/1.json"), storage.token(f"{folder}/1.json")) == (b"mine", token)
    with pytest.raises(FileExistsError):
        storage.put_if_absent(f"{folder}/0.json", b"mine")


def test_an_append_whose_answer_was_lost_is_there_once(way: tuple[str, Proxy]) -> None:
    folder, proxy = way
    table = small_tables.create_table(f"{folder}/small", ROWS)
    for number in range(5):
        lost = proxy.limit_data(0)
        healing = threading.Timer(0.4, proxy.remove, [lost])
        healing.start()
        small_tables.append_once(table, [{"a": number}], ROWS)
        healing.join()
    found = small_tables.open_table(f"{folder}/small")
    assert found is not None
    assert sorted(row["a"] for row in small_tables.rows_of(found)) == [0, 1, 2, 3, 4]
    assert found.version() == table.version() == 5


def test_a_store_that_is_away_is_an_error_like_a_disk_s_and_comes_back(
    way: tuple[str, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, proxy = way
    storage.write(f"{folder}/a", b"abc")
    proxy.away()
    monkeypatch.setattr(store_options, "_is_patient", False)
    monkeypatch.setattr(store_options, "PATIENCE_SECONDS", 1)
    with pytest.raises(OSError, match="a") as raised:
        storage.read(f"{folder}/a")
    assert not isinstance(raised.value, FileNotFoundError)
    proxy.back()
    assert storage.read(f"{folder}/a") == b"abc"


def test_the_error_of_what_goes_up_beside_a_block_is_raised_at_its_end(
    way: tuple[str, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, proxy = way
    proxy.away()
    monkeypatch.setattr(store_options, "_is_patient", False)
    monkeypatch.setattr(store_options, "PATIENCE_SECONDS", 1)
    block = storage.uploads_beside(folder)
    block.__enter__()
    storage.write(f"{folder}/bytes", b"abc")
    with pytest.raises(OSError, match="bytes"):
        block.__exit__(None, None, None)
    proxy.back()
    storage.write(f"{folder}/bytes", b"abc")
    assert storage.read(f"{folder}/bytes") == b"abc"


def test_no_secret_is_in_an_error_or_a_repr(s3_server: S3Server) -> None:
    place = storage.path_of(s3_server.uri(s3_server.bucket(), "lake"))
    keys = (("access_key_id", s3_server.access_key), ("secret_access_key", "not-the-secret-key"))
    options = StoreOptions(s3_server.endpoint, s3_server.region, None, keys)
    store_options.register(place, options)
    with pytest.raises(PermissionError) as refused:
        storage.write(f"{place}/a", b"abc")
    said = f"{refused.value!r} {options!r} {storage.why_not_writable(place)}"
    assert "not-the-secret-key" not in said
    assert "refuses" in said


def test_who_reads_only_files_of_a_disk_loads_no_library_for_stores() -> None:
    code = "import sys; from headwater.delta import storage; storage.exists('/tmp'); print('obstore' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
