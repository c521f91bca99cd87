"""`headwater reload --changed`: what the log does not tell, found at the source, compared, and put right.

A table may hold other rows than the log has told: a partition was attached, detached or dropped, or the table's files
were written anew (change detection of InSync 3.3). New files prove nothing: VACUUM FULL makes them, and so does every
TRUNCATE, which the log tells. Nor do counts of the source's statistics (`headwater.verify.source_counts`). So a
candidate is compared with the source, and only what differs is written. What was found equal, or was made so, is noted
by its files: what is not noted when this job ends early is a candidate again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headwater.columns.selection import as_registered
from headwater.errors import HeadwaterError
from headwater.lake.registry import Registry, TableRecord
from headwater.load.progress import Report
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.reload.reload import reload
from headwater.schema import Leaf, TableSchema
from headwater.source.catalog.catalog import read_catalog
from headwater.source.catalog.partitions import attached
from headwater.source.connection import Connection, connect
from headwater.source.snapshots import VisibilitySnapshot
from headwater.verify.source_counts import SourceCounts
from headwater.verify.verify import open_compared, verify

_KINDS = ("missing", "extra", "different", "unsettled")
_SHOWN = (*_KINDS, "rows", "compared", "not_repaired", "written_anew")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A table that may differ. `attached`: partitions whose rows the log does not carry. `files`, `links`: what is
    registered of its leaves, by relation id, once it was compared (`headwater.schema.Leaf`; 0: it is no partition any
    more). `missing`: the source has no such table that can be compared."""

    record: TableRecord
    reasons: tuple[str, ...]
    attached: tuple[TableName, ...] = ()
    files: Mapping[int, int] = field(default_factory=dict)
    links: Mapping[int, int] = field(default_factory=dict)
    missing: bool = False


def reload_changed(
    pipeline: Pipeline, tables: Sequence[TableName], progress: Report, *, propose: bool = False
) -> dict[str, Any]:
    """Compare and put right the tables among `tables` (none: all) that may differ; `propose`: only say which these are.

    The JSON of interface "reload", for candidates alone, each with its `reasons`; what keeps one from being compared
    keeps no other. Refused for what is not loaded.
    """
    started = time.monotonic()
    with contextlib.closing(connect(pipeline.conninfo(), application_name="headwater reload")) as connection:
        registry = open_compared(pipeline, connection, tables)
        found = candidates(connection, pipeline, registry, tables)
        looked_at = _looked_at(registry, tables)
        counts = SourceCounts(connection, pipeline, registry)
        others = set(looked_at) - {candidate.record.name for candidate in found}
        found += [Candidate(registry.tables[name], (why,)) for name, why in counts.reasons(sorted(others)).items()]
    untouched = set(looked_at) - {candidate.record.name for candidate in found}
    compared: set[str] = set()
    results: dict[str, dict[str, Any]] = {}
    for candidate in found:
        name = candidate.record.name
        progress(f"{name}: {'; '.join(candidate.reasons)}")
        done: dict[str, Any] = {}
        if candidate.missing:
            done = {"compared": False}
        elif not propose:
            try:
                done = _put_right(pipeline, registry, candidate, progress)
                if _is_equal(done):
                    compared.add(name)
            except HeadwaterError as error:
                progress(f"{name}: {error.message}")
                done = {"compared": False, "reason": error.message}
        registry.refresh()
        results[name] = {"state": registry.tables[name].state, "reasons": list(candidate.reasons), **done}
    if not found:
        progress("no table may differ by what its source's catalog and statistics say")
    if not propose:
        counts.note(untouched, compared)
    return {"tables": results, "seconds": round(time.monotonic() - started, 3)}


def candidates(
    connection: Connection, pipeline: Pipeline, registry: Registry, tables: Sequence[TableName] = ()
) -> list[Candidate]:
    """The tables among `tables` (none: all) that the source's catalog does not show as they are registered."""
    catalog = read_catalog(connection, as_registered(pipeline, registry.tables.values()))
    there = {str(table.name): table.schema for table in catalog.tables}
    found = []
    for name in _looked_at(registry, tables):
        record = registry.tables[name]
        if name not in there:
            why = "; ".join(map(str, catalog.errors_of(TableName.parse(name))))
            found.append(Candidate(record, (why or "the source has no such table any more",), missing=True))
        elif (candidate := _candidate(connection, record, there[name])) is not None:
            found.append(candidate)
    return found


def _looked_at(registry: Registry, tables: Sequence[TableName]) -> list[str]:
    names = sorted({str(table) for table in tables} or set(registry.tables))
    return [name for name in names if registry.tables[name].holds_rows and registry.tables[name].schemas]


