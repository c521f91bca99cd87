"""The lake's files in an object store (S3, Azure, Google Cloud Storage): behind `headwater.delta.storage`, which says
what each function promises. Here are places as `headwater.lake_root.place_of` gives them, and how it is kept.

Built on obstore, which is the library that delta-rs reaches stores with, loaded with the first access. Each store is
opened once for a process; where it is and how it is entered is for `headwater.store_options` to say.

A request whose answer was lost is repeated by the library, also a conditional PUT: then it is refused because of
itself. So what is refused is compared with what is there (`put_if_absent`).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os.path
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from headwater import store_answers, store_options
from headwater.delta.disk import Info

if TYPE_CHECKING:
    from obstore.store import ObjectStore

    from headwater.store_options import StoreOptions

_TAIL: Final = 64 << 10
"""Bytes that are read with the first look into a Parquet file: its footer, or all of a small one."""
_PART: Final = 8 << 20
_PARTS_AT_ONCE: Final = 4
"""Bytes of one request of an upload in parts, and how many of one file are under way. A line of 1 MB/s takes what eight
files have under way before these requests are given up; a fast one is filled as by more and larger ones."""
_MUCH: Final = 1 << 20
"""What has fewer bytes is given up, and tried again, as soon as requests without content are."""
_LISTED: Final = 1000
_AT_ONCE: Final = 8
_UPLOADS: Final = 24
"""Of all threads together, beside what these do."""
_WAITING: Final = 32
_TRIES: Final = 5

_T = TypeVar("_T")
_opened: dict[tuple[str, StoreOptions, int, bool], ObjectStore] = {}
"""By bucket, options, patience, and whether for requests that carry much."""
_opening = threading.Lock()
_beside = threading.local()
"""`uploads`: what the thread has begun in its block of `uploads_beside`."""


# Read


def read(place: str) -> bytes:
    import obstore

    with _errors_of(place):
        store, key = _at(place)
        return bytes(obstore.get(store, key).bytes())


def read_range(place: str, offset: int, length: int) -> bytes:
    import obstore

    if length <= 0:
        return b""
    with _errors_of(place):
        store, key = _at(place)
        try:
            return bytes(obstore.get_range(store, key, start=offset, length=length))
        except obstore.exceptions.BaseError:
            if info(place).size > offset:
                raise
            return b""


def parquet_file(place: str, **options: Any) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(_Reader(place), **{"pre_buffer": True, **options})


class _Reader(io.RawIOBase):
    """A file that is read by ranges; its end with the first request, which also tells its size."""

    def __init__(self, place: str) -> None:
        import obstore

        self._place, self._offset = place, 0
        with _errors_of(place):
            store, key = _at(place)
            if place.startswith("abfss:"):  # which knows no range from the end
                self._size = int(obstore.head(store, key)["size"])
                self._tail_at = max(self._size - _TAIL, 0)
                self._tail = read_range(place, self._tail_at, _TAIL)
            else:
                found = obstore.get(store, key, options={"range": {"suffix": _TAIL}})
                self._size, self._tail_at = int(found.meta["size"]), int(found.range[0])
                self._tail = bytes(found.bytes())

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._size}[whence]
        self._offset = start + offset
        return self._offset

    def read(self, size: int | None = -1) -> bytes:
        end = self._size if size is None or size < 0 else min(self._offset + size, self._size)
        first, self._offset = self._offset, max(end, self._offset)
        if first >= end:
            return b""
        if first >= self._tail_at:
            return self._tail[first - self._tail_at : end - self._tail_at]
        return read_range(self._place, first, end - first)


# Look


def exists(place: str) -> bool:
    return _meta(place) is not None


def info(place: str) -> Info:
    found = _meta(place)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, "does not exist", place)
    return Info(place, int(found["size"]), found["last_modified"].timestamp())


def token(place: str) -> str | None:
    found = _meta(place)
    return str(found["e_tag"]) if found is not None else None


def names(folder: str) -> list[str]:
    import obstore

    with _errors_of(folder):
        store, key = _at(folder)
        found = obstore.list_with_delimiter(store, key or None)
    paths = [*found["common_prefixes"], *(one["path"] for one in found["objects"])]
    return [os.path.basename(path.rstrip("/")) for path in paths]


def files_below(folder: str, enter: Callable[[str], bool]) -> Iterator[Info]:
    for one in _listed(folder):
        below = one["path"]
        if all(map(enter, below.split("/")[:-1])):
            yield Info(below, int(one["size"]), one["last_modified"].timestamp())


def is_folder(place: str) -> bool:
    return next(_listed(place, 1), None) is not None


# Write


def replace(place: str, data: bytes) -> None:
    import obstore

    with _errors_of(place, writes=True):
        store, key = _at(place, uploads=len(data) > _MUCH)
        obstore.put(store, key, data, chunk_size=_PART, max_concurrency=_PARTS_AT_ONCE)


def write(place: str, data: bytes) -> None:
    _up(place, partial(replace, place, data))


def append(place: str, data: bytes) -> None:
    replace(f"{place}/{datetime.now(UTC):%H%M%S%f}-{uuid.uuid4().hex}", data)


def lines(place: str, known: frozenset[str] | None) -> tuple[bytes, frozenset[str]]:
    found = frozenset(one["path"] for one in _listed(place))
    new = sorted(found - (known or frozenset()))
    return b"".join(side_by_side([partial(read, f"{place}/{name}") for name in new])), found


def side_by_side(work: Sequence[Callable[[], _T]]) -> list[_T]:
    if len(work) < 2:
        return [one() for one in work]
    with ThreadPoolExecutor(min(_AT_ONCE, len(work))) as pool:
        begun = [pool.submit(one) for one in work]
        try:
            return [one.result() for one in begun]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@contextlib.contextmanager
def uploads_beside() -> Iterator[None]:
    begun: dict[str, Future[None]] = {}
    _beside.uploads = begun
    try:
        try:
            yield
        finally:
            del _beside.uploads
            wait(begun.values())
        for upload in begun.values():
            upload.result()
    except BaseException:
        for place in begun:
            with contextlib.suppress(OSError):  # what cannot be removed now is swept with all that nobody names
                delete(place)
        raise


def _up(place: str, work: Callable[[], None]) -> None:
    """Now; in a block of `uploads_beside`, at some time before its end."""
    begun: dict[str, Future[None]] | None = getattr(_beside, "uploads", None)
    if begun is None:
        work()
        return
    if len(begun) >= _WAITING:  # each holds what it puts
        list(begun.values())[-_WAITING].result()
    begun[place] = _uploading().submit(work)


@functools.cache
def _uploading() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_UPLOADS, thread_name_prefix="headwater-upload")


def put_if_absent(place: str, data: bytes) -> str:
    import obstore

    with _errors_of(place, writes=True):
        store, key = _at(place)
        for _ in range(_TRIES):
            try:
                return str(obstore.put(store, key, data, mode="create", use_multipart=False)["e_tag"])
            except obstore.exceptions.AlreadyExistsError:
                try:
                    found = obstore.get(store, key)
                except FileNotFoundError:
                    continue  # refused for the sake of another PUT of the same moment, which has failed
                if bytes(found.bytes()) == data:
                    return str(found.meta["e_tag"])  # ours: only the answer was lost
                raise
    raise OSError(errno.EIO, "the store refuses a name that nothing has", place)


def copy(source: str, target: str) -> None:
    import obstore

    there = _meta(target)
    if there is not None:
        # A copy of what was put in parts has an ETag of its own.
        if token(source) != there["e_tag"] and (there["size"] != info(source).size or read(source) != read(target)):
            raise FileExistsError(errno.EEXIST, "is another file", target)
        return
    with _errors_of(target):
        store, key = _at(source)
        obstore.copy(store, key, _at(target)[1])


def parquet_writer(place: str, schema: Any, **options: Any) -> Any:
    import pyarrow.parquet as pq

    sink = _Writer(place)
    writer: Any = pq.ParquetWriter(sink, schema, **options)
    close = writer.close

    def close_both() -> None:
        close()
        sink.close()

    writer.close = close_both
    writer.abort, writer.size = sink.abort, sink.size
    return writer


class _Writer(io.RawIOBase):
    """A file that is written from its beginning to its end, in parts where it is large; it is there when it has been
    closed. Behind an error it takes what pyarrow still writes, from its garbage collection at last, and keeps none."""

    def __init__(self, place: str) -> None:
        import obstore

        self._place, self._size, self._is_aborted = place, 0, False
        self._begun: list[bytes] | None = []
        """All of it, while it may still be small."""
        with _errors_of(place):
            store, key = _at(place, uploads=True)
            self._sink = obstore.open_writer(store, key, buffer_size=_PART, max_concurrency=_PARTS_AT_ONCE)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    size = tell

    def write(self, data: Any) -> int:
        if not self._is_aborted:
            try:
                with _errors_of(self._place, writes=True):
                    self._take(data)
            except OSError:
                self.abort()
                raise
        size = memoryview(data).nbytes
        self._size += size
        return size

    def _take(self, data: Any) -> None:
        if self._begun is not None:
            self._begun.append(bytes(data))
            if self._size + len(self._begun[-1]) < _PART:
                return
            data, self._begun = b"".join(self._begun), None
        self._sink.write(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            if not self._is_aborted:
                _up(self._place, self._finish)

    def abort(self) -> None:
        """Once, and without an error of its own: a store that is away keeps the parts until its own rules end them."""
        from obstore.exceptions import BaseError

        if not self._is_aborted:
            self._is_aborted = True
            with contextlib.suppress(OSError, BaseError):
                self._sink.__exit__(OSError, None, None)

    def _finish(self) -> None:
        """An upload whose end was asked for again, since the first answer was lost, may be unknown to the store: then
        all of the file is there."""
        if self._begun is not None:
            replace(self._place, b"".join(self._begun))
            return
        with _errors_of(self._place, writes=True):
            try:
                self._sink.close()
            except FileNotFoundError:
                found = _meta(self._place)
                if found is None or int(found["size"]) != self._size:
                    raise


def move_folder(source: str, target: str) -> None:
    import obstore

    found = [one["path"] for one in _listed(source)]
    with _errors_of(source):
        store, key = _at(source)
        for name in found:
            obstore.copy(store, f"{key}/{name}", f"{_at(target)[1]}/{name}")
        _delete(store, [f"{key}/{name}" for name in found])


# Remove


def delete(place: str) -> None:
    with _errors_of(place):
        store, key = _at(place)
        _delete(store, [key])


def delete_files(folder: str, paths: Sequence[str]) -> None:
    with _errors_of(folder):
        store, key = _at(folder)
        _delete(store, [f"{key}/{path}" for path in paths])


def delete_folder(folder: str) -> None:
    with contextlib.suppress(OSError):
        delete_files(folder, [one["path"] for one in _listed(folder)])


def _delete(store: ObjectStore, keys: Sequence[str]) -> None:
    import obstore

    try:
        if keys:
            obstore.delete(store, keys)
    except FileNotFoundError:
        if len(keys) > 1:  # of some stores; what comes behind it is not asked for any more
            for key in keys:
                _delete(store, [key])


# For `headwater check`


def why_not_writable(root: str) -> str:
    """By a file that goes again. The credentials' rights are not looked up: a store has many ways to refuse."""
    place = f"{root}/_headwater/probe.{uuid.uuid4().hex}.tmp"
    try:
        replace(place, b"probe")
        delete(place)
    except OSError as error:
        return f"{root} cannot be written: {error.strerror or error}"
    return ""


