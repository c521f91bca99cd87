"""The one door to the lake's files: whoever reads, writes, lists or removes one does it here.

A place is a path or a `file:` URI; any other scheme is refused until commits there exclude each other. Names are joined
to paths: those in a URI are percent-encoded. Built on pyarrow's file systems, loaded with the first access, since
Airflow parses what imports this. Where pyarrow has no call, the function says what another store would have to give.
Only delta-rs and Spark open tables by themselves.

Not here: what is no part of the lake, lies on local disk and may be lost at any time. Those are spilled changes
(`headwater.log.spill`), runs of keys (`key_runs`, `written_keys`) and their cache (`index_cache`).

What is missing is FileNotFoundError to who reads it, nothing to who lists it, and done for who removes it.

What was written is seen at once, and survives a power cut of the lake's host only behind a `sync`, or `sync_files`: a
file that was written before may be empty after one, or not there at all (docs/decisions/0046).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import stat
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from headwater.lake_root import local_path


@dataclass(frozen=True, slots=True)
class Info:
    """A file: its path as it was asked for, or below the folder that was listed; bytes; seconds since 1970, by the
    clock of the file system."""

    path: str
    size: int
    modified: float


def path_of(place: str) -> str:
    """The path of this machine that `place` names; ValueError when it is elsewhere."""
    return place if place.startswith("/") else local_path(place)


@lru_cache(maxsize=4096)  # every cut has those of its tables
def uri_of(place: str) -> str:
    """The URI of a place, as other programs may be told it."""
    return Path(path_of(place)).as_uri()


def hadoop_place(place: str) -> str:
    """A place as Spark has to be told it: Hadoop takes every character of a path for itself, and finds no folder under
    the percent escapes of a URI. A place elsewhere as it is."""
    try:
        return f"file://{path_of(place)}"
    except ValueError:
        return place


# Read


def read(place: str) -> bytes:
    """The whole content."""
    with _files().open_input_file(path_of(place)) as file:
        data: bytes = file.read()
    return data


def read_range(place: str, offset: int, length: int) -> bytes:
    """`length` bytes from `offset` on; fewer, where the file ends before."""
    with _files().open_input_file(path_of(place)) as file:
        data: bytes = file.read_at(length, offset)
    return data


def read_text(place: str) -> str:
    return read(place).decode("utf-8")


def parquet_file(place: str, **options: Any) -> Any:
    """A `pyarrow.parquet.ParquetFile`; whoever does not read it in a `with` leaves its end to the last reference."""
    import pyarrow.parquet as pq

    return pq.ParquetFile(path_of(place), filesystem=_files(), **options)


def is_readable(place: str) -> bool:
    """Whether all of a Parquet file is on the disk as it was written, as far as its checksums say."""
    import pyarrow as pa

    forget(place)
    try:
        with parquet_file(place, page_checksum_verification=True) as file:
            for _ in file.iter_batches():
                pass
    except (pa.ArrowException, OSError):
        return False
    return True


# Look


def exists(place: str) -> bool:
    return bool(_files().get_file_info(path_of(place)).type)


def info(place: str) -> Info:
    found = _files().get_file_info(path_of(place))
    if not found.type:
        raise FileNotFoundError(f"{place} does not exist")
    return _info(place, found)


def names(folder: str) -> list[str]:
    """What lies in `folder`, in no order. Names only: pyarrow would look at every file as well, and logs are long."""
    try:
        return os.listdir(path_of(folder))
    except FileNotFoundError:
        return []


def files_below(folder: str, enter: Callable[[str], bool]) -> Iterator[Info]:
    """All files in `folder`, and in those folders below it whose names `enter` lets pass.

    Links to folders are not followed, which pyarrow would do: what they lead to may be somebody else's. Another store
    lists by prefix, and has no links.
    """
    top = path_of(folder)
    for parent, folders, found in os.walk(top):
        folders[:] = filter(enter, folders)
        below = os.path.relpath(parent, top) if parent != top else ""
        for one in _files().get_file_info([os.path.join(parent, name) for name in found]):
            if one.is_file:  # else it is gone already
                yield _info(os.path.join(below, one.base_name), one)


def token(place: str) -> str | None:
    """What tells a file from any other that ever has its name; None: there is none. Another store gives its ETag."""
    try:
        return _token(os.stat(path_of(place)))
    except FileNotFoundError:
        return None


# Write


def write(place: str, data: bytes) -> None:
    """Write a file whose name nobody knows yet: a reader of it could meet a part."""
    path = path_of(place)
    with _files().open_output_stream(path, compression=None) as file:
        file.write(data)
    wrote(path)


def replace(place: str, data: bytes) -> None:
    """Write a file, whole: a reader sees the old content or the new one. Of several writers the last one wins.

    By a name beside it, `<name>.<hex>.tmp`, that takes the old one's place: not of the process's number, which two
    containers share. Another store's plain PUT is as good.
    """
    path = path_of(place)
    scratch = f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        write(scratch, data)
        _files().move(scratch, path)
    except BaseException:
        delete(scratch)
        raise
    wrote(path)


def delete_scratch(folder: str, before: float) -> None:
    """Remove what killed processes left of files that they were replacing in `folder` before `before`, in seconds since
    1970."""
    for name in names(folder):
        scratch = os.path.join(path_of(folder), name)
        with contextlib.suppress(FileNotFoundError):
            if name.endswith(".tmp") and info(scratch).modified < before:
                delete(scratch)


def append(place: str, data: bytes) -> None:
    """Add a line to a file that may not be there yet; lines of several processes do not mix. Another store would have
    to make an object of it.

    Who may write to the folder may write to the file, whatever the umask of the process that makes it: the next line
    may come from another user.
    """
    path = path_of(place)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        mode = stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) & 0o666
        found = os.fstat(descriptor)
        if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != mode:
            os.fchmod(descriptor, mode)
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def put_if_absent(place: str, data: bytes) -> str:
    """Write a file, whole, unless there is one: FileExistsError, then nothing has changed. Of several writers, on
    whatever machines, exactly one succeeds. Returns the file's token.

    By a link, which file systems refuse to a name that is taken; the scratch file before it is `.<hex>.tmp`, beside
    it. Another store must have a conditional PUT (`If-None-Match: *`), and all writers must use it, Spark's and
    delta-rs' included: every commit depends on it.
    """
    path = path_of(place)
    scratch = os.path.join(os.path.dirname(path), f".{uuid.uuid4().hex}.tmp")
    try:
        write(scratch, data)
        _link(scratch, path)
    finally:
        # Of the scratch name: under the other one somebody's rename could have put another file by now.
        mine = token(scratch) or ""
        delete(scratch)
    wrote(path)
    return mine


def link(source: str, target: str) -> None:
    """Give a file a second name, at the price of none of its bytes; each name is deleted by itself. Nothing happens
    when it has that name already; FileExistsError when `target` is another file. Another store would copy on its own
    side, or the log name the file where it lies."""
    _link(path_of(source), path_of(target))
    wrote(target)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        # It has that name already; a network file system may say so, too, when it repeats what it has carried out.
        if not os.path.samefile(source, target):
            raise


def make_folder(folder: str, mode: int = 0o777) -> None:
    """With those above it; nothing happens when it is there. `mode`, less the umask, is of the last one: pyarrow gives
    none. Where folders are only parts of names there is nothing to do, and who may read is the store's own matter."""
    Path(path_of(folder)).mkdir(mode, parents=True, exist_ok=True)


