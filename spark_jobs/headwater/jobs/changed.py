"""`headwater reload --changed`: what the log does not tell, found in the source's catalog, compared, and put right.

A table may hold other rows than the log has told: a partition was attached, detached or dropped, or the table's files
were written anew (change detection of InSync 3.3). New files prove nothing: VACUUM FULL makes them, and so does every
TRUNCATE, which the log tells. So a candidate is compared with the source, and only what differs is written. What was
found equal, or was made so, is noted by its files: what is not noted when this job ends early is a candidate again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headwater.config import Pipeline
from headwater.errors import Refused
from headwater.jobs.relations import attached
from headwater.jobs.reload import reload
from headwater.jobs.replacing import Report
from headwater.jobs.same_source import require_same_source
from headwater.jobs.selection import as_registered
from headwater.jobs.verify import verify
from headwater.lake.registry import Registry, TableRecord
from headwater.names import TableName
from headwater.schema import Leaf
from headwater.source.catalog import read_catalog
from headwater.source.connection import Connection, connect

_FOLLOWED = ("active", "catching up", "suspended")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A table that may differ. `attached`: partitions whose rows the log does not carry. `files`: relfilenode by the
    relation id of each leaf, as they were when it became one; 0: it is no partition any more."""

    record: TableRecord
    reasons: tuple[str, ...]
    attached: tuple[TableName, ...]
    files: Mapping[int, int]


def reload_changed(
    pipeline: Pipeline, tables: Sequence[TableName], progress: Report, *, propose: bool = False
) -> dict[str, Any]:
    """Compare and put right the tables among `tables` (none: all) that may differ; `propose`: only say which these are.

    The JSON of interface "reload", for candidates alone, each with its `reasons`. Refused for what is not loaded.
    """
    started = time.monotonic()
    with contextlib.closing(connect(pipeline.conninfo(), application_name="headwater reload")) as connection:
        registry = _open(pipeline, connection, tables)
        found = candidates(connection, pipeline, registry, tables)
    results: dict[str, dict[str, Any]] = {}
    for candidate in found:
        name = candidate.record.name
        progress(f"{name}: {'; '.join(candidate.reasons)}")
        done: dict[str, Any] = {} if propose else _put_right(pipeline, registry, candidate, progress)
        registry.refresh()
        results[name] = {"state": registry.tables[name].state, "reasons": list(candidate.reasons), **done}
    if not found:
        progress("no table may differ by what its source's catalog says")
    return {"tables": results, "seconds": round(time.monotonic() - started, 3)}


def candidates(
    connection: Connection, pipeline: Pipeline, registry: Registry, tables: Sequence[TableName] = ()
) -> list[Candidate]:
    """The tables among `tables` (none: all) that the source's catalog does not show as they are registered."""
    registered = as_registered(pipeline, registry.tables.values())
    catalog = {str(table.name): table for table in read_catalog(connection, registered).tables}
    wanted = {str(table) for table in tables} or set(registry.tables)
    found = []
    for name in sorted(wanted & set(catalog)):
        record = registry.tables[name]
        if record.state not in _FOLLOWED or not record.schemas:
            continue
        leaves = {leaf.relation_id: leaf for leaf in catalog[name].schema.leaves}
        if (candidate := _candidate(connection, record, leaves)) is not None:
            found.append(candidate)
    return found


def _candidate(connection: Connection, record: TableRecord, now: Mapping[int, Leaf]) -> Candidate | None:
    known = {leaf.relation_id: leaf for leaf in record.schema.leaves}
    came = attached(connection, sorted(set(now) - set(known)))
    gone = [leaf for leaf in known.values() if leaf.relation_id not in now and leaf.relfilenode]
    rewritten = [leaf for leaf in known.values() if leaf.relation_id in now and _file(now, leaf) != leaf.relfilenode]
    reasons = [
        *([f"it is suspended: {record.reason}"] if record.state == "suspended" else []),
        *(f"the partition {_name(now[leaf])} was attached" for leaf in sorted(came)),
        *(f"the partition {_name(leaf)} was detached or dropped" for leaf in gone),
        *(f"{_name(leaf)} has new files: it was rewritten or truncated" for leaf in rewritten),
    ]
    if not reasons:
        return None
    files = {leaf.relation_id: _file(now, leaf) for leaf in known.values()}
    return Candidate(record, tuple(reasons), tuple(_name(now[leaf]) for leaf in sorted(came)), files)


def _file(leaves: Mapping[int, Leaf], leaf: Leaf) -> int:
    return leaves[leaf.relation_id].relfilenode if leaf.relation_id in leaves else 0


def _name(leaf: Leaf) -> TableName:
    return TableName(leaf.schema, leaf.name)


def _open(pipeline: Pipeline, connection: Connection, tables: Sequence[TableName]) -> Registry:
    registry = Registry.open(pipeline.lake_path(), pipeline.name)
    followed = {n for n, r in registry.tables.items() if r.state in _FOLLOWED} if registry is not None else set()
    missing = sorted({str(table) for table in tables} - followed)
    if registry is None or registry.pipeline is None or not followed or missing:
        raise Refused(
            f"not loaded: {', '.join(missing)}" if missing else "no table is loaded",
            code="nothing_loaded",
            where=f"pipeline {pipeline.name}",
            remedy="headwater load PIPELINE.yaml",
        )
    require_same_source(connection, registry.pipeline)
    return registry


def _put_right(pipeline: Pipeline, registry: Registry, candidate: Candidate, progress: Report) -> dict[str, Any]:
    record = candidate.record
    table, replaced = TableName.parse(record.name), 0
    whole = record.state != "suspended"
    if candidate.attached and whole:
        replaced += _reloaded(pipeline, table, candidate.attached, progress)
    seen = verify(pipeline, [table], repair=True)["tables"][record.name]
    if seen.get("not_repaired") and not (record.schema.soft_delete or record.schema.history):
        progress(f"{record.name}: {seen['not_repaired']}")
        replaced += _reloaded(pipeline, table, (), progress)
        seen.pop("not_repaired")
    differing = ("missing", "extra", "different", "unsettled")
    done = {name: seen[name] for name in (*differing, "rows", "compared", "not_repaired") if name in seen}
    if seen["compared"] and not seen.get("unsettled") and "not_repaired" not in seen:
        _note(registry, candidate)
    return {**done, "replaced_rows": replaced + (seen.get("repaired") or 0)}


def _reloaded(pipeline: Pipeline, table: TableName, partitions: Sequence[TableName], progress: Report) -> int:
    done = reload(pipeline, table, partitions, progress)["tables"][str(table)]
    return int(done.get("replaced_rows") or done["rows"] or 0)


def _note(registry: Registry, candidate: Candidate) -> None:
    """The leaves with the files that were compared. Loaded anew since: its load knows them."""

    def noted(record: TableRecord) -> TableRecord | None:
        if record.incarnation != candidate.record.incarnation:
            return None
        leaves = tuple(
            replace(leaf, relfilenode=candidate.files.get(leaf.relation_id, leaf.relfilenode))
            for leaf in record.schema.leaves
        )
        if leaves == record.schema.leaves:
            return None
        lsn, schema = record.schemas[-1]
        return replace(record, schemas=(*record.schemas[:-1], (lsn, schema.with_leaves(leaves))))

    registry.refresh()
    registry.change(candidate.record.name, noted)