def _candidate(connection: Connection, record: TableRecord, now: TableSchema) -> Candidate | None:
    leaves, known = ({leaf.relation_id: leaf for leaf in schema.leaves} for schema in (now, record.schema))
    came = _attached_since(connection, record, sorted(leaves)) if now.partitioned else {}
    gone = [leaf for leaf in known.values() if leaf.relation_id not in leaves and leaf.relfilenode]
    rewritten = [leaf for leaf in known.values() if _file(leaves, leaf) not in (0, leaf.relfilenode)]
    reasons = [
        *([f"it is suspended: {record.reason}"] if record.state == "suspended" else []),
        *(f"the partition {_name(leaves[leaf])} was attached" for leaf in came),
        *(f"the partition {_name(leaf)} was detached or dropped" for leaf in gone),
        *(f"{_name(leaf)} has new files: it was rewritten or truncated" for leaf in rewritten),
    ]
    if not reasons:
        return None
    files = {leaf.relation_id: _file(leaves, leaf) for leaf in known.values()}
    return Candidate(record, tuple(reasons), tuple(_name(leaves[leaf]) for leaf in came), files, came)


def _attached_since(connection: Connection, record: TableRecord, leaves: Sequence[int]) -> dict[int, int]:
    """Partitions that came with rows, and the transaction that attached them: those that the lake has not met, and
    those that were away for a while since the table was loaded and were not compared after that."""
    known = {leaf.relation_id: leaf for leaf in record.schema.leaves}
    loaded = VisibilitySnapshot.parse(record.capture.snapshot) if record.capture is not None else None

    def is_new(relation: int, xid: int) -> bool:
        if relation not in known:
            return True
        return known[relation].link != xid and loaded is not None and loaded.visible_mask([xid]) == [False]

    return dict(sorted(attached(connection, leaves, is_new).items()))


def _file(leaves: Mapping[int, Leaf], leaf: Leaf) -> int:
    return leaves[leaf.relation_id].relfilenode if leaf.relation_id in leaves else 0


def _name(leaf: Leaf) -> TableName:
    return TableName(leaf.schema, leaf.name)


def _put_right(pipeline: Pipeline, registry: Registry, candidate: Candidate, progress: Report) -> dict[str, Any]:
    record = candidate.record
    table, began = TableName.parse(record.name), time.monotonic()
    replaced, loaded = 0, dict[str, Any]()

    def reloaded(partitions: Sequence[TableName]) -> None:
        nonlocal replaced
        done = reload(pipeline, table, partitions, progress=progress)["tables"][record.name]
        replaced += int(done.get("replaced_rows") or done["rows"] or 0)
        loaded.update(bytes=loaded.get("bytes", 0) + done["bytes"], capture_lsn=done["capture_lsn"])

    # What a repair would change there is in no transaction of the source, and a load forgets the rows that are gone.
    as_it_is = record.schema.soft_delete or record.schema.history
    if candidate.attached and not as_it_is and record.is_followed:
        reloaded(candidate.attached)
    seen = verify(pipeline, [table], repair=not as_it_is)["tables"][record.name]
    if not as_it_is and (seen.get("not_repaired") or seen.get("more")):
        progress(f"{record.name}: {seen.get('not_repaired') or 'too much differs to be repaired by key'}")
        reloaded(())
        seen = {**seen, "not_repaired": None, "unsettled": 0}
    if as_it_is and (record.state == "suspended" or any(seen[kind] for kind in _KINDS)):
        again = f"headwater load PIPELINE.yaml --table {record.name} --again"
        seen["not_repaired"] = f"it keeps deleted rows or every change, which only a load may put aside: {again}"
    done = {name: seen[name] for name in _SHOWN if seen.get(name) is not None}
    if not seen["compared"]:
        done["reason"] = seen["reason"]
    elif _is_equal(done):
        _note(registry, candidate)
    # Where nothing was reloaded: the compare's.
    loaded.setdefault("capture_lsn", seen.get("capture_lsn"))
    loaded["replaced_rows"] = replaced + (seen.get("repaired") or 0)
    return {**done, "bytes": 0, **loaded, "seconds": round(time.monotonic() - began, 3)}


def _is_equal(done: Mapping[str, Any]) -> bool:
    """Whether the lake was found equal, or made so."""
    return bool(done.get("compared")) and not done.get("unsettled") and not done.get("not_repaired")


def _note(registry: Registry, candidate: Candidate) -> None:
    """The leaves as they were compared. Loaded anew or with other columns since: they are known by that."""

    def seen_to(leaf: Leaf) -> Leaf:
        files = candidate.files.get(leaf.relation_id, leaf.relfilenode)
        return replace(leaf, relfilenode=files, link=candidate.links.get(leaf.relation_id, leaf.link))

    def noted(record: TableRecord) -> TableRecord | None:
        before = candidate.record
        if (record.incarnation, len(record.schemas)) != (before.incarnation, len(before.schemas)):
            return None
        lsn, schema = record.schemas[-1]
        leaves = tuple(map(seen_to, schema.leaves))
        if leaves == schema.leaves:
            return None
        return replace(record, schemas=(*record.schemas[:-1], (lsn, schema.with_leaves(leaves))))

    registry.refresh()
    registry.change(candidate.record.name, noted)
