"""The tables of a pipeline as the source's catalog has them: columns, keys, leaves, and what is wrong with them.

Reading never raises for one table: what cannot be replicated is a `Problem`, and such a table is not among
`Catalog.tables`. A partitioned table is one table whose leaves hold its rows; a partition is a table of its own
only when none of its ancestors is listed. Nothing here changes the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from headwater.names import TableName, quote_ident
from headwater.pipeline_file.pipeline import Pipeline, TableEntry
from headwater.schema import Column, Leaf, TableSchema
from headwater.source.catalog.columns import column_problems, part_problems, replicated_columns
from headwater.source.catalog.identity import (
    GENERATED_PUBLISHED_SINCE,
    choose_key,
    identity_remedy,
    why_writers_would_fail,
)
from headwater.source.catalog.matching import match_entries
from headwater.source.catalog.meanings import read_meanings
from headwater.source.catalog.pg_types import read_types
from headwater.source.catalog.relations import (
    FOREIGN,
    KINDS,
    ORDINARY,
    PARTITIONED,
    CatalogRelation,
    descendants,
    list_relations,
    one_snapshot,
    read_relations,
    read_with,
)
from headwater.source.catalog.types import PgType
from headwater.source.connection import Connection, errors_named
from headwater.source.problems import Problem, error, refuse_errors, warning
from headwater.source.publication.publication import Publication, inserts_name, read_publication


@dataclass(frozen=True, slots=True)
class CatalogTable:
    """A table that can be replicated. `holders` are the relations that hold its rows: itself, or its leaves.

    `children` are tables that inherit from a plain table: they are tables of their own, never part of this one.
    """

    schema: TableSchema
    entry: TableEntry
    relation: CatalogRelation
    holders: tuple[CatalogRelation, ...]
    children: tuple[TableName, ...] = ()

    @property
    def name(self) -> TableName:
        return self.relation.name


@dataclass(frozen=True, slots=True)
class Judged:
    """What was found out about a table, also one that cannot be replicated: then `table` is None."""

    relation: CatalogRelation
    entry: TableEntry
    holders: tuple[CatalogRelation, ...]
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    problems: tuple[Problem, ...]
    table: CatalogTable | None


@dataclass(frozen=True, slots=True)
class Catalog:
    """`tables` in order of their names; `problems` of these and of those that are missing from them; `judged`: both."""

    tables: tuple[CatalogTable, ...]
    problems: tuple[Problem, ...]
    judged: tuple[Judged, ...] = ()

    def table(self, name: TableName) -> CatalogTable:
        """The table `name`; `Refused` with what is wrong with it when it is not among `tables`."""
        for table in self.tables:
            if table.name == name:
                return table
        refuse_errors(self.errors_of(name))
        refuse_errors([error("table_missing", str(name), "no such table among those of the pipeline")])
        raise AssertionError("unreachable")

    def errors_of(self, name: TableName) -> list[Problem]:
        """What keeps the table `name` from being replicated, also where that is said of a partition of it."""
        judged = [problem for one in self.judged if one.relation.name == name for problem in one.problems]
        said = [problem for problem in self.problems if problem.where == str(name)]
        return [problem for problem in dict.fromkeys([*said, *judged]) if problem.is_error]


class Signature(NamedTuple):
    """What a load compares to notice that a relation was rewritten, truncated or changed under its snapshot."""

    relfilenode: int
    columns: tuple[tuple[int, str, int, int], ...]
    """(attnum, name, type oid, typmod) of each column, in attnum order."""


@errors_named("source")
def read_catalog(connection: Connection, pipeline: Pipeline, only: TableName | None = None) -> Catalog:
    """The tables that the entries of `pipeline` name (`only`: this one of them), as they stand now, read under one
    snapshot."""
    with one_snapshot(connection):
        version = connection.info.server_version
        name = pipeline.source.publication
        publications = {
            insert_only: read_publication(connection, each)
            for insert_only, each in ((False, name), (True, inserts_name(name)))
        }
        listed, problems = match_entries(pipeline.tables, list_relations(connection))
        if only is not None:
            listed = [(relation, entry) for relation, entry in listed if relation.name == only]
        below = descendants(connection, [relation.relation_id for relation, _ in listed])
        roots = [relation.relation_id for relation, _ in listed]
        found = read_relations(connection, {*roots, *(i for leaves in below.values() for i in leaves)})
        oids = {column.type_oid for relation in found.values() for column in relation.attributes}
        types, meanings = read_types(connection, oids), read_meanings(connection, oids)
    judged = []
    for relation, entry in listed:
        if relation.relation_id not in found:
            continue
        reader = _TableReader(
            found[relation.relation_id],
            entry,
            pipeline,
            role=quote_ident(connection.info.user),
            version=version,
            publication=publications[bool(entry.insert_only)],
            meanings=meanings,
        )
        judged.append(reader.read([found[i] for i in below.get(relation.relation_id, ()) if i in found], types))
        problems += judged[-1].problems
    judged.sort(key=lambda one: one.relation.name)
    return Catalog(tuple(one.table for one in judged if one.table is not None), tuple(problems), tuple(judged))


@errors_named("source")
def signature(connection: Connection, relation_ids: Iterable[int]) -> dict[int, Signature]:
    """The committed state of now of each relation that exists, whatever old snapshot a load reads under.

    Run it on an autocommit connection: under a load's own snapshot pg_attribute shows the past.
    """
    rows = connection.execute(
        """
        select c.oid, coalesce(pg_catalog.pg_relation_filenode(c.oid), 0)::bigint,
               coalesce((select json_agg(json_build_array(a.attnum, a.attname, a.atttypid::bigint, a.atttypmod)
                                         order by a.attnum) from pg_catalog.pg_attribute a
                         where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped), '[]')
        from pg_catalog.pg_class c where c.oid = any(%s)
        """,
        [sorted(set(relation_ids))],
    )
    return {oid: Signature(filenode, tuple(tuple(column) for column in columns)) for oid, filenode, columns in rows}


def grant_select(tables: Iterable[str], entry: TableEntry, columns: Iterable[Column]) -> str:
    """The right that reading the entry's tables takes, without the role: on no column that stays at the source."""
    names = ", ".join(quote_ident(name) for name in read_with(column.name for column in columns))
    part = f" ({names})" if entry.columns.exclude else ""
    return f"GRANT SELECT{part} ON TABLE {', '.join(tables)}"