def why_not_exclusive(root: str) -> str:
    place = f"{root}/_headwater/probe.{uuid.uuid4().hex}.tmp"
    try:
        put_if_absent(place, b"first")
        try:
            put_if_absent(place, b"second")
        except FileExistsError:
            return ""
        finally:
            delete(place)
    except OSError as error:
        return f"a PUT on condition that there is no such object (If-None-Match: *) fails: {error.strerror or error}"
    return "it overwrites an object by a PUT on condition that there is none (If-None-Match: *)"


# The stores


def delta_rs_options(place: str) -> dict[str, str]:
    return store_options.of(place).delta_rs(place)


def _at(place: str, *, uploads: bool = False) -> tuple[ObjectStore, str]:
    """The store that `place` lies in, and its key there. `uploads`: for requests that carry much."""
    scheme, _, path = place.partition("://")
    bucket, _, key = path.partition("/")
    options = store_options.of(place)
    name = (f"{scheme}://{bucket}", options, store_options.patience(), uploads)
    store = _opened.get(name)
    if store is None:
        with _opening:
            store = _opened.get(name) or options.open(scheme, bucket, uploads=uploads)
            _opened[name] = store
            in_use = store_options.in_use()
            for exchanged in [other for other in _opened if other[1] not in in_use]:
                del _opened[exchanged]
    return store, key


