"""A net effect in parts on disk: rows and keys in files of the spill folder, masks in memory, and all of it as one.

The files count for the spill budget and go with the last reference to their parts.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headwater.log.blocks import Rows
from headwater.log.spill import SpillFile, SpillStore
from headwater.net_changes import NetChanges


@dataclass(frozen=True, slots=True)
class _Part:
    """A part's file: rows, removed keys and, if there are any, origins. `summary`: the rest of it."""

    file: SpillFile
    summary: NetChanges
    has_origins: bool

    def load(self) -> NetChanges:
        with pa.memory_map(self.file.path) as source:
            rows, removed = (pa.ipc.open_stream(source).read_all() for _ in range(2))
            origins = pa.ipc.open_stream(source).read_all() if self.has_origins else None
        return replace(self.summary, rows=rows, removed=removed, origins=origins)


class PartsOnDisk:
    """The parts of one table's net effect, in order. Several may go through them at a time."""

    def __init__(self, store: SpillStore) -> None:
        self._store = store
        self._parts: list[_Part] = []

    def __iter__(self) -> Iterator[NetChanges]:
        for part in self._parts:
            yield part.load()

    def add(self, net: NetChanges) -> None:
        """Take the next part to disk. Transient or Refused, code `spill_full`."""
        assert net.deletions is None, "deleted rows become marked rows before"
        tables = [net.rows, net.removed, *([net.origins] if net.origins is not None else [])]
        file = self._new_file("arrow", sum(table.nbytes for table in tables))
        try:
            with pa.OSFile(file.path, "wb") as sink:
                for table in tables:
                    with pa.ipc.new_stream(sink, table.schema) as writer:
                        writer.write_table(table)
        except OSError as error:
            raise self._store.refusal(error) from error
        # No slices of them: these would hold all that they are cut from.
        rows, removed = net.rows.schema.empty_table(), net.removed.schema.empty_table()
        summary = replace(net, rows=rows, removed=removed, origins=None)
        file.remove_after_use()
        self._parts.append(_Part(file, summary, net.origins is not None))

    def write_parquet(self, rows: pa.Table) -> str:
        """See `headwater.net_changes.Parts`."""
        file = self._new_file("parquet", rows.nbytes)
        try:
            pq.write_table(rows, file.path, compression="snappy")
        except OSError as error:
            raise self._store.refusal(error) from error
        return file.path

    def _new_file(self, kind: str, size: int) -> SpillFile:
        self._store.require(size)
        file = self._store.new_file(kind)
        os.close(os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        return file

    def joined(self) -> NetChanges:
        """The parts as one, with all their masks; rows and keys are views of the files."""
        names = sorted({name for part in self._parts for name in part.summary.unchanged})
        views = [part.load() for part in self._parts]
        return replace(
            views[0],
            rows=pa.concat_tables([view.rows for view in views]),
            stored=np.concatenate([view.stored for view in views]),
            unchanged={name: np.concatenate([_mask(view, name) for view in views]) for name in names},
            origins=_origins(views),
            removed=pa.concat_tables([view.removed for view in views]),
            changes=sum(view.changes for view in views),
            on_disk=self,
        )


def on_disk(rows: pa.Table, store: SpillStore) -> pa.Table:
    """The same rows, mapped from a file that nobody else can find: its space returns with the last reference."""
    if not rows.num_rows:
        return rows
    descriptor, path = tempfile.mkstemp(suffix=".arrow", dir=store.folder)
    os.close(descriptor)
    try:
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, rows.schema) as writer:
            writer.write_table(rows)
        return pa.ipc.open_file(pa.memory_map(path)).read_all()
    except OSError as error:
        raise store.refusal(error) from error
    finally:
        os.unlink(path)


def _mask(part: NetChanges, name: str) -> Rows:
    return part.unchanged.get(name, np.zeros(part.rows.num_rows, dtype=np.bool_))


def _origins(parts: list[NetChanges]) -> pa.Table | None:
    known = next((part.origins for part in parts if part.origins is not None), None)
    if known is None:
        return None
    schema = known.schema
    return pa.concat_tables(
        part.origins if part.origins is not None else _nulls(schema, part.rows.num_rows) for part in parts
    )


def _nulls(schema: pa.Schema, rows: int) -> pa.Table:
    return pa.Table.from_arrays([pa.nulls(rows, kind) for kind in schema.types], schema=schema)
