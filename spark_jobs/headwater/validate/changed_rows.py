"""The rows of a table's version that were not there in an earlier one, found by files.

A row that was inserted or updated lies in a file that the earlier version did not have: nobody writes into a file, and
a deletion vector only takes rows away. So the files of the later version that the earlier one lacks hold all of them;
beside them, rows that a compaction or a MERGE carried over unchanged. Nothing is missed, and a file that both versions
have is not opened.

Spark reads those files as a table of its own, whose log names them where they lie: types, partition values, column
mapping and deletion vectors are then Delta's matter, as ever.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from os.path import join
from typing import Any

from headwater.delta import storage
from headwater.delta.deletion_vectors import vector_file
from headwater.delta.delta_log import DataFile, add, read_snapshot
from headwater.delta.log_entries import log_entry, log_path
from headwater.lake.paths import changed_path

_LEFT_SECONDS = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class ChangedFiles:
    """`folder`: a table of the changed rows; None: there are none. `files` of `of`: how many hold them."""

    folder: str | None
    files: int
    of: int


@contextlib.contextmanager
def changed_rows(root: str, folder: str, before: int, now: int) -> Iterator[ChangedFiles]:
    """The rows of version `now` of the table in `folder` that version `before` lacks; readable inside the block.

    FileNotFoundError when the log does not reach back to `before`.
    """
    earlier, later = read_snapshot(folder, before), read_snapshot(folder, now)
    files = [file for file in later.files.values() if not _had(earlier.files.get(file.name), file)]
    if not files:
        yield ChangedFiles(None, 0, len(later.files))
        return
    _sweep(root)
    place = join(changed_path(root), uuid.uuid4().hex)
    metadata = {**later.metadata, "id": str(uuid.uuid4())}
    actions: list[Any] = [{"protocol": later.protocol}, {"metaData": metadata}]
    actions += [add(_where_it_lies(folder, file)) for file in files]
    try:
        storage.make_folder(log_path(place))
        storage.write(log_entry(place, 0), "\n".join(map(json.dumps, actions)).encode())
        yield ChangedFiles(place, len(files), len(later.files))
    finally:
        storage.delete_folder(place)


def _sweep(root: str) -> None:
    """Remove what killed processes left."""
    for name in storage.names(changed_path(root)):
        place = join(changed_path(root), name)
        with contextlib.suppress(FileNotFoundError):
            if storage.info(place).modified < time.time() - _LEFT_SECONDS:
                storage.delete_folder(place)


def _had(earlier: DataFile | None, file: DataFile) -> bool:
    """Whether `earlier`, the same file before, has every row that `file` has: one may only have lost some."""
    return earlier is not None and earlier.deleted <= file.deleted


def _where_it_lies(folder: str, file: DataFile) -> DataFile:
    """The file under a name that holds from elsewhere, with its vector."""
    vector = file.vector
    if vector is not None and (path := vector_file(folder, vector)) is not None:
        vector = {**vector, "storageType": "p", "pathOrInlineDv": storage.uri_of(path)}
    return replace(file, name=storage.uri_of(file.in_folder(folder)), vector=vector)
