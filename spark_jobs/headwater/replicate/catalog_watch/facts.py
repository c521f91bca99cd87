"""What a watch reads of the source's catalog: a digest of the rows that matter, in one query, and all that a judgement
takes, under one snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from headwater.lake.registry import TableRecord
from headwater.source.catalog.meanings import MEANINGS, of_users, read_meanings
from headwater.source.catalog.relations import (
    ORDINARY,
    PARTITIONED,
    CatalogRelation,
    descendants,
    one_snapshot,
    read_relations,
)
from headwater.source.catalog.standing import Standing, read_standings
from headwater.source.connection import Connection, errors_named
from headwater.source.publication.parts import Narrowed, narrowed_members
from headwater.source.publication.publication import Publication, inserts_name, read_publication
from headwater.waiting.source_state import registered

_DIGEST: Final = f"""
with recursive tree(relation, parent, link) as (
    select inhrelid, inhparent, xmin from pg_catalog.pg_inherits where inhparent = any(%(roots)s::oid[])
    union all
    select i.inhrelid, i.inhparent, i.xmin from tree t join pg_catalog.pg_inherits i on i.inhparent = t.relation),
here(ids) as (select array(select unnest(%(ids)s::oid[]) union select relation from tree))
select md5(concat_ws('|',
    (select string_agg(concat_ws(',', c.oid, n.nspname, c.relname, c.relreplident, c.relpersistence, c.relnatts,
                                 c.relfilenode), ';' order by c.oid)
     from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
     where c.oid = any((select ids from here)::oid[])),
    (select string_agg(concat_ws(',', relation, parent, link), ';' order by relation) from tree),
    (select string_agg(concat_ws(',', i.indexrelid, i.indisprimary, i.indimmediate, i.indisvalid, i.indislive,
                                 i.indisreplident, i.indpred is null), ';' order by i.indexrelid)
     from pg_catalog.pg_index i where i.indrelid = any((select ids from here)::oid[]) and i.indisunique),
    (select string_agg(concat_ws(',', a.attrelid, a.attnum), ';' order by a.attrelid, a.attnum)
     from pg_catalog.pg_attribute a where a.attrelid = any(%(tables)s::oid[]) and a.attnum > 0 and a.attnotnull),
    (select string_agg(concat_ws(',', a.attrelid, a.attnum), ';' order by a.attrelid, a.attnum)
     from pg_catalog.pg_attribute a
     where a.attrelid = any(%(tables)s::oid[]) and a.attnum > 0 and a.attgenerated <> ''),
    (select string_agg(concat_ws(',', a.attrelid, a.attnum, a.attname), ';' order by a.attrelid, a.attnum)
     from pg_catalog.pg_attribute a
     where a.attrelid = any(%(roots)s::oid[]) and a.attnum > 0 and not a.attisdropped),
    (select string_agg(concat_ws(',', p.oid, p.pubname, p.puballtables, p.pubinsert, p.pubupdate, p.pubdelete,
                                 p.pubtruncate, p.pubviaroot), ';' order by p.oid)
     from pg_catalog.pg_publication p where p.pubname = any(%(publications)s)),
    (select string_agg(concat_ws(',', r.oid, r.prrelid, r.prqual is null, r.prattrs is null), ';' order by r.oid)
     from pg_catalog.pg_publication_rel r join pg_catalog.pg_publication p on p.oid = r.prpubid
     where p.pubname = any(%(publications)s) and r.prrelid = any(%(ids)s::oid[])),
    (select string_agg(s.oid::text, ';' order by s.oid)
     from pg_catalog.pg_publication_namespace s join pg_catalog.pg_publication p on p.oid = s.pnpubid
     where p.pubname = any(%(publications)s)),
    (select string_agg(concat_ws(',', m.root, m.key, m.value), ';' order by m.root, m.key) from ({MEANINGS}) m)))
"""


@dataclass(frozen=True, slots=True)
class CatalogFacts:
    """The catalog under one snapshot: what the judgement reads."""

    version: int
    standings: tuple[Standing, ...]
    relations: dict[int, CatalogRelation]
    below: dict[int, tuple[int, ...]]
    publications: dict[str, Publication | None]
    narrowed: dict[int, Narrowed]
    meanings: dict[int, dict[str, str]]

    def meanings_of(self, record: TableRecord) -> dict[str, str]:
        types = (column.type_oid for column in record.schema.columns)
        return {key: value for oid in types for key, value in self.meanings.get(oid, {}).items()}

    def holders(self, root: CatalogRelation) -> list[CatalogRelation]:
        if root.kind != PARTITIONED:
            return [root]
        found = (self.relations.get(i) for i in self.below.get(root.relation_id, ()))
        return [relation for relation in found if relation is not None and relation.kind == ORDINARY]


@errors_named("source")
def read_digest(connection: Connection, tables: Mapping[str, TableRecord], publication: str) -> str:
    """Another one means that something has changed which may matter to the `tables`. `publication`: the pipeline's."""
    schemas = [record.schema for record in tables.values()]
    ids = {leaf.relation_id for schema in schemas for leaf in schema.leaves}
    asked = {
        "ids": sorted(ids | {schema.relation_id for schema in schemas}),
        "tables": sorted(schema.relation_id for schema in schemas),
        "roots": sorted({schema.relation_id for schema in schemas if schema.partitioned}),
        "publications": [publication, inserts_name(publication)],
        "types": _types(tables),
    }
    row = connection.execute(_DIGEST, asked).fetchone()
    assert row is not None
    return str(row[0])


@errors_named("source")
def read_facts(connection: Connection, tables: Mapping[str, TableRecord], publication: str) -> CatalogFacts:
    asked = registered(tables.values(), publication)
    with one_snapshot(connection):
        standings = read_standings(connection, asked)
        below = descendants(
            connection, [record.schema.relation_id for record in tables.values() if record.schema.partitioned]
        )
        ids = {table.relation_id for table in asked} | {i for leaves in below.values() for i in leaves}
        return CatalogFacts(
            connection.info.server_version,
            standings,
            read_relations(connection, ids),
            below,
            {name: read_publication(connection, name) for name in (publication, inserts_name(publication))},
            narrowed_members(connection, publication),  # the other publishes inserts, which have no old rows
            read_meanings(connection, _types(tables)),
        )


def _types(tables: Mapping[str, TableRecord]) -> list[int]:
    return of_users(column.type_oid for record in tables.values() for column in record.schema.columns)
