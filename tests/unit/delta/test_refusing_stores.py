"""What becomes of the answers of a store that refuses, or is slow: errors as a disk's, and of an upload its first."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from fixtures.store_faults import answering
from headwater import store_options
from headwater.delta import object_store, storage
from headwater.delta.data_files import write_batches
from headwater.store_options import StoreOptions

ROOT = "s3://bucket/lake"
SCHEMA = pa.schema([("a", pa.int64())])
KEYS = (("access_key_id", "AKIAOFTHETEST"), ("secret_access_key", "secret"))
TOKEN = "<Token-0>FwoGOFTHETEST</Token-0><AWSAccessKeyId>AKIAOFTHETEST</AWSAccessKeyId>"
NEITHER = "default backend - 404"


def error(code: str) -> str:
    return f'<?xml version="1.0"?>\n<Error><Code>{code}</Code><Message>said of it</Message>{TOKEN}</Error>'


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """The lake's store is the server at an address from now on; a request is repeated for no time, and parts of an
    upload are small."""
    monkeypatch.setattr(store_options, "_known", {})
    monkeypatch.setattr(store_options, "_is_patient", False)
    monkeypatch.setattr(store_options, "PATIENCE_SECONDS", 0)
    monkeypatch.setattr(object_store, "_PART", 1 << 20)
    return lambda address: store_options.register(ROOT, StoreOptions(f"http://{address}", "eu", None, KEYS))


def rows(count: int) -> list[pa.Table]:
    return [pa.table({"a": pa.array(range(0, count * 977, 977), pa.int64())}, SCHEMA)]


SMALL, LARGE = rows(1), rows(1 << 18)


@pytest.mark.parametrize(
    ("call", "requests"),
    [
        (lambda: storage.read(f"{ROOT}/a"), ["GET"]),
        (lambda: storage.names(ROOT), ["GET delimiter&list-type&prefix"]),
        (lambda: storage.is_folder(ROOT), ["GET list-type&prefix"]),
        (lambda: storage.replace(f"{ROOT}/a", b"x"), ["PUT"]),
        (lambda: write_batches(ROOT, SCHEMA, SMALL), ["PUT", "POST delete"]),
        (lambda: write_batches(ROOT, SCHEMA, LARGE), ["POST uploads", "POST delete"]),
    ],
    ids=["read", "list", "look", "put", "small file", "large file"],
)
@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (400, "ExpiredToken")])
def test_a_refusal_is_named_by_its_code_and_shows_nothing_else_of_the_answer(
    call: Callable[[], Any], requests: list[str], status: int, code: str, at: Callable[[str], None]
) -> None:
    with answering(lambda method, target: (status, {}, error(code))) as (address, had):
        at(address)
        with pytest.raises(OSError, match=f"{code}: said of it") as refused:
            call()
    assert refused.value.errno == (errno.EACCES if status == 403 else errno.EIO)
    assert str(refused.value.filename).startswith(ROOT)
    assert "OFTHETEST" not in str(refused.value)
    assert had == requests, "an upload that failed is not begun again, under whatever name"


def taking(method: str, target: str) -> tuple[int, dict[str, str], str]:
    """A store that takes what it is sent."""
    if method == "POST" and target.endswith("uploads="):
        return 200, {}, "<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
    if method == "POST" and "uploadId" in target:
        return 200, {}, '<CompleteMultipartUploadResult><ETag>"1"</ETag></CompleteMultipartUploadResult>'
    if method == "POST":
        return 200, {}, "<DeleteResult></DeleteResult>"
    return (204 if method == "DELETE" else 200), {"etag": '"1"'}, ""


def test_of_a_file_whose_rows_end_in_an_error_nothing_stays_in_the_store(at: Callable[[str], None]) -> None:
    def failing() -> Iterator[pa.Table]:
        yield from LARGE * 4
        raise KeyError("the source")

    with answering(taking) as (address, had):
        at(address)
        with pytest.raises(KeyError, match="the source"):
            write_batches(ROOT, SCHEMA, failing())
    assert {"PUT partNumber&uploadId", "DELETE uploadId", "POST delete"} <= set(had)
    assert "POST uploadId" not in had, "it was never made whole"


def test_a_part_that_is_refused_ends_the_upload_once(at: Callable[[str], None]) -> None:
    def refusing(method: str, target: str) -> tuple[int, dict[str, str], str]:
        return (403, {}, error("AccessDenied")) if method == "PUT" else taking(method, target)

    with answering(refusing) as (address, had):
        at(address)
        with pytest.raises(PermissionError, match="AccessDenied"):
            write_batches(ROOT, SCHEMA, LARGE * 40)
    assert (had.count("DELETE uploadId"), had.count("POST delete")) == (1, 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda: storage.replace(f"{ROOT}/a", b"x"),
        lambda: storage.put_if_absent(f"{ROOT}/a", b"x"),
        lambda: write_batches(ROOT, SCHEMA, SMALL),
        lambda: write_batches(ROOT, SCHEMA, LARGE),
    ],
    ids=["put", "commit", "small file", "large file"],
)
@pytest.mark.parametrize("body", [error("NoSuchBucket"), NEITHER], ids=["bucket", "proxy"])
def test_not_found_in_answer_to_a_write_is_no_missing_file(
    call: Callable[[], Any], body: str, at: Callable[[str], None]
) -> None:
    with answering(lambda method, target: (404, {}, body)) as (address, _):
        at(address)
        with pytest.raises(OSError, match="404 Not Found") as refused:
            call()
    assert refused.value.errno == errno.EIO


@pytest.mark.parametrize("is_there", [True, False])
def test_an_upload_whose_end_is_unknown_when_it_is_asked_for_again_is_looked_for(
    is_there: bool, at: Callable[[str], None]
) -> None:
    def forgetting(method: str, target: str) -> tuple[int, dict[str, str], str]:
        if method == "POST" and "uploadId" in target:
            return 404, {}, error("NoSuchUpload")
        if method == "HEAD":
            size = str(writer.size() if is_there else 1)
            return 200, {"content-length": size, "last-modified": "Sun, 01 Nov 2026 00:00:00 GMT", "etag": '"1"'}, ""
        return taking(method, target)

    with answering(forgetting) as (address, had):
        at(address)
        writer = storage.parquet_writer(f"{ROOT}/a", SCHEMA)
        writer.write_table(*LARGE)
        with contextlib.nullcontext() if is_there else pytest.raises(OSError, match="NoSuchUpload"):
            writer.close()
    assert had[-1] == "HEAD"


def test_parts_of_a_file_share_a_thin_line_few_at_a_time_and_with_patience(
    at: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_options, "_REQUEST_SECONDS", 1)
    under_way: set[str] = set()
    most = 0

    def slow(method: str, target: str) -> tuple[int, dict[str, str], str]:
        nonlocal most
        if method == "PUT":
            under_way.add(target)
            most = max(most, len(under_way))
            time.sleep(1.2 if "partNumber=1&" in target else 0.2)
            under_way.remove(target)
        return taking(method, target)

    with answering(slow) as (address, had):
        at(address)
        write_batches(ROOT, SCHEMA, LARGE * 8)
    assert had.count("PUT partNumber&uploadId") > 12
    assert (most <= 4, had[-1]) == (True, "POST uploadId")
