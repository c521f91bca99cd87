"""The net effects of parts of a table's changes made into one, with rows that lie on disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from headwater.changes import Deletions, NetChanges
from headwater.log.blocks import Rows
from headwater.log.spill import SpillStore


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


def joined(parts: Sequence[NetChanges]) -> NetChanges:
    """No key is in two of the parts; rows stay where they are."""
    first = parts[0]
    names = {name for part in parts for name in part.unchanged}
    return NetChanges(
        rows=pa.concat_tables([part.rows for part in parts]),
        stored=np.concatenate([part.stored for part in parts]),
        unchanged={name: np.concatenate([_mask(part, name) for part in parts]) for name in names},
        origins=_origins(parts),
        removed=pa.concat_tables([part.removed for part in parts]),
        changes=sum(part.changes for part in parts),
        truncated=first.truncated,
        truncated_leaves=first.truncated_leaves,
        deletions=_deletions([part.deletions for part in parts if part.deletions is not None]),
    )


def _deletions(parts: Sequence[Deletions]) -> Deletions | None:
    if not parts:
        return None
    rows, removed = (np.concatenate([getattr(part, name) for part in parts]) for name in ("rows", "removed"))
    return Deletions(rows, removed, parts[0].leaves)


def _mask(part: NetChanges, name: str) -> Rows:
    return part.unchanged.get(name, np.zeros(part.rows.num_rows, dtype=np.bool_))


def _origins(parts: Sequence[NetChanges]) -> pa.Table | None:
    known = next((part.origins for part in parts if part.origins is not None), None)
    if known is None:
        return None
    schema = known.schema
    return pa.concat_tables(
        part.origins if part.origins is not None else _nulls(schema, part.rows.num_rows) for part in parts
    )


def _nulls(schema: pa.Schema, rows: int) -> pa.Table:
    return pa.Table.from_arrays([pa.nulls(rows, kind) for kind in schema.types], schema=schema)