def make_shared_folder(folder: str) -> None:
    """For files of many users: it has the rights of the folder above it, which is made if need be. Nothing happens
    when it is there."""
    path = path_of(folder)
    make_folder(os.path.dirname(path))
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
        os.chmod(path, stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode))


def parquet_writer(place: str, schema: Any, **options: Any) -> Any:
    """A `pyarrow.parquet.ParquetWriter`: the file is whole when it has been closed."""
    import pyarrow.parquet as pq

    writer: Any = pq.ParquetWriter(path_of(place), schema, filesystem=_files(), **options)
    close = writer.close

    def close_and_note() -> None:
        close()
        wrote(place)

    writer.close = close_and_note
    return writer


def move_folder(source: str, target: str) -> None:
    """Let a folder, with all that is in it, lie at `target`, where nothing is. Another store has no such call."""
    os.rename(path_of(source), path_of(target))
    wrote(target)


@contextlib.contextmanager
def exclusive(place: str) -> Iterator[None]:
    """While the block runs no other process of any machine is in one with the same file, which is made if need be. It
    ends with the process. Another store needs none: what was put there is whole."""
    with open(path_of(place), "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# Survive a power cut


def watch_disk(root: str) -> None:
    """A job begins that writes below `root`: until it ends, no sync of this process succeeds any more once something
    was written that the disk did not take.

    The kernel says so once, to whoever asks first, and drops what it could not write: the next sync succeeds, and files
    read as if they were there. So a descriptor is held from now on, which is told whatever others were told already,
    and a sync that failed fails again. Nothing of the past is known here: see `forget`.
    """
    top = path_of(root)
    with contextlib.suppress(PermissionError):  # who uses it says so
        for folder in _parts(top) if os.path.isdir(top) else [existing_folder(top)]:
            disk = _Disk(os.open(folder, os.O_RDONLY))
            _disks[os.fstat(disk.descriptor).st_dev] = disk


def forget(*places: str) -> None:
    """The next read of these files is of the disk, not of the kernel's memory, which also holds what the disk did not
    take. What is still to be written stays; where `sync` would go by names it is synced here, whoever wrote it."""
    if places and wants_names(os.path.dirname(path_of(places[0]))):
        sync_files(*places)
    for place in places:
        with contextlib.suppress(FileNotFoundError), _opened(path_of(place)) as descriptor:
            if hasattr(os, "posix_fadvise"):  # not on macOS
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def sync(root: str) -> None:
    """Return when all that was written below `root` before the call survives a power cut of the lake's host. OSError
    when the disk says that it does not: then nothing may be built on it, and a job (`watch_disk`) is told the same each
    time. On an object store a finished PUT is durable.

    By one call for all files, whoever wrote them: what other processes of this machine have written is among it. Where
    the file system does not hand that call on to its server (`_SYNCED_AS_A_WHOLE`), each file that this process has
    written since is synced by itself.
    """
    top = path_of(root)
    if not _is_synced_as_a_whole(top):
        with _writing:
            waiting = [path for path in _written if path.startswith(f"{top}/")]
            _written.difference_update(waiting)
        try:
            with _opened(top) as descriptor, _kept_failure(descriptor):
                sync_files(*waiting)
        except BaseException:
            with _writing:
                _written.update(waiting)
            raise
        return
    for folder in _parts(top):
        with contextlib.suppress(FileNotFoundError):
            _sync_file_system(folder)


def sync_files(*places: str) -> None:
    """The same for these files alone, and for their names in their folders. One that is gone meanwhile needs none."""
    paths = [path_of(place) for place in places]
    for path in (*paths, *sorted({os.path.dirname(path) for path in paths})):
        with contextlib.suppress(FileNotFoundError), _opened(path) as descriptor, _kept_failure(descriptor):
            os.fsync(descriptor)


def wants_names(folder: str) -> bool:
    """Whether `sync` has to be told (`wrote`) what other libraries have written in `folder` for this process."""
    return not _is_synced_as_a_whole(path_of(folder))


def wrote(*places: str) -> None:
    """These files were written by this process, whoever wrote them for it."""
    paths = [path_of(place) for place in places]
    if paths and not _is_synced_as_a_whole(os.path.dirname(paths[0])):
        with _writing:
            _written.update(paths)


# Remove


def delete(place: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        _files().delete_file(path_of(place))


def delete_folder(folder: str) -> None:
    """With all that is in it, as far as that is possible: who needs it gone looks again another time."""
    with contextlib.suppress(OSError):
        _files().delete_dir(path_of(folder))


# For `headwater check` and `doctor`, which do without pyarrow


def is_folder(place: str) -> bool:
    """No, where it cannot be seen."""
    return os.path.isdir(path_of(place))


def existing_folder(root: str) -> str:
    """The path of `root`, or of what it would be made in: the nearest above it that is there."""
    folder = path_of(root)
    while not os.path.lexists(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    return folder


def free(root: str) -> int:
    """Bytes that are free where files below `root` would lie. Another store has no such bound."""
    return shutil.disk_usage(existing_folder(root)).free


def why_not_writable(root: str) -> str:
    """Why no files can be made below `root`, judged by the nearest folder that exists; '' when they can. Makes
    nothing. Another store would be asked for the rights of its credentials."""
    folder = existing_folder(root)
    if not os.path.isdir(folder):
        return f"{folder} is not a folder"
    # The superuser passes every access check; a folder that nobody may write to is meant so all the same.
    anyone_may = os.stat(folder).st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH)
    if not anyone_may or not os.access(folder, os.W_OK | os.X_OK):
        return f"the folder {folder} is not writable"
    return ""


def _token(found: os.stat_result) -> str:
    return f"{found.st_ino} {found.st_size} {found.st_mtime_ns}"


_SYNCED_AS_A_WHOLE = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "nfs", "nfs4", "nilfs2", "overlay", "tmpfs", "xfs"}
)
"""File systems that write everything down when they are asked to. FUSE has its page cache written and does not tell its
server; what others do (SMB, 9p) is not promised."""
_writing = threading.Lock()
_written: set[str] = set()


