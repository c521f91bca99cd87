"""What the object stores promise that a lake builds on, asked of each kind; and what a client sees of a bad network."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, cast

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from obstore.exceptions import AlreadyExistsError, BaseError, NotModifiedError, PreconditionError
from pyarrow.fs import FileSelector, S3FileSystem

from fixtures.jobs import in_thread
from fixtures.object_stores import GcsServer, ObjectServer, Proxy, S3Server
from fixtures.waiting import until

if TYPE_CHECKING:
    from obstore import UpdateVersion
    from obstore.store import RetryConfig

ONCE: RetryConfig = {"max_retries": 0}
PATIENTLY: RetryConfig = {
    "max_retries": 20,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"init_backoff": timedelta(milliseconds=500), "max_backoff": timedelta(seconds=1), "base": 2},
}


def test_of_many_writers_of_one_name_exactly_one_succeeds(object_server: ObjectServer) -> None:
    bucket, writers = object_server.bucket(), 16
    together = threading.Barrier(writers)

    def write(number: int) -> bool:
        store = object_server.store(bucket)  # a client of its own, as another process has
        together.wait()
        try:
            store.put("entry", str(number).encode(), mode="create")
        except AlreadyExistsError:
            return False
        return True

    with ThreadPoolExecutor(writers) as threads:
        won = list(threads.map(write, range(writers)))
    assert won.count(True) == 1
    assert object_server.store(bucket).get("entry").bytes() == str(won.index(True)).encode()


def test_an_object_is_read_whole_and_in_part_and_has_a_tag(object_server: ObjectServer) -> None:
    store = object_server.store(object_server.bucket())
    written = store.put("a/name with ä & %25", b"0123456789")
    found = store.head("a/name with ä & %25")
    assert found["size"] == 10
    assert found["e_tag"] == written["e_tag"]
    assert found["e_tag"]
    assert store.get("a/name with ä & %25").bytes() == b"0123456789"
    assert store.get_range("a/name with ä & %25", start=2, end=5) == b"234"
    assert store.get_range("a/name with ä & %25", start=8, length=50) == b"89"
    assert [one["path"] for one in store.list().collect()] == ["a/name with ä & %25"]
    with pytest.raises(FileNotFoundError):
        store.get("a/name")


def test_an_object_of_several_parts_is_whole(object_server: ObjectServer) -> None:
    store = object_server.store(object_server.bucket())
    content = os.urandom(11 << 20)
    store.put("large", content, chunk_size=5 << 20)
    assert store.head("large")["size"] == len(content)
    assert store.get("large").bytes() == content


def test_names_come_in_order_and_from_a_name_on(object_server: ObjectServer) -> None:
    store = object_server.store(object_server.bucket())
    names = [f"_delta_log/{version:020}.json" for version in range(30)]
    for name in reversed(names):
        store.put(name, b"{}")
    store.put("other/file", b"")
    assert [one["path"] for one in store.list("_delta_log").collect()] == names
    assert [one["path"] for one in store.list("_delta_log", offset=names[26]).collect()] == names[27:]
    between = f"_delta_log/{26:020}.k"  # is not there
    assert [one["path"] for one in store.list("_delta_log", offset=between).collect()] == names[27:]
    assert list(store.list_with_delimiter()["common_prefixes"]) == ["_delta_log", "other"]


def test_a_long_list_comes_in_pages(gcs_server: GcsServer) -> None:
    """Of the one server whose pages are made here, in `tests/servers/gcs`."""
    store = gcs_server.store(gcs_server.bucket())
    for number in range(1100):
        store.put(f"{number:05}", b"")
    assert [one["path"] for one in store.list().collect()] == [f"{number:05}" for number in range(1100)]
    assert len(store.list(offset="00099").collect()) == 1000


def test_what_is_deleted_is_gone(object_server: ObjectServer) -> None:
    store = object_server.store(object_server.bucket())
    for number in range(5):
        store.put(f"folder/{number}", b"")
    store.delete("folder/0")
    store.delete(["folder/1", "folder/2"])
    assert [one["path"] for one in store.list().collect()] == ["folder/3", "folder/4"]
    with suppress(FileNotFoundError):  # S3 alone says nothing
        store.delete("folder/0")
    assert store.put("folder/0", b"", mode="create")


def test_what_has_not_changed_is_not_sent_again(object_server: ObjectServer) -> None:
    store = object_server.store(object_server.bucket())
    tag = store.put("name", b"first")["e_tag"]
    with pytest.raises(NotModifiedError):
        store.get("name", options={"if_none_match": tag})
    store.put("name", b"second")
    assert store.get("name", options={"if_none_match": tag}).bytes() == b"second"


def test_who_read_before_a_change_does_not_overwrite_it(object_server: ObjectServer) -> None:
    store = object_server.store(object_server.bucket())
    store.put("name", b"first")
    seen = store.head("name")
    # A version that is None is refused by obstore; Google's store compares it, the others compare the tag.
    read = cast("UpdateVersion", {key: seen[key] for key in ("e_tag", "version") if seen[key] is not None})
    store.put("name", b"second", mode=read)
    with pytest.raises(PreconditionError):
        store.put("name", b"third", mode=read)
    assert store.get("name").bytes() == b"second"


def test_a_write_whose_answer_is_lost_has_been_done(
    object_server: ObjectServer, proxy_before: Callable[[str], Proxy]
) -> None:
    bucket = object_server.bucket()
    proxy = proxy_before(object_server.address)
    behind = object_server.through(proxy.address).store(bucket, retry=ONCE)
    behind.put("before", b"", mode="create")
    lost = proxy.limit_data(0)
    with pytest.raises(BaseError, match="error sending request"):
        behind.put("entry", b"ours", mode="create")
    assert object_server.store(bucket).get("entry").bytes() == b"ours"
    proxy.remove(lost)
    with pytest.raises(AlreadyExistsError):
        behind.put("entry", b"ours", mode="create")


def test_a_client_that_repeats_a_write_by_itself_finds_its_own_in_the_way(
    object_server: ObjectServer, proxy_before: Callable[[str], Proxy]
) -> None:
    """So whoever hears that a name is taken must look whether it is by himself."""
    bucket = object_server.bucket()
    proxy, direct = proxy_before(object_server.address), object_server.store(bucket)
    behind = object_server.through(proxy.address).store(bucket, retry=PATIENTLY)

    def is_there(name: str) -> bool:
        return name in [one["path"] for one in direct.list().collect()]

    for name in map(str, range(20)):
        lost = proxy.limit_data(0)
        writing = in_thread(partial(behind.put, name, b"ours", mode="create"))
        until(partial(is_there, name), "it is written")
        proxy.remove(lost)
        refusal = writing.exception(60)
        assert direct.get(name).bytes() == b"ours"
        if isinstance(refusal, AlreadyExistsError):
            return
        # Its answer came through in the last moment, or its connection ended in a way after which it is not repeated.
        assert refusal is None or "error sending request" in str(refusal)
    pytest.fail("no write found itself in the way")


def test_a_store_that_was_away_takes_what_is_written_meanwhile(
    object_server: ObjectServer, proxy_before: Callable[[str], Proxy]
) -> None:
    bucket = object_server.bucket()
    proxy = proxy_before(object_server.address)
    behind = object_server.through(proxy.address)
    proxy.away()
    with pytest.raises(BaseError):
        behind.store(bucket, retry=ONCE).put("entry", b"first", mode="create")
    writing = in_thread(lambda: behind.store(bucket, retry=PATIENTLY).put("entry", b"second", mode="create"))
    proxy.back()
    assert writing.result(60)
    assert object_server.store(bucket).get("entry").bytes() == b"second"


def test_an_answer_that_does_not_come_is_given_up(s3_server: S3Server, proxy_before: Callable[[str], Proxy]) -> None:
    bucket = s3_server.bucket()
    proxy = proxy_before(s3_server.address)
    behind = s3_server.through(proxy.address).store(bucket, client={"timeout": "1s"}, retry=ONCE)
    late: dict[str, Callable[[], str]] = {
        "never": proxy.timeout,
        "too late": lambda: proxy.latency(30_000),
        "cut off": proxy.reset_peer,
    }
    for name, make in late.items():
        make()
        with pytest.raises(BaseError):
            behind.put(name, b"")
        proxy.heal()
        behind.put("healed", b"")
    written = {one["path"] for one in s3_server.store(bucket).list().collect()}
    assert written >= {"never", "too late", "healed"}


def test_commits_of_delta_rs_at_the_same_moment_all_arrive(object_server: ObjectServer) -> None:
    uri, options, writers = object_server.uri(object_server.bucket(), "table"), object_server.options, 6

    def rows(number: int) -> pa.Table:
        return pa.table({"number": pa.array([number], pa.int64())})

    write_deltalake(uri, rows(0), storage_options=options)
    DeltaTable(uri, storage_options=options).create_checkpoint()
    together = threading.Barrier(writers)

    def append(number: int) -> None:
        together.wait()
        write_deltalake(uri, rows(number), mode="append", storage_options=options)

    with ThreadPoolExecutor(writers) as threads:
        list(threads.map(append, range(1, writers + 1)))
    table = DeltaTable(uri, storage_options=options)
    assert table.version() == writers
    assert sorted(table.to_pyarrow_table()["number"].to_pylist()) == list(range(writers + 1))
    assert DeltaTable(uri, version=2, storage_options=options).version() == 2


def test_pyarrow_and_obstore_read_what_the_other_has_written(s3_server: S3Server) -> None:
    bucket = s3_server.bucket()
    store = s3_server.store(bucket)
    files = S3FileSystem(
        access_key=s3_server.access_key,
        secret_key=s3_server.secret_key,
        region=s3_server.region,
        endpoint_override=s3_server.address,
        scheme="http",
    )
    store.put("folder/name", b"content")
    assert [found.path for found in files.get_file_info(FileSelector(f"{bucket}/folder"))] == [f"{bucket}/folder/name"]
    with files.open_input_file(f"{bucket}/folder/name") as file:
        assert file.read() == b"content"
    for number in range(20):
        with files.open_output_stream(f"{bucket}/pyarrow/{number}") as stream:
            stream.write(b"of pyarrow")
        assert store.get(f"pyarrow/{number}").bytes() == b"of pyarrow"


_STARTS_A_SERVER = """
import pathlib, sys, time
from fixtures.object_stores import running
from servers.install import GCS

with running(lambda port: [GCS, f"127.0.0.1:{port}"], pathlib.Path(sys.argv[1]), answers=200,
             path="/_internal/healthcheck") as (_, process_id):
    print(process_id, flush=True)
    time.sleep(600)
"""


def test_a_server_ends_with_the_process_that_started_it(
    gcs_server: GcsServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also where that one is killed, and cannot end it."""
    command = [sys.executable, "-c", _STARTS_A_SERVER, str(tmp_path_factory.mktemp("server"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as starter:
        assert starter.stdout is not None
        server = int(starter.stdout.readline())
        assert server != gcs_server.process_id
        starter.kill()
    until(lambda: _is_gone(server), "the server has ended")


def _is_gone(process_id: int) -> bool:
    try:
        with open(f"/proc/{process_id}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
