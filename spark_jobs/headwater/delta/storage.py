"""The one door to the lake's files: whoever reads, writes, lists or removes one does it here.

A place is a path, a `file:` URI, or a URI in an object store (`headwater.lake_root`). Names are joined to places by
`os.path.join`; those in a `file:` URI are percent-encoded. Behind the door are `headwater.delta.disk` and
`headwater.delta.object_store`; what is said here holds for both. Only delta-rs and Spark open tables by themselves,
with `delta_rs_options` and `hadoop_place`.

Not here: what is no part of the lake, lies on local disk and may be lost at any time. Those are spilled changes
(`headwater.log.spill`), runs of keys (`key_runs`, `written_keys`) and their cache (`index_cache`).

What is missing is FileNotFoundError to who reads it, nothing to who lists it, and done for who removes it. A store that
cannot be reached or used is an OSError, as a disk is.

What was written is seen at once. On a disk it survives a power cut of the lake's host only behind a `sync`, or
`sync_files`: a file that was written before may be empty after one, or not there at all (docs/decisions/0046). In a
store it is durable when it can be seen, and there is nothing to sync.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from headwater import store_options
from headwater.delta import disk, object_store
from headwater.delta.disk import Info
from headwater.lake_root import is_remote, place_of

_T = TypeVar("_T")


def path_of(place: str) -> str:
    """The one way to write `place`: see `headwater.lake_root.place_of`."""
    return place if place.startswith("/") else place_of(place)


@lru_cache(maxsize=4096)  # every cut has those of its tables
def uri_of(place: str) -> str:
    """The URI of a place, as other programs may be told it."""
    path = path_of(place)
    return path if is_remote(path) else Path(path).as_uri()


def hadoop_place(place: str) -> str:
    """A place as Spark has to be told it: Hadoop takes every character of a path for itself, and finds no folder under
    the percent escapes of a URI; its connector for S3 has a scheme of its own. On a disk as Hadoop prints it: Delta
    takes another spelling for another place. A place that is not known as it is."""
    try:
        path = path_of(place)
    except ValueError:
        return place
    if not is_remote(path):
        return f"file:{path}"
    return f"s3a{path.removeprefix('s3')}" if path.startswith("s3:") else path


def delta_rs_options(place: str) -> dict[str, str] | None:
    """What delta-rs is told beside a table's place: where its store is and how it is entered."""
    path = path_of(place)
    return object_store.delta_rs_options(path) if is_remote(path) else None


# Read


def read(place: str) -> bytes:
    """The whole content."""
    path = path_of(place)
    return object_store.read(path) if is_remote(path) else disk.read(path)


def read_range(place: str, offset: int, length: int) -> bytes:
    """`length` bytes from `offset` on; fewer, where the file ends before."""
    path = path_of(place)
    return (object_store.read_range if is_remote(path) else disk.read_range)(path, offset, length)


def read_text(place: str) -> str:
    return read(place).decode("utf-8")


def parquet_file(place: str, **options: Any) -> Any:
    """A `pyarrow.parquet.ParquetFile`; whoever does not read it in a `with` leaves its end to the last reference."""
    path = path_of(place)
    return (object_store.parquet_file if is_remote(path) else disk.parquet_file)(path, **options)


def is_readable(place: str) -> bool:
    """Whether all of a Parquet file is there as it was written, as far as its checksums say; of the disk, not of the
    kernel's memory. OSError where it cannot be read."""
    import pyarrow as pa

    forget(place)
    try:
        with parquet_file(place, page_checksum_verification=True) as file:
            for _ in file.iter_batches():
                pass
    except pa.ArrowException:
        return False
    except OSError as error:  # Arrow's own, of what it cannot decode, have no number
        if error.errno not in (None, errno.ENOENT):
            raise
        return False
    return True


# Look


def exists(place: str) -> bool:
    path = path_of(place)
    return (object_store.exists if is_remote(path) else disk.exists)(path)


def info(place: str) -> Info:
    path = path_of(place)
    return (object_store.info if is_remote(path) else disk.info)(path)


def names(folder: str) -> list[str]:
    """What lies in `folder`, in no order."""
    path = path_of(folder)
    return (object_store.names if is_remote(path) else disk.names)(path)


def files_below(folder: str, enter: Callable[[str], bool]) -> Iterator[Info]:
    """All files in `folder`, and in those folders below it whose names `enter` lets pass. Links to folders are not
    followed: what they lead to may belong to another program."""
    path = path_of(folder)
    return (object_store.files_below if is_remote(path) else disk.files_below)(path, enter)


def token(place: str) -> str | None:
    """What tells a file from any other that ever has its name; None: there is none."""
    path = path_of(place)
    return (object_store.token if is_remote(path) else disk.token)(path)


# Write