@lru_cache(maxsize=4096)
def _is_synced_as_a_whole(folder: str) -> bool:
    return _syncfs() is not None and _file_system(folder) in _SYNCED_AS_A_WHOLE


def _file_system(folder: str) -> str:
    """The kind of the file system that holds `folder`, or will: by the mount with the longest path that it lies in."""
    path = os.path.realpath(folder)
    best, kind = "", ""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        known, _, more = line.partition(" - ")
        mounted = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), known.split(" ")[4])
        if len(mounted) >= len(best) and f"{path}/".startswith(f"{mounted.rstrip('/')}/"):
            best, kind = mounted, more.split(" ")[0]
    return kind


class _Disk:
    """What a job writes to: `descriptor` is open since it began, `failure` says what was wrong with the first sync
    that failed."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.failure: tuple[Any, ...] = ()
        self.close = weakref.finalize(self, os.close, descriptor)  # not while a thread syncs by it


_disks: dict[int, _Disk] = {}
"""By device."""


def _parts(top: str) -> list[str]:
    """A folder of each disk that the lake lies on: parts of it may have their own."""
    with os.scandir(top) as found:
        folders = [entry.path for entry in found if entry.is_dir()]
    parts: dict[int, str] = {}
    for folder in (top, *folders):
        with contextlib.suppress(FileNotFoundError):
            parts.setdefault(os.stat(folder).st_dev, folder)
    return list(parts.values())


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _kept_failure(descriptor: int) -> Iterator[_Disk | None]:
    """A sync of the disk that `descriptor` is on: not another one behind a failure."""
    disk = _disks.get(os.fstat(descriptor).st_dev)
    if disk is not None and disk.failure:
        raise OSError(*disk.failure)
    try:
        yield disk
    except OSError as error:
        if disk is not None:
            disk.failure = error.args
        raise


def _sync_file_system(folder: str) -> None:
    syncfs = _syncfs()
    assert syncfs is not None
    with _opened(folder) as descriptor, _kept_failure(descriptor) as disk:
        # The held one may be of a mount that lay here before.
        for one in (descriptor, *((disk.descriptor,) if disk is not None else ())):
            if syncfs(one) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), folder)


@cache
def _syncfs() -> Any:
    """The C library's; None where there is none, as on macOS."""
    library = ctypes.CDLL(None, use_errno=True)
    return getattr(library, "syncfs", None) if sys.platform == "linux" else None


@cache
def _files() -> Any:
    from pyarrow.fs import LocalFileSystem

    return LocalFileSystem()


def _info(path: str, found: Any) -> Info:
    # A folder has no size.
    return Info(path, found.size or 0, found.mtime_ns / 1e9)
