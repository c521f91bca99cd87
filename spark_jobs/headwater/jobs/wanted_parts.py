"""Waits for some partitions of a table: which leaves are meant, and which reloads of them have to be in the lake first.

A partition that is being reloaded is known or suspected to be wrong: who waits for it from then on is to get what the
reload brings. Reloads of other partitions, and those that begin later, are none of the wait's business.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from headwater.config import Pipeline
from headwater.errors import Refused
from headwater.jobs.wait import parse_table
from headwater.lake.requirements import WantedParts
from headwater.names import TableName
from headwater.source.connection import Connection, connect, errors_named

if TYPE_CHECKING:
    from headwater.lake.ledger import TableVersion
    from headwater.lake.registry import Registry, TableRecord
    from headwater.lake.reload_records import Reload

Partitions = dict[TableName, list[TableName]]


def parse_partitions(
    partitions: Mapping[str, str | Sequence[str]] | None, tables: Collection[TableName] | None
) -> Partitions:
    """The partitions of each table, as SQL names them; without a schema that of the table. Refused for a name that is
    none, and for a table that is not among those that are waited for."""
    found: Partitions = {}
    if not isinstance(partitions, Mapping | None):  # a template that gave something else
        raise Refused(
            f"{partitions!r} names no partitions",
            code="bad_argument",
            where="partitions",
            remedy='give them by table, as {"public.orders": ["orders_2026_01"]}',
        )
    for table, names in (partitions or {}).items():
        parent = parse_table(table)
        if tables and parent not in tables:
            raise Refused(
                f"partitions are named of {parent}, which is not among the tables that are waited for",
                code="bad_argument",
                where="partitions",
                remedy="name it in tables, too",
            )
        try:
            texts = [names] if isinstance(names, str) else names
            parsed = [TableName.parse(name, default_schema=parent.schema) for name in texts]
        except ValueError as error:
            raise Refused(str(error), code="bad_name", where="partitions", remedy="write it as SQL does") from None
        if parsed:
            found[parent] = parsed
    return found


def find_parts(
    pipeline: Pipeline, registry: Registry | None, partitions: Mapping[TableName, Sequence[TableName]]
) -> dict[str, WantedParts]:
    """What the partitions of each table are: leaves that the lake knows, else leaves or subtrees at the source.

    Tables that were not loaded are left out. Refused for what is no partition, Transient when the source is asked and
    does not answer.
    """
    found = {}
    for table, names in partitions.items():
        record = registry.tables.get(str(table)) if registry is not None else None
        if registry is None or record is None or not record.schemas or record.state == "removed":
            continue
        if not record.schema.partitioned:
            raise Refused(
                f"{table} is not partitioned",
                code="not_partitioned",
                where=str(table),
                remedy="name no partitions: the wait is for all of its rows",
            )
        known = {TableName(leaf.schema, leaf.name): leaf.relation_id for leaf in record.schema.leaves}
        leaves = {name: known[name] for name in names if name in known}
        others = [name for name in names if name not in known]
        if others:
            with contextlib.closing(connect(pipeline.conninfo(), application_name="headwater wait")) as connection:
                leaves |= _at_source(connection, record, others)
        texts = {str(name): number for name, number in leaves.items()}
        open_ = tuple(
            r.name for r in _open_reloads(registry, record) if not r.leaves or {*r.leaves} & {*texts.values()}
        )
        found[record.name] = WantedParts(tuple(map(str, names)), texts, open_)
    return found


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
    found = []
    for reload in list(registry.reloads.values()):
        answer = registry.kept.get(reload.name)
        is_open = reload.state != "given up" and (answer is None or answer.state == "keeping")
        if is_open and (reload.table, reload.incarnation) == (record.name, record.incarnation):
            found.append(reload)
    return found


def _at_source(connection: Connection, record: TableRecord, names: Sequence[TableName]) -> dict[TableName, int]:
    """The leaves of `names`, each a leaf or a subtree of the table."""
    with errors_named("source"):
        rows = connection.execute(
            "select w.schema, w.name, n.nspname::text, c.relname::text, c.oid::bigint "
            "from unnest(%s::text[], %s::text[]) w(schema, name) "
            "join pg_catalog.pg_namespace pn on pn.nspname = w.schema "
            "join pg_catalog.pg_class p on p.relnamespace = pn.oid and p.relname = w.name "
            "join pg_catalog.pg_partition_tree(%s::oid::regclass) inside on inside.relid = p.oid and inside.level > 0 "
            "cross join lateral pg_catalog.pg_partition_tree(p.oid) below "
            "join pg_catalog.pg_class c on c.oid = below.relid "
            "join pg_catalog.pg_namespace n on n.oid = c.relnamespace where below.isleaf",
            [[name.schema for name in names], [name.name for name in names], record.schema.relation_id],
        ).fetchall()
    found = {TableName(schema, name) for schema, name, *_ in rows}
    missing = [name for name in names if name not in found]
    if missing:
        known = sorted(str(TableName(leaf.schema, leaf.name)) for leaf in record.schema.leaves)
        raise Refused(
            f"{missing[0]} is no partition of {record.name}, or one without any for rows",
            code="no_partition",
            where=record.name,
            remedy=f"name one of its partitions: {', '.join(known[:8]) or 'it has none'}",
        )
    return {TableName(schema, name): number for _, _, schema, name, number in rows}