def write(place: str, data: bytes) -> None:
    """Write a file whose name nobody knows yet: a reader of it could meet a part."""
    path = path_of(place)
    (object_store.write if is_remote(path) else disk.write)(path, data)


def replace(place: str, data: bytes, *, shared: bool = False) -> None:
    """Write a file, whole: a reader sees the old content or the new one. Of several writers the last one wins.
    `shared`: who may read the folder may read the file, whatever the umask of this process."""
    path = path_of(place)
    if is_remote(path):
        object_store.replace(path, data)
    else:
        disk.replace(path, data, shared=shared)


def delete_scratch(folder: str, before: float) -> None:
    """Remove what killed processes left of files that they were replacing in `folder` before `before`, in seconds since
    1970."""
    path = path_of(folder)
    if not is_remote(path):
        disk.delete_scratch(path, before)


def append(place: str, data: bytes) -> None:
    """Add a line to a file of many writers that may not be there yet; lines of several processes do not mix. In a store
    it becomes an object of its own below `place`: see `lines`."""
    path = path_of(place)
    (object_store.append if is_remote(path) else disk.append)(path, data)


def lines(place: str, known: Any = None) -> tuple[bytes, Any]:
    """What was appended to `place` since an earlier call gave `known` back, up to the last whole line; and what is
    known behind it."""
    path = path_of(place)
    return (object_store.lines if is_remote(path) else disk.lines)(path, known)


def put_if_absent(place: str, data: bytes) -> str:
    """Write a file, whole, unless there is one: FileExistsError, then nothing has changed. Of several writers, on
    whatever machines, exactly one succeeds, if `data` is nobody else's. Returns the file's token.

    All writers have to keep to it, Spark's and delta-rs' included: every commit depends on it.
    """
    path = path_of(place)
    return (object_store.put_if_absent if is_remote(path) else disk.put_if_absent)(path, data)


def link(source: str, target: str) -> None:
    """Give a file a second name; each name is deleted by itself. Nothing happens when it has that name already;
    FileExistsError when `target` is another file. A disk does it at the price of none of the file's bytes, a store by a
    copy on its own side."""
    (object_store.copy if is_remote(path_of(source)) else disk.link)(path_of(source), path_of(target))


def make_folder(folder: str, mode: int = 0o777) -> None:
    """With those above it; nothing happens when it is there. `mode`, less the umask, is of the last one. In a store
    folders are parts of names, and who may read is its own matter."""
    path = path_of(folder)
    if not is_remote(path):
        disk.make_folder(path, mode)


def make_shared_folder(folder: str) -> None:
    """For files of many users: it has the rights of the folder above it, which is made if need be. Nothing happens
    when it is there."""
    path = path_of(folder)
    if not is_remote(path):
        disk.make_shared_folder(path)


def parquet_writer(place: str, schema: Any, **options: Any) -> Any:
    """A `pyarrow.parquet.ParquetWriter`: the file is whole when it has been closed, and its `size()` is known then. Of
    one that is not wanted any more `abort()` lets a store forget what has gone up; on a disk it is a file to delete."""
    path = path_of(place)
    return (object_store.parquet_writer if is_remote(path) else disk.parquet_writer)(path, schema, **options)


def uploads_beside(folder: str) -> contextlib.AbstractContextManager[None]:
    """For the block, by its thread: in a store, what it writes as files that nobody knows yet (`write`,
    `parquet_writer`) goes up beside whatever else it does. At the block's end all of it is there, or,
    behind an error of the block's own or of one of them, none of it."""
    return object_store.uploads_beside() if is_remote(path_of(folder)) else contextlib.nullcontext()


def side_by_side(folder: str, work: Sequence[Callable[[], _T]]) -> list[_T]:
    """What each piece of `work` gives, in their order, where each waits for what `folder` lies in. In a store, which
    takes its time, some are done at once; behind an error nothing of them goes on."""
    return object_store.side_by_side(work) if is_remote(path_of(folder)) else [one() for one in work]


def move_folder(source: str, target: str) -> None:
    """Let a folder, with all that is in it, lie at `target`, where nothing is. In a store file by file."""
    (object_store.move_folder if is_remote(path_of(source)) else disk.move_folder)(path_of(source), path_of(target))


def exclusive(place: str) -> contextlib.AbstractContextManager[None]:
    """While the block runs no other process of any machine is in one with the same file, which is made if need be. It
    ends with the process. For what mends torn files: a store has none, and nothing is kept out."""
    path = path_of(place)
    return contextlib.nullcontext() if is_remote(path) else disk.exclusive(path)


def shared(place: str) -> contextlib.AbstractContextManager[None]:
    """As `exclusive`, beside others that share the file; nobody has it `exclusive` meanwhile."""
    path = path_of(place)
    return contextlib.nullcontext() if is_remote(path) else disk.shared(path)