class _TableReader:
    """Judges one table; `problems` fills on the way. `publication`: as it stands, None: it is going to be ours.
    `meanings`: as of `headwater.source.catalog.meanings`, by type oid."""

    def __init__(
        self,
        relation: CatalogRelation,
        entry: TableEntry,
        pipeline: Pipeline,
        *,
        role: str,
        version: int,
        publication: Publication | None,
        meanings: Mapping[int, Mapping[str, str]],
    ) -> None:
        self.relation = relation
        self.meanings = meanings
        self.entry = entry
        self.pipeline = pipeline
        self.role = role
        self.version = version
        capable = version >= GENERATED_PUBLISHED_SINCE
        self.publishes_generated = capable and (publication is None or publication.publishes_generated)
        self.member = publication.members.get(relation.name) if publication is not None else None
        self.where = str(relation.name)
        self.problems: list[Problem] = []

    def read(self, below: list[CatalogRelation], types: dict[int, PgType]) -> Judged:
        relation, entry = self.relation, self.entry
        partitioned = relation.kind == PARTITIONED
        holders = [r for r in below if r.kind != PARTITIONED] if partitioned else [relation]
        insert_only = bool(entry.insert_only)
        key, key_problems = choose_key(relation, holders, tuple(entry.key) if entry.key else None, insert_only)
        columns, column_findings = replicated_columns(relation, entry, self.pipeline, types, self.publishes_generated)
        # Rows are found by their keys: one that the lake cannot hold is never NULL there, whatever is said of others.
        columns = tuple(
            replace(c, on_bad_value="suspend") if c.name in key and c.on_bad_value == "null" else c for c in columns
        )
        self.problems += [
            *self._storage_problems(holders),
            *self._rights_problems([relation, *holders] if partitioned else holders, columns),
            *key_problems,
            *column_findings,
            *column_problems(relation, entry, columns, key),
            *part_problems(relation, entry, holders),
        ]
        if not insert_only and not key_problems:
            self.problems += self._identity_problems(holders)
        children = () if partitioned else tuple(r.name for r in below)
        if children:
            message = (
                f"other tables inherit from it ({', '.join(map(str, children))}): only its own rows are replicated"
            )
            self.problems.append(warning("inheritance_parent", self.where, message, "list the children as well"))
        table = None
        if not any(problem.is_error for problem in self.problems):
            table = self._table(holders, columns, key, children)
        return Judged(relation, entry, tuple(holders), columns, key, tuple(self.problems), table)

    def _table(
        self,
        holders: list[CatalogRelation],
        columns: tuple[Column, ...],
        key: tuple[str, ...],
        children: tuple[TableName, ...],
    ) -> CatalogTable:
        relation, entry = self.relation, self.entry
        leaves = tuple(Leaf(r.relation_id, r.name.schema, r.name.name, r.filenode, r.replica_identity) for r in holders)
        schema = TableSchema(
            relation_id=relation.relation_id,
            schema=relation.name.schema,
            name=relation.name.name,
            columns=columns,
            key=key,
            leaves=leaves,
            partitioned=relation.kind == PARTITIONED,
            insert_only=bool(entry.insert_only),
            partition_by=tuple(entry.partition_by),
            cluster_by=tuple(entry.cluster_by),
            soft_delete=bool(entry.soft_delete),
            history=bool(entry.history),
            last_attnum=relation.last_attnum,
            excluded=tuple(entry.columns.exclude),
            where=entry.where,
            row_filter=self.member.row_filter if self.member is not None and entry.where else "",
            meanings=tuple(sorted({m for c in columns for m in self.meanings.get(c.type_oid, {}).items()})),
        )
        return CatalogTable(schema, entry, relation, tuple(holders), children)

    def _storage_problems(self, holders: list[CatalogRelation]) -> list[Problem]:
        problems = []
        if self.relation.name.schema == "_headwater":
            problems.append(error("reserved_schema", self.where, "the schema _headwater is the lake's own folder"))
        for holder in holders:
            where = str(holder.name)
            if holder.kind == FOREIGN:
                message = f"the partition is a {KINDS[FOREIGN]}: its rows are not in the log"
                problems.append(error("foreign_table", where, message, "detach it, or list the other partitions"))
            elif holder.persistence != "p":
                kind = "unlogged" if holder.persistence == "u" else "temporary"
                remedy = f"ALTER TABLE {where} SET LOGGED" if kind == "unlogged" else "take it out of the pipeline file"
                problems.append(error(f"{kind}_table", where, f"it is {kind}: its rows are not in the log", remedy))
        return problems

    def _rights_problems(self, relations: list[CatalogRelation], columns: tuple[Column, ...]) -> list[Problem]:
        problems = []
        for relation in relations:
            where = str(relation.name)
            if not relation.may_use_schema:
                remedy = f"GRANT USAGE ON SCHEMA {quote_ident(relation.name.schema)} TO {self.role}"
                problems.append(error("no_usage", where, "the role may not use its schema", remedy))
            if missing := relation.unreadable(column.name for column in columns):
                what = f"the role may not read it (missing: {', '.join(map(quote_ident, missing))})"
                remedy = f"{grant_select([where], self.entry, columns)} TO {self.role}"
                problems.append(error("no_select", where, what, remedy))
            if relation.row_security_active:
                message = "row-level security hides rows from the role, and a load would miss them"
                remedy = f"ALTER ROLE {self.role} BYPASSRLS, or ALTER TABLE {where} DISABLE ROW LEVEL SECURITY"
                problems.append(error("row_security", where, message, remedy))
        return problems

    def _identity_problems(self, holders: list[CatalogRelation]) -> list[Problem]:
        problems = []
        for holder in holders:
            reason = why_writers_would_fail(holder, self.version, self.publishes_generated)
            if holder.kind == ORDINARY and reason:
                message = f"published, its UPDATE and DELETE would fail at the source: {reason}"
                problems.append(error("no_identity", str(holder.name), message, identity_remedy(holder)))
        return problems