def _meta(place: str) -> Any:
    """Size, moment and ETag of an object; None: there is none."""
    import obstore

    with _errors_of(place):
        store, key = _at(place)
        try:
            return obstore.head(store, key)
        except FileNotFoundError:
            return None


def _listed(folder: str, count: int = _LISTED) -> Iterator[dict[str, Any]]:
    """What lies below `folder`, however deep, by the path below it."""
    import obstore

    with _errors_of(folder):
        store, key = _at(folder)
        for page in obstore.list(store, key or None, chunk_size=count):
            for one in page:
                yield {**one, "path": one["path"].removeprefix(f"{key}/") if key else one["path"]}


@contextlib.contextmanager
def _errors_of(place: str, *, writes: bool = False) -> Iterator[None]:
    """The library's errors as those that a disk would give. `writes`: then "not found" is said of the bucket or of the
    upload, or by a proxy before the store, and no file is missing."""
    import obstore

    try:
        yield
    except obstore.exceptions.AlreadyExistsError:
        raise FileExistsError(errno.EEXIST, "exists already", place) from None
    except (obstore.exceptions.BaseError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of a call of ours inside the block, or of this machine
        raise _named(error, place, writes=writes) from None


def _named(error: Exception, place: str, *, writes: bool) -> OSError:
    if isinstance(error, FileNotFoundError) and not writes:
        return FileNotFoundError(errno.ENOENT, "does not exist", place)
    said = store_answers.said(str(error)) or type(error).__name__
    if store_answers.status_of(str(error)) in (401, 403):
        return PermissionError(errno.EACCES, f"the store refuses access: {said}", place)
    return OSError(errno.EIO, said, place)
