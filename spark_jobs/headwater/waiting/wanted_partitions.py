"""Waits for some partitions of a table: which leaves are meant, and which reloads of them have to be in the lake first.

A partition that is being reloaded is known or suspected to be wrong: who waits for it from then on is to get what the
reload brings. Reloads of other partitions, and those that begin later, are none of the wait's business.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from headwater.errors import Refused
from headwater.lake.reload_records import Reload, is_open
from headwater.lake.requirements import WantedParts
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.source.catalog.partitions import Leaves, NamedPart, read_leaves
from headwater.source.connection import connect
from headwater.waiting.request import Partitions, not_wanted

if TYPE_CHECKING:
    from headwater.lake.ledger import TableVersion
    from headwater.lake.registry import Registry, TableRecord


def unknown_parts(registry: Registry | None, partitions: Partitions) -> frozenset[NamedPart]:
    """Those that are no leaf that the lake has met: the source knows what they are. Refused as `find_parts` is."""
    return frozenset(
        NamedPart(record.schema.relation_id, name)
        for record, names, known in _loaded(registry, partitions)
        for name in names
        if name not in known
    )


def find_parts(registry: Registry | None, partitions: Partitions, at_source: Leaves) -> dict[str, WantedParts]:
    """What the partitions of each table are: leaves that the lake knows, else what the source said of them.

    Tables that were not loaded are left out. Refused for what is no partition.
    """
    found = {}
    for record, names, known in _loaded(registry, partitions):
        assert registry is not None
        leaves: dict[TableName, int] = {}
        for name in names:
            below = at_source.get(NamedPart(record.schema.relation_id, name), {})
            if name not in known and not below:
                raise _no_partition(record, name)
            leaves |= {name: known[name]} if name in known else below
        texts = {str(name): number for name, number in leaves.items()}
        open_ = tuple(
            r.name for r in _open_reloads(registry, record) if not r.leaves or {*r.leaves} & {*texts.values()}
        )
        found[record.name] = WantedParts(tuple(map(str, names)), texts, open_)
    return found


def refuse_unwanted(partitions: Partitions, wanted: Collection[str]) -> None:
    """Refused for partitions of a table that is not `wanted`: the cut would say nothing of it, and seem enough."""
    for table in partitions:
        if str(table) not in wanted:
            remedy = "see with headwater status PIPELINE.yaml how the pipeline calls its tables, or leave it out"
            raise not_wanted(table, remedy)


def as_met(registry: Registry | None, parts: Mapping[str, WantedParts]) -> dict[str, WantedParts]:
    """`parts` with the relation ids that the lake knows by now: a partition that was dropped and created anew before
    the wait began has another one than the lake knew then."""
    found = dict(parts)
    for table, wanted in parts.items():
        record = registry.tables.get(table) if registry is not None else None
        if record is not None and record.schemas:
            known = {str(TableName(leaf.schema, leaf.name)): leaf.relation_id for leaf in record.schema.leaves}
            leaves = {name: known.get(name, number) for name, number in wanted.leaves.items()}
            found[table] = replace(wanted, leaves=leaves)
    return found


def ask_parts(pipeline: Pipeline, registry: Registry | None, partitions: Partitions) -> dict[str, WantedParts]:
    """`find_parts`, for which the source is asked if need be; Transient when it does not answer."""
    unknown = unknown_parts(registry, partitions)
    if not unknown:
        return find_parts(registry, partitions, {})
    with contextlib.closing(connect(pipeline.conninfo(), application_name="headwater wait")) as connection:
        return find_parts(registry, partitions, read_leaves(connection, unknown))


def _loaded(
    registry: Registry | None, partitions: Partitions
) -> Iterator[tuple[TableRecord, Sequence[TableName], dict[TableName, int]]]:
    """Each table that has been loaded, its partitions that are named, and the leaves that the lake has met."""
    for table, names in partitions.items():
        record = registry.tables.get(str(table)) if registry is not None else None
        if record is None or not record.schemas or record.state == "removed":
            continue
        if not record.schema.partitioned:
            raise Refused(
                f"{table} is not partitioned",
                code="not_partitioned",
                where=str(table),
                remedy="name no partitions: the wait is for all of its rows",
            )
        yield record, names, {TableName(leaf.schema, leaf.name): leaf.relation_id for leaf in record.schema.leaves}


def _no_partition(record: TableRecord, name: TableName) -> Refused:
    known = sorted(str(TableName(leaf.schema, leaf.name)) for leaf in record.schema.leaves)
    return Refused(
        f"{name} is no partition of {record.name}, or one without any for rows",
        code="no_partition",
        where=record.name,
        remedy=f"name one of its partitions: {', '.join(known[:8]) or 'it has none'}",
    )


def not_yet_reloaded(registry: Registry, parts: Mapping[str, WantedParts], held: Mapping[str, TableVersion]) -> str:
    """Why a reload that is waited for is not in the epoch that holds the tables in the versions `held`; empty: all
    are, or have failed."""
    for table, wanted in parts.items():
        still_open = {reload.name: reload for reload in _open_reloads(registry, registry.tables[table])}
        for name in wanted.reloads:
            if name in still_open:
                return f"a reload of {still_open[name].shown}, which began before this wait, is not done yet"
            answer = registry.kept.get(name)
            if answer is not None and answer.state == "done" and held[table].version < (answer.version or 0):
                return f"a reload of {', '.join(wanted.names)} is done, and not published yet"
    return ""


def _open_reloads(registry: Registry, record: TableRecord) -> list[Reload]:
    """Reloads of the table of which something is still to come."""
    return [
        reload
        for reload in list(registry.reloads.values())
        if is_open(reload, registry.kept.get(reload.name))
        and (reload.table, reload.incarnation) == (record.name, record.incarnation)
    ]
