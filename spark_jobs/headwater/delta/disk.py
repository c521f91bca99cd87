"""The lake's files on a file system of this machine, mounted or local: behind `headwater.delta.storage`, which says
what each function promises. Here are paths, and how it is kept.

Built on pyarrow's file systems, loaded with the first access; where pyarrow has no call, on the system's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import pwd
import re
import shutil
import stat
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Info:
    """A file: its path as it was asked for, or below the folder that was listed; bytes; seconds since 1970, by the
    clock of the file system or store."""

    path: str
    size: int
    modified: float


# Read


def read(path: str) -> bytes:
    with _files().open_input_file(path) as file:
        data: bytes = file.read()
    return data


def read_range(path: str, offset: int, length: int) -> bytes:
    with _files().open_input_file(path) as file:
        data: bytes = file.read_at(length, offset)
    return data


def parquet_file(path: str, **options: Any) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(path, filesystem=_files(), **options)


# Look


def exists(path: str) -> bool:
    return bool(_files().get_file_info(path).type)


def info(path: str) -> Info:
    found = _files().get_file_info(path)
    if not found.type:
        raise FileNotFoundError(f"{path} does not exist")
    return _info(path, found)


def names(folder: str) -> list[str]:
    # Names only: pyarrow would look at every file as well, and logs are long.
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def files_below(folder: str, enter: Callable[[str], bool]) -> Iterator[Info]:
    for parent, folders, found in os.walk(folder):  # pyarrow would follow links
        folders[:] = filter(enter, folders)
        below = os.path.relpath(parent, folder) if parent != folder else ""
        for one in _files().get_file_info([os.path.join(parent, name) for name in found]):
            if one.is_file:  # else it is gone already
                yield _info(os.path.join(below, one.base_name), one)


def token(path: str) -> str | None:
    try:
        return _token(os.stat(path))
    except FileNotFoundError:
        return None


# Write


def write(path: str, data: bytes) -> None:
    with _files().open_output_stream(path, compression=None) as file:
        file.write(data)
    wrote(path)


def replace(path: str, data: bytes, *, shared: bool = False) -> None:
    """By a name beside it, `<name>.<hex>.tmp`, that takes the old one's place: not of the process's number, which two
    containers share."""
    scratch = f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        write(scratch, data)
        if shared:
            _for_whom_the_folder_is(scratch, scratch)
        _files().move(scratch, path)
    except BaseException:
        delete(scratch)
        raise
    wrote(path)


def delete_scratch(folder: str, before: float) -> None:
    for name in names(folder):
        scratch = os.path.join(folder, name)
        with contextlib.suppress(FileNotFoundError):
            if name.endswith(".tmp") and info(scratch).modified < before:
                delete(scratch)


def append(path: str, data: bytes) -> None:
    """Who may write to the folder may write to the file, whatever the umask of the process that makes it: the next line
    may come from another user."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        _for_whom_the_folder_is(path, descriptor)
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def _for_whom_the_folder_is(path: str, file: int | str) -> None:
    """`file`: what `path` names, open or by a name."""
    mode = stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) & 0o666
    found = os.stat(file)
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != mode:
        os.chmod(file, mode)


def lines(path: str, known: int | None) -> tuple[bytes, int]:
    size, first = info(path).size, known or 0
    data = read_range(path, first, size - first) if size > first else b""
    whole = data[: data.rfind(b"\n") + 1]
    return whole, first + len(whole)


def put_if_absent(path: str, data: bytes) -> str:
    """By a link, which file systems refuse to a name that is taken; the scratch file before it is `.<hex>.tmp`, beside
    it."""
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
    _link(source, target)
    wrote(target)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        # It has that name already; a network file system may say so, too, when it repeats what it has carried out.
        if not os.path.samefile(source, target):
            raise


def make_folder(folder: str, mode: int = 0o777) -> None:
    Path(folder).mkdir(mode, parents=True, exist_ok=True)  # pyarrow gives no mode


def make_shared_folder(folder: str) -> None:
    above = os.path.dirname(folder)
    make_folder(above)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
        os.chmod(folder, stat.S_IMODE(os.stat(above).st_mode))


def parquet_writer(path: str, schema: Any, **options: Any) -> Any:
    import pyarrow.parquet as pq

    writer: Any = pq.ParquetWriter(path, schema, filesystem=_files(), **options)
    close = writer.close

    def close_and_note() -> None:
        close()
        wrote(path)

    def abort() -> None:
        with contextlib.suppress(OSError):  # a full disk takes no footer either
            close()

    writer.close, writer.abort = close_and_note, abort
    writer.size = lambda: info(path).size
    return writer