def exclusive_at_once(place: str) -> contextlib.AbstractContextManager[bool]:
    """As `exclusive`, without waiting: whether nobody else has or shares the file, and so the block has it."""
    path = path_of(place)
    return contextlib.nullcontext(enter_result=True) if is_remote(path) else disk.exclusive_at_once(path)


# Survive a power cut


def watch_disk(root: str) -> None:
    """A job begins that writes below `root`: until it ends, no sync of this process succeeds any more once something
    was written that the disk did not take. Nothing of the past is known here: see `forget`. A store that is away is
    waited for longer from now on."""
    path = path_of(root)
    if is_remote(path):
        store_options.be_patient()
    else:
        disk.watch_disk(path)


def forget(*places: str) -> None:
    """The next read of these files is of the disk, not of the kernel's memory, which also holds what the disk did not
    take. What is still to be written stays."""
    if paths := _on_disk(places):
        disk.forget(*paths)


def sync(root: str) -> None:
    """Return when all that was written below `root` before the call, by whatever process of this machine, survives a
    power cut of the lake's host. OSError when the disk says that it does not: then nothing may be built on it, and a
    job (`watch_disk`) is told the same each time."""
    path = path_of(root)
    if not is_remote(path):
        disk.sync(path)


def sync_files(*places: str) -> None:
    """The same for these files alone, and for their names in their folders. One that is gone meanwhile needs none."""
    if paths := _on_disk(places):
        disk.sync_files(*paths)


def wants_names(folder: str) -> bool:
    """Whether `sync` has to be told (`wrote`) what other libraries have written in `folder` for this process."""
    path = path_of(folder)
    return not is_remote(path) and disk.wants_names(path)


def wrote(*places: str) -> None:
    """These files were written by this process, whoever wrote them for it."""
    if paths := _on_disk(places):
        disk.wrote(*paths)


def _on_disk(places: tuple[str, ...]) -> list[str]:
    return [path for place in places if not is_remote(path := path_of(place))]


# Remove


def delete(place: str) -> None:
    path = path_of(place)
    (object_store.delete if is_remote(path) else disk.delete)(path)


def delete_files(folder: str, paths: Sequence[str]) -> None:
    """Those of `paths` below `folder` that are there, in this order; in a store some hundred by a request."""
    path = path_of(folder)
    (object_store.delete_files if is_remote(path) else disk.delete_files)(path, paths)


def delete_folder(folder: str) -> None:
    """With all that is in it, as far as that is possible: who needs it gone looks again another time."""
    path = path_of(folder)
    (object_store.delete_folder if is_remote(path) else disk.delete_folder)(path)


# For `headwater check` and `doctor`, which do without pyarrow


def is_folder(place: str) -> bool:
    """Whether a folder is there; on a disk no, where it cannot be seen. In a store, whether anything lies below it;
    OSError where the store does not say."""
    path = path_of(place)
    return (object_store.is_folder if is_remote(path) else disk.is_folder)(path)


def free(root: str) -> int | None:
    """Bytes that are free where files below `root` would lie. None: there is no bound."""
    path = path_of(root)
    return None if is_remote(path) else disk.free(path)


def why_not_writable(root: str, below: Iterable[str] = ()) -> str:
    """Why no files can be made below `root`; '' when they can. On a disk nothing is made, and the nearest folder that
    exists is judged, also of each of those `below` it; a store is asked for a file, which goes again."""
    path = path_of(root)
    if is_remote(path):
        return object_store.why_not_writable(path)
    return next((reason for each in (path, *below) if (reason := disk.why_not_writable(path_of(each)))), "")


def why_not_permitted(root: str, error: OSError) -> str:
    """What this user may not do below `root`, where `error` says so; '' where it says something else. A store has its
    own words for that."""
    path = path_of(root)
    return "" if is_remote(path) else disk.why_not_permitted(path, error)


def why_not_exclusive(root: str) -> str:
    """Why `put_if_absent` below `root` would not keep its word; '' when it does. A store is asked for a file twice."""
    path = path_of(root)
    return object_store.why_not_exclusive(path) if is_remote(path) else ""


__all__ = [
    "Info",
    "append",
    "delete",
    "delete_folder",
    "delete_scratch",
    "delta_rs_options",
    "exclusive",
    "exists",
    "files_below",
    "forget",
    "free",
    "hadoop_place",
    "info",
    "is_folder",
    "is_readable",
    "lines",
    "link",
    "make_folder",
    "make_shared_folder",
    "move_folder",
    "names",
    "parquet_file",
    "parquet_writer",
    "path_of",
    "put_if_absent",
    "read",
    "read_range",
    "read_text",
    "replace",
    "side_by_side",
    "sync",
    "sync_files",
    "token",
    "uploads_beside",
    "uri_of",
    "wants_names",
    "watch_disk",
    "why_not_exclusive",
    "why_not_permitted",
    "why_not_writable",
    "write",
    "wrote",
]