def move_folder(source: str, target: str) -> None:
    os.rename(source, target)
    wrote(target)


@contextlib.contextmanager
def _lock_file(path: str) -> Iterator[int]:
    """It need not be one's own: jobs of several users may share a lake. NFS locks only what is open for writing."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        descriptor = os.open(path, os.O_RDONLY)
    try:
        _for_whom_the_folder_is(path, descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusive(path: str) -> Iterator[None]:
    with _lock_file(path) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def shared(path: str) -> Iterator[None]:
    with _lock_file(path) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def exclusive_at_once(path: str) -> Iterator[bool]:
    with _lock_file(path) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


# Survive a power cut


def watch_disk(root: str) -> None:
    """What the disk did not take the kernel says once, to whoever asks first, and drops: the next sync succeeds, and
    files read as if they were there. So a descriptor is held from now on, which is told whatever others were told
    already, and a sync that failed fails again."""
    with contextlib.suppress(PermissionError):  # who uses it says so
        for folder in _parts(root) if os.path.isdir(root) else [_existing_folder(root)]:
            disk = _Disk(os.open(folder, os.O_RDONLY))
            _disks[os.fstat(disk.descriptor).st_dev] = disk


def forget(*paths: str) -> None:
    # What is still to be written stays in memory; where `sync` would go by names nobody else writes it.
    if paths and wants_names(os.path.dirname(paths[0])):
        sync_files(*paths)
    for path in paths:
        with contextlib.suppress(FileNotFoundError), _opened(path) as descriptor:
            if hasattr(os, "posix_fadvise"):  # not on macOS
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def sync(root: str) -> None:
    """By one call for all files, whoever wrote them. Where the file system does not hand that call on to its server
    (`_SYNCED_AS_A_WHOLE`), each file that this process has written since is synced by itself."""
    if not _is_synced_as_a_whole(root):
        with _writing:
            waiting = [path for path in _written if path.startswith(f"{root}/")]
            _written.difference_update(waiting)
        try:
            with _opened(root) as descriptor, _kept_failure(descriptor):
                sync_files(*waiting)
        except BaseException:
            with _writing:
                _written.update(waiting)
            raise
        return
    for folder in _parts(root):
        with contextlib.suppress(FileNotFoundError):
            _sync_file_system(folder)


def sync_files(*paths: str) -> None:
    for path in (*paths, *sorted({os.path.dirname(path) for path in paths})):
        with contextlib.suppress(FileNotFoundError), _opened(path) as descriptor, _kept_failure(descriptor):
            os.fsync(descriptor)


def wants_names(folder: str) -> bool:
    return not _is_synced_as_a_whole(folder)


def wrote(*paths: str) -> None:
    if paths and not _is_synced_as_a_whole(os.path.dirname(paths[0])):
        with _writing:
            _written.update(paths)


# Remove


def delete(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        _files().delete_file(path)


def delete_files(folder: str, paths: Sequence[str]) -> None:
    for path in paths:
        delete(os.path.join(folder, path))


def delete_folder(folder: str) -> None:
    with contextlib.suppress(OSError):
        _files().delete_dir(folder)


# Without pyarrow


def is_folder(path: str) -> bool:
    return os.path.isdir(path)


def _existing_folder(root: str) -> str:
    """The path of `root`, or of what it would be made in: the nearest above it that is there."""
    folder = root
    while not os.path.lexists(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    return folder


def free(root: str) -> int:
    return shutil.disk_usage(_existing_folder(root)).free


def why_not_writable(root: str) -> str:
    folder = _existing_folder(root)
    if not os.path.isdir(folder):
        return f"{folder} is not a folder"
    # The superuser passes every access check; a folder that nobody may write to is meant so all the same.
    anyone_may = os.stat(folder).st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH)
    if not anyone_may or not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return f"the folder {folder} is not readable and writable for {_user()}"
    return ""


def why_not_permitted(root: str, error: OSError) -> str:
    if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ""
    named = re.search("'(/[^']*)'", str(error))  # Arrow's errors have it in their text alone
    place = str(error.filename or (named[1] if named else ""))
    return f"{_user()} may not read or write {place}" if f"{place}/".startswith(f"{root}/") else ""


def _user() -> str:
    number = os.geteuid()
    with contextlib.suppress(KeyError):  # in a container it need not have a name
        return f"the user {pwd.getpwuid(number).pw_name}"
    return f"the user with the id {number}"


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
